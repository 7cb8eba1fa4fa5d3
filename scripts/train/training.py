"""The common parts of the training scripts: the optimizer, and memory kept between steps."""

import ctypes

import jax
import jax.numpy as jnp
import optax

WARMUP, DECAY_FROM, ADAM_SHARE = 50, 0.5, 0.15
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8  # malloc.h


def schedule(steps: int, peak: float) -> optax.Schedule:
    """A short rise, constant, then a fall to zero from DECAY_FROM of the steps on."""
    return lambda step: (
        peak
        * jnp.minimum(jnp.minimum(1.0, (step + 1) / WARMUP), (1 - step / steps) / (1 - DECAY_FROM))
    )


def make_optimizer(steps: int, peak: float) -> optax.GradientTransformation:
    """Muon for the layers' matrices, Adam for all others. The rate is constant, then falls to zero
    from DECAY_FROM on: that depends on step / steps, so that an interrupted run may be resumed with
    another number of steps."""

    kernel = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)  # [out, in]

    def dimensions(params: dict) -> dict:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: (
                kernel if p.ndim == 2 and "layers" in jax.tree_util.keystr(path) else None
            ),
            params,
        )

    muon = optax.contrib.muon(
        schedule(steps, peak),
        adam_learning_rate=schedule(steps, ADAM_SHARE * peak),
        adam_b2=0.98,
        muon_weight_dimension_numbers=dimensions,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), muon)


def keep_memory() -> None:
    """Makes glibc keep freed memory: XLA allocates its temporaries anew every step, and page faults
    took up to half of the time."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for parameter, value in (
            (_M_ARENA_MAX, 1),
            (_M_MMAP_THRESHOLD, 2**31 - 1),
            (_M_TRIM_THRESHOLD, 2**31 - 1),
            (_M_TOP_PAD, 2**29),
        ):
            libc.mallopt(parameter, value)
