"""Models that are quantised here: what is written, what it costs, and what is refused."""

import json
import math
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxshare import KVCache, Layout
from jaxshare.models import EMBEDDED, load
from jaxshare.models.config import ModelConfig
from jaxshare.models.layers import Decoder
from jaxshare.models.quantisation.calibration import as_params, run_layer, scale_inputs
from jaxshare.models.quantisation.making import Making
from jaxshare.models.quantisation.rounding import Rounding, rounded
from jaxshare.models.safetensors_io import nested
from jaxshare.models.tensor_names import expected_tensors
from jaxshare.quantised import QuantisedTensor, is_quantised, quantised
from jaxshare.serving.cli import main
from tests.helpers import mostly_slow

TINY = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    dtype="float32",
    head_dim=16,
    hidden_size=64,
    intermediate_size=96,
    max_position_embeddings=256,
    num_attention_heads=4,
    num_hidden_layers=2,
    num_key_value_heads=2,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    vocab_size=402,
)
LOUD = [3, 17, 40]
"""Channels of the states that are far larger than the others."""


def tiny(folder, **changes):
    """A model with random parameters, some channels of whose normed states are large."""
    settings = {**TINY, **changes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(EMBEDDED / name, folder / name)
    rng, tensors = np.random.default_rng(0), {}
    for tensor in expected_tensors(ModelConfig.from_json(settings)).values():
        for part in tensor.parts:
            value = rng.normal(size=part.shape) / math.sqrt(part.shape[-1])
            if part.name.endswith("norm.weight"):
                value = np.ones(part.shape)
            if part.name.endswith("layernorm.weight"):
                value[[channel for channel in LOUD if channel < value.size]] = 30
            tensors[part.name] = value.astype(jnp.dtype(settings["dtype"]))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Of sums, which the tokenizer has few tokens for."""
    file = tmp_path_factory.mktemp("texts") / "sums.txt"
    sums = [f"{a} + {b} = {a + b}\n" for a, b in np.random.default_rng(1).integers(0, 99, (400, 2))]
    file.write_text("".join(sums))
    return str(file)


def load_file(path):
    """The tensors of a file, by the description of its form; the library reads no FP8 into NumPy."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    kinds = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F32": "f4", "I32": "i4", "I64": "i8"}
    return {
        name: np.frombuffer(
            content[end:][slice(*found["data_offsets"])], kinds[found["dtype"]]
        ).reshape(found["shape"])
        for name, found in json.loads(content[8:end]).items()
        if name != "__metadata__"
    }


def convert(capsys, *arguments):
    """Runs the command; returns its summary."""
    code = main.main(["convert", *map(str, arguments), "--json"])
    found = capsys.readouterr()
    assert code == 0, found.err
    return json.loads(found.out)


def refused(capsys, *arguments):
    """Runs the command, which fails; returns what it says."""
    assert main.main(["convert", *map(str, arguments)]) == 1
    return capsys.readouterr().err


def matrices(params):
    leaves = jax.tree.leaves_with_path(params["params"], is_leaf=is_quantised)
    return {".".join(key.key for key in keys): leaf for keys, leaf in leaves}


def unpacked(tensors, name, bits):
    """The numbers of a matrix in the form of compressed-tensors, by its description."""
    if bits == 0:
        codes, zeros = tensors[f"{name}.weight"].astype(np.float32), 0.0
    else:
        rows, inputs = tensors[f"{name}.weight_shape"]
        words, in_word = tensors[f"{name}.weight_packed"].astype(np.int64), 32 // bits
        mask, middle = (1 << bits) - 1, 1 << (bits - 1)
        codes = np.zeros((rows, inputs), np.float32)
        for i in range(inputs):
            codes[:, i] = ((words[:, i // in_word] >> (bits * (i % in_word))) & mask) - middle
        zeros = np.zeros(tensors[f"{name}.weight_scale"].shape)
        if f"{name}.weight_zero_point" in tensors:
            packed = tensors[f"{name}.weight_zero_point"].astype(np.int64)
            for o in range(rows):
                zeros[o] = ((packed[o // in_word] >> (bits * (o % in_word))) & mask) - middle
        zeros = np.repeat(zeros, inputs // zeros.shape[1], axis=1)
    scales = tensors[f"{name}.weight_scale"].astype(np.float32)
    scales = np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)
    return ((codes - zeros) * scales).astype(np.float32)


@pytest.mark.parametrize(
    ("format", "more", "bits"),
    mostly_slow(
        [
            ("int8", [], 8),
            ("int4", [], 4),
            ("fp8", [], 0),
            ("int4", ["--zeros", "--group", "32"], 4),
        ],
        several=True,
    ),
)
def test_both_forms_have_the_numbers_that_the_files_describe(
    source, tmp_path, capsys, format, more, bits
):
    written = {}
    for form in ("huggingface", "orbax"):
        how = [*more, "--form", form, "--embeddings", "plain"]
        summary = convert(capsys, source, tmp_path / form, "--quantize", format, *how)
        assert summary["form"] == form and summary["matrices"] == 14 and summary["plain"] == []
        written[form] = matrices(load(tmp_path / form).params)
    tensors = load_file(tmp_path / "huggingface" / "model.safetensors")
    names = {"q": "self_attn.q_proj", "o": "self_attn.o_proj", "down": "mlp.down_proj"}
    plain = load_file(source / "model.safetensors")
    for name, value in written["huggingface"].items():
        same = jax.tree.map(np.array_equal, value, written["orbax"][name])
        assert all(jax.tree.leaves(same)), name
        *_, layer, _, module, leaf = ("", "", *name.split("."))
        if leaf == "kernel" and module in names:
            assert isinstance(value, QuantisedTensor) and value.format == format
            stored = f"model.layers.{layer[-1]}.{names[module]}"
            found = np.asarray(value.dequantised())
            np.testing.assert_array_equal(found, unpacked(tensors, stored, bits))
            whole = plain[f"{stored}.weight"]
            steps = {"int8": 60, "int4": 2, "fp8": 8}[format]  # a scale may clip
            assert abs(found - whole).max() < abs(whole).max() / steps
    assert not is_quantised(written["orbax"]["embed.embedding"])


def test_embeddings_and_head_are_int8_in_orbax_form(source, tmp_path, capsys):
    summary = convert(capsys, source, tmp_path / "new", "--quantize", "int4", "--form", "orbax")
    assert summary["embeddings"] == "int8" and summary["matrices"] == 16
    found = matrices(load(tmp_path / "new").params)
    assert found["embed.embedding"].format == found["head.kernel"].format == "int8"
    assert not is_quantised(found["norm.scale"])


def test_a_model_in_orbax_form_is_quantised_as_the_one_it_was_made_from(source, tmp_path, capsys):
    convert(capsys, source, tmp_path / "plain")
    for name, folder in (("one", source), ("other", tmp_path / "plain")):
        convert(capsys, folder, tmp_path / name, "--quantize", "int8")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_nearest_codes_by_hand():
    value = np.asarray([[1.0, -2.0] + [0.0] * 13 + [7.0]], np.float32)
    found = rounded(value, Rounding.of("int4", 16), searched=False)
    np.testing.assert_array_equal(found.dequantised(), value)
    low = np.linspace(3.1, 18.1, 16, dtype=np.float32)[None]  # zeros reach from 0 on
    found = rounded(low, Rounding.of("int4", 16, zeros=True), searched=False)
    scale = 18.1 / 15
    np.testing.assert_allclose(found.dequantised(), np.rint(low / scale) * scale, rtol=1e-6)
    assert found.zeros is not None and found.zeros.tolist() == [[0]]
    halves = rounded(value.astype(ml_dtypes.bfloat16), Rounding.of("int8"))
    assert halves.scales.dtype == halves.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("zeros", [False, True])
def test_scales_are_chosen_for_the_inputs_that_count(zeros):
    rng = np.random.default_rng(0)
    value = rng.standard_t(3, (32, 128)).astype(np.float32)
    squares = np.exp(rng.normal(size=128) * 2).astype(np.float32)
    rounding = Rounding.of("int4", 64, zeros=zeros)

    def error(found):
        return float(np.sum((found.dequantised() - value) ** 2 * squares))

    nearest, blind, seen = (
        error(rounded(value, rounding, *how, searched=searched))
        for how, searched in (([], False), ([], True), ([squares], True))
    )
    assert seen < 0.9 * blind and seen < 0.9 * nearest


def test_zero_and_tiny_groups_have_scales_that_are_not_zero():
    value = np.zeros((2, 32), np.float16)
    value[1] = 6e-8
    for format in ("int8", "int4", "fp8"):
        found = rounded(value, Rounding.of(format, 16))
        found.check(format)
        assert np.isfinite(found.dequantised()).all() and not found.dequantised()[0].any()


@pytest.mark.slow
def test_a_text_makes_the_error_smaller_where_channels_are_large(source, text, tmp_path, capsys):
    plain = load(source)
    tokens = np.random.default_rng(2).integers(3, 402, (2, 64))

    def logits(model):
        return np.asarray(Decoder(model.config).apply(model.params, tokens, method="causal"))

    errors = {}
    for name, more in (("blind", []), ("seen", ["--text", text])):
        summary = convert(capsys, source, tmp_path / name, "--quantize", "int4", *more)
        errors[name] = np.mean((logits(load(tmp_path / name)) - logits(plain)) ** 2)
    assert errors["seen"] < 0.7 * errors["blind"]
    loss = summary["perplexity"]
    assert loss["tokens"] > 500 and abs(loss["change"]) < 0.5
    assert loss["change"] == pytest.approx(loss["after"] / loss["before"] - 1)


@pytest.mark.slow
def test_the_perplexity_is_that_of_the_models_that_are_written(source, text, tmp_path, capsys):
    found = convert(capsys, source, tmp_path / "new", "--quantize", "int8", "--text", text)
    model = load(source)
    tokens = np.asarray(model.tokenizer.encode(Path(text).read_text(), add_special_tokens=False))
    held = tokens[int(0.8 * len(tokens)) :]
    rows = len(held) // 256
    starts = np.linspace(0, len(held) - 256, rows).astype(int)
    rows = np.stack([held[start : start + 256] for start in starts])
    for folder, name in ((source, "before"), (tmp_path / "new", "after")):
        model = load(folder)
        logits = Decoder(model.config).apply(model.params, rows, method="causal")
        chances = np.asarray(jax.nn.log_softmax(logits))[:, :-1]
        loss = -np.take_along_axis(chances, rows[:, 1:, None], axis=-1).mean()
        assert found["perplexity"][name] == pytest.approx(math.exp(loss), rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    mostly_slow([{"num_key_value_heads": 4, "dtype": "bfloat16"}, {}, {"num_key_value_heads": 1}]),
)
def test_scaled_inputs_change_nothing_but_the_matrices(tmp_path, changes):
    model = load(tiny(tmp_path / "model", **changes))
    config, rng = model.config, np.random.default_rng(3)
    states = rng.normal(size=(2, 40, 64)).astype(model.dtype)
    layer = jax.tree.leaves_with_path(model.params["params"]["layers_0"])
    weights = {tuple(key.key for key in keys): np.array(leaf) for keys, leaf in layer}
    before = {path: value.copy() for path, value in weights.items()}
    form = config.layer_form(0)
    plain, seen = run_layer(config, form, as_params(weights), states, watched=True)
    assert {path[-1] for path in seen} == {"q", "k", "v", "o", "gate", "up", "down"}
    scale_inputs(weights, seen, config, Rounding.of("int4", 32), lambda path: False)
    changed = {path[-2] for path in weights if not np.array_equal(weights[path], before[path])}
    assert {"attention_norm", "mlp_norm", "q", "gate"} <= changed
    after, _ = run_layer(config, form, as_params(weights), states)
    tolerance = 1e-5 if model.dtype == np.float32 else 2e-2
    wide = plain.astype(np.float32)
    np.testing.assert_allclose(after.astype(np.float32), wide, atol=tolerance * abs(wide).max())


@pytest.mark.slow
def test_a_mixture_of_experts_is_quantised_expert_by_expert(text, tmp_path, capsys):
    moe = dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        num_hidden_layers=1,
    )
    folder = tiny(tmp_path / "moe", **moe)
    found = convert(capsys, folder, tmp_path / "new", "--quantize", "int8", "--text", text)
    assert found["matrices"] == 4 + 3 * 4 and abs(found["perplexity"]["change"]) < 0.02
    params = load(tmp_path / "new").params["params"]["layers_0"]
    assert params["moe"]["gate"]["kernel"].shape == (4, 32, 64)
    assert not is_quantised(params["moe"]["router"]["kernel"])
    settings = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.gate" in settings["ignore"]


def test_what_cannot_be_quantised_is_refused(source, text, tmp_path, capsys):
    new, short = tmp_path / "new", tmp_path / "short.txt"
    short.write_text("1 + 1 = 2")
    (tmp_path / "there").mkdir()
    convert(capsys, source, tmp_path / "done", "--quantize", "int8")
    convert(capsys, source, tmp_path / "saved", "--quantize", "int8", "--form", "orbax")
    quantize = ["--quantize", "int4"]
    for arguments, message in [
        ([source, tmp_path / "there", *quantize], "exists; give a folder that does not"),
        ([source, new, *quantize, "--group", "8"], "groups of 8 inputs are too small"),
        ([source, new, "--quantize", "int8", "--zeros"], "int8 has no zeros of groups; int4 has"),
        ([source, new, "--group", "32"], "--group is for quantised models: give --quantize"),
        ([source, new, *quantize, "--text", tmp_path / "no.txt"], "no.txt cannot be read as UTF-8"),
        ([source, new, *quantize, "--text", short], "tokens, too few to choose scales by"),
        ([source, new, *quantize, "--text", text, "--tokens", "0"], "must be positive"),
        ([source, new, *quantize, "--tokens", "9"], "--tokens is of a text"),
        ([tmp_path / "done", new, *quantize], "is quantised already (compressed-tensors)"),
        ([tmp_path / "saved", new, *quantize], "is quantised (int8), and quantising it again"),
        ([tmp_path / "none", new, *quantize], "has no config.json"),
    ]:
        assert message in refused(capsys, *arguments), arguments
    odd = tiny(tmp_path / "odd", hidden_size=34, intermediate_size=38, head_dim=2)
    assert "groups of at most 16 do not divide" in refused(
        capsys, odd, new, *quantize, "--group", "16"
    )
    with pytest.raises(SystemExit):
        main.main(["convert", str(source), str(new), "--quantize", "int3"])
    assert "invalid choice: 'int3'" in capsys.readouterr().err
    assert not new.exists() and not list(tmp_path.glob(".new*"))


def test_matrices_that_no_group_divides_stay_plain_and_are_named(tmp_path, capsys):
    folder = tiny(tmp_path / "odd", intermediate_size=38)
    found = convert(capsys, folder, tmp_path / "new", "--quantize", "int4", "--group", "32")
    assert found["plain"] == [f"model.layers.{n}.mlp.down_proj.weight" for n in (0, 1)]
    assert not is_quantised(
        load(tmp_path / "new").params["params"]["layers_0"]["mlp"]["down"]["kernel"]
    )


QWQ_32B = dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=5120,
    intermediate_size=27648,
    max_position_embeddings=40960,
    num_attention_heads=40,
    num_hidden_layers=64,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    tie_word_embeddings=False,
    vocab_size=152064,
)


@pytest.mark.parametrize(("embeddings", "most"), [("int8", 0.28), (None, 0.301)])
def test_qwq_32b_in_int4_takes_little_of_bfloat16(embeddings, most):
    """Counted: codes, and for each group a scale of two bytes. The goal, 0.29, is met with the
    embedding and the head in int8, as in Orbax form."""
    making = Making(Rounding.of("int4"), embeddings and Rounding.of(embeddings))
    total = plain = 0
    for tensor in expected_tensors(ModelConfig.from_json(QWQ_32B)).values():
        numbers = math.prod(tensor.shape)
        plain += 2 * numbers
        rounding = making.of(tensor.path, tensor.shape)
        if rounding is None:
            total += 2 * numbers
            continue
        group = rounding.group_of(tensor.shape[-1])
        bits = 8 if rounding.format == "int8" else 4
        total += numbers * bits // 8 + 2 * numbers // group
    assert plain == pytest.approx(65.5e9, rel=0.01)
    assert most - 0.01 < total / plain < most


def test_dequantised_matrices_live_no_longer_than_their_products():
    """As XLA compiles a step: its temporaries do not grow with the layers, and are smaller than the
    plain matrices of one."""
    wide = dict(TINY, head_dim=64, hidden_size=512, intermediate_size=1024)
    making = Making(Rounding.of("int4"))

    def outline(tensor):
        rounding = making.of(tensor.path, tensor.shape)
        if rounding is None:
            return jax.ShapeDtypeStruct(tensor.shape, jnp.float32)
        value = np.zeros(tensor.shape, np.float32)
        return jax.eval_shape(lambda: jax.tree.map(jnp.asarray, quantised(value, "int4", 64)))

    def temporaries(layers):
        config = ModelConfig.from_json({**wide, "num_hidden_layers": layers})
        found = {tensor.path: outline(tensor) for tensor in expected_tensors(config).values()}
        cache = jax.eval_shape(lambda: KVCache.create(config, [64], jnp.float32))
        tokens, layout = jax.ShapeDtypeStruct((1, 1), jnp.int32), Layout.from_blocks([[0]])
        count = jax.ShapeDtypeStruct((1,), jnp.int32)
        step = jax.jit(Decoder(config, "xla").apply)
        compiled = step.lower({"params": nested(found)}, tokens, count, cache, layout).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrix = 4 * 512 * 1024
    layer = 3 * matrix + 4 * 512 * (2 * 4 * 64 + 2 * 2 * 64)
    one, three = temporaries(1), temporaries(3)
    assert three < one + matrix and three < layer
