"""Models against the logits and greedy answers of transformers, for small random checkpoints.

The checkpoints and results are in fixtures/parity, written by scripts/fixtures/make_parity.py.
JAXSHARE_PARITY_FIXTURES names another folder of the same form, for example one that was just made
with the installed transformers.
"""

import functools
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import models
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace
from tests.helpers import mostly_slow
from tests.models.test_moe_models import DenseExperts
from tests.paths import FIXTURES

FOLDER = Path(os.environ.get("JAXSHARE_PARITY_FIXTURES") or FIXTURES / "parity")
CASES = sorted(path.parent.name for path in FOLDER.glob("*/case.json"))
ROPES = json.loads((FOLDER / "rope.json").read_text()) if (FOLDER / "rope.json").is_file() else []

FORMER = [case for case in CASES if case.startswith(("llama", "qwen"))]
FIRST = [next(group) for _, group in itertools.groupby(CASES, lambda case: case.split("_")[0])]
QUICK_CAUSAL = [*dict.fromkeys([*FORMER[::4], *FIRST])]
QUICK = FORMER[::12]
"""Cases whose caches `make test` reads and writes too: of others it takes the logits of a causal
pass, where they are every fourth one of Llama and Qwen or the first of their family."""

TOLERANCE = 1e-4  # float32 logits of order 1 to 7
# of all passes over a cache, so that a case has one program
WIDTH, LISTED = 8, 5
CAPACITIES = (300, 104, *[64] * 5)


def test_there_are_fixtures():
    assert len(CASES) >= 20 and len(ROPES) >= 10, (
        f"{FOLDER} lacks parity fixtures: make them with scripts/fixtures/make_parity.py"
    )


def all_of(quick: list[str]) -> list[Any]:
    """All cases, of which the others are slow."""
    return mostly_slow(dict.fromkeys([*quick, *CASES]), len(quick))


def context(case: str) -> int:
    """The tokens of the longest text of a case."""
    return json.loads((FOLDER / case / "case.json").read_text())["context"]


@functools.lru_cache(maxsize=1)
def load(case: str) -> tuple[models.LoadedModel, dict[str, np.ndarray]]:
    model = models.load(FOLDER / case, dtype="float32")
    with np.load(FOLDER / case / "expected.npz") as expected:
        return model.for_context(context(case)), dict(expected)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case):
    config = models.ModelConfig.from_json(FOLDER / case).for_context(context(case))
    rope = config.rope
    with np.load(FOLDER / case / "expected.npz") as expected:
        np.testing.assert_allclose(rope.frequencies, expected["inv_freq"], rtol=1e-6)
        np.testing.assert_allclose(rope.attention_factor, expected["attention_scaling"], rtol=1e-6)
        if "sliding_inv_freq" in expected:
            for window, own in zip(config.windows, config.layer_ropes, strict=True):
                wanted = expected["sliding_inv_freq" if window else "inv_freq"]
                np.testing.assert_allclose(own.frequencies, wanted, rtol=1e-6)


@pytest.mark.parametrize("known", ROPES, ids=range(len(ROPES)))
def test_frequencies_of_known_configurations(known):
    rope = models.ModelConfig.from_json(known["config"]).rope
    np.testing.assert_allclose(rope.frequencies, known["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(rope.attention_factor, known["attention_scaling"], rtol=1e-6)


@pytest.mark.parametrize("case", all_of(QUICK_CAUSAL))
def test_logits_at_every_position_and_greedy_answer_without_a_cache(case):
    model, expected = load(case)
    tokens, answer, begin = expected["tokens"], expected["greedy"], len(expected["prompt"]) - 1
    other = np.zeros_like(tokens)
    other[: begin + 1 + len(answer)] = np.concatenate([expected["prompt"], answer])
    run = jax.jit(functools.partial(model.module.apply, method="causal"))
    logits = run(model.params, np.stack([tokens, other]))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], expected["logits"], rtol=0, atol=TOLERANCE)
    assert logits[1, begin:].argmax(-1)[: len(answer)].tolist() == answer.tolist()


@pytest.mark.parametrize(
    ("case", "step"),
    mostly_slow(
        [
            *[(case, WIDTH) for case in [*dict.fromkeys([*QUICK, *CASES])]],
            *[(case, 1) for case in CASES[::12]],
        ],
        len(QUICK),
        several=True,
    ),
)
def test_cached_logits_and_greedy_answer(case, step):
    """Runs two rows in the same passes: one reads a text, the other reads the prompt and answers.

    The text comes in ragged chunks and then token by token. Single tokens are padded to the chunks'
    width, which saves a compilation; some cases have passes of width 1. Then once more, with both
    texts in several blocks.
    """
    model, expected = load(case)
    whole = run_two_rows(model, expected, step, cuts=([], []))
    parts = run_two_rows(model, expected, step, cuts=([60, 77, 130], [17, 29]))
    for logits, greedy in (whole, parts):
        assert greedy == expected["greedy"].tolist()
        np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE)


def run_two_rows(
    model: models.LoadedModel,
    expected: dict[str, np.ndarray],
    step: int,
    cuts: tuple[list[int], ...],
) -> tuple[np.ndarray, list[int]]:
    """The logits of the text and the greedy answer. Each row's tokens are cut into blocks before
    those at `cuts`; what follows the last cut is in block 0 or 1."""
    tokens, prompt, answer = expected["tokens"], expected["prompt"], expected["greedy"]
    cache = KVCache.create(model.config, CAPACITIES, dtype=jnp.float32)
    blocks = [*[2, 3, 4][: len(cuts[0])], 0], [*[5, 6][: len(cuts[1])], 1]
    text_logits: list[np.ndarray] = []
    fed = [0, 0]

    def room(row: int, most: int) -> int:
        """How many tokens a row is fed, which are all of one block."""
        later = [cut - fed[row] for cut in cuts[row] if cut > fed[row]]
        return min([most, *later])

    def forward(text: np.ndarray, other: np.ndarray, width: int) -> np.ndarray:
        nonlocal cache
        padded, count = np.zeros((2, width), np.int32), np.array([len(text), len(other)], np.int32)
        padded[0, : len(text)], padded[1, : len(other)] = text, other
        listed = [
            row[: 1 + sum(cut <= at for cut in cut_at)]
            for row, cut_at, at in zip(blocks, cuts, fed, strict=True)
        ]
        layout = Layout.from_blocks(listed, num_rows=2, width=LISTED)
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        fed[0], fed[1] = fed[0] + len(text), fed[1] + len(other)
        text_logits.append(np.asarray(logits[0, : len(text)]))
        return np.asarray(logits[1, : len(other)])

    in_chunks = len(tokens) - (len(answer) - 1)
    greedy: list[int] = []
    for size in itertools.cycle((WIDTH, 5, WIDTH, 1, 3)):
        size = room(0, min(size, in_chunks - fed[0]))
        now = prompt[fed[1] : fed[1] + room(1, WIDTH)]
        others = forward(tokens[fed[0] : fed[0] + size], now, WIDTH)
        if not greedy and fed[1] == len(prompt):
            greedy.append(int(np.argmax(others[-1])))
        if fed[0] == in_chunks:
            break
    for token in tokens[in_chunks:]:
        others = forward(np.array([token]), np.array(greedy[-1:]), step)
        greedy.append(int(np.argmax(others[-1])))
    return np.concatenate(text_logits), greedy


LAYOUTS = {
    "contiguous": ([[0, 2, 6, 3, 5], [0, 2, 5, 3, 6]], False),
    "interleaved": ([[0, 5], [0, 6]], True),
    "combined": ([[0, 2, 6, 3, 5], [0, 2, 5, 3, 6]], True),
}
"""What each of two workers sees, and whether their steps move to the first block: appendix A of
Hogwild!. Blocks 2 and 3 are headers, 5 and 6 the workers'."""


@pytest.mark.parametrize("case", all_of(["smollm3_mqa_biases_window"]))
def test_workers_in_three_layouts(case):
    """Greedy workers that are also fed tokens at random, against float64 numpy that turns every key
    to its place in each row and pass, and computed anew from their trace. The numpy model is
    compared with transformers, too."""
    model, expected = load(case)
    alone = DenseExperts(model.config, model.params, 1)
    (logits,) = alone.forward([expected["tokens"][:80].tolist()], [[0]])
    np.testing.assert_allclose(logits, expected["logits"][:80], rtol=0, atol=TOLERANCE)
    for layout, (rows, moves) in LAYOUTS.items():
        rng = random.Random(layout)
        trace, exact = run_workers(model, expected["prompt"].tolist(), rows, moves, rng)
    logits, _ = models.reencode(model, trace)
    np.testing.assert_allclose(logits, exact, rtol=0, atol=TOLERANCE)


def run_workers(
    model: models.LoadedModel,
    prompt: list[int],
    rows: list[list[int]],
    moves: bool,
    rng: random.Random,
) -> tuple[Trace, np.ndarray]:
    """What was run, and the logits after each of its tokens."""
    cache = KVCache.create(model.config, CAPACITIES, dtype=jnp.float32)
    dense = DenseExperts(model.config, model.params, len(CAPACITIES))
    recorder, found = Recorder(len(CAPACITIES), CAPACITIES), []

    def forward(new: list[list[int]], listed: list[list[int]]) -> list[int]:
        """The tokens that follow, after a comparison of all logits."""
        nonlocal cache
        padded, count = np.zeros((2, WIDTH), np.int32), [0, 0]
        for r, tokens in enumerate(new):
            padded[r, : len(tokens)], count[r] = tokens, len(tokens)
        layout = Layout.from_blocks(listed, num_rows=2, width=LISTED)
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        recorder.feed(new, listed)
        wanted = dense.forward(new, listed)
        found.extend(wanted)
        for got, exact in zip(np.asarray(logits), wanted, strict=False):
            np.testing.assert_allclose(got[: len(exact)], exact, rtol=0, atol=TOLERANCE)
        return [int(exact[-1].argmax()) for exact in wanted]

    for block, text in ((0, prompt), (2, [7, 8, 9]), (3, [10, 11])):
        for at in range(0, len(text), WIDTH):
            forward([text[at : at + WIDTH]], [[block]])
    last = [[20], [30]]
    for number in range(1, 25):
        fed = [
            tokens + [rng.randrange(96) for _ in range(rng.choice((0, 0, 3)))] for tokens in last
        ]
        last = [[token] for token in forward(fed, rows)]
        if moves and number % 8 == 0:
            for row in rows:
                cache = cache.move(row[-1], 0)
                dense.move(row[-1], 0)
                recorder.move(row[-1], 0)
    return recorder.trace(), np.concatenate(found)
