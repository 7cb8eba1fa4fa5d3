"""Trees of prompts against brute force: all prefixes, and every sharing plan of a small tree."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxshare.serving.branches.prompt_tree import Branch, Prompt, read_prompts
from jaxshare.serving.branches.sharing_plan import (
    PrefixNode,
    SharingPlan,
    build_prefix_tree,
    plan_sharing,
    unique_tokens,
)
from jaxshare.serving.kvcache.sharing_cost import DEFAULT, Costs

BOS = 7
FREE = Costs(0, 0, 0, 0, 0)


def encode(text: str, first: bool) -> list[int]:
    """Makes a token of each character, except one of "ab": it can straddle two nodes."""
    return [BOS] * first + [ord(c) for c in text.replace("ab", "\x01")]


def make_prompts(*tokens: tuple[int, ...], n: int = 1) -> list[Prompt]:
    return [Prompt(i, t, n) for i, t in enumerate(tokens)]


def paths(root: PrefixNode) -> list[tuple[PrefixNode, tuple[int, ...]]]:
    """The nodes, each with all tokens from the root to its end."""
    found, todo = [], [(root, root.tokens)]
    while todo:
        node, path = todo.pop(0)
        found.append((node, path))
        todo += [(child, path + child.tokens) for child in node.children]
    return found


# Few tokens and short sequences, so that prefixes, branchings and equal prompts are frequent.
few_prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 3)),
    min_size=1,
    max_size=8,
).map(lambda drawn: [Prompt(i, tuple(tokens), n) for i, (tokens, n) in enumerate(drawn)])

# Prompts of long runs, which fill several tiles.
long_prompts = st.lists(
    st.tuples(
        st.lists(st.sampled_from([(1, 40), (2, 130), (3, 600)]), min_size=1, max_size=4),
        st.integers(1, 9),
    ),
    min_size=1,
    max_size=5,
).map(
    lambda drawn: [
        Prompt(i, tuple(t for token, length in runs for t in [token] * length), n)
        for i, (runs, n) in enumerate(drawn)
    ]
)

some_costs = st.builds(
    Costs,
    *(
        st.sampled_from(values)
        for values in ((0, 20, 60), (0, 3, 15), (0, 0.001, 0.004, 0.02), (0, 1.5), (0, 2.5, 20))
    ),
)


# ---- forms of prompts


def test_one_prompt_a_list_and_a_tree():
    assert read_prompts("xy", 3, encode) == [Prompt(0, (BOS, 120, 121), 3)]
    assert (
        read_prompts([5, 6], 2, encode)
        == read_prompts([[5, 6]], 2, encode)
        == [Prompt(0, (5, 6), 2)]
    )
    assert read_prompts(np.asarray([5, 6]), 2, encode) == [Prompt(0, (5, 6), 2)]
    tree = Branch("x", [Branch("y", [Branch("1"), Branch("2", n=5)], n=4), Branch("z")])
    assert read_prompts(["xy", [5], tree, "z"], 2, encode) == [
        Prompt(0, (BOS, *b"xy"), 2),
        Prompt(1, (5,), 2),
        Prompt(2, (BOS, *b"xy"), 4),
        Prompt(3, (BOS, *b"xy1"), 2),
        Prompt(4, (BOS, *b"xy2"), 5),
        Prompt(5, (BOS, *b"xz"), 2),
        Prompt(6, (BOS, *b"z"), 2),
    ]


def test_a_tree_gives_the_tokens_of_the_full_strings():
    tree = Branch(
        "xa", [Branch("b"), Branch("c", [Branch("a", [Branch("b\n"), Branch("a")])]), Branch(" ")]
    )
    assert read_prompts(tree, 1, encode) == read_prompts(
        ["xab", "xacab\n", "xacaa", "xa "], 1, encode
    )
    assert read_prompts(tree, 1, encode)[0].tokens == (BOS, ord("x"), 1)


def test_text_around_tokens_is_encoded_by_itself():
    tree = Branch(
        "xa",
        [
            Branch(
                [500, 501],
                [Branch("b", [Branch("a"), Branch("c", [Branch([502])])]), Branch([9], n=2)],
            )
        ],
    )
    assert [(p.tokens, p.n) for p in read_prompts(tree, 1, encode)] == [
        ((BOS, *b"xa", 500, 501, *b"ba"), 1),
        ((BOS, *b"xa", 500, 501, *b"bc", 502), 1),
        ((BOS, *b"xa", 500, 501, 9), 2),
    ]
    assert read_prompts(Branch([500], [Branch("a")]), 1, encode) == [Prompt(0, (500, 97), 1)]


def test_each_text_is_encoded_once():
    seen = []

    def counting(text: str, first: bool) -> list[int]:
        seen.append((text, first))
        return encode(text, first)

    twice = [Branch("q"), Branch("r"), Branch("q")]
    read_prompts(["doc q", Branch("doc ", twice), Branch("s", [Branch([1], twice)])], 1, counting)
    assert sorted(seen) == [
        ("doc q", True),
        ("doc r", True),
        ("q", False),
        ("r", False),
        ("s", True),
    ]


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "there are no prompts"),
        (np.zeros(0, np.int32), "there are no prompts"),
        ("", "prompt 0 has no text"),
        (["a", "b", "c", ""], "prompt 3 has no text"),
        (["a", []], "prompt 1 has no text"),
        (Branch(""), "branch 0 has no text"),
        (Branch("", [Branch("a")]), "branch 0 has no text"),
        (
            Branch("a", [Branch("b"), Branch("c"), Branch("d", [Branch("e"), Branch([])])]),
            "branch 0.2.1 has no text",
        ),
        (["a", Branch("a", [Branch("")])], "branch 1.0 has no text"),
        (["a", "?"], "prompt 1 has text that the tokenizer makes no token of"),
        (["a", 5], "prompt 1 has text of type int"),
        (b"ab", "prompt 0 has text of type bytes"),
        (None, "prompt 0 has text of type NoneType"),
        ([1, 2, "a"], "prompt 0 has the token 'a'"),
        ([[1], [2, -1]], "prompt 1 has the token -1"),
        ([[1], [2, 0.5]], "prompt 1 has the token 0.5"),
        ([[1, True]], "prompt 0 has the token True"),
        ([1, 2**31], "prompt 0 has the token 2147483648"),
        (Branch("a", [Branch([-2])]), "branch 0.0 has the token -2"),
        (Branch("a", ["b"]), "branch 0.0 is of type str, but children are Branch"),
        (Branch("a", "bc"), "branch 0 has children of type str"),
        (Branch("a", Branch("b")), "branch 0 has children of type Branch"),
        (Branch("a", [Branch("b", n=0)]), "n of branch 0.0 is 0"),
        (Branch("a", [Branch("b")], n=-3), "n of branch 0 is -3"),
        (Branch("a", n=1.5), r"n of branch 0 is 1\.5"),
    ],
)
def test_bad_prompts(prompts, words):
    with pytest.raises(ValueError, match=words):
        read_prompts(prompts, 1, lambda text, first: [] if text == "?" else encode(text, first))


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_bad_n(n):
    with pytest.raises(ValueError, match=f"n is {n}; ask for at least 1"):
        read_prompts("a", n, encode)


# ---- common prefixes


@given(few_prompts)
@example(make_prompts((1, 2), (1,)))
@example(make_prompts((1,), (0,), (1,)))
@example([Prompt(0, (), 1), Prompt(1, (1,), 1), Prompt(2, (), 2)])
def test_the_prefix_tree_keeps_each_prefix_once(prompts):
    nodes = paths(build_prefix_tree(prompts))
    held = [(prompt, path) for node, path in nodes for prompt in node.ends]
    assert all(prompt.tokens == path for prompt, path in held)
    assert sorted(prompt.number for prompt, _ in held) == [prompt.number for prompt in prompts]
    prefixes = {
        prompt.tokens[:length] for prompt in prompts for length in range(1, len(prompt.tokens) + 1)
    }
    assert unique_tokens(nodes[0][0]) == len(prefixes)
    for node, path in nodes:
        below = [prompt for prompt in prompts if prompt.tokens[: len(path)] == path]
        firsts = [child.tokens[0] for child in node.children]
        assert firsts == [
            *dict.fromkeys(
                prompt.tokens[len(path)] for prompt in below if len(prompt.tokens) > len(path)
            )
        ]
        assert node.ends == [prompt for prompt in below if prompt.tokens == path]
        assert node.rows == sum(prompt.n for prompt in below)
        assert node is nodes[0][0] or node.ends or len(node.children) > 1, (
            "a node where no prompt ends and no two part"
        )


def test_the_prefix_tree_of_no_prompts():
    root = build_prefix_tree([])
    assert (root.tokens, root.children, root.ends, root.rows, unique_tokens(root)) == (
        (),
        [],
        [],
        0,
        0,
    )
    for share in (True, False, None):
        assert plan_sharing(root, share=share) == SharingPlan((), ())


def test_many_prompts_with_a_long_common_prefix():
    document = tuple(range(2000))
    prompts = make_prompts(*((*document, 5000 + i % 50, i) for i in range(3000)))
    root = build_prefix_tree(prompts)
    assert [child.tokens for child in root.children] == [document]
    assert [child.tokens for child in root.children[0].children] == [(5000 + i,) for i in range(50)]
    assert unique_tokens(root) == 2000 + 50 + 3000


# ---- sharing


def cost(tree: SharingPlan, costs: Costs, grow: int) -> float:
    """The cost of a plan by the linear model of `sharing_cost`, written out."""
    together = sum(
        math.ceil(len(block.tokens) / 512)
        * (costs.shared_tile + 512 * block.rows * costs.shared_token_row)
        for block in tree.blocks
    )
    alone = sum(
        costs.private_row + math.ceil((len(sample.suffix) + grow) / 128) * costs.private_tile
        for sample in tree.samples
    )
    return together + alone + (costs.shared_start if tree.blocks else 0)


def least_cost(root: PrefixNode, costs: Costs, grow: int) -> float:
    """The least cost over all sets of shared nodes.

    The block of each starts where the last one above it ends.
    """
    nodes = paths(root)
    able = [i for i, (node, path) in enumerate(nodes) if node.rows > 1 and path]
    ends = [(prompt, path) for node, path in nodes for prompt in node.ends]
    totals = []
    for chosen in itertools.chain.from_iterable(
        itertools.combinations(able, size) for size in range(len(able) + 1)
    ):

        def boundary(path, chosen=chosen):
            return max(
                (
                    len(nodes[i][1])
                    for i in chosen
                    if len(nodes[i][1]) <= len(path) and nodes[i][1] == path[: len(nodes[i][1])]
                ),
                default=0,
            )

        total = costs.shared_start if chosen else 0
        for i in chosen:
            node, path = nodes[i]
            held = len(path) - boundary(path[:-1])
            total += math.ceil(held / 512) * (
                costs.shared_tile + 512 * node.rows * costs.shared_token_row
            )
        for prompt, path in ends:
            held = len(path) - boundary(path)
            total += prompt.n * (
                costs.private_row + math.ceil((held + grow) / 128) * costs.private_tile
            )
        totals.append(total)
    return min(totals)


def check(tree: SharingPlan, prompts: list[Prompt]) -> None:
    """Asserts what is true of every sharing plan of these prompts."""
    for sample in tree.samples:
        path = [token for block in tree.path(sample.block) for token in tree.blocks[block].tokens]
        assert (*path, *sample.suffix) == prompts[sample.prompt].tokens
    assert sorted((s.prompt, s.index) for s in tree.samples) == [
        (p.number, i) for p in prompts for i in range(p.n)
    ]
    for b, block in enumerate(tree.blocks):
        readers = [r for r, sample in enumerate(tree.samples) if b in tree.path(sample.block)]
        assert block.parent < b and block.tokens and len(readers) == block.rows > 1
        assert readers == [*range(readers[0], readers[0] + len(readers))], (
            "rows below a block are neighbours"
        )
    assert tree.depth == max((len(tree.path(b)) for b in range(len(tree.blocks))), default=0)
    assert tree.cached_tokens == sum(
        len(x) for x in ([b.tokens for b in tree.blocks] + [s.suffix for s in tree.samples])
    )


@given(few_prompts)
def test_all_and_nothing_shared(prompts):
    root = build_prefix_tree(prompts)
    everything, nothing = plan_sharing(root, share=True), plan_sharing(root, share=False)
    check(everything, prompts)
    check(nothing, prompts)
    assert everything.cached_tokens == unique_tokens(root)
    assert nothing.blocks == () and nothing.cached_tokens == sum(
        len(prompt.tokens) * prompt.n for prompt in prompts
    )
    assert all(not sample.suffix for sample in everything.samples if prompts[sample.prompt].n > 1)
    assert plan_sharing(root, FREE, None) == everything, (
        "of equal costs, the plan that shares is taken"
    )


@settings(max_examples=300)
@given(st.one_of(few_prompts, long_prompts), some_costs, st.sampled_from([0, 32, 200]))
# a copy fills one tile, and two with the sampled tokens
@example([Prompt(0, (1,) * 120, 2)], Costs(0, 3, 0, 0, 2.5), 32)
def test_the_least_cost_of_all_plans(prompts, costs, grow):
    root = build_prefix_tree(prompts)
    tree = plan_sharing(root, costs, grow=grow)
    check(tree, prompts)
    assert cost(tree, costs, grow) == pytest.approx(least_cost(root, costs, grow))


def test_long_prefixes_with_many_rows_are_shared_by_default_and_short_ones_are_not():
    document, short = tuple(range(4096)), tuple(range(8))
    assert [
        block.tokens for block in plan_sharing(build_prefix_tree([Prompt(0, document, 64)])).blocks
    ] == [document]
    assert plan_sharing(build_prefix_tree([Prompt(0, short, 4)]), grow=32).blocks == ()
    # The questions are too short to be blocks of their own below the document.
    prompts = make_prompts(*((*document, 5000 + i, 1, 2) for i in range(32)), n=2)
    tree = plan_sharing(build_prefix_tree(prompts), DEFAULT, grow=32)
    assert tree.blocks[0].tokens == document and tree.depth == 1 and len(tree.samples) == 64
    assert tree.samples[3].suffix == (5001, 1, 2) and tree.samples[3].index == 1


def test_a_tree_of_three_thousand_levels():
    depth = 3_000
    branch = Branch("z")
    for _ in range(depth - 1):
        branch = Branch("y", [branch])
    (deep,) = read_prompts(branch, 2, encode)
    assert deep.tokens == (BOS, *b"y" * (depth - 1), *b"z")
    # A prompt ends at each level: every prefix of the deep one is a prompt too.
    prompts = make_prompts(*(deep.tokens[:i] for i in range(1, depth + 1)))
    root = build_prefix_tree(prompts)
    assert unique_tokens(root) == depth and root.rows == depth
    everything = plan_sharing(root, share=True)
    assert everything.depth == depth - 1 and everything.cached_tokens == depth
    assert everything.path(depth - 2) == [*range(depth - 1)]
    fewest = plan_sharing(root, grow=32)
    assert 0 < len(fewest.blocks) < depth - 1
    assert cost(fewest, DEFAULT, 32) < min(
        cost(everything, DEFAULT, 32), cost(plan_sharing(root, share=False), DEFAULT, 32)
    )
    for sample in (fewest.samples[0], fewest.samples[depth // 2], fewest.samples[-1]):
        held = sum(len(fewest.blocks[block].tokens) for block in fewest.path(sample.block))
        assert held + len(sample.suffix) == len(prompts[sample.prompt].tokens)


# ---- costs


def test_tiles_are_paid_in_full():
    costs = Costs(1000, 15, 0.5, 1.5, 2.5)
    assert [costs.shared(tokens, 3) for tokens in (0, 1, 512, 513)] == [0, 783, 783, 1566]
    assert [costs.private(tokens) for tokens in (0, 1, 128, 129)] == [1.5, 4, 4, 6.5]


def test_costs_as_json():
    assert Costs.from_json(DEFAULT.as_json()) == DEFAULT
    assert DEFAULT.as_json()["private_tile"] == DEFAULT.private_tile


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Costs)])
@pytest.mark.parametrize("value", [-1, math.nan, math.inf, "3", None, True])
def test_bad_costs(name, value):
    with pytest.raises(ValueError, match=f"the cost {name} is {value!r}"):
        dataclasses.replace(DEFAULT, **{name: value})
    with pytest.raises(ValueError, match=f"the cost {name} is {value!r}"):
        Costs.from_json(DEFAULT.as_json() | {name: value})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([1, 2], r"but this is \[1, 2\]"),
        ({}, "the costs lack shared_start"),
        (
            {name: 1 for name in DEFAULT.as_json() if name != "private_row"},
            "the costs lack private_row",
        ),
        (DEFAULT.as_json() | {"speed": 1}, "an entry 'speed'"),
    ],
)
def test_bad_json(data, words):
    with pytest.raises(ValueError, match=words):
        Costs.from_json(data)
