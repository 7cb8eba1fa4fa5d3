"""The teacher of workers, its lessons, and the training on them. Oracles: a real session that is
made to sample the same tokens, the text that each token could see according to the trace's integers
alone, Python's arithmetic on the prompt, and the core's own re-encoding."""

import dataclasses
import itertools
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, KVCache, Layout, Sampler
from jaxshare.attention.plan import make_plan
from jaxshare.models import EMBEDDED, load, reencode_logits
from jaxshare.models.config import ModelConfig
from jaxshare.models.loading import LoadedModel
from jaxshare.serving import Format, Workers
from jaxshare.serving.evaluation.arithmetic import Dependent, SumsProblem, make_problem
from jaxshare.serving.workers.layouts import worker_names
from jaxshare.trace.trace import Trace
from scripts.train import lessons, pair_attention, sessions, teacher, train_workers
from tests.core.trace.test_trace import seen_by
from tests.paths import ROOT

LAYOUTS = ("contiguous", "interleaved", "combined")
QUESTION = " Am I redundant?"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(EMBEDDED, dtype="float32")


@pytest.fixture(scope="module")
def format(model) -> Format:
    return dataclasses.replace(Format.of(model), question=QUESTION)


@pytest.fixture(scope="module")
def script(model, format):
    return teacher.Script.of(model.tokenizer, model.config.vocab_size, model.generation, format)


RATES = {"slips": 0.05, "yields": 0.0, "early": 0.0}
"""Of lapses, where a test says no other."""


def play(script, seed: int, count: int, layout: str, **options):
    """A lesson and its problem, of five to ten questions, every second one with dependent
    questions."""
    rng = random.Random(seed)
    problem = options.pop("problem", None) or make_problem(
        rng, rng.randint(5, 10), dependent=seed % 2 == 1
    )
    rates = [options.pop(name, rate) for name, rate in RATES.items()]
    lapses = teacher.Lapses(*rates)
    options = {"ask_every": 64, "seed": seed, "lapses": lapses} | options
    return sessions.play(script, problem, worker_names(count), layout, rng, **options), problem


def sampled(lesson) -> dict[int, list[tuple[int, int]]]:
    """For each row (after which token of the trace, what was sampled)."""
    found: dict[int, list[tuple[int, int]]] = {}
    for at, target in zip(lesson.at.tolist(), lesson.targets.tolist(), strict=True):
        found.setdefault(int(lesson.trace.rows[lesson.trace.row_pass[at]]), []).append((at, target))
    return found


def seen_text(codec, trace: Trace, token: int) -> str:
    """All that one token sees, itself last, read from the trace's integers."""
    places = seen_by(trace, token)
    return codec.decode([int(trace.tokens[places[place]]) for place in sorted(places)])


# Against a session


@dataclasses.dataclass(frozen=True)
class Forced:
    """What a model does to a cache without a thought: the logits say what a script has for the row
    when so many tokens are cached.

    What is cleared is encoded anew at once, and moves keep what they move, so that their number
    says which pass it is.
    """

    config: ModelConfig
    implementation: str | None = None

    def apply(self, params, tokens, count, cache: KVCache, layout: Layout, *, every: bool = False):
        cache = cache.advance(make_plan(cache, layout, count, tokens.shape[1]))
        rows = params["said"][jnp.sum(cache.lengths)][: tokens.shape[0]]
        return jax.nn.one_hot(rows.astype(jnp.int32), self.config.vocab_size), cache


@dataclasses.dataclass(frozen=True, eq=False)
class ForcedModel(LoadedModel):
    @property
    def module(self):
        return Forced(self.config)


def forced(model: LoadedModel, lesson) -> ForcedModel:
    """A model that samples what the lesson has sampled."""
    trace = lesson.trace
    said = np.zeros((1024, 256), np.float32)  # of one shape, so that sessions share programs
    at = np.arange(trace.num_passes)[:, None]
    of_pass = ((trace.placement_starts <= at) & (at < trace.placement_ends)).sum(axis=1)
    for row, pairs in sampled(lesson).items():
        for at, target in pairs:
            said[of_pass[trace.passes[trace.row_pass[at]]], row] = target
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}
    return ForcedModel(**{**fields, "params": {"said": jnp.asarray(said)}})


def by_name(trace: Trace, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """A trace's arrays with its blocks in the order of these names; capacities are the session's
    own affair."""
    places = [trace.names.index(name) for name in names]
    number = {place: i for i, place in enumerate(places)}
    arrays = {
        name: getattr(trace, name)
        for name in (
            "tokens",
            "row_pass",
            "rows",
            "passes",
            "placement_tokens",
            "placement_indices",
            "placement_starts",
            "placement_ends",
        )
    }
    blocks = np.asarray([number[block] for block in trace.placement_blocks.tolist()])
    return {
        **arrays,
        "starts": trace.starts[:, places],
        "visible": trace.visible[:, places],
        "placement_blocks": blocks,
    }


@pytest.mark.parametrize(
    ("layout", "count", "seed", "move"),
    [
        ("combined", 4, 1, "rotate"),
        pytest.param("combined", 2, 1, "reencode", marks=pytest.mark.slow),
        pytest.param("interleaved", 4, 2, "reencode", marks=pytest.mark.slow),
        *(
            pytest.param(layout, count, seed, "rotate", marks=pytest.mark.slow)
            for layout in LAYOUTS
            for count, seed in ((1, 0), (4, 1), (6, 2))
            if (layout, count) != ("combined", 4)
        ),
    ],
)
def test_a_lesson_is_the_trace_of_a_session_that_samples_its_tokens(
    script, model, format, layout, count, seed, move
):
    lesson, problem = play(script, seed, count, layout, move=move)
    # all that one worker has to write, and what the context has room for
    budget = 512 if count == 1 else 256
    session = Workers(
        forced(model, lesson),
        problem.prompt(),
        names=worker_names(count),
        layout=layout,
        budget=budget,
        format=format,
        step_tokens=128,
        sampler=Sampler(temperature=0.0),
        seed=seed,
        ask_every=64,
        record=True,
        passes_at_once=64,
        move=move,
    )
    for _ in session.stream():
        pass
    assert session.finish_reason is FinishReason.ANSWER
    names = lesson.trace.names
    ours, theirs = by_name(lesson.trace, names), by_name(session.trace, names)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    if count > 1:
        assert any(step.asked for step in session.steps), "nobody was asked"
    drawn = {
        session.names[row]: [target for _, target in pairs]
        for row, pairs in sampled(lesson).items()
    }
    for name, tokens in drawn.items():
        written = [
            token
            for step in sorted(session.steps, key=lambda step: step.number)
            if step.worker == name
            for token in step.tokens
        ]
        assert [token for token in tokens if token != script.end] == written


WORKING = re.compile(r"Question (\d+): [\d+*-]+\.(?: [\d+*-]+=\d+(?:, [\d+*-]+=\d+)+\.)")
"""That of a question that stands by itself, with the full stop that ends it."""


def can_be_boxed(problem: SumsProblem, seen: str) -> str:
    """What the finisher is to say: answers that stand there, or whose working does."""
    known = {int(number) for number in re.findall(r"Answer (\d+): \d+\.", seen)} | {
        int(found[1]) for found in WORKING.finditer(seen)
    }
    return (
        ", ".join(
            str(answer) if number in known else "?"
            for number, answer in enumerate(text_of(problem), 1)
        )
        + "}"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_finisher_guesses_from_what_the_last_worker_sees(script, layout):
    """At the end, and on the way: what it then boxes, answers that are worked out and not yet
    written down among them."""
    asked, at = script.codec.encode(script.format.finisher), (20, 27, 34, 41, 48)
    problem = make_problem(random.Random(3), 7)
    lesson, _ = play(script, 0, 2, layout, problem=problem, budget=60, guess=True, guesses=at)
    said = sampled(lesson)[2]
    texts = script.codec.decode([target for _, target in said]).split("}")[:-1]
    begins = [
        token
        for token, _ in said
        if lesson.trace.tokens[token - len(asked) + 1 : token + 1].tolist() == asked
    ]
    assert len(texts) == len(begins) == len(at) + 1 and lesson.trace.rows[-1] == 2
    worked_out = 0
    for text, first in zip(texts, begins, strict=True):
        seen = seen_text(script.codec, lesson.trace, first).partition("assistant")[2]
        assert text + "}" == can_be_boxed(problem, seen)
        assert seen.count("Alice 6:") == 1, "sees an earlier guess"
        worked_out += len(
            {found[1] for found in WORKING.finditer(seen)}
            - {*re.findall(r"Answer (\d+): \d+\.", seen)}
        )
    assert worked_out and len({*texts}) > 2
    alone, _ = play(script, 0, 2, layout, problem=problem, budget=60)
    assert lesson.trace.num_tokens - alone.trace.num_tokens - len(asked) * len(begins) - len(
        said
    ) in (1, 2), "what was sampled last"
    ours, theirs = sampled(lesson), sampled(alone)
    assert all([t for _, t in ours[row]] == [t for _, t in theirs[row]] for row in (0, 1)), (
        "a guess changes nothing"
    )


# What the teacher says, by what could be seen


def text_of(problem: SumsProblem) -> list[int]:
    """The answers, by Python's arithmetic on the prompt."""
    lines = [line.partition(". ")[2] for line in problem.prompt().splitlines()[1:]]
    operators = {"red": "+", "sold": "-", "boxes": "*"}
    found: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        if "answer" not in line:
            left, right = re.findall(r"\d+", line)
            operator = (
                next(
                    (operators[word] for word in re.findall(r"[a-z]+", line) if word in operators),
                    None,
                )
                or line.split()[1]
            )
            found[number] = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
            }[operator]
    for number, line in enumerate(lines, 1):
        if "answer" in line:
            source, added = map(int, re.findall(r"\d+", line))
            found[number] = found[source] * (2 if "twice" in line else 1) + added
    return [found[number] for number in range(1, len(lines) + 1)]


def steps_of(codec, lesson) -> list[tuple[int, list[tuple[int, int]]]]:
    """Each step: its row, and (after which token, what) of all that was sampled for it, its end
    included."""
    found = []
    for row, pairs in sampled(lesson).items():
        held: list[tuple[int, int]] = []
        for at, target in pairs:
            held.append((at, target))
            if codec.decode([target]) == "\n\n":
                found.append((row, held))
                held = []
        if held:
            found.append((row, held))
    return found


def before(codec, trace: Trace, step: list[tuple[int, int]], end: int) -> str:
    """What could be seen when the token was sampled that begins at character `end` of a step,
    without what the step has by then."""
    length = 0
    for at, target in step:
        if length >= end:
            text = seen_text(codec, trace, at)
            written = codec.decode([t for _, t in step])[:length]
            assert text.endswith(written)
            return text[: len(text) - len(written)]
        length += len(codec.decode([target]))
    raise AssertionError("the step is shorter")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", range(1, 7))
def test_what_is_said_follows_from_what_could_be_seen(script, layout, count):
    codec, names = script.codec, worker_names(count)
    for seed in (count, count + 7):
        lesson, problem = play(script, seed, count, layout)
        answers, boxes = text_of(problem), 0
        assert list(problem.answers) == answers
        for _, step in steps_of(codec, lesson):
            text = codec.decode([target for _, target in step])
            for found in re.finditer(r"Question (\d): (?:Answer \d: )?([\d+*-]+)\.", text):
                question = problem.questions[int(found[1]) - 1]
                if isinstance(question, Dependent):
                    seen = before(codec, lesson.trace, step, found.start(2))
                    assert f"Answer {question.source}: {answers[question.source - 1]}." in seen, (
                        "worked with what nobody had said"
                    )
            for found in re.finditer(r"Answer (\d): (\d+)\.", text):
                assert int(found[2]) == answers[int(found[1]) - 1]
            for found in re.finditer(r"(Alice|Bob|Carol|Dave|Erin|Frank) has it", text):
                assert found[1] in names
                number = re.findall(r"Question (\d)", text[: found.start()])[-1]
                seen = before(codec, lesson.trace, step, found.start())
                assert f"Question {number}" in seen.partition("assistant")[2], (
                    "left to somebody who was not seen to have it"
                )
            if "boxed" in text:
                whole = re.search(r"\\boxed\{([^}]*)\}", text)
                seen = before(codec, lesson.trace, step, text.index("\\") + 1)
                assert all(
                    f"Answer {number}: {answer}." in seen
                    for number, answer in enumerate(answers, 1)
                )
                if whole:
                    boxes += 1
                    assert whole[1] == ", ".join(map(str, answers))
        assert boxes
        assert not np.isin(
            np.flatnonzero(lesson.weights == 0),
            np.flatnonzero(~np.isin(lesson.targets, codec.encode("123456789"))),
        ).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_question_is_answered_truthfully(script, layout):
    """A worker is redundant whose step before took nothing up, or only what another has taken up,
    by the headers that it sees."""
    codec, said = script.codec, {"yes": 0, "no": 0}
    for seed in range(8):
        lesson, _ = play(script, seed, 4, layout, ask_every=32, slips=0.2)
        by_row: dict[int, list] = {}
        for row, step in steps_of(codec, lesson):
            by_row.setdefault(row, []).append(step)
        for row, steps in by_row.items():
            for last, step in itertools.pairwise(steps):
                text = codec.decode([target for _, target in step])
                if not (found := re.match(r" (yes|no)\.", text)):
                    continue
                own = taken(codec.decode([target for _, target in last]))
                seen = {*seen_by(lesson.trace, step[0][0]).values()}
                rows = lesson.trace.rows[lesson.trace.row_pass]
                others = set()
                for other in {*range(4)} - {row}:
                    fed = [
                        token for token in np.flatnonzero(rows == other).tolist() if token in seen
                    ]
                    others |= taken(codec.decode(lesson.trace.tokens[fed].tolist()))
                assert (found[1] == "yes") == (own <= others), (own, others, text)
                said[found[1]] += 1
    assert min(said.values()) > 0, said


def taken(text: str) -> set[int]:
    """The questions that a worker has taken up and not left at once."""
    left = r"(?!\d|: ?(?!Answer)[A-Z]|: Answer \d: \?)"
    return {int(n) for n in re.findall(rf"Question (\d){left}", text)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_question_that_is_taken_too_early_is_left_for_later(script, layout):
    """The answer that it goes on from is named, and is not to be seen; that it was taken is not
    learned."""
    codec, left = script.codec, 0
    for seed in (1, 3, 5):
        lesson, problem = play(script, seed, 2, layout, early=0.5, slips=0.0)
        answers = text_of(problem)
        weight = dict(zip(lesson.at.tolist(), lesson.weights.tolist(), strict=True))
        for _, step in steps_of(codec, lesson):
            text = codec.decode([target for _, target in step])
            for found in re.finditer(r"Question (\d): Answer (\d): (\?|\d+)", text):
                seen, source = before(codec, lesson.trace, step, found.start(3)), int(found[2])
                is_there = f"Answer {source}: {answers[source - 1]}." in seen
                assert is_there == (found[3] != "?")
                assert text[found.start(3) :].startswith("?. ") or is_there
                places = np.cumsum([0] + [len(codec.decode([target])) for _, target in step])
                at, _ = step[int(np.searchsorted(places, found.start(1)))]
                assert weight[at] == 0 or is_there
                left += not is_there
            if box := re.search(r"boxed\{([^}]*)\}", text):
                assert box[1] == ", ".join(map(str, answers))
    assert left > 2


def test_workers_clash_and_turn_to_something_else(script):
    """Six workers of five questions: two begin with the same one, both see it in the next pass, and
    one goes elsewhere."""
    for layout in ("contiguous", "combined"):
        lesson, _ = play(script, 0, 6, layout, problem=make_problem(random.Random(5)), slips=0.0)
        firsts = [
            script.codec.decode([target for _, target in pairs])[:24]
            for _, pairs in sorted(sampled(lesson).items())
        ]
        claims = [re.match(r" Question (\d): (\d|[A-Z])", text) for text in firsts]
        assert len({claim[1] for claim in claims}) == 5
        assert [claim[2].isdigit() for claim in claims].count(False) == 1
    lesson, _ = play(script, 1, 4, "interleaved", slips=0.3)
    texts = [
        script.codec.decode([target for _, target in pairs]) for pairs in sampled(lesson).values()
    ]
    assert any("has it" in text for text in texts), "where steps are private, a result shows it"


def test_even_problems_end_everybody_in_the_same_pass(script):
    """Four workers of five questions: all have written one when all go for the last."""
    lengths = set()
    for seed in range(8):
        problem = lessons._even_problem(script, random.Random(seed), 5)
        lesson, _ = play(script, seed, 4, "combined", problem=problem, slips=0.0, ask_every=0)
        at, ends, seconds = lesson.trace.passes[lesson.trace.row_pass], set(), []
        for _, steps in itertools.groupby(steps_of(script.codec, lesson), key=lambda held: held[0]):
            (_, first), *others = steps
            ends.add(int(at[first[-1][0]]))
            seconds += [
                text
                for _, step in others
                if "Question" in (text := script.codec.decode([t for _, t in step]))
            ]
        assert len(problem.questions) == 5 and len(ends) == 1
        assert len({re.findall(r"Question (\d)", text)[0] for text in seconds}) == 1, (
            "all go for the one that is left"
        )
        assert len(seconds) == 4 and sum("has it" in text for text in seconds) == 3
        lengths |= ends
    assert len(lengths) > 1


@pytest.mark.parametrize("count", [2, 4, 6])
def test_lapses_are_mended_and_not_learned(script, count):
    """Both leave a question that they have begun at once, and for a while all believe that it is
    taken; then somebody takes it."""
    codec, names, wrong = script.codec, worker_names(count), {"has it": 0, "I wait": 0}
    for seed in range(6):
        problem = make_problem(random.Random(seed), max(1, count - 1))
        lesson, _ = play(
            script,
            seed,
            count,
            "combined",
            problem=problem,
            slips=0.0,
            yields=0.7,
            ask_every=0,
        )
        weight = dict(
            zip(
                zip(lesson.at.tolist(), lesson.targets.tolist(), strict=True),
                lesson.weights.tolist(),
                strict=True,
            )
        )
        boxes = 0
        for row, step in steps_of(codec, lesson):
            text, weights = (
                codec.decode([t for _, t in step]),
                [weight[pair] for pair in step for _ in codec.decode([pair[1]])],
            )
            for found in re.finditer(r": (\w+) has it\.", text):
                phrase = {*weights[found.start(1) : found.end()]}
                assert len(phrase) == 1 and found[1] in names
                if phrase == {0.0}:
                    assert names.index(found[1]) > row, "the other had it"
                    wrong["has it"] += 1
            for found in re.finditer("I wait", text):
                seen = (
                    before(codec, lesson.trace, step, found.start()).partition("assistant")[2]
                    + text[: found.start()]
                )
                free = {*range(1, len(problem.questions) + 1)} - taken(seen)
                assert (weights[found.start()] == 0) == bool(free), (
                    "waits though there is something to do"
                )
                wrong["I wait"] += bool(free)
            if whole := re.search(r"\\boxed\{([^}]*)\}", text):
                assert whole[1] == ", ".join(map(str, text_of(problem)))
                boxes += 1
        assert boxes and script.end in lesson.targets
    assert min(wrong.values()) > 0, wrong


def test_an_unknown_layout_and_a_model_without_a_tokenizer_are_refused(script, model, format):
    with pytest.raises(
        ValueError, match="layout is 'ring'; it must be one of contiguous, interleaved, combined"
    ):
        play(script, 0, 2, "ring")
    with pytest.raises(ValueError, match="needs a model with a tokenizer and a stop token"):
        teacher.Script.of(None, 402, model.generation, format)


@pytest.mark.parametrize("system", [True, False])
def test_a_chat_is_the_conversation_that_the_template_renders(script, model, system):
    """Against the template's own rendering of all turns: what Alice has written is learned, to the
    end of each turn, and no more."""
    problems = [make_problem(random.Random(seed)) for seed in range(3)]
    lesson = sessions.chat(script, [(p.prompt(), p.solution()) for p in problems], system=system)
    turns = [
        [{"role": "user", "content": p.prompt()}, {"role": "assistant", "content": p.solution()}]
        for p in problems
    ]
    messages = [{"role": "system", "content": "Alice works alone."}] * system + [
        *itertools.chain.from_iterable(turns)
    ]
    whole = model.tokenizer.apply_chat_template(messages, tokenize=False)
    assert model.tokenizer.decode(lesson.trace.tokens) + "\n" == whole
    assert (lesson.trace.tokens[lesson.at + 1] == lesson.targets).all() and (
        lesson.weights == 1
    ).all()
    end = model.tokenizer.eos_token
    assert model.tokenizer.decode(lesson.targets) == end.join(p.solution() for p in problems) + end


# Batches


@pytest.fixture(scope="module")
def drawn(script):
    return [lessons.draw(script, random.Random(seed)) for seed in range(4)]


def test_packed_lessons_see_themselves_alone(drawn):
    packed = lessons.pack(drawn)
    assert packed.trace.num_tokens == sum(lesson.trace.num_tokens for lesson in drawn)
    first = 0
    for lesson in drawn:
        count = lesson.trace.num_tokens
        for token in random.Random(0).sample(range(count), 12):
            expected = {
                place: other + first for place, other in seen_by(lesson.trace, token).items()
            }
            assert seen_by(packed.trace, first + token) == expected
        first += count
    assert packed.trace.tokens[packed.at].tolist() == [
        t for lesson in drawn for t in lesson.trace.tokens[lesson.at].tolist()
    ]


@pytest.mark.slow
def test_pairs_give_the_logits_of_the_core(model, drawn):
    pairs = pair_attention
    packed = lessons.pack(drawn[:3])
    shape = lessons.Shape(tokens=packed.trace.num_tokens, tiles=80, blocks=80)
    traces, found, at, _, _ = lessons.batch(packed, shape)
    ours = pairs.logits(model.module, model.params, traces, found, jnp.asarray(at))
    theirs = reencode_logits(
        model.module, model.params, jax.tree.map(jnp.asarray, traces), jnp.asarray(at)
    )
    count = len(packed.at)
    np.testing.assert_allclose(ours[0, :count], theirs[0, :count], atol=2e-3, rtol=1e-3)


def test_groups_depend_on_seed_and_number_alone(script):
    shape = lessons.Shape()
    one, again = (lessons.group(script, 3, 5, shape) for _ in range(2))
    other = lessons.group(script, 3, 6, shape)
    assert all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(again), strict=True)
    )
    assert not np.array_equal(one[0][0].tokens, other[0][0].tokens)
    held = sum(int(batch[0].seen.any(-1).sum()) for batch in one)
    assert held > 0.75 * shape.tokens * len(one)
    with pytest.raises(
        ValueError, match=r"most lessons are longer than a batch of Shape\(tokens=256"
    ):
        lessons.group(script, 3, 5, lessons.Shape(tokens=256))


def test_a_lesson_that_no_batch_holds_is_left_out(script):
    """One in several is a little longer than the rest."""
    rng = random.Random("lessons/3/5")
    lengths = sorted(lessons.draw(script, rng).trace.num_tokens for _ in range(24))
    shape = lessons.Shape(tokens=lengths[-3])
    held = lessons.group(script, 3, 5, shape)
    assert sum(int(batch[0].seen.any(-1).sum()) for batch in held) == sum(lengths[:-2])


# Training


def arguments(folder: Path, *more: str) -> list[str]:
    return [
        "--layers",
        "1",
        "--hidden",
        "72",
        "--steps",
        "4",
        "--accumulate",
        "1",
        "--evaluate-every",
        "0",
        "--run-dir",
        str(folder / "run"),
        "--out",
        str(folder / "out"),
        "--json",
        "--learning-rate",
        "0.02",
        "--context",
        "4096",
        *more,
    ]


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(load(folder).params)
    }


@pytest.mark.slow
def test_two_steps_lower_the_loss_of_a_tiny_model(script, format):
    train = train_workers
    args, _ = train.parse(["--steps", "8", "--learning-rate", "0.02"])
    model, optimizer = load(EMBEDDED, dtype="float32"), train.optimizer_of(args)
    config = dataclasses.replace(model.config, num_layers=1)
    module = dataclasses.replace(model.module, config=config)
    params = module.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32), method="causal")
    lesson = lessons.pack([lessons.draw(script, random.Random(1))])
    batch = lessons.batch(lesson, lessons.Shape(tokens=lesson.trace.num_tokens))
    state, total, losses = (
        {"params": params, "opt": optimizer.init(params)},
        train.empty_total(params),
        [],
    )
    for _ in range(3):
        total = train.add_gradients(total, state["params"], batch, module=module, dtype="float32")
        with jax.numpy_dtype_promotion("standard"):  # optax's own
            state, total, found = train.update(state, total, optimizer=optimizer)
        losses.append(float(found["loss"]))
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] == pytest.approx(np.log(config.vocab_size), rel=0.1)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--steps", "0"], "--steps must be positive; got 0"),
        (["--hidden", "144"], "--hidden is 144; give a multiple of 72, and --layers"),
        (["--layers", "2", "--hidden", "100"], "--hidden is 100; give a multiple of 72"),
        (["--layers", "2", "--model", "x"], "give one of them"),
        (["--processes", "-1"], "must be at least 0"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(capsys, tmp_path, more, words):
    with pytest.raises(SystemExit) as error:
        train_workers.main(["--run-dir", str(tmp_path), *more])
    assert error.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_killed_gives_the_same_parameters(tmp_path):
    """From scratch: killed with no notice after a save, resumed; and the model that is exported
    answers sessions."""

    def start(folder: Path, *more: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            "scripts.train.train_workers",
            *arguments(folder, *more),
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
        )

    whole = start(tmp_path / "whole")
    said = json.loads(whole.communicate(timeout=600)[0])
    assert (
        whole.returncode == 0
        and said["steps"] == 4
        and (tmp_path / "whole" / "run" / "training.png").is_file()
    )
    killed = start(tmp_path / "killed", "--save-seconds", "0", "--steps", "4")
    saves = tmp_path / "killed" / "run" / "saves"
    while killed.poll() is None and not (
        saves.is_dir() and any(path.name.isdigit() for path in saves.iterdir())
    ):
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = start(tmp_path / "killed", "--resume")
    assert json.loads(again.communicate(timeout=600)[0])["steps"] == 4
    expected = weights(tmp_path / "whole" / "out")
    for name, array in weights(tmp_path / "killed" / "out").items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    refused = start(tmp_path / "whole")
    refused.communicate()
    assert refused.returncode == 2, "a run that is there is not begun anew"
    session = Workers(load(tmp_path / "whole" / "out"), "1. 2 + 3", budget=8)
    assert (
        session.format.question
        and session.run().passes == 8
        and session.model.config.max_positions == 4096
    )
