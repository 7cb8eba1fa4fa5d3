"""Workers over one cache, against a plain host loop.

The loop feeds tokens, detects steps by a regular expression and moves them outside jit.
"""

import dataclasses
import functools
import re
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
import transformers

from jaxshare import FinishReason, KVCache, Layout, Sampler, Samplers
from jaxshare.models import layers
from jaxshare.seeds import seed_words, stream_seed
from jaxshare.serving import Format, Workers, WorkersLayout, combined, contiguous, interleaved
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.workers.text import answers
from tests.helpers import mostly_slow
from tests.serving.branches.test_branches import embedded as model
from tests.serving.branches.test_branches import plain_greedy, problem

# The embedded model has not learned these texts, but its vocabulary can write them, and what it
# writes has sentences and blank lines.
CHAT = Format(
    system="{names} work together.",
    system_alone="{names} works alone.",
    history_header="Steps:",
    others_header="\n\nOthers:",
    own_header="...\n\nOwn:",
    step_header="{name} {step}:",
    greeting_first=" Question 1:",
    greeting_later=" Question 2:",
    question=" Answer 1:",
    finisher="\n\nAnswer: \\boxed{",
    code_finisher="\n\nAnswer:\n```\n",
    forbidden=(),
)
WARM = Sampler(temperature=0.8)
draw = jax.jit(Samplers.sample)
NAMES = ("Alice", "Bob", "Carol")
BUDGET = 70


def start(names=NAMES[:2], **options) -> Workers:
    """A session, of the same shapes where a test needs no others, so that tests share programs."""
    return Workers(
        model(),
        options.pop("text", problem().prompt()),
        names=names,
        **{"budget": BUDGET, "sampler": WARM, "max_workers": 3, "format": CHAT, **options},
    )


def endless() -> Sampler:
    """A sampler with which no worker stops or closes a box before the budget."""
    closing = [token for text, token in model().tokenizer.get_vocab().items() if "}" in text]
    return dataclasses.replace(WARM, forbidden=(*model().generation.stop_tokens, *closing))


def written(session: Workers) -> dict[str, list[tuple[int, list[int]]]]:
    steps = sorted(session.steps, key=lambda step: step.number)
    return {
        name: [(step.number, [*step.tokens]) for step in steps if step.worker == name]
        for name in session.names
    }


def run(session: Workers) -> dict[str, list[tuple[int, list[int]]]]:
    for _ in session.stream():
        pass
    return written(session)


def encode(text: str) -> list[int]:
    return model().tokenizer.encode(text, add_special_tokens=False)


def plain_run(
    names,
    layout: WorkersLayout,
    format: Format,
    sampler: Sampler,
    passes: int,
    asked: dict[str, set[int]],
    *,
    reencode=False,
):
    """The same session, one pass at a time on the host.

    Args:
      asked: for each worker the steps that open with the question; the others as in `Workers`.

    Returns:
      For each worker (number of the step, its sampled tokens), and the tokens in each block in the
        end.
    """
    loaded, tokenizer = model(), model().tokenizer
    prompt = tokenizer.encode(format.prompt(tokenizer, problem().prompt(), names))
    blocks = list(layout.blocks)
    # One arena for all layouts, that they share programs: the oracle reads all of it for each row.
    room = [896 if block == layout.prompt else 256 for block in blocks]
    cache = KVCache.create(loaded.config, [*room, *[256] * (8 - len(room))], jnp.float32)
    rows = [layout.sees[name] for name in names]

    def forward(tokens: list[list[int]], rows: Sequence[Sequence[str]]) -> np.ndarray:
        """One program for 16 tokens at a time, and one for a token of each row."""
        nonlocal cache
        width = 16 if max(map(len, tokens)) > 1 else 1
        numbers = Layout.from_blocks(
            [[blocks.index(b) for b in row] for row in rows], num_rows=3, width=6
        )
        for begin in range(0, max(map(len, tokens)), width):
            padded, count = np.zeros((3, width), np.int32), [0] * 3
            for r, row in enumerate(tokens):
                count[r] = len(row[begin : begin + width])
                padded[r, : count[r]] = row[begin : begin + width]
            logits, cache = layers.forward(
                loaded.config,
                loaded.params,
                padded,
                count,
                cache,
                numbers,
                implementation="reference",
            )
        return np.asarray(logits)

    forward([prompt], [[layout.prompt]])
    for block, text in layout.texts.items():
        forward([encode(text)], [[block]])
    queues = [encode("\n\n") + encode(format.opening(name, 1, names=names)) for name in names]
    in_block = [list(queue) for queue in queues]
    steps, keys = [[(1, [])] for _ in names], seed_words([stream_seed(0, r) for r in range(3)])
    for _ in range(passes):
        width = 16 if any(len(q) > 1 for q in queues) else 1
        feed, queues = [q[:width] for q in queues], [q[width:] for q in queues]
        logits = forward(feed, rows)
        drawn = [*(sum(len(tokens) for _, tokens in row) for row in steps), *[0] * (3 - len(steps))]
        tokens = np.asarray(draw(Samplers.stack([sampler] * 3), logits, keys, jnp.asarray(drawn)))
        for r, name in enumerate(names):
            if queues[r]:
                continue
            number, step = steps[r][-1]
            if not feed[r] or tokens[r] in loaded.generation.stop_tokens:
                continue
            step.append(int(tokens[r]))
            queues[r] = [int(tokens[r])]
            if re.search(r"[.?!][\"')\]*_]*\s*\n\n", tokenizer.decode(step)):
                if target := layout.moves.get(name):
                    source = blocks.index(layout.written(name))
                    if reencode:
                        cache = cache.clear(source)
                        forward([in_block[r]], [[target]])
                    else:
                        cache = cache.move(source, blocks.index(target))
                    opening = format.opening(name, number + 1, ask=number + 1 in asked[name])
                else:
                    opening = format.question if number + 1 in asked[name] else ""
                queues[r] += encode(opening)
                in_block[r] = []
                steps[r].append((number + 1, []))
            in_block[r] += queues[r]
    return dict(zip(names, steps, strict=True)), dict(
        zip(blocks, np.asarray(cache.lengths).tolist(), strict=False)
    )


def filled(session: Workers) -> dict[str, int]:
    return {
        block: int(session.cache.lengths[session.blocks.index(block)])
        for block in session.layout.blocks
    }


def asked(session: Workers) -> dict[str, set[int]]:
    return {
        name: {s.number for s in session.steps if s.worker == name and s.asked}
        for name in session.names
    }


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (combined, 2),
        *(
            pytest.param(make, number, marks=pytest.mark.slow)
            for make, number in (
                (contiguous, 1),
                (contiguous, 2),
                (contiguous, 3),
                (interleaved, 1),
                (interleaved, 2),
                (interleaved, 3),
                (combined, 1),
                (combined, 3),
            )
        ),
    ],
)
def test_the_loop_equals_a_plain_one(make, number):
    names = NAMES[:number]
    session = start(names, layout=make, ask_every=25)
    got = run(session)
    layout = make(names, CHAT)
    format = CHAT if layout.moves else dataclasses.replace(CHAT, history_header="")
    expected, lengths = plain_run(names, layout, format, WARM, session.passes, asked(session))
    assert got == expected
    assert filled(session) == lengths
    assert sum(map(len, got.values())) > number, "no step ended: the test shows nothing about steps"


@pytest.mark.slow
def test_private_and_shared_blocks_mix_in_a_layout_of_ones_own():
    layout = WorkersLayout(
        {
            "Alice": ("prompt", "notes", "past", "Bob", "Alice"),
            "Bob": ("past", "prompt", "Bob"),
            "Carol": ("prompt", "Carol", "notes", "own"),
        },
        moves={"Bob": "past", "Carol": "Carol"},
        texts={"notes": "47 + 38 = 85."},
    )
    session = start(NAMES, layout=layout, ask_every=0)
    got = run(session)
    expected, lengths = plain_run(
        NAMES, layout, CHAT, WARM, session.passes, {n: set() for n in NAMES}
    )
    assert got == expected
    assert filled(session) == lengths


@pytest.mark.slow
def test_moving_by_encoding_anew():
    session = start(move="reencode", ask_every=25)
    got = run(session)
    expected, lengths = plain_run(
        NAMES[:2], session.layout, CHAT, WARM, session.passes, asked(session), reencode=True
    )
    assert got == expected and sum(map(len, asked(session).values()))
    assert filled(session) == lengths


@pytest.mark.slow
def test_encoding_anew_differs_from_rotating_for_several_workers_alone():
    """The text can be the same all the same: what is cached of the steps is not."""
    cached = []
    for move in ("rotate", "reencode"):
        session = start(ask_every=25, move=move)
        run(session)
        history, last = session.blocks.index("history"), session.cache.values[-1]
        offset, length = (int(a[history]) for a in (session.cache.offsets, session.cache.lengths))
        cached.append(np.asarray(last)[:, offset : offset + length])
    common = min(each.shape[1] for each in cached)
    assert not np.allclose(cached[0][:, :common], cached[1][:, :common], rtol=1e-2)
    assert run(start(NAMES[:1], move="reencode")) == run(start(NAMES[:1])), (
        "for one worker they are the same"
    )


@pytest.mark.parametrize(
    ("layout", "dispatches"),
    mostly_slow(
        [
            ("combined", (1, 5)),
            ("combined", (32,)),  # a program of its own
            ("contiguous", (1, 5, 32)),
            ("interleaved", (1, 5, 32)),
        ],
        several=True,
    ),
)
def test_the_same_seed_gives_the_same_run_whatever_the_dispatch_and_the_streaming(
    layout, dispatches
):
    options = dict(layout=layout, ask_every=20)
    sessions = [start(**options), *(start(passes_at_once=n, **options) for n in dispatches)]
    runs = [run(session) for session in sessions]
    assert all(each == runs[0] for each in runs)
    assert all(asked(session) == asked(sessions[0]) for session in sessions)
    halting = start(**options)
    halting.run([7, 30, 69])
    assert written(halting) == runs[0]


def test_another_seed_gives_another_run():
    hot = Sampler(temperature=1.5)
    assert run(start(sampler=hot, seed=1)) != run(start(sampler=hot)) == run(start(sampler=hot))


def test_workers_that_cannot_see_each_other_are_alone():
    apart = WorkersLayout({name: ("prompt", name) for name in NAMES})
    told = dataclasses.replace(
        CHAT, system="Work.", system_alone="Work.", greeting_first="", greeting_later=""
    )
    alone = {}
    for i, name in enumerate(NAMES):
        alone |= run(
            start(
                (name,),
                layout=WorkersLayout({name: ("prompt", name)}),
                ask_every=0,
                seed=stream_seed(0, i),
                format=told,
            )
        )
    assert run(start(NAMES, layout=apart, ask_every=0, format=told)) == alone


def test_events_are_the_text():
    # in which the likeliest second steps end
    session = start(sampler=dataclasses.replace(endless(), temperature=0.0), budget=100)
    texts: dict[tuple[str, int], str] = {}
    passes = 0
    for event in session.stream():
        assert event.passes >= passes or event.passes > session.passes - 16
        texts[event.worker, event.step] = texts.get((event.worker, event.step), "") + event.text
        assert not event.ends or texts[event.worker, event.step].endswith("\n\n")
    assert texts == {(s.worker, s.number): s.text for s in session.steps}
    step = next(s for s in session.steps if s.number == 2 and s.ended is not None)
    assert step.text == f"{step.worker} 2:" + model().tokenizer.decode(step.tokens)
    assert step.ended - step.began + 1 >= len(step.tokens) > 0
    assert session.host_syncs <= -(-session.passes // 16)


def test_the_question_is_asked_once_in_so_many_tokens():
    for seed in range(3):
        session = start(NAMES, ask_every=30, seed=seed)
        run(session)
        questions = sum(map(len, asked(session).values()))
        tokens = session.result().tokens
        # Each crossing asks one worker, at its next step; one that is chosen twice before that is
        # asked once.
        assert 1 <= questions <= tokens // 30
        for step in session.steps:
            assert step.asked == step.text.startswith(
                f"{step.worker} {step.number}: Answer 1:" if step.number > 1 else "never"
            )
    silent = start(NAMES, ask_every=0)
    assert run(silent) and not any(asked(silent).values())


@pytest.mark.slow
def test_two_workers_share_the_work():
    options = dict(sampler=Sampler(), budget=320, format=None, max_workers=2)
    alone, both = start(NAMES[:1], **options).run(), start(**options).run()
    for result in (alone, both):
        assert result.finish_reason is FinishReason.ANSWER and all(
            arithmetic.check("".join(s.text for s in result.steps), problem())
        )
        assert (
            result.answers[320].value == ", ".join(map(str, problem().answers))
            and result.answers[320].extra_passes == 0
        )
    assert both.passes < 0.8 * alone.passes
    assert "Bob 1: Question 5" in both.texts["Bob"]
    assert both.texts == start(**options, implementation="reference").run().texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "move"),
    [
        ("combined", "rotate"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("interleaved", "rotate"), ("combined", "reencode"))
        ),
    ],
)
def test_steps_longer_than_what_is_set_aside_change_nothing(layout, move):
    options = dict(
        layout=layout,
        move=move,
        ask_every=25,
        sampler=dataclasses.replace(WARM, temperature=0.6),
        budget=100,
    )
    roomy, tight = start(**options), start(step_tokens=16, passes_at_once=4, **options)
    assert run(roomy) == run(tight) and asked(roomy) == asked(tight)
    assert filled(roomy) == filled(tight)
    longest = max(len(step.tokens) for step in tight.steps)
    assert longest > tight._session.growth.capacities[tight._session.roster.block("Alice")], (
        "no step was long: the test shows nothing"
    )


@pytest.mark.slow
def test_a_full_history_ends_the_session_with_all_that_was_written(tmp_path):
    roomy = start()
    used = len(
        model().tokenizer.encode(CHAT.prompt(model().tokenizer, problem().prompt(), NAMES[:2]))
    )
    tight = start(history_tokens=used + 60)
    got, expected = run(tight), run(roomy)
    assert tight.finish_reason is FinishReason.CACHE_FULL and tight.passes < BUDGET
    assert int(tight.cache.lengths[0]) <= used + 60
    for name, steps in got.items():
        text = [token for _, tokens in steps for token in tokens]
        assert (
            text == [token for _, tokens in expected[name] for token in tokens][: len(text)]
            and len(text) > 10
        )
    assert tight.result().as_json()["finish_reason"] == "cache_full"
    tight.save(tmp_path, wait=True)
    over = Workers.restore(model(), tmp_path)
    assert over.finish_reason is FinishReason.CACHE_FULL and list(over.stream()) == []
    with pytest.raises(ValueError, match=r"the session is over \(cache_full\), so Dan cannot join"):
        over.add("Dan")


# finishing early


@pytest.mark.slow
def test_a_guess_is_what_a_plain_loop_would_write():
    session = start(NAMES[:1], sampler=Sampler(), finisher_tokens=12)
    for _ in session.stream(40):
        pass
    before = np.asarray(session.cache.lengths).tolist()
    answer = session.finish()
    tokenizer, finisher = model().tokenizer, CHAT.finisher
    fed = (
        tokenizer.encode(CHAT.prompt(tokenizer, problem().prompt(), NAMES[:1]))
        + encode("\n\n")
        + encode(CHAT.opening("Alice", 1))
    )
    numbers = [s.number for s in session.steps]
    for step in session.steps:
        fed += (encode(CHAT.opening("Alice", step.number)) if step.number > 1 else []) + step.tokens
    made, _ = plain_greedy(fed + encode(finisher), 12, model)
    text = finisher + tokenizer.decode(made, skip_special_tokens=True)
    closed = next(
        (
            i
            for i in range(1, len(made) + 1)
            if answers.boxed(finisher + tokenizer.decode(made[:i]))
        ),
        len(made),
    )
    assert answer.text == finisher + tokenizer.decode(made[:closed], skip_special_tokens=True), text
    assert (
        answer.value == answers.boxed(text)
        and answer.passes == 40
        and answer.extra_passes > 0
        and numbers
    )
    assert np.asarray(session.cache.lengths).tolist() == before


@pytest.mark.slow
def test_one_run_answers_at_several_budgets():
    options = dict(sampler=Sampler(), budget=320, format=None, max_workers=2)
    result = start(**options).run([16, 100, 320])
    assert list(result.answers) == [16, 100, 320]
    assert result.answers[16].extra_passes and result.answers[16].passes == 16
    assert not result.answers[320].extra_passes and result.answers[320].value == ", ".join(
        map(str, problem().answers)
    )
    single = start(**options)
    for _ in single.stream(16):
        pass
    assert single.finish() == result.answers[16] == single.finish()
    assert result.texts == start(**options).run().texts


@pytest.mark.slow
def test_finishing_a_program():
    session = start(sampler=Sampler(), finisher_tokens=30, kind="code")
    for _ in session.stream(20):
        pass
    answer = session.finish()
    assert answer.text.startswith(CHAT.code_finisher) and answer.value == answers.code(answer.text)
    with pytest.raises(ValueError, match="there is no block 'attic'"):
        session.finish(sees=["attic"])


# while it runs


def halves(session: Workers, then) -> dict[str, list[tuple[int, list[int]]]]:
    for _ in session.stream(24):
        pass
    then(session)
    return run(session)


def test_pausing_all_changes_nothing():
    def rest(session: Workers) -> None:
        for name in session.names:
            session.pause(name)
        assert (
            list(session.stream()) == []
            and session.passes == 24
            and session.result().finish_reason is FinishReason.PAUSED
        )
        for name in session.names:
            session.resume(name)

    assert halves(start(), rest) == run(start())


def test_a_run_in_which_all_are_paused_says_so():
    session = start(sampler=endless())
    for name in session.names:
        session.pause(name)
    with pytest.warns(UserWarning, match="nothing was written.*resume"):
        assert session.run().finish_reason is FinishReason.PAUSED
    session.resume(session.names[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.run()


def test_others_go_on_beside_a_paused_worker():
    session = start(sampler=endless())
    for _ in session.stream(24):
        pass
    before = written(session)
    session.pause("Bob")
    for _ in session.stream(40):
        pass
    after = written(session)
    assert after["Bob"] == before["Bob"]
    assert sum(len(t) for _, t in after["Alice"]) > sum(len(t) for _, t in before["Alice"]) + 8
    session.resume("Bob")
    assert run(session)["Bob"] != before["Bob"]


def test_a_worker_that_joins_at_once_was_there_from_the_start():
    fixed = dataclasses.replace(
        CHAT, system="Workers.", system_alone="Workers.", greeting_first="", greeting_later=""
    )
    apart = dataclasses.replace(fixed, others_header="", own_header="")
    # A worker that joins draws from a stream of its own; greedily none draws.
    start_cold = functools.partial(start, sampler=dataclasses.replace(WARM, temperature=0.0))
    session = start_cold(NAMES[:1], format=apart)
    session.add("Bob")
    assert session.names == ("Alice", "Bob") and session.layout == combined(NAMES[:2], apart)
    assert run(session) == run(start_cold(NAMES[:2], format=apart))
    headed = start_cold(NAMES[:1], format=fixed)
    headed.add("Bob")
    assert run(headed) == run(start_cold(NAMES[:2], format=fixed))


@pytest.mark.slow
def test_workers_leave_and_others_take_their_place():
    session = start(
        NAMES[:2], format=dataclasses.replace(CHAT, others_header="", own_header=""), max_workers=2
    )
    for _ in session.stream(20):
        pass
    lengths, bob = np.asarray(session.cache.lengths), session.blocks.index("Bob")
    step = next(s for s in session.steps if s.worker == "Bob" and s.ended is None)
    session.remove("Bob")
    after = np.asarray(session.cache.lengths)
    # What Bob has sampled last goes with the rest, though no pass has fed it yet.
    assert (
        after[0] == lengths[0] + lengths[bob] + 1
        and after[bob] == 0
        and session.names == ("Alice",)
    )
    assert after[session.blocks.index("Alice")] == lengths[session.blocks.index("Alice")]
    assert session.steps[-2] is step and step.ended == 20
    assert session.finish().passes == 20
    for _ in session.stream(30):
        pass
    session.add("Carol")
    assert session.blocks[bob] == "Carol" and session.row("Carol") == 1
    got = run(session)
    assert len(got["Carol"][0][1]) > 0 and sum(len(t) for _, t in got["Carol"]) <= BUDGET - 30
    with pytest.raises(ValueError, match="there is no worker 'Bob'"):
        session.pause("Bob")
    with pytest.raises(
        ValueError, match="room for 2 workers; create it with a larger max_workers to add Dan"
    ):
        session.add("Dan")
    with pytest.raises(ValueError, match="each its own"):
        session.add("Carol")
    session.remove("Alice")
    with pytest.raises(ValueError, match="choose a shorter name"):
        session.add("Alexander " * 20)
    session.add("Alice")
    session.remove("Carol")
    with pytest.raises(ValueError, match="Alice is the only worker"):
        session.remove("Alice")


def test_what_a_person_says_is_read_like_a_part_of_the_prompt():
    said = dataclasses.replace(CHAT, history_header="Steps:\n\nUser 1: 47 + 38 = 85.")
    session = start()
    session.say(" 47 + 38 = 85.")
    assert run(session) == run(start(format=said))
    assert (session.steps[0].worker, session.steps[0].text) == ("User", "User 1: 47 + 38 = 85.")
    later, taken = (
        start(sampler=endless()),
        " Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 85. Question 2: 12*7. Answer 2: 84.",
    )
    assert halves(later, lambda s: s.say(taken, "Teacher")) != run(start(sampler=endless()))
    assert [s.text for s in later.steps if s.worker == "Teacher"] == [f"Teacher 1:{taken}"]
    with pytest.raises(ValueError, match="there is nothing to say"):
        session.say("  ")
    with pytest.raises(ValueError, match="Bob is a worker of this session"):
        session.say("Hello.", "Bob")
    with pytest.raises(
        ValueError,
        match=r"what User says has \d+ tokens, but the block 'history' has room for \d+ more",
    ):
        session.say("1 " * 3000)


# bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": ()}, "workers need names"),
        ({"names": ("Alice", "Alice")}, "each its own"),
        ({"names": ("Alice", " ")}, "workers need names"),
        ({"text": " "}, "the problem is empty"),
        ({"budget": 0}, "budget is 0; it must be at least 1"),
        ({"step_tokens": 15}, "step_tokens is 15; it must be at least 16"),
        ({"passes_at_once": 0}, "passes_at_once is 0"),
        ({"ask_every": -1}, "ask_every is -1"),
        ({"move": "copy"}, "move is 'copy'"),
        ({"kind": "poem"}, "kind is 'poem'; it must be one of box, code"),
        ({"max_workers": 1}, "max_workers is 1, but there are 2 workers"),
        (
            {"layout": "star"},
            "layout is 'star'; it must be one of contiguous, interleaved, combined",
        ),
        (
            {
                "layout": WorkersLayout(
                    {"Alice": ("prompt", "Zoe", "Alice"), "Bob": ("prompt", "Bob")}
                )
            },
            "reads the block 'Zoe', which is never",
        ),
        (
            {"text": "1 + " * 9000},
            r"the prompt has \d+ tokens, \d+ of the problem and \d+ of the rules.* the problem is "
            r"the longer part",
        ),
        (
            {"format": dataclasses.replace(CHAT, system="1 + " * 9000)},
            r"the rules are the longer part: give a format with fewer words \(--format, format=\), "
            r"such as collaborative\+no-examples,.* fewer workers \(--workers, names=\), a smaller "
            r"budget \(--budget or --budgets, budget=\)",
        ),
        ({"history_tokens": 20}, "history_tokens is 20, but the prompt alone has"),
        (
            {"format": dataclasses.replace(CHAT, separator="--")},
            "separator is '--'; it must be whitespace",
        ),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=words):
        start(**{"names": NAMES[:2], **options})


def test_tokenizers_that_will_not_do():
    with pytest.raises(ValueError, match="workers need a model with a tokenizer"):
        Workers(dataclasses.replace(model(), tokenizer=None), "x")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "x": 1}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match=r"cannot represent the separator '\\n\\n'"):
        Workers(
            dataclasses.replace(
                model(), tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=words)
            ),
            "x",
        )


def test_budgets_to_finish_at_must_lie_within_the_budget():
    for odd in (0, BUDGET + 1):
        with pytest.raises(ValueError, match=f"finish_at has {odd}"):
            start().run([odd])
