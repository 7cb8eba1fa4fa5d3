"""Saved sessions of workers: what a session knows, and how its state is written and read.

A session is saved whole, with keys and values, or small, with the trace that they are computed
again from (`jaxshare.models.reencode`).
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxshare import DecodeState, FinishReason, KVCache, Sampler, cache_io
from jaxshare.models import LoadedModel, reencode
from jaxshare.serving.checkpoints import (
    CheckpointStore,
    SavedCheckpoint,
    SaveError,
    leaves,
    on_host,
)
from jaxshare.serving.workers.answers import AnswerRule
from jaxshare.serving.workers.layouts import MakeLayout, WorkersLayout
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Answer
from jaxshare.serving.workers.roster import Roster
from jaxshare.serving.workers.transcript import Event
from jaxshare.trace.trace import Trace

_FORMAT = "jaxshare session 3"
_TRACE = "trace"
"""The array that has the bytes of the trace."""


@dataclasses.dataclass(frozen=True)
class SessionFacts:
    """What a session of workers knows beside its state on the device.

    Attributes:
      model, tokenizer: fingerprints of both.
      context: the longest text, in tokens, that the model was prepared for
        (`ModelConfig.for_context`).
      settings: what it was made with, by the names of `Workers`' arguments; a layout function is
        None.
      party: who takes part.
      passes, waits, ended, seconds, prefill_seconds: see `Workers`.
      reasons: why each worker is not running.
      prepared: for each worker the first of its steps that the device has no opening for.
      people: that have spoken.
      transcript: `Transcript.facts`.
      events: that nobody has been given yet.
      answers: by budget.
    """

    model: str
    tokenizer: str
    context: int
    settings: Mapping[str, Any]
    party: Roster
    passes: int
    waits: int
    ended: str | None
    seconds: float
    prefill_seconds: float
    reasons: Mapping[str, FinishReason]
    prepared: Mapping[str, int]
    people: Collection[str]
    transcript: Mapping[str, Any]
    events: Sequence[Event]
    answers: Mapping[int, Answer]

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can say it."""
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {  # of copies, because what is saved is written while the session goes on
            **plain,
            "prepared": {**self.prepared},
            "settings": _settings_as_json(self.settings),
            "party": self.party.as_json(),
            "reasons": {name: int(reason) for name, reason in self.reasons.items()},
            "people": sorted(self.people),
            "events": [dataclasses.asdict(event) for event in self.events],
            "answers": [
                [budget, dataclasses.asdict(answer)] for budget, answer in self.answers.items()
            ],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """What `as_json` gave, among other things."""
        plain = {field.name: given[field.name] for field in dataclasses.fields(cls)}
        return cls(
            **{
                **plain,
                "settings": _settings_from_json(given["settings"]),
                "party": Roster.from_json(given["party"]),
                "reasons": {
                    name: FinishReason(reason) for name, reason in given["reasons"].items()
                },
                "events": [Event(**event) for event in given["events"]],
                "answers": {budget: Answer(**answer) for budget, answer in given["answers"]},
            }
        )


def write(
    saves: CheckpointStore,
    facts: SessionFacts,
    state: DecodeState,
    trace: Trace | None,
    *,
    cache: bool,
    kv_repeats: int,
    wait: bool,
) -> int:
    """Saves a session as it stands.

    Args:
      saves: where to.
      facts, state: of it.
      trace: what it has fed so far, if it is recorded.
      cache: with keys and values; they can be left out where there is a trace.
      kv_repeats: how often the cache has each kv head.
      wait: come back when it is written.

    Returns:
      The number of the save.

    Raises:
      SaveError: see `CheckpointStore.save`.
    """
    arrays: dict[str, Any] = {name: on_host(array) for name, array in leaves(_small(state)).items()}
    told: dict[str, Any] = {
        **facts.as_json(),
        "format": _FORMAT,
        "tokens": None,
        "trace_bytes": None,
    }
    if trace is not None:
        arrays[_TRACE] = np.frombuffer(trace.to_bytes(), np.uint8)
        told["trace_bytes"] = arrays[_TRACE].size
    if cache:
        held = state.cache
        index = cache_io.token_indices(
            [
                *zip(
                    np.asarray(held.offsets).tolist(),
                    np.asarray(held.lengths).tolist(),
                    strict=True,
                )
            ]
        )
        for name, arena in _arenas(held).items():
            arrays[name] = cache_io.read(arena, index, held.mesh, kv_repeats)
        told["tokens"] = int(np.sum(index >= 0))
    return saves.save(arrays, told, wait=wait)


class SavedSession:
    """A save of a session of workers, to read from.

    Attributes:
      facts: of the session.
    """

    def __init__(self, saved: SavedCheckpoint):
        """Of one save.

        Raises:
          SaveError: it is of something else.
        """
        self._saved, self._name = saved, f"save {saved.number} of {saved.folder}"
        if (found := saved.metadata.get("format")) != _FORMAT:
            raise SaveError(
                f"{self._name} is no session of workers ({found!r}, not {_FORMAT!r}); give a "
                "folder that one was saved to"
            )
        self.facts = SessionFacts.from_json(saved.metadata)

    def settings(
        self, model: LoadedModel, layout: WorkersLayout | MakeLayout | None, kind: AnswerRule | None
    ) -> dict[str, Any]:
        """What the session was made with, by the names of `Workers`' arguments.

        Args:
          model: that is to go on with it.
          layout, kind: what the session was made with, if it was made with one of its own.

        Raises:
          SaveError: a session of another model.
          ValueError: a layout or a kind that is needed and not given.
        """
        if self.facts.model != model.fingerprint:
            raise SaveError(
                f"{self._name} is of a session of another model, or of the same one with "
                "parameters of another dtype; restore it with the model that it was saved with"
            )
        known = self.facts.settings["layout"]
        if known is None and layout is None:
            raise ValueError(
                f"the session that was saved in {self._saved.folder} was made with a layout "
                "function, which cannot be saved; give it as layout="
            )
        rule = self.facts.settings["kind"]
        if rule is None and kind is None:
            raise ValueError(
                f"the session that was saved in {self._saved.folder} was made with an AnswerRule "
                "of its own, which cannot be saved; give it as kind="
            )
        return {**self.facts.settings, "layout": known or layout, "kind": rule or kind}

    def check(self, model: LoadedModel, tokenizer: str, context: int) -> None:
        """Raises SaveError where a session of this tokenizer, prepared for texts of `context`
        tokens, cannot go on with what was saved."""
        if self.facts.tokenizer != tokenizer:
            raise SaveError(
                f"{self._name} is of a session with another tokenizer; restore it with the one "
                "that it was saved with"
            )
        if (
            model.for_context(self.facts.context).config.rope
            != model.for_context(context).config.rope
        ):
            raise SaveError(
                f"{self._name} has keys that are rotated as for texts of {self.facts.context} "
                f"tokens, but here they would be as for {context}; restore it in an engine if it "
                "was saved in one, and else without"
            )

    def state(
        self,
        fresh: DecodeState,
        model: LoadedModel,
        room_for: Callable[[KVCache, np.ndarray], KVCache],
    ) -> tuple[DecodeState, Trace | None]:
        """The session's state and, if it was recorded, its trace.

        Args:
          fresh: of a session that has just been made with the same settings; its cache is donated
            when all else has been read.
          model: as it was loaded.
          room_for: gives the blocks of a cache room for int[B] tokens.

        Raises:
          SaveError: what cannot be read, or does not belong together.
        """
        small = _small(fresh)
        like: dict[str, Any] = {
            name: np.zeros(array.shape, array.dtype) for name, array in leaves(small).items()
        }
        names, tokens, size = (
            [*like],
            self._saved.metadata["tokens"],
            self._saved.metadata["trace_bytes"],
        )
        if tokens is not None:
            arena = fresh.cache.keys[0]
            shape = (
                arena.shape[0] // model.kv_repeats,
                cache_io.padded_length(tokens),
                arena.shape[2],
            )
            like |= dict.fromkeys(
                _arenas(fresh.cache), cache_io.abstract_like(shape, arena.dtype, fresh.cache.mesh)
            )
        if size is not None:
            like[_TRACE] = np.zeros(size, np.uint8)
        found = self._saved.arrays(like)
        trace = (
            None
            if size is None
            else self._trace(np.asarray(found[_TRACE]), np.asarray(found["cache.lengths"]), model)
        )
        cache = room_for(fresh.cache, np.asarray(found["cache.lengths"]))
        cache = (
            _refilled(cache, found, model.kv_repeats)
            if tokens is not None
            else self._reencoded(cache, trace, model)
        )
        state = jax.tree.unflatten(
            jax.tree.structure(small), [jnp.asarray(found[name]) for name in names]
        )
        assert state.steps is not None and fresh.steps is not None
        steps = dataclasses.replace(state.steps, ends=fresh.steps.ends, answers=fresh.steps.answers)
        cache = dataclasses.replace(
            state.cache,
            keys=cache.keys,
            values=cache.values,
            offsets=cache.offsets,
            capacities=cache.capacities,
        )
        return dataclasses.replace(state, cache=cache, steps=steps, record=fresh.record), trace

    def _trace(self, content: np.ndarray, lengths: np.ndarray, model: LoadedModel) -> Trace:
        try:
            trace = Trace.from_bytes(content.tobytes(), f"the trace in {self._name}")
        except ValueError as error:
            raise SaveError(f"{error}, or restore the save before it with number=") from error
        if trace.fingerprint != model.trace_fingerprint or not np.array_equal(
            trace.lengths, lengths
        ):
            raise SaveError(
                f"the trace in {self._name} is of another session, model or tokenizer; give "
                "number= for the save before it"
            )
        return trace

    def _reencoded(self, cache: KVCache, trace: Trace | None, model: LoadedModel) -> KVCache:
        if trace is None:
            raise SaveError(
                f"{self._name} has neither keys and values nor a trace; give number= for the save "
                "before it"
            )
        return reencode(model, trace, at=[], into=cache)[1]


def _small(state: DecodeState) -> Any:
    """What of a state is small and of its own: no keys and values, no tables that the tokenizer
    gives, no record of the last dispatch."""
    steps = dataclasses.replace(state.steps, ends=None, answers=None)  # pyright: ignore
    return dataclasses.replace(
        state, cache=dataclasses.replace(state.cache, keys=(), values=()), steps=steps, record=None
    )


def _arenas(cache: KVCache) -> dict[str, Any]:
    """By the names that they are saved under."""
    return {
        f"{name}.{i}": arena
        for name in ("keys", "values")
        for i, arena in enumerate(getattr(cache, name))
    }


def _refilled(cache: KVCache, found: Mapping[str, Any], kv_repeats: int) -> KVCache:
    index = cache_io.token_indices(
        [*zip(np.asarray(cache.offsets).tolist(), found["cache.lengths"].tolist(), strict=True)]
    )
    new, layers = [found[name] for name in _arenas(cache)], len(cache.keys)
    return cache_io.with_tokens(cache, index, new[:layers], new[layers:], kv_repeats)


def _settings_as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    layout, sampler, kind = settings["layout"], settings["sampler"], settings["kind"]
    if not isinstance(layout, str):
        layout = dataclasses.asdict(layout) if isinstance(layout, WorkersLayout) else None
    return {
        **settings,
        "layout": layout,
        "kind": kind.name if isinstance(kind, AnswerRule) else kind,
        "format": dataclasses.asdict(settings["format"]),
        "sampler": {**dataclasses.asdict(sampler), "bias": [*sampler.bias.items()]},
    }


def _settings_from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    layout, sampler = given["layout"], given["sampler"]
    return {
        **given,
        "layout": WorkersLayout.from_json(layout) if isinstance(layout, Mapping) else layout,
        "format": Format.from_json(given["format"]),
        "sampler": Sampler(
            **{
                **sampler,
                "bias": {int(token): value for token, value in sampler["bias"]},
                "forbidden": tuple(sampler["forbidden"]),
            }
        ),
    }
