"""Writes checkpoints in Hugging Face form as GGUF files, with the names of the package gguf and the
metadata, the order of rows and the norms that convert_hf_to_gguf.py of llama.cpp gives them."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors import safe_open

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
Kind = Callable[[str, np.ndarray], str]
"""(name of a tensor, its numbers) -> the kind of blocks that it is written in."""


def plain(name: str, value: np.ndarray) -> str:
    return "F32"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    return found


def write(
    folder: Path,
    file: Path,
    kind: Kind = plain,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes the checkpoint of a folder.

    Args:
      folder: with config.json and safetensors.
      file: to write.
      kind: of the blocks of each tensor.
      more: adds metadata, for example a tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    name = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(file, name)
    add_metadata(writer, config)
    more(writer)
    for each, value in renamed(config, name, tensors_of(folder)).items():
        if isinstance(value, Blocks):
            writer.add_tensor(each, value.bytes, raw_dtype=value.kind)
            continue
        value = value.astype(np.float32)
        found = gguf.GGMLQuantizationType[kind(each, value)]
        writer.add_tensor(each, gguf.quantize(value, found), raw_dtype=found)
    for each, value in rope_tensors(config).items():
        writer.add_tensor(each, np.asarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Blocks:
    def __init__(self, content: np.ndarray, kind: gguf.GGMLQuantizationType):
        self.bytes, self.kind = content, kind


def head_dim_of(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in given:
        given = given["full_attention"]
    theta = given.get("rope_theta", config.get("rope_theta", 10_000.0))
    return {"rope_type": given.get("type", "default"), **given, "rope_theta": theta}


def add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    head_dim, rope, name = head_dim_of(config), rope_of(config), writer.arch
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if name in ("llama", "phi3"):
        writer.add_rope_dimension_count(int(head_dim * partial))
        writer.add_vocab_size(config["vocab_size"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        original = original_of(config)
        scale = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(factor)
    if name == "phi3":
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if name in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gemma3":
        kinds = config.get("layer_types")
        each = kinds.index("full_attention") + 1 if kinds else config["sliding_window_pattern"]
        writer.add_sliding_window_pattern(each)
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if name != "llama":
            size = config.get("moe_intermediate_size", config["intermediate_size"])
            writer.add_expert_feed_forward_length(size)
        if shared := config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(shared)
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)


def original_of(config: dict[str, Any]) -> int:
    own = config.get("original_max_position_embeddings")
    return own or rope_of(config)["original_max_position_embeddings"]


def rope_tensors(config: dict[str, Any]) -> dict[str, list[float]]:
    rope, dim = rope_of(config), head_dim_of(config)
    if rope["rope_type"] == "longrope":
        return {f"rope_factors_{n}.weight": rope[f"{n}_factor"] for n in ("short", "long")}
    if rope["rope_type"] != "llama3":
        return {}
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    original, found = rope["original_max_position_embeddings"], []
    for pair in range(dim // 2):
        length = 2 * math.pi * rope["rope_theta"] ** (2 * pair / dim)
        if length < original / high:
            found.append(1.0)
        elif length > original / low:
            found.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return {"rope_freqs.weight": found}


def renamed(
    config: dict[str, Any], architecture: str, tensors: dict[str, np.ndarray]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, value in with_experts_stacked(config, tensors).items():
        module, _, suffix = name.rpartition(".")
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            value = value.astype(np.float32) + 1
        if architecture == "llama" and module.endswith(("q_proj", "k_proj")):
            heads = "num_attention_heads" if module.endswith("q_proj") else "num_key_value_heads"
            value = paired(value, config[heads], config)
        if suffix == "sinks":
            module, suffix = name, "weight"
        place = names.get_name(module)
        assert place is not None, name
        found[f"{place}.{suffix}"] = value
    return found


def paired(value: np.ndarray, heads: int, config: dict[str, Any]) -> np.ndarray:
    """Rows of a head that are rotated together side by side."""
    rope = rope_of(config)
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    each = value.reshape(heads, -1, *value.shape[1:])
    rotated = int(each.shape[1] * part)
    first = each[:, :rotated].reshape(heads, 2, rotated // 2, *value.shape[1:])
    first = first.swapaxes(1, 2).reshape(heads, rotated, *value.shape[1:])
    return np.concatenate([first, each[:, rotated:]], axis=1).reshape(value.shape)


def with_experts_stacked(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    if config["model_type"] == "gpt_oss":
        return of_gpt_oss(tensors)
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        before, mark, after = name.partition(".experts.")
        if not mark:
            # A row that is a gate is stored without its first axis.
            found[name] = value[0] if name.endswith("shared_expert_gate.weight") else value
        elif after.startswith("0."):
            several = [
                tensors[f"{before}.experts.{index}.{after[2:]}"]
                for index in range(config.get("num_experts") or config["num_local_experts"])
            ]
            found[f"{before}.experts.{after[2:]}"] = np.stack(several)
    return found


def of_gpt_oss(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tensors.items():
        before, mark, after = name.partition(".experts.")
        if not mark:
            found[name] = value
        elif after.endswith("_bias"):
            for part, rows in parts_of(after, value).items():
                found[f"{before}.experts.{part}.bias"] = rows
        elif after.endswith("_blocks"):
            scales = tensors[name.removesuffix("_blocks") + "_scales"]
            # Numbers 2 i and 2 i + 1 share a byte; in a file it is i and i + 16.
            numbers = np.stack([value & 15, value >> 4], axis=-1).reshape(*scales.shape, 32)
            packed = numbers[..., :16] | numbers[..., 16:] << 4
            blocks = np.concatenate([scales[..., None], packed], axis=-1)
            for part, rows in parts_of(after, blocks).items():
                content = np.ascontiguousarray(rows.reshape(*rows.shape[:2], -1))
                place = Blocks(content, gguf.GGMLQuantizationType.MXFP4)
                found[f"{before}.experts.{part}.weight"] = place
    return found


def parts_of(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    if name.startswith("down"):
        return {"down_proj": value}
    return {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]}
