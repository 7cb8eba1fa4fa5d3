"""A Llama in Hugging Face form as a GGUF file, with the same weights, of bfloat16 or float32.

    python -m scripts.bench.peers.llama_weights FOLDER FILE

It has the tokenizer of the folder, if there is one (BPE of bytes); else tokens are numbers.
"""

import json
import sys
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


def write(folder: Path, file: Path, kind: str = "") -> None:
    """Writes the checkpoint in a folder as a GGUF file.

    Args:
      folder: has the checkpoint.
      file: is written.
      kind: that all matrices are quantised to, by gguf's name; "" for none.
    """
    import gguf
    import numpy as np

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
    tensors = _stored(folder / "model.safetensors")
    is_float32 = next(iter(tensors.values())).dtype == np.float32
    kinds = gguf.LlamaFileType
    types = gguf.GGMLQuantizationType
    whole = kinds.ALL_F32 if is_float32 else kinds.MOSTLY_BF16
    writer.add_file_type(kinds[f"MOSTLY_{kind}"] if kind else whole)
    _add_tokenizer(writer, folder / "tokenizer.json", config["vocab_size"])
    for name, bits in tensors.items():
        for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if part in name:
                bits = _paired(bits, config[heads])
        exact = bits if is_float32 else (bits.astype(np.uint32) << 16).view(np.float32)
        if kind and bits.ndim > 1:
            packed = gguf.quants.quantize(exact, types[kind])
            writer.add_tensor(_renamed(name), packed, raw_dtype=types[kind])
        elif is_float32 or bits.ndim == 1:  # llama.cpp has vectors in float32
            writer.add_tensor(_renamed(name), exact)
        else:
            writer.add_tensor(_renamed(name), bits.view(np.uint8), raw_dtype=types.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _stored(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, those in bfloat16 as their bits; read when they are used."""
    import numpy as np

    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
    header.pop("__metadata__", None)
    return {
        name: np.memmap(
            file,
            np.float32 if each["dtype"] == "F32" else np.uint16,
            mode="r",
            offset=8 + size + each["data_offsets"][0],
            shape=tuple(each["shape"]),
        )
        for name, each in header.items()
    }


def _add_tokenizer(writer: Any, file: Path, vocab_size: int) -> None:
    """Adds the tokens of a tokenizer of the tokenizers library, and others up to the vocabulary."""
    import gguf

    if not file.exists():
        return writer.add_tokenizer_model("no_vocab")
    found = json.loads(file.read_text(encoding="utf-8"))
    vocab, merges = found["model"]["vocab"], found["model"]["merges"]
    special = {each["id"]: each["content"] for each in found["added_tokens"]}
    texts = {**{number: text for text, number in vocab.items()}, **special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([texts.get(n, f"<unused{n}>") for n in range(vocab_size)])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if n in special else normal for n in range(vocab_size)])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_eos_token_id(min(special))


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


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
