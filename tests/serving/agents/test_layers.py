"""Layered mappings against dictionaries that are copied."""

import random

import pytest

from jaxshare.serving.agents.layers import Layers


@pytest.mark.parametrize("seed", range(5))
def test_every_version_is_the_dictionary_that_it_stands_for(seed):
    rng = random.Random(seed)
    versions = [(Layers(), {})]
    for _ in range(300):
        layers, expected = rng.choice(versions[-20:])
        changed = {rng.randrange(60): rng.random() for _ in range(rng.choice([0, 1, 1, 2, 9]))}
        versions.append((layers | changed, {**expected, **changed}))
    for layers, expected in versions:
        assert dict(layers) == expected and len(layers) == len(expected)
        assert all(layers.get(key, "none") == expected.get(key, "none") for key in range(60))
        with pytest.raises(KeyError):
            layers[99]


def test_versions_share_what_they_have():
    layers, kept = Layers(), []
    for key in range(4096):
        layers = layers | {key: key}
        kept.append(layers)
    held = {id(layer): len(layer) for each in kept for layer in each._layers}
    assert sum(held.values()) <= 4096 * 13 and max(len(each._layers) for each in kept) <= 13
    assert dict(layers) == {key: key for key in range(4096)}
