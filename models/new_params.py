"""New parameters for a model that runs: checked against those that it has, and placed as those are."""

import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Sharding, SingleDeviceSharding

from jaxshare.argument_checks import shown
from jaxshare.cpu.large_pages import use_large_pages
from jaxshare.models.loading import LoadedModel
from jaxshare.models.packed import GATE_UP, QKV, kv_modules, part_sizes, unpack
from jaxshare.models.safetensors_io import largest, nested
from jaxshare.models.soundness import is_sound
from jaxshare.models.tensor_parallel import ParamPath, fit_params, param_path
from jaxshare.quantised import QuantisedTensor, concatenated, is_quantised

_sound = jax.jit(is_sound)


class ParamsError(ValueError):
    """Parameters that cannot take the place of a model's."""


@dataclasses.dataclass(frozen=True)
class _ArrayForm:
    """The form of an array on its devices: with another one a program would be compiled again.

    Attributes:
      shape, dtype, sharding: of the array.
      is_committed: whether it was put there on purpose.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding
    is_committed: bool

    @classmethod
    def of(cls, array: Array) -> "_ArrayForm":
        return cls(array.shape, array.dtype, array.sharding, array.committed)


NewParams = dict[ParamPath, tuple[Any, ...]]
"""For each parameter of a model the arrays that it is made from: several where it is packed."""


class FormerParams:
    """Parameters that a model leaves, whose memory may hold those that take their place.

    Args:
      params: {"params": ...}. Arrays that something else holds, too, stay as they are.
      new: those that take their place; arrays that are some of these stay, too.
    """

    def __init__(self, params: Mapping[str, Any], new: NewParams):
        self._arrays = {path: jax.tree.leaves(value) for path, value in _flat(params)}
        self._used = {*map(_place, jax.tree.leaves(new))}

    def take(self, path: ParamPath) -> list[Array | None]:
        """Returns the arrays of a parameter that nothing else needs, None in place of others."""
        held = self._arrays.pop(path)
        # The count of an object that a list alone holds, which depends on the interpreter.
        unheld = [object()]
        alone = [
            sys.getrefcount(held[i]) <= sys.getrefcount(unheld[0])
            and _place(held[i]) not in self._used
            for i in range(len(held))
        ]
        return [array if free else None for array, free in zip(held, alone, strict=True)]


def _place(array: Any) -> int | None:
    """The address of an array's numbers, which several arrays may have; None for other memory."""
    if isinstance(array, Array) and isinstance(array.sharding, SingleDeviceSharding):
        return array.unsafe_buffer_pointer()
    return None


class ParamsForm:
    """The form of a model's parameters. It holds no arrays.

    Args:
      model: as it runs: packed, quantised or on a mesh.
    """

    def __init__(self, model: LoadedModel):
        kv_heads = model.config.num_kv_heads // model.kv_repeats
        self._config = dataclasses.replace(model.config, num_kv_heads=kv_heads)
        self._repeats, self._mesh = model.kv_repeats, model.mesh
        self._forms = dict(_flat(jax.tree.map(_ArrayForm.of, model.params)))
        self._is_packed = any(_is_packed(path) for path in self._forms)

    def check(self, params: Any) -> NewParams:
        """Checks parameters, and computes whether all of them are finite; changes nothing.

        Args:
          params: {"params": ...}, each under the name that it has in a checkpoint's tree, whole, or
            as the model has it: packed, or with its kv heads repeated for a mesh. Arrays may be on
            any devices, or NumPy's.

        Raises:
          ParamsError: one is missing, is none of the model's, has another shape or dtype, is
            quantised in another way, or is not finite.
        """
        given = self._given(params)
        found: NewParams = {}
        for path, form in self._forms.items():
            sources = self._sources(path, given)
            for source, rows in sources.items():
                if source not in given:
                    raise ParamsError(
                        f"{_name(source)} is missing; give all {len(self._forms)} parameters of the "
                        "model, those that have not changed, too"
                    )
                _check_like(_name(source), given[source], form, rows)
            found[path] = tuple(given.pop(source) for source in sources)
        if given:
            raise ParamsError(
                f"{_name(next(iter(given)))} is no parameter of the model; leave it out"
            )
        self._check_sound(found)
        return found

    def _given(self, params: Any) -> dict[ParamPath, Any]:
        """The given parameters by their paths."""
        if not isinstance(params, Mapping) or not isinstance(params.get("params"), Mapping):
            raise ParamsError(
                f"params is {shown(params)}; give {{'params': ...}}, the tree of LoadedModel.params"
            )
        if extra := [name for name in params if name != "params"]:
            raise ParamsError(f"params has the collection {extra[0]!r}; give 'params' alone")
        given = dict(_flat(params))
        for path, value in given.items():
            for array in jax.tree.leaves(value):
                if not isinstance(array, Array | np.ndarray):
                    raise ParamsError(f"{_name(path)} is {shown(value)}; it must be an array")
                if isinstance(array, Array) and array.is_deleted():
                    raise ParamsError(
                        f"{_name(path)} was deleted, as a program does with what is donated to it; "
                        "give what that program has returned"
                    )
        if not self._is_packed and any(map(_is_packed, given)):
            return dict(_flat(unpack(params, self._config)))
        return given

    def _sources(
        self, path: ParamPath, given: Mapping[ParamPath, Any]
    ) -> dict[ParamPath, set[int]]:
        """The paths that a parameter comes from, and the numbers of rows that each may have."""
        form = self._forms[path]
        rows = form.shape[0]
        if path in given or not _is_packed(path):
            is_repeated = path[-2] in kv_modules(self._config)
            return {path: {rows, rows // self._repeats} if is_repeated else {rows}}
        sizes = part_sizes(self._config)[path[-2]]
        return {(*path[:-2], part, path[-1]): {size} for part, size in sizes.items()}

    def _check_sound(self, found: NewParams) -> None:
        """Raises ParamsError for the first parameter that is not finite."""
        # All are started before the first is waited for.
        started = [
            (path, value, None if isinstance(value, np.ndarray) else _sound(value))
            for path, values in found.items()
            for value in values
        ]
        for path, value, sound in started:
            if np.isfinite(largest(value)) if sound is None else bool(sound):
                continue
            also = ", or scales that are zero" if is_quantised(value) else ""
            raise ParamsError(
                f"{_name(path)} has values that are NaN or infinite{also}; the model keeps the "
                "parameters that it has: look for what has diverged in training"
            )

    def placed(
        self, found: NewParams, *, copy: bool = True, former: FormerParams | None = None
    ) -> dict[str, Any]:
        """Puts parameters that were checked on the devices of the model's, in their form.

        Args:
          found: that `check` has returned.
          copy: False takes arrays that have the form already as they are.
          former: parameters of the same form, whose memory is written where nothing else holds it.
            That takes a third of the time of a copy in other memory, which the system has to give.
        """
        whole, others = {}, []
        for path, values in found.items():
            spare = former.take(path) if former is not None and copy else []
            whole[path] = _written(spare, values, self._forms[path])
            if whole[path] is None:
                del spare  # it is freed before others are made
                whole[path] = self._whole(path, values, copy)
                others.append(whole[path])
        use_large_pages(jax.tree.leaves(others))
        return jax.block_until_ready({"params": nested(whole)})

    def _whole(self, path: ParamPath, values: Sequence[Any], copy: bool) -> Any:
        form, value = self._forms[path], values[0]
        if len(values) > 1:
            value, copy = _concatenated(values), False
        elif self._mesh is not None and value.shape[0] != form.shape[0]:
            value, copy = fit_params(value, path, self._config, self._mesh), False
        return jax.tree.map(lambda of, array: _placed(array, of, copy), form, value)


def _flat(params: Any) -> Iterator[tuple[ParamPath, Any]]:
    """Yields parameters with their paths; quantised ones whole."""
    for keys, value in jax.tree.leaves_with_path(params, is_leaf=is_quantised):
        yield param_path(keys)[1:], value


def _is_packed(path: ParamPath) -> bool:
    return len(path) > 1 and path[-2] in (QKV, GATE_UP)


def _name(path: ParamPath) -> str:
    return "/".join(path)


def _concatenated(values: Sequence[Any]) -> Any:
    if not is_quantised(values[0]):
        return jnp.concatenate(values)
    whole = concatenated([jax.tree.map(jnp.asarray, value) for value in values])
    assert whole is not None  # they are alike, as they were checked
    return whole


def _check_like(name: str, value: Any, form: Any, rows: set[int]) -> None:
    """Raises ParamsError unless a parameter is like the model's, but for the number of its rows."""
    if is_quantised(value) != is_quantised(form):
        has, wants = _described(value), _described(form)
        raise ParamsError(
            f"{name} is {has}, but the model's is {wants}; give parameters that are quantised as the "
            "model's are"
        )
    if value.shape[1:] != form.shape[1:] or value.shape[0] not in rows:
        raise ParamsError(
            f"{name} is {_described(value)}, but the model's is {_described(form, min(rows))}; give "
            "parameters of the same model"
        )
    if value.dtype != form.dtype:
        raise ParamsError(
            f"{name} is {_described(value)}, but the model's is of dtype {form.dtype}; convert it "
            "before, once for all engines"
        )
    if not is_quantised(value):
        return
    arrays, forms = jax.tree.leaves(value), jax.tree.leaves(form)
    alike = jax.tree.structure(value) == jax.tree.structure(form)
    alike = alike and all(
        a.dtype == b.dtype and a.shape[1:] == b.shape[1:]
        for a, b in zip(arrays, forms, strict=True)
    )
    if not alike:
        raise ParamsError(
            f"{name} is quantised as {value.format} in groups of {value.group} inputs, and the "
            f"model's as {form.format} in groups of {form.group}, or with other zeros or orders; "
            "quantise it as the model was"
        )


def _described(value: Any, rows: int | None = None) -> str:
    """A parameter in words, such as float32[64, 32]."""
    first = value.shape[:1] if rows is None else (rows,)
    shape = ", ".join(map(str, (*first, *value.shape[1:])))
    quantised = f"{value.format} codes for " if isinstance(value, QuantisedTensor) else ""
    return f"{quantised}{np.dtype(value.dtype).name}[{shape}]"


def _written(spare: list[Array | None], values: Sequence[Any], form: Any) -> Any:
    """A parameter made of some, in the memory of a former one; None where that cannot be."""
    forms = jax.tree.leaves(form)
    parts = [jax.tree.leaves(value) for value in values]
    of_each = [*zip(*parts, strict=True)]
    if len(spare) != len(forms) or (len(values) > 1 and is_quantised(form)):
        return None
    for array, parts_of_one, one in zip(spare, of_each, forms, strict=True):
        if array is None or not all(_is_beside(part, one) for part in parts_of_one):
            return None
    made = [_write(spare.pop(0), parts_of_one) for parts_of_one in of_each]
    return jax.tree.unflatten(jax.tree.structure(form), made)


def _is_beside(array: Any, form: _ArrayForm) -> bool:
    """True if a program takes an array beside one of a form as it is, and gives one of that form."""
    if not isinstance(form.sharding, SingleDeviceSharding):
        return False
    if not isinstance(array, Array):
        return True
    return array.sharding == form.sharding and (form.is_committed or not array.committed)


@functools.partial(jax.jit, donate_argnames="former", keep_unused=True)
def _write(former: Array, parts: Sequence[Any]) -> Array:
    """Arrays one after the other, in the memory of another of the whole's shape."""
    whole = jnp.concatenate(parts) if len(parts) > 1 else jnp.copy(parts[0])
    return lax.convert_element_type(whole, former.dtype)  # also where the type is weak


def _placed(array: Any, form: _ArrayForm, copy: bool) -> Array:
    """An array in a form; of memory of its own, with `copy`."""
    if not isinstance(array, Array):
        # A device may use NumPy's memory as it is, and what is there can be changed.
        array = np.array(array)
        return jax.device_put(array, form.sharding if form.is_committed else None)
    if array.weak_type:
        array, copy = array.astype(array.dtype), False
    if form.is_committed:
        if copy and array.sharding != form.sharding:  # a part may be where it belongs already
            array, copy = jnp.copy(array), False
        return jax.device_put(array, form.sharding, may_alias=not copy)
    if array.committed:  # only what is not on a device yet can be put there uncommitted
        return jax.device_put(np.array(array))
    return jnp.copy(array) if copy else array
