"""Makes small random checkpoints and what transformers computes from them: the other side of
tests/models/test_parity.py.

Runs in an environment of its own with torch and transformers 5; JAX is not needed there. For every
case a folder is written:

    config.json, model*.safetensors   the checkpoint, as save_pretrained writes it; some with config.json in the form of transformers 4
    expected.npz                      tokens int32[300] and logits float32[300, V] at each of them; prompt int32[P] and the greedy
                                      int32[64] after it; inv_freq float32[rotary_dim / 2] and attention_scaling that were used
    case.json                         the context to load the model for

and beside them rope.json: frequencies and attention factors of well-known configurations.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    logging,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.phi3 import modeling_phi3

VOCABULARY, TEXT, PROMPT, ANSWER = 96, 300, 40, 64

# Greedy answers are compared token for token: the best token must lead by far more than the
# tolerance of the logits, 1e-4.
MARGIN, DISTINCT = 4e-3, 12


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint. `rope` is as in config.json of transformers 5; `context` is what the model is
    loaded for."""

    name: str
    family: str
    kv_heads: int
    rope: dict[str, Any]
    heads: int = 4
    head_dim: int | None = None
    tied: bool = False
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    context: int = 1024
    dtype: torch.dtype = torch.bfloat16
    form: int = 5
    shards: bool = False


def plain(theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def scaled(kind: str, theta: float = 10_000.0, factor: float = 4.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": theta, "factor": factor, **more}


def llama3(theta: float = 10_000.0) -> dict[str, Any]:
    """In heads this small, theta and the original context are such that one frequency lies between
    the two bounds."""
    return scaled(
        "llama3",
        theta,
        8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )


def longrope(pairs: int, original: int, **more: Any) -> dict[str, Any]:
    short, long = ([round(1 + scale * i / pairs, 4) for i in range(pairs)] for scale in (0.6, 9.0))
    return {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
        **more,
    }


CASES = (
    # In the form of Llama 2: no rope_theta at all.
    Case("llama_mha", "llama", 4, plain(), dtype=torch.float32, form=4),
    Case("llama_gqa_llama3_tied_sharded", "llama", 2, llama3(), tied=True, form=4, shards=True),
    Case(
        "llama_mqa_linear_biases",
        "llama",
        1,
        scaled("linear"),
        more=dict(attention_bias=True, mlp_bias=True),
        form=4,
    ),
    Case(
        "llama_gqa_yarn_wide_heads",
        "llama",
        2,
        scaled("yarn", original_max_position_embeddings=64),
        head_dim=16,
        dtype=torch.float16,
    ),
    Case(
        "llama_mha_yarn_mscale_bias",
        "llama",
        4,
        scaled(
            "yarn",
            original_max_position_embeddings=256,
            mscale=0.8,
            mscale_all_dim=0.4,
            beta_fast=16.0,
            beta_slow=2.0,
            truncate=False,
        ),
        head_dim=16,
        more=dict(attention_bias=True),
    ),
    Case("llama_mqa_longrope_short_tied", "llama", 1, longrope(4, 512), tied=True, context=512),
    Case("llama_gqa_longrope_long", "llama", 2, longrope(4, 32), more=dict(mlp_bias=True), form=4),
    Case("llama_gqa_partial", "llama", 2, plain(partial_rotary_factor=0.5), head_dim=16),
    Case(
        "llama_mha_partial_longrope_long",
        "llama",
        4,
        longrope(2, 32, partial_rotary_factor=0.5, factor=6.0),
    ),
    Case("qwen2_gqa", "qwen2", 2, plain(1e6), form=4),
    Case(
        "qwen2_mha_yarn_sharded",
        "qwen2",
        4,
        scaled("yarn", 1e6, original_max_position_embeddings=256),
        form=4,
        shards=True,
    ),
    Case("qwen2_mqa_tied", "qwen2", 1, plain(1e6), tied=True, dtype=torch.float32),
    Case("qwen2_gqa_llama3_narrow_heads", "qwen2", 2, llama3(100.0), more=dict(head_dim=4)),
    Case(
        "qwen2_mqa_linear_wide_heads",
        "qwen2",
        1,
        scaled("linear", factor=2.5),
        more=dict(head_dim=12),
        tied=True,
        dtype=torch.float16,
    ),
    Case("qwen2_gqa_longrope_long", "qwen2", 2, longrope(4, 32, attention_factor=1.15)),
    Case(
        "qwen2_mha_partial_yarn",
        "qwen2",
        4,
        scaled("yarn", 1e5, partial_rotary_factor=0.5, original_max_position_embeddings=64),
    ),
    Case("qwen3_gqa_tied", "qwen3", 2, plain(1e6), head_dim=16, tied=True),
    Case(
        "qwen3_mqa_yarn_bias",
        "qwen3",
        1,
        scaled("yarn", 1e6, original_max_position_embeddings=64, attention_factor=1.3),
        head_dim=16,
        more=dict(attention_bias=True),
    ),
    Case("qwen3_mha_linear_tied", "qwen3", 4, scaled("linear", 1e5), head_dim=8, tied=True, form=4),
    Case(
        "qwen3_gqa_longrope_short", "qwen3", 2, longrope(6, 512), head_dim=12, context=400, form=4
    ),
    Case(
        "qwen3_mha_llama3_sharded",
        "qwen3",
        4,
        llama3(),
        head_dim=16,
        shards=True,
        dtype=torch.float16,
    ),
    Case(
        "qwen3_mqa_partial_linear",
        "qwen3",
        1,
        scaled("linear", partial_rotary_factor=0.25),
        head_dim=16,
        form=4,
    ),
    Case(
        "qwen3_six_heads",
        "qwen3",
        3,
        plain(1e6),
        heads=6,
        head_dim=16,
        more=dict(attention_bias=True),
        dtype=torch.float32,
    ),
)

FACTORS = (
    [round(1.0 + 0.02 * i**1.5, 4) for i in range(48)],
    [round(1.0 + 0.4 * i**1.2, 4) for i in range(48)],
)
LLAMA_8B = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=2,
    num_attention_heads=32,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)
QWEN_7B = LLAMA_8B | dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    hidden_size=3584,
    num_attention_heads=28,
    num_key_value_heads=4,
    max_position_embeddings=131072,
)
QWEN3 = LLAMA_8B | dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    head_dim=128,
    max_position_embeddings=40960,
)
ROPES = (
    LLAMA_8B | dict(max_position_embeddings=4096),
    LLAMA_8B | dict(rope_theta=1e6, max_position_embeddings=16384),
    LLAMA_8B
    | dict(
        rope_theta=500000.0,
        rope_scaling=dict(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    LLAMA_8B
    | dict(
        head_dim=64,
        rope_parameters=dict(
            rope_theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    LLAMA_8B | dict(rope_theta=100000, rope_scaling=dict(factor=4.0, type="linear")),
    LLAMA_8B
    | dict(
        rope_scaling=dict(
            factor=16.0, type="yarn", original_max_position_embeddings=4096, finetuned=True
        )
    ),
    LLAMA_8B
    | dict(
        head_dim=96,
        rope_theta=10000.0,
        original_max_position_embeddings=4096,
        rope_scaling=dict(type="longrope", short_factor=FACTORS[0], long_factor=FACTORS[1]),
    ),
    QWEN_7B
    | dict(
        rope_theta=1e6,
        rope_scaling=dict(factor=4.0, type="yarn", original_max_position_embeddings=32768),
    ),
    QWEN_7B
    | dict(
        rope_parameters=dict(
            rope_theta=1e6,
            rope_type="yarn",
            factor=None,
            original_max_position_embeddings=32768,
            mscale=1.0,
            mscale_all_dim=0.5,
            beta_fast=24,
            beta_slow=0,
        )
    ),
    QWEN_7B | dict(rope_parameters=dict(rope_theta=1e7, rope_type="yarn", factor=2.0)),
    QWEN3 | dict(rope_theta=1000000),
    QWEN3
    | dict(
        head_dim=80,
        rope_theta=5e6,
        rope_scaling=dict(
            rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, truncate=False
        ),
    ),
    QWEN3
    | dict(
        rope_theta=1e6, partial_rotary_factor=0.25, rope_scaling=dict(rope_type="linear", factor=3)
    ),
)


def configuration(case: Case) -> PreTrainedConfig:
    more = dict(case.more) if case.head_dim is None else dict(head_dim=case.head_dim, **case.more)
    return AutoConfig.for_model(
        case.family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        rms_norm_eps=1e-3,
        max_position_embeddings=1024,
        tie_word_embeddings=case.tied,
        rope_parameters=dict(case.rope),
        bos_token_id=None,
        eos_token_id=[1, 2],
        **more,
    )


def fill(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Random weights under which attention is peaked, texts do not fall into loops at once, and
    logits are of order 1 to 5."""
    spread = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.5, "o_proj": 1.5, "lm_head": 1.4}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        layer = name.split(".")[-2]
        if name.endswith("bias"):
            weight.data = 0.2 * noise
        elif weight.ndim == 1:
            weight.data = (1.5 if layer in ("q_norm", "k_norm") else 1.0) + 0.2 * noise
        elif layer == "embed_tokens":
            weight.data = noise * (0.25 if model.config.tie_word_embeddings else 1.0)
        else:
            weight.data = noise * spread.get(layer, 1.0) / weight.shape[1] ** 0.5


def as_transformers_4(config: dict[str, Any]) -> dict[str, Any]:
    """The same configuration in the words that transformers 4 wrote."""
    rope = dict(config.pop("rope_parameters"))
    theta, kind, partial = (
        rope.pop("rope_theta"),
        rope.pop("rope_type"),
        rope.pop("partial_rotary_factor", None),
    )
    config |= dict(
        torch_dtype=config.pop("dtype"),
        transformers_version="4.51.0",
        rope_theta=theta,
        rope_scaling=None,
    )
    config.pop("layer_types", None)
    if (
        config["model_type"] == "llama"
        and config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]
    ):
        del config["head_dim"]
    if partial is not None:
        config["partial_rotary_factor"] = partial
    if kind in ("linear", "yarn"):  # the older of two names
        config["rope_scaling"] = dict(type=kind, **rope)
    elif kind != "default":
        config["rope_scaling"] = dict(rope_type=kind, **rope)
    elif config["model_type"] == "llama" and theta == 10_000.0:
        del config["rope_theta"]
    return config


@contextlib.contextmanager
def partial_rotation(case_rope: dict[str, Any], family: str) -> Iterator[None]:
    """The rotary classes of Llama and Qwen in transformers cannot rotate a part of a head; those of
    its Phi-3 can."""
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    with contextlib.ExitStack() as stack:
        if "partial_rotary_factor" in case_rope:
            rotary = next(name for name in vars(module) if name.endswith("RotaryEmbedding"))
            stack.enter_context(
                mock.patch.object(module, rotary, modeling_phi3.Phi3RotaryEmbedding)
            )
            stack.enter_context(
                mock.patch.object(
                    module, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb
                )
            )
        yield


def read(folder: Path) -> PreTrainedModel:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")):
        raise RuntimeError(f"{folder}: transformers does not take its own checkpoint: {report}")
    return model.eval()


def logits_of(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None], use_cache=False).logits[0]


def greedy(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    """The answer that transformers gives with its own cache, stop tokens included as any others."""
    cache, answer, tokens = None, [], prompt
    for _ in range(ANSWER):
        output = model(tokens[None], past_key_values=cache, use_cache=True)
        cache, tokens = output.past_key_values, output.logits[0, -1:].argmax(dim=-1)
        answer.append(tokens)
    return torch.cat(answer)


def greedy_without_ties(
    model: PreTrainedModel, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt whose greedy answer is varied and never a near tie, so that rounding cannot change
    it."""
    for _ in range(200):
        prompt = torch.randint(VOCABULARY, (PROMPT,), generator=generator)
        answer = greedy(model, prompt)
        best = logits_of(model, torch.cat([prompt, answer]))[PROMPT - 1 : -1].topk(2)
        if not torch.equal(best.indices[:, 0], answer):
            continue  # near ties, or else the cache changes the answer, and then no prompt will do
        if (best.values[:, 0] - best.values[:, 1]).min() > MARGIN and len(
            set(answer.tolist())
        ) >= DISTINCT:
            return prompt, answer
    raise RuntimeError("no prompt has a varied greedy answer without near ties")


def make(case: Case, folder: Path, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shutil.rmtree(folder, ignore_errors=True)
    with partial_rotation(case.rope, case.family):
        model = AutoModelForCausalLM.from_config(configuration(case))
        fill(model, generator)
        model.to(case.dtype).save_pretrained(
            folder, max_shard_size="24KB" if case.shards else "1GB"
        )
        tokens = torch.randint(VOCABULARY, (TEXT,), generator=generator)
        model = read(folder)
        logits = logits_of(model, tokens)
        if case.form == 4:
            path = folder / "config.json"
            path.write_text(
                json.dumps(as_transformers_4(json.loads(path.read_text())), indent=2) + "\n"
            )
            model = read(folder)
            if not torch.equal(logits_of(model, tokens), logits):
                raise RuntimeError(
                    f"{case.name}: the configuration in the form of transformers 4 is another model"
                )
        rotary = model.model.rotary_emb  # holds what the text above was rotated with
        inv_freq = rotary.inv_freq.numpy().copy()
        prompt, answer = greedy_without_ties(model, generator)
    np.savez(
        folder / "expected.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=logits.numpy(),
        prompt=prompt.numpy().astype(np.int32),
        greedy=answer.numpy().astype(np.int32),
        inv_freq=inv_freq,
        attention_scaling=np.float32(rotary.attention_scaling),
    )
    (folder / "case.json").write_text(json.dumps({"context": case.context}) + "\n")
    spread = logits.std(dim=-1).mean()
    print(f"{case.name:36s} logits std {spread:.2f} max {logits.abs().max():.1f}", flush=True)


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """What transformers computes for a whole context, that is, with a longrope's long factors."""
    parsed = AutoConfig.for_model(**json.loads(json.dumps(config)))
    kind = parsed.rope_parameters["rope_type"]
    compute = (
        modeling_phi3.Phi3RotaryEmbedding.compute_default_rope_parameters
        if kind == "default"
        else ROPE_INIT_FUNCTIONS[kind]
    )
    inv_freq, scaling = compute(parsed, seq_len=parsed.max_position_embeddings)
    return dict(
        config=config,
        inv_freq=[float(f"{f:.9g}") for f in inv_freq.tolist()],
        attention_scaling=scaling,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "tests" / "fixtures" / "parity"
    )
    out = parser.parse_args().out
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(
            f"--out is {out}, which cannot be made ({error.strerror}); name a folder that can be "
            "written"
        )
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # one order of summation everywhere
    with torch.no_grad():
        for seed, case in enumerate(CASES):
            make(case, out / case.name, seed)
        (out / "rope.json").write_text(
            "[\n" + ",\n".join(json.dumps(rope_of(config)) for config in ROPES) + "\n]\n"
        )


if __name__ == "__main__":
    main()
