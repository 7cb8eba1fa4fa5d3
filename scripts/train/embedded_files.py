"""The embedded model's files in Hugging Face form, written after training."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from jaxshare.models import EMBEDDED
from jaxshare.models.config import ModelConfig
from jaxshare.models.orbax_io import write_tensors
from jaxshare.models.tensor_names import tensor_name
from jaxshare.rope import Rope
from scripts.train.embedded_data import CHAT_TEMPLATE, END, PAD

THETA = 10000.0


def architecture(
    vocab_size: int, layers: int = 4, hidden: int = 144, positions: int = 2048
) -> ModelConfig:
    """The shape of the embedded model, about one million parameters, or one of other depth, width
    and context with the same proportions."""
    kv_heads = max(1, round(hidden / 72))
    return ModelConfig(
        architecture="qwen3",
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=28 * hidden // 9 // 32 * 32,
        num_layers=layers,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=32,
        rope=Rope.default(32, THETA),
        norm_eps=1e-6,
        max_positions=positions,
        tie_embeddings=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=True,
    )


def export(params: dict, config: ModelConfig, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the float32 weights and all files beside them that transformers needs; replaces the
    contents of `folder`."""
    save_weights(params, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "workers.json").write_text((EMBEDDED / "workers.json").read_text())
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "dtype": "float32",
            "eos_token_id": end,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "hidden_size": config.hidden_size,
            "initializer_range": 0.02,
            "intermediate_size": config.intermediate_size,
            "layer_types": ["full_attention"] * config.num_layers,
            "max_position_embeddings": config.max_positions,
            "max_window_layers": config.num_layers,
            "model_type": "qwen3",
            "num_attention_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "num_key_value_heads": config.num_kv_heads,
            "pad_token_id": pad,
            "rms_norm_eps": config.norm_eps,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "vocab_size": config.vocab_size,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": [end, pad], "pad_token_id": pad},
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "clean_up_tokenization_spaces": False,
            "eos_token": END,
            "model_max_length": config.max_positions,
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def export_like(
    params: dict, source: Path, dtype: str, workers: dict, context: int | None, folder: Path
) -> None:
    """Writes weights that have been trained further, with the files of the model that they come
    from.

    Args:
      params: {"params": ...}.
      source: the folder of that model; dtype: of the weights, "float32" or "bfloat16".
      workers: what workers.json is to say.
      context: the most positions that the model is to take; None leaves that model's.
      folder: the target; its contents are replaced.
    """
    save_weights(params, folder, dtype)
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(
            (".safetensors", ".safetensors.index.json", ".bin", ".md")
        ):
            shutil.copyfile(path, folder / path.name)
    settings = json.loads((source / "config.json").read_text())
    settings = {name: value for name, value in settings.items() if name != "torch_dtype"} | {
        "dtype": dtype
    }
    _write_json(
        folder / "config.json", settings | ({"max_position_embeddings": context} if context else {})
    )
    _write_json(folder / "workers.json", workers)
    if context and (folder / "tokenizer_config.json").exists():
        of_tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
        _write_json(folder / "tokenizer_config.json", of_tokenizer | {"model_max_length": context})


def save_weights(params: dict, folder: Path, dtype: str = "float32") -> None:
    """Writes model.safetensors, with the names that transformers has."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        tensor_name(tuple(key.key for key in path)): np.ascontiguousarray(leaf, jnp.dtype(dtype))
        for path, leaf in jax.tree.leaves_with_path(params["params"])
    }
    write_tensors(tensors, folder / "model.safetensors")


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
