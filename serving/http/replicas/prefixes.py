"""The rule by which requests go to replicas: to the one that has read the longest common prefix."""

import collections
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence

BLOCK_BYTES = 64
"""Prefixes are compared in blocks of so many bytes, some sixteen tokens of a text."""
_MOST_BLOCKS = 1024
"""Blocks of one prompt that are looked at: 64 KiB of text."""
_DIGEST_BYTES = 8


def prefix_keys(text: bytes) -> tuple[bytes, ...]:
    """Returns a key for each full block of a text, which stands for the text up to its end.

    Args:
      text: of a prompt, or its tokens as bytes; only the first 64 KiB are looked at.
    """
    keys, key = [], b""
    for start in range(0, min(len(text), _MOST_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        block = text[start : start + BLOCK_BYTES]
        if len(block) < BLOCK_BYTES:
            break
        key = hashlib.blake2b(key + block, digest_size=_DIGEST_BYTES).digest()
        keys.append(key)
    return tuple(keys)


class PrefixMap:
    """Remembers which replicas have read which prefixes, those of the newest requests.

    Args:
      max_blocks: that are remembered; those that were used longest ago are forgotten.
      spread: requests that a replica may run more than the one that runs fewest, and still get a
        request whose prefix it has.
    """

    def __init__(self, max_blocks: int = 2**16, spread: int = 8):
        self._max_blocks, self._spread = max_blocks, spread
        self._readers: collections.OrderedDict[bytes, set[str]] = collections.OrderedDict()
        self._sent: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._readers)

    def order(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """Returns the replicas, the one that should get a request first.

        Among those that are not much busier than the least busy one, the longest common prefix
        decides; then the fewest running requests, and then the fewest so far.

        Args:
          keys: of the request, see `prefix_keys`.
          loads: the running requests of each replica.
        """
        least = min(loads.values(), default=0)
        read = self._blocks_read(keys, loads)

        def rank(replica: str) -> tuple[bool, int, int, int]:
            load = loads[replica]
            is_busy = load - least > self._spread
            return is_busy, 0 if is_busy else -read[replica], load, self._sent[replica]

        return sorted(loads, key=rank)

    def add(self, keys: Iterable[bytes], replica: str) -> None:
        """Remembers that a replica gets a request.

        Args:
          keys: of the request.
          replica: its name.
        """
        self._sent[replica] += 1
        # The first block is the newest, so that no block outlives those before it.
        for key in reversed([*keys]):
            self._readers.setdefault(key, set()).add(replica)
            self._readers.move_to_end(key)
        while len(self._readers) > self._max_blocks:
            self._readers.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forgets all replicas but these.

        One that has not had a request yet starts with as many as the one that had fewest.
        """
        known = {name: self._sent[name] for name in replicas if name in self._sent}
        fewest = min(known.values(), default=0)
        self._sent = collections.Counter({name: known.get(name, fewest) for name in replicas})
        for key, readers in [*self._readers.items()]:
            readers.intersection_update(replicas)
            if not readers:
                del self._readers[key]

    def _blocks_read(self, keys: Sequence[bytes], replicas: Iterable[str]) -> dict[str, int]:
        """The blocks from the start on that each replica has read."""
        found = dict.fromkeys(replicas, 0)
        reading = set(found)
        for key in keys:
            reading &= self._readers.get(key, set())
            if not reading:
                break
            for replica in reading:
                found[replica] += 1
        return found
