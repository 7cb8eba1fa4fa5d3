"""scripts.bench.approximate: its goals, what it refuses, the rows it scores, and one small run."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.models import EMBEDDED, load
from scripts.bench import approximate


def test_goals():
    results = {approximate.PERPLEXITY: {"change": {"int8": 0.5, "fp8": 0.0019}}}
    (goal,) = approximate.goals({"results": results})
    assert goal.met and goal.measured == pytest.approx(0.19)
    results[approximate.PERPLEXITY]["change"]["fp8"] = 0.0021
    assert not approximate.goals({"results": results})[0].met
    assert approximate.goals({"results": {}}) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--parts", "perplexity"], "takes --model and --text"),
        (["--parts", "other"], "--parts has 'other'"),
        (["--model", "embedded", "--text", "/nowhere/text"], "no such file"),
        (["--prompts", "5000"], "--prompts has 5000"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--tokens", "100"], "at least 1, 1, 1 and 512"),
    ],
)
def test_what_it_refuses(arguments, why, capsys):
    with pytest.raises(SystemExit) as raised:
        approximate.main(arguments)
    assert raised.value.code == 2 and why in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_run(monkeypatch, tmp_path):
    small = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    small |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512}
    monkeypatch.setattr(approximate, "MODEL", {**approximate.MODEL, **small})
    monkeypatch.setattr(approximate, "LENGTH", 32)
    text, out = tmp_path / "text.txt", tmp_path / "found.json"
    # Of the numbers, which the model reads as it reads sums, the last 5% is scored.
    text.write_text(" ".join(map(str, range(2000))), encoding="utf-8")
    arguments = ["--model", str(EMBEDDED), "--text", str(text), "--tokens", "96", "--rows", "2"]
    arguments += ["--prompts", "8,16", "--rounds", "1", "--steps", "1", "--output", str(out)]
    assert approximate.main(arguments) == 0
    found = json.loads(out.read_text(encoding="utf-8"))["results"]
    for r in found[approximate.SPEED]:
        assert np.isfinite([*r["tokens_per_second"].values()]).all()
        assert r["memory"]["fp8"]["cache_bytes"] < 0.6 * r["memory"]["exact"]["cache_bytes"]
    # The perplexity of the exact form, computed without a cache.
    model = load("embedded")
    rows = approximate.rows_of(model, text.read_text(encoding="utf-8"), 96)
    total = count = 0.0
    for row in rows:
        logits = model.module.apply(model.params, jnp.asarray([row]), method="causal")[0]
        chances = jax.nn.log_softmax(logits.astype(jnp.float32))
        total -= float(chances[jnp.arange(len(row) - 1), jnp.asarray(row[1:])].sum())
        count += len(row) - 1
    perplexity = found[approximate.PERPLEXITY]
    assert perplexity["tokens"] == count and len(rows) > 1
    assert perplexity["perplexity"]["exact"] == pytest.approx(math.exp(total / count), rel=1e-3)
