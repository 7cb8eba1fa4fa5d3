"""Seeds: the rule that gives each row its stream of random numbers.

A stream has a key of 64 bits, its seed, and a draw depends on that key and its position in the
stream alone (`jaxshare.decoding.sampling`). A host that needs several streams makes the key of each
from its own seed and the place of the stream: prompt and index, the number of a worker, the path of
a firing, the run of an evaluation. Keys are hashes, not sums, so that neither neighbouring seeds
nor neighbouring places share a stream.
"""

import functools
import hashlib
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
from jaxtyping import UInt32

_BITS = 64
_PERSON = b"jaxshare streams"
"""The personalization of BLAKE2: the same function gives other values for other purposes."""


def stream_seed(seed: int, *place: int | str | bytes) -> int:
    """The key of the stream that belongs to a place under a seed.

    Where the place is all zeros, or empty, the key is the seed itself: the first stream of a seed.
    So a stream has the same key in every host that runs it alone, and one of many can be drawn
    again by itself, with its key as the seed. Every other key is a keyed BLAKE2b hash of the place.
    Among n streams the probability that any two have the same key is about n**2 / 2**64.

    Args:
      seed: any integer; seeds that differ by a multiple of 2**64 are equal.
      place: the place of the stream under the seed: integers, texts or bytes. Different places have
        different hashes: (1, 2) is not (12,).

    Returns:
      An integer from 0 to 2**63 - 1, which fits a signed 64-bit integer; or the seed itself, from 0
        to 2**64 - 1.
    """
    seed = operator.index(seed) % 2**_BITS
    parts = b"".join(map(_part, place))
    if all(part == 0 for part in place):
        return seed
    digest = hashlib.blake2b(
        parts, digest_size=8, key=seed.to_bytes(8, "little"), person=_PERSON
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_words(seeds: Sequence[SupportsIndex]) -> UInt32[np.ndarray, "seeds 2"]:
    """The high and the low word of each seed, which is the form of keys on a device."""
    whole = np.asarray([operator.index(seed) % 2**_BITS for seed in seeds], np.uint64)
    return np.stack([whole >> np.uint64(32), whole & np.uint64(2**32 - 1)], axis=-1).astype(
        np.uint32
    )


@functools.lru_cache(4096)
def _part(part: int | str | bytes) -> bytes:
    """The bytes of a part of a place after their number, with its type, so that 1 and "1" differ.

    Cached, since places have the same parts again and again, and some have thousands.
    """
    if isinstance(part, str):
        whole = b"s" + part.encode("utf-8", "surrogatepass")
    else:
        whole = b"b" + part if isinstance(part, bytes) else b"i%d" % operator.index(part)
    return len(whole).to_bytes(8, "little") + whole
