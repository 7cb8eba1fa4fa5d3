"""Expert parallelism: a pass's tokens divided over the mesh axis `expert`, for layers with experts.

Along `expert` every device has some experts whole, and attention is split as along `tensor`. For
many tokens a layer ends its attention with a sum of which each device keeps some tokens, routes
these, and sends each to the devices that have its experts; those send back what they compute, and
all tokens are gathered for the next layer. That is less traffic than the two sums of the whole
output that tensor parallelism needs, and norms, routing and shared experts are computed once for
each token.

There is no capacity: a device has a place for every token of every other. So what a token gets does
not depend on the tokens beside it. Less is sent where routing is even enough that the tokens for
each device fit into smaller messages; the places, and so the results, are the same.

Axis letters: R rows, T new tokens of a row, N = R T tokens, E devices along `expert`, S tokens of a
device, K chosen experts of a token, M model dim.
"""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32, Int, Int32, Shaped

from jaxshare.models.moe import MoE
from jaxshare.sharding import EXPERT, Axis, axis_without, psum

_LEAST_TOKENS = 16
"""Tokens of a device from which dividing them pays: below, the two sums of a layer are as many
messages as can be waited for, and their size does not matter. Chosen by a calculation of latencies
and bandwidths; not measured on several GPUs."""
_MARGIN = 1.5
"""The room of a message, in multiples of what even routing needs, since routing is not even."""
_LARGEST_MESSAGE = 0.75
"""Messages with room for more than this part of all tokens are not worth arranging tokens for."""


@dataclasses.dataclass(frozen=True)
class TokenShare:
    """The division of a pass's tokens over the devices of the axis `expert`.

    Attributes:
      tokens: N.
      devices: E.
    """

    tokens: int
    devices: int

    @classmethod
    def of(cls, moe: MoE | None, tokens: int) -> "TokenShare | None":
        """The division of N tokens on the devices that this is traced for; None where each device
        computes all tokens for its experts, and the results are summed: for few tokens, since
        the sum is one message, and without an axis `expert`."""
        if moe is None or EXPERT not in moe.axes:
            return None
        devices = lax.axis_size(EXPERT)
        return cls(tokens, devices) if tokens >= _LEAST_TOKENS * devices else None

    @property
    def size(self) -> int:
        """S; the last device may have fewer, and is given zeros."""
        return -(-self.tokens // self.devices)

    def own(self, x: Shaped[Array, "R T ..."]) -> Shaped[Array, "S ..."]:
        """This device's tokens."""
        first = lax.axis_index(EXPERT) * self.size
        return lax.dynamic_slice_in_dim(self._padded(x), first, self.size)

    def summed(self, x: Float[Array, "R T M"], axis: Axis | None) -> Float[Array, "S M"]:
        """The sum over an axis, which includes `expert`, at this device's tokens."""
        part = lax.psum_scatter(self._padded(x), EXPERT, tiled=True)
        return psum(part, axis_without(axis, EXPERT))

    def whole(self, x: Float[Array, "S M"], shape: tuple[int, ...]) -> Float[Array, "R T M"]:
        """All tokens, of which every device has its own."""
        return _gathered(x)[: self.tokens].reshape(shape)

    def _padded(self, x: Array) -> Array:
        rows = x.reshape(self.tokens, *x.shape[2:])
        more = self.devices * self.size - self.tokens
        return jnp.pad(rows, ((0, more), *((0, 0) for _ in rows.shape[1:])))

    def through_experts(
        self,
        x: Float[Array, "S M"],
        expert: Int32[Array, "S K"],
        weight: Float32[Array, "S K"],
        moe: MoE,
        compute: Callable[[Array, Array, Array], Array],
    ) -> Float32[Array, "S M"]:
        """Sends each token to the devices that have its experts, and returns the sum of what these
        make of it, in the order of the devices.

        Args:
          x: this device's tokens.
          expert: of each; `moe.num_experts` or more for none.
          weight: of each.
          moe: one device's part.
          compute: (x, expert, weight) of the tokens of all devices, [E S, ...] -> this device's
            part of their output [E S, M].
        """
        every, weights = _gathered(expert), _gathered(weight)
        per_device = moe.num_experts // self.devices
        chosen = (every // per_device).reshape(self.devices, self.size, -1)
        needed = jnp.any(chosen[..., None] == jnp.arange(self.devices), axis=2)  # [E, S, E]
        message = _TokenMessage.between(needed, self._room(moe))
        rows = message.sent(x)
        part = compute(rows.reshape(-1, x.shape[-1]), every, weights)
        return jnp.sum(message.returned(part.reshape(rows.shape)), axis=0)

    def _room(self, moe: MoE) -> int:
        """Tokens that a device's message to another has room for; S where it is for all."""
        even = 1 - (1 - 1 / self.devices) ** moe.top_k
        room = math.ceil(_MARGIN * even * self.size)
        return room if room <= _LARGEST_MESSAGE * self.size else self.size


@dataclasses.dataclass(frozen=True)
class _TokenMessage:
    """The messages between devices: some places of each pair's tokens, or all.

    Attributes:
      places: [E, S] -> [E, S] is sent whole if this is None; else the places whose tokens are sent
        to each device and those whose tokens each device sends here.
      fits: whether these places are enough, the same on all devices.
    """

    places: tuple[Int[Array, "E P"], Int[Array, "E P"]] | None
    fits: Array | None

    @classmethod
    def between(cls, needed: Array, room: int) -> "_TokenMessage":
        """Arranges messages.

        Args:
          needed: [E, S, E] for each device's tokens whether they are for each device.
          room: of a message.
        """
        if room == needed.shape[1]:
            return cls(None, None)
        here = lax.axis_index(EXPERT)
        # All devices find the places themselves: experts' numbers are small beside the tokens.
        order = jnp.argsort(~needed, axis=1, stable=True)[:, :room]
        to, by = order[here].T, order[:, :, here]
        return cls((to, by), jnp.max(jnp.sum(needed, axis=1)) <= room)

    def sent(self, x: Float[Array, "S M"]) -> Float[Array, "E S M"]:
        """Sends this device's tokens, and returns those of each device; those that are not for this
        one are undefined."""
        devices = lax.axis_size(EXPERT)

        def all_of_them() -> Array:
            return _gathered(x).reshape(devices, *x.shape)

        def some() -> Array:
            to, by = self.places or (None, None)
            empty = jnp.zeros((devices, *x.shape), x.dtype)
            return empty.at[jnp.arange(devices)[:, None], by].set(_exchanged(x[to]))

        return all_of_them() if self.fits is None else lax.cond(self.fits, some, all_of_them)

    def returned(self, y: Float32[Array, "E S M"]) -> Float32[Array, "E S M"]:
        """Sends back what this device makes of each device's tokens; returns what each makes of
        this one's, 0 where it was not sent the token."""

        def some() -> Array:
            to, by = self.places or (None, None)
            each = jnp.arange(y.shape[0])[:, None]
            return jnp.zeros_like(y).at[each, to].set(_exchanged(y[each, by]))

        if self.fits is None:
            return _exchanged(y)
        return lax.cond(self.fits, some, lambda: _exchanged(y))


def _exchanged(x: Shaped[Array, "E ..."]) -> Shaped[Array, "E ..."]:
    """Gives the i-th part to the i-th device; returns the parts for this one, in their order."""
    return lax.all_to_all(x, EXPERT, 0, 0)


def _gathered(x: Shaped[Array, "S ..."]) -> Shaped[Array, "all ..."]:
    return lax.all_gather(x, EXPERT, tiled=True)
