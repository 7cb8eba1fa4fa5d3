"""Saved sessions: restored ones go on as the unbroken one, on any devices.

A save that is half written is never restored.
"""

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import Grammar, KVCache, Sampler, cache_io
from jaxshare.models import EMBEDDED, load, reencode
from jaxshare.serving import Workers, WorkersLayout, combined
from jaxshare.serving.checkpoints import CheckpointStore, SavedCheckpoint, SaveError
from jaxshare.serving.cli import main
from jaxshare.sharding import make_mesh
from jaxshare.trace.trace import Trace
from tests.helpers import mostly_slow
from tests.models.test_reencoding import assert_same_cache
from tests.serving.branches.test_branches import embedded as model
from tests.serving.kvcache.test_lease import made
from tests.serving.workers.test_session import BUDGET, run, start, written

AT = 33
"""Forward passes before a save: in the midst of steps, after some have moved."""


@pytest.fixture(scope="module")
def whole() -> dict:
    session = start()
    return {"written": run(session), "answer": session.finish(), "steps": session.steps}


def saved_at(folder, passes: int = AT, **options) -> Workers:
    session = start(**options)
    for _ in session.stream(passes):
        pass
    session.save(folder, wait=True)
    return session


def raw(folder) -> dict[str, np.ndarray]:
    """Every array of the newest save."""
    with SavedCheckpoint(folder) as saved:
        return {name: np.asarray(array) for name, array in saved.arrays().items()}


def test_a_restored_session_goes_on_as_the_unbroken_one(tmp_path, whole):
    saved_at(tmp_path)
    session = Workers.restore(model(), tmp_path)
    assert session.passes == AT and session.steps and session.names == ("Alice", "Bob")
    assert run(session) == whole["written"]
    assert session.finish() == whole["answer"] and session.steps == whole["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0, 1, 16, BUDGET])
@pytest.mark.parametrize("move", ["rotate", "reencode"])
def test_a_session_can_be_saved_at_any_pass(tmp_path, passes, move):
    saved_at(tmp_path, passes, move=move, ask_every=20)
    assert run(Workers.restore(model(), tmp_path)) == run(start(move=move, ask_every=20))


def test_a_save_changes_nothing_and_later_ones_stand_beside_it(tmp_path, whole):
    session = saved_at(tmp_path, 8)
    for until in (20, AT, 50):
        for _ in session.stream(until):
            pass
        session.save(tmp_path)
    assert run(session) == whole["written"]
    session.close()
    with SavedCheckpoint(tmp_path) as newest, SavedCheckpoint(tmp_path, 3) as before:
        assert (newest.number, newest.metadata["passes"], before.metadata["passes"]) == (4, 50, AT)
    assert run(Workers.restore(model(), tmp_path, number=3)) == whole["written"]
    with pytest.raises(SaveError, match="has the checkpoints 3, 4, not 1"):
        Workers.restore(model(), tmp_path, number=1)


@pytest.mark.slow
@pytest.mark.parametrize("cache", [True, False])
def test_workers_that_came_and_went_and_people_that_spoke_are_restored(tmp_path, cache):
    def first() -> Workers:
        session = start(record=not cache)
        for _ in session.stream(20):
            pass
        session.add("Carol")
        session.say("Hurry up.")
        for _ in session.stream(40):
            pass
        session.remove("Bob")
        session.pause("Alice")
        for _ in session.stream(45):
            pass
        return session

    def end(session: Workers) -> list:
        session.resume("Alice")
        session.add("Dan")
        return [run(session), session.steps]

    session = first()
    session.save(tmp_path, cache=cache, wait=True)
    restored = Workers.restore(model(), tmp_path)
    assert (restored.names, restored.blocks, restored.layout) == (
        session.names,
        session.blocks,
        session.layout,
    )
    np.testing.assert_array_equal(restored.rows.blocks, session.rows.blocks)
    assert end(restored) == end(first())


@pytest.mark.slow
def test_a_session_moves_between_an_engine_and_memory_of_its_own(tmp_path, whole):
    rich = Sampler(
        stop_token_ids=(7, 8, 9),
        bias={n: -1.0 for n in range(40)},
        bad_words=((40, 41, 42, 43), (44,)),
        presence_penalty=0.5,
    )
    nested = Grammar.lark('start: "(" start ")" | "1" start | "2"')  # of the host
    with made(4096) as engine:
        with Workers(engine.model, engine=engine, **start().settings) as session:
            # in the same passes, as rows with more places than the session's, and with a grammar
            beside = [
                engine.submit("1 + 1", sampler, max_new_tokens=AT + 16)
                for sampler in (rich, Sampler(grammar=nested))
            ]
            for _ in session.stream(AT):
                pass
            for each in beside:
                each.wait()
            session.save(tmp_path / "engine", wait=True)
        alone = Workers.restore(model(), tmp_path / "engine")
        assert written(alone) == written(session)
        alone.save(tmp_path / "alone", wait=True)
        first, second = raw(tmp_path / "engine"), raw(tmp_path / "alone")
        for name in first.keys() - {"cache.offsets"}:
            np.testing.assert_array_equal(first[name], second[name], err_msg=name)
        # so that its blocks are elsewhere
        other = Workers(engine.model, engine=engine, **{**start().settings, "problem": "1 + 1"})
        back = Workers.restore(model(), tmp_path / "alone", engine=engine)
        assert run(back) == whole["written"]
        other.close()
        back.close()


# Without keys and values


def same_trace(a: Trace, b: Trace) -> bool:
    return all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name))
        for field in dataclasses.fields(Trace)
    )


CLOSE = {"rtol": 1e-5, "atol": 1e-4}
"""Keys of the embedded model are as large as 85, in float32, and sums of up to 448 products in four
layers. A trace is computed in passes of other sizes than those that wrote them."""


def assert_goes_on(session: Workers, unbroken: Workers) -> None:
    """A restored session goes on to the end as the unbroken one, which is at the same pass."""
    assert session.passes == unbroken.passes and written(session) == written(unbroken)
    assert_same_cache(session.cache, unbroken.cache, **CLOSE)
    assert same_trace(session.trace, unbroken.trace)
    assert run(session) == run(unbroken)
    assert session.finish() == unbroken.finish() and session.steps == unbroken.steps
    assert_same_cache(session.cache, unbroken.cache, **CLOSE)
    assert same_trace(session.trace, unbroken.trace)


def restored_small(tmp_path, passes: int, **options) -> None:
    session = start(record=True, **options)
    for _ in session.stream(passes):
        pass
    session.save(tmp_path, cache=False, wait=True)
    assert not any(re.match(r"(keys|values)\.", name) for name in raw(tmp_path))
    assert_goes_on(Workers.restore(model(), tmp_path), session)


@pytest.mark.slow
def test_a_save_without_keys_and_values_goes_on_as_the_unbroken_session(tmp_path):
    restored_small(tmp_path, AT)


@pytest.mark.slow
@pytest.mark.parametrize("passes", [0, 1, 16, 50, BUDGET])
@pytest.mark.parametrize(
    "options",
    [
        {"layout": "contiguous"},
        {"layout": "interleaved"},
        {"layout": "combined"},
        {"move": "reencode"},
        {"step_tokens": 24},
    ],
    ids=str,
)
def test_keys_and_values_can_be_left_out_at_any_pass(tmp_path, passes, options):
    """All layouts, steps that are reencoded, and steps that move in pieces."""
    restored_small(tmp_path, passes, ask_every=20, **options)


@pytest.mark.slow
def test_a_session_that_was_recorded_goes_on_recording_wherever_its_keys_come_from(tmp_path):
    """One save whole, the next one small, made by the session that was restored from the first."""
    unbroken, session = start(record=True), start(record=True)
    for _ in session.stream(16):
        pass
    session.save(tmp_path, wait=True)
    session = Workers.restore(model(), tmp_path)
    for _ in session.stream(AT):
        pass
    session.save(tmp_path, cache=False, wait=True)
    session.close()
    for _ in unbroken.stream(AT):
        pass
    assert_goes_on(Workers.restore(model(), tmp_path), unbroken)


@pytest.mark.slow
def test_a_save_without_keys_and_values_is_small(tmp_path):
    """Smaller by all that the blocks hold, but for some bytes a token."""
    session = start(record=True)
    for _ in session.stream():
        pass
    session.save(tmp_path / "large", wait=True)
    session.save(tmp_path / "small", cache=False, wait=True)
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("large", "small")
    }
    held, fed = (
        int(session.cache.lengths.sum()) * session.cache.token_bytes,
        session.trace.num_tokens,
    )
    assert len(raw(tmp_path / "small")["trace"]) < 40 * fed + 3000
    # keys and values are compressed a little
    assert sizes["small"] < sizes["large"] - 0.7 * held, (sizes, held)


@pytest.mark.slow
def test_small_saves_move_between_an_engine_and_memory_of_its_own(tmp_path, whole):
    with made(4096) as engine:
        with Workers(
            engine.model, engine=engine, **{**start().settings, "record": True}
        ) as session:
            for _ in session.stream(AT):
                pass
            session.save(tmp_path / "engine", cache=False, wait=True)
        alone = Workers.restore(model(), tmp_path / "engine")
        alone.save(tmp_path / "alone", cache=False, wait=True)
        # so that its blocks are elsewhere, and has something to lose
        other = Workers(engine.model, engine=engine, **{**start().settings, "problem": "1 + 1"})
        call = engine.submit("1 + 1", max_new_tokens=4)
        back = Workers.restore(model(), tmp_path / "alone", engine=engine)
        call.wait()
        assert run(back) == whole["written"] == run(alone)
        assert_same_cache(back.cache, alone.cache, atol=1e-4)
        assert run(other) == run(start(text="1 + 1"))
        other.close()
        back.close()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"kv": 2}, {"tensor": 4, "kv": 2}])
def test_keys_and_values_are_computed_again_on_a_mesh(tmp_path, whole, mesh):
    session = start(record=True)
    for _ in session.stream(AT):
        pass
    session.save(tmp_path / "one", cache=False, wait=True)
    session = Workers.restore(on(mesh), tmp_path / "one")
    for _ in session.stream(AT + 4):
        pass
    session.save(tmp_path / "many", cache=False, wait=True)
    assert run(session) == whole["written"]
    assert run(Workers.restore(model(), tmp_path / "many")) == whole["written"]


@pytest.mark.slow
def test_run_can_save_without_keys_and_values_on_the_way(tmp_path, whole):
    session = start(record=True)
    session.run([AT, BUDGET], save_to=tmp_path, save_every=16, save_cache=False)
    with SavedCheckpoint(tmp_path) as newest:
        assert "trace" in newest.arrays() and "keys.0" not in newest.arrays()
        before = newest.number - 1
    session.close()
    assert run(Workers.restore(model(), tmp_path, number=before)) == whole["written"]


def test_a_session_that_keeps_no_trace_is_saved_with_keys_and_values(tmp_path):
    session = start()
    for attempt in (
        lambda: session.save(tmp_path / "x", cache=False),
        lambda: session.run(save_to=tmp_path / "x", save_cache=False),
    ):
        with pytest.raises(
            ValueError,
            match="keeps no trace, so keys and values cannot be left out of a save; create it with "
            "record=True",
        ):
            attempt()
    assert session.passes == 0 and not (tmp_path / "x").exists()


def rewritten(folder, arrays: dict, **facts) -> None:
    """The newest save once more, with something changed."""
    with SavedCheckpoint(folder) as saved:
        facts, arrays = {**saved.metadata, **facts}, {**saved.arrays(), **arrays}
    saves = CheckpointStore(folder)
    saves.save(arrays, facts, wait=True)
    saves.close()


@pytest.mark.slow
def test_a_trace_that_is_damaged_or_of_something_else_is_refused(tmp_path, whole):
    session = start(record=True)
    for _ in session.stream(AT):
        pass
    session.save(tmp_path, cache=False, wait=True)
    trace, good = session.trace, raw(tmp_path)["trace"]
    shorter = start(record=True)
    other = dataclasses.replace(trace, fingerprint="of another")
    cases = [
        (
            good[:-1],
            "save 2 of .* is a trace that is cut short or damaged.* or restore the save before it "
            "with number=",
        ),
        (
            np.where(np.arange(len(good)) == len(good) // 2, good ^ 1, good),
            "save 3 of .* cut short or damaged",
        ),
        (
            np.frombuffer(other.to_bytes(), np.uint8),
            "the trace in save 4 of .* of another session, model or tokenizer; give number=",
        ),
        (
            np.frombuffer(shorter.trace.to_bytes(), np.uint8),
            "the trace in save 5 of .* of another session",
        ),
    ]
    for content, said in cases:
        rewritten(tmp_path, {"trace": content}, trace_bytes=len(content))
        with pytest.raises(SaveError, match=said):
            Workers.restore(model(), tmp_path)
    rewritten(tmp_path, {"trace": good}, trace_bytes=len(good))
    assert run(Workers.restore(model(), tmp_path)) == whole["written"]
    rewritten(tmp_path, {}, tokenizer="another")
    with pytest.raises(SaveError, match="another tokenizer"):
        Workers.restore(model(), tmp_path)


@pytest.mark.slow
def test_a_session_in_a_short_context_is_restored_where_keys_are_rotated_alike(tmp_path):
    """With longrope, a session alone is prepared for its own blocks, one in an engine for all."""
    config = model().config
    short = dataclasses.replace(
        config.rope, frequencies=tuple(f / 2 for f in config.rope.frequencies)
    )
    loaded = dataclasses.replace(
        model(),
        config=dataclasses.replace(
            config, short_rope=short, short_positions=config.max_positions - 1
        ),
    )
    session = Workers(loaded, **{**start().settings, "record": True, "history_tokens": 512})
    assert session.model.config.rope == short
    session.run(save_to=tmp_path / "small", save_cache=False)
    restored = Workers.restore(loaded, tmp_path / "small")
    # Sums in another order: a part of the largest number, of which float32 has 7 digits. Values are
    # several times as large as keys.
    for kind, other in (("keys", "values"), ("values", "keys")):
        got, expected = (dataclasses.replace(s.cache, **{other: ()}) for s in (restored, session))
        largest = max(float(jnp.abs(arena).max()) for arena in getattr(expected, kind))
        assert_same_cache(got, expected, atol=5e-6 * largest)
    rewritten(tmp_path / "small", {}, context=config.max_positions)
    with pytest.raises(
        SaveError,
        match=r"rotated as for texts of \d+ tokens, but here they would be as for \d+; restore it "
        r"in an engine",
    ):
        Workers.restore(loaded, tmp_path / "small")


@pytest.mark.slow
def test_from_eight_devices_to_two_and_back_bit_for_bit(tmp_path, whole):
    """The kv heads are repeated on eight devices, and are not on two."""
    eight, two = ({"tensor": 4, "kv": 2}, {"kv": 2})
    session = start_on(eight)
    for _ in session.stream(AT):
        pass
    session.save(tmp_path / "1", wait=True)
    expected = raw(tmp_path / "1")
    for i, mesh in enumerate((two, eight, None), 1):
        session = Workers.restore(on(mesh), tmp_path / str(i))
        assert session.cache.mesh == (None if mesh is None else make_mesh(**mesh))
        session.save(tmp_path / str(i + 1), wait=True)
        found = raw(tmp_path / str(i + 1))
        assert found.keys() == expected.keys()
        for name in found.keys() - {"cache.offsets"}:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
    assert run(session) == whole["written"]  # on one device
    assert run(Workers.restore(on(eight), tmp_path / "1")) == whole["written"]


def on(mesh: dict | None):
    return model() if mesh is None else model().on(make_mesh(**mesh))


def start_on(mesh: dict) -> Workers:
    session = start()
    return Workers(on(mesh), **session.settings)


@pytest.mark.parametrize(
    "mesh", mostly_slow([None, {"tensor": 4, "kv": 2}, {"kv": 2}, {"kv": 3}], 2)
)
def test_what_a_cache_holds_can_be_read_and_written_wherever_it_lies(mesh):
    """Against plain indexing; 300 tokens of 1, 0, 250 and 49, in one arena and then in another."""
    loaded = on(mesh)
    runs, other = [(7, 1), (600, 0), (129, 250), (640, 49)], [(0, 1), (9, 0), (500, 250), (200, 49)]
    rng = np.random.default_rng(0)
    kv_heads = loaded.config.num_kv_heads // loaded.kv_repeats
    given = rng.normal(size=(kv_heads, 300, 8)).astype(np.float32)
    config = dataclasses.replace(loaded.config, num_layers=1, head_dim=8)
    cache = KVCache.create(config, [768], jnp.float32, mesh=loaded.mesh)
    padding = ((0, 0), (0, cache_io.padded_length(300) - 300), (0, 0))
    for places in (runs, other):
        cache = cache_io.with_tokens(
            cache,
            cache_io.token_indices(places),
            [np.pad(given, padding)],
            [np.pad(-given, padding)],
            loaded.kv_repeats,
        )
        for arenas, sign in ((cache.keys, 1), (cache.values, -1)):
            found = cache_io.read(
                arenas[0], cache_io.token_indices(places), cache.mesh, loaded.kv_repeats
            )
            assert found.shape == (kv_heads, 512, 8)
            np.testing.assert_array_equal(found[:, :300], sign * given)
            assert not found[:, 300:].any()
            # every device has a part, and no other's
            if loaded.mesh is not None and mesh != {"kv": 3}:
                assert len({s.index for s in found.addressable_shards}) == loaded.mesh.size
    if loaded.mesh is None:  # the second place, with what was left at the first
        expected = np.zeros((kv_heads, cache.keys[0].shape[1], 8), np.float32)
        for places in (runs, other):
            at = 0
            for offset, length in places:
                expected[:, offset : offset + length] = given[:, at : at + length]
                at += length
        np.testing.assert_array_equal(cache.keys[0], expected)


KILLED = """
    import os, signal, sys
    import numpy as np
    from jaxshare.serving.checkpoints import CheckpointStore
    saves = CheckpointStore(sys.argv[1])
    rng = np.random.default_rng(0)
    saves.save({"a": rng.normal(size=1000)}, {"which": "first"}, wait=True)
    saves.save({"a": rng.normal(size=30_000_000)}, {"which": "second"})
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_in_the_midst_of_a_save_the_one_before_it_is_restored(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(KILLED), str(tmp_path)],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    # The lock file of the killed process is left too, and keeps nothing out.
    left = [path.name for path in tmp_path.iterdir() if path.name != ".jaxshare-lock"]
    # something of the second one is there
    assert "1" in left and "2" not in left and len(left) == 2, left
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.number == 1 and saved.metadata == {"which": "first"}
        np.testing.assert_array_equal(
            saved.arrays()["a"], np.random.default_rng(0).normal(size=1000)
        )
    saves = CheckpointStore(tmp_path)
    assert saves.save({"a": np.arange(3)}, {"which": "third"}, wait=True) == 2
    saves.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.metadata == {"which": "third"}


def two_saves(folder) -> dict[str, np.ndarray]:
    """A folder with two checkpoints; the arrays of the first."""
    saves, rng = CheckpointStore(folder), np.random.default_rng(0)
    arrays = {"keys": rng.normal(size=(4, 300)), "small": np.arange(5)}
    saves.save(arrays, {"which": "first"}, wait=True)
    saves.save({name: array + 1 for name, array in arrays.items()}, {"which": "second"}, wait=True)
    saves.close()
    return arrays


def listed_files(folder) -> list:
    """The files of a checkpoint that something is read from."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if (path.is_file() and path.parent != folder) or path.name == "checksums.json"
    ]


def test_a_damaged_newest_save_is_stepped_over_and_named(tmp_path, caplog):
    first = two_saves(tmp_path)
    files = listed_files(tmp_path / "2")
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for at in (0, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            with pytest.raises(SaveError, match=re.escape(str(path))) as error:
                SavedCheckpoint(tmp_path, 2)
            assert "--resume-from" in str(error.value)
            caplog.clear()
            with SavedCheckpoint(tmp_path) as saved:
                assert saved.number == 1 and saved.metadata == {"which": "first"}
                said = [r.getMessage() for r in caplog.records if r.name == "jaxshare"]
                assert (
                    len(said) == 1
                    and str(path) in said[0]
                    and "; checkpoint 1 is opened" in said[0]
                )
        path.write_bytes(content)
    path.unlink()
    with SavedCheckpoint(tmp_path) as saved:
        np.testing.assert_array_equal(saved.arrays()["keys"], first["keys"])
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(SaveError, match=f"{re.escape(str(path))} is missing"):
        SavedCheckpoint(tmp_path)


def test_a_save_after_a_damaged_one_leaves_the_intact_one_before_it(tmp_path, caplog):
    first = two_saves(tmp_path)
    file = listed_files(tmp_path / "2")[0]
    file.write_bytes(file.read_bytes()[:-1])
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.number == 1
    saves = CheckpointStore(tmp_path)
    assert f"checkpoint 2 of {tmp_path} is damaged; it is deleted" in caplog.text
    number = saves.save({"keys": np.zeros(3)}, {"which": "third"}, wait=True)
    saves.close()
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.number == number and saved.metadata == {"which": "third"}
    with SavedCheckpoint(tmp_path, 1) as saved:
        np.testing.assert_array_equal(saved.arrays()["keys"], first["keys"])


def test_a_save_of_a_former_version_has_no_checksums_and_is_restored(tmp_path):
    first = two_saves(tmp_path)
    (tmp_path / "2" / "checksums.json").unlink()
    with SavedCheckpoint(tmp_path) as saved:
        assert saved.number == 2
        np.testing.assert_array_equal(saved.arrays()["small"], first["small"] + 1)


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs the names of descriptors")
def test_a_save_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Every file and folder of it, so that a power loss leaves it whole or none of it."""
    synced: dict[str, bool] = {}
    fsync = os.fsync

    def watched(descriptor):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced[re.sub(r"2\.orbax[^/]*", "2", path)] = (tmp_path / "2").exists()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    two_saves(tmp_path)
    for path in listed_files(tmp_path / "2"):
        if path.name != "checksums.json":  # it takes its name when it is there
            assert synced[str(path)] is False
        assert synced[str(path.parent)] is False
    assert synced[str(tmp_path)] is True, "the names of the saves, after the last one has its own"


def test_what_cannot_be_restored_is_said(tmp_path):
    with pytest.raises(SaveError, match=r"there is no folder .*nowhere to restore from"):
        Workers.restore(model(), tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SaveError, match="has no complete checkpoint; give a folder"):
        Workers.restore(model(), tmp_path / "empty")
    folder = tmp_path / "session"
    saved_at(folder, 2)
    with pytest.raises(
        SaveError,
        match=r"save 1 of .*session is of a session of another model \(.*embedded\) than .*embedded",
    ):
        Workers.restore(load(EMBEDDED, dtype="bfloat16"), folder)
    with pytest.raises(
        SaveError, match=r"the checkpoints 1, not 77; give number=1, on .*--resume-from 1"
    ):
        Workers.restore(model(), folder, number=77)
    saves = CheckpointStore(tmp_path / "other")
    saves.save({"a": np.zeros(3)}, {"format": "something"}, wait=True)
    saves.close()
    with pytest.raises(SaveError, match="is no session of workers"):
        Workers.restore(model(), tmp_path / "other")
    with (
        SavedCheckpoint(tmp_path / "other") as saved,
        pytest.raises(SaveError, match=r"a in checkpoint 1 .* is float64\[3\], not float64\[4\]"),
    ):
        saved.arrays({"a": np.zeros(4)})
    shutil.rmtree(folder / "1" / "arrays")
    with pytest.raises(SaveError, match=r"checkpoint 1 of .*session cannot be read"):
        Workers.restore(model(), folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="cannot be written"):
        start().save(tmp_path / "file")


def test_a_layout_of_ones_own_is_saved_and_a_function_has_to_be_given_again(tmp_path):
    own = WorkersLayout(
        sees={"Alice": ("prompt", "Bob", "Alice"), "Bob": ("prompt", "Alice", "Bob")}
    )
    session = saved_at(tmp_path / "1", 20, layout=own)
    assert run(Workers.restore(model(), tmp_path / "1")) == run(session)
    session = saved_at(tmp_path / "2", 20, layout=lambda names, format: combined(names, format))
    with pytest.raises(ValueError, match="made with a layout function"):
        Workers.restore(model(), tmp_path / "2")
    assert run(Workers.restore(model(), tmp_path / "2", layout=combined)) == run(session)


@pytest.mark.slow
def test_a_killed_command_goes_on_with_resume_and_says_what_the_unbroken_one_says(tmp_path, capsys):
    command = [
        "workers",
        "embedded",
        "--problem",
        "1. Compute 17 + 25. 2. Compute 6 * 7.",
        "--budget",
        "400",
        "--temperature",
        "0.7",
        "--seed",
        "3",
        "--finish-at",
        "16,400",
        "--json",
    ]
    saving = [*command, "--checkpoint", str(tmp_path / "saves"), "--checkpoint-every", "16"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jaxshare.serving.cli.main", *saving], stderr=subprocess.PIPE
    )
    until = time.monotonic() + 240
    while not any(path.name.isdigit() and int(path.name) > 1 for path in tmp_path.glob("saves/*")):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert main.main(command) == 0
    unbroken = json.loads(capsys.readouterr().out)
    assert main.main(saving) == 1
    assert "there is a saved session in" in capsys.readouterr().err
    assert main.main([*saving, "--resume", "--ask-every", "7"]) == 1
    assert "has ask_every 1024, not 7; give the same command" in capsys.readouterr().err
    assert main.main([*saving, "--resume"]) == 0
    out, err = capsys.readouterr()
    resumed = json.loads(out)
    assert int(re.search(r"going on after (\d+) passes", err)[1]) >= 32
    for timing in ("seconds", "prefill_seconds", "compile_seconds", "tokens_per_second"):
        unbroken.pop(timing, None)
        resumed.pop(timing, None)
    assert resumed == unbroken
    newest = max(int(path.name) for path in (tmp_path / "saves").iterdir())
    (tmp_path / "saves" / str(newest) / "facts" / "metadata").write_bytes(b"{}")
    for more in (["--resume"], ["--resume-from", str(newest - 1)]):
        shutil.copytree(tmp_path / "saves", folder := tmp_path / more[0])
        assert main.main([*command, "--checkpoint", str(folder), *more]) == 0
        again = json.loads(capsys.readouterr().out)
        assert all(again[name] == unbroken[name] for name in ("answers", "passes", "tokens"))
    assert main.main([*saving, "--resume-from", str(newest)]) == 1
    assert "facts/metadata is damaged" in capsys.readouterr().err


def test_wrong_arguments_of_the_command_are_said_before_the_model_is_loaded(capsys):
    for arguments, said in (
        (["--resume"], "give its folder as --checkpoint"),
        (["--resume-from", "2"], "--resume-from goes on with a session that was saved; give its"),
        (["--resume-from", "2", "--checkpoint", "no-such-folder"], "has no checkpoint; give the"),
        (["--checkpoint", "x", "--checkpoint-every", "0"], "at least 1"),
        (
            ["--trace", "no-such-folder/run.trace"],
            "there is no folder no-such-folder; give a file in a folder",
        ),
        (["--trace", "."], "that is a folder; give a file"),
    ):
        assert main.main(["workers", "no-such-model", "--problem", "1 + 1", *arguments]) == 1
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_the_trace_of_the_session(tmp_path, capsys):
    command = [
        "workers",
        "embedded",
        "--problem",
        "1. Compute 17 + 25. 2. Compute 6 * 7.",
        "--budget",
        "24",
        "--json",
    ]
    assert main.main([*command, "--trace", str(tmp_path / "run.trace")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert main.main(["inspect", str(tmp_path / "run.trace")]) == 1
    assert "is a trace, of `jaxshare workers --trace`, and no snapshot" in capsys.readouterr().err
    trace = Trace.load(tmp_path / "run.trace")
    assert [file.name for file in tmp_path.iterdir()] == ["run.trace"], "nothing is left beside it"
    loaded = load(EMBEDDED)
    assert trace.fingerprint == loaded.trace_fingerprint and trace.num_passes > told["passes"]
    _, cache = reencode(loaded, trace, at=[])
    assert int(cache.lengths.sum()) * cache.token_bytes == told["kv_bytes"]
