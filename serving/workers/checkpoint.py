"""Checkpoints of sessions of workers: how their state is written and read.

A session is saved whole, with keys and values, or small, with the trace that they are computed
again from (`jaxshare.models.reencode`).
"""

import collections
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from jaxshare import DecodeState, FinishReason, KVCache, Sampler, cache_io
from jaxshare.models import LoadedModel, reencode
from jaxshare.models.fingerprint import same_fingerprint
from jaxshare.serving.checkpoints import (
    CheckpointStore,
    SavedCheckpoint,
    SaveError,
    check_approximation,
    leaves,
    on_host,
)
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.workers.block_moves import new_extents
from jaxshare.serving.workers.layouts import MakeLayout, WorkersLayout
from jaxshare.serving.workers.prompts.format import Format
from jaxshare.serving.workers.results import Answer
from jaxshare.serving.workers.roster import Roster
from jaxshare.serving.workers.session_state import SessionState
from jaxshare.serving.workers.text.answers import AnswerRule
from jaxshare.serving.workers.text.transcript import Event
from jaxshare.trace.recorder import Recorder
from jaxshare.trace.trace import Trace

_FORMAT = "jaxshare session 6"
_NOT_SAVED = ("tokens", "logprobs", "top_logits", "record", "processed", "raw_logprobs")
_REMADE = ("automata", "openings", "opening_sizes", "base", "prepared", "marks", "sampled_at")
_TRACE = "trace"
"""The array that has the bytes of the trace."""


@dataclasses.dataclass(frozen=True)
class SessionMetadata:
    """The state of a session of workers that is not on the device.

    Attributes:
      model, tokenizer: fingerprints of both.
      model_name: by which the model was loaded; "" where a former version has saved it.
      context: the longest text, in tokens, that the model was prepared for
        (`ModelConfig.for_context`).
      settings: the arguments of `Workers` by name; a layout function is None.
      roster: the workers, their rows and blocks.
      error: the message of the error that has ended the session.
      passes, host_syncs, finish_reason, seconds, prefill_seconds: see `Workers`.
      reasons, people, events, answers: see `SessionState`.
      transcript: `Transcript.snapshot`.
    """

    model: str
    model_name: str
    tokenizer: str
    context: int
    settings: Mapping[str, Any]
    roster: Roster
    passes: int
    host_syncs: int
    finish_reason: FinishReason | None
    error: str | None
    seconds: float
    prefill_seconds: float
    reasons: Mapping[str, FinishReason]
    people: Collection[str]
    transcript: Mapping[str, Any]
    events: Sequence[Event]
    answers: Mapping[int, Answer]

    @classmethod
    def of(cls, session: SessionState) -> Self:
        """The metadata of a session, as it is now."""
        return cls(
            model=session.loaded.fingerprint,
            model_name=session.loaded.name,
            tokenizer=session.texts.codec.fingerprint,
            context=session.context,
            settings=session.settings,
            roster=session.roster,
            passes=session.passes,
            host_syncs=session.host_syncs,
            finish_reason=session.finish_reason,
            error=session.error and str(session.error),
            seconds=session.seconds,
            prefill_seconds=session.prefill_seconds,
            reasons=session.reasons,
            people=session.people,
            transcript=session.transcript.snapshot(),
            events=session.events,
            answers=session.answers,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data, which JSON can hold.

        All of it is copied, because it is written while the session goes on.
        """
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "finish_reason": self.finish_reason and int(self.finish_reason),
            "settings": _settings_as_json(self.settings),
            "roster": self.roster.as_json(),
            "reasons": {name: int(reason) for name, reason in self.reasons.items()},
            "people": sorted(self.people),
            "events": [dataclasses.asdict(event) for event in self.events],
            "answers": [
                [budget, dataclasses.asdict(answer)] for budget, answer in self.answers.items()
            ],
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The metadata that `as_json` has written; other keys are left out."""
        given = {"model_name": "", **given}
        reason = given["finish_reason"]
        return cls(
            **{
                **{field.name: given[field.name] for field in dataclasses.fields(cls)},
                "finish_reason": reason and FinishReason(reason),
                "settings": _settings_from_json(given["settings"]),
                "roster": Roster.from_json(given["roster"]),
                "reasons": {
                    name: FinishReason(reason) for name, reason in given["reasons"].items()
                },
                "events": [Event(**event) for event in given["events"]],
                "answers": {budget: Answer(**answer) for budget, answer in given["answers"]},
            }
        )


def check_can_save(session: SessionState, cache: bool) -> None:
    """Raises ValueError if a save must have keys and values but `cache` is False."""
    if not cache and (session.recorder is None or session.loaded.adapter):
        why, do = "keeps no trace", "create it with record=True"
        if session.loaded.adapter:
            why, do = "has an adapter, with which a trace is not computed again", "save them"
        raise ValueError(
            f"the session {why}, so keys and values cannot be left out of a save; {do}"
        )


def save(
    session: SessionState,
    store: CheckpointStore,
    trace: Trace | None,
    *,
    cache: bool,
    wait: bool,
) -> int:
    """Saves a session; `session.device` is held.

    Args:
      session: between two passes.
      store: the folder to save to.
      trace: of what the session has fed so far, if it keeps one.
      cache: with keys and values; they can be left out where there is a trace.
      wait: return when it is written.

    Returns:
      The number of the save.

    Raises:
      SaveError: see `CheckpointStore.save`.
    """
    state = session.state.without_outputs()
    arrays: dict[str, Any] = {name: on_host(array) for name, array in leaves(_small(state)).items()}
    metadata: dict[str, Any] = {
        **SessionMetadata.of(session).as_json(),
        "format": _FORMAT,
        "approximate_kv": session.model.approximate_kv,
        "tokens": None,
        "trace_bytes": None,
    }
    if trace is not None:
        arrays[_TRACE] = np.frombuffer(trace.to_bytes(), np.uint8)
        metadata["trace_bytes"] = arrays[_TRACE].size
    if cache:
        index = _token_indices(state.cache, np.asarray(state.cache.lengths))
        for name, arena in _arenas(state.cache).items():
            arrays[name] = cache_io.read(arena, index, state.cache.mesh, session.model.kv_repeats)
        metadata["tokens"] = int(np.sum(index >= 0))
    return store.save(arrays, metadata, wait=wait)


class SavedSession:
    """A save of a session of workers, to read from.

    Attributes:
      metadata: of the session.
    """

    def __init__(self, saved: SavedCheckpoint):
        """Reads the metadata of a save.

        Raises:
          SaveError: it is not of a session of workers.
        """
        self._saved, self._name = saved, f"save {saved.number} of {saved.folder}"
        if (found := saved.metadata.get("format")) != _FORMAT:
            raise SaveError(
                f"{self._name} is no session of workers ({found!r}, not {_FORMAT!r}); give a "
                "folder that one was saved to"
            )
        with saved.checked():
            self.metadata = SessionMetadata.from_json(saved.metadata)

    def settings(
        self, model: LoadedModel, layout: WorkersLayout | MakeLayout | None, kind: AnswerRule | None
    ) -> dict[str, Any]:
        """The arguments of `Workers` by name, for a session that is to go on from this save.

        Args:
          model: of that session.
          layout, kind: of the saved session, if it had one of its own.

        Raises:
          SaveError: a session of another model.
          ValueError: a layout or a kind that is needed and not given.
        """
        if not same_fingerprint(self.metadata.model, model.fingerprint):
            name = self.metadata.model_name
            before, now = f" ({name})" * bool(name), f" {model.name}" * bool(model.name)
            raise SaveError(
                f"{self._name} is of a session of another model{before} than{now or ' this one'}, or "
                "of the same one with parameters of another dtype; restore it with the model that it "
                "was saved with"
            )
        check_approximation(self._saved, model.approximate_kv)
        saved_layout = self.metadata.settings["layout"]
        if saved_layout is None and layout is None:
            raise ValueError(
                f"the session that was saved in {self._saved.folder} was made with a layout "
                "function, which cannot be saved; give it as layout="
            )
        saved_kind = self.metadata.settings["kind"]
        if saved_kind is None and kind is None:
            raise ValueError(
                f"the session that was saved in {self._saved.folder} was made with an AnswerRule "
                "of its own, which cannot be saved; give it as kind="
            )
        return {
            **self.metadata.settings,
            "layout": saved_layout or layout,
            "kind": saved_kind or kind,
        }

    def check(self, model: LoadedModel, tokenizer: str, context: int) -> None:
        """Raises SaveError if a session cannot go on from this save.

        Args:
          model: of that session.
          tokenizer: fingerprint of its tokenizer.
          context: the longest text, in tokens, that it is prepared for.
        """
        if self.metadata.tokenizer != tokenizer:
            raise SaveError(
                f"{self._name} is of a session with another tokenizer; restore it with the one "
                "that it was saved with"
            )
        if (
            model.for_context(self.metadata.context).config.rope
            != model.for_context(context).config.rope
        ):
            raise SaveError(
                f"{self._name} has keys that are rotated as for texts of {self.metadata.context} "
                f"tokens, but here they would be as for {context}; restore it in an engine if it "
                "was saved in one, and else without"
            )

    def state(
        self,
        fresh: DecodeState,
        model: LoadedModel,
        resized: Callable[[KVCache, np.ndarray], KVCache],
    ) -> tuple[DecodeState, Trace | None]:
        """The session's state and, if it was recorded, its trace.

        Args:
          fresh: of a session that has just been made with the same settings; its cache is donated
            when all else has been read.
          model: as it was loaded.
          resized: (cache, int[B] tokens) -> the cache with capacity for them in its blocks.

        Raises:
          SaveError: parts that cannot be read, or do not belong together.
        """
        small, arrays = _small(fresh), self._arrays(fresh, model)
        lengths = np.asarray(arrays["cache.lengths"])
        trace = (
            self._trace(np.asarray(arrays[_TRACE]), lengths, model) if _TRACE in arrays else None
        )
        cache = resized(fresh.cache, lengths)
        cache = (
            self._reencoded(cache, trace, model)
            if self._saved.metadata["tokens"] is None
            else _refilled(cache, arrays, model.kv_repeats)
        )
        state = jax.tree.unflatten(
            jax.tree.structure(small),
            jax.device_put([np.array(arrays[name]) for name in leaves(small)]),
        )
        steps = dataclasses.replace(
            state.steps, **{name: getattr(fresh.steps, name) for name in _REMADE}
        )
        cache = dataclasses.replace(
            state.cache,
            keys=cache.keys,
            values=cache.values,
            offsets=cache.offsets,
            capacities=cache.capacities,
        )
        others = {name: getattr(fresh, name) for name in _NOT_SAVED}
        return dataclasses.replace(state, cache=cache, steps=steps, **others), trace

    def _arrays(self, fresh: DecodeState, model: LoadedModel) -> dict[str, Any]:
        """The arrays of the save, with the shapes and shardings of a fresh session's."""
        like: dict[str, Any] = {
            name: np.zeros(array.shape, array.dtype)
            for name, array in leaves(_small(fresh)).items()
        }
        tokens, size = self._saved.metadata["tokens"], self._saved.metadata["trace_bytes"]
        if tokens is not None:
            length = cache_io.padded_length(tokens)
            for name, arena in _arenas(fresh.cache).items():
                shape = arena.shape[0] // model.kv_repeats, length, arena.shape[2]
                like[name] = cache_io.abstract_like(shape, arena.dtype, fresh.cache.mesh)
        if size is not None:
            like[_TRACE] = np.zeros(size, np.uint8)
        return self._saved.arrays(like)

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


def restore(session: SessionState, saved: SavedSession) -> None:
    """Turns a session that has just been made, with the same settings, into a saved one.

    Raises:
      SaveError: a session that cannot go on from this save, or parts of it that cannot be read.
    """
    saved.check(session.loaded, session.texts.codec.fingerprint, session.context)

    def resized(cache: KVCache, lengths: np.ndarray) -> KVCache:
        extents = new_extents(session, cache, lengths, {})
        return (
            cache.relocate([*extents], *zip(*extents.values(), strict=True)) if extents else cache
        )

    with session.device():
        metadata = saved.metadata
        session.roster = metadata.roster
        session.state, trace = saved.state(session.state, session.loaded, resized)
        session.rows = session.model.adapted(session.state.layout)
        session.state = dataclasses.replace(session.state, layout=session.rows)
        session.recorder = Recorder.of(trace, trace.capacities.tolist()) if trace else None
        session.passes, session.host_syncs = metadata.passes, metadata.host_syncs
        session.finish_reason, session.seconds = metadata.finish_reason, metadata.seconds
        session.error = NotANumberError(metadata.error) if metadata.error else None
        session.prefill_seconds = metadata.prefill_seconds
        session.reasons = {**metadata.reasons}
        session.prepared = dict.fromkeys(metadata.reasons, 0)
        session.people, session.answers = {*metadata.people}, {**metadata.answers}
        session.events = collections.deque(metadata.events)
        session.transcript.restore(metadata.transcript)


def _small(state: DecodeState) -> Any:
    """The small part of a state that must be saved.

    It has no keys and values, no tables (the tokenizer gives them), no openings (they are prepared
    again), and nothing of the last dispatch, which has been read.
    """
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(state.cache, keys=(), values=()),
        layout=dataclasses.replace(state.layout, adapters=None),  # whose places may be others
        steps=dataclasses.replace(state.steps, **dict.fromkeys(_REMADE)),
        **dict.fromkeys(_NOT_SAVED),
    )


def _arenas(cache: KVCache) -> dict[str, Any]:
    """The arenas by their names in files."""
    return cache_io.array_names(cache, "keys") | cache_io.array_names(cache, "values")


def _token_indices(cache: KVCache, lengths: np.ndarray) -> np.ndarray:
    """The indices in the arena of the first tokens of each block, int[B] many."""
    offsets = np.asarray(cache.offsets).tolist()
    return cache_io.token_indices([*zip(offsets, lengths.tolist(), strict=True)])


def _refilled(cache: KVCache, arrays: Mapping[str, Any], kv_repeats: int) -> KVCache:
    """The cache with the keys and values of a save."""
    index = _token_indices(cache, arrays["cache.lengths"])
    keys, values = (cache_io.from_names(cache, kind, arrays) for kind in ("keys", "values"))
    return cache_io.with_tokens(cache, index, keys, values, kv_repeats)


def _settings_as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    layout, sampler, kind = settings["layout"], settings["sampler"], settings["kind"]
    if not isinstance(layout, str):
        layout = dataclasses.asdict(layout) if isinstance(layout, WorkersLayout) else None
    return {
        **settings,
        "layout": layout,
        "kind": kind.name if isinstance(kind, AnswerRule) else kind,
        "format": dataclasses.asdict(settings["format"]),
        "sampler": sampler.as_json(),
    }


def _settings_from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    layout, sampler = given["layout"], given["sampler"]
    return {
        **given,
        "layout": WorkersLayout.from_json(layout) if isinstance(layout, Mapping) else layout,
        "format": Format.from_json(given["format"]),
        "sampler": Sampler.from_json(sampler),
    }
