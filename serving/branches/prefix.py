"""Prefixes: text that is prefilled once and used in many calls.

Hydragen's code calls this preserve, extend and wipe.
"""

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
from jax import Array

from jaxshare.arena import arena_size
from jaxshare.argument_checks import INT32_MAX, as_integer
from jaxshare.models import LoadedModel
from jaxshare.serving.engine.metrics import Metrics
from jaxshare.serving.engine.prefill import feed_node
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.inputs import check_context, encode, token_bytes
from jaxshare.serving.kvcache.eviction import make_policy
from jaxshare.serving.kvcache.manager import KVManager
from jaxshare.serving.kvcache.pool import whole_tiles
from jaxshare.serving.kvcache.prefix_tree import Node
from jaxshare.serving.kvcache.speeds import FixedSpeeds


class Prefixes:
    """Pinned prefixes in one memory, shared with the calls of `generate` that use them.

        store = Prefixes(model, max_tokens=16384)
        book = store.add(document)
        answers = generate(model, questions, prefix=book)  # the document is not prefilled again
        chapter = book.extend(more)  # sees the book, and is stored beside it
        chapter.drop()

    Attributes:
      model: as loaded.
      kv: the keys and values of the prefixes, and of the rows of calls that use them.
      busy: whether a call uses them.
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
        if max_kv_bytes is not None:
            tokens = as_integer("max_kv_bytes", max_kv_bytes) // token_bytes(model)
        else:
            tokens = None if max_tokens is None else as_integer("max_tokens", max_tokens)
        tokens = 2 * model.config.max_positions if tokens is None else tokens
        if not 1 <= tokens <= INT32_MAX:
            raise ValueError(
                f"the store would hold {tokens} tokens of {token_bytes(model)} bytes each; give it "
                "room for at least 1"
            )
        capacity = arena_size(tokens) if max_kv_bytes is None else whole_tiles(tokens)
        self.model = model.for_context(model.config.max_positions)
        self.busy = False
        self.kv = KVManager(
            self.model,
            tokens=capacity,
            host_tokens=0,
            policy=make_policy("lru"),
            metrics=Metrics(),
            speeds=FixedSpeeds(),
        )

    @property
    def free_tokens(self) -> int:
        """Tokens that no prefix has, and no row of a call."""
        return self.kv.pool.free

    def add(self, text: str | Sequence[int]) -> "Prefix":
        """Prefills a prefix that starts a prompt.

        Raises:
          ValueError: an empty text, one that does not fit the model's context or the store, or a
            store that another call uses.
          NotANumberError: the model's logits are not finite.
        """
        return self._add(None, encode(self.model, text))

    def check(self) -> None:
        """Raises ValueError if another call uses the store, or if its cache is lost."""
        if self.busy:
            raise ValueError(
                "another call uses this store of prefixes; let it end, or close its stream, first"
            )
        if self.kv.pool.is_lost:
            raise ValueError(
                "a pass over this store of prefixes was interrupted, and its cache is lost; make a "
                "new store"
            )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Refuses all other use meanwhile: passes donate the cache and return another.

        Raises:
          ValueError: see `check`.
        """
        self.check()
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _add(self, parent: "Prefix | None", tokens: Sequence[int]) -> "Prefix":
        before = parent.all_tokens if parent else []
        check_context(self.model, len(before) + len(tokens), 1, "the prefix")
        with self.exclusive():
            node = self.kv.pin(parent.node if parent else None, np.asarray(tokens, np.int32))
            if node is None:
                pool = self.kv.pool
                raise ValueError(
                    f"the prefix has {len(tokens)} tokens, but of the store's {pool.tokens} the "
                    f"largest piece that is free has {pool.largest}; drop a prefix or give the "
                    "store more room"
                )
            if not feed_node(self.model, self.kv, node):
                self.kv.unpin(node)
                raise NotANumberError.of("the prefix", f"{len(before) + len(tokens)} tokens")
        return Prefix(self, parent, node, [*before, *tokens])


class Prefix:
    """A stored prefix; see `Prefixes`. As a context manager, it is dropped on exit.

    Attributes:
      store: the store that holds it.
      node: of the store's prefix tree; it is pinned there.
      all_tokens: its tokens, after those of the prefix that it extends.
    """

    def __init__(self, store: Prefixes, parent: "Prefix | None", node: Node, all_tokens: list[int]):
        self.store, self.node, self.all_tokens = store, node, all_tokens
        self._parent, self._extensions, self._dropped = parent, 0, False
        if parent:
            parent._extensions += 1

    @property
    def tokens(self) -> int:
        """The number of its tokens, those of the prefix that it extends included."""
        return len(self.all_tokens)

    @property
    def logits(self) -> Array:
        """float32[V] after its last token."""
        assert self.node.logits is not None
        return self.node.logits

    def extend(self, text: str | Sequence[int]) -> "Prefix":
        """Prefills a further prefix that continues this one, which stays as it is.

        Nothing is copied.

        Raises:
          ValueError: see `Prefixes.add`, or this prefix has been dropped.
          NotANumberError: see `Prefixes.add`.
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
        with self.store.exclusive():
            self.store.kv.unpin(self.node)
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
