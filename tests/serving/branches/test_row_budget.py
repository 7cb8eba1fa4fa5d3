"""Rows at a time: as many as memory has room for, a given number, and the notes about them."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxshare import DecodeState, KVCache, Layout, Sampler, cpu, decode
from jaxshare.models.layers import Decoder
from jaxshare.serving import Prefixes, generate
from jaxshare.serving.branches import row_budget
from jaxshare.serving.branches.row_budget import RowBudget, row_bytes
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.kvcache.free_memory import host_free_bytes
from tests.helpers import TINY
from tests.serving.branches.test_branches import HOT, NEW, TOKENS, model

PROMPT = TOKENS[:14]


def branches(n: int, **more) -> Branches:
    return Branches(
        model(), [PROMPT], **{"n": n, "max_new_tokens": NEW, "sampler": HOT, "share": True, **more}
    )


# The choice; no model runs.


def test_a_number_that_is_given_is_kept_with_a_prefix_or_without():
    store = Prefixes(model(), max_tokens=65536)
    with store.add(PROMPT) as prefix:
        for more in ({}, {"prefix": prefix}):
            for n, asked, rows in (
                (5000, 2048, 2048),
                (5000, 1025, 1025),
                (300, 1024, 300),
                (5000, 4500, 4500),
            ):
                assert branches(n, max_rows=asked, **more).rows == rows
        assert branches(2048, prefix=prefix).rows == branches(2048).rows == 2048


def test_rows_follow_from_memory(monkeypatch):
    """Computed by hand, for a given number of free bytes.

    A row has 8 tokens beside one block of 14.
    """
    size, row = token_bytes(model()), row_bytes(model(), NEW)

    def needed(rows: int) -> int:
        return 14 * size + rows * (NEW * size + row) + rows * (1 + rows) * 16

    for free, rows in ((needed(10), 10), (needed(10) - 1, 9), (10**12, row_budget.MAX_ROWS)):
        monkeypatch.setattr(row_budget, "free_bytes", lambda model, free=free: free)
        assert branches(5000).rows == rows
    monkeypatch.setattr(row_budget, "free_bytes", lambda model: needed(50))
    assert branches(5000, max_rows=100).rows == 50, "memory bounds a given number, too"
    # Keys and values have their own bound; the other memory of a row must fit all the same.
    monkeypatch.setattr(row_budget, "free_bytes", lambda model: 10**12)
    assert branches(5000, max_kv_bytes=(14 + 20 * NEW) * size).rows == 20
    monkeypatch.setattr(row_budget, "free_bytes", lambda model: needed(6))
    assert branches(5000, max_kv_bytes=(14 + 20 * NEW) * size).rows == 6


@pytest.mark.parametrize(
    ("n", "more", "free", "note"),
    [
        (7, {}, 10**12, "7 rows at a time: all completions"),
        (70, {"max_rows": 12}, 10**12, "12 rows at a time: the number that was given"),
        (5000, {}, 10**12, "4096 rows at a time: the maximum unless a number is given"),
        (5000, {}, 10**6, "rows at a time: as many as fit in 0.0 GB of memory"),
    ],
)
def test_notes_say_what_was_chosen_and_why(monkeypatch, n, more, free, note):
    monkeypatch.setattr(row_budget, "free_bytes", lambda model: free)
    [said] = branches(n, **more).notes
    assert said.endswith(note)


def test_one_completion_has_no_notes():
    assert branches(1).notes == [] and branches(1, share=None).notes == []
    [rows, costs] = branches(3, share=None).notes
    assert rows == "3 rows at a time: all completions"
    assert (
        costs
        == "what is shared is decided by costs of two CPU cores; `jaxshare calibrate` measures "
        "this device"
    )


def test_keys_and_values_that_bound_the_rows_are_named():
    [said] = branches(5000, max_kv_bytes=(14 + 20 * NEW) * token_bytes(model())).notes
    assert said == "20 rows at a time: as many as fit in 174 tokens of keys and values"
    with Prefixes(model(), max_tokens=512).add(PROMPT) as prefix:
        run = branches(5000, prefix=prefix)
        assert (
            run.notes
            == [
                f"{run.rows} rows at a time: as many as fit in {512 - 14} tokens of keys and values"
            ]
            and run.rows > 40
        )


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize(
    "sampler",
    [Sampler(0.7), Sampler(0.7, repetition_penalty=1.2)],
)
def test_what_a_row_takes_is_what_the_compiled_loop_holds(monkeypatch, sampler, kernels):
    """Logits are nearly all of it where the vocabulary is large.

    The loop is compiled for shapes, and does not run.
    """
    if not kernels:
        monkeypatch.setattr(cpu, "available", lambda: False)
    # Another shape, which was not traced with the kernels.
    config = dataclasses.replace(TINY, vocab_size=50_000 if kernels else 50_001, num_layers=1)
    module, total = Decoder(config), {}
    params = jax.eval_shape(
        lambda: module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal")
    )
    for rows in (32, 64):
        cache = KVCache.create(config, [16] * rows, jnp.float32)
        state = DecodeState.create(
            cache,
            Layout.from_blocks([[r] for r in range(rows)]),
            [[1]] * rows,
            vocab_size=config.vocab_size,
            max_new_tokens=8,
            samplers=sampler,
            max_width=1,
            logprobs=True,
        )
        compiled = (
            jax.jit(lambda p, s: decode(module, p, s, passes=16), donate_argnums=1)
            .lower(params, state)
            .compile()
        )
        analysis = compiled.memory_analysis()
        total[rows] = analysis.temp_size_in_bytes + state.logits.nbytes
        total[rows] += sum(array.nbytes for array in jax.tree.leaves(state.history))
    measured = (total[64] - total[32]) / 32
    expected = row_bytes(dataclasses.replace(model(), config=config), 8, sampler.counts_tokens)
    assert measured <= expected < 1.2 * measured


@given(st.integers(1, 300), st.integers(0, 10**6), st.integers(0, 10**9))
def test_more_rows_never_fit_where_fewer_do_not(rows, tokens, free):
    space = RowBudget(tokens=10**5, free=free, token_bytes=100, row_bytes=1000)
    assert (
        space.fits(rows, tokens, 3)
        >= space.fits(rows + 1, tokens, 3)
        >= space.fits(rows + 1, tokens + 1, 3)
    )


# Free memory.


def proc(tmp_path, available: int, **group: str):
    (tmp_path / "proc").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  99 kB\nMemAvailable:   {available} kB\n")
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, text in group.items():
        (folder / name.replace("__", ".")).write_text(text)
    return tmp_path


def test_memory_of_the_host_is_what_is_available_within_the_limit_of_the_group(tmp_path):
    assert host_free_bytes(proc(tmp_path / "a", 7000)) == 7000 * 1024
    limited = proc(
        tmp_path / "b",
        7000,
        memory__max="5000000\n",
        memory__current="3000000\n",
        memory__stat="anon 5\ninactive_file 1000000\n",
    )
    assert host_free_bytes(limited) == 3_000_000
    unlimited = proc(
        tmp_path / "c",
        7000,
        memory__max="max\n",
        memory__current="3000000\n",
        memory__stat="inactive_file 1\n",
    )
    assert host_free_bytes(unlimited) == 7000 * 1024
    assert host_free_bytes(tmp_path / "nothing") == 4 * 2**30
    assert host_free_bytes() > 2**20


# Runs.


@pytest.mark.slow
def test_few_rows_that_are_left_go_on_with_a_smaller_state(monkeypatch):
    """The texts are those of a run that keeps all rows; the last passes have fewer."""
    monkeypatch.setattr("jaxshare.serving.engine.narrow._NARROW_ABOVE", 8)
    stops = dataclasses.replace(
        model(),
        generation=dataclasses.replace(model().generation, stop_tokens=tuple(range(0, 402, 20))),
    )
    sampler = Sampler(temperature=3)
    options = dict(n=32, max_new_tokens=120, sampler=sampler, seed=3, share=True)
    run = Branches(stops, [PROMPT, TOKENS[20:29]], **options)
    shapes = []
    found = sorted(
        run.stream(lambda r: shapes.append(len(r._scheduler.rows))),
        key=lambda c: (c.prompt, c.index),
    )
    assert (
        shapes[0] == run.rows == 64 and shapes[-1] <= 16 and shapes == sorted(shapes, reverse=True)
    )
    monkeypatch.setattr("jaxshare.serving.engine.narrow._NARROW_ABOVE", 10**6)
    whole = generate(stops, [PROMPT, TOKENS[20:29]], **options).completions
    assert [(c.tokens, c.finish_reason) for c in found] == [
        (c.tokens, c.finish_reason) for c in whole
    ]
    np.testing.assert_allclose(
        [c.logprob for c in found], [c.logprob for c in whole], rtol=1e-4, atol=1e-3
    )


@pytest.mark.slow
def test_2048_rows_of_one_prompt_with_and_without_a_prefix():
    """All run at once; the first and the last texts are those of a run of few rows."""
    store = Prefixes(model(), max_tokens=2048 * NEW + 512)
    options = dict(max_new_tokens=NEW, sampler=HOT, seed=9, share=True)
    few = Branches(model(), [TOKENS[:20]], n=2048, skip=[(0, i) for i in range(3, 2045)], **options)
    expected = {c.index: c.tokens for c in few.stream()}
    with store.add(PROMPT) as prefix:
        for run in (
            Branches(model(), [TOKENS[:20]], n=2048, **options),
            Branches(model(), [TOKENS[14:20]], n=2048, prefix=prefix, **options),
        ):
            assert run.rows == 2048
            found = {c.index: c.tokens for c in run.stream()}
            assert len(found) == 2048 and {i: found[i] for i in expected} == expected
            assert len({tuple(tokens) for tokens in found.values()}) > 2040
            assert run.passes <= NEW + 2


# Equal texts.


def test_equal_texts_are_announced_once_with_the_reason_and_a_remedy(caplog):
    with caplog.at_level(logging.WARNING):
        done = generate(model(), [PROMPT], n=3, max_new_tokens=2, sampler=Sampler(), share=True)
    assert len({tuple(c.tokens) for c in done.completions}) == 1
    [record] = caplog.records
    assert record.name == "jaxshare.generate" and record.getMessage() == (
        "all 3 completions of a prompt will be equal, because temperature 0 takes the likeliest "
        "token every time; give a temperature above 0, such as 0.7, or ask for one completion"
    )
    caplog.clear()
    for more in ({"sampler": HOT, "n": 3}, {"sampler": Sampler(), "n": 1}):
        generate(
            model(),
            [PROMPT] * 3 if more["n"] == 1 else [PROMPT],
            max_new_tokens=2,
            share=True,
            **more,
        )
    assert not caplog.records, (
        "neither different completions nor a prompt that was given three times"
    )
