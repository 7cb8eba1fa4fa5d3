"""A Llama in Hugging Face form as a GGUF file, with the same bfloat16 weights.

It has no tokenizer: tokens are numbers.
"""

import json
from pathlib import Path
from typing import Any

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write(folder: Path, file: Path) -> None:
    """Writes the checkpoint in a folder as a GGUF file."""
    import gguf
    import numpy as np
    from safetensors import deserialize

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for name, tensor in deserialize((folder / "model.safetensors").read_bytes()):
        bits = np.frombuffer(tensor["data"], np.uint16).reshape(tensor["shape"])
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                bits = _paired(bits, config[heads])
        if bits.ndim == 1:  # llama.cpp has these in float32
            writer.add_tensor(_renamed(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(_renamed(name), bits.view(np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _paired(bits: Any, heads: int) -> Any:
    """The rows of each head with those that are rotated together side by side, as llama.cpp has
    them."""
    rows, width = bits.shape
    halves = bits.reshape(heads, 2, rows // heads // 2, width)
    return halves.swapaxes(1, 2).reshape(rows, width)


def _renamed(name: str) -> str:
    name, _, kind = name.rpartition(".")
    layer = ""
    if name.startswith("model.layers."):
        _, _, number, name = name.split(".", 3)
        layer = f"blk.{number}."
    return f"{layer}{_NAMES[name]}.{kind}"
