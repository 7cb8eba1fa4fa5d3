"""scripts.bench.llama_cpp: its goals, what it refuses, and how a checkpoint becomes a GGUF file."""

import numpy as np
import pytest

from scripts.bench import llama_cpp
from scripts.bench.peers import llama_weights


def result(batch: int, ours: float, theirs: float, shared: float = 0.0) -> dict:
    part = {
        "tokens_per_second": {llama_cpp.OURS: ours, llama_cpp.THEIRS: theirs},
        "ratio": {"median": ours / theirs, "lowest": ours / theirs, "highest": ours / theirs},
    }
    found = {"batch": batch, "prefill": part, "decode": part}
    if shared:
        rates = {llama_cpp.SHARED: shared, llama_cpp.THEIRS_SHARED: theirs}
        found["shared"] = {"tokens_per_second": rates, "ratio": part["ratio"]}
    return found


def report(*results: dict, prompt: int = llama_cpp.GOAL_PROMPT) -> dict:
    settings = {"prompt": prompt, "step_bytes": 100}
    return {"settings": settings, "memory_bytes_per_second": 20_000.0, "results": results}


def test_goals():
    found = llama_cpp.goals(report(result(1, 150.0, 100.0), result(64, 900.0, 600.0, 1500.0)))
    measured = {goal.name: (goal.measured, goal.met) for goal in found}
    assert measured == {
        "decode tokens per second, batch 1: times llama.cpp": (1.5, True),
        "prefill tokens per second, 1 prompt: times llama.cpp": (1.5, True),
        "decode tokens per second, batch 64: times llama.cpp": (1.5, False),
        "decode, batch 64 of one prompt: times llama.cpp with own prompts": (2.5, True),
        "prefill tokens per second, 64 prompts: times llama.cpp": (1.5, False),
        "weights read at batch 1: part of the memory's rate": (0.75, False),
    }


def test_another_length_of_prompt_has_no_goals():
    assert llama_cpp.goals(report(result(1, 1.0, 1.0), prompt=100)) == []


def test_rotated_pairs_lie_side_by_side():
    """A head's rows a0 a1 b0 b1, of which a and b are rotated together."""
    rows = np.asarray([["a0"], ["a1"], ["b0"], ["b1"], ["c0"], ["c1"], ["d0"], ["d1"]])
    paired = llama_weights._paired(rows, heads=2)[:, 0].tolist()
    assert paired == ["a0", "b0", "a1", "b1", "c0", "d0", "c1", "d1"]


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.11.self_attn.q_proj.weight", "blk.11.attn_q.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    ],
)
def test_names(name, renamed):
    assert llama_weights._renamed(name) == renamed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--steps", "1"], "--steps 1"),
        (["--prompt", "5000"], "--prompt is 5000"),
        (["--batches", "1,1"], "--batches is '1,1'"),
        (["--llama-python", "/nowhere/python"], "no such program"),
    ],
)
def test_what_it_refuses(arguments, why, capsys):
    with pytest.raises(SystemExit) as raised:
        llama_cpp.main(arguments)
    assert raised.value.code == 2 and why in capsys.readouterr().err


def test_a_python_without_llama_cpp_is_named(capsys):
    import sys

    assert llama_cpp.main(["--quick", "--llama-python", sys.executable]) == 1
    assert "No module named" in capsys.readouterr().err
