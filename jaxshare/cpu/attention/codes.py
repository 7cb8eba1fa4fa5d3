"""Segments of quantised keys and values, whose codes are converted to numbers as they are read.

Codes of eight bits are exact in every dtype of caches. Their scales are factors of scores and of
weights (`jaxshare.cpu.attention.tiles.write_softmax`).
"""

from typing import Any

from jaxshare.cpu.attention.work import SEGMENT, Shape
from jaxshare.cpu.ir import BYTES, F32, I8, PTR, Code, Val
from jaxshare.cpu.quantised.codes import Codes

_LOWEST = 2.0**-126
"""Scales are at least this, so that their products with scores of tokens that are not seen are."""


def widened_segment(shape: Shape, code: Code, w: Any, start: Val, tokens: Val) -> list[Val]:
    """Converts some tokens of the arenas, fewer than a segment has.

    Returns:
      Where keys, values, and the scales of both are; the first is to be freed.
    """
    size, scales = SEGMENT * shape.token_bytes, SEGMENT * 4
    place = code.external("malloc", PTR, 2 * (size + scales) + 64)
    places = [place, place + size, place + 2 * size, place + (2 * size + scales)]
    for arena, target in zip((w.keys, w.values), places[:2], strict=True):
        _widen(shape, code, arena + start * shape.dim, target, tokens * shape.dim)
    lanes = code.machine.lanes
    for arena, target in zip((w.key_scales, w.value_scales), places[2:], strict=True):
        source = arena + start * 4
        with code.loop(0, tokens, lanes) as token:
            scale = code.load(source + token * 4, F32, lanes, tokens - token)
            code.store(code.max(scale, _LOWEST), target + token * 4)
        # The last tile reads those of tokens that are not there.
        with code.loop((tokens + (lanes - 1)) // lanes * lanes, SEGMENT, lanes) as token:
            code.store(code.zeros(lanes) + 1.0, target + token * 4)
    return places


def _widen(shape: Shape, code: Code, source: Val, target: Val, count: Val) -> None:
    lanes, size = code.machine.lanes, BYTES[shape.kind]
    whole = count // lanes * lanes
    with code.loop(0, whole, lanes) as at:
        numbers = _numbers(shape, code, code.load(source + at, I8, lanes))
        code.store(code.narrowed(numbers, shape.kind), target + at * size)
    with code.where(whole < count):
        left = count - whole
        numbers = _numbers(shape, code, code.load(source + whole, I8, lanes, left))
        code.store(code.narrowed(numbers, shape.kind), target + whole * size, left)


def _numbers(shape: Shape, code: Code, codes: Val) -> Val:
    """A vector of codes as float32."""
    codes_of = Codes(shape.codes, 0, "float32", "", "")
    (numbers,) = codes_of.numbers(code, codes)
    return numbers if codes_of.factor == 1.0 else numbers * codes_of.factor
