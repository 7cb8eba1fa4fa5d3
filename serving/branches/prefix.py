"""Prefixes: text that is prefilled once and used in many calls.

Hydragen's code calls this preserve, extend and wipe.
"""

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
"""The initial maximum number of blocks in a store. A call with more rows raises it."""


class Prefixes:
    """A store of prefixes in one cache, shared with the calls of `generate` that use them.

        store = Prefixes(model, max_tokens=16384)
        book = store.add(document)
        answers = generate(model, questions, prefix=book)  # the document is not prefilled again
        chapter = book.extend(more)  # sees the book, and is stored beside it
        chapter.drop()

    Attributes:
      model: as loaded.
      arena: holds the prefixes, and the rows of calls that use them.
    """

    def __init__(
        self, model: LoadedModel, *, max_tokens: int | None = None, max_kv_bytes: int | None = None
    ):
        """Makes an empty store.

        Args:
          model: as loaded.
          max_tokens: capacity for all prefixes and the rows below them; default twice the model's
            context.
          max_kv_bytes: the same in bytes of keys and values.

        Raises:
          ValueError: both are given, or there is room for less than one token.
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
        capacity = arena_size(tokens) if max_kv_bytes is None else whole_tiles(tokens)
        self.model = model.for_context(model.config.max_positions)
        self.arena = Arena(model, capacity, _SLOTS)

    def add(self, text: str | Sequence[int]) -> "Prefix":
        """Prefills a prefix that starts a prompt.

        Raises:
          ValueError: an empty text, one that does not fit the model's context or the store, or a
            store that another call uses.
        """
        return self._add(None, encode(self.model, text))

    def check(self) -> None:
        """Raises ValueError if another call uses the store, or if its cache is lost."""
        _check_available(self.arena)

    def _add(self, parent: "Prefix | None", tokens: Sequence[int]) -> "Prefix":
        total = (parent.tokens if parent else 0) + len(tokens)
        check_context(self.model, total, 1, "the prefix")
        with exclusive(self.arena):
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
        return Prefix(self, parent, block, total, logits[block])


class Prefix:
    """A stored prefix; see `Prefixes`. As a context manager, it is dropped on exit.

    Attributes:
      store: the store that holds it.
      tokens: its number of tokens, those of the prefix that it extends included.
      path: its blocks in the store's cache, from the root on.
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
        """Prefills a further prefix that continues this one, which stays as it is.

        Nothing is copied.

        Raises:
          ValueError: see `Prefixes.add`, or this prefix has been dropped.
        """
        self.check()
        return self.store._add(self, encode(self.store.model, text, first=False))

    def drop(self) -> None:
        """Frees its memory. Dropping it again does nothing.

        Raises:
          ValueError: another prefix extends it, or another call uses the store.
        """
        if self._dropped:
            return
        if self._extensions:
            raise ValueError(
                f"this prefix is extended by {self._extensions} more; drop those first"
            )
        with exclusive(self.store.arena):
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
def exclusive(arena: Arena) -> Iterator[None]:
    """Refuses all other use of the arena meanwhile: passes donate its cache and return another.

    Raises:
      ValueError: another call uses the arena, or its cache is lost.
    """
    _check_available(arena)
    arena.busy = True
    try:
        yield
    finally:
        arena.busy = False


def _check_available(arena: Arena) -> None:
    """Raises ValueError if a call uses the arena, or if its cache is lost."""
    if arena.busy:
        raise ValueError(
            "another call uses this store of prefixes; let it end, or close its stream, first"
        )
    if arena.cache.keys[0].is_deleted():
        raise ValueError(
            "a pass over this store of prefixes was interrupted, and its cache is lost; make a new "
            "store"
        )
