"""scripts.bench.sampling: all sides draw the same tokens, and what it counts and refuses."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.decoding.truncation import truncation_bounds
from scripts.bench import sampling


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    output = tmp_path / "sampling.json"
    arguments = ["--quick", "--rows", "3", "--vocab", "500", "--output", str(output)]
    assert sampling.main(arguments) == 0
    report = json.loads(output.read_text())
    assert (
        report["loops_by_xla_alone"] == 0 and report["results"].keys() == sampling.SETTINGS.keys()
    )
    for found in report["results"].values():
        assert found["different_tokens"] == {sampling.AFTER: 0, sampling.ALONE: 0}
        assert all(len(times) == 5 for times in found["milliseconds"].values())
    assert "time to bisection" in capsys.readouterr().out


def test_the_bisection_finds_what_it_is_compared_with():
    logits = np.random.default_rng(1).normal(size=(4, 200)).astype(np.float32)
    arrays = (
        jnp.asarray([0, 3, 40, 0], jnp.int32),
        jnp.asarray([0.7, 1.0, 0.5, 1.0], jnp.float32),
        jnp.asarray([0.0, 0.0, 0.3, 0.1], jnp.float32),
    )
    before, now = (
        [np.asarray(each) for each in jax.jit(find)(logits, *arrays)]
        for find in (sampling._bisected, truncation_bounds)
    )
    kept = [(logits >= low) & (logits <= high) for low, high in (before, now)]
    np.testing.assert_array_equal(*kept)


@pytest.mark.parametrize("option", ["--rows", "--vocab"])
def test_sizes_are_checked(option, capsys):
    with pytest.raises(SystemExit) as raised:
        sampling.main([option, "0"])
    assert raised.value.code == 2 and f"{option} is 0" in capsys.readouterr().err
