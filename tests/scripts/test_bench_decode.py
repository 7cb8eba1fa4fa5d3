"""The families of the benchmark of decoding: their models load, and have the sizes that goals are for."""

import dataclasses
import math

import pytest

from jaxshare.models import ModelConfig, load
from jaxshare.models.tensor_names import expected_tensors
from scripts.bench import decode
from scripts.bench.parts.decode.families import FAMILIES

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def count(config: ModelConfig, part: str = "") -> int:
    tensors = expected_tensors(config).values()
    return sum(math.prod(t.shape) for t in tensors if not part or part in t.path)


def test_sizes():
    configs = {name: ModelConfig.from_json(family.config) for name, family in FAMILIES.items()}
    assert count(configs["llama"]) == count(configs["mistral"]) == count(configs["phi"])
    assert round(count(configs["moe"], "moe") / 1e6) == 63  # "8 experts of 64 M in all"
    assert configs["mla"].mla is not None and configs["mla"].head_dim == 576
    assert not any(config.windows for config in configs.values())


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama"])
def test_what_is_written_is_read(name, tmp_path):
    family = FAMILIES[name]
    small = SMALL | ({"num_key_value_heads": 4} if name == "mla" else {})
    family = dataclasses.replace(family, config={**family.config, **small})
    parameters = family.write(tmp_path, seed=0)
    model = load(tmp_path)
    assert parameters == count(model.config) and model.config.num_layers == 2


def test_goals_are_for_the_prompt_of_the_family():
    python = "--torch-python=/bin/true"
    options = decode.parse(["--family", "mla", "--quick", python])
    assert (options.batches, options.prompt) == ((1, 8), 4096)
    options = decode.parse(["--family", "moe", "--prompt", "64", "--batches", "1", python])
    assert (options.batches, options.prompt) == ((1,), 64)
    with pytest.raises(SystemExit):
        decode.parse(["--family", "gpt2", python])
    with pytest.raises(SystemExit):
        decode.parse(["--family", "mla", "--prompt", "8192", python])
