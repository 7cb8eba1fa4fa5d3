"""Calibration: fits against timings made from known costs, the file, and what `calibrate` prints."""

import itertools
import json

import numpy as np
import pytest

from jaxshare.serving import calibration, cli
from jaxshare.serving import costs as defaults
from jaxshare.serving.calibration import Point
from jaxshare.serving.costs import Costs
from tests.test_branches import model

KNOWN = Costs(shared_start=80.0, shared_tile=30.0, shared_token_row=0.02, private_row=3.0, private_tile=7.0)


def timed(costs: dict, always: float, noise: float = 0.0) -> list[Point]:
    """What a device with these costs would measure, written out tile by tile."""
    rng = np.random.default_rng(0)
    points = []
    for rows, prefix, shared in itertools.product((2, 8, 64), (64, 256, 1024, 4096), (True, False)):
        time = always
        if shared:
            time += costs["shared_start"]
            for _ in range(0, prefix, 512):
                time += costs["shared_tile"] + 512 * rows * costs["shared_token_row"]
        for _ in range(rows):
            time += costs["private_row"]
            for _ in range(0, (0 if shared else prefix) + 128, 128):
                time += costs["private_tile"]
        points.append(Point(rows, prefix, 128, shared, time * float(np.exp(rng.normal(0, noise)))))
    return points


def test_fit_finds_the_costs_that_made_the_times():
    found = calibration.fit(timed(KNOWN.as_json(), always=200.0))
    for name, value in KNOWN.as_json().items():
        assert found.as_json()[name] == pytest.approx(value, rel=1e-6)


def test_fit_is_never_negative_and_close_in_noise():
    costs = {**KNOWN.as_json(), "shared_start": 0.0, "private_row": 0.0}
    found = calibration.fit(timed(costs, always=0.0, noise=0.05))  # Costs itself refuses what is negative
    assert found.private_tile == pytest.approx(7.0, rel=0.15) and found.shared_token_row == pytest.approx(0.02, rel=0.15)


def test_the_file_keeps_shapes_apart_and_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path / "new"))
    assert calibration.load(model()) == defaults.DEFAULT
    file = calibration.save(model(), KNOWN)
    assert file == tmp_path / "new" / "costs.json" and calibration.load(model()) == KNOWN
    other = Costs(1, 2, 3, 4, 5)
    known = json.loads(file.read_text())
    (device,) = known
    known[device]["another shape"] = other.as_json()
    file.write_text(json.dumps(known))
    assert calibration.load(model()) == KNOWN
    del known[device][next(iter(known[device]))]
    file.write_text(json.dumps(known))
    assert calibration.load(model()) == other  # the device counts for more than the shape
    calibration.save(model(), KNOWN)
    assert calibration.load(model()) == KNOWN and set(json.loads(file.read_text())[device]) >= {"another shape"}
    file.write_text(json.dumps({"another device": {"shape": other.as_json()}}))
    assert calibration.load(model()) == defaults.DEFAULT


@pytest.mark.parametrize("text", ["", "[]", '{"DEVICE": 3}', '{"DEVICE": {"x": {"shared_start": -1}}}'])
def test_a_file_that_cannot_be_read_is_a_warning(text, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    import jax

    (tmp_path / "costs.json").write_text(text.replace("DEVICE", jax.devices()[0].device_kind))
    with pytest.warns(UserWarning, match=r"costs\.json cannot be read .*; defaults are used until `jaxshare calibrate`"):
        assert calibration.load(model()) == defaults.DEFAULT
    calibration.save(model(), KNOWN)
    assert calibration.load(model()) == KNOWN


@pytest.mark.slow
def test_the_command_measures_keeps_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration.calibrate, "__defaults__", ((2,), (64, 256), iter))
    assert cli.main(["calibrate", "embedded", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {(p["rows"], p["prefix"], p["shared"]) for p in result["points"]} == {(2, p, s) for p in (64, 256) for s in (True, False)}
    assert all(point["time"] > 0 for point in result["points"])
    assert calibration.load(calibration_model()).as_json() == result["costs"]


def calibration_model():
    """As the command loads it."""
    from jaxshare import models

    return models.load(models.EMBEDDED)
