"""scripts/bench/before.py: what it refuses, which checkout a side runs, and what goals are set
against."""

import shutil
import statistics
import subprocess
import sys

import pytest

from scripts.bench import before
from scripts.bench.peer import Worker, WorkerError
from tests.paths import ROOT


def test_goals_are_about_passes_and_calls():
    """A pass that takes longer misses its goal, and a call that is faster meets it."""
    times = {before.NOW: [11.0, 22.0, 33.0], before.EARLIER: [10.0, 20.0, 30.0]}
    found = {
        name: {
            "now_of_earlier": before.ratios(times[before.NOW], times[before.EARLIER]),
            "faster": before.ratios(times[before.EARLIER], times[before.NOW]),
        }
        for name in before.cases(before.QUICK, 0)
    }
    goals = before.goals(found)
    assert [(goal.at_most, goal.goal, goal.met) for goal in goals] == [
        *[(True, 1.03, False)] * 3,
        *[(False, 0.97, False)] * 2,
    ]
    assert statistics.mean(goal.measured or 0 for goal in goals[:3]) == pytest.approx(1.1)
    assert goals[3].measured == pytest.approx(1 / 1.1)


def test_a_side_runs_the_checkout_that_it_is_given(tmp_path):
    (tmp_path / "jaxshare").mkdir()
    (tmp_path / "jaxshare" / "__init__.py").write_text("raise ImportError('an early one')")
    worker = Worker(sys.executable, before.WORKER, {"CHECKOUT": str(tmp_path)})
    with pytest.raises(WorkerError, match="ImportError: an early one"):
        worker.begin()
    worker.close()


def test_a_folder_without_jaxshare_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        before.main(["--earlier", str(tmp_path)])
    assert ended.value.code == 2
    assert "there is no jaxshare in it; name a checkout" in capsys.readouterr().err


@pytest.mark.slow
def test_a_copy_of_this_checkout_writes_the_same(tmp_path):
    for part in ("jaxshare", "models", "serving", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, tmp_path / part)
    result = subprocess.run(
        [sys.executable, "-m", "scripts.bench.before", "--earlier", str(tmp_path), "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if "to" in line and "worker" in line]
    assert len(rows) == 3 and all(row.endswith("yes") for row in rows)
