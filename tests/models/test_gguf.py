"""Models from GGUF files: the numbers of their tensors against the package gguf, bit for bit, and
their logits against transformers."""

import functools
import json
import random
import re
import shutil
import struct
import sys

import gguf
import jax
import numpy as np
import pytest

from jaxshare import models
from jaxshare.models import CheckpointError, ConfigError
from jaxshare.models.gguf.file import read_header
from jaxshare.models.linear import dequantised
from jaxshare.quantised import QuantisedTensor, is_quantised
from jaxshare.serving.cli.main import main
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow
from tests.models import gguf_files
from tests.paths import FIXTURES

TINY = FIXTURES / "gguf" / "tiny-Q4_K_M.gguf"
PARITY = FIXTURES / "parity"
CASES = [
    "llama_gqa_llama3_tied_sharded",
    "qwen3_gqa_tied",
    "gpt_oss_mqa_yarn_mxfp4",
    "gemma3_mha",
    "phi3_mqa_longrope_short_sharded",
    "qwen2_moe_mha_shared_expert",
    "llama_mqa_linear_biases",
    "llama_gqa_partial",
    "llama_gqa_yarn_wide_heads",
    "mistral_mqa_wide_heads",
    "mixtral_gqa",
    "qwen2_mqa_tied",
    "qwen3_moe_gqa_sharded",
    "phi3_mha_window",
]


def causal(model, tokens) -> np.ndarray:
    run = jax.jit(functools.partial(model.module.apply, method="causal"))
    return np.asarray(run(model.params, tokens[None])[0])


@pytest.mark.parametrize("case", mostly_slow(CASES, 3))
def test_logits_of_each_architecture_are_those_of_transformers(case, tmp_path):
    file = gguf_files.write(PARITY / case, tmp_path / "model.gguf")
    model = models.load(file, dtype="float32")
    context = json.loads((PARITY / case / "case.json").read_text())["context"]
    with np.load(PARITY / case / "expected.npz") as expected:
        found = causal(model.for_context(context), expected["tokens"])
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-4)
    assert model.generation.stop_tokens == (1,)
    named = models.ModelConfig.from_json(PARITY / case).architecture
    # llama.cpp has one name for both, and their settings say how they differ.
    mine = "LlamaForCausalLM" if named == "MistralForCausalLM" else named
    assert model.config.architecture == mine


def test_gemma_2_is_that_of_its_own_files(tmp_path):
    folder = tmp_path / "gemma"
    shutil.copytree(PARITY / "gemma2_gqa_softcaps", folder)
    settings = json.loads((folder / "config.json").read_text())
    # The scale of scores follows from the size of a model in these files.
    settings["query_pre_attn_scalar"] = settings["head_dim"]
    (folder / "config.json").write_text(json.dumps(settings))
    file = gguf_files.write(folder, tmp_path / "model.gguf")
    tokens = np.arange(40) % 90
    found, expected = (causal(models.load(path, "float32"), tokens) for path in (file, folder))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_a_mixed_file_stays_packed_and_gives_the_logits_of_transformers():
    model = models.load(TINY, dtype="float32")
    with np.load(FIXTURES / "gguf" / "expected.npz") as expected:
        found = causal(model, expected["tokens"])
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-3)
    layer = model.params["params"]["layers_0"]
    for kernel, format, group in (
        (layer["attention"]["q"]["kernel"], "int4", 32),
        (layer["mlp"]["down"]["kernel"], "int8", 16),
        (model.params["params"]["embed"]["embedding"], "int8", 16),
    ):
        assert isinstance(kernel, QuantisedTensor)
        assert (kernel.format, kernel.group) == (format, group)
    assert models.load(TINY).dtype == "bfloat16"


def by_hand(file, name: str, heads: int = 0) -> np.ndarray:
    """The numbers of a tensor as the package gguf has them, with the rows of each head in the order
    of Hugging Face's files."""
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == name)
    value = gguf.dequantize(tensor.data, tensor.tensor_type)
    if heads:
        pairs = value.reshape(heads, -1, 2, value.shape[-1])
        value = pairs.swapaxes(1, 2).reshape(value.shape)
    return value


def test_numbers_of_a_mixed_file_are_those_of_gguf():
    params = models.load(TINY, dtype="float32").params["params"]
    places = {
        "token_embd.weight": (params["embed"]["embedding"], 0),
        "blk.1.attn_q.weight": (params["layers_1"]["attention"]["q"]["kernel"], 4),
        "blk.0.attn_k.weight": (params["layers_0"]["attention"]["k"]["kernel"], 2),
        "blk.0.attn_v.weight": (params["layers_0"]["attention"]["v"]["kernel"], 0),
        "blk.1.attn_v.weight": (params["layers_1"]["attention"]["v"]["kernel"], 0),
        "blk.0.ffn_down.weight": (params["layers_0"]["mlp"]["down"]["kernel"], 0),
        "blk.1.ffn_norm.weight": (params["layers_1"]["mlp_norm"]["scale"], 0),
    }
    for name, (value, heads) in places.items():
        on_host = jax.tree.map(np.asarray, value)
        found = on_host.dequantised() if is_quantised(on_host) else on_host
        np.testing.assert_array_equal(found, by_hand(TINY, name, heads), name)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_kinds_that_gguf_writes(kind, tmp_path):
    case = PARITY / "qwen3_moe_gqa_sharded"
    kinds = gguf.GGMLQuantizationType

    def chosen(name: str, value: np.ndarray) -> str:
        blocks = gguf.GGML_QUANT_SIZES[kinds[kind]][0]
        return kind if value.ndim > 1 and value.shape[-1] % blocks == 0 else "F32"

    file = gguf_files.write(case, tmp_path / "model.gguf", chosen)
    found = models.load(file, dtype="float32").params
    plain = models.load(case, dtype="float32").params

    def compare(keys, value, expected) -> None:
        expected = np.asarray(expected)
        form = kinds[chosen("", expected)]
        assert is_quantised(value) == (form not in (kinds.F32, kinds.F16, kinds.BF16))
        numbers = jax.tree.map(np.asarray, value)
        numbers = numbers.dequantised() if is_quantised(numbers) else numbers
        wanted = gguf.dequantize(gguf.quantize(expected, form), form)
        np.testing.assert_array_equal(numbers, wanted.reshape(expected.shape), str(keys))

    jax.tree.map_with_path(compare, found, plain, is_leaf=is_quantised)


@pytest.mark.parametrize("kind", mostly_slow(["F16", "F32", "BF16"]))
def test_the_dtype_of_a_plain_file_is_its_matrices_own(kind, tmp_path):
    file = gguf_files.write(
        PARITY / "qwen2_mqa_tied",
        tmp_path / "model.gguf",
        lambda name, value: kind if value.ndim > 1 else "F32",
    )
    dtypes = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    assert models.load(file).dtype == dtypes[kind]


def test_a_folder_with_settings_and_a_file(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models.EMBEDDED, folder)
    file = gguf_files.write(folder, folder / "model-F32.gguf")
    (folder / "model.safetensors").unlink()
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")  # what sees images
    found, expected = models.load(folder, "float32"), models.load("embedded", "float32")
    jax.tree.map(np.testing.assert_array_equal, found.params, expected.params)
    assert found.config == expected.config and found.generation == expected.generation
    assert found.tokenizer.get_vocab() == expected.tokenizer.get_vocab()
    assert models.outline(folder).config == found.config
    (folder / "config.json").write_text('{"model_type": "qwen3"}')  # as some repositories have it
    assert models.load(folder, "float32").config.num_layers == found.config.num_layers
    shutil.copy(file, folder / "other.gguf")
    with pytest.raises(CheckpointError, match=r"several GGUF files, model-F32.gguf, other.gguf"):
        models.load(folder)


def with_tokenizer(writer: gguf.GGUFWriter) -> None:
    """The tokens of the embedded model, whose text is split in another way."""
    found = json.loads((models.EMBEDDED / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {**found["model"]["vocab"]}
    special = {each["content"]: each["id"] for each in found["added_tokens"]}
    texts = sorted({**tokens, **special}.items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([text for text, _ in texts])
    writer.add_token_types([3 if text in special else 1 for text, _ in texts])
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]]
    )
    writer.add_chat_template((models.EMBEDDED / "chat_template.jinja").read_text())
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", 20)


@pytest.mark.slow
def test_the_command_line_answers_from_one_file(tmp_path, capsys):
    file = gguf_files.write(models.EMBEDDED, tmp_path / "model.gguf", more=with_tokenizer)
    model = models.load(file)
    assert model.generation.stop_tokens == (2, 0)  # the one that is named, and one by its text
    assert model.generation.sampler.temperature == 0.5 and model.generation.sampler.top_k == 20
    assert model.tokenizer.chat_template == models.load("embedded").tokenizer.chat_template
    arguments = ["generate", str(file), "--prompt", "What is 2 + 3?", "--max-new-tokens", "4"]
    assert main([*arguments, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip()


def test_devices_of_a_mesh_have_their_parts():
    mesh = make_mesh(tensor=2)
    model = models.load(TINY, dtype="float32", mesh=mesh)
    kernel = model.params["params"]["layers_0"]["mlp"]["gate"]["kernel"]
    part = kernel.codes.addressable_shards[0].data
    assert part.shape == (kernel.codes.shape[0] // 2, kernel.codes.shape[1])
    np.testing.assert_array_equal(
        jax.tree.map(np.asarray, kernel).dequantised(), by_hand(TINY, "blk.0.ffn_gate.weight")
    )


def changed(tmp_path, change):
    """A file like the tiny one, with a change of its bytes."""
    content = bytearray(TINY.read_bytes())
    file = tmp_path / "changed.gguf"
    file.write_bytes(change(content) or content)
    return file


def replaced(old: bytes, new: bytes):
    def change(content: bytearray) -> bytes:
        assert len(old) == len(new) and content.count(old) == 1
        return content.replace(old, new)

    return change


def of_kind(name: bytes, kind: int):
    """Gives a tensor another type."""

    def change(content: bytearray) -> None:
        at = content.index(len(name).to_bytes(8, "little") + name) + 8 + len(name)
        dims = int.from_bytes(content[at : at + 4], "little")
        content[at + 4 + 8 * dims : at + 8 + 8 * dims] = kind.to_bytes(4, "little")

    return change


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda content: content[:-1],
            CheckpointError,
            "truncated or corrupt.*fetch it again|ends within",
        ),
        (lambda content: content[:5000], CheckpointError, "truncated|not a complete GGUF"),
        (lambda content: content[:900], CheckpointError, "not a complete GGUF file"),
        (lambda content: content[:4], CheckpointError, "not a complete GGUF file"),
        (lambda content: b"safe" + content[4:], CheckpointError, "is no GGUF file"),
        (
            lambda content: b"version https://git-lfs.github.com/spec/v1\n",
            CheckpointError,
            "Git LFS pointer",
        ),
        (
            of_kind(b"blk.0.ffn_up.weight", 10),
            CheckpointError,
            "kind Q2_K, for example blk.0.ffn_up.weight; read are F32, F16, BF16, Q4_0",
        ),
        (of_kind(b"blk.0.ffn_up.weight", 999), CheckpointError, "999.*install a newer gguf"),
        (
            replaced(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"),
            CheckpointError,
            "blk.1.ffn_up.weight is missing; blk.1.ffn_xx.weight is unexpected",
        ),
        (
            replaced(b"llama.embedding_length", b"llama.embedding_lengtX"),
            ConfigError,
            "lacks llama.embedding_length",
        ),
        (
            replaced(
                b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0rwkv9",
            ),
            ConfigError,
            "architecture rwkv9; GGUF files are read of llama, qwen2",
        ),
        (
            replaced(b"llama.attention.head_count_kv", b"llama.attention.head_count_kx"),
            ConfigError,
            "unknown settings .*attention.head_count_kx",
        ),
    ],
)
def test_a_damaged_or_unknown_file_is_refused(change, error, message, tmp_path):
    file = changed(tmp_path, change)
    with pytest.raises(error, match=message) as raised:
        models.load(file)
    assert "changed.gguf" in str(raised.value)


def header(values: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0)) -> bytes:
    """A file by hand: the format is that of docs/gguf.md in ggml."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + values + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return text(b"a") + struct.pack("<IIQ", 9, kind, count) + content


def tensor(name: bytes, sizes: tuple[int, ...], place: int, kind: int = 0) -> bytes:
    axes = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + axes + struct.pack("<IQ", kind, place)


MOST = 2**64 - 1
DATA = bytes(4096)
"""What follows a header, so that most of them end long before their file."""


HOSTILE = [
    (header(counts=(0, MOST)), f"it says that it has {MOST} values"),
    (header(counts=(MOST, 0)), f"it says that it has {MOST} tensors"),
    (header(counts=(0, 1000)), "not a complete GGUF file"),
    (header(array(0, 2**40), counts=(0, 1)), f"an array of {2**40} values"),
    (header(array(0, 2**20), counts=(0, 1)), "it ends within its header"),
    (header(array(8, 2**20), counts=(0, 1)), "it ends within its header"),
    (header(array(9, 1, array(9, 1)), counts=(0, 1)), "a value of type 9"),
    (header(array(13, 1), counts=(0, 1)), "a value of type 13"),
    (header(struct.pack("<Q", MOST), counts=(0, 1)), "it ends within its header"),
    (header(text(b"\xff") + struct.pack("<IB", 0, 1), counts=(0, 1)), "not a complete GGUF"),
    (header(2 * (text(b"a") + struct.pack("<IB", 0, 1)), counts=(0, 2)), "Duplicate a"),
    (header(tensors=tensor(b"t", (), 0), counts=(1, 0)), "a tensor of 0 axes"),
    (header(tensors=tensor(b"t", (0, 4), 0), counts=(1, 0)), r"\[0, 4\]"),
    (header(tensors=tensor(b"t", (1,) * 5, 0), counts=(1, 0)), "a tensor of 5 axes"),
    (header(tensors=tensor(b"t", (2**32, 2**32), 0), counts=(1, 0)), "not a complete GGUF"),
    (header(tensors=tensor(b"t", (31, 2), 0, 8), counts=(1, 0)), "not a complete GGUF"),
    (header(tensors=tensor(b"t", (4,), 2**40), counts=(1, 0)), "not a complete GGUF"),
    (
        header(tensors=tensor(b"t", (4,), MOST - 31), counts=(1, 0)),
        "t begins within its header|overflow",
    ),
    (
        header(tensors=tensor(b"t", (64,), 0) + tensor(b"u", (64,), 192), counts=(2, 0)),
        "u begins within t",
    ),
    (
        header(tensors=tensor(b"t", (64,), 0) + tensor(b"t", (64,), 256), counts=(2, 0)),
        "duplicated tensor with name t",
    ),
]


@pytest.mark.parametrize(("content", "message"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_header_is_refused_by_name(content, message, tmp_path):
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content + DATA)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_header(file)
    assert "hostile.gguf" in str(raised.value)


def test_a_file_that_ends_anywhere_is_refused_by_name(tmp_path):
    whole = TINY.read_bytes()
    file = tmp_path / "short.gguf"
    for size in random.Random(0).sample(range(len(whole)), 60):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"short\.gguf"):
            read_header(file)


def test_bytes_that_are_changed_anywhere_in_a_header_are_refused_by_name_or_read(tmp_path):
    whole, rng = TINY.read_bytes(), random.Random(0)
    end = min(each.start for each in read_header(TINY).tensors.values())
    file = tmp_path / "changed.gguf"
    for _ in range(100):
        content = bytearray(whole)
        for at in rng.sample(range(4, end), 3):
            content[at] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        file.write_bytes(content)
        try:
            read_header(file)
        except CheckpointError as error:
            assert "changed.gguf" in str(error)


def test_scales_that_are_no_numbers_are_refused(tmp_path):
    place = read_header(TINY).tensors["blk.0.ffn_gate.weight"].start

    def change(content: bytearray) -> None:
        content[place : place + 2] = np.float16(np.nan).tobytes()

    file = changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_gate.weight has scales that are NaN"):
        models.load(file)
    models.load(file, check=False)


def test_parts_of_a_file_are_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a-00001-of-00002.gguf", "llama")
    writer.add_uint16("split.count", 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="one of 2 parts: merge them with llama-gguf-split"):
        models.load(tmp_path / "a-00001-of-00002.gguf")


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'jaxshare[gguf]'")):
        models.load(TINY)


def test_weights_are_the_numbers_that_products_see():
    kernel = models.load(TINY).params["params"]["layers_0"]["attention"]["o"]["kernel"]
    found = np.asarray(dequantised(kernel, "float32"))
    np.testing.assert_allclose(
        found, by_hand(TINY, "blk.0.attn_output.weight"), rtol=1e-5, atol=1e-6
    )
