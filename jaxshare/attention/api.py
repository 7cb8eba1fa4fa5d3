"""block_attention: attention of new tokens over the blocks of a cache, by the first backend that
can serve the call."""

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from jaxshare import cpu
from jaxshare.arena import append_tokens
from jaxshare.attention.expansion import HeadMakers
from jaxshare.attention.plan import Plan
from jaxshare.attention.reference import reference_attention
from jaxshare.attention.xla import xla_attention
from jaxshare.pallas.device import current_device
from jaxshare.quantised import is_quantised
from jaxshare.quantised_cache import Arena

Backend = Callable[..., Array]
"""(q, keys, values, plan, scale) -> out; softcap and sinks by name where there are any."""


def _imported(find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """A backend's function that is imported when it is called; where it cannot be imported, the next
    backend is tried."""

    def backend(*arguments: Any, **more: Any) -> Any:
        try:
            found = find()
        except ImportError as error:
            raise NotImplementedError(f"it cannot be imported ({error})") from error
        return found(*arguments, **more)

    return backend


def _mosaic_gpu() -> Any:
    return importlib.import_module("jaxshare.pallas.block_attention_mosaic_gpu")


def _triton() -> Any:
    return importlib.import_module("jaxshare.pallas.block_attention_triton")


def _cpu_attention() -> Backend:
    if not cpu.used_for("cpu"):
        raise NotImplementedError("its kernels are turned off, or not for this device")
    return importlib.import_module("jaxshare.cpu.attention.call").cpu_attention


BACKENDS: dict[str, Backend] = {
    "mosaic_gpu": _imported(lambda: _mosaic_gpu().mosaic_gpu_attention),
    "triton": _imported(lambda: _triton().triton_attention),
    "cpu": _imported(_cpu_attention),
    "xla": xla_attention,
    "reference": reference_attention,
}
"""By name. A backend that cannot serve a call raises
NotImplementedError, saying why."""


APPENDING: dict[str, Callable[..., tuple[Array, Arena, Arena]]] = {
    "mosaic_gpu": _imported(lambda: _mosaic_gpu().appending_mosaic_gpu_attention),
}
"""By name, of the backends that append in the same kernels: (q, k, v, keys, values, plan, scale) ->
(out, keys, values). They raise as the backends do."""


WITH_WORK: dict[str, Callable[..., Plan]] = {
    "mosaic_gpu": _imported(lambda: _mosaic_gpu().with_mosaic_gpu_work),
    "triton": _imported(lambda: _triton().with_triton_work),
}
"""By name, of the backends that make more of a plan: (q, keys, values, plan) -> plan with it. They
raise as the backends do."""


def preferred(queries: int = 1, keys: Arena | None = None) -> tuple[str, ...]:
    """The backends that are tried where none is named, for the device that is being traced for.

    Args:
      queries: of a kv head, R * T * G.
      keys: the arena; None for one of any form.
    """
    if (device := current_device()) is not None:
        from jaxshare.pallas.tiles import MANY_QUERIES, multiplies_in_tensor_memory

        # Blackwell's fast products are tcgen05, which Triton takes for many queries, and Mosaic's
        # kernels over caches of some forms; for few queries memory sets the pace.
        if device.capability >= 100 and queries >= MANY_QUERIES:
            head_dim, codes = 0 if keys is None else keys.shape[2], is_quantised(keys)
            if not multiplies_in_tensor_memory(device, head_dim, queries, codes=codes):
                return ("triton", "mosaic_gpu", "xla")
        return ("mosaic_gpu", "triton", "xla")
    return ("cpu", "xla") if cpu.used_for(None) else ("xla",)


def block_attention(
    q: Float[Array, "..."],
    keys: Arena,
    values: Arena,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
    makers: HeadMakers | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "R T H _"]:
    """Attention of each row's new tokens over the blocks that its layout lists, in its order.

    A token sees all of every block listed before its own, this pass's appends included, and its own
    block up to itself (Hogwild! section 3.4). Blocks that several rows see are read once for all of
    them (Hydragen section 3).

    Args:
      q: [R, T, H, D], not rotated; H is a multiple of K.
      keys, values: one layer's arenas [K, tokens, D], this pass's keys and values already in them
        (`KVCache.append`); quantised where the cache approximates. Values may have a last dim of
        0: a token's value is then its key without the rotated entries.
      plan: of this pass.
      scale: of the scores; default 1 / sqrt(D).
      softcap: scores are softcap * tanh(score / softcap); 0 leaves them as they are.
      sinks: for each head a score beside those of all keys, whose value is 0; default none.
      makers: where a cache has latents, what makes each head's keys and values of them; queries are
        then [rotated | not] as those keys are. Only xla takes it, see `can_expand`.
      implementation: a backend's name, several to try in order, or None for the best on this
        device: on an NVIDIA GPU mosaic_gpu, then triton, then xla (`preferred`); on a CPU cpu,
        then xla; elsewhere xla. The device is JAX's default one, so name "xla" for arrays that are placed
        elsewhere. The next is tried only where one raises NotImplementedError.

    Returns:
      Attention in q's dtype, [R, T, H, D]; [R, T, H, D - 2 P] where values are a part of keys; with
      makers [R, T, H, V] of the values that they make.
      Rows and tokens that are not real are finite and mean nothing.

    Raises:
      ValueError: shapes that do not fit, or no such backend.
      NotImplementedError: no backend named can serve the call; the message has each one's reason.
    """
    _check_shapes(q, keys, values, plan, makers)
    score_scale = q.shape[3] ** -0.5 if scale is None else scale
    more = ({"softcap": softcap} if softcap else {}) | ({} if sinks is None else {"sinks": sinks})
    more |= {} if makers is None else {"makers": makers}
    reasons = []
    for name in _names(implementation, q, keys):
        if makers is not None and name != "xla":
            reasons.append(f"{name}: it makes no keys and values of latents")
            continue
        try:
            return BACKENDS[name](q, keys, values, plan, score_scale, **more)
        except NotImplementedError as reason:
            reasons.append(f"{name}: {reason}")
    raise NotImplementedError("no attention backend can do this: " + "; ".join(reasons))


def append_and_attend(
    q: Float[Array, "..."],
    k: Float[Array, "R T K D"],
    v: Float[Array, "R T K _"],
    keys: Arena,
    values: Arena,
    plan: Plan,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Float[Array, " H"] | None = None,
    makers: HeadMakers | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[Float[Array, "R T H _"], Arena, Arena]:
    """Appends a pass's new keys and values to one layer's arenas, and attends over them.

    Args:
      k, v: the new keys, not rotated, and values.
      keys, values: the arenas without them.
      q, plan, scale, softcap, sinks, makers, implementation: as `block_attention` takes them.

    Returns:
      What `block_attention` returns, and the arenas as `KVCache.append` leaves them.

    Raises:
      ValueError, NotImplementedError: as `block_attention`.
    """
    _check_shapes(q, keys, values, plan, makers)
    names, more = _names(implementation, q, keys), {"softcap": softcap, "sinks": sinks}
    for name in names:
        if makers is not None or name not in APPENDING:
            break
        try:
            score_scale = q.shape[3] ** -0.5 if scale is None else scale
            return APPENDING[name](q, k, v, keys, values, plan, score_scale, **more)
        except NotImplementedError:
            continue  # which `block_attention` finds again, if no backend serves the call
    new = keys, values, k, v, plan
    keys, values = cpu.append_tokens(*new, names) or append_tokens(*new)
    more |= {"scale": scale, "makers": makers, "implementation": names}
    return block_attention(q, keys, values, plan, **more), keys, values


def with_work(
    plan: Plan,
    heads: int,
    keys: Arena,
    values: Arena,
    implementation: str | Sequence[str] | None = None,
) -> Plan:
    """The plan with what its backend makes of it for each call, to be made once for all layers.

    A compiler would find that layers do the same, after it had gone through all of them many times.

    Args:
      plan: of a pass.
      heads: H, of the queries of each layer.
      keys, values, implementation: of one of the layers, as in `block_attention`.
    """
    q = jax.ShapeDtypeStruct((*plan.positions.shape, heads, keys.shape[2]), keys.dtype)
    for name in _names(implementation, q, keys):
        if name not in WITH_WORK:
            break
        try:
            return WITH_WORK[name](q, keys, values, plan)
        except NotImplementedError:
            continue
    return plan


def can_expand(implementation: str | Sequence[str] | None) -> bool:
    """True if xla is what serves caches of latents: it can make the keys and values of heads of
    them. The kernels for GPUs attend to latents, and so does the reference."""
    return next((name for name in _names(implementation) if name != "cpu"), None) == "xla"


def _check_shapes(
    q: Array, keys: Arena, values: Arena, plan: Plan, makers: HeadMakers | None
) -> None:
    rows, width = plan.positions.shape
    if q.ndim != 4 or q.shape[:2] != (rows, width):
        raise ValueError(
            f"q must be [R, T, H, D] with R, T = {rows}, {width} as planned; got {q.shape}"
        )
    if makers is not None:
        _check_makers(q, keys, values, makers)
        return
    if (
        keys.ndim != 3
        or keys.shape[:2] != values.shape[:2]
        or values.shape[2:] not in ((0,), keys.shape[2:])
        or keys.shape[2] != q.shape[3]
        or q.shape[2] % keys.shape[0]
    ):
        raise ValueError(
            f"keys and values must be arenas [K, tokens, {q.shape[3]}] of one shape (or values "
            f"with a last dim of 0), with K dividing {q.shape[2]} heads; got {keys.shape} and "
            f"{values.shape}"
        )


def _check_makers(q: Array, keys: Arena, values: Arena, makers: HeadMakers) -> None:
    heads, own, latent = makers.keys.shape
    expected = (1, keys.shape[1], q.shape[3] - own + latent)
    if (
        keys.shape != expected
        or values.shape != (*expected[:2], 0)
        or q.shape[2] != heads
        or makers.values.shape[::2] != (heads, latent)
    ):
        raise ValueError(
            f"for queries {q.shape} and makers {makers.keys.shape} and {makers.values.shape} the "
            f"arena must be {expected}, without values; got {keys.shape} and {values.shape}"
        )


def _names(
    implementation: str | Sequence[str] | None,
    q: Array | jax.ShapeDtypeStruct | None = None,
    keys: Arena | None = None,
) -> tuple[str, ...]:
    """The backends to try, in order, for queries over an arena."""
    if implementation is None:
        if q is None or keys is None:
            return preferred()
        return preferred(math.prod(q.shape[:3]) // keys.shape[0], keys)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    if unknown := [name for name in names if name not in BACKENDS]:
        raise ValueError(
            f"there is no attention backend {unknown[0]!r}; there are {', '.join(BACKENDS)}"
        )
    return names
