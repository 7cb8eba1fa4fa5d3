"""Workers over a shared cache against the authors' implementation of Hogwild! Inference.

fixtures/hogwild holds small random Llama (llama3 scaling) and Qwen2 checkpoints and what
github.com/eqimp/hogwild_llm, with PyTorch 2.13 and transformers 4.50.3 in float32 on a CPU,
computed with them over its own shared caches: the code of commit 1a87a99, and, in the folders
inference_lib, the library of that name at commit a72df34. They were written by
scripts/fixtures/make_hogwild.py. Every run is a script that was drawn at random: prompts, tokens
that a worker is fed after the greedy one, passes in which one is paused, steps that move to the
history. JAXSHARE_HOGWILD_FIXTURES names another folder of the same form, for example one that was
just made from a checkout.

YaRN is left out: in both every further rotation of a key multiplies it by the attention factor once
more, which YaRN does not do.
"""

import functools
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, models
from tests.paths import FIXTURES

COMMITTED = FIXTURES / "hogwild"
FOLDER = Path(os.environ.get("JAXSHARE_HOGWILD_FIXTURES") or COMMITTED)
RUNS = sorted(
    path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.glob("*/**/*.npz")
)

TOLERANCE = 1e-4  # float32 logits of order 1 to 6
HISTORY, CAPACITIES = 0, (256, 8, 8, 64, 64, 64, 64)
# of all passes, so that all runs of a family share two programs: this width, and width 1
ROWS, LISTED, WIDTH = 4, 7, 6


def test_there_are_fixtures():
    wanted = {
        f"{family}/{layout}_{workers}"
        for family in ("llama", "qwen2")
        for workers in range(1, 5)
        for layout in ("contiguous", "interleaved", "combined")
    } | {"llama/headers_2", "qwen2/headers_2"}
    if FOLDER == COMMITTED or any("inference_lib" in run for run in RUNS):
        wanted |= {
            f"{family}/inference_lib/{case}"
            for family in ("llama", "qwen2")
            for case in ("contiguous_3", "combined_2", "combined_3", "combined_4", "headers_2")
        }
    assert set(RUNS) == wanted, (
        f"{FOLDER} lacks fixtures: make them with scripts/fixtures/make_hogwild.py"
    )


@functools.cache
def load(family: str) -> models.LoadedModel:
    return models.load(FOLDER / family, dtype="float32")


def real(padded: np.ndarray) -> list[int]:
    """The tokens or blocks of a list that is padded with -1."""
    return padded[padded >= 0].tolist()


def forward(
    model: models.LoadedModel, new: list[list[int]], cache: KVCache, rows: list[list[int]]
) -> tuple[np.ndarray, KVCache]:
    """A pass in which each row is fed the tokens in `new`, if any."""
    count = np.zeros(ROWS, np.int32)
    count[: len(new)] = [len(t) for t in new]
    tokens = np.zeros((ROWS, WIDTH if count.max() > 1 else 1), np.int32)
    for r, t in enumerate(new):
        tokens[r, : len(t)] = t
    logits, cache = model.forward(
        tokens, count, cache, Layout.from_blocks(rows, num_rows=ROWS, width=LISTED)
    )
    return np.asarray(logits), cache


@pytest.mark.parametrize("name", RUNS)
def test_logits_and_greedy_tokens_of_a_scripted_run(name):
    model = load(name.split("/")[0])
    with np.load(FOLDER / f"{name}.npz") as file:
        script = dict(file)
    rows, prompts = (
        [real(row) for row in script["rows"]],
        [real(prompt) for prompt in script["prompts"]],
    )
    cache = KVCache.create(model.config, CAPACITIES, jnp.float32)
    for block, prompt in enumerate(prompts):
        for at in range(0, len(prompt), WIDTH):
            _, cache = forward(model, [prompt[at : at + WIDTH]], cache, [[block]])

    last: list[list[int]] = [[] for _ in rows]
    logits, greedy = np.zeros_like(script["logits"]), np.zeros_like(script["greedy"])
    for n, active in enumerate(script["active"]):
        for w in np.flatnonzero(script["moved"][n]):
            cache = cache.move(source=rows[w][-1], target=HISTORY)
        new = [
            last[w] + real(script["inserted"][n, w]) if active[w] else [] for w in range(len(rows))
        ]
        found, cache = forward(model, new, cache, rows)
        for w in np.flatnonzero(active):
            logits[n, w], greedy[n, w] = found[w], np.argmax(found[w])
            last[w] = [int(greedy[n, w])]

    np.testing.assert_array_equal(greedy, script["greedy"])
    np.testing.assert_allclose(logits, script["logits"], rtol=0, atol=TOLERANCE)
