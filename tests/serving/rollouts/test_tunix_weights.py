"""Weights of Tunix's modules as those of models here and back, on plain arrays, without Tunix."""

import builtins
import importlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from jaxshare.serving.rollouts.tunix_weights import from_arrays, merged, model_config, to_arrays

D, F, H, K, HEAD, V = 8, 12, 4, 2, 4, 16
SIZES = dict(num_layers=1, embed_dim=D, hidden_dim=F, num_heads=H, num_kv_heads=K, head_dim=HEAD)
OF_LAYER = {
    "attn.q_proj.w": (D, H, HEAD),
    "attn.k_proj.w": (D, K, HEAD),
    "attn.v_proj.w": (D, K, HEAD),
    "attn.o_proj.w": (H, HEAD, D),
    "mlp.gate_proj.kernel": (D, F),
    "mlp.up_proj.kernel": (D, F),
    "mlp.down_proj.kernel": (F, D),
    "input_layernorm.w": (D,),
    "post_attention_layernorm.w": (D,),
}
LLAMA = {
    "embedder.input_embedding": (V, D),
    "final_norm.w": (D,),
    "lm_head.w": (D, V),
    **{f"layers.0.{name}": shape for name, shape in OF_LAYER.items()},
}
GEMMA = {
    "embedder.input_embedding": (V, D),
    "final_norm.scale": (D,),
    "layers.0.attn.q_einsum.w": (H, D, HEAD),
    "layers.0.attn.kv_einsum.w": (2, K, D, HEAD),
    "layers.0.attn.attn_vec_einsum.w": (H, HEAD, D),
    "layers.0.attn._query_norm.scale": (HEAD,),
    "layers.0.attn._key_norm.scale": (HEAD,),
    "layers.0.mlp.gate_proj.kernel": (D, F),
    "layers.0.mlp.up_proj.kernel": (D, F),
    "layers.0.mlp.down_proj.kernel": (F, D),
    **{
        f"layers.0.{name}.scale": (D,)
        for name in (
            *("pre_attention_norm", "post_attention_norm"),
            *("pre_ffw_norm", "post_ffw_norm"),
        )
    },
}


def llama_settings(**changes):
    usual = dict(vocab_size=V, norm_eps=1e-5, rope_theta=500_000, weight_tying=False)
    return SimpleNamespace(**SIZES | usual | changes)


def gemma_settings(**changes):
    usual = dict(
        num_embed=V,
        sliding_window_size=4,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        local_scale_factor=1.0,
        global_scale_factor=8.0,
        query_pre_attn_norm=SimpleNamespace(name="BY_ONE_OVER_SQRT_HEAD_DIM"),
        vision_config=None,
    )
    return SimpleNamespace(**SIZES | usual | changes)


def drawn(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def layer(params):
    return params["params"]["layers_0"]


def test_llama():
    """What each product is: einsum("BTD,DNH->BTNH") there, rows of features here."""
    arrays = drawn(LLAMA)
    config = model_config("Llama3", llama_settings(), 64)
    assert config.max_positions == 64 and not config.tie_embeddings
    # Tunix 0.1.7 rotates with the base 1,000,000, whatever its settings say.
    assert config.rope.frequencies[1:] == pytest.approx(
        [1e6 ** (-2 * i / HEAD) for i in range(1, HEAD // 2)]
    )
    params = from_arrays(arrays, config)
    x = np.random.default_rng(1).standard_normal((3, D), np.float32)
    q = np.einsum("td,dnh->tnh", x, arrays["layers.0.attn.q_proj.w"])
    np.testing.assert_allclose(
        x @ np.asarray(layer(params)["attention"]["q"]["kernel"]).T, q.reshape(3, -1), rtol=1e-4
    )
    o = np.einsum("tnh,nhd->td", q, arrays["layers.0.attn.o_proj.w"])
    np.testing.assert_allclose(
        q.reshape(3, -1) @ np.asarray(layer(params)["attention"]["o"]["kernel"]).T, o, rtol=1e-3
    )
    np.testing.assert_array_equal(params["params"]["head"]["kernel"], arrays["lm_head.w"].T)
    back = to_arrays(params, config, LLAMA)
    assert {*back} == {*arrays}
    for name, array in arrays.items():
        np.testing.assert_array_equal(back[name], array)


def test_gemma():
    """Keys and values are matrices of one array; local layers rotate with another base."""
    arrays = drawn(GEMMA)
    config = model_config("Gemma3", gemma_settings(), 64)
    params = from_arrays(arrays, config, "bfloat16")
    x = np.random.default_rng(1).standard_normal((3, D), np.float32)
    expected = np.einsum("td,kdh->tkh", x, arrays["layers.0.attn.kv_einsum.w"][1])
    values = np.asarray(layer(params)["attention"]["v"]["kernel"]).astype(np.float32)
    np.testing.assert_allclose(x @ values.T, expected.reshape(3, -1), atol=0.1)
    params = from_arrays(arrays, config)
    for name, array in to_arrays(params, config, GEMMA).items():
        np.testing.assert_array_equal(array, arrays[name])


def test_adapters_are_merged():
    arrays, rng = drawn(LLAMA), np.random.default_rng(2)
    for name, ins, outs in (("q_proj", (D,), (H, HEAD)), ("o_proj", (H, HEAD), (D,))):
        arrays[f"layers.0.attn.{name}.w_lora_a"] = rng.standard_normal((*ins, 3), np.float32)
        arrays[f"layers.0.attn.{name}.w_lora_b"] = rng.standard_normal((3, *outs), np.float32)
    found, x = merged(arrays, 6.0), rng.standard_normal((5, D), np.float32)
    assert {*found} == {*LLAMA}
    name = "layers.0.attn.q_proj.w"
    a, b = arrays[f"{name}_lora_a"], arrays[f"{name}_lora_b"]
    expected = np.einsum("td,dnh->tnh", x, arrays[name]) + 2 * np.einsum("td,dr,rnh->tnh", x, a, b)
    np.testing.assert_allclose(np.einsum("td,dnh->tnh", x, found[name]), expected, atol=1e-4)
    with pytest.raises(ValueError, match=r"adapters .* as of layers\.0\.attn.*lora_alpha="):
        merged(arrays, None)
    with pytest.raises(ValueError, match=r"an adapter of layers\.0\.attn\.q_einsum\.w cannot"):
        merged({f"layers.0.attn.q_einsum.w{end}": a for end in ("", "_lora_a", "_lora_b")}, 1.0)


def test_refused():
    config = model_config("Llama3", llama_settings(), 64)
    arrays = drawn(LLAMA)
    with pytest.raises(ValueError, match=r"no layers\.0\.attn\.o_proj\.w, which .*attention/o/"):
        from_arrays({k: v for k, v in arrays.items() if "o_proj" not in k}, config)
    with pytest.raises(ValueError, match=r"image\.w is no parameter of LlamaForCausalLM"):
        from_arrays(arrays | {"image.w": np.zeros(D, np.float32)}, config)
    with pytest.raises(ValueError, match=r"lm_head\.w has the shape \(8, 15\)"):
        from_arrays(arrays | {"lm_head.w": np.zeros((D, V - 1), np.float32)}, config)
    tied = {name: shape for name, shape in LLAMA.items() if name != "lm_head.w"}
    with pytest.raises(ValueError, match=r"lm_head\.w is of the model alone"):
        to_arrays(from_arrays(arrays, config), config, tied)
    with pytest.raises(ValueError, match=r"the actor is a Mixtral; modules of Llama3, Qwen2"):
        model_config("Mixtral", None, 64)
    with pytest.raises(ValueError, match="reads images"):
        model_config("Gemma3", gemma_settings(vision_config=object()), 64)


def test_without_the_package(monkeypatch):
    """The message names the extra."""
    imported = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "tunix":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    module = "jaxshare.serving.rollouts.tunix_rollout"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError, match=r"not installed: pip install 'jaxshare\[tunix\]'"):
        importlib.import_module(module)
