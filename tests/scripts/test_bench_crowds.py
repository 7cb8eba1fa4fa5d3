"""scripts.bench.crowds: what its sides do, and what it refuses."""

import json

import pytest

from jaxshare.models import EMBEDDED, load
from scripts.bench import crowds


@pytest.mark.slow
def test_a_small_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(crowds, "CROWDS", {True: (300, 100, 96)})
    monkeypatch.setattr(crowds, "CALLS", 64)
    output = tmp_path / "crowds.json"
    assert crowds.main(["--quick", "--output", str(output)]) == 0
    report = json.loads(output.read_text())
    sides = {crowds.FEW, crowds.CACHED, crowds.WAITING, crowds.FEW_AT_ONCE, crowds.AT_ONCE}
    assert report["result"]["calls_per_second"].keys() == sides
    assert all(len(times) == 3 for times in report["result"]["round_seconds"].values())
    assert len(report["goals"]) == 3
    assert "of few" in capsys.readouterr().out


@pytest.mark.slow
def test_a_crowd_fills_its_memory_and_no_more_calls_wait_than_it_is_told():
    crowd = crowds.Crowd(load(EMBEDDED), 100, 0)
    try:
        crowd.run(80, waiting=10)
        scheduler = crowd.engine._scheduler
        assert scheduler.kv.tree.evicted > 0
        cached = [node for node in scheduler.kv.tree.root.subtree() if node.extent]
        # An answer's last token is not fed, and a part of the memory is kept free.
        assert 70 <= len(cached) <= 110
        assert not len(scheduler.queue)
    finally:
        crowd.engine.shutdown()


def test_a_seed_is_checked(capsys):
    with pytest.raises(SystemExit) as raised:
        crowds.main(["--seed", "-1"])
    assert raised.value.code == 2 and "--seed is -1" in capsys.readouterr().err
