"""Engines of a model whose caches have latents in place of keys and values: texts of calls and of
sessions beside them, memory that is evicted, and saves."""

import dataclasses
import functools

import numpy as np
import pytest

from jaxshare import FinishReason
from jaxshare.models import LoadedModel
from jaxshare.serving import Workers
from jaxshare.serving.inputs import token_bytes
from jaxshare.sharding import make_mesh
from tests.helpers import LATENT, DenseModel, init
from tests.serving.branches.test_branches import embedded
from tests.serving.engine import mixed_schedules
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_checkpoint import PROMPTS, Stepped, asked, same, tree
from tests.serving.engine.test_engine import CONFIG, MODEL, SIZE, STOP, check_memory
from tests.serving.workers import test_session

__all__ = ["small_pieces"]  # the fixture

ONE_LAYER = dataclasses.replace(
    LATENT, num_layers=1, vocab_size=CONFIG.vocab_size, max_positions=CONFIG.max_positions
)
TWO_LAYERS = dataclasses.replace(
    LATENT, vocab_size=mixed_schedules.CONFIG.vocab_size, max_positions=1024
)
TOKEN_BYTES = 24 * 4
"""Of a token in one layer: 12 rotated entries, and a latent of 12."""


@functools.cache
def one_layer() -> LoadedModel:
    return dataclasses.replace(MODEL, config=ONE_LAYER, params=init(ONE_LAYER))


@functools.cache
def two_layers() -> LoadedModel:
    """Random parameters under the embedded model's tokenizer."""
    return dataclasses.replace(embedded(), config=TWO_LAYERS, params=init(TWO_LAYERS), workers=None)


def engine_of(tokens: int, host: int = 0) -> Stepped:
    """An engine with memory for so many tokens."""
    sizes = (tokens * TOKEN_BYTES // SIZE, host * TOKEN_BYTES // SIZE)
    return Stepped(*sizes, model=one_layer(), policy="lru")


@functools.cache
def alone(prompt: tuple[int, ...]) -> tuple[list[int], FinishReason]:
    """The greedy output of a request of 12 tokens in float64 numpy, without latents or blocks."""
    dense, fed, out = DenseModel(ONE_LAYER, one_layer().params, 1), [*prompt], []
    while len(out) < 12:
        logits = np.sort(last := dense.forward([fed], [[0]])[0][-1])
        assert logits[-1] - logits[-2] > 1e-3, "a near tie; choose another prompt"
        fed = [int(last.argmax())]
        out += fed
        if fed == [STOP]:
            return out, FinishReason.STOP
    return out, FinishReason.LENGTH


def check(completions: list) -> None:
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert ([*completion.tokens], completion.finish_reason) == alone(tuple(prompt))


def test_a_token_takes_the_room_of_its_latents():
    assert token_bytes(one_layer()) == TOKEN_BYTES
    assert token_bytes(two_layers()) == 2 * TOKEN_BYTES


@pytest.mark.slow
def test_latents_go_to_host_memory_and_into_saves_and_come_back(tmp_path):
    with engine_of(96, 512) as before, engine_of(96, 512) as after:
        completions = [found for prompt in PROMPTS for found in asked(before, [prompt])]
        check(completions)
        nodes = tree(before)
        assert {node["where"] for node in nodes.values()} == {"host", "device"}
        assert all(node["values"].shape[-1] == 0 for node in nodes.values())
        before.save(tmp_path, wait=True)
        assert after.restore(tmp_path) > 0
        restored = tree(after)
        for node in (*nodes.values(), *restored.values()):
            del node["where"]  # what was used last is on the accelerator now
        same(nodes, restored)
        check_memory(after)
        check(asked(after))  # of latents that were in host memory
        check_memory(after)


@pytest.mark.slow
def test_an_engine_on_several_devices_takes_saves_of_one(tmp_path):
    split = one_layer().on(make_mesh(tensor=2, kv=2))
    with (
        engine_of(512) as before,
        Stepped(512 * TOKEN_BYTES // SIZE, model=split, policy="lru") as after,
    ):
        check(asked(before, PROMPTS))
        before.save(tmp_path, wait=True)
        assert after.restore(tmp_path) > 100
        same(tree(before), tree(after))
        check(asked(after, PROMPTS))
        check_memory(after)


@pytest.mark.slow
def test_calls_and_sessions_in_the_same_passes(monkeypatch):
    """Every text is the one that it has alone, by oracles without a cache (`mixed_schedules`)."""
    monkeypatch.setattr(mixed_schedules, "model", two_layers)
    mixed_schedules._causal.cache_clear()
    played = mixed_schedules.play(mixed_schedules.make(3))
    mixed_schedules.check(played)
    mixed_schedules._causal.cache_clear()
    assert played.calls and played.visits


@pytest.mark.slow
def test_a_session_of_workers_is_saved_and_restored(monkeypatch, tmp_path):
    monkeypatch.setattr(test_session, "model", two_layers)
    whole = test_session.run(test_session.start(budget=40))
    session = test_session.start(budget=40)
    for _ in session.stream(23):
        pass
    session.save(tmp_path, wait=True)
    restored = Workers.restore(two_layers(), tmp_path)
    assert restored.passes == 23
    assert test_session.run(restored) == whole
