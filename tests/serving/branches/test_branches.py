"""Completions of prompts and of trees of prompts, their costs, and bad input.

They are compared with a plain loop over each whole prompt alone.
"""

import dataclasses
import functools
import json
import random
import re
from collections.abc import Callable, Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import FinishReason, Sampler
from jaxshare.attention.plan import make_plan
from jaxshare.models import EMBEDDED, LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.generate import Completions, generate
from jaxshare.serving.branches.prompt_tree import Branch, Prompts
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.cli import demo
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.kvcache.sharing_cost import Costs
from tests.helpers import mostly_slow, one_layer, padded

PROMPT = "<|im_start|>user\nSolve: 47 + 38<|im_end|>\n<|im_start|>assistant\n"
WARM = Sampler(temperature=1.6, top_p=0.98)
HOT = Sampler(
    temperature=3,
    forbidden=tuple(json.loads((EMBEDDED / "generation_config.json").read_text())["eos_token_id"]),
)
"""Without stop tokens, so that no row ends before it has all its tokens, unless others stop it."""

# Most tests run a tree of this shape, or one with the same numbers of blocks and rows, to share
# programs.
TOKENS = np.random.default_rng(0).integers(3, 402, 64).tolist()
BOOK, QUESTION, CHAPTER, SECTION, OTHER = (
    TOKENS[:14],
    TOKENS[14:17],
    TOKENS[17:22],
    TOKENS[22:26],
    TOKENS[26:32],
)
FOREST = [
    Branch(BOOK, [Branch(QUESTION), Branch(CHAPTER, [Branch(SECTION, n=3)], n=1)]),
    Branch(OTHER, n=2),
]
"""Two trees with nothing in common: 4 prompts, 7 completions, 32 different tokens in 5 nodes, 4 of
which several rows share."""
WHOLE = [BOOK + QUESTION, BOOK + CHAPTER, BOOK + CHAPTER + SECTION, OTHER]
"""Its prompts: 17, 19, 23 and 6 tokens."""
NUMBERS = [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)]
"""(prompt, index) of its completions."""
NEW = 8
DIGITS = tuple(range(18, 26))
"""As many as the places for stop tokens of every state, so that they change no shape."""


@functools.cache
def embedded() -> LoadedModel:
    """The embedded model as it is."""
    return demo.load_embedded()


@functools.cache
def model() -> LoadedModel:
    """Its first layer: nothing here depends on what it has learned."""
    return one_layer()


@functools.cache
def problem(seed: int = 0) -> arithmetic.SumsProblem:
    return arithmetic.make_problem(random.Random(seed))


def plain_greedy(
    tokens: Sequence[int], count: int, of: Callable[[], LoadedModel] = model
) -> tuple[list[int], float]:
    """The greedy tokens of a plain loop, and their log-probability.

    The loop runs whole sequences with plain causal attention.
    """
    made, total = _plain_greedy(tuple(tokens), count, of)
    return list(made), total


@functools.cache
def _plain_greedy(
    prompt: tuple[int, ...], count: int, of: Callable[[], LoadedModel]
) -> tuple[tuple[int, ...], float]:
    tokens, total = list(prompt), 0.0
    for _ in range(count):
        logits = plain_logits(tokens, of)[-1]
        tokens.append(int(logits.argmax()))
        total += logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        if tokens[-1] in of().generation.stop_tokens:
            break
    return tuple(tokens[len(prompt) :]), total


def plain_logits(tokens: Sequence[int], of: Callable[[], LoadedModel] = model) -> np.ndarray:
    """The logits, float64[T, V], after each token of one whole sequence."""
    row = padded(tokens, (64, 256, 512))
    return np.asarray(_causal(of)(of().params, row), np.float64)[0, : len(tokens)]


@functools.cache
def _causal(of: Callable[[], LoadedModel]):
    return jax.jit(lambda params, tokens: of().module.apply(params, tokens, method="causal"))


def token_bytes() -> int:
    """Bytes of the keys and values of one token, in float32."""
    return 2 * model().config.num_layers * model().config.num_kv_heads * model().config.head_dim * 4


def texts(done: Completions) -> dict[tuple[int, int], list[int]]:
    """The tokens of each completion by (prompt, index), which are unique."""
    found = {(c.prompt, c.index): [*c.tokens] for c in done.completions}
    assert len(found) == len(done.completions)
    return found


def with_stops() -> LoadedModel:
    """The model with digits as stop tokens, so that rows end at different times."""
    return dataclasses.replace(
        model(), generation=dataclasses.replace(model().generation, stop_tokens=DIGITS)
    )


@functools.cache
def at_once(sampler: Sampler, stops: bool = False, seed: int = 7) -> Completions:
    """Runs all rows of the forest at once."""
    return generate(
        with_stops() if stops else model(),
        FOREST,
        max_new_tokens=NEW,
        sampler=sampler,
        seed=seed,
        share=True,
    )


def test_greedy_equals_a_plain_loop_shared_or_not():
    tokens = model().tokenizer.encode(PROMPT)
    expected, logprob = plain_greedy(tokens, 24)
    for share in (True, False):
        done = generate(model(), PROMPT, n=4, max_new_tokens=24, sampler=Sampler(), share=share)
        assert [[*c.tokens] for c in done.completions] == [expected] * 4
        np.testing.assert_allclose([c.logprob for c in done.completions], logprob, atol=1e-3)


def test_samples_are_the_same_shared_or_not_and_for_any_n():
    shared = [
        c.tokens
        for c in generate(
            model(), PROMPT, n=4, max_new_tokens=24, sampler=WARM, seed=7, share=True
        ).completions
    ]
    unshared = [
        c.tokens
        for c in generate(
            model(), PROMPT, n=4, max_new_tokens=24, sampler=WARM, seed=7, share=False
        ).completions
    ]
    single = [
        generate(model(), PROMPT, n=1, max_new_tokens=24, sampler=WARM, seed=stream_seed(7, 0, i))
        .completions[0]
        .tokens
        for i in (0, 3)
    ]
    assert shared == unshared
    assert single == [shared[0], shared[3]]
    assert len({tuple(tokens) for tokens in shared}) > 1


@pytest.mark.slow
def test_a_branch_with_a_sampler_of_its_own_is_sampled_as_in_a_call_with_it():
    """Beside others in the same passes; a node's is that of its descendants, too."""
    biased = Sampler(temperature=0.7, top_k=5, bias={n: 3.0 for n in range(20, 26)})
    tree = Branch(
        PROMPT,
        [Branch("1", n=1), Branch("2", [Branch("3"), Branch("4", sampler=WARM)], 1, biased)],
        n=4,
        sampler=Sampler(),
    )
    done = generate(model(), tree, n=1, max_new_tokens=12, seed=7).completions
    texts = [(PROMPT, Sampler(), 4), (PROMPT + "1", Sampler(), 1), (PROMPT + "2", biased, 1)]
    texts += [(PROMPT + "23", biased, 1), (PROMPT + "24", WARM, 1)]
    assert len(done) == sum(n for _, _, n in texts)
    for number, (prompt, sampler, n) in enumerate(texts):
        for index in range(n):
            seed = stream_seed(7, number, index)
            alone = generate(model(), prompt, max_new_tokens=12, sampler=sampler, seed=seed)
            found = [c for c in done if (c.prompt, c.index) == (number, index)]
            assert [c.tokens for c in found] == [alone.completions[0].tokens]
    with pytest.raises(
        ValueError, match=r"branch 0\.0 has a sampler of type float; give a Sampler"
    ):
        generate(model(), Branch("1", [Branch("2", sampler=0.7)]))  # pyright: ignore


def test_a_shared_prompt_is_cached_once():
    tokens = model().tokenizer.encode(PROMPT)
    for share, copies in ((True, 1), (False, 4)):
        # With this seed none ends early.
        done = generate(model(), PROMPT, n=4, max_new_tokens=24, sampler=WARM, seed=7, share=share)
        # The last token that a completion samples is never fed.
        cached = copies * len(tokens) + sum(len(c.tokens) - 1 for c in done.completions)
        assert done.kv_bytes == cached * token_bytes()
        assert done.prompt_tokens == len(tokens)


@pytest.mark.slow
def test_budgets_and_stops():
    done = generate(model(), PROMPT, n=4, max_new_tokens=1)
    assert [len(c.tokens) for c in done.completions] == [1] * 4 and done.completions[
        0
    ].finish_reason is FinishReason.LENGTH
    stopped = [
        c
        for c in generate(model(), PROMPT, n=4, max_new_tokens=300, sampler=WARM).completions
        if c.finish_reason is FinishReason.STOP
    ]
    assert stopped
    for completion in stopped:
        assert completion.tokens[-1] in model().generation.stop_tokens
        assert "<|im_end|>" not in completion.text


@st.composite
def forests(draw) -> tuple[list[Branch], list[tuple[list[int], int]]]:
    """Draws trees, and their prompts with n in depth-first order.

    All have 7 completions below 4 blocks on 3 levels, and lengths that fill an arena of the same
    size, so they run the same programs. The node where a completion ends, all orders and all tokens
    are drawn.
    """
    short = st.integers(1, 8)

    def text(length: int, first: int) -> list[int]:
        return [
            first,
            *draw(st.lists(st.integers(3, 401), min_size=length - 1, max_size=length - 1)),
        ]

    def node(tokens: list[int], rows: int, *below: Branch) -> Branch:
        """A node where `rows` completions end, or right below it."""
        ends = draw(st.integers(0, rows))
        firsts = draw(
            st.lists(st.integers(3, 99), min_size=rows - ends, max_size=rows - ends, unique=True)
        )
        leaves = [
            Branch(text(draw(st.integers(1, 4)), first), n=draw(st.sampled_from([None, 1])))
            for first in firsts
        ]
        return Branch(tokens, draw(st.permutations([*leaves, *below])), n=ends or None)

    section = node(text(draw(short), 100), 3)
    chapter = node(text(draw(short), 101), 1, section)
    book = node(text(draw(st.integers(13, 16)), 102), 1, chapter)
    roots = draw(st.permutations([book, node(text(draw(short), 103), 2)]))
    ends: list[tuple[list[int], int]] = []

    def walk(branch: Branch, above: list[int]) -> None:
        whole = above + list(branch.text)
        if count := branch.n or (0 if branch.children else 1):
            ends.append((whole, count))
        for child in branch.children:
            walk(child, whole)

    for root in roots:
        walk(root, [])
    return roots, ends


def check_forest(
    prompts: Prompts, ends: Sequence[tuple[list[int], int]], share: bool | None
) -> None:
    done = generate(model(), prompts, max_new_tokens=NEW, sampler=Sampler(), share=share)
    expected = {number: plain_greedy(tokens, NEW) for number, (tokens, _) in enumerate(ends)}
    assert [(c.prompt, c.index) for c in done.completions] == [
        (p, i) for p, (_, n) in enumerate(ends) for i in range(n)
    ]
    for completion in done.completions:
        assert [*completion.tokens] == expected[completion.prompt][0]
        assert completion.logprob == pytest.approx(expected[completion.prompt][1], abs=1e-3)
    unique = len(
        {tuple(tokens[:length]) for tokens, _ in ends for length in range(1, len(tokens) + 1)}
    )
    assert (done.unique_tokens, done.prompt_tokens) == (
        unique,
        sum(len(tokens) for tokens, _ in ends),
    )
    if share is not None:
        prompt_tokens = unique if share else sum(len(tokens) * n for tokens, n in ends)
        assert (
            done.kv_bytes
            == (prompt_tokens + sum(len(c.tokens) - 1 for c in done.completions)) * token_bytes()
        )


@settings(max_examples=12)
@given(forests(), st.sampled_from([True, True, False, None]))
def test_every_completion_of_a_tree_is_that_of_its_whole_prompt_alone(forest, share):
    roots, ends = forest
    check_forest(roots, ends, share)


@settings(max_examples=8)
@given(forests(), st.randoms(use_true_random=False))
def test_a_flat_list_shares_its_prefixes_whatever_its_order(forest, rng):
    """Prompts are in any order, and those of several completions occur several times."""
    flat = [tokens for tokens, n in forest[1] for _ in range(n)]
    rng.shuffle(flat)
    check_forest(flat, [(tokens, 1) for tokens in flat], True)


def test_a_tree_keeps_its_32_different_tokens_once():
    done = at_once(HOT)
    assert list(texts(done)) == NUMBERS
    assert (done.prompt_tokens, done.unique_tokens) == (65, 32)
    assert [len(tokens) for tokens in texts(done).values()] == [8] * 7
    assert done.kv_bytes == (32 + 7 * 7) * token_bytes()
    # 7 passes feed sampled tokens; before, the books are fed first, then the nodes below them, and
    # the section last.
    assert done.passes == 7 + 3
    unshared = generate(model(), FOREST, max_new_tokens=NEW, sampler=HOT, seed=7, share=False)
    assert texts(unshared) == texts(done)
    assert unshared.kv_bytes == (17 + 19 + 3 * 23 + 2 * 6 + 7 * 7) * token_bytes()


@pytest.mark.parametrize("share", [True, False])
def test_a_pass_reads_every_cached_token_once(share):
    """The cache and layout are those at the end of a run.

    Then every row's block has room for one token more.
    """
    found: list[int] = []

    def read(run: Branches) -> None:
        state = run._scheduler.decode_rows.state
        assert state is not None
        plan = jax.jit(make_plan, static_argnums=3)(
            state.cache, state.layout, np.ones(state.layout.num_rows, np.int32), 1
        )
        found.append(int(plan.read_tokens))

    generate(model(), FOREST, max_new_tokens=NEW, sampler=HOT, seed=7, share=share, on_tokens=read)
    cached = (32 if share else 117) + 7 * 7
    assert found == [cached + 7]  # each row feeds one


@pytest.mark.slow
def test_what_pays_is_shared_and_the_rest_copied():
    """A tile costs 1, shared or a row's own.

    Sharing a long document among three rows pays, a short question among two does not.
    """
    rng = np.random.default_rng(1)
    document, first, second = (rng.integers(3, 402, size).tolist() for size in (200, 5, 7))
    costs = Costs(shared_start=0, shared_tile=1, shared_token_row=0, private_row=0, private_tile=1)
    done = generate(
        model(),
        Branch(document, [Branch(first, n=2), Branch(second)]),
        max_new_tokens=NEW,
        sampler=Sampler(),
        costs=costs,
    )
    assert [[*c.tokens] for c in done.completions] == [
        plain_greedy(document + x, NEW)[0] for x in (first, first, second)
    ]
    assert (
        done.kv_bytes
        == (200 + 2 * 5 + 7 + sum(len(c.tokens) - 1 for c in done.completions)) * token_bytes()
    )


def test_a_completion_says_why_it_ended_and_how_long_its_prompt_is():
    found = at_once(HOT, True).completions
    assert {c.finish_reason for c in found} == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in found:
        *shown, last = completion.tokens
        stopped = last in DIGITS
        assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert not {*shown} & {*DIGITS} and (stopped or len(completion.tokens) == NEW)
        assert completion.text == model().tokenizer.decode(shown if stopped else completion.tokens)
        assert completion.prompt_tokens == len(WHOLE[completion.prompt])
        assert completion.error is None and completion.logprob < 0
        with pytest.warns(DeprecationWarning, match=r"reason is now Completion.finish_reason"):
            assert completion.reason == ("stop" if stopped else "budget")


@pytest.mark.slow
@pytest.mark.parametrize("stops", mostly_slow([True, False]))
@pytest.mark.parametrize("max_rows", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_waves_give_what_all_rows_at_once_give(max_rows, stops):
    """Rows that end are replaced at once: while completions wait, every row runs."""
    expected, done = at_once(HOT, stops), []

    def every_row_runs(run: Branches) -> None:
        assert len(run.running()) == min(max_rows, 7 - len(done))

    run = Branches(
        with_stops() if stops else model(),
        FOREST,
        max_new_tokens=NEW,
        sampler=HOT,
        seed=7,
        share=True,
        max_rows=max_rows,
    )
    for completion in run.stream(every_row_runs):
        done.append(completion)
    done.sort(key=lambda c: (c.prompt, c.index))
    assert [(c.prompt, c.index, [*c.tokens]) for c in done] == [
        (*number, tokens) for number, tokens in texts(expected).items()
    ]
    np.testing.assert_allclose(
        [c.logprob for c in done], [c.logprob for c in expected.completions], atol=1e-3
    )

    # A completion of k tokens takes k - 1 passes of its row, and the next one in order takes the
    # row that is free first.
    passes = [len(c.tokens) - 1 for c in done]
    rows = [0] * max_rows
    for taken in passes:
        rows[int(np.argmin(rows))] += taken
    # the rest feeds the prompts: the section, its parent, and its grandparent; 5 nodes in all
    assert 3 <= run.passes - max(rows) <= 5
    if stops:
        # the passes of waves that wait for their last row
        assert max(rows) < sum(max(passes[i : i + max_rows]) for i in range(0, 7, max_rows))


@pytest.mark.slow
def test_greedy_waves_equal_the_plain_loop():
    done = generate(model(), FOREST, max_new_tokens=NEW, sampler=Sampler(), share=True, max_rows=3)
    assert texts(done) == {(p, i): plain_greedy(WHOLE[p], NEW)[0] for p, i in NUMBERS}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [31, 47])
def test_a_bound_on_memory_is_kept_and_changes_no_text(tokens):
    """31 tokens hold one completion of the longest prompt, 14 + 5 + 4 + 8, and no more."""
    done = generate(
        with_stops(),
        FOREST,
        max_new_tokens=NEW,
        sampler=HOT,
        seed=7,
        max_kv_bytes=tokens * token_bytes(),
    )
    assert texts(done) == texts(at_once(HOT, True))
    assert 23 * token_bytes() < done.kv_bytes <= tokens * token_bytes()


def test_a_bound_one_token_too_low_names_what_is_needed_and_what_there_is():
    need, room = f"{31 * token_bytes():,}", f"{30 * token_bytes():,}"
    with pytest.raises(
        ValueError,
        match=f"31 tokens for prompt 2, {need} bytes .* room for 30 tokens, {room} bytes; raise "
        "max_kv_bytes",
    ):
        generate(model(), FOREST, max_new_tokens=NEW, max_kv_bytes=31 * token_bytes() - 1)


@pytest.mark.slow
def test_a_prefix_that_fragments_memory_is_fed_again():
    """The first prompt's one token is below the book.

    Once it is freed there is room enough for the section, but in two pieces.
    """
    tree = [
        Branch(TOKENS[40:41], n=2),
        Branch(BOOK, [Branch(CHAPTER, [Branch(SECTION, n=3)], n=1)], n=1),
    ]

    def run(seed: int, bound: int | None = None) -> Completions:
        return generate(
            with_stops(),
            tree,
            max_new_tokens=NEW,
            sampler=HOT,
            seed=seed,
            share=True,
            max_kv_bytes=bound,
        )

    # One of the first two must run beside the book.
    seed, loose = next(
        (seed, done)
        for seed in range(20)
        if len(texts(done := run(seed))[0, 0]) != len(texts(done)[0, 1])
    )
    tight = run(seed, 31 * token_bytes())
    assert texts(tight) == texts(loose)
    assert tight.kv_bytes <= 31 * token_bytes()


def test_a_text_depends_on_its_prompt_and_its_numbers_alone():
    options = {"max_new_tokens": NEW, "sampler": HOT, "seed": 7, "share": True, "max_rows": 3}
    expected = texts(at_once(HOT))
    # only the question takes its n from the call
    more = texts(generate(model(), FOREST, n=2, **options))
    assert list(more) == [(0, 0), (0, 1), *NUMBERS[1:]]
    assert {number: more[number] for number in NUMBERS} == expected
    assert more[0, 1] != more[0, 0]

    neighbour = texts(generate(model(), [FOREST[0], Branch(TOKENS[40:44], n=2)], **options))
    assert [neighbour[number] for number in NUMBERS[:5]] == [
        expected[number] for number in NUMBERS[:5]
    ]
    assert neighbour[3, 0] != expected[3, 0]

    run = Branches(model(), FOREST, skip=[(0, 0), (2, 1), (2, 1), (9, 9)], **options)
    left = {(c.prompt, c.index): [*c.tokens] for c in run.stream()}
    assert left == {
        number: expected[number] for number in NUMBERS if number not in [(0, 0), (2, 1)]
    }


def test_the_same_prompt_twice_gives_different_samples():
    twice = texts(
        generate(
            model(),
            [*FOREST[:1], OTHER, OTHER],
            max_new_tokens=NEW,
            sampler=HOT,
            seed=7,
            share=True,
            max_rows=3,
        )
    )
    assert twice[3, 0] == texts(at_once(HOT))[3, 0]
    assert (
        len({tuple(tokens) for tokens in (twice[3, 0], twice[4, 0], texts(at_once(HOT))[3, 1])})
        == 3
    )
    assert texts(at_once(HOT)) != texts(
        generate(model(), FOREST, max_new_tokens=NEW, sampler=HOT, seed=6, share=True)
    )


def test_everything_skipped_runs_nothing():
    run = Branches(model(), PROMPT, n=2, skip=[(0, 0), (0, 1)])
    assert list(run.stream()) == [] and run.passes == 0


def test_runs_alone_have_no_part_for_sessions_and_the_same_texts():
    found, places = [], []
    for alone in (False, True):
        run = Branches(one_layer(), FOREST, max_new_tokens=NEW, sampler=WARM, alone=alone)

        def look(run: Branches) -> None:
            assert run._scheduler.decode_rows.state is not None
            places.append(run._scheduler.decode_rows.state.steps.marks.shape[1])

        found.append({(c.prompt, c.index): c.tokens for c in run.stream(look)})
        assert (places[-1] == 0) is alone
    assert found[0] == found[1] and len(found[0]) == len(NUMBERS)


def test_completions_come_as_they_end():
    # The second of the first three rows must end before the first.
    seed = next(
        seed
        for seed in range(40)
        if len(texts(at_once(HOT, True, seed))[1, 0])
        < len(texts(at_once(HOT, True, seed))[0, 0]) - 2
    )
    expected = at_once(HOT, True, seed)
    run = Branches(
        with_stops(), FOREST, max_new_tokens=NEW, sampler=HOT, seed=seed, share=True, max_rows=3
    )
    stream = run.stream()
    first = next(stream)
    assert isinstance(first, Completion) and texts(expected)[first.prompt, first.index] == [
        *first.tokens
    ]
    passes, running = run.passes, {(c.prompt, c.index): [*c.tokens] for c in run.running()}
    assert len(running) == 2 and all(
        texts(expected)[number][: len(found)] == found for number, found in running.items()
    )
    rest = list(stream)
    assert run.passes > passes
    assert sorted((c.prompt, c.index) for c in [first, *rest]) == NUMBERS
    # those that end first come first
    assert [(c.prompt, c.index) for c in [first, *rest]] != NUMBERS
    assert run.sampled_tokens == sum(len(c.tokens) for c in [first, *rest])
    assert run.running() == []


def test_the_prompts_text_and_tokens_are_the_same():
    """Nodes of text are encoded as one text, even where a token straddles two of them."""
    parts = PROMPT[:7], PROMPT[7:31], PROMPT[31:]
    done = generate(
        model(),
        Branch(parts[0], [Branch(parts[1], [Branch(parts[2])])]),
        max_new_tokens=24,
        sampler=Sampler(),
    )
    assert [[*c.tokens] for c in done.completions] == [
        plain_greedy(model().tokenizer.encode(PROMPT), 24)[0]
    ]
    assert done.completions[0].text == model().tokenizer.decode(done.completions[0].tokens)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompts": ""}, "prompt 0 has no text; give at least one token of text"),
        ({"prompts": []}, "there are no prompts; give at least one"),
        ({"prompts": None}, "there are no prompts; give at least one, or a prefix"),
        ({"prompts": [PROMPT, []]}, "prompt 1 has no text"),
        ({"prompts": Branch(PROMPT, [Branch("1"), Branch("")])}, "branch 0.1 has no text"),
        (
            {"prompts": Branch(PROMPT, [Branch("1", n=0)])},
            "n of branch 0.0 is 0; ask for at least 1",
        ),
        ({"n": 0}, "n is 0; ask for at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"max_rows": 0}, "max_rows is 0; it must be at least 1"),
        ({"max_kv_bytes": 0}, "max_kv_bytes is 0; it must be at least 1"),
        ({"prompts": "1 " * 5000}, "the prompt has .* but the model's context holds 8192"),
        (
            {"prompts": [PROMPT, [5] * 8191], "max_new_tokens": 2},
            "prompt 1 has 8191 tokens and 2 more may follow, but .* holds 8192",
        ),
    ],
)
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=words):
        generate(model(), **{"prompts": PROMPT, **options})


def test_text_needs_a_tokenizer():
    with pytest.raises(
        ValueError, match=re.escape("no tokenizer, so a prompt must be given as tokens")
    ):
        generate(dataclasses.replace(model(), tokenizer=None), PROMPT)


@pytest.mark.slow
def test_passes_for_many_short_prompts_do_not_grow_with_their_number():
    """What they have more than a token of is fed in pieces, of which a pass has more places in a
    larger loop."""
    rng = np.random.default_rng(5)
    prompts = [[*TOKENS[:3], *rng.integers(3, 402, 13).tolist()] for _ in range(160)]
    given = {"max_new_tokens": 3, "sampler": HOT, "seed": 3}
    together = generate(model(), prompts, **given)
    assert together.passes <= 160 * 16 / 256 + 3 + 1
    few = generate(model(), prompts[:40], max_rows=40, **given)
    assert [c.tokens for c in few] == [c.tokens for c in together][:40]
