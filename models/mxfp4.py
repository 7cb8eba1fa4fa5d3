"""MXFP4: numbers of four bits in groups of 32 that share a power of two, as gpt-oss stores experts.

Source: OCP Microscaling Formats (MX) specification 1.0, sections 5.3.3, 5.4.1 and 6.
"""

import ml_dtypes
import numpy as np
from jaxtyping import UInt8

from jaxshare.quantised import QuantisedTensor, packed_codes

GROUP = 32
"""Numbers that share a scale."""


def packed(
    blocks: UInt8[np.ndarray, "*rows groups 16"], scales: UInt8[np.ndarray, "*rows groups"]
) -> QuantisedTensor:
    """Returns rows of bytes with two codes each, the one in low bits first, as a tensor of the same
    numbers. A scale is the exponent of a power of two; 255 stands for no number."""
    codes = np.empty((*scales.shape, GROUP), np.uint8)
    codes[..., ::2], codes[..., 1::2] = blocks & 15, blocks >> 4
    whole = packed_codes(codes.reshape(*scales.shape[:-1], -1), GROUP)
    powers = np.ascontiguousarray(scales).view(ml_dtypes.float8_e8m0fnu)
    return QuantisedTensor(whole, powers, format="mxfp4")
