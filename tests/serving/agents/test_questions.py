"""Questions to a person: answered at once, or by a later run with the same journal."""

import asyncio
import dataclasses

import pytest

from jaxshare.serving.agents import (
    BestOfN,
    Budget,
    PausedError,
    Runtime,
    agent,
    ask,
    first,
    gather,
    llm,
    run,
    spawn,
    tool,
    wait_for,
)
from jaxshare.serving.agents.backends import ScriptedModel
from jaxshare.serving.agents.journal import Journal
from jaxshare.serving.agents.search_log import SearchLog


def model() -> ScriptedModel:
    return ScriptedModel({"": lambda call: f"{call.agent} {call.seed % 10}"})


def finished(runtime: Runtime, what, *args):
    return asyncio.run(runtime.run(what, *args)).accepted.value


def open_questions(file, what, *args, **options):
    """(the questions that a run ends with, the model's calls)."""
    script = model()
    with Journal.open(file) as journal, pytest.raises(PausedError) as caught:
        finished(Runtime(script, journal=journal, **options), what, *args)
    assert all(
        one.id in str(caught.value) and one.text in str(caught.value)
        for one in caught.value.questions
    )
    with Journal.open(file) as journal:
        assert journal.questions == caught.value.questions
    return caught.value.questions, len(script.calls)


@agent
async def buyer(thing):
    idea = await llm(f"price of {thing}")
    answer = await ask(f"buy {thing}?", options=["yes", "no"])
    return idea, answer, await llm("done")


@agent
async def shop():
    children = [spawn(buyer, thing) for thing in ("tea", "milk")]
    count, plan = await gather(ask("how many?", returns=int), llm("plan"))
    return count + 1, plan, [await child.result() for child in children]


def test_all_goes_on_until_all_waits_for_persons_and_a_later_run_goes_on(tmp_path):
    file = tmp_path / "j"
    questions, calls = open_questions(file, shop)
    assert calls == 3
    assert sorted((one.text, one.options, one.schema, one.agent) for one in questions) == [
        ("buy milk?", ("yes", "no"), None, "buyer"),
        ("buy tea?", ("yes", "no"), None, "buyer"),
        ("how many?", (), {"type": "integer"}, "shop"),
    ]
    ids = {one.text: one.id for one in questions}
    left, calls = open_questions(file, shop, answers={ids["buy milk?"]: "no"})
    assert calls == 1 and {one.text for one in left} == {"buy tea?", "how many?"}
    with Journal.open(file) as journal:
        journal.answer(ids["how many?"], "5")
        journal.answer(ids["buy tea?"], "yes")
        assert not journal.questions
    script = model()
    with Journal.open(file) as journal:
        count, _, bought = finished(Runtime(script, journal=journal), shop)
    assert count == 6 and [one[1] for one in bought] == ["yes", "no"] and len(script.calls) == 1
    with Journal.open(file) as journal:
        assert finished(Runtime(None, journal=journal), shop)[0] == 6
    assert script.calls


def test_ids_are_the_same_without_a_journal_and_answers_can_be_given_at_once():
    with pytest.raises(PausedError) as one:
        run(buyer, "tea", model=model())
    with pytest.raises(PausedError) as two:
        run(buyer, "tea", model=model(), seed=1)
    assert [q.id for q in one.value.questions] == [q.id for q in two.value.questions]
    answers = {one.value.questions[0].id: "yes"}
    assert finished(Runtime(model(), answers=answers), buyer, "tea")[1] == "yes"


@dataclasses.dataclass
class Order:
    count: int
    name: str

    def __post_init__(self):
        if self.count < 1:
            raise ValueError("an order has a count of 1 or more")


def test_a_person_is_asked_again_until_the_answer_fits(tmp_path):
    @agent
    async def orders():
        return await ask("order?", returns=Order), await ask("name?", returns=str)

    given, seen = iter(["x", {"count": 0, "name": "tea"}, '{"count": 2, "name": "tea"}', "Ann"]), []

    def person(question):
        seen.append((question.text, question.problem))
        return next(given)

    async def later(question):
        await asyncio.sleep(0)
        return person(question)

    with Journal.open(tmp_path / "j") as journal:
        runtime = Runtime(None, ask=person, journal=journal)
        assert finished(runtime, orders) == (Order(2, "tea"), "Ann")
    with Journal.open(tmp_path / "j") as journal:  # the journal has JSON, and makes objects of it
        assert finished(Runtime(None, journal=journal), orders) == (Order(2, "tea"), "Ann")
    assert [text for text, _ in seen] == ["order?"] * 3 + ["name?"]
    assert seen[0][1] == seen[3][1] == "" and "an order has a count of 1" in seen[2][1]
    given = iter(['{"count": 2, "name": "tea"}', '"Ann"'])
    assert finished(Runtime(None, ask=later), orders) == (Order(2, "tea"), "Ann")


def test_what_does_not_fit_stays_open_with_the_problem(tmp_path):
    with pytest.raises(PausedError) as caught:
        finished(Runtime(model(), ask=lambda _: "perhaps"), buyer, "tea")
    assert caught.value.questions[0].problem == "the last answer: 'perhaps' is none of yes, no"
    with pytest.raises(PausedError) as caught:
        finished(Runtime(model(), ask=lambda _: None), buyer, "tea")
    assert not caught.value.questions[0].problem


def test_the_error_of_a_person_reaches_the_agent():
    @agent
    async def asks():
        try:
            return await ask("one?")
        except OSError as error:
            return str(error)

    def person(_):
        raise OSError("hung up")

    assert finished(Runtime(None, ask=person), asks) == "hung up"


def test_answers_are_checked_before_any_work(tmp_path):
    questions, _ = open_questions(tmp_path / "j", buyer, "tea")
    id = questions[0].id
    for answers, words in (
        ({"beef": "yes"}, f"there is no question 'beef' in the journal .*; open questions: {id}"),
        ({id: "perhaps"}, f"the answer to question {id} is 'perhaps': .* none of yes, no"),
        ({id: 7}, "7 is no text"),
    ):
        with Journal.open(tmp_path / "j") as journal, pytest.raises(ValueError, match=words):
            Runtime(model(), journal=journal, answers=answers)
    with Journal.open(tmp_path / "j") as journal:
        assert journal.questions == questions
    for options, words in (({"ask": 5}, "ask is 5; give a func"), ({"answers": 5}, "answers is 5")):
        with pytest.raises(TypeError, match=words):
            Runtime(None, **options)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: ask(""), ValueError, "the question is ''; give a text"),
        (lambda: ask(5), ValueError, "the question is 5"),
        (lambda: ask("a", options=[]), ValueError, "at least one, and none twice"),
        (lambda: ask("a", options=["b", "b"]), ValueError, "at least one, and none twice"),
        (lambda: ask("a", options=[5]), ValueError, "options is \\[5"),
        (lambda: ask("a", options=["b"], returns=int), ValueError, "give one of them"),
        (lambda: ask("a", returns=[int]), TypeError, "returns is "),
    ],
)
def test_odd_questions_are_refused_at_once(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_a_pause_is_no_end_of_a_path(tmp_path):
    """Tools of `finally` are called when the path has ended, and `with` blocks end with it."""
    count = []

    def closed():
        count.append(1)

    @agent
    async def asks():
        try:
            return await ask("one?")
        finally:
            await tool(closed)

    questions, _ = open_questions(tmp_path / "j", asks)
    assert not count
    with Journal.open(tmp_path / "j") as journal:
        runtime = Runtime(None, journal=journal, answers={questions[0].id: "x"})
        assert finished(runtime, asks) == "x" and count == [1]


def test_each_path_of_a_search_asks_and_budgets_of_time_do_not_keep_a_pause(tmp_path):
    @agent(supervisor=BestOfN(2, value=lambda state: len(state.value), budget=Budget(seconds=60)))
    async def tries():
        return await llm("a") + await ask("more?")

    questions, calls = open_questions(tmp_path / "j", tries)
    assert len(questions) == calls == 2 and len({one.id for one in questions}) == 2
    with Journal.open(tmp_path / "j") as journal:
        answers = {questions[0].id: "x", questions[1].id: "longer"}
        runtime = Runtime(None, journal=journal, answers=answers)
        assert finished(runtime, tries).endswith("longer")
        assert "ask" in {state.waits_for for state in SearchLog.of(runtime).runs[0].states}


def test_questions_among_others():
    @agent
    async def several():
        index, value = await first(ask("one?"), llm("other"))
        try:
            await wait_for(ask("late?"), 0.05)
        except TimeoutError:
            return index, value

    assert finished(Runtime(model()), several)[0] == 1  # nobody answers, and no run pauses

    @agent
    async def both():
        one, two = spawn(waits_child), spawn(waits_child)
        return await gather(one, two, ask("three?"))

    @agent
    async def waits_child():
        return await gather(ask("four?"), llm("x"))

    with pytest.raises(PausedError) as caught:
        finished(Runtime(model()), both)
    assert sorted(one.text for one in caught.value.questions) == ["four?", "four?", "three?"]
