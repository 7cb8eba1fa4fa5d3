"""Prefix handles: text that is prefilled once and used in many calls (what Hydragen's authors call
preserve, extend and wipe)."""

import contextlib
from collections.abc import Iterator, Sequence

from jax import Array

from jaxshare.arena import arena_size
from jaxshare.models import LoadedModel
from jaxshare.serving.branches.arena import Arena
from jaxshare.serving.engine.prefill import Feed, feed_all
from jaxshare.serving.inputs import check_context, encode, token_bytes
from jaxshare.serving.kvcache.pool import whole_tiles

_SLOTS = 1024
"""Blocks that a store can have at first. Calls with more rows than that make it have more."""


class Prefixes:
    """A store of prefixes in one cache, which calls of `generate` with such a prefix use too.

        store = Prefixes(model, max_tokens=16384)
        book = store.add(document)
        answers = generate(model, questions, prefix=book)      # nothing of the document is read in again
        chapter = book.extend(more)                            # sees the book, and is kept beside it
        chapter.drop()

    Attributes:
      model: as loaded.
      arena: what the prefixes are kept in, and the rows of calls that use them.
    """

    def __init__(
        self, model: LoadedModel, *, max_tokens: int | None = None, max_kv_bytes: int | None = None
    ):
        """An empty store.

        Args:
          model: as loaded.
          max_tokens: room for all prefixes and for what rows below them write; default twice the
            model's context.
          max_kv_bytes: the same in bytes of keys and values.

        Raises:
          ValueError: both, or room for less than one token.
        """
        if max_tokens is not None and max_kv_bytes is not None:
            raise ValueError("max_tokens and max_kv_bytes are both given; give one of them")
        tokens = max_kv_bytes // token_bytes(model) if max_kv_bytes is not None else max_tokens
        tokens = 2 * model.config.max_positions if tokens is None else tokens
        if tokens < 1:
            raise ValueError(
                f"the store would hold {tokens} tokens of {token_bytes(model)} bytes each; give it "
                "room for at least 1"
            )
        room = arena_size(tokens) if max_kv_bytes is None else whole_tiles(tokens)
        self.model, self.arena = (
            model.for_context(model.config.max_positions),
            Arena(model, room, _SLOTS),
        )

    def add(self, text: str | Sequence[int]) -> "Prefix":
        """Prefills a prefix that begins a prompt.

        Raises:
          ValueError: an empty text, one that does not fit the model's context or the store, or a
            store that is at work.
        """
        return self._add(None, encode(self.model, text))

    def check(self) -> None:
        """Raises ValueError if another call is at work with the store, or if its cache is lost."""
        check_free(self.arena)

    def _add(self, parent: "Prefix | None", tokens: Sequence[int]) -> "Prefix":
        check_context(self.model, (parent.tokens if parent else 0) + len(tokens), 1, "the prefix")
        with at_work(self.arena):
            block = self.arena.take(len(tokens))
            if block is None:
                raise ValueError(
                    f"the prefix has {len(tokens)} tokens, but of the store's {self.arena.tokens} "
                    f"the largest piece that is free has {self.arena.largest}; drop a prefix or "
                    "give the store more room"
                )
            path = parent.path if parent else ()
            logits, cache, _ = feed_all(
                self.model, self.arena.settle(), [Feed(block, path, tokens)], len(path) + 1
            )
            self.arena.cache = cache
        return Prefix(
            self, parent, block, (parent.tokens if parent else 0) + len(tokens), logits[block]
        )


class Prefix:
    """A prefix that is kept; see `Prefixes`. Used as a context manager, it is dropped at the end.

    Attributes:
      store: where it is kept.
      tokens: how many it has, those of what it extends included.
      path: its blocks in the store's cache, from the first on.
      logits: float32[V] after its last token.
    """

    def __init__(
        self, store: Prefixes, parent: "Prefix | None", block: int, tokens: int, logits: Array
    ):
        self.store, self.tokens, self.logits = store, tokens, logits
        self.path: tuple[int, ...] = (*(parent.path if parent else ()), block)
        self._parent, self._extensions, self._dropped = parent, 0, False
        if parent:
            parent._extensions += 1

    def extend(self, text: str | Sequence[int]) -> "Prefix":
        """A further prefix behind this one, which stays as it is. Nothing is copied.

        Raises:
          ValueError: as `Prefixes.add`, or this prefix has been dropped.
        """
        self.check()
        return self.store._add(self, encode(self.store.model, text, first=False))

    def drop(self) -> None:
        """Frees its memory. Dropping it again does nothing.

        Raises:
          ValueError: another prefix extends it, or the store is at work.
        """
        if self._dropped:
            return
        if self._extensions:
            raise ValueError(
                f"this prefix is extended by {self._extensions} more; drop those first"
            )
        with at_work(self.store.arena):
            self.store.arena.give_back(self.path[-1])
        self._dropped = True
        if self._parent:
            self._parent._extensions -= 1

    def check(self) -> None:
        """Raises ValueError if it has been dropped."""
        if self._dropped:
            raise ValueError("this prefix has been dropped; add it to its store again")

    def __enter__(self) -> "Prefix":
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


@contextlib.contextmanager
def at_work(arena: Arena) -> Iterator[None]:
    """While this lasts nobody else may use the arena, because passes take its cache and give back
    another."""
    check_free(arena)
    arena.busy = True
    try:
        yield
    finally:
        arena.busy = False


def check_free(arena: Arena) -> None:
    """Raises ValueError if somebody is at work with the arena, or if its cache is lost."""
    if arena.busy:
        raise ValueError(
            "another call is at work with this store of prefixes; let it end, or close its stream, "
            "first"
        )
    if arena.cache.keys[0].is_deleted():
        raise ValueError(
            "a pass over this store of prefixes was interrupted, and its cache is lost; make a new "
            "store"
        )
