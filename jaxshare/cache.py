"""KVCache: the keys and values of all blocks, a frozen pytree; its transitions return new ones.

Physically there is one arena [K, tokens, D] for keys and one for values in every layer, that of
values with a D of 0 where a token's value is a part of its key (`CacheConfig`). A block is
an extent of all arenas: offset, length, capacity. Its keys are rotated as though the block started
at position `phase`, which is 0 for a block that was written from empty. So rows can list blocks in
any order (Hogwild! Inference section 3.4: the query is rotated instead), and a block is cut in two
without touching a key.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, Int32

from jaxshare import sharding
from jaxshare.arena import (
    ARENA,
    Appends,
    append_tokens,
    check_block,
    check_capacities,
    check_disjoint,
    check_extents,
    copy_order,
    copy_tokens,
    copy_tokens_over,
    extents,
)
from jaxshare.cache_config import CacheConfig, check_config
from jaxshare.cache_repr import BriefCache
from jaxshare.cpu.large_pages import use_large_pages
from jaxshare.faults import Fault
from jaxshare.layout import is_concrete
from jaxshare.pallas.device import import_kernels
from jaxshare.quantised_cache import Arena, approximation, check_approximation, empty_arena
from jaxshare.rope import Rope
from jaxshare.sharding import CyclicSharding, on_each


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache(BriefCache):
    """Blocks of cached keys and values. B blocks, L layers, K kv heads, D head dim.

    Attributes:
      keys, values: the arenas [K, tokens, D] and [K, tokens, _], one of each for every layer.
      offsets: where each block starts in the arena.
      lengths: tokens in each block.
      capacities: tokens that fit in each block.
      phases: the position to which each block's first key is rotated.
      faults: `Fault` flags raised inside jit; sticky.
      rope: the rotation of the keys (static).
      layer_ropes: that of each layer's keys where layers differ; else empty (static).
      mesh: the devices over which the arenas are spread, or None for one device (static). kv heads
        are cut along its axes `expert` and `tensor`, tokens dealt out along `kv` (`CyclicSharding`); all else is
        on every device.
    """

    keys: tuple[Arena, ...]
    values: tuple[Arena, ...]
    offsets: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    capacities: Int32[Array, " B"]
    phases: Int32[Array, " B"]
    faults: Int32[Array, ""]
    rope: Rope = dataclasses.field(metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(default=None, metadata={"static": True})
    layer_ropes: tuple[Rope, ...] = dataclasses.field(default=(), metadata={"static": True})

    @classmethod
    def create(
        cls,
        config: CacheConfig,
        capacities: Sequence[int],
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        *,
        mesh: Mesh | None = None,
        approximate: str | None = None,
    ) -> "KVCache":
        """Creates an empty cache.

        Args:
          config: the model's config.
          capacities: tokens that fit in each block, one entry a block. A block of capacity 0 is a
            free slot, for `fork`.
          dtype: of keys and values.
          mesh: of the model.
          approximate: "int8" or "fp8" (e4m3) to keep keys and values as codes of eight bits with a
            scale for each token and kv head, in about half the bytes of bfloat16. Results are then
            approximate: every number is rounded to a code when it is written, a key again whenever
            it is moved. Default exact.

        Raises:
          ValueError: no blocks, a negative capacity, kv heads that do not divide over the mesh, or
            an approximation that is not known.
        """
        sizes = check_capacities(capacities)
        offsets, tokens = extents(sizes)
        cache = cls.empty(config, tokens, sizes.size, dtype, mesh=mesh, approximate=approximate)
        return dataclasses.replace(
            cache,
            offsets=jax.device_put(np.array(offsets, np.int32)),
            capacities=jax.device_put(np.array(sizes, np.int32)),
        )

    @classmethod
    def empty(
        cls,
        config: CacheConfig,
        tokens: int,
        num_blocks: int,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        *,
        mesh: Mesh | None = None,
        approximate: str | None = None,
    ) -> "KVCache":
        """Creates a cache of free slots (capacity 0), which `place` gives their extents.

        Where tokens are spread over devices, `tokens` is rounded up so that all keep as many.

        Raises:
          ValueError: fewer than one token or slot, too many tokens, kv heads that do not divide
            over the mesh, or an approximation that is not known.
        """
        check_config(config)
        check_approximation("approximate", approximate)
        import_kernels()  # every program of a model has a cache before its first trace
        if tokens < 1 or num_blocks < 1:
            raise ValueError(
                f"a cache has at least 1 token and 1 block; got {tokens} and {num_blocks}"
            )
        if tokens >= 2**31:
            raise ValueError(
                f"the blocks hold {tokens} tokens in all; fewer than 2**31 can be addressed"
            )
        tokens += -tokens % CyclicSharding.over(mesh).period
        shape = config.num_kv_heads, tokens, config.head_dim
        value_shape = *shape[:2], config.value_dim
        zeros = np.zeros(num_blocks, np.int32)
        if mesh is not None:
            sharding.check_shape("the cache", shape, ARENA, mesh)
        device = None if mesh is None else sharding.sharding(mesh, ARENA)
        kind, layers = (dtype, approximate, device), range(config.num_layers)
        keys, values = (
            tuple(empty_arena(each, *kind) for _ in layers) for each in (shape, value_shape)
        )
        use_large_pages(jax.tree.leaves((keys, values)))
        return cls(
            keys=keys,
            values=values,
            offsets=jax.device_put(zeros),
            lengths=jax.device_put(zeros),
            capacities=jax.device_put(zeros),
            phases=jax.device_put(zeros),
            faults=jax.device_put(np.int32(0)),
            rope=config.rope,
            mesh=mesh,
            layer_ropes=config.layer_ropes,
        )

    @property
    def token_sharding(self) -> CyclicSharding:
        """The tokens of the arena that each device keeps."""
        return CyclicSharding.over(self.mesh)

    @property
    def specs(self) -> "KVCache":
        """The PartitionSpec of each array, in the form of a cache."""
        arena = sharding.spec(ARENA)
        return dataclasses.replace(
            jax.tree.map(lambda _: PartitionSpec(), self),
            keys=jax.tree.map(lambda _: arena, self.keys),
            values=jax.tree.map(lambda _: arena, self.values),
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotation of each layer's keys."""
        return self.layer_ropes or (self.rope,) * len(self.keys)

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.lengths.shape[0]

    @property
    def token_bytes(self) -> int:
        """Bytes of one cached token: keys and values of all layers, and their scales."""
        arrays = jax.tree.leaves((self.keys, self.values))
        return sum(a.shape[0] * a.shape[2] * a.dtype.itemsize for a in arrays)

    @property
    def approximate(self) -> str | None:
        """The format in which keys and values are approximated, or None where they are exact."""
        return approximation(self.keys[0])

    def append(
        self, layer: int, k: Float[Array, "R T K D"], v: Float[Array, "R T K _"], plan: Appends
    ) -> "KVCache":
        """Writes one layer's new keys and values at the ends of the blocks that the rows write.
        Lengths change in `advance`.

        NaN is written as 0 and an infinity as the largest number of the cache's dtype: neither may
        reach rows that do not see it. A cache that approximates quantises here.

        Args:
          layer: its number.
          k, v: new keys and values; keys not rotated yet: they are rotated here to their index in
            their block (Hogwild! appendix B).
          plan: of this pass.
        """
        keys, values = append_tokens(self.keys[layer], self.values[layer], k, v, plan)
        return dataclasses.replace(
            self,
            keys=_replaced(self.keys, layer, keys),
            values=_replaced(self.values, layer, values),
        )

    def advance(self, plan: Appends) -> "KVCache":
        """The cache after a pass, with the plan's lengths and faults."""
        return dataclasses.replace(self, lengths=plan.lengths, faults=self.faults | plan.faults)

    def move(
        self,
        source: int | Int[Array, ""],
        target: int | Int[Array, ""],
        where: bool | Bool[Array, ""] = True,
    ) -> "KVCache":
        """Appends the source block to the target, rotated to its new place, and empties the source.

        Exact up to rounding; keys of a cache that approximates are dequantised, rotated and
        quantised once, which adds at most half a step of a code to each number. The work follows
        the source's length. Outside jit the old cache stays valid. Inside jit, a source that does
        not fit stays where it is and sets a fault; with `where` False nothing changes.

        Raises:
          ValueError: unknown block, same source and target, or no room (for concrete values).
        """
        self._check_blocks(source=source, target=target)
        if is_concrete(source, target) and int(source) == int(target):
            raise ValueError(f"block {int(source)} cannot be moved onto itself")
        if is_concrete(self.lengths, source, target):
            count = int(self.lengths[source])
            room = int(self.capacities[target] - self.lengths[target])
            if count > room:
                raise ValueError(
                    f"block {int(source)} has {count} tokens, but block {int(target)} has room for "
                    f"{room} more; create the cache with larger capacities"
                )
        numbers = jnp.asarray(source, jnp.int32), jnp.asarray(target, jnp.int32)
        return _moved(self, *numbers, jnp.asarray(where))

    def fork(
        self, block: int | Int[Array, ""], at: int | Int[Array, ""], tail: int | Int[Array, ""]
    ) -> "KVCache":
        """Cuts a block in two and copies nothing: `block` keeps its first `at` tokens, `tail`
        becomes the rest.

        Rows that listed `block` must list `tail` right after it (`Layout.fork`). Any other row can
        list `block` alone and continue in a block of its own: that is a fork inside the block. The
        unused capacity of the block goes to `tail`.

        Raises:
          ValueError: unknown block, `tail` with a capacity above 0, or `at` outside the block (for
            concrete values).
        """
        self._check_blocks(block=block, tail=tail)
        if is_concrete(self.lengths, at, block) and not 0 <= int(at) <= int(self.lengths[block]):
            raise ValueError(
                f"block {int(block)} has {int(self.lengths[block])} tokens; it cannot be cut at "
                f"{int(at)}"
            )
        if is_concrete(self.capacities, tail) and int(self.capacities[tail]):
            raise ValueError(
                f"block {int(tail)} owns {int(self.capacities[tail])} tokens of the cache and "
                "cannot become a tail; give KVCache.create a block of capacity 0 for it"
            )
        at = jnp.asarray(at, jnp.int32)
        known = self._known(block, tail)
        fits = (
            (at >= 0)
            & (at <= self.lengths[block])
            & (self.capacities[tail] == 0)
            & (jnp.asarray(block) != jnp.asarray(tail))
        )
        fault = jnp.where(known, jnp.where(fits, 0, Fault.BAD_CUT.value), Fault.UNKNOWN_BLOCK.value)

        def cut(whole: Array, head: Array, rest: Array) -> Array:
            return jnp.where(fault == 0, whole.at[tail].set(rest).at[block].set(head), whole)

        return dataclasses.replace(
            self,
            offsets=cut(self.offsets, self.offsets[block], self.offsets[block] + at),
            lengths=cut(self.lengths, at, self.lengths[block] - at),
            capacities=cut(self.capacities, at, self.capacities[block] - at),
            phases=cut(self.phases, self.phases[block], self.phases[block] + at),
            faults=self.faults | fault,
        )

    def clear(self, block: int | Int[Array, ""]) -> "KVCache":
        """Empties a block; it keeps its capacity."""
        self._check_blocks(block=block)
        known = self._known(block)
        return dataclasses.replace(
            self,
            lengths=jnp.where(known, self.lengths.at[block].set(0), self.lengths),
            phases=jnp.where(known, self.phases.at[block].set(0), self.phases),
            faults=self.faults | jnp.where(known, 0, Fault.UNKNOWN_BLOCK.value),
        )

    def place(
        self, blocks: Sequence[int], offsets: Sequence[int], capacities: Sequence[int]
    ) -> "KVCache":
        """Gives blocks new extents of the arena and empties them: how a host allocates and frees
        blocks. A block of capacity 0 is a free slot again. Not for use inside jit.

        Args:
          blocks: the blocks, each once.
          offsets, capacities: the new extent of each, in tokens.

        Raises:
          ValueError: an unknown or repeated block, or an extent that leaves the arena or overlaps
            another block's.
        """
        check_extents(
            blocks, offsets, capacities, num_blocks=self.num_blocks, arena=self.keys[0].shape[1]
        )
        new_lengths, new_offsets, new_capacities, new_phases = (
            np.array(x) for x in (self.lengths, self.offsets, self.capacities, self.phases)
        )
        for block, offset, capacity in zip(blocks, offsets, capacities, strict=True):
            new_offsets[block], new_capacities[block] = offset, capacity
            new_lengths[block], new_phases[block] = 0, 0
        check_disjoint(new_offsets, new_capacities)
        return dataclasses.replace(
            self,
            lengths=jax.device_put(new_lengths),
            offsets=jax.device_put(new_offsets),
            capacities=jax.device_put(new_capacities),
            phases=jax.device_put(new_phases),
        )

    def relocate(
        self, blocks: Sequence[int], offsets: Sequence[int], capacities: Sequence[int]
    ) -> "KVCache":
        """Gives blocks other extents of the arena and takes their tokens there: how a block's
        capacity grows or shrinks.

        An extent may overlap the one that its block has now. Keys keep their rotation. The work
        follows the lengths of the blocks whose offset changes; where there are any, this cache is
        donated: use the returned one. Not for use inside jit.

        Args:
          blocks: the blocks, each once.
          offsets, capacities: the new extent of each, in tokens.

        Raises:
          ValueError: an unknown or repeated block, an extent that leaves the arena, overlaps
            another block's or is too small for its tokens, or extents that cannot be reached one
            after the other without overwriting tokens.
        """
        check_extents(
            blocks, offsets, capacities, num_blocks=self.num_blocks, arena=self.keys[0].shape[1]
        )
        new_offsets, new_capacities, lengths = (
            np.array(x) for x in (self.offsets, self.capacities, self.lengths)
        )
        for block, offset, capacity in zip(blocks, offsets, capacities, strict=True):
            if capacity < lengths[block]:
                raise ValueError(
                    f"block {block} has {lengths[block]} tokens, but its new extent has a capacity "
                    f"of {capacity}; give it more"
                )
            new_offsets[block], new_capacities[block] = offset, capacity
        check_disjoint(new_offsets, new_capacities)
        cache = self
        for block in copy_order(blocks, np.asarray(self.offsets), new_offsets, lengths):
            cache = _relocated(
                cache,
                jnp.asarray(block, jnp.int32),
                jnp.asarray(int(new_offsets[block]), jnp.int32),
            )
        return dataclasses.replace(
            cache, offsets=jax.device_put(new_offsets), capacities=jax.device_put(new_capacities)
        )

    def check(self) -> None:
        """Raises ValueError if a pass inside jit wrote beyond a capacity or had an invalid
        layout."""
        if fault := Fault(int(self.faults)):
            raise ValueError(f"the cache is not usable any more: {fault.describe()}")

    def _check_blocks(self, **blocks: int | Array) -> None:
        for name, block in blocks.items():
            if is_concrete(block):
                check_block(name, int(block), self.num_blocks)

    def _known(self, *blocks: int | Array) -> Bool[Array, ""]:
        """True if the cache has all these blocks."""
        numbers = jnp.asarray(blocks, jnp.int32)
        return jnp.all((numbers >= 0) & (numbers < self.num_blocks))


def _replaced(arenas: tuple[Arena, ...], layer: int, arena: Arena) -> tuple[Arena, ...]:
    return (*arenas[:layer], arena, *arenas[layer + 1 :])


@jax.jit
def _moved(cache: KVCache, source: Array, target: Array, where: Array) -> KVCache:
    count, start = cache.lengths[source], cache.lengths[target]
    known = cache._known(source, target)
    fits = (start + count <= cache.capacities[target]) & (source != target)
    count = jnp.where(known & fits & where, count, 0)
    fault = jnp.where(known, jnp.where(fits, 0, Fault.OVERFLOW.value), Fault.UNKNOWN_BLOCK.value)
    further = cache.phases[target] + start - cache.phases[source]
    return dataclasses.replace(
        _copied(cache, cache.offsets[source], cache.offsets[target] + start, count, further),
        lengths=cache.lengths.at[source].add(-count).at[target].add(count),
        faults=cache.faults | jnp.where(where, fault, 0),
    )


@functools.partial(jax.jit, donate_argnames="cache")
def _relocated(cache: KVCache, block: Array, offset: Array) -> KVCache:
    """The cache with a block's tokens at another offset."""
    further = jnp.zeros((), jnp.int32)
    return dataclasses.replace(
        _copied(cache, cache.offsets[block], offset, cache.lengths[block], further),
        offsets=cache.offsets.at[block].set(offset),
    )


def _copied(cache: KVCache, source: Array, target: Array, count: Array, further: Array) -> KVCache:
    """Copies `count` tokens of the arenas, keys rotated by `further` positions more."""
    sharded, none = cache.token_sharding, PartitionSpec()
    copy = copy_tokens if sharded.axis is None else functools.partial(copy_tokens_over, sharded)
    arenas = cache.specs.keys, cache.specs.values
    tables = {rope: rope.cos_sin(further, scaled=False) for rope in {*cache.ropes}}
    angles = tuple(tables[rope] for rope in cache.ropes)
    keys, values = on_each(
        copy, cache.mesh, in_specs=(arenas, none, none, none, none), out_specs=arenas
    )((cache.keys, cache.values), source, target, count, angles)
    return dataclasses.replace(cache, keys=keys, values=values)
