"""Sampling settings against transformers' logits processors, and greedy texts under them.

`scripts/fixtures/make_sampling.py` has written what transformers gives.
"""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, models
from jaxshare.decoding.history import History
from jaxshare.decoding.samplers import SamplerPlaces, Samplers
from jaxshare.decoding.sampling import history_after
from jaxshare.models import Generation
from jaxshare.serving import Branch, generate
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow

FIXTURES = Path(__file__).parents[1] / "fixtures"
FOLDER = Path(os.environ.get("JAXSHARE_SAMPLING_FIXTURES", FIXTURES / "sampling"))
FACTS = json.loads((FOLDER / "cases.json").read_text())
EXPECTED = np.load(FOLDER / "expected.npz")
STOPS = [1, 2]
LOGITS, TOKENS = EXPECTED["logits"], EXPECTED["tokens"]
ROWS, VOCAB = LOGITS.shape
PLACES = SamplerPlaces(16, 0, 8, 3)


@jax.jit
def chances(samplers, logits, positions, history):
    return samplers.chances(logits, positions, history=history)


@pytest.mark.parametrize("name", FACTS["cases"])
def test_the_chances_are_those_of_transformers(name):
    """After texts of which some tokens were sampled, and after prompts alone."""
    case = FACTS["cases"][name]
    generation = Generation.from_json({"do_sample": True, **case}, {"eos_token_id": STOPS})
    sampled = [FACTS["sampled"]] * (ROWS // 2) + [0] * (ROWS - ROWS // 2)
    prompts = [len(text) - count for text, count in zip(TOKENS, sampled, strict=True)]
    rows = [generation.sampler.for_prompt(length) for length in prompts]
    samplers = Samplers.stack(rows, places=PLACES, stops=STOPS)
    history = History.empty(ROWS, VOCAB, 64)
    for row, (text, count) in enumerate(zip(TOKENS, sampled, strict=True)):
        history = history.with_text(row, text.tolist(), len(text) - count)
    found = chances(samplers, LOGITS, np.asarray(sampled, np.int32), history)
    expected = EXPECTED[f"chances.{name}"]
    np.testing.assert_array_equal(np.asarray(found) > 0, expected > 0)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("family", mostly_slow(FACTS["families"]))
def test_greedy_texts_are_those_of_transformers(family, tmp_path):
    """Each under its own generation_config.json, all in one run."""
    tokens, samplers = [], []
    for name in FACTS["greedy"]:
        case = {"eos_token_id": STOPS, **FACTS["cases"][name]}
        samplers.append(Generation.from_json(case, {}).sampler)
        tokens.append(EXPECTED[f"prompt.{family}.{name}"].tolist())
    model = models.load(FIXTURES / "parity" / family, dtype="float32")
    branches = [
        Branch(prompt, sampler=sampler) for prompt, sampler in zip(tokens, samplers, strict=True)
    ]
    found = generate(model, branches, max_new_tokens=FACTS["answer"]).completions
    for name, completion in zip(FACTS["greedy"], found, strict=True):
        answer = EXPECTED[f"answer.{family}.{name}"].tolist()
        assert list(completion.tokens) == answer, name
        ended = answer[-1] in STOPS
        assert completion.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)


@pytest.mark.parametrize("name", ["all", "ngram-2", "bad-words", "sequences", "typical"])
def test_the_chances_are_the_same_where_devices_have_parts_of_the_vocabulary(name):
    generation = Generation.from_json(
        {"do_sample": True, **FACTS["cases"][name]}, {"eos_token_id": STOPS}
    )
    mesh = make_mesh(tensor=2)
    samplers = Samplers.stack([generation.sampler] * ROWS, places=PLACES, stops=STOPS)
    history = History.empty(ROWS, VOCAB, 64)
    for row, text in enumerate(TOKENS):
        history = history.with_text(row, text[:-1].tolist(), 30)
    sampled = jnp.full(ROWS, 9)

    @functools.partial(jax.jit, static_argnames="mesh")
    def after_one_more(samplers, logits, history, mesh):
        history = history_after(history, jnp.asarray(TOKENS[:, -1]), jnp.arange(ROWS) % 3 > 0, mesh)
        return samplers.chances(logits, sampled, history=history, mesh=mesh), history

    alone, spread = (
        jax.device_get(after_one_more(samplers, LOGITS, history, mesh)) for mesh in (None, mesh)
    )
    np.testing.assert_allclose(spread[0], alone[0], atol=1e-6)
    for one, other in zip(jax.tree.leaves(spread[1]), jax.tree.leaves(alone[1]), strict=True):
        np.testing.assert_array_equal(one, other)
