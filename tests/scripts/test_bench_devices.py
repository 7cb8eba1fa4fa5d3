"""scripts/bench/devices.py and scripts/gpu/run_multi_gpu.py: what is counted against programs and
sums made by hand."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from scripts.bench import devices as bench
from scripts.gpu import run_multi_gpu
from tests.helpers import TINY
from tests.paths import ROOT

SMALL = dataclasses.replace(
    TINY, vocab_size=104, num_heads=8, num_kv_heads=4, intermediate_size=64, num_layers=3
)

HLO = """
  %p = f32[7,7]{1,0} all-reduce(%x), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="jit(run)/shard_map"}
  %a = f32[32,5120]{1,0} all-reduce(%x), channel_id=1, replica_groups=[1,8]<=[8], metadata={op_name="while/body"}
  %b = (f32[2,16]{1,0}, bf16[4]{0}) all-reduce(%x, %y), channel_id=2, replica_groups={{0,1},{2,3}}, metadata={op_name="while/body"}
  %c = f32[32,1024]{1,0} all-gather(%x), channel_id=3, replica_groups=mesh['data'=2,'tensor'=4] {'tensor'}, metadata={op_name="while/body"}
  %d = f32[32]{0} add(%x, %all-reduce.7)
"""


def test_collectives_are_read_with_their_sizes_and_groups():
    found = bench.collectives(HLO)
    assert [(c.kind, c.bytes, c.group) for c in found] == [
        ("all-reduce", 32 * 5120 * 4, 8),
        ("all-reduce", 2 * 16 * 4 + 4 * 2, 2),
        ("all-gather", 32 * 1024 * 4, 4),
    ]
    assert found[0].sent == 2 * 7 / 8 * 32 * 5120 * 4 and found[2].sent == 3 / 4 * 32 * 1024 * 4


@pytest.mark.slow
def test_a_tensor_parallel_layer_sends_two_sums_of_activations():
    sent = bench.counted(SMALL, (("tensor", 4),), 256)
    assert [(c.kind, c.bytes, c.group) for c in sent.layer] == [
        ("all-reduce", bench.COUNTED_ROWS * SMALL.hidden_size * 4, 4)
    ] * 2
    assert sum(c.sent for c in sent.step(3)) == 3 * sum(c.sent for c in sent.layer) + sum(
        c.sent for c in sent.outside
    )


@pytest.mark.slow
def test_a_layer_over_kv_sends_what_queries_found():
    sent = bench.counted(SMALL, (("tensor", 2), ("kv", 2)), 256)
    heads, rows = SMALL.num_heads // 2, bench.COUNTED_ROWS
    merged = [c for c in sent.layer if c.bytes != rows * SMALL.hidden_size * 4]
    assert sorted((c.bytes, c.group) for c in merged) == [
        (rows * heads * 4, 2),
        (rows * heads * (SMALL.head_dim + 1) * 4, 2),
    ]


def test_a_prediction_is_the_sum_that_the_page_writes_down():
    chip = bench.Chip(
        "one",
        memory=1e12,
        products=1e14,
        link=1e11,
        copies=0.5,
        rate=0.5,
        latency=1e-5,
        launch=1e-6,
    )
    sent = bench.Sent(
        (bench.Collective("all-reduce", 320, 4),) * 2, (bench.Collective("all-gather", 640, 4),)
    )
    found = bench.predict(SMALL, {"tensor": 4}, 64, 1000, sent, chip)
    weights = (3 * (2 * 32 * (8 * 16 + 4 * 16) + 3 * 32 * 64) + 32 * 104) / 4
    assert found.weights == pytest.approx(max(weights * 2 / 0.5e12, 2 * 64 * weights / 0.5e14))
    token = 2 * 3 * 4 * 16 * 2 / 4
    assert found.attention == pytest.approx(
        max(token * (1000 + 64 * 64) / 0.5e12, 4 * 3 * 8 * 16 * 64 * 1064 / 4 / 0.5e14)
    )
    assert found.sending == pytest.approx(7 * 1e-5 + 2 * (6 * 1.5 * 320 + 0.75 * 640) / 1e11)
    assert found.launches == pytest.approx(3 * 12e-6) and found.seconds > found.sending
    halves = bench.predict(SMALL, {"data": 2, "tensor": 4}, 64, 1000, sent, chip)
    assert halves.attention < found.attention and halves.weights <= found.weights


def test_the_part_that_takes_longest_is_named():
    assert bench.Predicted(1.0, 2.0, 4.0, 3.0).longest == "sending"
    assert bench.Predicted(5.0, 2.0, 4.0, 3.0).longest == "weights"


@pytest.mark.slow
def test_the_report_has_meshes_goals_and_the_paper(monkeypatch, capsys, tmp_path):
    small = dataclasses.replace(bench.CASES["codellama-13b"], config=SMALL)
    monkeypatch.setitem(bench.CASES, "codellama-13b", small)
    monkeypatch.setattr(bench, "QUICK_MESHES", ({"tensor": 4}, {"kv": 2}))
    assert bench.main(["--quick", "--json", "--output", str(tmp_path / "out.json")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert report["predicted_not_measured"] and [*report["meshes"]] == ["tensor 4", "kv 2"]
    assert report["goals"][0] == {
        "name": "all-reduces a layer, tensor 4",
        "measured": 2,
        "goal": 2,
        "at_most": True,
        "met": True,
    }
    step = report["meshes"]["tensor 4"]["steps"][0]
    assert step["paper_tokens_per_second"] == {"hydragen": 2000.0, "no_attention": 2300.0} and (
        step["batch"],
        step["prefix"],
    ) == (32, 2048)
    assert step["chips"]["H200"]["longest"] in bench.PARTS
    assert step["chips"]["H200"]["tokens_per_second"] == pytest.approx(
        32 / step["chips"]["H200"]["seconds"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--data", "2", "--tensor", "2", "--kv", "2"], ["--data", "2", "--pmap"]]
)
def test_the_program_to_copy_from_writes_the_same_on_every_mesh(flags):
    def run(*more):
        command = [
            sys.executable,
            "-P",
            str(ROOT / "scripts" / "gpu" / "run_multi_gpu.py"),
            "--rows",
            "2",
            "--tokens",
            "12",
            *more,
        ]
        done = subprocess.run(
            command,
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    lines = run(*flags).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"group {g}, row {r}" for g in range(2) for r in range(2)
    ]
    assert lines[:2] == run().splitlines()


def test_more_groups_than_devices_are_refused_before_anything_is_loaded(monkeypatch, capsys):
    count = len(jax.devices())
    for data, words in ((count + 1, f"needs {count + 1} devices, but there"), (0, "at least 1")):
        monkeypatch.setattr(sys, "argv", ["run_multi_gpu", "--data", str(data), "--pmap"])
        with pytest.raises(SystemExit):
            run_multi_gpu.main()
        assert words in capsys.readouterr().err
