"""Steps of any length, and ends of sessions, on a tiny random model that samples given texts."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxshare import FinishReason, Sampler, Samplers
from jaxshare.decoding.samplers import SamplerPlaces
from jaxshare.models import LoadedModel
from jaxshare.serving import Format, Result, Workers, WorkersLayout, box_answers, code_answers
from jaxshare.serving.evaluation.arithmetic import instruction
from tests.helpers import TINY, init, mostly_slow
from tests.serving.branches.test_branches import embedded

NAMES = ("Alice", "Bob")
BARE = Format(
    system="{names} work.",
    system_alone="{names} works.",
    history_header="",
    others_header="",
    own_header="",
    step_header="{name} {step}:",
    question="",
    finisher="\n\nSo: \\boxed{",
    code_finisher="\n\nSo:\n```python\n",
    forbidden=(),
)
PROBLEM = "Solve these problems and return comma-separated answers \\boxed{answer1, ..., answer5}:\n1. 47 + 38"


@functools.cache
def model() -> LoadedModel:
    """The embedded model's tokenizer over a random model of two small layers and 16,384 tokens."""
    config = dataclasses.replace(TINY, vocab_size=402, max_positions=16384)
    return dataclasses.replace(embedded(), config=config, params=init(config), workers=None)


def quiet() -> Sampler:
    """A sampler that ends nothing: no line break, no brace, no backtick, no stop token."""
    vocabulary = model().tokenizer.get_vocab()
    breaks = [
        token for text, token in vocabulary.items() if "Ċ" in text or "}" in text or "`" in text
    ]
    return Sampler(temperature=1.0, forbidden=(*model().generation.stop_tokens, *breaks))


def session(**options) -> Workers:
    """A session of shapes that all tests share."""
    return Workers(
        model(),
        options.pop("problem", PROBLEM),
        **{
            "names": NAMES,
            "format": BARE,
            "sampler": quiet(),
            "budget": 6000,
            "ask_every": 0,
            "step_tokens": 128,
            **options,
        },
    )


def go(workers: Workers, passes: int) -> None:
    for _ in workers.stream(workers.passes + passes):
        pass


def force(workers: Workers, **texts: str) -> None:
    """Makes workers sample these texts token by token, from the next pass in which each samples.

    The others draw quietly.
    """
    queues = {
        name: model().tokenizer.encode(text, add_special_tokens=False)
        for name, text in texts.items()
    }
    usual = workers._session.state.samplers
    while any(queues.values()) and workers.finish_reason is None:
        before = workers.drawn
        samplers = [workers._session.sampler] * workers.rows.num_rows
        for name, queue in queues.items():
            if queue:
                samplers[workers.row(name)] = Sampler(bias={queue[0]: 1e6})
        workers._session.state = dataclasses.replace(
            workers._session.state, samplers=Samplers.stack(samplers, places=SamplerPlaces(8))
        )
        go(workers, 1)
        for name, queue in queues.items():
            del queue[: workers.drawn[name] - before[name]]
    workers._session.state = dataclasses.replace(workers._session.state, samplers=usual)


def texts(workers: Workers) -> list[tuple[str, int, str]]:
    return [(step.worker, step.number, step.text) for step in workers.steps]


def history(workers: Workers) -> np.ndarray:
    """Keys of the first layer in the block that steps move to."""
    block = workers.blocks.index(workers.layout.prompt)
    start, length = int(workers.cache.offsets[block]), int(workers.cache.lengths[block])
    return np.asarray(workers.cache.keys[0])[:, start : start + length]


# Steps of any length.


@pytest.mark.slow
def test_a_step_of_5000_tokens_is_one_step_wherever_it_is_written():
    tight, roomy = session(), session(step_tokens=5600)
    for workers in (tight, roomy):
        force(workers, Bob=" Short.\n\n")
        go(workers, 5000)
        force(workers, Alice=".\n\n")
        go(workers, 20)
    assert texts(tight) == texts(roomy) and tight.drawn == roomy.drawn
    first, second = tight.steps[:2]
    assert (first.worker, first.text) == ("Bob", "Bob 1: Short.\n\n")
    assert (
        second.worker == "Alice"
        and second.number == 1
        and len(second.tokens) > 5000
        and second.ended is not None
    )
    np.testing.assert_allclose(history(tight), history(roomy), rtol=0, atol=1e-4)
    assert (
        tight.cache.capacities[tight.blocks.index("Bob")]
        >= 5000
        > tight._session.growth.capacities[tight.blocks.index("Bob")]
    )
    assert (
        tight.cache.capacities[tight.blocks.index("Alice")]
        == tight._session.growth.capacities[tight.blocks.index("Alice")]
    )


@pytest.mark.slow
def test_a_code_block_of_2000_tokens_moves_whole():
    workers, opening = session(stop_on="never"), "Here it is:\n\n```python\n"
    force(workers, Alice=opening)
    while workers.drawn["Alice"] < 2000:
        force(workers, Alice="x = 1.\n\n")
        go(workers, 40)
    assert [step.ended for step in workers.steps] == [None, None]
    force(workers, Alice="\n```\n\n")
    go(workers, 1)
    [step] = [step for step in workers.steps if step.ended is not None]
    assert step.worker == "Alice" and len(step.tokens) > 2000 and step.text.count(".\n\n") > 30
    assert step.text.startswith(f"Alice 1:{opening}") and step.text.endswith("\n```\n\n")


@pytest.mark.slow
def test_a_step_may_use_all_the_room_that_there_is_for_what_moves():
    """Alone, a worker stops when it has filled the history's capacity; a shorter step fits
    there."""
    small = dataclasses.replace(
        model(), config=dataclasses.replace(model().config, max_positions=2200)
    )
    options = dict(
        names=NAMES[:1], format=BARE, sampler=quiet(), budget=6000, ask_every=0, step_tokens=64
    )
    workers = Workers(small, PROBLEM, **options)
    workers.run()
    room = int(workers._session.growth.capacities[0])
    assert workers.finish_reason is FinishReason.CACHE_FULL and room > 1500
    assert (
        room - 20
        < int(workers.cache.lengths[0]) + int(workers.cache.lengths[workers.blocks.index("Alice")])
        <= room
    )
    again = Workers(small, PROBLEM, **options)
    go(again, room - 200)
    force(again, Alice=".\n\n")
    go(again, 40)
    assert again.finish_reason is None and again.steps[0].ended is not None, (
        "it overlaps its place in the history, and is moved all the same"
    )
    assert again.steps[1].tokens


@pytest.mark.slow
def test_a_long_step_goes_on_after_a_save(tmp_path):
    whole, halves = session(), session()
    go(whole, 500)
    go(halves, 300)
    halves.save(tmp_path, wait=True)
    halves.close()
    restored = Workers.restore(model(), tmp_path)
    assert restored.cache.capacities[restored.blocks.index("Alice")] > 300
    go(restored, 200)
    for workers in (whole, restored):
        force(workers, Alice=".\n\n")
        go(workers, 4)
    assert texts(whole) == texts(restored)
    np.testing.assert_array_equal(history(whole), history(restored))


@pytest.mark.slow
def test_the_trace_of_long_steps_is_computed_again():
    from jaxshare.models import reencode

    workers = session(record=True)
    go(workers, 300)
    force(workers, Bob=".\n\n", Alice=".\n\n")
    go(workers, 10)
    _, cache = reencode(model(), workers.trace, at=[])
    block = workers.blocks.index(workers.layout.prompt)
    start, length = int(cache.offsets[block]), int(cache.lengths[block])
    np.testing.assert_allclose(
        np.asarray(cache.keys[0])[:, start : start + length], history(workers), rtol=0, atol=1e-4
    )


# Answers.

INVALID = [
    "\\boxed{answer1, ..., answer5}",
    "\\boxed{answer1,...,answer5}",
    "\\boxed{ }",
    "\\boxed{?}",
    "\\boxed{...}",
    "\\boxed{\\ldots}",
    "\\boxed{your answer here}",
]


@pytest.mark.slow
def test_boxes_that_are_no_answers_change_nothing():
    """Against a session that looks for no answers at all."""
    deaf, workers = session(stop_on="never"), session()
    for i, box in enumerate(INVALID):
        for one in (deaf, workers):
            force(one, Alice=f" It is {box}.\n\n", Bob=f" So {box}.\n\n" if i % 2 else " No.\n\n")
            go(one, 3)
        assert workers.finish_reason is None, box
    assert texts(deaf) == texts(workers)
    np.testing.assert_array_equal(deaf.cache.lengths, workers.cache.lengths)
    assert workers.finish().extra_passes > 0, "nothing of it is the answer"
    force(workers, Bob=" It is \\boxed{85}.\n\n")
    assert (
        workers.finish_reason is FinishReason.ANSWER
        and workers.finish().value == "85"
        and workers.finish().extra_passes == 0
    )


def test_a_validator_of_ones_own_decides():
    workers = session(kind=box_answers(lambda text: text.count(",") == 1))
    force(workers, Alice=" First \\boxed{85}.\n\n")
    go(workers, 3)
    assert workers.finish_reason is None
    force(workers, Bob=" Both \\boxed{85, 84}.\n\n")
    assert (workers.finish_reason, workers.finish().value) == (FinishReason.ANSWER, "85, 84")


def test_programs_end_a_session_where_they_parse_and_are_of_the_language():
    workers = session(kind="code")
    for block in (
        "```\n5 3\n1 2\n```",
        "```\n42\n```",
        "```text\nprint(1)\n```",
        "```python\ndef f(:\n```",
    ):
        force(workers, Alice=f" Input:\n\n{block}\n\n")
        go(workers, 3)
        assert workers.finish_reason is None, block
    force(workers, Bob=" So:\n\n```python\nprint(1)\n```\n\n")
    assert (workers.finish_reason, workers.finish().value) == (FinishReason.ANSWER, "print(1)")
    other = session(kind=code_answers("cpp"))
    force(
        other,
        Alice=" So:\n\n```python\nprint(1)\n```\n\n",
        Bob=" So:\n\n```cpp\nint main() {}\n```\n\n",
    )
    assert (other.finish_reason, other.finish().value) == (FinishReason.ANSWER, "int main() {}")


def test_the_early_stop_takes_what_there_is_from_an_unfinished_program():
    workers = session(kind="code", finisher_tokens=4)
    go(workers, 20)
    answer = workers.finish()
    assert answer.value == answer.text.partition("```python\n")[2] and answer.extra_passes


def test_what_ends_a_session_can_be_chosen():
    stop = model().generation.stop_tokens[0]
    workers = session(stop_on="eos")
    assert not {*model().generation.stop_tokens} & {*workers._session.sampler.forbidden}
    workers._session.sampler = dataclasses.replace(
        workers._session.sampler, bias=dict.fromkeys(model().generation.stop_tokens, -1e6)
    )
    force(workers, Alice=" It is \\boxed{85}.\n\n")
    assert workers.finish_reason is None, "an answer is not what ends this one"
    samplers = [
        Sampler(bias={stop: 1e6}),
        *[workers._session.sampler] * (workers.rows.num_rows - 1),
    ]
    workers._session.state = dataclasses.replace(
        workers._session.state, samplers=Samplers.stack(samplers, places=SamplerPlaces(8))
    )
    go(workers, 50)
    assert (
        workers.finish_reason is FinishReason.STOP is workers.result().finish_reason
        and workers.passes < 50
    )
    assert (workers.finish().value, workers.finish().extra_passes) == ("85", 0)
    never = session(stop_on="never", sampler=Sampler(bias={stop: 1e6}))
    go(never, 40)
    assert never.finish_reason is None and len(never.steps[0].tokens) > 10
    assert stop not in [token for step in never.steps for token in step.tokens]
    with pytest.warns(DeprecationWarning, match=r"Workers.ended is now Workers.finish_reason"):
        assert workers.ended == "stopped"
    with pytest.raises(ValueError, match="stop_on is 'box'; it must be one of answer, eos, never"):
        session(stop_on="box")


@pytest.mark.slow
def test_a_session_that_nothing_ends_runs_to_its_budget():
    stop = model().generation.stop_tokens[0]
    never = session(stop_on="never", budget=100, sampler=Sampler(bias={stop: 1e6}))
    assert never.run().finish_reason is FinishReason.LENGTH and stop not in [
        token for step in never.steps for token in step.tokens
    ]


@pytest.mark.parametrize(
    ("reason", "printed", "former"),
    [
        (FinishReason.ANSWER, "answer", "answer"),
        (FinishReason.STOP, "stop", "stopped"),
        (FinishReason.CACHE_FULL, "cache_full", "full"),
        (FinishReason.LENGTH, "length", "budget"),
        (FinishReason.PAUSED, "paused", "paused"),
    ],
)
def test_a_result_says_why_it_is_over_and_has_the_former_words(reason, printed, former):
    result = Result(NAMES, [], {}, 5, reason, 0.0, 0.0, 0)
    assert result.as_json()["finish_reason"] == printed and "ended" not in result.as_json()
    with pytest.warns(DeprecationWarning, match=r"Result.ended is now Result.finish_reason"):
        assert result.ended == former


def test_answers_are_taken_from_single_steps():
    """A worker's open fence is not closed by another's, and one that opens a step is found."""
    workers = session(kind="code")
    force(workers, Alice=" So:\n```python\nx = (\n", Bob="```python\nprint(1)\n```\n\n")
    assert (workers.finish_reason, workers.finish().value) == (FinishReason.ANSWER, "print(1)")


# The early finisher.


@pytest.mark.parametrize(
    ("layout", "sees"),
    mostly_slow(
        [
            ("interleaved", ("history", "Alice", "Carol", "Bob")),
            ("combined", ("history", "Alice", "Carol", "Bob")),
            (
                WorkersLayout(
                    {
                        "Alice": ("prompt", "past", "Alice"),
                        "Carol": ("prompt", "Carol"),
                        "Bob": ("prompt", "Carol", "Bob"),
                    },
                    {"Alice": "past", "Carol": "done"},
                ),
                None,
            ),
            ("contiguous", ("prompt", "Alice", "Carol", "Bob")),
        ],
        several=True,
    ),
)
def test_the_finisher_sees_every_block_that_a_worker_writes_once(layout, sees):
    if sees is None:
        with pytest.raises(ValueError, match="no worker sees the block 'done'"):
            session(names=("Alice", "Carol", "Bob"), layout=layout)
        layout = dataclasses.replace(layout, moves={"Alice": "past"})
        sees = ("prompt", "Carol", "past", "Alice", "Bob")
    workers = session(names=("Alice", "Carol", "Bob"), layout=layout, finisher_tokens=12)
    force(workers, Alice=" One.\n\n")
    go(workers, 30)
    answer = workers.finish()
    assert workers.layout.overview("Bob") == sees
    assert answer == workers.finish(sees=sees)
    assert (
        len(
            {workers.finish(sees=sees[:i] + sees[i + 1 :]).text for i in range(len(sees))}
            - {answer.text}
        )
        > 1
    ), "each of them counts"


@pytest.mark.slow
def test_an_answer_in_an_unfinished_step_is_known_to_the_finisher_where_steps_are_private():
    """The embedded model puts Alice's unfinished result in the box of the early stop."""
    workers = Workers(
        embedded(),
        f"{instruction(2)}\n1. 47 + 38\n2. 12 * 7",
        names=NAMES,
        layout="interleaved",
        sampler=Sampler(),
        budget=64,
        ask_every=0,
        finisher_tokens=12,
        passes_at_once=1,
    )
    while not any("Answer 1: 85" in step.text for step in workers.steps):
        go(workers, 1)
    [alice] = [step for step in workers.steps if step.worker == "Alice"]
    assert alice.ended is None and workers.finish().value.startswith("85, ")
