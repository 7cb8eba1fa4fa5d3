"""Logits processors of rows in the decode loop: which each has, their parameters and states."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Bool, Float, Int, UInt32

from jaxshare.decoding.history import History
from jaxshare.decoding.processors import LogitsProcessor, find_processor
from jaxshare.decoding.samplers import Samplers
from jaxshare.decoding.sampling import history_spec, largest, vocab_axis, vocab_spec
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.sharding import Axis, gathered, on_each


@dataclasses.dataclass(frozen=True)
class ProcessorPlaces:
    """The processors that a program has, and the most that a row has. More are another program.

    Attributes:
      processors: all of them.
      most: K, of one row.
    """

    processors: tuple[LogitsProcessor, ...] = ()
    most: int = 0

    @classmethod
    def of(cls, samplers: Iterable[Sampler]) -> "ProcessorPlaces":
        """The fewest that serve these samplers."""
        given = [[find_processor(name) for name, _ in each.processors] for each in samplers]
        found = dict.fromkeys(processor for of_row in given for processor in of_row)
        return cls(tuple(found), max(map(len, given), default=0))

    def grown(self, other: "ProcessorPlaces") -> "ProcessorPlaces":
        """Returns places for both; the processors of these come first."""
        both = dict.fromkeys((*self.processors, *other.processors))
        return ProcessorPlaces(tuple(both), max(self.most, other.most))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Processing:
    """The logits processors of R rows.

    Attributes:
      numbers: int32[R, K], the places in `processors` of those that a row has, in its order; -1 for
        none.
      values: for each processor its parameters by name, float32[R].
      states: for each processor its states, a pytree of arrays [R, ...]. A row's is defined from
        its first sampled token on.
      processors: those that are compiled in (static).
    """

    numbers: Array
    values: tuple[dict[str, Array], ...]
    states: tuple[Any, ...]
    processors: tuple[LogitsProcessor, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def stack(
        cls, samplers: Sequence[Sampler], *, places: ProcessorPlaces | None = None
    ) -> Self | None:
        """The processors of rows with these samplers; None where there is none.

        Args:
          samplers: of the rows.
          places: to leave some for later rows; default the fewest that these need.
        """
        places = ProcessorPlaces.of(samplers) if places is None else places
        if not places.processors:
            return None
        rows = len(samplers)
        numbers = np.full((rows, places.most), -1, np.int32)
        values = [
            {name: np.full(rows, value, np.float32) for name, value in each.parameters.items()}
            for each in places.processors
        ]
        for row, sampler in enumerate(samplers):
            for place, (name, given) in enumerate(sampler.processors):
                number = places.processors.index(find_processor(name))
                numbers[row, place] = number
                for parameter, value in given:
                    values[number][parameter][row] = value
        states = tuple(_initial(each, rows) for each in places.processors)
        numbers, values, states = jax.device_put((numbers, tuple(values), states))
        return cls(numbers, values, states, places.processors)

    @property
    def places(self) -> ProcessorPlaces:
        """The places that its rows have."""
        return ProcessorPlaces(self.processors, self.numbers.shape[1])

    @property
    def used(self) -> Bool[Array, " R"]:
        """The rows that have a processor."""
        return jnp.any(self.numbers >= 0, axis=1)

    def with_states_of(self, other: "Processing | None") -> "Processing":
        """The same with the states of another one of as many rows, where both have a processor."""
        if other is None:
            return self
        known = dict(zip(other.processors, other.states, strict=True))
        pairs = zip(self.processors, self.states, strict=True)
        return dataclasses.replace(self, states=tuple(known.get(p, own) for p, own in pairs))

    def row_states(self, row: int) -> dict[LogitsProcessor, Any]:
        """The states of one row by processor."""
        states = _take(self.states, np.asarray([row]))
        return dict(zip(self.processors, states, strict=True))

    def with_row_states(self, row: int, states: Mapping[LogitsProcessor, Any]) -> "Processing":
        """The same with states of one row that `row_states` has given."""
        new = tuple(
            states.get(each, own)
            for each, own in zip(
                self.processors, _take(self.states, np.asarray([row])), strict=True
            )
        )
        return dataclasses.replace(self, states=_put(self.states, new, np.asarray([row])))

    def take(self, rows: Int[np.ndarray, " r"]) -> "Processing":
        """The processors of these rows alone."""
        numbers, values, states = _take((self.numbers, self.values, self.states), rows)
        return Processing(numbers, values, states, self.processors)

    def only(self, places: ProcessorPlaces) -> "Processing":
        """The same with these processors alone, which the others' rows do not have."""
        index = [self.processors.index(each) for each in places.processors]
        back = np.full(len(self.processors) + 1, -1, np.int32)
        back[index] = np.arange(len(index))  # -1 finds the last entry, which is -1
        return Processing(
            jnp.asarray(back)[self.numbers[:, : places.most]],
            tuple(self.values[i] for i in index),
            tuple(self.states[i] for i in index),
            places.processors,
        )

    def grown(self, places: ProcessorPlaces) -> "Processing":
        """The same with these processors, of which the first ones are its own."""
        rows = self.numbers.shape[0]
        stacked = Processing.stack([Sampler()] * rows, places=places)
        assert stacked is not None
        numbers = stacked.numbers.at[:, : self.numbers.shape[1]].set(self.numbers)
        values = (*self.values, *stacked.values[len(self.values) :])
        states = (*self.states, *stacked.states[len(self.states) :])
        return Processing(numbers, values, states, places.processors)

    def put(self, part: "Processing | None", rows: Int[np.ndarray, " r"]) -> "Processing":
        """The same with the processors of a part's rows in these places; None has none."""
        if part is None:
            return dataclasses.replace(self, numbers=self.numbers.at[rows].set(-1))
        whole = self.grown(self.places.grown(part.places))
        index = [whole.processors.index(each) for each in part.processors]
        back = jnp.asarray([*index, -1], jnp.int32)
        numbers = whole.numbers.at[rows].set(-1)
        numbers = numbers.at[rows, : part.numbers.shape[1]].set(back[part.numbers])
        values, states = [*whole.values], [*whole.states]
        for i, value, state in zip(index, part.values, part.states, strict=True):
            values[i], states[i] = _put((values[i], states[i]), (value, state), rows)
        return Processing(numbers, tuple(values), tuple(states), whole.processors)

    def apply(
        self,
        logits: Float[Array, "R V"],
        history: History,
        positions: Int[Array, " R"],
        due: Bool[Array, " R"],
    ) -> tuple[Float[Array, "R V"], tuple[Any, ...]]:
        """The logits after the processors of the rows that are due, and all states then.

        Args:
          logits, history: of the whole vocabulary.
          positions: tokens that each row has sampled; a state starts anew with the first.
          due: the rows that sample.
        """
        starts = positions == 0
        states = tuple(
            jax.tree.map(functools.partial(_where, starts), _initial(each, len(due)), old)
            for each, old in zip(self.processors, self.states, strict=True)
        )

        def apply_place(place: Array, carry: Any) -> Any:
            logits, states = carry
            number = lax.dynamic_index_in_dim(self.numbers, place, axis=1, keepdims=False)
            new = list(states)
            for n, processor in enumerate(self.processors):
                uses = due & (number == n)
                run = functools.partial(_run, processor, history, self.values[n], uses)
                logits, new[n] = lax.cond(jnp.any(uses), run, lambda x, s: (x, s), logits, new[n])
            return logits, tuple(new)

        return lax.fori_loop(0, self.numbers.shape[1], apply_place, (logits, states))


@dataclasses.dataclass(frozen=True)
class Processed:
    """The logits that rows sample from, and the settings that have not changed them yet.

    Attributes:
      logits: float32[R, V].
      samplers, history, masks: with which they are sampled from.
      processing: after the draw; None where no row has a processor.
      failed: bool[R], rows whose processors have left nothing to sample from.
    """

    logits: Array
    samplers: Samplers
    history: History
    masks: Array
    processing: Processing | None
    failed: Array

    def as_drawn(
        self,
        logits: Float[Array, "R V"],
        positions: Int[Array, " R"],
        wanted: Bool[Array, " R"],
        mesh: Mesh | None,
    ) -> Float[Array, "R V"]:
        """The logits with those of the rows that are wanted replaced by the logarithms of the
        chances that their tokens are drawn with (`Samplers.chances`)."""

        def logs_of_chances() -> Array:
            chances = self.samplers.chances(
                self.logits, positions, history=self.history, masks=self.masks, mesh=mesh
            )
            return jnp.where(wanted[:, None], jnp.log(chances), logits)

        return lax.cond(jnp.any(wanted), logs_of_chances, lambda: logits)


def processed_logits(
    processing: Processing | None,
    samplers: Samplers,
    logits: Float[Array, "R V"],
    history: History,
    masks: UInt32[Array, "R W"],
    positions: Int[Array, " R"],
    due: Bool[Array, " R"],
    mesh: Mesh | None,
) -> Processed:
    """The logits after biases, penalties, bans and processors, where any row has some of these last;
    else the logits as they are. For the arguments see `Samplers.sample` and `Processing.apply`."""
    if processing is None:
        return Processed(logits, samplers, history, masks, None, jnp.zeros(due.shape, bool))
    axis, none = vocab_axis(mesh, logits.shape[-1]), PartitionSpec()
    changed, states = on_each(
        functools.partial(_changed_rows, axis),
        mesh,
        in_specs=(none, none, vocab_spec(axis), history_spec(axis), none, none),
        out_specs=(vocab_spec(axis), none),
    )(samplers, processing, logits, history, positions, due)
    return Processed(
        changed,
        samplers.without_changes(),
        History.empty(due.shape[0]),
        masks,
        dataclasses.replace(processing, states=states),
        due & processing.used & ~jnp.isfinite(largest(changed, mesh)),
    )


def _changed_rows(
    axis: Axis | None,
    samplers: Samplers,
    processing: Processing,
    logits: Array,
    history: History,
    positions: Array,
    due: Array,
) -> tuple[Array, tuple[Any, ...]]:
    """The changed logits of a device's part of the vocabulary: functions see all of a row."""
    part = logits.shape[1]
    first = 0 if axis is None else lax.axis_index(axis) * part
    all_admitted = jnp.zeros((logits.shape[0], 0), jnp.uint32)  # masks come after the functions
    changed = samplers.changed(logits, history, all_admitted, positions, first)
    changed = gathered(changed, axis)
    changed, states = processing.apply(changed, history, positions, due)
    return lax.dynamic_slice_in_dim(changed, first, part, axis=1), states


def _run(
    processor: LogitsProcessor,
    history: History,
    values: dict[str, Array],
    uses: Array,
    logits: Array,
    state: Any,
) -> tuple[Array, Any]:
    def of_row(logits: Array, tokens: Array, size: Array, state: Any, values: Any) -> Any:
        return processor.function(logits, tokens, size, state, **values)

    found = jax.vmap(of_row)(logits, history.tokens, history.size, state, values)
    return jax.tree.map(functools.partial(_where, uses), found, (logits, state))


def _where(rows: Array, new: Array, old: Array) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _initial(processor: LogitsProcessor, rows: int) -> Any:
    return jax.tree.map(
        lambda leaf: np.broadcast_to(leaf, (rows, *leaf.shape)).copy(), processor.state
    )


@jax.jit
def _take(tree: Any, rows: Any) -> Any:
    return jax.tree.map(lambda array: array[rows], tree)


@jax.jit
def _put(whole: Any, new: Any, rows: Any) -> Any:
    return jax.tree.map(lambda array, part: array.at[rows].set(part), whole, new)
