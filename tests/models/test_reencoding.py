"""Re-encoding traces, against sessions of workers, a host loop over one cache and naive attention.

The naive attention gathers each query's keys.
"""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout
from jaxshare.models import EMBEDDED, layers, load, reencode, reencode_logits
from jaxshare.models.generation_config import Generation
from jaxshare.models.layers import Decoder
from jaxshare.models.loading import LoadedModel
from jaxshare.serving import Workers
from jaxshare.serving.engine import Engine
from jaxshare.sharding import make_mesh
from jaxshare.trace.attention import CHUNK, TILE, TraceBatch, trace_attention
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace
from tests.core.trace.test_trace import LISTED, Lists, random_session
from tests.helpers import TINY, DenseModel, on_device, tiny_params
from tests.serving.workers.test_session import NAMES, start

CLOSE = dict(atol=1e-4, rtol=1e-4)


def tiny() -> LoadedModel:
    return LoadedModel(TINY, tiny_params(), None, Generation())


def contents(cache: KVCache) -> Iterator[np.ndarray]:
    """Yields keys and values of each block and layer."""
    for arena in (*cache.keys, *cache.values):
        for at, count in zip(np.asarray(cache.offsets), np.asarray(cache.lengths), strict=True):
            yield np.asarray(arena, np.float32)[:, at : at + count]


def assert_same_cache(got: KVCache, expected: KVCache, **close) -> None:
    for name in ("lengths", "capacities", "phases", "faults"):
        np.testing.assert_array_equal(getattr(got, name), getattr(expected, name))
    for a, b in zip(contents(got), contents(expected), strict=True):
        np.testing.assert_allclose(a, b, **close)


# A host loop over one cache


def copied(cache: KVCache) -> KVCache:
    """Copies a cache for a function that donates it."""
    return jax.tree.map(jnp.copy, cache)


@functools.cache
def scripted(seed: int, passes: int = 24) -> tuple[Trace, Lists, np.ndarray, np.ndarray, KVCache]:
    """Runs one script in a recorder, as lists, pass by pass in a cache, and in float64 numpy.

    Returns:
      The trace, the tokens that each token sees, the logits of cache and numpy, and the cache at
      the end.
    """
    rng = random.Random(seed)
    recorder, lists, dense = (
        Recorder(4, [200, 48, 48, 48]),
        Lists([[] for _ in range(4)]),
        DenseModel(TINY, tiny_params(), 4),
    )
    cache, padding = KVCache.create(TINY, [200, 48, 48, 48], jnp.float32), 6
    ran, exact = [], []

    def feed(tokens: list[list[int]], rows: list[list[int]]) -> None:
        nonlocal cache
        recorder.feed(tokens, rows)
        lists.feed([*map(len, tokens)], rows)
        padded = np.zeros((3, padding), np.int32)
        for r, new in enumerate(tokens):
            padded[r, : len(new)] = new
        count = [*map(len, tokens), *[0] * (3 - len(tokens))]
        logits, cache = layers.forward(
            TINY,
            tiny_params(),
            padded,
            count,
            cache,
            Layout.from_blocks(rows, num_rows=3, width=3),
            every=True,
        )
        ran.extend(np.asarray(logits)[r, :n] for r, n in enumerate(count))
        exact.extend(dense.forward(tokens, rows))

    feed([[rng.randrange(101) for _ in range(6)]], [[0]])
    for _ in range(passes):
        feed(
            [[rng.randrange(101) for _ in range(rng.choice((0, 1, 1, 1, 5)))] for _ in LISTED],
            [*map(list, LISTED)],
        )
        for source in (1, 2, 3):
            if rng.random() < 0.12:
                recorder.move(source, 0)
                lists.move(source, 0)
                dense.move(source, 0)
                cache = cache.move(source, 0)
    return recorder.trace(), lists, np.concatenate(ran), np.concatenate(exact), cache


@pytest.mark.parametrize("seed", range(2))
def test_it_equals_what_was_run_pass_by_pass(seed):
    trace, _, ran, exact, cache = scripted(seed)
    assert trace.num_tokens > 90 and len(trace.placement_tokens) > trace.num_tokens + 20, (
        "nothing moved: the test shows nothing about moves"
    )
    logits, got = reencode(tiny(), trace)
    np.testing.assert_allclose(logits, ran, **CLOSE)
    np.testing.assert_allclose(logits, exact, **CLOSE)
    assert_same_cache(got, cache, **CLOSE)


def test_logits_of_some_tokens_alone():
    trace, _, ran, _, cache = scripted(0)
    for at in ([5], [trace.num_tokens - 1, 0, 40], []):
        logits, got = reencode(tiny(), trace, at=at)
        assert logits.shape == (len(at), TINY.vocab_size)
        np.testing.assert_allclose(logits, ran[at], **CLOSE)
    assert_same_cache(got, cache, **CLOSE)
    for outside in (-1, trace.num_tokens):
        with pytest.raises(
            ValueError, match=f"at names token {outside}, but the trace has tokens 0 to"
        ):
            reencode(tiny(), trace, at=[0, outside])


def test_the_session_goes_on_from_the_cache():
    trace, _, _, _, cache = scripted(1)
    _, got = reencode(tiny(), trace)
    tokens, count, layout = np.full((3, 6), 4), np.asarray([1, 6, 3]), Layout.from_blocks(LISTED)
    expected, _ = layers.forward(
        TINY, tiny_params(), tokens, count, copied(cache), layout, every=True
    )
    logits, _ = layers.forward(TINY, tiny_params(), tokens, count, got, layout, every=True)
    for row, real in enumerate(count):
        np.testing.assert_allclose(logits[row, :real], expected[row, :real], **CLOSE)


def test_it_fills_a_cache_that_held_something_else():
    trace, _, ran, _, cache = scripted(1)
    capacities = [c + 128 for c in trace.capacities.tolist()]
    used = KVCache.create(TINY, capacities, jnp.float32)
    _, used = layers.forward(
        TINY,
        tiny_params(),
        np.full((3, 6), 4),
        [6, 6, 6],
        used,
        Layout.from_blocks([[0], [1], [3]]),
        every=True,
    )
    used = dataclasses.replace(used, phases=used.phases + 5)
    logits, got = reencode(tiny(), trace, at=[7], into=used)
    np.testing.assert_allclose(logits, ran[[7]], **CLOSE)
    assert got.capacities.tolist() == capacities
    assert_same_cache(dataclasses.replace(got, capacities=cache.capacities), cache, **CLOSE)
    for sizes in ([8] * 4, [512] * 3):
        with pytest.raises(ValueError, match=r"blocks hold .* give a cache with room for them"):
            reencode(tiny(), trace, into=KVCache.create(TINY, sizes, jnp.float32))


def test_a_trace_of_one_row_is_plain_causal_attention():
    tokens = np.random.default_rng(3).integers(0, TINY.vocab_size, 2 * CHUNK + 20)
    recorder = Recorder(2)
    recorder.text(tokens[:100], 0)
    for token in tokens[100:]:
        recorder.feed([[token]], [[0, 1]])
    logits, cache = reencode(tiny(), recorder.trace())
    plain = jax.jit(functools.partial(Decoder(TINY).apply, method="causal"))(
        tiny_params(), tokens[None]
    )
    np.testing.assert_allclose(logits, plain[0], **CLOSE)
    assert cache.lengths.tolist() == [100, len(tokens) - 100]


def test_in_bfloat16_the_difference_is_that_of_rounding():
    trace, _, _, exact, _ = scripted(0)
    model = dataclasses.replace(
        tiny(), params=jax.tree.map(lambda p: p.astype(jnp.bfloat16), tiny_params())
    )
    logits, cache = reencode(model, trace)
    assert cache.keys[0].dtype == jnp.bfloat16
    assert np.mean(np.abs(np.asarray(logits) - exact)) < 0.03 * np.std(exact)


# Sessions of workers

Acts = dict[int, Callable[[Workers], object]]


def follow(session: Workers, looks: list[int], acts: Acts | None = None) -> Trace:
    """Runs a session, and compares its logits and cache with those of the re-encoded trace.

    The logits are those of its rows at each look.
    """
    numbers, logits = [], []
    for look in looks:
        for _ in session.stream(look):
            pass
        trace = session.trace
        rows = trace.rows[trace.row_pass]
        for row in map(session.row, session.names):
            if bool(session._session.state.has_logits[row]):
                numbers.append(int(np.flatnonzero(rows == row)[-1]))
                logits.append(np.asarray(session._session.state.logits[row]))
        (acts or {}).get(look, lambda _: None)(session)
    trace = session.trace
    got, cache = reencode(session.model, trace, at=numbers)
    np.testing.assert_allclose(got, np.stack(logits), **CLOSE)
    # A step that had a larger extent for a while has it to the end in the trace.
    assert np.all(np.asarray(cache.capacities) >= np.asarray(session.cache.capacities))
    same = dataclasses.replace(cache, capacities=session.cache.capacities)
    assert_same_cache(same, session.cache, **CLOSE)
    return trace


LOOKS = [*range(1, 24), 30, 46, 50, 51, 69, 70]
ACTS: Acts = {
    8: lambda s: s.say(" 47 + 38 = 85."),
    15: lambda s: s.pause("Alice"),
    20: lambda s: s.add("Carol"),
    22: lambda s: s.resume("Alice"),
    30: lambda s: s.remove("Bob"),
    46: lambda s: s.add("Bob"),
}


@pytest.mark.slow
def test_a_session_in_which_workers_come_and_go_and_a_person_speaks():
    session = start(ask_every=25, record=True)
    trace = follow(session, LOOKS, ACTS)
    assert len(trace.placement_tokens) > trace.num_tokens + 20 and trace.names == session.blocks
    said = model_tokens(session, "User 1: 47 + 38 = 85.")
    texts = trace.tokens[trace.rows[trace.row_pass] == -1].tolist()
    assert any(texts[i : i + len(said)] == said for i in range(len(texts)))
    sampled = [token for step in session.steps if step.worker == "Carol" for token in step.tokens]
    assert len(sampled) > 20
    assert subsequence(
        sampled[:-1], trace.tokens[trace.rows[trace.row_pass] == session.row("Carol")].tolist()
    ), "the last one is not yet fed"


def model_tokens(session: Workers, text: str) -> list[int]:
    return session.model.tokenizer.encode(text, add_special_tokens=False)


def subsequence(short: list[int], long: list[int]) -> bool:
    rest = iter(long)
    return all(token in rest for token in short)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({"layout": "contiguous"}, False),
        ({"layout": "interleaved"}, True),
        ({"names": NAMES}, True),
        ({"move": "reencode"}, False),
        ({"step_tokens": 24}, True),
        ({"names": NAMES[:1]}, True),
    ],
    ids=str,
)
def test_sessions(options, moves):
    """Covers all layouts, steps that are re-encoded, and steps that move in pieces."""
    session = start(**{"names": NAMES[:2], "ask_every": 25, "record": True, **options})
    trace = follow(session, LOOKS)
    assert (
        any(step.asked for step in session.steps)
        and (len(trace.placement_tokens) > trace.num_tokens) == moves
    )


@pytest.mark.slow
def test_what_the_finisher_guesses_is_no_part_of_the_trace():
    quiet, asked = (start(ask_every=25, record=True) for _ in range(2))
    trace, disturbed = (
        follow(quiet, LOOKS, ACTS),
        follow(asked, LOOKS, ACTS | {12: Workers.finish, 50: Workers.finish}),
    )
    for field in dataclasses.fields(Trace):
        np.testing.assert_array_equal(getattr(trace, field.name), getattr(disturbed, field.name))


@pytest.mark.slow
def test_a_session_in_the_memory_of_an_engine():
    with Engine(load(EMBEDDED), kv_bytes=48 * 1024**2) as engine:
        session = Workers(
            engine.model, "1. 47 + 38\n2. 12 * 7", budget=40, record=True, engine=engine
        )
        for _ in session.stream():
            pass
        _, cache = reencode(engine.model, session.trace)
        held = session.cache
        assert int(held.lengths.sum()) > 100
        assert_same_cache(cache, held, **CLOSE)


def test_a_session_keeps_no_trace_unless_asked():
    session = start(ask_every=25)
    with pytest.raises(ValueError, match="the session keeps no trace; create it with record=True"):
        _ = session.trace
    assert session._session.state.record.capacity == 0


# Gradients, against attention that gathers each query's keys


def gathered(sees: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens that each token sees in its row's order, int[T, M], and their number."""
    table = np.zeros((len(sees), max(map(len, sees))), np.int64)
    for token, row in enumerate(sees):
        table[token, : len(row)] = row
    return table, np.asarray([len(row) for row in sees])


def turned(x, positions, rope):
    """Rotates x [..., heads, D] to positions [...], by complex numbers."""
    pairs = len(rope.frequencies)
    angle = positions[..., None, None].astype(jnp.float32) * on_device(
        rope.frequencies, jnp.float32
    )
    wave = jnp.exp(jax.lax.complex(jnp.zeros_like(angle), angle)) * rope.attention_factor
    y = jax.lax.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * wave
    return jnp.concatenate([y.real, y.imag, x[..., 2 * pairs :]], axis=-1)


def naive_attention(q, k, v, sees, count, rope):
    """Attends with one query after the other, over its own keys rotated to their places.

    q [T, H, D], k, v [T, K, D].
    """
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5

    def one(q, sees, count):
        keys = jnp.repeat(turned(k[sees], jnp.arange(sees.shape[0]), rope), group, axis=1)
        scores = (
            jnp.einsum("hd,mhd->hm", turned(q, count - 1, rope), keys, precision="highest") * scale
        )
        weights = jax.nn.softmax(
            jnp.where(jnp.arange(sees.shape[0]) < count, scores, -jnp.inf), axis=-1
        )
        return jnp.einsum(
            "hm,mhd->hd", weights, jnp.repeat(v[sees], group, axis=1), precision="highest"
        )

    return jax.vmap(one)(q, sees, count)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kv_heads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_gradients_of_attention_with_shared_and_with_own_kv_heads(kv_heads):
    """Covers several chunks and tiles, and padding after the last token."""
    recorder, lists = random_session(5, passes=150)
    trace = recorder.trace()
    assert trace.num_tokens > 2 * CHUNK and len(trace.placement_tokens) > 4 * TILE
    batch, rng, size = TraceBatch.of([trace]), np.random.default_rng(0), trace.num_tokens
    q, k, v, weight = (
        on_device(rng.normal(size=(batch.shape[1], heads, 16)), jnp.float32)
        for heads in (4, kv_heads, kv_heads, 4)
    )

    def ours(q, k, v):
        out = trace_attention(q[None], k[None], v[None], batch, TINY.rope)[0]
        return jnp.sum(out[:size] * weight[:size]), out

    def naive(q, k, v):
        out = naive_attention(q[:size], k[:size], v[:size], *gathered(lists.sees), TINY.rope)
        return jnp.sum(out * weight[:size]), out

    (_, out), found = jax.jit(jax.value_and_grad(ours, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    (_, expected), wanted = jax.jit(jax.value_and_grad(naive, argnums=(0, 1, 2), has_aux=True))(
        q, k, v
    )
    np.testing.assert_allclose(out[:size], expected, atol=1e-5)
    assert not out[size:].any()
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4)
        assert np.abs(b).max() > 0.1


def test_what_is_not_finite_reaches_nobody_who_does_not_see_it():
    recorder = Recorder(3)
    recorder.text([1, 2, 3], 0)
    for _ in range(4):
        alone, lost = recorder.feed([[4], [5]], [[0, 1], [0, 2]])
    batch, rng = TraceBatch.of([recorder.trace()]), np.random.default_rng(1)
    q, k, v = (on_device(rng.normal(size=(1, CHUNK, 2, 16)), jnp.float32) for _ in range(3))
    attend = jax.jit(lambda k, v: trace_attention(q, k, v, batch, TINY.rope)[0])
    broken = attend(k.at[0, lost].set(jnp.nan), v.at[0, lost].set(jnp.inf))
    np.testing.assert_array_equal(broken[alone], attend(k, v)[alone])


def naive_logits(params, trace: Trace, lists: Lists):
    """Computes the transformer naively, all tokens of a trace at once."""
    p, c, (sees, count) = params["params"], TINY, gathered(lists.sees)

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.norm_eps) * scale

    def linear(x, w):
        return jnp.matmul(x, w["kernel"].T, precision="highest") + w.get("bias", 0.0)

    x = p["embed"]["embedding"][trace.tokens]
    for i in range(c.num_layers):
        layer = p[f"layers_{i}"]
        a, h = layer["attention"], norm(x, layer["attention_norm"]["scale"])
        q, k, v = (linear(h, a[name]).reshape(len(h), -1, c.head_dim) for name in "qkv")
        out = naive_attention(
            norm(q, a["q_norm"]["scale"]), norm(k, a["k_norm"]["scale"]), v, sees, count, c.rope
        )
        x = x + linear(out.reshape(len(h), -1), a["o"])
        h, mlp = norm(x, layer["mlp_norm"]["scale"]), layer["mlp"]
        x = x + linear(jax.nn.silu(linear(h, mlp["gate"])) * linear(h, mlp["up"]), mlp["down"])
    return norm(x, p["norm"]["scale"]) @ p["head"]["kernel"].T


@pytest.mark.slow
def test_gradients_of_a_loss_over_two_traces_of_different_lengths():
    """Compares gradients of all parameters for a training loss.

    The loss is the mean log-probability of the tokens that rows feed next.
    """
    recorder, lists = random_session(2, passes=6)
    traces, sees = [scripted(0)[0], recorder.trace()], [scripted(0)[1], lists]
    batch = TraceBatch.of(traces)
    pairs = []
    for n, trace in enumerate(traces):
        row = trace.rows[trace.row_pass]
        for r in np.unique(row):
            own = np.flatnonzero(row == r)
            pairs += [(n, int(a), int(trace.tokens[b])) for a, b in itertools.pairwise(own)]
    which, at, target = np.asarray(pairs).T

    def ours(params):
        logits = reencode_logits(Decoder(TINY), params, batch)[which, at]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1))

    def naive(params):
        logits = jnp.concatenate([*map(functools.partial(naive_logits, params), traces, sees)])
        logits = logits[np.where(which == 0, at, at + traces[0].num_tokens)]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), target[:, None], axis=1))

    (a, found), (b, wanted) = (
        jax.jit(jax.value_and_grad(ours))(tiny_params()),
        jax.jit(jax.value_and_grad(naive))(tiny_params()),
    )
    np.testing.assert_allclose(a, b, rtol=1e-5)
    for (path, one), other in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True
    ):
        largest = float(jnp.abs(other).max())
        np.testing.assert_allclose(
            one, other, atol=2e-4 * largest + 1e-7, rtol=1e-3, err_msg=jax.tree_util.keystr(path)
        )


# Cost


def arrays_of(jaxpr) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of all arrays that a program computes, including loops and branches."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.shape for variable in equation.outvars)
        for inner in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from arrays_of(getattr(inner, "jaxpr", inner))


def shaped(tokens: int) -> TraceBatch:
    """Returns the shapes of a batch of one trace whose tokens all move once."""
    tiles = 2 * tokens // TILE
    shapes = [(tokens,), (tokens,), (tokens, 8), (tokens, 8), (tiles,), *[(tiles, TILE)] * 4]
    return TraceBatch(*(jax.ShapeDtypeStruct((1, *shape), jnp.int32) for shape in shapes))


@pytest.mark.parametrize("backward", [False, True])
def test_no_array_grows_faster_than_the_trace(backward):
    def run(params, batch):
        return jnp.sum(
            reencode_logits(Decoder(TINY), params, batch, at=jnp.zeros((1, 4), jnp.int32))
        )

    largest = []
    for tokens in (4096, 8192):
        shapes = [
            *arrays_of(
                jax.make_jaxpr(jax.grad(run) if backward else run)(
                    tiny_params(), shaped(tokens)
                ).jaxpr
            )
        ]
        largest.append(max(map(np.prod, shapes)))
        assert not any(sum(n >= tokens for n in shape) > 1 for shape in shapes)
    # The queries' accumulators of one chunk after each tile are the largest: a constant per token.
    assert largest[1] == 2 * largest[0] < 8192 * 2 * TINY.num_heads * TINY.head_dim * 2


@pytest.mark.slow
def test_memory_of_the_backward_pass_follows_the_trace():
    def run(params, batch):
        return jnp.sum(
            reencode_logits(Decoder(TINY), params, batch, at=jnp.zeros((1, 4), jnp.int32))
        )

    used = [
        jax.jit(jax.grad(run))
        .lower(tiny_params(), shaped(tokens))
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for tokens in (2048, 4096)
    ]
    assert used[1] < 2.2 * used[0]


def test_traces_of_the_same_numbers_share_a_program():
    run = jax.jit(functools.partial(reencode_logits, Decoder(TINY)))
    for seed, passes in ((0, 10), (1, 30), (2, 40)):
        trace = random_session(seed, passes)[0].trace()
        run(
            tiny_params(),
            TraceBatch.of([trace, random_session(9, 5)[0].trace()], tokens=250, tiles=12, blocks=5),
        )
    assert run._cache_size() == 1


# Bad input


def test_a_batch_has_room_for_its_traces():
    traces = [random_session(0)[0].trace()]
    with pytest.raises(ValueError, match="there are no traces"):
        TraceBatch.of([])
    for name in ("tokens", "tiles", "blocks"):
        with pytest.raises(
            ValueError, match=rf"{name} is 1, but trace 0 has \d+; give at least as many"
        ):
            TraceBatch.of(traces, **{name: 1})
    batch = TraceBatch.of(traces)
    with pytest.raises(ValueError, match=r"q must be \[N, T, H, D\]"):
        trace_attention(*jnp.zeros((3, 1, 5, 2, 16)), batch, TINY.rope)


def test_a_trace_of_another_model_is_refused(tmp_path):
    model, trace = tiny(), scripted(0)[0]
    own = dataclasses.replace(trace, fingerprint=model.trace_fingerprint)
    own.save(tmp_path / "one.trace")
    reencode(model, Trace.load(tmp_path / "one.trace"), at=[0])
    other = dataclasses.replace(model, config=dataclasses.replace(TINY, norm_eps=1e-6))
    worded = dataclasses.replace(model, tokenizer=load(EMBEDDED).tokenizer)
    headed = dataclasses.replace(model, config=dataclasses.replace(TINY, num_kv_heads=4))
    for wrong in (other, worded, headed):
        with pytest.raises(ValueError, match="the trace is of another model or tokenizer"):
            reencode(wrong, own)
    with pytest.raises(
        ValueError, match="the trace has token 101, outside the model's vocabulary of 101"
    ):
        reencode(model, dataclasses.replace(trace, tokens=trace.tokens * 0 + 101))
    with pytest.raises(
        ValueError, match=r"a row of the trace has \d+ tokens, but the model's context holds 20"
    ):
        reencode(
            dataclasses.replace(model, config=dataclasses.replace(TINY, max_positions=20)), trace
        )
    with pytest.raises(ValueError, match="the trace has no tokens"):
        reencode(model, Recorder(2).trace())


@pytest.mark.slow
def test_many_devices_have_the_same():
    trace, _, ran, _, cache = scripted(0)
    own = dataclasses.replace(trace, fingerprint=tiny().trace_fingerprint)
    for sizes in ({"tensor": 2, "kv": 2}, {"tensor": 4}):
        model = tiny().on(make_mesh(**sizes, devices=jax.devices()[:4]))
        logits, got = reencode(model, own)
        np.testing.assert_allclose(logits, ran, **CLOSE)
        assert got.lengths.tolist() == cache.lengths.tolist()
        expected, _ = layers.forward(
            TINY, tiny_params(), [[4]], [1], copied(cache), Layout.from_blocks([[0, 1]])
        )
        logits, _ = model.forward([[4]], [1], got, Layout.from_blocks([[0, 1]]))
        np.testing.assert_allclose(logits, expected, **CLOSE)
