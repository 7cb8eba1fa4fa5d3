"""The times of kernels: which events of a profile count, and the program at tiny sizes."""

import json
from types import SimpleNamespace

import jax
import pytest

from scripts.gpu import kernel_times


def event(name: str, nanoseconds: float) -> SimpleNamespace:
    return SimpleNamespace(name=name, duration_ns=nanoseconds)


def test_kernels_are_those_of_gpus_the_longest_first(monkeypatch):
    def plane(name: str, *lines: list[SimpleNamespace]) -> SimpleNamespace:
        return SimpleNamespace(name=name, lines=[SimpleNamespace(events=each) for each in lines])

    attention, merge = event("attention", 3000), event("merge", 1500)
    calls = kernel_times.CALLS
    gpu = plane("/device:GPU:0", [attention] * calls, [merge] * 2 * calls)
    found = SimpleNamespace(planes=[plane("/host:CPU", [event("Python", 10**9)]), gpu])
    monkeypatch.setattr(jax.profiler.ProfileData, "from_file", lambda _: found)
    assert kernel_times.kernels_of(lambda: None) == [
        kernel_times.Kernel("attention", 3.0, 1.0),
        kernel_times.Kernel("merge", 1.5, 2.0),
    ]


@pytest.mark.slow
def test_it_runs_without_a_gpu_at_tiny_sizes(capsys):
    assert kernel_times.main(["--cpu", "--cases", "short", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    results = report["results"]
    assert report["settings"]["backend"] == "xla"
    assert [r["group"] for r in results] == [1, 4] and all(r["microseconds"] > 0 for r in results)
    # Bytes are those of kv heads.
    assert results[0]["read_bytes"] == 4 * results[1]["read_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--cases", "long"], "--cases has 'long'"), ([], "there is no NVIDIA GPU")],
)
def test_what_it_cannot_do_is_said(arguments, said, capsys):
    try:
        code = kernel_times.main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2 and said in capsys.readouterr().err
