"""The grammars of rows inside the decode loop: which tokens each of them may sample next.

A grammar that is regular and small is a table on the device: its states are the numbers that rows
carry, and no host takes part. Masks of other grammars come from a `MaskServer` on the host, which
computes them while the device is at work on the next pass. Either way a token that alone is left is
forced: it is fed along with the token before it, and not sampled in a pass of its own.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import io_callback
from jax.sharding import Mesh
from jaxtyping import Bool, Int, UInt32

from jaxshare import cpu
from jaxshare.decoding.array_rows import filled
from jaxshare.decoding.grammar_tables import MOST_FORCED, GrammarTables
from jaxshare.pallas.device import current_device

NO_GRAMMAR, SERVED = -1, -2
"""The states of rows without a grammar, and of those whose masks a server has."""
_ALL = np.uint32(0xFFFFFFFF)


class MaskServer(Protocol):
    """The grammars of rows that the host reads along with."""

    def advance(
        self,
        tokens: Int[np.ndarray, " R"],
        sampled: Bool[np.ndarray, " R"],
        room: Int[np.ndarray, " R"],
        least: int,
    ) -> tuple[Int[np.ndarray, "R F"], Int[np.ndarray, " R"]]:
        """Reads the tokens that rows have just sampled.

        Args:
          tokens: of each row.
          sampled: the rows that have sampled one.
          room: how many forced tokens each row can take.
          least: as many forced tokens in all rows together pay; fewer come one by one, where masks
            admit nothing else.

        Returns:
          The forced tokens that follow, and how many there are: all read, too.
        """
        ...

    def masks(self, rows: int) -> UInt32[np.ndarray, "R W"]:
        """The tokens that rows may sample next, a bit each, in words of 32, the lowest bit first.
        All bits of rows that it does not serve are 1."""
        ...


_servers: "weakref.WeakValueDictionary[int, MaskServer]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register_server(server: MaskServer) -> int:
    """Returns the number by which a decode state names a server, for as long as the server lives."""
    number = next(_numbers)
    _servers[number] = server
    return number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GrammarRows:
    """The grammars of R rows. A part that no row needs has size 0, and costs nothing.

    Attributes:
      states: int32[R], the state of each row in `tables`, or `NO_GRAMMAR` or `SERVED`.
      words: uint32[R, W], the masks of rows that a server has, where the host is the device; elsewhere
        it is asked for them, and only the size of this tells that there is a server. [R, 0] for none.
      tables: the grammars on the device.
      server: int32[], the number of the server.
      ticket: int32[], orders the calls of the server.
    """

    states: Array
    words: Array
    tables: GrammarTables
    server: Array
    ticket: Array

    @classmethod
    def none(cls, rows: int, vocab_size: int) -> "GrammarRows":
        """Rows without a grammar, and without room for one."""
        return cls(
            filled(rows, NO_GRAMMAR),
            filled((rows, 0), dtype=np.uint32),
            GrammarTables.empty(vocab_size),
            filled(()),
            filled(()),
        )

    @property
    def in_use(self) -> bool:
        """True if any row can have a grammar."""
        return self.tables.num_states > 0 or self.words.shape[1] > 0

    def with_server(self, number: int) -> "GrammarRows":
        """The same with the masks of the rows that this server serves, as they are now."""
        words = jax.device_put(np.asarray(_servers[number].masks(self.states.shape[0])))
        return dataclasses.replace(self, words=words, server=filled((), number))

    def with_states(self, states: Int[Any, " R"]) -> "GrammarRows":
        """The same with other states of rows."""
        return dataclasses.replace(self, states=states)

    def masks(self, due: Bool[Array, " R"], mesh: Mesh | None = None) -> UInt32[Array, "R W"]:
        """The tokens that each row may sample, as `MaskServer.masks` has them; [R, 0] if no row can
        have a grammar.

        Args:
          due: the rows that sample; the masks of others mean nothing.
          mesh: of the model.
        """
        rows = self.states.shape[0]
        if not self.in_use:
            return jnp.zeros((rows, 0), jnp.uint32)
        words = jnp.full((rows, self.tables.num_words), _ALL, jnp.uint32)
        if self.words.shape[1]:
            words = self._served_words(words, due, mesh)
        if self.tables.num_states:
            of_table = self.tables.masks[jnp.maximum(self.states, 0)]
            words = jnp.where((self.states >= 0)[:, None], of_table, words)
        return words

    def _served_words(self, words: Array, due: Array, mesh: Mesh | None) -> Array:
        """The masks with those of the rows that a server has."""
        served = self.states == SERVED
        if _is_host():
            return jnp.where(served[:, None], self.words, words)

        def ask(words: Array) -> Array:
            (given,) = _call(_masks, mesh, (words,), self.server, self.ticket)
            return jnp.where(served[:, None], given, words)

        return jax.lax.cond(jnp.any(due & served), ask, lambda words: words, words)

    def after(
        self,
        token: Int[Array, " R"],
        sampled: Bool[Array, " R"],
        room: Int[Array, " R"],
        least: Int[Array, ""],
        mesh: Mesh | None = None,
    ) -> tuple["GrammarRows", Int[Array, "R F"], Int[Array, " R"]]:
        """The grammars after rows have sampled, the tokens that these force, and how many.

        Args:
          token: of each row.
          sampled: the rows that have sampled one, and go on.
          room: how many forced tokens each row can take.
          least: see `MaskServer.advance`.
          mesh: of the model.
        """
        rows = self.states.shape[0]
        forced, count = jnp.zeros((rows, MOST_FORCED), jnp.int32), jnp.zeros(rows, jnp.int32)
        states = self.states
        if self.tables.num_states:
            reads = sampled & (states >= 0)
            states, forced, count = self._read(token, reads, room, least)
        after = dataclasses.replace(self, states=states)
        if not self.words.shape[1]:
            return after, forced, count
        served = sampled & (self.states == SERVED)
        # One array each way: what they hold takes less time than to describe them to the host.
        numbers = jnp.stack([self.server, self.ticket, least])[:, None]
        of_rows = jnp.stack([token, served.astype(jnp.int32), room])
        message = jnp.concatenate([numbers, of_rows], axis=1)
        nothing = jnp.zeros((1 + rows, 1 + MOST_FORCED), jnp.int32).at[0, 0].set(self.ticket)
        other = nothing, *([self.words] if _is_host() else [])
        answer, *words = jax.lax.cond(
            jnp.any(served),
            lambda *_: tuple(_call(_advance, mesh, other, message)),
            lambda *same: same,
            *other,
        )
        return (
            dataclasses.replace(
                after, ticket=answer[0, 0], words=words[0] if words else self.words
            ),
            jnp.where(served[:, None], answer[1:, 1:], forced),
            jnp.where(served, answer[1:, 0], count),
        )

    def _read(
        self, token: Array, reads: Array, room: Array, least: Array
    ) -> tuple[Array, Array, Array]:
        """The states of rows that read a token with a table, what is forced, and how much."""
        reached = self.tables.step(jnp.maximum(self.states, 0), jnp.maximum(token, 0))
        count = jnp.where(reads, jnp.minimum(self.tables.num_forced[reached], room), 0)
        count = jnp.where(jnp.sum(count) >= least, count, 0)
        last = jnp.take_along_axis(
            self.tables.after[reached], jnp.maximum(count - 1, 0)[:, None], axis=1
        )[:, 0]
        states = jnp.where(reads, jnp.where(count > 0, last, reached), self.states)
        return states, self.tables.forced[reached], count


# The calls of the server.


def _masks(server: Any, ticket: Any, words: np.ndarray) -> None:
    del ticket
    words[:] = 0  # where the server fails, no token is left
    words[:] = _servers[int(server)].masks(len(words))


def _advance(message: np.ndarray, answer: np.ndarray, *words: np.ndarray) -> None:
    """Tells a server what was sampled.

    Args:
      message: int32[3, 1 + R]: server, ticket and `least`, and for each row the token, whether it is
        to be read, and the room.
      answer: int32[1 + R, 1 + F]: the next ticket, and for each row the number of forced tokens, and
        these.
      words: the masks, if they are wanted now.
    """
    (number, ticket, least), (tokens, sampled, room) = message[:, 0].tolist(), message[:, 1:]
    answer[0, 0] = (ticket + 1) % 2**31
    try:
        server = _servers[number]
        answer[1:, 1:], answer[1:, 0] = server.advance(tokens, sampled > 0, room, least)
        for array in words:
            array[:] = server.masks(len(array))
    except BaseException:
        answer[1:] = 0
        for array in words:
            array[:] = 0  # no token is left
        raise


def _is_host() -> bool:
    """True where the host that computes masks is the device that samples: they are then computed as
    soon as they can be, in the same call. Elsewhere that would let the device wait."""
    return current_device() is None


def _call(
    function: Callable[..., None], mesh: Mesh | None, like: Sequence[Array], *arguments: Array
) -> Sequence[Array]:
    """Calls a function on the host, whose results are arrays like these."""
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in like]
    if mesh is None and cpu.used_for(None):
        from jaxshare.cpu.host_call import cpu_host_call  # needs llvmlite, as all kernels there

        return cpu_host_call(function, shapes, *arguments)

    def call(*given: Any) -> list[np.ndarray]:
        results = [np.zeros(shape.shape, shape.dtype) for shape in shapes]
        function(*map(np.asarray, given), *results)
        return results

    return io_callback(call, shapes, *arguments)


def admitted(logits: Array, words: UInt32[Array, "R W"], first: Array | int = 0) -> Array:
    """The logits of tokens that the bits of `words` admit, and -inf for others.

    Args:
      logits: [R, V] of the vocabulary from token `first` on.
      words: as `GrammarRows.masks` gives them; [R, 0] admits all.
    """
    if not words.shape[1]:
        return logits

    def without(logits: Array) -> Array:
        bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        bits = bits.reshape(words.shape[0], -1)
        bits = jax.lax.dynamic_slice_in_dim(bits, first, logits.shape[1], axis=1)
        return jnp.where(bits > 0, logits, -jnp.inf)

    return jax.lax.cond(jnp.all(words == _ALL), lambda logits: logits, without, logits)
