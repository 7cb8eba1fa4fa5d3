"""Engine.snapshot: what it tells of rows, queue and cache, against what was submitted."""

import contextlib
import itertools
import threading

import pytest

from jaxshare.serving.errors import ClosedError
from tests.serving.engine.test_engine import ROWS, SIZE, Stepped, lasting

SHARED = lasting(24, 40)
"""A prompt, whose first tokens another one has as well."""


@contextlib.contextmanager
def stepped():
    """An engine whose steps a test runs, and its end."""
    engine = Stepped()
    yield engine
    engine._thread = None  # the test's own thread, which is not waited for
    engine.shutdown()


def path_of(snapshot, run):
    """The places of a run and of all before it, from the root on."""
    path = []
    while run is not None:
        path.insert(0, run)
        run = snapshot.runs[run].parent
    return path


def test_an_engine_that_has_done_nothing_is_empty():
    with stepped() as engine:
        seen = engine.snapshot()
    assert (seen.num_rows, seen.rows, seen.runs, seen.waiting) == (ROWS, (), (), 0)
    assert seen.free == seen.capacity and seen.leases == ()
    assert (seen.admitted_tokens, seen.sampled_tokens, seen.passes) == (0, 0, 0)


def test_rows_runs_and_readers_are_those_of_the_requests():
    with stepped() as engine:
        first = engine.submit(SHARED, max_new_tokens=30, agent_id="a")
        engine.step()
        second = engine.submit([*SHARED[:20], 5, 6, 7, 8], max_new_tokens=30, agent_id="b")
        for _ in range(2):
            engine.step()
        seen = engine.snapshot()
        by_agent = {row.agent: row for row in seen.rows}
        assert by_agent.keys() == {"a", "b"}
        assert [row.prompt_tokens for row in by_agent.values()] == [24, 24]
        assert all(0 < row.sampled_tokens < 30 == row.max_new_tokens for row in seen.rows)
        paths = {agent: path_of(seen, row.run) for agent, row in by_agent.items()}
        common = [run for run in paths["a"] if run in paths["b"]]
        assert sum(seen.runs[run].tokens for run in common) == 20
        assert all(seen.runs[run].readers == 2 for run in common)
        assert {run.agents for i, run in enumerate(seen.runs) if i in common} == {("a", "b")}
        assert [*seen.runs[common[0]].first_tokens] == SHARED[:20]
        for agent, path in paths.items():
            own = seen.runs[path[-1]]
            assert own.writing and own.readers == 1 and own.agents == (agent,)
            row = by_agent[agent]
            tokens = sum(seen.runs[run].tokens for run in path)
            assert tokens == row.prompt_tokens + row.sampled_tokens
        assert seen.admitted_tokens == 48 and seen.reused_tokens == 20
        first.cancel()
        second.cancel()
        engine.settle()
        seen = engine.snapshot()
        assert seen.rows == () and all(run.readers == 0 for run in seen.runs)


def test_extents_lie_in_the_memory_without_overlaps():
    with stepped() as engine:
        streams = [engine.submit(lasting(20, 10, seed), max_new_tokens=6) for seed in range(3)]
        engine.settle()
        assert [len(stream.wait(0).tokens) for stream in streams] == [6] * 3
        lease = engine.lease([32, 64])
        seen = engine.snapshot()
        places = [(run.offset, run.capacity) for run in seen.runs if run.place] + [*seen.leases]
        used = sorted(places)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(used))
        assert sum(size for _, size in used) == seen.capacity - seen.free
        assert [size for _, size in seen.leases] == [seen.leased] and seen.leased >= 96
        assert seen.bytes_per_token == SIZE
        lease.close()
        assert engine.snapshot().leases == ()


def test_runs_beyond_the_limit_are_counted():
    with stepped() as engine:
        streams = [engine.submit(lasting(20, 10, seed), max_new_tokens=6) for seed in range(3)]
        engine.settle()
        assert [len(stream.wait(0).tokens) for stream in streams] == [6] * 3
        whole = engine.snapshot()
        cut = engine.snapshot(1)
        assert cut.runs == whole.runs[:1] and cut.runs_left_out == len(whole.runs) - 1 >= 2
        assert engine.snapshot(0).runs == ()


def test_it_waits_for_the_step_in_progress():
    with stepped() as engine:
        seen = []
        with engine._leases.exclusive():
            thread = threading.Thread(target=lambda: seen.append(engine.snapshot()))
            thread.start()
            thread.join(0.05)
            assert seen == []
        thread.join(10)
        assert len(seen) == 1


def test_what_cannot_be_asked_is_refused():
    with stepped() as engine:
        for given in (-1, 2**31):
            with pytest.raises(ValueError, match="max_runs"):
                engine.snapshot(given)
        with pytest.raises(TypeError, match="max_runs"):
            engine.snapshot("all")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ClosedError):
        engine.snapshot()
