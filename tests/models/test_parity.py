"""Models against the logits and greedy answers of transformers, for small random checkpoints.

The checkpoints and results are in fixtures/parity, written by scripts/fixtures/make_parity.py.
JAXSHARE_PARITY_FIXTURES names another folder of the same form, for example one that was just made
with the installed transformers.
"""

import functools
import itertools
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import models
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from tests.helpers import mostly_slow
from tests.paths import FIXTURES

FOLDER = Path(os.environ.get("JAXSHARE_PARITY_FIXTURES") or FIXTURES / "parity")
CASES = sorted(path.parent.name for path in FOLDER.glob("*/case.json"))
ROPES = json.loads((FOLDER / "rope.json").read_text()) if (FOLDER / "rope.json").is_file() else []

QUICK = CASES[::4]
"""Some of every family, whose caches `make test` reads and writes too: of the others it takes the
logits of a causal pass."""

TOLERANCE = 1e-4  # float32 logits of order 1 to 6
WIDTH = 8


def test_there_are_fixtures():
    assert len(CASES) >= 20 and len(ROPES) >= 10, (
        f"{FOLDER} lacks parity fixtures: make them with scripts/fixtures/make_parity.py"
    )


@functools.lru_cache(maxsize=1)
def load(case: str) -> tuple[models.LoadedModel, dict[str, np.ndarray]]:
    model = models.load(FOLDER / case, dtype="float32")
    with np.load(FOLDER / case / "expected.npz") as expected:
        return model.for_context(
            json.loads((FOLDER / case / "case.json").read_text())["context"]
        ), dict(expected)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_are_those_of_transformers(case):
    model, expected = load(case)
    np.testing.assert_allclose(model.config.rope.frequencies, expected["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(
        model.config.rope.attention_factor, expected["attention_scaling"], rtol=1e-6
    )


@pytest.mark.parametrize("known", ROPES, ids=range(len(ROPES)))
def test_frequencies_of_known_configurations(known):
    rope = models.ModelConfig.from_json(known["config"]).rope
    np.testing.assert_allclose(rope.frequencies, known["inv_freq"], rtol=1e-6)
    np.testing.assert_allclose(rope.attention_factor, known["attention_scaling"], rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_logits_at_every_position(case):
    model, expected = load(case)
    logits = model.module.apply(model.params, expected["tokens"][None], method="causal")
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits[0], expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("case", "step"),
    mostly_slow(
        [
            *[(case, WIDTH) for case in QUICK],
            *[(case, WIDTH) for case in CASES if case not in QUICK],
            *[(case, 1) for case in CASES[::12]],
        ],
        len(QUICK),
        several=True,
    ),
)
def test_cached_logits_and_greedy_answer(case, step):
    """Runs two rows in the same passes: one reads a text, the other reads the prompt and answers.

    The text comes in ragged chunks and then token by token. Single tokens are padded to the chunks'
    width, which saves a compilation; some cases have passes of width 1.
    """
    model, expected = load(case)
    tokens, prompt, answer = expected["tokens"], expected["prompt"], expected["greedy"]
    layout = Layout.from_blocks([[0], [1]])
    cache = KVCache.create(
        model.config, capacities=(len(tokens), len(prompt) + len(answer)), dtype=jnp.float32
    )
    text_logits: list[np.ndarray] = []

    def forward(text: np.ndarray, other: np.ndarray, width: int) -> np.ndarray:
        nonlocal cache
        padded, count = np.zeros((2, width), np.int32), np.array([len(text), len(other)], np.int32)
        padded[0, : len(text)], padded[1, : len(other)] = text, other
        logits, cache = model.forward(padded, count, cache, layout, every=True)
        text_logits.append(np.asarray(logits[0, : len(text)]))
        return np.asarray(logits[1, : len(other)])

    in_chunks = len(tokens) - (len(answer) - 1)
    read, greedy = 0, []
    for size in itertools.cycle((WIDTH, 5, WIDTH, 1, 3)):
        size = min(size, in_chunks - read)
        others = forward(tokens[read : read + size], prompt[:WIDTH], WIDTH)
        read, prompt = read + size, prompt[WIDTH:]
        if not greedy and not len(prompt):
            greedy.append(int(np.argmax(others[-1])))
        if read == in_chunks:
            break
    for token in tokens[in_chunks:]:
        others = forward(np.array([token]), np.array(greedy[-1:]), step)
        greedy.append(int(np.argmax(others[-1])))

    assert greedy == answer.tolist()
    np.testing.assert_allclose(
        np.concatenate(text_logits), expected["logits"], rtol=0, atol=TOLERANCE
    )
