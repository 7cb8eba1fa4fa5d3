"""Groups: decode states that run side by side along the `data` axis of a mesh, in one dispatch
(data parallel).

    # a DecodeState for each, of the same shapes
    groups = [prepare(replica, prompts) for replica, prompts in zip(model.replicas(), parts)]
    state = stack(groups, model.mesh)
    state = decode_groups(model.module, model.params, state, passes=64)
    texts = [group.outputs() for group in unstack(state)]

Each group runs its own loop: none waits for another, and they end after different numbers of
passes.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxshare.decoding.loop import decode
from jaxshare.decoding.sampling import vocab_axis, vocab_spec
from jaxshare.decoding.state import DecodeModel, DecodeState
from jaxshare.sharding import DATA, axis_size, data_groups


def stack(states: Sequence[DecodeState], mesh: Mesh) -> DecodeState:
    """Joins the states of all groups into one: every array has a new first dimension, which is cut
    over `data`. Arrays on a group's devices stay there.

    Args:
      states: one for each group, all of the same shapes; the i-th is on the i-th mesh of
        `data_groups(mesh)`.
      mesh: of all groups.

    Raises:
      ValueError: another number of states, or states that differ in shape.
    """
    if len(states) != axis_size(mesh, DATA):
        raise ValueError(
            f"there are {len(states)} states, but the mesh has {axis_size(mesh, DATA)} data "
            "groups; give one state a group"
        )
    meshes = data_groups(mesh)
    states = [dataclasses.replace(s, cache=dataclasses.replace(s.cache, mesh=mesh)) for s in states]
    for i, other in enumerate(states):
        if jax.tree.map(_shape, other) != jax.tree.map(_shape, states[0]):
            raise ValueError(
                f"the state of group {i} has other shapes than that of group 0; give both the same "
                "numbers of rows, blocks and tokens"
            )

    def joined(spec: PartitionSpec, *parts: Array) -> Array:
        shards = [
            shard.data[None]
            for part, own in zip(parts, meshes, strict=True)
            for shard in jax.device_put(part, NamedSharding(own, spec)).addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(
            (len(parts), *parts[0].shape), NamedSharding(mesh, PartitionSpec(DATA, *spec)), shards
        )

    return jax.tree.map(joined, _specs(states[0], mesh), *states)


def unstack(state: DecodeState) -> list[DecodeState]:
    """The state of each group, on its devices."""
    mesh = _mesh(state)

    def part(own: Mesh, spec: PartitionSpec, whole: Array) -> Array:
        devices = {*own.devices.flat}
        shards = [shard.data[0] for shard in whole.addressable_shards if shard.device in devices]
        return jax.make_array_from_single_device_arrays(
            whole.shape[1:], NamedSharding(own, spec), shards
        )

    groups = []
    for own in data_groups(mesh):
        group = jax.tree.map(functools.partial(part, own), _specs(state, mesh), state)
        groups.append(dataclasses.replace(group, cache=dataclasses.replace(group.cache, mesh=own)))
    return groups


def decode_groups(
    model: DecodeModel, params: Any, state: DecodeState, *, passes: int, width: int = 1
) -> DecodeState:
    """Runs `decode` for all groups at once: up to `passes` forward passes of each.

    Args:
      model, params: on the mesh of all groups; `model.specs(params)` says how they are cut
        (`ShardedDecoder`).
      state: from `stack`; its caches and logits are donated.
      passes, width: as for `decode`.
    """
    rest = dataclasses.replace(state, cache=None, logits=None, top_logits=None)  # pyright: ignore[reportArgumentType]
    return _decode_groups(
        model, params, state.cache, state.logits, state.top_logits, rest, passes, width
    )


@functools.partial(
    jax.jit,
    static_argnames=("model", "passes", "width"),
    donate_argnames=("cache", "logits", "top_logits"),
)
def _decode_groups(
    model: Any,
    params: Any,
    cache: Any,
    logits: Array,
    top_logits: Any,
    rest: DecodeState,
    passes: int,
    width: int,
) -> DecodeState:
    state = dataclasses.replace(rest, cache=cache, logits=logits, top_logits=top_logits)
    mesh = _mesh(state)
    leaves, form = jax.tree.flatten(state)
    specs = jax.tree.leaves(
        jax.tree.map(lambda spec: PartitionSpec(DATA, *spec), _specs(state, mesh))
    )
    # Arrays without elements stay outside: jaxlib 0.11.2 crashes over those that a shard_map is
    # given.
    full = [i for i, leaf in enumerate(leaves) if leaf.size]

    def group(params: Any, given: list[Array]) -> list[Array]:
        own = [jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        for i, leaf in zip(full, given, strict=True):
            own[i] = leaf[0]
        decoded = jax.tree.leaves(
            decode(model, params, form.unflatten(own), passes=passes, width=width)
        )
        return [decoded[i][None] for i in full]

    cut = [specs[i] for i in full]
    decoded = jax.shard_map(
        group, mesh=mesh, in_specs=(model.specs(params), cut), out_specs=cut, check_vma=False
    )(params, [leaves[i] for i in full])
    for i, leaf in zip(full, decoded, strict=True):
        leaves[i] = leaf
    return form.unflatten(leaves)


def _specs(state: DecodeState, mesh: Mesh) -> DecodeState:
    """The PartitionSpec of each array of a group's state over the devices of the group."""
    logits = vocab_spec(vocab_axis(mesh, state.logits.shape[-1]))
    return dataclasses.replace(
        jax.tree.map(lambda _: PartitionSpec(), state), cache=state.cache.specs, logits=logits
    )


def _mesh(state: DecodeState) -> Mesh:
    if state.cache.mesh is None:
        raise ValueError("the state is on no mesh; make it with `stack`")
    return state.cache.mesh


def _shape(array: Array) -> tuple[tuple[int, ...], jnp.dtype]:
    return array.shape, array.dtype
