"""Rollouts on a local Ray cluster are those of one engine, with the same weights, whatever dies."""

import os
import signal

import jax
import numpy as np
import pytest

from jaxshare import Sampler, models
from jaxshare.models import EMBEDDED
from jaxshare.models.new_params import ParamsError
from jaxshare.serving.engine import Engine
from jaxshare.serving.rollouts import RayRollouts, rollout
from tests.processes import below, ray_cluster

QUESTIONS = ["1. 47 + 38", "1. 47 + 39\n2. 5 + 6", "1. 47 + 38\n2. 12 - 7\n3. 9 + 9"]
SAMPLER = Sampler(0.8, top_p=0.9)


@pytest.fixture(scope="module")
def model():
    return models.load(EMBEDDED, dtype="float32")


@pytest.fixture(scope="module")
def other(model):
    """Other weights."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda array: array + 0.02 * rng.standard_normal(array.shape, np.float32),
        jax.device_get(model.params),
    )


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with ray_cluster(tmp_path_factory.mktemp("compiled")) as made:
        yield made


@pytest.fixture(scope="module")
def replicas(cluster):
    with RayRollouts(EMBEDDED, address=cluster[0], replicas=2, dtype="float32", max_rows=8) as made:
        yield made


def sampled(where, seed: int):
    """Samples on an engine, or on replicas."""
    how = {"n": 3, "sampler": SAMPLER, "max_new_tokens": 16, "seed": seed, "length": 96}
    if isinstance(where, RayRollouts):
        return where.rollout(QUESTIONS, **how)
    return rollout(where, QUESTIONS, **how)


def check_same(batch, expected) -> None:
    assert [each.tokens for each in batch.completions] == [
        each.tokens for each in expected.completions
    ]
    for name in ("tokens", "prompt_mask", "completion_mask", "versions", "prompts", "indices"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    for name in ("logprobs", "processed_logprobs"):
        np.testing.assert_allclose(getattr(batch, name), getattr(expected, name), atol=2e-4)


@pytest.mark.slow
def test_samples_are_those_of_one_engine_before_and_after_an_update(replicas, model, other):
    """Weights that are refused leave all as it was."""
    with Engine(model, max_rows=8) as engine:
        check_same(sampled(replicas, 1), sampled(engine, 1))
        broken = jax.tree.map(np.copy, other)
        jax.tree.leaves(broken)[0].reshape(-1)[0] = np.nan
        with pytest.raises(ParamsError, match="NaN"):
            replicas.update_params(broken)
        check_same(sampled(replicas, 2), sampled(engine, 2))
        with pytest.raises(ValueError, match="version is 0"):
            replicas.update_params(other, version=0)
        assert replicas.update_params(other) == engine.update_params(other) == 1
        check_same(sampled(replicas, 3), sampled(engine, 3))
        assert {*sampled(replicas, 3).versions.reshape(-1)} == {-1, 1}


@pytest.mark.slow
def test_replicas_in_place_of_lost_ones_have_the_present_weights(replicas, cluster, model, other):
    version = replicas.update_params(other)
    processes = [p for p, name in below(cluster[1]).items() if "ReplicaActor" in name]
    assert len(processes) == 2
    for process in processes:
        os.kill(process, signal.SIGKILL)
    with Engine(model, max_rows=8) as engine:
        engine.update_params(other, version=version)
        check_same(sampled(replicas, 4), sampled(engine, 4))


@pytest.mark.slow
def test_prompts_that_do_not_fit_are_refused_before_anything_is_sampled(replicas):
    with pytest.raises(ValueError, match="prompt 1"):
        replicas.rollout(["1. 2 + 2", "1 " * 5000], n=2, max_new_tokens=8)
    assert sampled(replicas, 5).texts == sampled(replicas, 5).texts


def test_options_are_checked_before_a_cluster_is_asked():
    with pytest.raises(ValueError, match="replicas is 0"):
        RayRollouts(EMBEDDED, replicas=0)
    with pytest.raises(FileNotFoundError):
        RayRollouts("/no/such/folder")
