"""Codes as checkpoints pack them, and as `QuantisedTensor` has them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Int, Int32, UInt8

from jaxshare.quantised import FORMATS, QuantisedTensor, packed_codes

WORD = 32
"""The bits of a word, in which checkpoints pack codes."""


def unpacked(words: Int32[np.ndarray, "*rows W"], bits: int) -> UInt8[np.ndarray, "*rows N"]:
    """Returns the codes of 4 or 8 bits in words, those in low bits first."""
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if bits == 8:
        return octets
    codes = np.empty((*octets.shape[:-1], octets.shape[-1] * 2), np.uint8)
    codes[..., ::2] = octets & 15
    codes[..., 1::2] = octets >> 4
    return codes


def as_stored_codes(
    codes: UInt8[np.ndarray, "O I"], bits: int, group: int
) -> tuple[str, np.ndarray]:
    """Returns the format of a `QuantisedTensor` for unsigned codes, and the codes as it has them:
    those of eight bits less 128."""
    if bits == 8:
        return "int8", (codes ^ 128).view(np.int8)
    return "int4", packed_codes(codes, group)


def as_stored_zeros(
    zeros: Int[np.ndarray, "O G"] | UInt8[np.ndarray, "O G"], bits: int
) -> Int[np.ndarray, "O G"] | None:
    """Returns unsigned zeros as `as_stored_codes` has codes; None where all are in the middle."""
    middle = 1 << (bits - 1)
    if (zeros == middle).all():
        return None
    shift = middle - FORMATS[f"int{bits}"].middle
    return (zeros.astype(np.int16) - shift).astype(np.int8)


def order_of(groups: Int32[np.ndarray, " I"], group: int) -> Int32[np.ndarray, " I"] | None:
    """Returns the order in which inputs are grouped; None for their own.

    Args:
      groups: the group of each input. Zero or -1 for all says nothing in files that have several.
      group: the inputs of a group.

    Raises:
      ValueError: groups that do not have this many inputs each.
    """
    count = groups.size // group
    if np.array_equal(groups, np.arange(groups.size) // group) or (
        groups[0] <= 0 and (groups == groups[0]).all()
    ):
        return None
    inside = groups.min() >= 0 and groups.max() < count
    if not inside or (np.bincount(groups, minlength=count) != group).any():
        raise ValueError(f"its g_idx does not put {group} inputs in each of {count} groups")
    return np.argsort(groups, kind="stable").astype(np.int32)


def stacked(count: int, matrices: Iterable[QuantisedTensor]) -> QuantisedTensor:
    """Returns matrices of one form along a first axis; no more than one is held beside the result.

    Raises:
      ValueError: matrices with orders of their own.
    """
    whole: Any = None
    for index, matrix in enumerate(matrices):
        if whole is None:
            whole = jax.tree.map(lambda each: np.empty((count, *each.shape), each.dtype), matrix)
            whole = dataclasses.replace(whole, order=matrix.order)
        if not _same_order(whole, matrix):
            raise ValueError(
                "its inputs are in another order (act-order) than those of other experts of the "
                "layer, which is not supported; use a checkpoint that was made without it "
                "(desc_act false)"
            )
        whole, matrix = _with_zeros(whole, matrix), _with_zeros(matrix, whole)
        for name in ("codes", "scales", "zeros", "offsets"):
            if (target := getattr(whole, name)) is not None:
                target[index] = getattr(matrix, name)
    return whole


def _same_order(one: QuantisedTensor, other: QuantisedTensor) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return np.array_equal(one.order, other.order)


def _with_zeros(matrix: QuantisedTensor, other: QuantisedTensor) -> QuantisedTensor:
    """The matrix with zeros of its own where the other one has some."""
    if matrix.zeros is not None or other.zeros is None:
        return matrix
    middle = np.full(matrix.scales.shape, matrix.code_format.middle, other.zeros.dtype)
    return dataclasses.replace(matrix, zeros=middle)
