"""Fault: the errors of a cache that are found inside jit."""

import enum


class Fault(enum.IntFlag):
    """Errors found inside jit, where nothing can be raised; `KVCache.check` raises them."""

    OVERFLOW = 1
    UNKNOWN_BLOCK = 2
    REPEATED_BLOCK = 4
    TWO_WRITERS = 8
    BAD_CUT = 16

    def describe(self) -> str:
        """A sentence for each fault, joined by semicolons."""
        sentences = {
            Fault.OVERFLOW: "a block was written beyond its capacity; the tokens that did not fit "
            "were dropped: create the cache with larger capacities",
            Fault.UNKNOWN_BLOCK: "a row listed a block that the cache does not have, or a "
            "transition named one",
            Fault.REPEATED_BLOCK: "a row listed the same block twice",
            Fault.TWO_WRITERS: "two rows wrote the same block in one pass; the last block that a "
            "row lists must be its own",
            Fault.BAD_CUT: "a block was cut outside its tokens, or into a tail that owns a part of "
            "the cache",
        }
        return "; ".join(text for fault, text in sentences.items() if fault in self)
