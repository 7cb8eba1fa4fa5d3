"""Calibration: fits to timings made from known costs, the file, and the output of `calibrate`."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.branches.sharing_plan import build_prefix_tree, plan_sharing
from jaxshare.serving.cli import main
from jaxshare.serving.kvcache import sharing_cost
from jaxshare.serving.kvcache.sharing_cost import Costs
from jaxshare.serving.tuning import calibration
from jaxshare.serving.tuning.calibration import Timing
from tests.serving.branches.test_branches import model

KNOWN = Costs(
    shared_start=80.0, shared_tile=30.0, shared_token_row=0.02, private_row=3.0, private_tile=7.0
)


def timed(costs: dict, always: float, noise: float = 0.0) -> list[Timing]:
    """Computes the timings of a device with these costs, tile by tile."""
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
        points.append(Timing(rows, prefix, 128, shared, time * float(np.exp(rng.normal(0, noise)))))
    return points


def test_fit_finds_the_costs_that_made_the_times():
    found = calibration.fit(timed(KNOWN.as_json(), always=200.0))
    for name, value in KNOWN.as_json().items():
        assert found.as_json()[name] == pytest.approx(value, rel=1e-6)


def test_fit_is_never_negative_and_close_in_noise():
    costs = {**KNOWN.as_json(), "shared_start": 0.0, "private_row": 0.0}
    # Costs itself refuses negative values
    found = calibration.fit(timed(costs, always=0.0, noise=0.05))
    assert found.private_tile == pytest.approx(
        7.0, rel=0.15
    ) and found.shared_token_row == pytest.approx(0.02, rel=0.15)


def test_the_file_keeps_shapes_apart_and_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path / "new"))
    assert sharing_cost.load_costs(model()) == sharing_cost.DEFAULT
    file = sharing_cost.save_costs(model(), KNOWN)
    assert file == tmp_path / "new" / "costs.json" and sharing_cost.load_costs(model()) == KNOWN
    other = Costs(1, 2, 3, 4, 5)
    known = json.loads(file.read_text())
    (device,) = known
    known[device]["another shape"] = other.as_json()
    file.write_text(json.dumps(known))
    assert sharing_cost.load_costs(model()) == KNOWN
    del known[device][next(iter(known[device]))]
    file.write_text(json.dumps(known))
    assert sharing_cost.load_costs(model()) == other  # the device counts for more than the shape
    sharing_cost.save_costs(model(), KNOWN)
    assert sharing_cost.load_costs(model()) == KNOWN and set(
        json.loads(file.read_text())[device]
    ) >= {"another shape"}
    file.write_text(json.dumps({"another device": {"shape": other.as_json()}}))
    assert sharing_cost.load_costs(model()) == sharing_cost.DEFAULT


@pytest.mark.parametrize(
    "text", ["", "[]", '{"DEVICE": 3}', '{"DEVICE": {"x": {"shared_start": -1}}}']
)
def test_a_file_that_cannot_be_read_is_a_warning(text, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    import jax

    (tmp_path / "costs.json").write_text(text.replace("DEVICE", jax.devices()[0].device_kind))
    with pytest.warns(
        UserWarning,
        match=r"costs\.json cannot be read .*; defaults are used until `jaxshare calibrate`",
    ):
        assert sharing_cost.load_costs(model()) == sharing_cost.DEFAULT
    sharing_cost.save_costs(model(), KNOWN)
    assert sharing_cost.load_costs(model()) == KNOWN


# The costs predicted for a device that was not calibrated.

LLAMA = sharing_cost.AttentionShape(heads=32, kv_heads=8, head_dim=128, itemsize=2)
KINDS = {  # bytes/s and bfloat16 FLOP/s of data sheets
    "NVIDIA H200": (4.8e12, 989e12),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989e12),
    "NVIDIA H100 PCIe": (2.0e12, 756e12),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12),
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12),
    "NVIDIA L4": (0.3e12, 121e12),
    "NVIDIA L40S": (0.864e12, 362e12),
    "NVIDIA A10G": (0.6e12, 70e12),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165e12),
    "NVIDIA GeForce RTX 3090": (0.936e12, 71e12),
    "NVIDIA RTX A6000": (0.768e12, 155e12),
    "NVIDIA B200": (8.0e12, 2250e12),
}


def bound(
    rows: int, prefix: int, suffix: int, memory: float, products: float, shared: bool
) -> float:
    """Returns the minimum seconds of one layer of LLAMA at full rates.

    It is limited by the bytes of keys and values read, or by FLOPs.
    """
    read = (prefix if shared else rows * prefix) + rows * suffix
    return max(read * 2 * 8 * 128 * 2 / memory, rows * (prefix + suffix) * 4 * 32 * 128 / products)


def predicted(costs: Costs, rows: int, prefix: int, suffix: int, shared: bool) -> float:
    if shared:
        return (
            costs.shared_start + costs.shared(prefix, rows) + rows * costs.private(suffix)
        ) * 1e-6
    return rows * costs.private(prefix + suffix) * 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_predicted_costs_follow_the_roofline(kind):
    """Costs are above the data sheet's limit and within four times of it.

    For lengths that fill tiles, and rows that fill the device.
    """
    memory, products = KINDS[kind]
    costs, entry = sharing_cost.predicted(kind, LLAMA)
    assert kind.startswith(entry)
    for rows, prefix, shared in itertools.product((64, 256, 1024), (4096, 16384), (True, False)):
        least = bound(rows, prefix, 128, memory, products, shared)
        assert least < predicted(costs, rows, prefix, 128, shared) < 4 * least, (
            rows,
            prefix,
            shared,
        )


def shares(costs: Costs) -> np.ndarray:
    """Finds whether a prefix is shared, by its length and by the number of rows."""
    prefixes, rows = (8, 64, 256, 512, 1024, 4096, 16384), (2, 4, 16, 64, 256, 1024)
    return np.asarray(
        [
            [
                bool(
                    plan_sharing(
                        build_prefix_tree([Prompt(0, tuple(range(prefix)), count)]), costs, grow=64
                    ).blocks
                )
                for count in rows
            ]
            for prefix in prefixes
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_long_prefixes_of_many_rows_are_shared_and_short_ones_of_few_are_not(kind):
    found = shares(sharing_cost.predicted(kind, LLAMA)[0])
    assert found[-3:, 2:].all() and not found[0].any() and not found[:2, 0].any()
    # Where sharing pays, it also pays for more rows and for a longer prefix.
    assert (found[:, 1:] >= found[:, :-1]).all() and (found[1:] >= found[:-1]).all()


def test_a_gpu_shares_where_two_cpu_cores_would_copy_no_less():
    """GPUs once had the CPU's default, whose fixed costs are those of loops on a CPU."""
    gpu, entry = sharing_cost.predicted("NVIDIA H200", LLAMA)
    assert entry == "NVIDIA H200" and sharing_cost.predicted("cpu", LLAMA) == (
        sharing_cost.DEFAULT,
        "cpu",
    )
    assert (shares(gpu) >= shares(sharing_cost.DEFAULT)).all()
    assert (
        gpu.shared_token_row * 128 / gpu.private_tile
        < sharing_cost.DEFAULT.shared_token_row * 128 / sharing_cost.DEFAULT.private_tile
    )


def test_costs_scale_with_the_shape_as_bytes_and_products_do():
    def costs(**more) -> Costs:
        return sharing_cost.predicted(
            "NVIDIA H200", sharing_cost.AttentionShape(**{**dataclasses.asdict(LLAMA), **more})
        )[0]

    base = costs()
    assert costs(kv_heads=4).shared_tile == pytest.approx(base.shared_tile / 2)
    assert costs(heads=64).shared_token_row == pytest.approx(2 * base.shared_token_row)
    assert costs(head_dim=64).shared_token_row == pytest.approx(base.shared_token_row / 2)
    assert costs(itemsize=4).shared_tile == pytest.approx(2 * base.shared_tile)
    assert costs(has_values=False).shared_tile == pytest.approx(base.shared_tile / 2)
    assert costs(itemsize=4).shared_token_row > 4 * base.shared_token_row, (
        "the matrix units do not multiply float32"
    )


@pytest.mark.parametrize(
    ("kind", "entry"),
    [
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-PCIE-40GB"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA GeForce RTX 4070 Ti", "NVIDIA GeForce RTX 40"),
        ("NVIDIA RTX A5000", "NVIDIA RTX A"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA Z1000", "NVIDIA A100"),
        ("TPU v5 lite", "NVIDIA A100"),
        ("", "NVIDIA A100"),
    ],
)
def test_a_device_has_the_entry_that_fits_its_name_best(kind, entry):
    assert sharing_cost.predicted(kind, LLAMA) == (sharing_cost.DEVICES[entry].costs(LLAMA), entry)


def test_what_was_chosen_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    own = sharing_cost.AttentionShape(
        model().config.num_heads, model().config.num_kv_heads, model().config.head_dim, 4
    )
    for kind, said in (
        ("cpu", "of two CPU cores; `jaxshare calibrate` measures this device"),
        (
            "NVIDIA H200",
            "that a roofline predicts for NVIDIA H200; `jaxshare calibrate` measures this device",
        ),
        (
            "NVIDIA Z1000",
            "that a roofline predicts for NVIDIA A100, since NVIDIA Z1000 is not in the table; "
            "`jaxshare calibrate` measures this device",
        ),
    ):
        monkeypatch.setattr(sharing_cost, "_device", lambda kind=kind: kind)
        chosen = sharing_cost.choose(model())
        assert chosen.source == said and chosen.costs == sharing_cost.predicted(kind, own)[
            0
        ] == sharing_cost.load_costs(model())
    file = sharing_cost.save_costs(model(), KNOWN)
    assert sharing_cost.choose(model()) == sharing_cost.Chosen(
        KNOWN, f"measured on this device, NVIDIA Z1000 ({file})"
    )
    known = json.loads(file.read_text())
    known["NVIDIA Z1000"] = {"8 heads": KNOWN.as_json()}
    file.write_text(json.dumps(known))
    assert (
        sharing_cost.choose(model()).source
        == f"measured on this device, NVIDIA Z1000, for another shape, 8 heads ({file})"
    )


@pytest.mark.slow
def test_the_command_measures_keeps_and_prints(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration.calibrate, "__defaults__", ((2,), (64, 256)))
    assert main.main(["calibrate", "embedded", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {(p["rows"], p["prefix"], p["shared"]) for p in result["points"]} == {
        (2, p, s) for p in (64, 256) for s in (True, False)
    }
    assert all(point["time"] > 0 for point in result["points"])
    assert sharing_cost.load_costs(calibration_model()).as_json() == result["costs"]


def calibration_model():
    """Loads the model as the command does."""
    from jaxshare import models

    return models.load(models.EMBEDDED)
