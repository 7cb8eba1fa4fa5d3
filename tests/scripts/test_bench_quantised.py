"""scripts.bench.quantised: its goals, what it refuses, and one small run."""

import json

import jax
import numpy as np
import pytest

from jaxshare.models import load
from jaxshare.quantised import is_quantised
from scripts.bench import quantised
from scripts.bench.lib import write_checkpoint


def result(batch: int, **sides: float) -> dict:
    """Results of sides that have so many tokens per second, as many times bf16's, and llama.cpp's."""
    to_bf16 = {quantised.BYTES: {"median": sides["int8"]}, quantised.HALVES: {"median": 3.0}}
    theirs = {"llama.cpp Q8_0": {"median": sides["theirs"]}} if "theirs" in sides else {}
    return {"batch": batch, "to_bf16": to_bf16, "to_llama_cpp": theirs}


def test_goals():
    results = [result(1, int8=1.4, theirs=0.95), result(8, int8=0.1), result(64, int8=0.95)]
    found = quantised.goals({"results": {"125M": results}})
    assert {goal.name: goal.met for goal in found} == {
        "125M, batch 1, int8, groups of 128: times bf16": False,
        "125M, batch 1, int4, groups of 64: times bf16": True,
        "125M, batch 1, int8, groups of 128: times llama.cpp Q8_0": True,
        "125M, batch 64, int8, groups of 128: times bf16": True,
        "125M, batch 64, int4, groups of 64: times bf16": True,
    }


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--prompt", "5000"], "--prompt is 5000"),
        (["--batches", "1,1"], "--batches is '1,1'"),
        (["--models", "7B"], "--models has '7B'"),
        (["--llama-python", "/nowhere/python"], "no such program"),
    ],
)
def test_what_it_refuses(arguments, why, capsys):
    with pytest.raises(SystemExit) as raised:
        quantised.main(arguments)
    assert raised.value.code == 2 and why in capsys.readouterr().err


SMALL = {
    **quantised.MODEL,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}


def test_all_matrices_of_a_model_are_quantised(tmp_path):
    write_checkpoint(tmp_path, SMALL, 0)
    plain = load(tmp_path)
    found = quantised.quantised_model(plain, "int4", 64).params
    packed = [e for e in jax.tree.leaves(found, is_leaf=is_quantised) if is_quantised(e)]
    matrices = [e for e in jax.tree.leaves(plain.params) if e.ndim > 1]
    assert [e.shape for e in packed] == [e.shape for e in matrices] and len(packed) > 3
    assert {(e.format, e.group) for e in packed} == {("int4", 64)}


@pytest.mark.slow
def test_a_small_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quantised, "MODELS", {"125M": SMALL})
    monkeypatch.setattr(quantised, "LLAMA_PYTHON", "nowhere")
    out = tmp_path / "found.json"
    arguments = ["--models", "125M", "--batches", "1,3", "--rounds", "1", "--steps", "1"]
    assert quantised.main([*arguments, "--prompt", "8", "--output", str(out)]) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    sizes = found["settings"]["models"]["125M"]["bytes"]
    assert sizes[quantised.HALVES] < 0.3 * sizes[quantised.PLAIN]
    for each in found["results"]["125M"]:
        assert np.isfinite([*each["tokens_per_second"].values()]).all()
    assert "batch 1, int8, groups of 128" in capsys.readouterr().out
