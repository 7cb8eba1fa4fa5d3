"""A rollout engine for Tunix (0.1.7): its learners sample with engines of this library.

    ClusterConfig(rollout_engine=TunixRollout, ...)
    ClusterConfig(rollout_engine=functools.partial(TunixRollout, max_rows=128), ...)

Tunix takes a class of `tunix.rl.rollout.base_rollout.BaseRollout` for the name of a rollout engine;
nothing of it is changed or replaced. This module imports Tunix: `pip install 'jaxshare[tunix]'`.
"""

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxshare import Sampler
from jaxshare.extras import MissingExtraError
from jaxshare.models import Decoder, Generation, LoadedModel, ModelConfig
from jaxshare.seeds import stream_seed
from jaxshare.serving.branches.prompt_tree import Branch
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.rollouts.sampling import rollout
from jaxshare.serving.rollouts.tunix_weights import from_arrays, merged, model_config, to_arrays
from jaxshare.serving.rollouts.updates import update_engines

try:
    from tunix.rl.rollout import base_rollout  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "tunix":
        raise
    raise MissingExtraError(
        "TunixRollout takes the package google-tunix, which is not installed", "tunix"
    ) from None


class TunixRollout(base_rollout.BaseRollout):
    """Rollouts of Tunix's learners, sampled by an engine, or by one for each data group.

    Equal prompts of one call share their keys and values. Tokens, texts, log-probabilities and
    padded prompts are those of Tunix's own `VanillaRollout`: completions end before their stop
    token; without `top_p`, or with temperature 0, the likeliest tokens are taken.

    Args:
      rollout_actor: a Llama3, Qwen2, Qwen3, Gemma (2) or Gemma3 of Tunix. Its weights are copied.
      tokenizer: Tunix's adapter of a tokenizer.
      mesh: Tunix's devices for rollouts.
      rollout_config: for training. `data_type` is the engine's dtype, by default that in which the
        actor computes. Texts of up to `kv_cache_size` tokens are taken.
      on: a mesh (`jaxshare.sharding.make_mesh`) for the engine; each of its data groups has an
        engine. By default JAX's first device, where `mesh` has no more than one.
      lora_alpha: of the actor's adapters, which are merged into the engine's weights.
      max_rows, engine: as for `Engine`.

    Raises:
      ValueError: an actor that no model here computes, with adapters that cannot be merged, or kept
        in host memory; or several devices without `on`.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Mesh | None,
        rollout_config: Any,
        *,
        on: Mesh | None = None,
        lora_alpha: float | None = None,
        max_rows: int = 64,
        **engine: Any,
    ):
        if on is None and mesh is not None and mesh.size > 1:
            raise ValueError(
                f"Tunix's mesh for rollouts has {mesh.size} devices; say how the engine divides the "
                "model over them: functools.partial(TunixRollout, on=make_mesh(tensor=...))"
            )
        self._tokenizer, self._calls = tokenizer, itertools.count()
        self._actor, self._alpha = rollout_actor, lora_alpha
        longest = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        positions = max(longest, rollout_config.kv_cache_size)
        self._config = _config(rollout_actor, positions)
        arrays = _arrays(rollout_actor)
        if any(each.sharding.memory_kind == "pinned_host" for each in arrays.values()):
            raise ValueError(
                "the actor's weights are in host memory; leave offload_to_cpu out: the engine keeps "
                "weights of its own on its devices"
            )
        computes_in = getattr(rollout_actor.config, "dtype", None)
        self._dtype = rollout_config.data_type or computes_in
        model = LoadedModel(self._config, self._read(arrays), None, Generation())
        self.engines = [
            Engine(each, max_rows=max_rows, **engine)
            for each in ([model] if on is None else model.on(on).replicas())
        ]

    def _read(self, arrays: Mapping[str, Array]) -> dict[str, Any]:
        return from_arrays(merged(arrays, self._alpha), self._config, self._dtype)

    def generate(self, prompts: list[str], rollout_config: Any, **options: Any) -> Any:
        """Samples a completion of each prompt; see `BaseRollout.generate`.

        A seed is of all calls together: the next one with it gives other samples.

        Returns:
          RolloutOutput. `logprobs`, with `return_logprobs`, are those of the chances that tokens
          were drawn with; where the likeliest are taken, those of the model itself.

        Raises:
          TypeError: an option, which no engine here has.
          ValueError: see `rollout`.
        """
        if options:
            raise TypeError(f"generate has the option {min(options)!r}, which the engine has not")
        tokens, sampler = (
            [self._encode(prompt) for prompt in prompts],
            self._sampler(rollout_config),
        )
        is_greedy, rows_of = sampler.temperature == 0, dict[tuple[int, ...], list[int]]()
        for row, each in enumerate(tokens):
            rows_of.setdefault(each, []).append(row)
        batch = rollout(
            self.engines,
            [Branch(each, n=1 if is_greedy else len(rows)) for each, rows in rows_of.items()],
            sampler=sampler,
            max_new_tokens=rollout_config.max_tokens_to_generate,
            seed=stream_seed(_seed(rollout_config.seed), next(self._calls), 0),
        )
        stops, of_each, found = {*sampler.stop_token_ids}, [*rows_of.values()], {}
        for each in batch.completions:
            rows = of_each[each.prompt] if is_greedy else of_each[each.prompt][each.index :][:1]
            found |= dict.fromkeys(rows, _without_stop(each, stops, raw=is_greedy))
        outputs = [found[row] for row in range(len(prompts))]
        return base_rollout.RolloutOutput(
            text=[self._tokenizer.decode(sampled.tolist()) for sampled, _ in outputs],
            logits=None,
            tokens=[sampled for sampled, _ in outputs],
            left_padded_prompt_tokens=self._padded(tokens, rollout_config.max_prompt_length or 0),
            logprobs=[logprobs for _, logprobs in outputs]
            if rollout_config.return_logprobs
            else None,
        )

    def _encode(self, prompt: str) -> tuple[int, ...]:
        """The tokens of a prompt, with one BOS, as Tunix's sampler has them."""
        bos = self._tokenizer.bos_id()
        tokens = [*([bos] if bos else []), *self._tokenizer.encode(prompt)]
        return tuple(map(int, self._tokenizer.dedup_bos_ids(tokens)))

    def _sampler(self, config: Any) -> Sampler:
        stops = tuple(map(int, config.eos_tokens or [self.eos_id()]))
        if config.top_p is None or config.temperature == 0:
            return Sampler(stop_token_ids=stops)
        top_k = max(config.top_k or 0, 0)
        return Sampler(
            float(config.temperature), top_k=top_k, top_p=config.top_p, stop_token_ids=stops
        )

    def _padded(self, tokens: Sequence[tuple[int, ...]], length: int) -> np.ndarray:
        """Prompts with padding on their left, int32[N, P], P as Tunix's sampler has it."""
        longest = max(map(len, tokens))
        if length < longest:
            length = 2 ** math.ceil(math.log2(longest))
        padded = np.full((len(tokens), length), self.pad_id(), np.int32)
        for row, each in zip(padded, tokens, strict=True):
            row[length - len(each) :] = each
        return padded

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any) -> Array:
        """Returns log-probabilities of tokens under the weights that the engine has.

        Args:
          prompt_tokens: int[N, P], padded on the left.
          completion_tokens: int[N, C], padded on the right.

        Returns:
          float32[N, C], at temperature 1; 0 for padding.
        """
        prompts, sampled = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        rows, width = prompts.shape[0], sampled.shape[1]
        lengths = (prompts != self.pad_id()).sum(axis=1)
        # Padding may be no token of the model's; what follows a row's tokens changes nothing.
        tokens = np.zeros((rows, prompts.shape[1] + width), np.int32)
        for row, (size, prompt, after) in enumerate(zip(lengths, prompts, sampled, strict=True)):
            tokens[row, :size] = prompt[prompt != self.pad_id()]
            tokens[row, size : size + width] = np.where(after == self.pad_id(), 0, after)
        model = self.engines[0].model
        found = _logprobs(model.config, model.params, tokens, lengths, width)
        return jnp.where(jnp.asarray(sampled) != self.pad_id(), found, 0.0)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Gives the engines the weights of a learner; requests under way end before.

        Args:
          params: the parameters of the actor, or its adapters alone, which are added to the weights
            that the actor has.
          filter_types: their kinds.

        Raises:
          ValueError: see `TunixRollout`.
          UpdateError: an engine has refused the weights, as where they are not finite, or lost them.
        """
        # On a CPU Tunix forbids copies to the host meanwhile, and some numbers are looked at there.
        with jax.transfer_guard("allow"):
            arrays = _named(params)
            if filter_types is not None and nnx.Param not in filter_types:
                arrays = _arrays(self._actor) | arrays
            update_engines(self.engines, self._read(arrays), copy=False)

    def pad_id(self) -> int:
        """The token of padding."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends a completion."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: the engine's weights are its own, and learners that see no module of their
        actor's weights here sync them after each step."""

    def close(self) -> None:
        """Ends the engines."""
        for engine in self.engines:
            engine.shutdown()


def loaded_model(module: Any, max_positions: int) -> LoadedModel:
    """Returns a model with a copy of the weights of a module of Tunix, without a tokenizer.

    Args:
      module: a Llama3, Qwen2, Qwen3, Gemma (2) or Gemma3, without adapters.
      max_positions: the longest text, in tokens.

    Raises:
      ValueError: see `TunixRollout`.
    """
    config = _config(module, max_positions)
    return LoadedModel(config, from_arrays(_arrays(module), config), None, Generation())


def give_weights(module: Any, model: LoadedModel) -> None:
    """Gives a module of Tunix the weights of a model, in the module's dtype and on its devices.

    Args:
      module: of the model's shape; see `loaded_model`.
      model: on one device, not quantised.

    Raises:
      ValueError: the module is of another model.
    """
    config = _config(module, model.config.max_positions)
    if config != model.config:
        raise ValueError(
            f"the module is {config}, but the model {model.config}; make the module with the model's "
            "settings"
        )
    state = nnx.state(module, nnx.Param)
    old = nnx.to_pure_dict(state)
    shapes = {name: array.shape for name, array in _named(old).items()}
    new = to_arrays(model.named_params, config, shapes)

    def placed(keys: Any, array: Array) -> Array:
        return jax.device_put(new[_name(keys)].astype(array.dtype), array.sharding)

    nnx.replace_by_pure_dict(state, jax.tree.map_with_path(placed, old))
    nnx.update(module, state)


def _without_stop(
    completion: Completion, stops: set[int], raw: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a completion, and their log-probabilities, without the stop token."""
    logprobs = completion.logprobs if raw else completion.processed_logprobs
    ended = bool(completion.tokens) and completion.tokens[-1] in stops
    end = len(completion.tokens) - ended
    assert logprobs is not None  # `rollout` asks for both kinds
    return np.asarray(completion.tokens[:end], np.int32), np.asarray(logprobs[:end], np.float32)


def _seed(given: Any) -> int:
    """An integer of a seed, which may be a key of JAX's; 0 for none."""
    if given is None:
        return 0
    if isinstance(given, Array) and jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        given = jax.random.key_data(given)
    return functools.reduce(lambda number, word: number << 32 | int(word), np.ravel(given), 0)


@functools.partial(jax.jit, static_argnums=(0, 4))
def _logprobs(config: Any, params: Any, tokens: Array, starts: Array, width: int) -> Array:
    """The log-probabilities of `width` tokens of each row from its start on, float32[N, width]."""
    logits: Any = Decoder(config).apply(params, tokens, method="causal")
    places = starts[:, None] + jnp.arange(width)
    of_each = jnp.take_along_axis(logits, places[..., None] - 1, axis=1)
    chosen = jnp.take_along_axis(tokens, places, axis=1)
    found = jnp.take_along_axis(of_each, chosen[..., None], axis=-1)[..., 0]
    return found - jax.nn.logsumexp(of_each, axis=-1)


def _config(module: Any, max_positions: int) -> ModelConfig:
    return model_config(type(module).__name__, getattr(module, "config", None), max_positions)


def _arrays(module: Any) -> dict[str, Array]:
    """The parameters of a module by their names, adapters among them."""
    return _named(nnx.state(module, nnx.Param))


def _named(params: Any) -> dict[str, Array]:
    pure = nnx.to_pure_dict(params) if isinstance(params, nnx.State) else params
    return {_name(keys): array for keys, array in jax.tree.leaves_with_path(pure)}


def _name(keys: Any) -> str:
    return ".".join(str(key.key) for key in keys)
