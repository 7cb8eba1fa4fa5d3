"""load: hand-made checkpoints in Hugging Face form, complete and broken."""

import dataclasses
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxshare import Sampler, models
from jaxshare.cache import KVCache
from jaxshare.layout import Layout
from jaxshare.models import CheckpointError, ConfigError
from jaxshare.models.fingerprint import same_fingerprint
from jaxshare.models.safetensors_io import largest
from tests.helpers import folder_of_first_layers
from tests.models.peak_memory import measured

QWEN = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    attention_bias=True,
    rope_theta=10000.0,
)
LLAMA = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
)

# parameter under layers_i: (name in the checkpoint, [out, in] of QWEN)
LAYER = {
    "attention/q/kernel": ("self_attn.q_proj.weight", (32, 16)),
    "attention/q/bias": ("self_attn.q_proj.bias", (32,)),
    "attention/k/kernel": ("self_attn.k_proj.weight", (16, 16)),
    "attention/k/bias": ("self_attn.k_proj.bias", (16,)),
    "attention/v/kernel": ("self_attn.v_proj.weight", (16, 16)),
    "attention/v/bias": ("self_attn.v_proj.bias", (16,)),
    "attention/o/kernel": ("self_attn.o_proj.weight", (16, 32)),
    "attention/o/bias": ("self_attn.o_proj.bias", (16,)),
    "attention/q_norm/scale": ("self_attn.q_norm.weight", (8,)),
    "attention/k_norm/scale": ("self_attn.k_norm.weight", (8,)),
    "attention_norm/scale": ("input_layernorm.weight", (16,)),
    "mlp_norm/scale": ("post_attention_layernorm.weight", (16,)),
    "mlp/gate/kernel": ("mlp.gate_proj.weight", (24, 16)),
    "mlp/up/kernel": ("mlp.up_proj.weight", (24, 16)),
    "mlp/down/kernel": ("mlp.down_proj.weight", (16, 24)),
}
PARAMETERS = {
    "embed/embedding": ("model.embed_tokens.weight", (40, 16)),
    "norm/scale": ("model.norm.weight", (16,)),
    "head/kernel": ("lm_head.weight", (40, 16)),
    **{
        f"layers_{i}/{path}": (f"model.layers.{i}.{name}", shape)
        for i in range(2)
        for path, (name, shape) in LAYER.items()
    },
}


def random_tensors(dtype=np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in PARAMETERS.values()}


def write(folder, tensors=None, config=None, **files):
    """Writes a checkpoint folder, of QWEN by default, and other JSON files by name."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN if config is None else config))
    save_file(random_tensors() if tensors is None else tensors, folder / "model.safetensors")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def shard(folder, tensors, parts=3):
    """Writes the same as shards with an index; returns the index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN))
    names = sorted(tensors)
    index = {"metadata": {}, "weight_map": {}}
    for i in range(parts):
        file = f"model-{i + 1:05}-of-{parts:05}.safetensors"
        save_file({name: tensors[name] for name in names[i::parts]}, folder / file)
        index["weight_map"] |= dict.fromkeys(names[i::parts], file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def flat(params) -> dict[str, np.ndarray]:
    return {
        "/".join(key.key for key in keys): np.asarray(leaf)
        for keys, leaf in jax.tree.leaves_with_path(params["params"])
    }


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint16 if x.itemsize == 2 else np.uint32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_tensor_arrives_bit_for_bit(tmp_path, dtype):
    tensors = random_tensors(dtype)
    # Includes the smallest subnormal, the largest finite number, infinity and minus zero.
    finfo = ml_dtypes.finfo(dtype)
    tensors["model.norm.weight"][:4] = [finfo.smallest_subnormal, finfo.max, np.inf, -0.0]
    arrived = flat(models.load(write(tmp_path, tensors), check=False).params)
    assert arrived.keys() == PARAMETERS.keys()
    for path, (name, _) in PARAMETERS.items():
        assert arrived[path].dtype == dtype
        np.testing.assert_array_equal(bits(arrived[path]), bits(tensors[name]), err_msg=path)


def test_the_fingerprint_tells_parameters_in_another_order(tmp_path):
    """As rows of queries and keys are that a converter has turned for another rotation."""
    write(tmp_path, tensors := random_tensors())
    model = models.load(tmp_path)
    assert len(model.fingerprint) == 48 and models.load(tmp_path).fingerprint == model.fingerprint
    queries = next(name for name in tensors if "q_proj.weight" in name)
    write(tmp_path, {**tensors, queries: tensors[queries][::-1].copy()})
    turned = models.load(tmp_path)
    assert not same_fingerprint(model.fingerprint, turned.fingerprint)
    # Files of former versions have this part of it: a hash of sums of bits.
    sums = [np.sum(bits(leaf), dtype=np.uint32) for leaf in map(np.asarray, leaves(model))]
    context = model.config.for_context(model.config.max_positions)
    former = hashlib.blake2b(repr(context).encode() + np.stack(sums).tobytes(), digest_size=16)
    assert same_fingerprint(former.hexdigest(), model.fingerprint)
    assert not same_fingerprint(model.fingerprint[:16], model.fingerprint)


def leaves(model) -> list:
    return jax.tree.leaves(model.params)


def test_shards_are_the_same_model(tmp_path):
    tensors = random_tensors()
    whole = models.load(write(tmp_path / "whole", tensors))
    shard(tmp_path / "shards", tensors)
    jax.tree.map(
        np.testing.assert_array_equal, models.load(tmp_path / "shards").params, whole.params
    )


def test_params_are_those_of_the_module(tmp_path):
    model = models.load(write(tmp_path))
    made = jax.eval_shape(
        lambda: model.module.init(jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal")
    )
    assert jax.tree.map(lambda leaf: leaf.shape, made) == jax.tree.map(
        lambda leaf: leaf.shape, model.params
    )


def test_forward(tmp_path):
    model = models.load(write(tmp_path))
    tokens = np.array([[3, 1, 4, 1, 5]])
    cache = KVCache.create(model.config, capacities=(8,), dtype=jnp.float32)
    logits, cache = model.forward(tokens, np.array([5]), cache, Layout.from_blocks([[0]]))
    np.testing.assert_allclose(
        logits[0], model.module.apply(model.params, tokens, method="causal")[0, -1], atol=1e-4
    )
    assert cache.lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("says", "stored", "asked", "expected"),
    [
        (dict(torch_dtype="bfloat16"), np.float32, None, "bfloat16"),
        (dict(dtype="float16"), np.float32, None, "float16"),
        (dict(dtype="float16", torch_dtype="bfloat16"), np.float32, None, "float16"),
        (dict(dtype="auto"), np.float16, None, "float16"),
        (dict(), ml_dtypes.bfloat16, None, "bfloat16"),
        (dict(torch_dtype="torch.bfloat16"), ml_dtypes.bfloat16, None, "bfloat16"),
        (dict(torch_dtype="bfloat16"), ml_dtypes.bfloat16, "float32", "float32"),
        (dict(torch_dtype="bfloat16"), ml_dtypes.bfloat16, jnp.float16, "float16"),
        (dict(torch_dtype="float64"), np.float32, np.dtype("float32"), "float32"),
    ],
)
def test_dtype(tmp_path, says, stored, asked, expected):
    tensors = random_tensors(stored)
    params = flat(models.load(write(tmp_path, tensors, QWEN | says), dtype=asked).params)
    assert {str(leaf.dtype) for leaf in params.values()} == {expected}
    np.testing.assert_array_equal(
        params["embed/embedding"], tensors["model.embed_tokens.weight"].astype(expected)
    )


def test_tensors_of_several_dtypes_take_the_one_that_holds_them_all(tmp_path):
    tensors = random_tensors(ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float32)
    assert {leaf.dtype for leaf in flat(models.load(write(tmp_path, tensors)).params).values()} == {
        np.dtype("float32")
    }


def test_a_dtype_that_parameters_cannot_have(tmp_path):
    for dtype in ("int8", "float64", "half a float"):
        with pytest.raises(ValueError, match=rf"dtype is {dtype}.*bfloat16, float16 or float32"):
            models.load(write(tmp_path), dtype=dtype)
    with pytest.raises(ConfigError, match=r"torch_dtype.*float64.*pass dtype"):
        models.load(write(tmp_path, config=QWEN | dict(torch_dtype="float64")))


def test_every_wrong_tensor_is_in_one_error(tmp_path):
    tensors = random_tensors()
    del tensors["lm_head.weight"], tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((24, 15), np.float32)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 16), np.int8)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((24, 16), np.float32)
    with pytest.raises(CheckpointError) as caught:
        models.load(write(tmp_path, tensors))
    message = str(caught.value)
    assert str(tmp_path) in message and message.count("; ") == 5
    for problem in (
        "lm_head.weight is missing",
        "model.layers.1.self_attn.q_norm.weight is missing",
        "model.layers.0.mlp.up_proj.weight has shape (24, 15), not (24, 16)",
        "model.layers.1.mlp.up_proj.weight has dtype I8",
        "model.layers.2.mlp.up_proj.weight is unexpected",
    ):
        assert problem in message


def test_tensors_that_are_known_to_be_superfluous(tmp_path):
    tensors = random_tensors() | {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)
    }
    tied = models.load(write(tmp_path, tensors, QWEN | dict(tie_word_embeddings=True)))
    assert "head" not in tied.params["params"]
    del tensors["lm_head.weight"]
    models.load(write(tmp_path, tensors, QWEN | dict(tie_word_embeddings=True)))


@pytest.mark.parametrize("keep", [0, 5, 8, 300, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(
        CheckpointError, match=rf"{file} is not a complete safetensors file.*truncated or corrupt"
    ):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"\0" * 64, b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"],
)
def test_a_corrupt_file_is_named(tmp_path, content):
    file = write(tmp_path) / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(
        CheckpointError,
        match=rf"{file} is not.*{'git lfs pull' if b'lfs' in content else 'fetch it again'}",
    ):
        models.load(tmp_path)


def test_a_corrupt_shard_is_named(tmp_path):
    shard(tmp_path, random_tensors())
    file = tmp_path / "model-00002-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=str(file)):
        models.load(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shard(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model-00002-of-00003\.safetensors"):
        models.load(tmp_path)


def test_an_index_that_does_not_tell_what_the_shards_hold(tmp_path):
    index = shard(tmp_path, random_tensors())
    places = index["weight_map"]
    places["lm_head.weight"] = "model-00003-of-00003.safetensors"  # it is in the first
    places["model.extra.weight"] = "model-00003-of-00003.safetensors"
    del places["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        models.load(tmp_path)
    for problem in (
        "lm_head.weight is in model-00001-of-00003.safetensors and listed in "
        "model-00003-of-00003.safetensors",
        "lm_head.weight is listed in model-00003-of-00003.safetensors and not there",
        "model.extra.weight is listed in",
        "model.norm.weight is in model-0000",
    ):
        assert problem in str(caught.value)


@pytest.mark.parametrize(
    "index",
    [
        [],
        {},
        {"weight_map": {}},
        {"weight_map": {"lm_head.weight": 1}},
        {"weight_map": {"lm_head.weight": "../model.safetensors"}},
    ],
)
def test_an_index_that_is_no_index(tmp_path, index):
    shard(tmp_path, random_tensors())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        models.load(tmp_path)


def test_no_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=rf"no model folder {tmp_path / 'nowhere'}: give a folder with config.json.*hub id",
    ):
        models.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="is a file: give the folder"):
        models.load(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} has no config\.json"):
        models.load(tmp_path)


def test_a_name_that_is_neither_a_folder_nor_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    for revision in (None, "v1"):
        with pytest.raises(
            FileNotFoundError, match=r"no model folder some-one/some\.model, and the hub.*network"
        ) as caught:
            models.load("some-one/some.model", revision=revision)
        assert "\n" not in str(caught.value) and ("at revision v1" in str(caught.value)) == (
            revision is not None
        )


def test_a_hub_id_is_fetched_without_what_is_not_needed(tmp_path, monkeypatch):
    asked = {}

    def snapshot(name, **kwargs):
        asked.update(kwargs, name=name)
        return str(write(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert models.load("org/name", revision="abc").config.num_layers == 2
    assert (asked["name"], asked["revision"]) == ("org/name", "abc")
    assert not any(
        pattern.endswith((".bin", ".py", ".pt", "*")) and pattern != "tokenizer*"
        for pattern in asked["allow_patterns"]
    )


def test_pickled_weights_are_never_loaded(tmp_path):
    write(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors.*weights are read from"):
        models.load(tmp_path)

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "it ran"),)

    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(
        FileNotFoundError,
        match=r"pytorch_model\.bin; pickled weights are never loaded.*convert them to safetensors",
    ):
        models.load(tmp_path)
    assert not (tmp_path / "it ran").exists()


def test_code_of_a_checkpoint_is_never_run(tmp_path):
    code = (
        f"import pathlib\npathlib.Path({str(tmp_path / 'it ran')!r}).touch()\n"
        "class Model: pass\nclass Tokenizer: pass\n"
    )
    (
        write(tmp_path, config=QWEN | dict(auto_map={"AutoModelForCausalLM": "code.Model"}))
        / "code.py"
    ).write_text(code)
    assert models.load(tmp_path).tokenizer is None
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            dict(auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, tokenizer_class="Tokenizer")
        )
    )
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        models.load(tmp_path)
    assert not (tmp_path / "it ran").exists()


def write_tokenizer(folder):
    vocabulary = {"<unk>": 0, "</s>": 1, "hello": 2, "world": 3, "user": 4}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            dict(
                version="1.0",
                truncation=None,
                padding=None,
                added_tokens=[],
                normalizer=None,
                pre_tokenizer=dict(type="WhitespaceSplit"),
                post_processor=None,
                decoder=None,
                model=dict(type="WordLevel", vocab=vocabulary, unk_token="<unk>"),
            )
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>"))
    )
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    )


def test_tokenizer_and_chat_template(tmp_path):
    write_tokenizer(write(tmp_path))
    tokenizer = models.load(tmp_path).tokenizer
    assert tokenizer("hello world")["input_ids"] == [2, 3] and tokenizer.eos_token_id == 1
    assert (
        tokenizer.apply_chat_template([dict(role="user", content="hello")], tokenize=False)
        == "user hello "
    )


def test_a_broken_tokenizer_is_an_error(tmp_path):
    (write(tmp_path) / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be read"):
        models.load(tmp_path)


def test_loading_is_quiet_and_leaves_the_environment_alone(tmp_path):
    write_tokenizer(write(tmp_path))
    program = textwrap.dedent("""
        import os, sys
        before = dict(os.environ)
        from jaxshare import models
        assert "transformers" not in sys.modules and "huggingface_hub" not in sys.modules
        assert models.load(sys.argv[1]).tokenizer is not None
        assert dict(os.environ) == before
    """)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("file", "config", "expected"),
    [
        (None, {}, models.Generation()),
        (None, dict(eos_token_id=7), models.Generation(stop_tokens=(7,))),
        ({}, dict(eos_token_id=[7, 8]), models.Generation(stop_tokens=(7, 8))),
        (dict(eos_token_id=[1, 2]), dict(eos_token_id=7), models.Generation(stop_tokens=(1, 2))),
        (dict(eos_token_id=0), {}, models.Generation(stop_tokens=(0,))),
        (
            dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20),
            {},
            models.Generation(sampler=Sampler(0.6, 20, 0.9)),
        ),
        (dict(do_sample=True), {}, models.Generation(sampler=Sampler(1.0))),
        (
            dict(do_sample=True, temperature=None, top_k=None, min_p=0.05),
            {},
            models.Generation(sampler=Sampler(1.0, min_p=0.05)),
        ),
        (dict(temperature=0.6, top_p=0.9), {}, models.Generation(sampler=Sampler(top_p=0.9))),
        (
            dict(
                typical_p=0.9,
                repetition_penalty=1.05,
                no_repeat_ngram_size=3,
                bad_words_ids=[[1, 2], [3]],
                suppress_tokens=[5],
                begin_suppress_tokens=[6, 7],
                min_new_tokens=2,
                sequence_bias=[[[8], -2], [[8, 9], 1.5]],
                stop_strings="END",
            ),
            {},
            models.Generation(
                sampler=Sampler(
                    typical_p=0.9,
                    repetition_penalty=1.05,
                    no_repeat_ngram_size=3,
                    bad_words=((1, 2), (3,)),
                    forbidden=(5,),
                    forbidden_first=(6, 7),
                    min_tokens=2,
                    bias={8: -2.0},
                    sequence_bias=(((8, 9), 1.5),),
                ),
                stop_texts=("END",),
            ),
        ),
        (dict(min_length=10), {}, models.Generation(sampler=Sampler(min_length=10))),
        (  # transformers takes the second alone, too
            dict(min_length=10, min_new_tokens=3),
            {},
            models.Generation(sampler=Sampler(min_tokens=3)),
        ),
        (dict(stop_strings=["A", "B"]), {}, models.Generation(stop_texts=("A", "B"))),
        (  # what changes nothing
            dict(
                transformers_version="4.51.0",
                max_length=4096,
                num_beams=1,
                length_penalty=1.0,
                early_stopping=False,
                epsilon_cutoff=0.0,
                eta_cutoff=0.1,  # of sampling, which is off
                encoder_repetition_penalty=1.0,
                guidance_scale=1.0,
                use_cache=True,
                cache_implementation="static",
                pad_token_id=9,
                renormalize_logits=True,
                penalty_alpha=None,
                chat_format="chatml",
                min_length=0,
                top_k=0,
            ),
            {},
            models.Generation(),
        ),
    ],
)
def test_generation_settings(tmp_path, file, config, expected):
    files = {} if file is None else dict(generation_config=file)
    assert models.load(write(tmp_path, config=QWEN | config, **files)).generation == expected


@pytest.mark.parametrize(
    "wrong",
    [
        dict(temperature=-1.0),
        dict(top_p=0),
        dict(top_p=1.5),
        dict(top_k=-1),
        dict(min_p=2.0),
        dict(eos_token_id=["</s>"]),
        dict(eos_token_id=-1),
        dict(do_sample="yes"),
        dict(typical_p=0),
        dict(typical_p=1.1),
        dict(repetition_penalty=0.0),
        dict(no_repeat_ngram_size=-1),
        dict(bad_words_ids=[[]]),
        dict(bad_words_ids=[3]),
        dict(suppress_tokens=5),
        dict(begin_suppress_tokens=["a"]),
        dict(min_new_tokens=-1),
        dict(min_length=-1),
        dict(min_length=2**31),
        dict(top_k=2**31),
        dict(temperature=1e39),
        dict(temperature=True),
        dict(sequence_bias=[[[1, 2]]]),
        dict(sequence_bias=[[[], 3.0]]),
        dict(sequence_bias=[[[1, -2], 3.0]]),
        dict(sequence_bias=[[[1, 2], "3"]]),
        dict(sequence_bias={"1": 2.0}),
        dict(stop_strings=[""]),
        dict(stop_strings=3),
    ],
)
def test_generation_settings_out_of_range_are_named(tmp_path, wrong):
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {next(iter(wrong))} is"):
        models.load(write(tmp_path, generation_config=wrong))


@pytest.mark.parametrize(
    "unknown",
    [
        dict(num_beams=4),
        dict(num_beams=2, length_penalty=2.0),
        dict(do_sample=True, epsilon_cutoff=1e-4),
        dict(do_sample=True, eta_cutoff=1e-3),
        dict(guidance_scale=1.5),
        dict(penalty_alpha=0.6),
        dict(diversity_penalty=0.5),
        dict(forced_eos_token_id=2),
        dict(exponential_decay_length_penalty=[5, 1.1]),
        dict(watermarking_config={"bias": 2.5}),
        dict(a_setting_of_next_year=1),
    ],
)
def test_generation_settings_that_change_the_text_and_are_not_known_are_named(tmp_path, unknown):
    name = [*unknown][-1]
    with pytest.raises(ConfigError, match=f"settings that change the text .* {name} = "):
        models.load(write(tmp_path, generation_config=unknown))


@pytest.mark.slow
@pytest.mark.skipif(
    not os.path.exists("/proc/self/status"), reason="reads the peak of resident memory from /proc"
)
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_peak_memory_is_little_more_than_the_checkpoint(tmp_path, shards, tied):
    config = LLAMA | dict(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=5,
        tie_word_embeddings=tied,
        num_attention_heads=16,
        num_key_value_heads=4,
        torch_dtype="bfloat16",
    )
    shapes = {"model.embed_tokens.weight": (32000, 2048), "model.norm.weight": (2048,)}
    if not tied:
        shapes["lm_head.weight"] = (32000, 2048)
    for i in range(5):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (2048, 2048),
                "self_attn.k_proj": (512, 2048),
                "self_attn.v_proj": (512, 2048),
                "self_attn.o_proj": (2048, 2048),
                "mlp.gate_proj": (5632, 2048),
                "mlp.up_proj": (5632, 2048),
                "mlp.down_proj": (2048, 5632),
                "input_layernorm": (2048,),
                "post_attention_layernorm": (2048,),
            }.items()
        }
    tensors = {name: np.full(shape, 0.5, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    shard(tmp_path, tensors, shards)
    (tmp_path / "config.json").write_text(json.dumps(config))
    del tensors
    size, peak = measured(tmp_path)
    assert size > 550e6
    assert peak < 1.2 * size, f"{peak / size:.2f} times the checkpoint of {size / 1e6:.0f} MB"


ODD = [
    None,
    True,
    -1,
    0,
    2**31,
    10**400,
    1e400,
    float("nan"),
    1.5,
    "x",
    [],
    [1],
    [[]],
    [{}],
    {"a": 1},
]
FIELDS = [
    *QWEN,
    "rope_scaling",
    "rope_parameters",
    "layer_types",
    "dtype",
    "eos_token_id",
    "mlp_bias",
]


@given(
    st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(ODD), min_size=1, max_size=3),
    st.dictionaries(
        st.sampled_from(["eos_token_id", "temperature", "top_k", "top_p", "min_p", "do_sample"]),
        st.sampled_from(ODD),
        max_size=2,
    ),
)
@settings(max_examples=80, deadline=None)
def test_odd_settings_are_an_error_by_name_or_load(written, config, generation):
    """In little time and memory, too: 2**31 layers or heads would take all of it."""
    (written / "config.json").write_text(json.dumps(QWEN | config))
    (written / "generation_config.json").write_text(json.dumps(generation))
    try:
        loaded = models.load(written)
    except (ConfigError, CheckpointError) as error:
        assert "config.json" in str(error) and "\n" not in str(error)
    else:
        assert loaded.config.num_layers == QWEN["num_hidden_layers"]
        assert all(0 <= token < 2**31 for token in loaded.generation.stop_tokens)
        assert 0 <= loaded.generation.sampler.top_k < 2**31


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("odd"), random_tensors(), QWEN)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_header_is_an_error_by_name_or_the_same_model(written, data):
    """Two flipped bits, or a cut, in the part of the file that says what is in it."""
    file = written / "model.safetensors"
    (written / "config.json").write_text(json.dumps(QWEN))
    (written / "generation_config.json").unlink(missing_ok=True)
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 2))):
        damaged[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.sampled_from([None, None, 0, 7, 8, header - 1, header, len(whole) - 1]))
    file.write_bytes(damaged[:cut])
    try:
        loaded = models.load(written)
    except (CheckpointError, ConfigError) as error:
        assert "model.safetensors" in str(error) or "config.json" in str(error)
    else:
        shapes = jax.tree.map(jnp.shape, loaded.params)
        assert shapes == jax.tree.map(jnp.shape, models.load(written).params)
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "workers.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "", "\0", "NaN", "5", "[]", '{"a": 1' + "0" * 5000]
)
def test_files_that_are_no_object_are_named(tmp_path, name, text):
    write(tmp_path, random_tensors(), QWEN)
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        models.load(tmp_path)


def test_an_error_lists_some_of_thousands_of_tensors(tmp_path):
    write(tmp_path, random_tensors(), QWEN | dict(num_hidden_layers=2000))
    # 15 of each layer; the first layers are there.
    with pytest.raises(
        CheckpointError, match=r"layers\.2\..* is missing; \.\.\. and 29967 more; fetch"
    ) as caught:
        models.load(tmp_path)
    assert len(str(caught.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize("settings", [{"model_max_length": "x"}, {"chat_template": 5}])
def test_settings_of_a_tokenizer_of_wrong_types_are_found_while_it_loads(tmp_path, settings):
    folder = folder_of_first_layers(tmp_path / "model", 1)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        models.load(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parameters_that_are_not_finite_are_named(tmp_path, dtype, value, monkeypatch):
    """1e5 is no number of float16."""
    tensors = random_tensors()
    broken = tensors["model.layers.1.mlp.up_proj.weight"]
    broken[3, 4] = value
    write(tmp_path, tensors, QWEN)
    if value == 1e5 and dtype != "float16":
        assert models.load(tmp_path, dtype).config.num_layers == 2
        return
    with pytest.raises(CheckpointError, match=r"model.safetensors: model.layers.1.mlp.up_proj"):
        models.load(tmp_path, dtype)
    loaded = models.load(tmp_path, dtype, check=False)
    assert not jnp.isfinite(loaded.params["params"]["layers_1"]["mlp"]["up"]["kernel"]).all()
    monkeypatch.setenv("JAXSHARE_CHECK_WEIGHTS", "off")
    models.load(tmp_path, dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_largest_is_the_largest_magnitude(dtype):
    values = np.random.default_rng(0).normal(size=(3, 300_001)).astype(dtype)
    values[2, -1] = -9
    assert largest(values) == 9 and largest(values).dtype == values.dtype
    assert largest(np.zeros((0, 2), dtype)) == 0
    values[1, 5] = -np.nan
    assert np.isnan(largest(values))


def test_a_model_is_shown_in_a_line_without_its_weights():
    """As a notebook shows it."""
    model = models.load("embedded")
    leaves = jax.tree.leaves(model.params)
    count = f"{sum(math.prod(leaf.shape) for leaf in leaves):,} parameters"
    kind = f"Qwen3ForCausalLM, {count}, float32"
    assert repr(model) == f"<LoadedModel 'embedded': {kind}>"
    approximate = dataclasses.replace(model, approximate_kv="int8")
    assert repr(approximate) == f"<LoadedModel 'embedded': {kind}, int8 cache>"


def test_a_name_that_is_no_model_is_told_of_the_one_that_comes_with_the_package():
    with pytest.raises(FileNotFoundError, match=r"no model folder embeded: .* or `embedded` for"):
        models.load("embeded")
