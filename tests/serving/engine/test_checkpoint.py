"""Saved engines: a restored engine has the cached tokens and the outputs of the saved one, with
memory of any size, on any devices."""

import random
import threading

import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.models.generation_config import Generation
from jaxshare.serving.checkpoints import CheckpointStore, SaveError
from jaxshare.serving.engine import ClosedError, Engine, EngineError
from jaxshare.sharding import make_mesh
from tests.helpers import init, mostly_slow
from tests.serving.engine.stepped import small_pieces
from tests.serving.engine.test_engine import (
    CONFIG,
    MODEL,
    MOST_PASSES,
    ROWS,
    SHORT,
    SIZE,
    WARM,
    alone,
    check_memory,
    done,
    lasting,
)
from tests.serving.engine.test_engine import Stepped as SteppedEngine

__all__ = ["small_pieces"]  # the fixture


class Stepped(SteppedEngine):
    """An engine of any model that can be shut down, since no thread runs."""

    def __init__(self, tokens: int = 256, host: int = 0, model: LoadedModel = MODEL, **more):
        Engine.__init__(
            self,
            model,
            kv_bytes=tokens * SIZE * model.kv_repeats,
            host_kv_bytes=host * SIZE,
            **{"max_rows": ROWS, "passes": MOST_PASSES, **more},
        )
        self._scheduler.passes = 4
        self._thread = threading.current_thread()

    def shutdown(self, *, cancel: bool = True) -> None:
        self._thread = None
        super().shutdown(cancel=cancel)


RNG = random.Random(3)
TRUNK = lasting(24, 12, seed=9)
PROMPTS = [[*TRUNK, *(RNG.randrange(3, 31) for _ in range(size))] for size in (3, 9, 17)] + [
    lasting(40, 12, seed=2)
]


def asked(engine: Stepped, prompts=PROMPTS, **more) -> list:
    streams = [
        engine.submit(prompt, max_new_tokens=12, agent_id=f"agent {i % 2}", **more)
        for i, prompt in enumerate(prompts)
    ]
    engine.settle()
    return [done(stream) for stream in streams]


def tree(engine: Stepped) -> dict[tuple[int, ...], dict]:
    """The cached tokens: for each node, by all tokens to its end, its keys and values and its
    segment."""
    memory, repeats = engine._scheduler.kv, engine.model.kv_repeats
    found = {}
    for node in memory.tree.root.subtree():
        if node is memory.tree.root or not node.num_cached:
            continue
        copy = node.copy or memory.pool.read(node.extent)
        tokens = tuple(int(t) for each in node.path() for t in each.tokens[: each.num_cached])
        segment = node.segment
        found[tokens] = {
            "where": "host" if node.copy else "device",
            "keys": np.stack(copy.keys)[:, ::repeats],
            "values": np.stack(copy.values)[:, ::repeats],
            "phase": copy.phase,
            "owners": segment.owners,
            "used": (segment.last_used, segment.uses, segment.priority),
            "end": segment.prefix_hash,
            "sizes": (segment.tokens, segment.depth),
        }
    return found


def same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys() and a
    for tokens, node in a.items():
        for name, value in node.items():
            np.testing.assert_array_equal(b[tokens][name], value, err_msg=f"{name} of {tokens}")


@pytest.mark.parametrize("policy", mostly_slow(["contribution", "lru", "slru"]))
def test_a_restored_engine_knows_what_the_saved_one_knew_and_answers_alike(tmp_path, policy):
    with Stepped(512, policy=policy) as before, Stepped(512, policy=policy) as after:
        asked(before)
        asked(before, PROMPTS[:2], sampler=WARM)
        assert before.save(tmp_path, wait=True) == 1
        known = sum(len(node.tokens) for node in before._scheduler.kv.tree.root.subtree())
        assert after.restore(tmp_path) == known > 100
        same(tree(before), tree(after))
        check_memory(after)
        # Derived seeds depend on the number of earlier requests with the same prompt.
        expected, found = (asked(engine, PROMPTS, sampler=WARM) for engine in (before, after))
        assert (
            [c.tokens for c in found]
            == [c.tokens for c in expected]
            != [c.tokens for c in asked(after, sampler=WARM)]
        )
        assert [c.reused_tokens for c in found] == [c.reused_tokens for c in expected] and all(
            c.reused_tokens > 20 for c in found
        )
        check_memory(after)


def test_a_save_in_the_midst_of_calls_has_what_they_have_got_to(tmp_path):
    with Stepped(512) as before, Stepped(512) as after:
        streams = [before.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
        for _ in range(4):
            before.step()
        assert any(stream._state.output is None for stream in streams)
        before.save(tmp_path)
        before.settle()
        before.save(tmp_path, wait=True)
        assert after.restore(tmp_path, number=1) > 24
        for tokens, node in tree(after).items():
            assert node["sizes"][1] == len(tokens)
        completions = asked(after)
        for prompt, completion in zip(PROMPTS, completions, strict=True):
            assert ([*completion.tokens], completion.finish_reason) == alone(prompt, 12)
        assert all(c.reused_tokens for c in completions)
        check_memory(after)


@pytest.mark.parametrize(("tokens", "host"), [(96, 0), (96, 128), (96, 512), (512, 0)])
def test_what_there_is_no_room_for_is_left_out_and_the_rest_is_right(tmp_path, tokens, host):
    with Stepped(512, policy="lru") as before:
        asked(before)
        before.save(tmp_path, wait=True)
        whole = tree(before)
    with Stepped(tokens, host, policy="lru") as after:
        learned = after.restore(tmp_path)
        there = tree(after)
        assert 0 < learned <= min(tokens + host, sum(node["sizes"][0] for node in whole.values()))
        assert (len(there) == len(whole)) == (tokens + host > 200)
        for path, node in there.items():
            for name in ("keys", "values", "used", "end"):
                np.testing.assert_array_equal(node[name], whole[path][name])
        latest = max(whole, key=lambda path: whole[path]["used"][0])
        assert latest[:16] in {path[:16] for path in there}  # what was used last is what stays
        check_memory(after)
        for prompt, completion in zip(PROMPTS, asked(after), strict=True):
            assert ([*completion.tokens], completion.finish_reason) == alone(prompt, 12)
        check_memory(after)


def test_what_lies_in_host_memory_is_saved_too(tmp_path):
    with Stepped(96, 512, policy="lru") as before, Stepped(96, 512, policy="lru") as after:
        for prompt in PROMPTS:
            asked(before, [prompt])
        assert {node["where"] for node in tree(before).values()} == {"host", "device"}
        before.save(tmp_path, wait=True)
        after.restore(tmp_path)
        expected, found = tree(before), tree(after)
        for nodes in (expected, found):
            for node in nodes.values():
                del node["where"]  # what was used last is on the accelerator now
        same(expected, found)
        check_memory(after)
        for prompt, completion in zip(PROMPTS, asked(after), strict=True):
            assert ([*completion.tokens], completion.finish_reason) == alone(prompt, 12)


def test_the_logits_cache_is_saved_and_replays_alike(tmp_path):
    settings = SHORT | {"resample_always": True}
    with Stepped(256, **settings) as before, Stepped(256, **settings) as after:
        for _ in range(3):
            asked(before, sampler=Sampler(temperature=1.0), resample="stepwise")
        before.save(tmp_path, wait=True)
        after.restore(tmp_path)
        held, learned = before.logits_cache.statistics, after.logits_cache.statistics
        assert (learned.states, learned.runs, learned.bytes) == (
            held.states,
            held.runs,
            held.bytes,
        ) and held.runs > held.states > 1
        for prompt in PROMPTS:
            np.testing.assert_array_equal(
                after.logits_cache.latest_output(prompt), before.logits_cache.latest_output(prompt)
            )
            for seed in range(20):
                expected, found = (
                    cache.replay(prompt, Sampler(temperature=1.0), seed, 12, frozenset())
                    for cache in (before.logits_cache, after.logits_cache)
                )
                assert found == expected
        expected, found = (
            asked(engine, sampler=Sampler(temperature=1.0), resample="stepwise")
            for engine in (before, after)
        )
        assert [(c.tokens, c.replayed_tokens) for c in found] == [
            (c.tokens, c.replayed_tokens) for c in expected
        ]
    with Stepped(512, logits_cache=held.bytes // 2, kept_logits=8) as small, Stepped(512) as none:
        small.restore(tmp_path)
        assert 0 < small.logits_cache.bytes <= held.bytes // 2
        none.restore(tmp_path)
    with (
        Stepped(512, logits_cache=10**6, kept_logits=4) as other,
        pytest.raises(ValueError, match="have 8 kept tokens, and this"),
    ):
        other.restore(tmp_path)


@pytest.mark.slow
def test_from_eight_devices_to_two_and_back_bit_for_bit(tmp_path):
    """With kv heads that are repeated on eight devices, and are not on two."""
    meshes = [{"tensor": 4, "kv": 2}, {"kv": 2}, {"tensor": 4, "kv": 2}]
    found = []
    for i, mesh in enumerate(meshes):
        engine = Stepped(512, model=MODEL.on(make_mesh(**mesh)))
        with engine:
            if i:
                engine.restore(tmp_path / str(i - 1))
            else:
                asked(engine)
            engine.save(tmp_path / str(i), wait=True)
            found.append(tree(engine))
            completions = asked(engine)
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                assert ([*completion.tokens], completion.finish_reason) == alone(prompt, 12)
            assert all(c.reused_tokens > 20 for c in completions)
    same(found[0], found[1])
    same(found[0], found[2])


def test_what_cannot_be_restored_is_said(tmp_path):
    with Stepped(512) as engine:
        with pytest.raises(SaveError, match="there is no folder"):
            engine.restore(tmp_path / "nowhere")
        asked(engine, PROMPTS[:1])
        engine.save(tmp_path, wait=True)
        with pytest.raises(EngineError, match="has served requests already"):
            engine.restore(tmp_path)
    with pytest.raises(ClosedError):
        engine.save(tmp_path)
    other = LoadedModel(CONFIG, init(CONFIG, seed=1), None, Generation(stop_tokens=(2,)))
    with (
        Stepped(512, model=other) as engine,
        pytest.raises(SaveError, match="is of another model, or of no engine"),
    ):
        engine.restore(tmp_path)
    saves = CheckpointStore(tmp_path / "other")
    saves.save({"a": np.zeros(3)}, {"format": "something"}, wait=True)
    saves.close()
    with Stepped(512) as engine, pytest.raises(SaveError, match="of no engine"):
        engine.restore(tmp_path / "other")


def test_an_engine_that_knows_nothing_can_be_saved(tmp_path):
    with Stepped(512) as before, Stepped(512) as after:
        before.save(tmp_path, wait=True)
        assert after.restore(tmp_path) == 0
        for prompt, completion in zip(PROMPTS, asked(after), strict=True):
            assert ([*completion.tokens], completion.finish_reason) == alone(prompt, 12)
