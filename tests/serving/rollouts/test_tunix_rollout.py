"""Tunix's learners sample with an engine: as Tunix's own sampler does, with the learner's weights."""

import functools
import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxshare.models import Decoder
from jaxshare.sharding import make_mesh

pytestmark = pytest.mark.others

VOCAB, BOS, EOS, PAD = 64, 1, 2, 64
"""Padding is outside the vocabulary: Tunix does not see a token of padding that was sampled."""
SIZES = dict(num_layers=2, embed_dim=32, hidden_dim=48, num_heads=4, head_dim=8, num_kv_heads=2)
PROMPTS = ["hello", "abc", "hello", "a longer one!", "hello"]


@pytest.fixture(autouse=True)
def as_tunix_needs_it():
    """Tunix promotes dtypes, in threads too, and calls what Flax and JAX advise against."""
    before = jax.config.jax_numpy_dtype_promotion
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    jax.config.update("jax_numpy_dtype_promotion", before)


class Tokenizer:
    """A token for each character."""

    def __init__(self, pad=PAD):
        self.pad = pad

    def encode(self, text, **options):
        return [3 + ord(character) % (VOCAB - 3) for character in text]

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS

    def pad_id(self):
        return self.pad


def tunix(name: str):
    return importlib.import_module(f"tunix.{name}")


def ours():
    return importlib.import_module("jaxshare.serving.rollouts.tunix_rollout")


def llama(**changes):
    settings = dict(vocab_size=VOCAB, rope_theta=500_000, norm_eps=1e-5, weight_tying=False)
    settings = SIZES | settings | changes
    lib = tunix("models.llama3.model")
    return lib.Llama3(lib.ModelConfig(**settings), rngs=nnx.Rngs(0))


def qwen(version, **changes):
    settings = dict(vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-6, use_tied_embedding=False)
    lib = tunix(f"models.qwen{version}.model")
    made = lib.ModelConfig(**SIZES | settings | changes)
    return getattr(lib, f"Qwen{version}")(made, rngs=nnx.Rngs(0))


def gemma2(**changes):
    lib = tunix("models.gemma.model")
    kinds = lib.AttentionType.LOCAL_SLIDING, lib.AttentionType.GLOBAL
    settings = dict(
        num_embed=VOCAB,
        final_logit_softcap=30.0,
        attn_logits_soft_cap=50.0,
        use_post_attn_norm=True,
        use_post_ffw_norm=True,
        attention_types=kinds,
        sliding_window_size=16,
    )
    return lib.Gemma(lib.ModelConfig(**SIZES | settings | changes), rngs=nnx.Rngs(0))


def gemma3():
    lib = tunix("models.gemma3.model")
    settings = dict(
        num_layers=7,
        num_embed=VOCAB,
        sliding_window_size=16,
        local_base_frequency=10_000,
        global_base_frequency=1_000_000,
        global_scale_factor=8.0,
        param_dtype=jnp.float32,
    )
    return lib.Gemma3(lib.ModelConfig(**SIZES | settings), rngs=nnx.Rngs(0))


MODULES = {
    "Llama 3": llama,
    "Llama 3, tied": lambda: llama(weight_tying=True),
    "Qwen 2": lambda: qwen(2),
    "Qwen 3": lambda: qwen(3, rope_theta=5_000_000, use_tied_embedding=True),
    "Qwen 3 with experts": lambda: qwen(3, num_experts=4, num_experts_per_tok=2),
    "Gemma 2": gemma2,
    "Gemma 2, as many kv heads": lambda: gemma2(num_kv_heads=4, final_logit_softcap=None),
    "Gemma 3": gemma3,
}


def weights(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def fill(module, seed=1):
    """Random weights everywhere, norms and biases too."""
    rng, is_gemma = np.random.default_rng(seed), type(module).__name__.startswith("Gemma")

    def drawn(keys, old):
        matrix, name = old.ndim > 1, str(keys)
        new = rng.standard_normal(old.shape) * (0.3 if matrix else 0.1)
        new += 0 if matrix or is_gemma or "bias" in name else 1
        return jnp.asarray(new, old.dtype)

    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, jax.tree.map_with_path(drawn, weights(module)))
    nnx.update(module, state)
    return module


@functools.cache
def filled(name):
    return fill(MODULES[name]())


def same(found, expected):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, found, expected)))


def settings(**changes):
    lib = tunix("rl.rollout.base_rollout")
    usual = dict(
        max_tokens_to_generate=12,
        temperature=1.0,
        top_p=None,
        max_prompt_length=16,
        kv_cache_size=64,
        return_logprobs=True,
    )
    return lib.RolloutConfig(**usual | changes)


def tokenizer():
    return tunix("generate.tokenizer_adapter").TokenizerAdapter(Tokenizer())


def rollout_of(module, config=None, **options):
    options = {"mesh": None, "max_rows": 8} | options
    return ours().TunixRollout(
        rollout_actor=module,
        tokenizer=tokenizer(),
        rollout_config=config or settings(),
        **options,
    )


def own(module):
    """Tunix's own rollout engine."""
    config = module.config
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    cache = tunix("rl.rollout.base_rollout").CacheConfig(64, *sizes)
    return tunix("rl.rollout.vanilla_rollout").VanillaRollout(module, tokenizer(), cache)


@pytest.mark.parametrize("name", MODULES)
def test_weights_are_those_of_the_module_and_come_back_bit_for_bit(name):
    module = filled(name)
    model = ours().loaded_model(module, 128)
    tokens = np.random.default_rng(0).integers(3, VOCAB, (2, 24)).astype(np.int32)
    positions = np.broadcast_to(np.arange(24), (2, 24))
    sees = np.broadcast_to(np.tril(np.ones((24, 24), bool)), (2, 24, 24))
    expected, _ = module(jnp.asarray(tokens), jnp.asarray(positions), None, jnp.asarray(sees))
    found = Decoder(model.config).apply(model.params, tokens, method="causal")
    np.testing.assert_allclose(found, expected, atol=5e-5)
    other = fill(MODULES[name](), seed=2)
    assert not same(weights(other), weights(module))
    ours().give_weights(other, model)
    assert same(weights(other), weights(module))


@pytest.mark.parametrize("name", ["Llama 3", "Qwen 3", "Gemma 3"])
def test_samples_are_those_of_tunix(name):
    """Greedy: tokens, texts, log-probabilities and padded prompts; some stop before the end."""
    module = filled(name)
    expected = own(module).generate(PROMPTS, settings())
    rollout = rollout_of(module)
    found = rollout.generate(PROMPTS, settings())
    assert found.text == expected.text
    np.testing.assert_array_equal(
        found.left_padded_prompt_tokens, expected.left_padded_prompt_tokens
    )
    for row, tokens in enumerate(expected.tokens):
        assert EOS not in tokens
        np.testing.assert_array_equal(found.tokens[row], tokens)
        assert found.logprobs[row].shape == tokens.shape
        np.testing.assert_allclose(found.logprobs[row], expected.logprobs[row], atol=1e-4)
    check_logprobs(rollout, own(module), found)
    longer = rollout.generate(["x" * 30], settings())
    np.testing.assert_array_equal(
        longer.left_padded_prompt_tokens,
        own(module).generate(["x" * 30], settings()).left_padded_prompt_tokens,
    )
    rollout.close()


def check_logprobs(rollout, other, output):
    """Both compute the same log-probabilities of the tokens of completions, also of sampled ones."""
    completions = np.full((len(output.tokens), 12), PAD, np.int32)
    for row, tokens in enumerate(output.tokens):
        completions[row, : len(tokens)] = tokens
    given = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions)
    found, expected = rollout.get_per_token_logps(*given), other.get_per_token_logps(*given)
    real = completions != PAD
    assert found.shape == expected.shape and real.any() and not np.asarray(found)[~real].any()
    np.testing.assert_allclose(np.asarray(found)[real], np.asarray(expected)[real], atol=1e-4)
    return np.asarray(found)


def test_sampled_ones():
    """Equal prompts have different samples, also where a call is repeated; the log-probabilities
    are those of the chances, at a temperature too."""
    module = filled("Llama 3")
    rollout = rollout_of(module)
    config = settings(temperature=2.0, top_p=1.0, seed=jax.random.key(3))
    first, second = (rollout.generate(["hello"] * 6, config) for _ in range(2))
    assert len({*first.text, *second.text}) == 12
    again = rollout_of(module).generate(["hello"] * 6, config)
    assert again.text == first.text
    raw = check_logprobs(rollout, own(module), first)
    model = ours().loaded_model(module, 64)
    for row, tokens in enumerate(first.tokens):
        prompt = [BOS, *Tokenizer().encode("hello")]
        logits = Decoder(model.config).apply(
            model.params, np.asarray([[*prompt, *tokens]], np.int32), method="causal"
        )
        chances = jax.nn.log_softmax(logits[0, len(prompt) - 1 : -1] / 2.0)
        expected = np.take_along_axis(np.asarray(chances), tokens[:, None], 1)[:, 0]
        np.testing.assert_allclose(first.logprobs[row], expected, atol=1e-4)
        assert np.abs(raw[row, : len(tokens)] - expected).max() > 0.1
    likely = settings(temperature=1.0, top_p=0.9, top_k=1, return_logprobs=False)
    output = rollout.generate(["hello"], likely)
    assert output.logprobs is None
    assert output.text == own(module).generate(["hello"], settings()).text


def has_weights_of(cluster):
    expected = ours().loaded_model(cluster.actor_trainer.model, 64)
    return same(cluster.rollout.engines[0].model.params, expected.params)


def learner(module, engine, seen):
    """Tunix's GRPO learner of a module with a rollout engine, nothing of it changed."""
    import optax

    cluster_lib = tunix("rl.rl_cluster")
    grpo = tunix("rl.grpo.grpo_learner")
    mesh = Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = cluster_lib.RLCluster(
        actor=module,
        reference=fill(llama()),
        tokenizer=Tokenizer(pad=0),  # whose log-probability the loss takes, and leaves out
        cluster_config=cluster_lib.ClusterConfig(
            role_to_mesh=dict.fromkeys(cluster_lib.Role, mesh),
            rollout_engine=engine,
            training_config=cluster_lib.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-2), eval_every_n_steps=100, max_steps=4
            ),
            rollout_config=settings(temperature=1.0, top_p=1.0),
        ),
    )

    def reward(prompts, completions, **details):
        seen.append((len(completions), has_weights_of(cluster)))
        return [float(text.count("7")) + 0.1 * number for number, text in enumerate(completions)]

    config = grpo.GRPOConfig(num_generations=4, num_iterations=2, beta=0.04)
    return cluster, grpo.GRPOLearner(cluster, config, reward)


def test_two_steps_of_grpo():
    """The engine has the learner's weights whenever it samples, and after the last step."""
    module, seen = fill(llama()), []
    before = jax.tree.map(np.array, weights(module))
    engine = functools.partial(ours().TunixRollout, max_rows=8)
    cluster, trained = learner(module, engine, seen)
    rollout = cluster.rollout
    assert isinstance(rollout, ours().TunixRollout)
    trained.train([{"prompts": np.array(each)} for each in (["hello", "abc"], ["xyz", "hello"])])
    assert seen == [(8, True)] * 2  # two updates of the weights for each
    assert not same(weights(cluster.actor_trainer.model), before) and has_weights_of(cluster)
    assert rollout.engines[0].params_version == cluster.global_steps >= 2
    rollout.close()


def test_data_groups_have_an_engine_each():
    module, mesh = filled("Llama 3"), make_mesh(data=2)
    several = rollout_of(module, on=mesh)
    assert len(several.engines) == 2
    config = settings(top_p=1.0)
    found, expected = (
        each.generate(PROMPTS, config).text for each in (several, rollout_of(module))
    )
    assert found == expected
    other = fill(llama(), seed=5)
    several.update_params(nnx.state(other, nnx.Param), (nnx.Param,))
    for engine in several.engines:
        assert same(engine.model.params, ours().loaded_model(other, 64).params)
    several.close()


def test_adapters():
    """Of attention and MLP, as Tunix computes with them; a step hands them over alone."""
    import qwix  # pyright: ignore[reportMissingImports]

    provider = qwix.LoraProvider(module_path=".*(_proj)", rank=4, alpha=6.0)
    plain = fill(llama())
    module = qwix.apply_lora_to_model(plain, provider, rngs=nnx.Rngs(0), **plain.get_model_input())
    with pytest.raises(ValueError, match="lora_alpha="):
        rollout_of(module)
    rollout = rollout_of(module, lora_alpha=6.0)
    without = rollout.generate(PROMPTS, settings()).text  # as b is 0 at first
    assert without == own(plain).generate(PROMPTS, settings()).text
    state, rng = nnx.state(module, nnx.LoRAParam), np.random.default_rng(4)

    def drawn(old):
        return jnp.asarray(0.3 * rng.standard_normal(old.shape), old.dtype)

    nnx.replace_by_pure_dict(state, jax.tree.map(drawn, nnx.to_pure_dict(state)))
    nnx.update(module, state)
    rollout.update_params(nnx.state(module, nnx.LoRAParam), (nnx.LoRAParam,))
    found, expected = (each.generate(PROMPTS, settings()) for each in (rollout, own(module)))
    assert found.text == expected.text != without
    np.testing.assert_allclose(found.logprobs[0], expected.logprobs[0], atol=1e-3)
    rollout.close()


def test_refused():
    module = filled("Llama 3")
    devices = Mesh(np.asarray(jax.devices()[:2]).reshape(2, 1), ("fsdp", "tp"))
    with pytest.raises(ValueError, match=r"has 2 devices; say how .* on=make_mesh\(tensor"):
        rollout_of(module, mesh=devices)
    with pytest.raises(ValueError, match="Gemma of the first version"):
        rollout_of(gemma2(use_post_attn_norm=False))
    rollout = rollout_of(module)
    with pytest.raises(TypeError, match="generate has the option 'images'"):
        rollout.generate(["x"], settings(), images=[])
    spoilt = fill(llama())
    spoilt.layers[0].attn.q_proj.w.set_value(jnp.full((32, 4, 8), jnp.nan))
    before = rollout.generate(["x"], settings()).text
    with pytest.raises(Exception, match="layers_0/attention/q/kernel has values that are NaN"):
        rollout.update_params(nnx.state(spoilt, nnx.Param), (nnx.Param,))
    assert rollout.generate(["x"], settings()).text == before
    rollout.close()
