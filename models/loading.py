"""Loading a model, its tokenizer and its generation settings from a folder or the Hugging Face hub.

Weights are read from safetensors, GGUF or Orbax files: nothing pickled is loaded, and code in a
checkpoint is never run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Float32

from jaxshare import compile_cache
from jaxshare.cache import KVCache
from jaxshare.compile_time import report_compiles
from jaxshare.cpu.large_pages import use_large_pages
from jaxshare.deprecated import renamed
from jaxshare.layout import Layout
from jaxshare.models import layers, orbax_io
from jaxshare.models.adapters.adapter_params import AdapterParams
from jaxshare.models.adapters.loaded import load_adapters, named_adapter
from jaxshare.models.adapters.low_rank import ADAPTERS
from jaxshare.models.adapters.places import Adapter, Adapters
from jaxshare.models.beside_weights import generation_of, tokenizer_of, workers_of
from jaxshare.models.config import ModelConfig
from jaxshare.models.config_fields import Fields
from jaxshare.models.fingerprint import bit_sums
from jaxshare.models.generation_config import Generation
from jaxshare.models.gguf import params as gguf_params
from jaxshare.models.layers import Decoder
from jaxshare.models.packed import pack, unpack
from jaxshare.models.partial_reads import PartialReader, can_be_read_in_parts
from jaxshare.models.quantisation.settings import quantisation_of
from jaxshare.models.safetensors_files import stored_tensors
from jaxshare.models.safetensors_io import (
    DTYPES,
    is_checked,
    match_tensors,
    read_params,
)
from jaxshare.models.sources import FILES, FILES_WITHOUT_WEIGHTS, Source, find, opened
from jaxshare.models.tensor_names import Parameter, expected_tensors
from jaxshare.models.tensor_parallel import (
    ParamPath,
    ShardedDecoder,
    fit,
    fit_params,
    params_on,
    shard_param,
    shard_params,
)
from jaxshare.quantised import is_quantised
from jaxshare.quantised_cache import check_approximation
from jaxshare.sharding import DATA, axis_size, data_groups

if TYPE_CHECKING:
    from jaxshare.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
      config: its shape and variant.
      params: {"params": ...}, as `Decoder.apply` takes them. On a single GPU projections of the same
        input are packed; see `named_params`.
      tokenizer: a `Tokenizer` with the chat template, or None if the folder has none. One of
        transformers may take its place.
      generation: stop tokens and sampling defaults.
      workers: the contents of the folder's workers.json, the texts that workers need, or None if
        it has no such file.
      mesh: the devices that hold the parameters, or None for one device. Caches are created with
        the same mesh.
      kv_repeats: the number of times `config` has each kv head of the checkpoint, because there are
        more devices than kv heads.
      name: the folder or hub id it was loaded from; "" for a model that was not loaded.
      approximate_kv: the format, "int8" or "fp8", in which caches of the model keep keys and values,
        so that its results are approximate; None for exact ones.
      adapters: those that passes can add by row; None for a model without places for them.
      adapter: the one of rows that name none; None for the model itself. See `using`.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: "Tokenizer | Any | None"
    generation: Generation
    workers: dict[str, Any] | None = None
    mesh: Mesh | None = None
    kv_repeats: int = 1
    name: str = ""
    approximate_kv: str | None = None
    adapters: Adapters | None = None
    adapter: Adapter | None = None

    def __post_init__(self):
        check_approximation("approximate_kv", self.approximate_kv)

    def __repr__(self) -> str:
        """A line: what it was loaded from, its architecture, and its size."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params, is_leaf=is_quantised))
        where = "" if self.mesh is None else f" on {dict(self.mesh.shape)}"
        kind, leaves = self.config.architecture, jax.tree.leaves(self.params, is_leaf=is_quantised)
        forms = {type(leaf).__name__ for leaf in leaves if is_quantised(leaf)}
        form = f", quantised ({', '.join(sorted(forms))})" if forms else ""
        cache = f", {self.approximate_kv} cache" if self.approximate_kv else ""
        size = f"{count:,} parameters, {self.dtype}{form}{cache}"
        return f"<LoadedModel {self.name!r}: {kind}, {size}{where}>"

    @property
    def module(self) -> Decoder | ShardedDecoder:
        """The module that takes `params`: a `Decoder` or, on a mesh, a `ShardedDecoder`."""
        return Decoder(self.config) if self.mesh is None else ShardedDecoder(self.config, self.mesh)

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of `module` in passes over a cache: `params`, and matrices of adapters."""
        if self.adapters is None:
            return self.params
        return {**self.params, ADAPTERS: self.adapters.arrays}

    @property
    def dtype(self) -> np.dtype:
        """The dtype of plain parameters, and of cached keys and values where these are exact."""
        return jax.tree.leaves(self.params, is_leaf=is_quantised)[0].dtype

    @property
    def named_params(self) -> dict[str, Any]:
        """The parameters with a name for each of a checkpoint's, whether `params` are packed or not."""
        return unpack(self.params, self.config)

    def on(self, mesh: Mesh) -> "LoadedModel":
        """Returns the model with its parameters sharded over a mesh.

        Everything that takes a model takes the result. See `jaxshare.sharding.make_mesh`.

        Raises:
          ValueError: heads or MLP that do not divide over the mesh, or a model that is on one
            already.
        """
        if self.mesh is not None:
            raise ValueError("the model is on a mesh already; load it again to put it on another")
        if self.adapters is not None:
            raise ValueError("the model has adapters; put it on the mesh first, and add them then")
        fitted = fit(self.config, mesh)
        return dataclasses.replace(
            self,
            config=fitted,
            params=shard_params(self.named_params, self.config, mesh),
            mesh=mesh,
            kv_repeats=fitted.num_kv_heads // self.config.num_kv_heads,
        )

    def replicas(self) -> "list[LoadedModel]":
        """Returns the model once for each data group of its mesh, on that group's devices.

        Nothing is copied.
        """
        if self.mesh is None or axis_size(self.mesh, DATA) == 1:
            return [self]
        return [self._on_group(mesh) for mesh in data_groups(self.mesh)]

    def _on_group(self, mesh: Mesh) -> "LoadedModel":
        adapters = self.adapters and self.adapters.on_group(mesh)
        params = params_on(self.params, mesh)
        return dataclasses.replace(self, params=params, mesh=mesh, adapters=adapters)

    def with_adapters(
        self,
        adapters: Mapping[str, str | os.PathLike | AdapterParams] | None = None,
        *,
        max_adapters: int | None = None,
        max_rank: int | None = None,
    ) -> "LoadedModel":
        """Returns the model with places for adapters, and these in them, in place of any it had.

        Args:
          adapters: by name; folders of PEFT files, or their matrices.
          max_adapters: places; default as many as are given, at least 1.
          max_rank: the largest rank that fits; default the largest that is given, or else 16.

        Raises:
          FileNotFoundError, AdapterError: see `jaxshare.models.load_adapter`; or more adapters, or a
            larger rank, than there is to be room for.
          ValueError: the model is on devices of several processes.
        """
        sizes = {"max_adapters": max_adapters, "max_rank": max_rank}
        of_model = self.config_of_checkpoint, self.dtype, self.module
        found = load_adapters(adapters or {}, *of_model, **sizes)
        return dataclasses.replace(self, adapters=found, adapter=None)

    def using(self, name: str | None) -> "LoadedModel":
        """Returns the model whose rows have one of its adapters where they name none.

        Raises:
          AdapterError: it has none of this name.
        """
        return dataclasses.replace(self, adapter=named_adapter(self.adapters, name))

    @property
    def adapter_place(self) -> int:
        """The place of its adapter among those of the model, 0 for none."""
        return self.adapter.place if self.adapter else 0

    def adapted(self, layout: Layout, places: Sequence[int] | None = None) -> Layout:
        """Returns a layout with the places of its rows' adapters.

        Args:
          layout: of a pass.
          places: of the first rows; the others have none. By default all rows have `adapter`.
        """
        if self.adapters is None:
            return layout
        rows = np.zeros(layout.num_rows, np.int32)
        if places is None:
            rows[:] = self.adapter_place
        else:
            rows[: len(places)] = places
        return dataclasses.replace(layout, adapters=rows)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The identity of the model in saved files: a hash of its shape and its parameters' bits.

        The same on every mesh; it differs between dtypes of the parameters, and with an adapter. Its
        first 32 digits do not tell parameters from the same ones in another order: they are the whole fingerprint of
        files of former versions (`same_fingerprint`).
        """
        config = self.config_of_checkpoint
        own = self.config.for_context(self.config.max_positions)
        sums = bit_sums(self.params, own, self.kv_repeats)
        target = None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())
        on_host = [np.asarray(value) for value in jax.tree.leaves(jax.device_put(sums, target))]
        plain, weighted = np.stack(on_host).T
        shape = repr(config.for_context(config.max_positions)).encode()
        former = hashlib.blake2b(shape + plain.tobytes(), digest_size=16).hexdigest()
        whole = former + hashlib.blake2b(weighted.tobytes(), digest_size=8).hexdigest()
        return self.adapter.digest.hex() + whole if self.adapter else whole

    @functools.cached_property
    def trace_fingerprint(self) -> str:
        """The identity of the model in traces: a hash of its shape and its tokenizer's tokens.

        The same on every mesh, and while its parameters are trained.
        """
        tokens = sorted(self.tokenizer.get_vocab().items()) if self.tokenizer else []
        config = self.config_of_checkpoint
        every = dataclasses.asdict(config)
        told = {name: every[name] for name in config.described()}
        text = json.dumps([told, tokens], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def config_of_checkpoint(self) -> ModelConfig:
        """The configuration with each kv head once."""
        return dataclasses.replace(
            self.config, num_kv_heads=self.config.num_kv_heads // self.kv_repeats
        )

    def for_context(self, positions: int) -> "LoadedModel":
        """Returns the model for runs of at most `positions` tokens (`ModelConfig.for_context`)."""
        return dataclasses.replace(self, config=self.config.for_context(positions))

    def forward(
        self,
        tokens: ArrayLike | Sequence[Any],
        count: ArrayLike | Sequence[Any],
        cache: KVCache,
        layout: Layout,
        *,
        every: bool = False,
        checked: bool = True,
    ) -> tuple[Float32[Array, "R V"] | Float32[Array, "R T V"], KVCache]:
        """Runs one forward pass over a shared cache; see `jaxshare.models.layers.forward`.

        Args:
          tokens: int32[R, T], new tokens of each row, padded on the right.
          count: int32[R], the number of real tokens of each row.
          cache: the cached tokens; donated.
          layout: the blocks that each row sees, and the places of adapters; without these all rows
            have `adapter`.
          every: return the logits of every new token.
          checked: False does not read the values of arguments, for callers that know them.

        Returns:
          The logits of each row's last real token ([R, T, V] with `every`), and the cache with the
          new tokens in it.
        """
        layout = layout if layout.adapters is not None else self.adapted(layout)
        given = tokens, count, cache, layout
        how = {"every": every, "checked": checked, "module": self.module}
        return layers.forward(self.config, self.variables, *given, **how)


def load(
    path: str | os.PathLike,
    dtype: Any = None,
    revision: str | None = None,
    mesh: Mesh | None = None,
    *,
    check: bool | None = None,
    approximate_kv: str | None = None,
) -> LoadedModel:
    """Loads a checkpoint in Hugging Face form, in the Orbax form that `jaxshare convert` writes, or a
    GGUF file. Switches on the persistent compilation cache (`jaxshare.compile_cache`), and that
    programs are named on stderr while they are compiled (`jaxshare.compile_time`).

    Args:
      path: a folder, a hub id such as "Qwen/Qwen3-0.6B", a file that ends in .gguf, or "embedded"
        for the small model that comes with the package.
      dtype: of the parameters: bfloat16, float16 or float32, by name or as a dtype. None is the
        checkpoint's own: that of config.json, or else of its tensors. Quantised parameters stay as
        the checkpoint has them; it is the dtype of the numbers that they stand for.
      revision: a branch, tag or commit on the hub.
      mesh: the devices to put the model on. Each process reads the parts alone that its devices
        have; no device ever holds more.
      check: refuse parameters that are NaN or infinite. None is True, or False where the
        environment variable JAXSHARE_CHECK_WEIGHTS is "off".
      approximate_kv: "int8" or "fp8" for caches that keep keys and values as codes of eight bits, in
        about half the memory of bfloat16. Results are then approximate. None for exact ones.

    Raises:
      FileNotFoundError: no such folder, or a required file is missing.
      ConfigError: config.json describes a model that is not supported, or a settings file is not a
        JSON object.
      ImportError: a GGUF file, without the package that reads it.
      CheckpointError: weights that are truncated, corrupt, not those of the model or not finite.
      ValueError: an unknown dtype or approximation, a tokenizer that cannot be read, or heads or MLP
        that do not divide over the mesh.
    """
    check_approximation("approximate_kv", approximate_kv)
    compile_cache.enable()
    report_compiles()
    asked = None if dtype is None else _dtype(dtype)
    check = is_checked() if check is None else check
    source = opened(find(path, revision, FILES))
    fitted = source.config if mesh is None else fit(source.config, mesh)
    read, dtypes = _reader(source, fitted, mesh, check)
    generation, tokenizer = generation_of(source), tokenizer_of(source)
    params = read(_checkpoint_dtype(source.settings, dtypes) if asked is None else asked)
    if mesh is None and jax.default_backend() == "gpu":
        params = pack(params, source.config)
    use_large_pages(jax.tree.leaves(params))
    return LoadedModel(
        fitted,
        params,
        tokenizer,
        generation,
        workers_of(source.place),
        mesh,
        fitted.num_kv_heads // source.config.num_kv_heads,
        os.fspath(path),
        approximate_kv,
    )


def _reader(
    source: Source, fitted: ModelConfig, mesh: Mesh | None, check: bool
) -> tuple[Callable[[jnp.dtype], dict[str, Any]], set[jnp.dtype]]:
    """The function that reads the parameters in a dtype, and the dtypes that they are stored in."""
    folder, config = source.place, source.config
    if orbax_io.is_checkpoint(folder):
        found = orbax_io.match_metadata(folder, expected_tensors(config))
        dtypes = {jnp.dtype(value.dtype) for value in found.values() if not is_quantised(value)}
        restore = functools.partial(orbax_io.restore_params, mesh=mesh, check=check)
        return functools.partial(restore, folder, config, found), dtypes
    module = None if mesh is None else ShardedDecoder(fitted, mesh)
    put = module and functools.partial(_put_on_mesh, config, module)
    if source.gguf:
        places = gguf_params.match(source.gguf, config)
        read = functools.partial(gguf_params.read, source.gguf, places, put=put, check=check)
        return read, {jnp.dtype(gguf_params.stored_dtype(source.gguf))}
    stored = stored_tensors(folder)
    expected = match_tensors(config, stored, folder, quantisation_of(folder))
    # Those that stay quantised do not count.
    parts = (part for tensor in expected.values() for part in tensor.parts)
    names = {stored[part.name].dtype for part in parts if not part.is_quantised}
    dtypes = {jnp.dtype(DTYPES.get(name, jnp.bfloat16)) for name in names}
    if module is None:
        return functools.partial(read_params, stored, expected, check=check), dtypes
    in_parts = {n: tensor for n, tensor in expected.items() if can_be_read_in_parts(tensor, stored)}
    whole = {n: tensor for n, tensor in expected.items() if n not in in_parts}

    def read(dtype: jnp.dtype) -> dict[str, Any]:
        done = PartialReader(stored, in_parts, config, module, dtype, check).arrays()
        return read_params(stored, whole, dtype, put, check, done)

    return read, dtypes


def outline(path: str | os.PathLike, revision: str | None = None) -> LoadedModel:
    """Loads a model without its parameters: `params` is empty.

    For a process that reads prompts while others run the model. Arguments and errors as in `load`,
    but for those of weights.
    """
    source = opened(find(path, revision, FILES_WITHOUT_WEIGHTS))
    return LoadedModel(
        source.config,
        {},
        tokenizer_of(source),
        generation_of(source),
        workers_of(source.place),
        name=os.fspath(path),
    )


def _put_on_mesh(
    config: ModelConfig, module: ShardedDecoder, path: ParamPath, value: Parameter
) -> Any:
    fitted = fit_params(value, path, config, module.mesh)
    return shard_param(fitted, path, module)


def _dtype(value: Any) -> jnp.dtype:
    with contextlib.suppress(TypeError):
        if jnp.dtype(value) in [jnp.dtype(known) for known in DTYPES.values()]:
            return jnp.dtype(value)
    raise ValueError(
        f"dtype is {value}, but parameters must be bfloat16, float16 or float32; to quantise them, "
        "`jaxshare convert MODEL FOLDER --quantize int8` writes a folder to load"
    )


def _checkpoint_dtype(settings: Fields, stored: set[jnp.dtype]) -> jnp.dtype:
    for name in ("dtype", "torch_dtype"):
        value = settings.take(name, str, None)
        if value is not None and value != "auto":
            try:
                return _dtype(value.removeprefix("torch."))
            except ValueError as error:
                raise settings.error(
                    name, "it must be bfloat16, float16 or float32: pass dtype to load"
                ) from error
    # float32 represents the other two exactly.
    return stored.pop() if len(stored) == 1 else jnp.dtype(jnp.float32)


__getattr__ = renamed(__name__, {"local_folder": "jaxshare.models.sources.local_folder"})
