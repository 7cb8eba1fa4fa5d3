"""block_attention: the xla and cpu backends and the reference against float64 numpy that lays every row's
keys end to end.

A few static shapes, so that few programs are compiled; layouts, lengths, counts, extents and phases
are data and vary freely.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxshare import Layout, Rope, block_attention, cpu, make_plan
from jaxshare.attention import api, xla
from jaxshare.attention.api import BACKENDS
from tests.helpers import (
    PLAIN,
    Scoring,
    Shelf,
    cache_with,
    mostly_slow,
    on_device,
    pad_rows,
    rotated,
)

TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 4e-2}
"""Absolute, for values of unit variance. bfloat16 rounds keys, queries and weights to 2**-9, and
scores reach 4."""

FAST = ("xla", *["cpu"] * cpu.available())
"""Backends that serve many rows and blocks; the reference unrolls them."""
ALL = (*FAST, "reference")
FASTEST_FIRST = [*dict.fromkeys([FAST[-1], *ALL])]


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static sizes: R rows, T tokens, N listed, B blocks, H and K heads, D, arena tokens,
    rotated entries."""

    rows: int
    width: int
    listed: int
    blocks: int
    heads: int
    kv_heads: int
    dim: int
    arena: int
    rotary: int
    dtype: type = jnp.float32
    factor: float = 1.0
    groups: tuple[int, ...] = ()
    scoring: Scoring = PLAIN
    latent: bool = False
    """A token's value is the part of its key that is not rotated, and not stored."""

    @property
    def rope(self) -> Rope:
        rope = Rope.default(self.rotary, 10_000.0) if self.rotary else Rope(())
        return dataclasses.replace(rope, attention_factor=self.factor)


GQA = Shape(rows=4, width=1, listed=4, blocks=6, heads=4, kv_heads=2, dim=16, arena=2400, rotary=16)
WIDE = Shape(
    rows=3,
    width=5,
    listed=4,
    blocks=6,
    heads=6,
    kv_heads=2,
    dim=20,
    arena=2400,
    rotary=12,
    factor=1.2,
)
MANY_BLOCKS = Shape(
    rows=2, width=3, listed=40, blocks=41, heads=4, kv_heads=1, dim=8, arena=3000, rotary=4
)
ONE_ROW = Shape(
    rows=1, width=1, listed=4, blocks=4, heads=2, kv_heads=1, dim=64, arena=2000, rotary=64
)
MANY_ROWS = Shape(
    rows=70, width=1, listed=3, blocks=73, heads=4, kv_heads=2, dim=8, arena=3000, rotary=8
)
ALIGNED = Shape(
    rows=3, width=1, listed=6, blocks=6, heads=4, kv_heads=2, dim=8, arena=1024, rotary=8
)
LARGE = dataclasses.replace(ALIGNED, arena=4096)
PROMPT = Shape(
    rows=2, width=70, listed=3, blocks=4, heads=4, kv_heads=2, dim=16, arena=1500, rotary=16
)
SMALL_ARENA = Shape(
    rows=3,
    width=4,
    listed=3,
    blocks=4,
    heads=2,
    kv_heads=2,
    dim=8,
    arena=40,
    rotary=4,
    factor=1.2,
)

BORDERS = (0, 1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257, 600)
SOME_BORDER = st.sampled_from(BORDERS)


@dataclasses.dataclass(frozen=True)
class Case:
    """One pass over given blocks. rows, count, lengths: plain lists."""

    rows: list[list[int]]
    count: list[int]
    lengths: list[int]
    order: list[int]
    gaps: list[int]
    phases: list[int]
    seed: int
    align: int = 1


@functools.partial(jax.jit, static_argnames=("implementation", "scale", "scoring"))
def attended(cache, layout, count, q, k, v, implementation, scale=None, scoring=PLAIN):
    plan = make_plan(cache, layout, count, q.shape[1], window=scoring.window)
    arenas = cache.keys[0], cache.values[0]
    plan = api.with_work(plan, q.shape[2], *arenas, implementation)
    out, *_ = api.append_and_attend(
        q,
        k,
        v,
        *arenas,
        plan,
        implementation=implementation,
        scale=scale,
        softcap=scoring.softcap,
        # In the dtype of checkpoints, which has these numbers.
        sinks=on_device(scoring.sinks, jnp.bfloat16) if scoring.sinks else None,
    )
    return out, plan.faults


def place(shape: Shape, case: Case):
    """(cache, layout, count, q, k, v) as jax arrays, and the oracle's answer."""
    rng = np.random.default_rng(case.seed)

    def rounded(*size: int) -> np.ndarray:
        return np.asarray(on_device(rng.normal(size=size), shape.dtype), np.float64)

    keys, values = ([rounded(n, shape.kv_heads, shape.dim) for n in case.lengths] for _ in range(2))

    def of_keys(k: np.ndarray) -> np.ndarray:
        return k[..., shape.rotary :]

    values = [of_keys(k) for k in keys] if shape.latent else values
    grown = list(case.lengths)
    for row, c in zip(case.rows, case.count, strict=True):
        if row:
            grown[row[-1]] += c
    offsets, at = [0] * shape.blocks, 0
    for block, gap in zip(case.order, case.gaps, strict=True):
        offsets[block] = -(-(at + gap) // case.align) * case.align
        at = offsets[block] + grown[block]
    assert at <= shape.arena
    cache = cache_with(
        keys,
        [v[..., :0] for v in values] if shape.latent else values,
        rope=shape.rope,
        offsets=offsets,
        capacities=grown,
        tokens=shape.arena,
        phases=case.phases,
        dtype=shape.dtype,
    )
    q, k, v = (
        rounded(shape.rows, shape.width, n, shape.dim)
        for n in (shape.heads, shape.kv_heads, shape.kv_heads)
    )
    v = of_keys(k) if shape.latent else v
    shelf = Shelf([list(zip(k_, v_, strict=True)) for k_, v_ in zip(keys, values, strict=True)])
    shelf.append(case.rows, case.count, k, v)
    scale = shape.dim**-0.5
    expected = shelf.attend(case.rows, case.count, q, shape.rope, scale, shape.scoring)
    if shape.latent:  # where there is no token at all, the oracle does not know their size
        expected = expected[..., : shape.dim - shape.rotary]
    count = on_device(case.count + [0] * (shape.rows - len(case.rows)), jnp.int32)
    layout = dataclasses.replace(pad_rows(case.rows, shape.rows, shape.listed), groups=shape.groups)
    v = v[..., :0] if shape.latent else v
    return (cache, layout, count, *(on_device(x, shape.dtype) for x in (q, k, v))), expected


def check(shape: Shape, case: Case, implementations=ALL) -> None:
    compare(shape, *place(shape, case), implementations)


def compare(shape: Shape, arguments, expected, implementations=ALL) -> None:
    real = ~np.isnan(expected[..., 0])
    for implementation in implementations:
        out, faults = attended(*arguments, implementation=implementation, scoring=shape.scoring)
        assert out.shape == expected.shape and int(faults) == 0
        out = np.asarray(out, np.float64)
        assert np.isfinite(out).all()
        assert np.abs(out - expected)[real].max(initial=0.0) < TOLERANCE[shape.dtype], (
            implementation
        )


def in_pieces(arguments, expected, size: int):
    """The same pass with each row's tokens in pieces, which are rows of their own."""
    cache, layout, count, *new = arguments
    rows, width = new[0].shape[:2]
    parts = -(-width // size)

    def cut(x, unused):
        sizes = [(0, 0), (0, parts * size - width), (0, 0), (0, 0)]
        padded = np.pad(np.asarray(x), sizes, constant_values=unused)
        return padded.reshape(rows * parts, size, *x.shape[2:])

    ahead = np.tile(size * np.arange(parts), rows)
    layout = dataclasses.replace(
        layout,
        blocks=jnp.repeat(layout.blocks, parts, axis=0),
        ahead=on_device(ahead, jnp.int32),
    )
    count = np.clip(np.repeat(np.asarray(count), parts) - ahead, 0, size)
    arguments = cache, layout, on_device(count), *(on_device(cut(x, 0)) for x in new)
    return arguments, cut(expected, np.nan)


def fitting(lengths: list[int], limit: int) -> list[int]:
    """The lengths, with 0 for those that would no longer fit into the arena."""
    kept, total = [], 0
    for n in lengths:
        kept.append(n if total + n <= limit else 0)
        total += kept[-1]
    return kept


@st.composite
def cases(draw, shape: Shape, lengths=SOME_BORDER):
    """Layouts of any order and fan-in, empty blocks, ragged counts, rows not in use, forks, extents
    anywhere in the arena."""
    used = draw(st.integers(1, min(shape.rows, shape.blocks)))
    writers = draw(st.permutations(range(shape.blocks)))[:used]
    rows = []
    for own in writers:
        others = st.lists(
            st.sampled_from([b for b in range(shape.blocks) if b != own]),
            unique=True,
            max_size=shape.listed - 1,
        )
        rows.append([*draw(others), own] if used == 1 or draw(st.integers(0, 7)) else [])
    count = [draw(st.integers(0, shape.width)) if row else 0 for row in rows]
    spare = shape.arena - shape.rows * shape.width - shape.blocks
    sizes = fitting(draw(st.lists(lengths, min_size=shape.blocks, max_size=shape.blocks)), spare)
    return Case(
        rows,
        count,
        sizes,
        list(draw(st.permutations(range(shape.blocks)))),
        draw(st.lists(st.integers(0, 1), min_size=shape.blocks, max_size=shape.blocks)),
        draw(
            st.lists(st.sampled_from([0, 0, 3, 4000]), min_size=shape.blocks, max_size=shape.blocks)
        ),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=40)
@given(cases(GQA))
def test_one_token_a_row(case):
    check(GQA, case)


# Programs of these cases take long to compile: `make test` has one backend; all have one token a
# row, and ragged ones in a small arena.
ONE_BACKEND = pytest.mark.parametrize("implementation", mostly_slow(FASTEST_FIRST))


@ONE_BACKEND
@settings(max_examples=40)
@given(case=cases(WIDE))
def test_ragged_tokens_partial_rotary_and_an_attention_factor(implementation, case):
    check(WIDE, case, implementations=(implementation,))


@ONE_BACKEND
@settings(max_examples=30)
@given(case=cases(WIDE), groups=st.sampled_from([(), (4,)]))
def test_rows_in_pieces(implementation, case, groups):
    shape = dataclasses.replace(WIDE, groups=groups)
    compare(shape, *in_pieces(*place(shape, case), 2), implementations=(implementation,))


GROUPED = dataclasses.replace(GQA, groups=(2, 3))
GROUPED_WIDE = dataclasses.replace(WIDE, groups=(2,))


@settings(max_examples=40)
@given(cases(GROUPED))
def test_groups_of_rows(case):
    """Blocks that two rows see, that three see, that all four see."""
    check(GROUPED, case, implementations=FAST)


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(GROUPED_WIDE))
def test_groups_of_rows_with_ragged_tokens(case):
    check(GROUPED_WIDE, case, implementations=FAST)


@pytest.mark.parametrize(
    "shape", [pytest.param(GROUPED, marks=pytest.mark.slow), WIDE], ids=["groups", "ragged"]
)
def test_iterations_that_change_only_the_rows_they_read_for(shape, monkeypatch):
    """The path for many rows. Rows read several tiles of a block, some of them in one iteration,
    and blocks one after the other."""
    monkeypatch.setattr(xla, "_MANY_ROWS", 0)
    monkeypatch.setattr(xla, "_ROWS_PER_READER", 0)
    whole = attended.__wrapped__

    def traced_anew(*arguments, **more):
        return whole(*arguments, **more)

    anew = jax.jit(traced_anew, static_argnames=("implementation", "scale", "scoring"))
    monkeypatch.setitem(globals(), "attended", anew)

    @settings(max_examples=25)
    @given(cases(shape))
    def all_cases(case):
        check(shape, case, implementations=("xla",))

    all_cases()


SOME_LENGTHS = st.sampled_from([0, 0, 1, 2, 5, 17, 64, 65, 300])


@settings(max_examples=25)
@given(cases(MANY_BLOCKS, lengths=SOME_LENGTHS))
@pytest.mark.slow
def test_one_to_forty_blocks_of_one_kv_head(case):
    # The reference unrolls every block of every row: it takes a minute to compile, and numpy judges
    # as well.
    check(MANY_BLOCKS, case, implementations=FAST)


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(MANY_BLOCKS, lengths=SOME_LENGTHS))
def test_one_to_forty_blocks_by_the_reference(case):
    check(MANY_BLOCKS, case, implementations=("reference",))


@ONE_BACKEND
@settings(max_examples=20)
@given(case=cases(ONE_ROW))
def test_one_row(implementation, case):
    check(ONE_ROW, case, implementations=(implementation,))


@pytest.mark.slow
@settings(max_examples=30)
@given(st.data())
def test_blocks_of_one_row_each_that_fill_the_arena(data):
    """Aligned extents, full or almost, one row each: the arena may be read without gathering.
    Sometimes one of them is shared."""
    lengths = [data.draw(st.sampled_from([0, 1, 510, 511, 1023])) for _ in range(LARGE.blocks)]
    lengths = fitting([-(-(n + 1) // 128) * 128 for n in lengths], LARGE.arena), lengths
    lengths = [n if capacity else 0 for capacity, n in zip(*lengths, strict=True)]
    order = data.draw(st.permutations(range(LARGE.blocks)))
    used = [b for b, n in enumerate(lengths) if n] or [0]
    rows = [used[r :: LARGE.rows] for r in range(LARGE.rows)]
    if data.draw(st.booleans()):
        rows[0] = [b for b in used if b not in rows[0]][:1] + rows[0]
    count = [data.draw(st.integers(0, 1)) if row else 0 for row in rows]
    align = data.draw(st.sampled_from([128, 128, 1]))
    check(
        LARGE,
        Case(rows, count, lengths, list(order), [0] * LARGE.blocks, [0] * LARGE.blocks, 3, align),
        implementations=FAST,
    )


@pytest.mark.parametrize("shape", mostly_slow([ALIGNED, LARGE]))
@pytest.mark.parametrize("part", mostly_slow([0.55, 1.0, 0.1]))
@pytest.mark.parametrize("on_tiles", [True, False])
def test_workers_over_blocks_that_all_of_them_see(shape, part, on_tiles):
    """An arena that is full, half full or nearly empty, large blocks on its tiles or beside them:
    read directly, or gathered."""
    own, capacities = [1, 2, 3], [shape.arena // 2, *[shape.arena // 8] * 3, 0, 0]
    rows = [[0, *(b for b in own if b != r), r] for r in own]
    lengths = [int(part * n) - (not on_tiles) for n in capacities[:4]] + [0, 0]
    lengths = [n - 1 if b in own and part == 1 else max(n, 0) for b, n in enumerate(lengths)]
    case = Case(
        rows,
        [1, 1, 0 if part == 0.55 else 1],
        lengths,
        [0, 3, 1, 2, 4, 5],
        [0] * 6,
        [0, 5, 0, 0, 0, 0],
        1,
        128 if on_tiles else 1,
    )
    check(shape, case, implementations=FAST)


@pytest.mark.slow
@settings(max_examples=15)
@given(cases(SMALL_ARENA, lengths=st.integers(0, 9)))
def test_an_arena_smaller_than_a_tile_and_as_many_kv_heads_as_heads(case):
    check(SMALL_ARENA, case)


@ONE_BACKEND
@settings(max_examples=8)
@given(case=cases(PROMPT))
def test_prompts_beside_single_tokens(implementation, case):
    check(PROMPT, case, implementations=(implementation,))


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(dataclasses.replace(GQA, dtype=jnp.bfloat16)))
def test_one_token_a_row_in_bfloat16(case):
    check(dataclasses.replace(GQA, dtype=jnp.bfloat16), case)


@pytest.mark.slow
@settings(max_examples=25)
@given(cases(dataclasses.replace(WIDE, dtype=jnp.bfloat16)))
def test_ragged_tokens_in_bfloat16(case):
    check(dataclasses.replace(WIDE, dtype=jnp.bfloat16), case)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.data())
def test_seventy_rows(data):
    """Over one prefix, over two, over each other's blocks, or each alone. The reference unrolls its
    rows, so numpy is the only judge."""
    kind = data.draw(st.sampled_from(["one prefix", "two prefixes", "neighbours", "alone"]))
    at = 3
    rows = {
        "one prefix": [[0, r + at] for r in range(70)],
        "two prefixes": [[r % 2, 2, r + at] for r in range(70)],
        "neighbours": [[0, (r + 1) % 70 + at, r + at] for r in range(70)],
        "alone": [[r + at] for r in range(70)],
    }[kind]
    private = data.draw(st.lists(st.sampled_from([0, 1, 3, 9, 30]), min_size=70, max_size=70))
    private[data.draw(st.integers(0, 69))] = 257
    count = data.draw(st.lists(st.integers(0, 1), min_size=70, max_size=70))
    lengths = [600, 65, data.draw(st.sampled_from([0, 256])), *fitting(private, 1900)]
    case = Case(rows, count, lengths, list(range(73)), [0] * 73, [0] * 73, 5)
    check(MANY_ROWS, case, implementations=FAST)


def test_a_short_prefix_at_the_end_of_the_arena_that_half_of_the_rows_see():
    """Its tile starts before it does; for rows that do not see it there must be nothing in it."""
    rows = [[2, r + 3] if r % 2 else [2, 1, r + 3] for r in range(70)]
    case = Case(
        rows, [1] * 70, [0, 65, 100, *[3] * 70], [0, *range(2, 73), 1], [0] * 73, [0] * 73, 5
    )
    check(dataclasses.replace(MANY_ROWS, arena=65 + 100 + 4 * 70), case, implementations=FAST)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data())
def test_a_tree_of_seventy_rows_in_groups(data):
    """A root that all see, branches of uneven fan-in below it, and a block of each row's own, rows
    in any order."""
    order = data.draw(st.permutations(range(70)))
    first = data.draw(st.integers(1, 69))
    rows: list[list[int]] = [[] for _ in range(70)]
    for i, r in enumerate(order):
        rows[r] = [0, 1 if i < first else 2, r + 3]
    count = data.draw(st.lists(st.integers(0, 1), min_size=70, max_size=70))
    lengths = [
        600,
        data.draw(st.sampled_from([1, 129, 400])),
        300,
        *[data.draw(st.integers(0, 9))] * 70,
    ]
    case = Case(rows, count, lengths, list(range(73)), [0] * 73, [0] * 73, 5)
    check(dataclasses.replace(MANY_ROWS, groups=(4, 40)), case, implementations=FAST)


@pytest.mark.parametrize("length", BORDERS)
def test_every_tile_border(length):
    """One block of each length shared by all rows, one private, one read by some: the arena ends
    where the last block does."""
    case = Case(
        [[0, 1], [0, 2, 3], [0, 3, 2], [0, 4]],
        [1, 1, 1, 1],
        [length, min(length, 256), 5, 64, length, 0],
        [3, 1, 0, 2, 5, 4],
        [1] * 6,
        [0, 0, 0, 7, 0, 0],
        1,
    )
    check(GQA, case)
    total = 3 * length if length <= 256 else 2 * length + 256
    tight = dataclasses.replace(GQA, arena=total + 6 + 69 + 4)
    if length == 257:  # one arena more is one program more
        check(tight, case, implementations=FAST)


@functools.partial(jax.jit, static_argnames="forks")
def forked(cache, layout, forks):
    for block, at, tail in forks:
        cache, layout = cache.fork(block, at, tail), layout.fork(block, tail)
    return cache, layout


def test_forks_read_the_same_tokens():
    """Cut in two, and in three, nothing changes for the rows that read the block; another row goes
    on from the middle."""
    case = Case(
        [[0, 1], [0, 3]], [1, 1], [300, 20, 0, 40, 0, 0], list(range(6)), [0] * 6, [0] * 6, 3
    )
    (cache, layout, count, q, k, v), expected = place(GQA, case)
    cache, layout = forked(cache, layout, ((0, 130, 4), (4, 65, 5)))
    np.testing.assert_array_equal(layout.blocks, [[0, 4, 5, 1], [0, 4, 5, 3], [-1] * 4, [-1] * 4])
    # Row 2 lists the head of the fork alone and continues in block 2, at the arena's end.
    cache = dataclasses.replace(
        cache, offsets=cache.offsets.at[2].set(2390), capacities=cache.capacities.at[2].set(5)
    )
    layout = Layout(layout.blocks.at[2, :2].set(on_device([0, 2])))
    keys, values = (
        np.asarray(a[0], np.float64).swapaxes(0, 1)[:130] for a in (cache.keys, cache.values)
    )
    shelf = Shelf(
        [list(zip(rotated(keys, -np.arange(130), GQA.rope), values, strict=True)), [], []]
    )
    new_q, new_k, new_v = (np.asarray(x)[2:3] for x in (q, k, v))
    shelf.append([[0, 2]], [1], new_k, new_v)
    branch = shelf.attend([[0, 2]], [1], new_q, GQA.rope, GQA.dim**-0.5)
    for implementation in ALL:
        out = np.asarray(attended(cache, layout, count.at[2].set(1), q, k, v, implementation)[0])
        np.testing.assert_allclose(out[:2], expected[:2], atol=TOLERANCE[jnp.float32])
        np.testing.assert_allclose(out[2], branch[0], atol=TOLERANCE[jnp.float32])


def test_far_positions_are_as_good_as_near_ones():
    """Phases near a million: the dot product still depends on the distance alone."""
    case = Case(
        [[0, 1], [0, 2]], [1, 1], [257, 30, 65, 0, 0, 0], list(range(6)), [0] * 6, [0] * 6, 9
    )
    near, expected = place(GQA, case)
    far, _ = place(GQA, dataclasses.replace(case, phases=[999_000, 1_000_000, 500_000, 0, 0, 0]))
    assert not np.array_equal(near[0].keys[0], far[0].keys[0])
    for implementation in ALL:
        out, _ = attended(*far, implementation=implementation)
        np.testing.assert_allclose(np.asarray(out)[:2], expected[:2], atol=TOLERANCE[jnp.float32])


def test_large_scores_do_not_overflow():
    case = Case(
        [[0, 1], [0, 2]], [1, 1], [300, 70, 0, 0, 0, 0], list(range(6)), [0] * 6, [0] * 6, 2
    )
    (cache, layout, count, q, k, v), _ = place(GQA, case)
    expected, _ = attended(cache, layout, count, q * 300, k, v, "reference")
    for implementation in FAST:
        out, _ = attended(cache, layout, count, q * 300, k, v, implementation)
        assert np.isfinite(np.asarray(out)).all()
        # scores of about 1000 are good to 1e-4 in float32
        np.testing.assert_allclose(out[:2], expected[:2], atol=2e-3)


@pytest.mark.parametrize("implementation", mostly_slow(FASTEST_FIRST))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_result_has_the_dtype_of_q(implementation, dtype):
    shape = dataclasses.replace(SMALL_ARENA, dtype=dtype)
    case = Case([[0, 1]], [2], [5, 4, 0, 0], [0, 1, 2, 3], [0] * 4, [0] * 4, 0)
    out, _ = jax.eval_shape(
        functools.partial(attended, implementation=implementation), *place(shape, case)[0]
    )
    assert out.dtype == dtype and out.shape == (shape.rows, shape.width, shape.heads, shape.dim)


@pytest.mark.parametrize("implementation", mostly_slow(FASTEST_FIRST))
def test_a_cache_of_another_dtype_leaves_the_dtype_of_q(implementation):
    """The promise of the docstring: float32 activations over a bfloat16 cache stay float32."""
    (cache, layout, count, q, k, v), expected = place(
        SMALL_ARENA, Case([[0, 1]], [2], [5, 4, 0, 0], [0, 1, 2, 3], [0] * 4, [0] * 4, 0)
    )
    cache = dataclasses.replace(
        cache,
        **{n: tuple(a.astype(jnp.bfloat16) for a in getattr(cache, n)) for n in ("keys", "values")},
    )
    out, _ = attended(cache, layout, count, q, k, v, implementation)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out[0, :2], expected[0, :2], atol=TOLERANCE[jnp.bfloat16])


@pytest.mark.slow
def test_scale():
    (cache, layout, count, q, k, v), _ = place(
        ONE_ROW, Case([[0, 1]], [1], [20, 4, 0, 0], list(range(4)), [0] * 4, [0] * 4, 2)
    )
    for implementation in ALL:
        halved, _ = attended(cache, layout, count, q, k, v, implementation, scale=0.5)
        # 0.5 = 4 / sqrt(64)
        quadrupled, _ = attended(cache, layout, count, q * 4, k, v, implementation)
        plain, _ = attended(cache, layout, count, q, k, v, implementation)
        np.testing.assert_allclose(halved, quadrupled, atol=1e-5)
        assert np.abs(np.asarray(halved - plain)).max() > 1e-2


# dispatch


@pytest.fixture(scope="module")
def small():
    cache, layout, count, q, _, _ = place(
        SMALL_ARENA, Case([[0, 1]], [2], [5, 4, 0, 0], [0, 1, 2, 3], [0] * 4, [0] * 4, 0)
    )[0]
    # nothing here looks at its numbers
    plan = jax.eval_shape(functools.partial(make_plan, width=q.shape[1]), cache, layout, count)
    return q, cache.keys[0], cache.values[0], plan


@pytest.fixture
def backends(monkeypatch):
    """Backends that answer with a constant, and two that can do nothing."""

    def constant(number: float):
        return lambda q, keys, values, plan, scale: jnp.full(q.shape, number)

    def unable(why: str):
        def backend(q, keys, values, plan, scale):
            raise NotImplementedError(why)

        return backend

    made = {
        "one": constant(1.0),
        "two": constant(2.0),
        "no_gpu": unable("no GPU here"),
        "odd": unable("heads are odd"),
    }
    for name, backend in made.items():
        monkeypatch.setitem(BACKENDS, name, backend)
    return monkeypatch


def test_the_named_backend_is_used(small, backends):
    assert (block_attention(*small, implementation="one") == 1).all()
    assert (block_attention(*small, implementation=["two", "one"]) == 2).all()
    assert (block_attention(*small, implementation=("no_gpu", "odd", "two", "one")) == 2).all()


def test_without_a_name_the_preferred_backend_is_used(small, backends):
    backends.setattr(api, "preferred", lambda *_: ("no_gpu", "one"))
    assert (block_attention(*small) == 1).all()


def test_when_none_can_all_reasons_are_given(small, backends):
    with pytest.raises(NotImplementedError, match=r"no_gpu: no GPU here$"):
        block_attention(*small, implementation="no_gpu")
    with pytest.raises(NotImplementedError, match="odd: heads are odd; no_gpu: no GPU here"):
        block_attention(*small, implementation=("odd", "no_gpu"))


def test_other_errors_are_not_swallowed(small, backends):
    def broken(q, keys, values, plan, scale):
        raise ZeroDivisionError

    backends.setitem(BACKENDS, "broken", broken)
    with pytest.raises(ZeroDivisionError):
        block_attention(*small, implementation=("broken", "one"))


@pytest.mark.parametrize("implementation", ["flash", ("xla", "flash")])
def test_an_unknown_backend_is_refused_before_anything_runs(small, implementation):
    with pytest.raises(
        ValueError, match=r"there is no attention backend 'flash'; there are .*xla.*reference"
    ):
        block_attention(*small, implementation=implementation)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda q, k, v: (q[:2], k, v),
            r"q must be \[R, T, H, D\] with R, T = 3, 4 as planned; got \(2, 4, 2, 8\)",
        ),
        (lambda q, k, v: (q[:, :3], k, v), r"R, T = 3, 4"),
        (lambda q, k, v: (q[0], k, v), r"R, T = 3, 4"),
        (lambda q, k, v: (q, k[:, :9], v), r"of one shape"),
        (lambda q, k, v: (q, k[..., :4], v[..., :4]), r"arenas \[K, tokens, 8\]"),
        (lambda q, k, v: (q[:, :, :1], k, v), r"K dividing 1 heads"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(small, change, words):
    q, keys, values, plan = small
    with pytest.raises(ValueError, match=words):
        block_attention(*change(q, keys, values), plan)
