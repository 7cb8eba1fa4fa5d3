"""MXFP4: numbers of four bits in groups of 32 that share a power of two, as gpt-oss stores experts.

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3 and 6.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, UInt8

GROUP = 32
"""Numbers that share a scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
"""Of the exponent that a scale is."""

_CODES = np.asarray([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([np.tile(_CODES, 16), np.repeat(_CODES, 16)], axis=-1)
"""The two numbers of each byte, the one in its low bits first: [256, 2]."""


def dequantised(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> BFloat16[np.ndarray, "*rows _"]:
    """Returns the numbers of some rows, 32 of each group, exactly; those of a group whose scale is
    255, which stands for no number, are infinite."""
    numbers = _PAIRS[blocks].reshape(*scales.shape, GROUP)
    exponents = scales.astype(np.int32) - _BIAS
    with np.errstate(over="ignore", invalid="ignore"):
        whole = np.ldexp(numbers, exponents[..., None])
    return whole.reshape(*scales.shape[:-1], -1).astype(jnp.bfloat16)
