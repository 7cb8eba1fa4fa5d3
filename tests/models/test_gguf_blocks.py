"""Blocks of GGUF files against gguf.quants, bit for bit."""

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxshare.models.gguf.blocks import BLOCK_KINDS, quantised_blocks

FLOATS = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""The bytes at which a block has numbers in float16; others have one at the first."""


def random_blocks(kind: str, rows: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of all bytes, with scales that are finite."""
    size = BLOCK_KINDS[kind].size
    blocks = rng.integers(0, 256, (*rows, size), np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(60, 180, rows)
        return blocks
    for start in FLOATS.get(kind, (0,)):
        numbers = rng.standard_normal((*rows, 1)).astype(np.float16)
        blocks[..., start : start + 2] = numbers.view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_numbers_are_those_of_gguf(kind, monkeypatch):
    monkeypatch.setattr("jaxshare.models.gguf.blocks._AT_ONCE", 1000)  # several times
    form, rng = gguf.GGMLQuantizationType[kind], np.random.default_rng(1)
    assert gguf.GGML_QUANT_SIZES[form] == (BLOCK_KINDS[kind].numbers, BLOCK_KINDS[kind].size)
    blocks = random_blocks(kind, (2, 7, 3), rng).reshape(2, 7, -1)
    expected = gguf.dequantize(blocks, form)
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        found = quantised_blocks(kind, blocks, dtype)
        found.check(kind)
        assert found.shape == expected.shape and found.dtype == dtype
        np.testing.assert_array_equal(found.dequantised(np.float32), expected)
        np.testing.assert_array_equal(found.dequantised(), expected.astype(dtype))


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "MXFP4"])
def test_blocks_of_zeros_are_no_damage(kind):
    blocks = random_blocks(kind, (3, 2), np.random.default_rng(2))
    for start in FLOATS.get(kind, (0,)):
        blocks[1, :, start : start + 2] = 0
    blocks = blocks.reshape(3, -1)
    found = quantised_blocks(kind, blocks, np.dtype(np.float32))
    found.check(kind)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found.dequantised(), expected)
    assert not expected[1].any()


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q4_0", 4.5), ("Q8_0", 8.5), ("Q4_K", 6.25), ("Q6_K", 10.0), ("MXFP4", 4.25)],
)
def test_bytes_of_a_number(kind, bits):
    blocks = random_blocks(kind, (4, 4), np.random.default_rng(3)).reshape(4, -1)
    found = quantised_blocks(kind, blocks, np.dtype(np.float32))
    assert found.nbytes * 8 == bits * found.size
