"""The Logits Cache (Hive, section 6): what the model said after a state is kept in host memory, so
that sampling it again costs no pass.

Kept for each exact state, a prompt's tokens, are the distributions along every continuation that
was computed, as a trie: a run of positions, and runs that leave it where another token was drawn. A
replay draws with the seed and the positions that the model's own loop would use, and follows
whichever earlier continuation took the same turns (the paper follows one). It ends where nothing is
known, or where what is kept does not decide the draw, and never says a token that the loop would
not: see `jaxshare.serving.logits_cache.replay`.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare.decoding.sampling import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.logits_cache.hotspot import USUAL, Distance, Hotspot
from jaxshare.serving.logits_cache.replay import (
    FIELDS,
    UNDECIDED,
    decide,
    redraw,
    rows,
    uniform_run,
)

_FIRST_LOOK = 32
"""Positions that a replay looks at first; then four times as many each time. Most end early."""
_AHEAD = 256
"""Replays that are kept computed ahead."""


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What a cache has done so far, and holds.

    Attributes:
      hits, misses: replays of states that were known, and of others.
      replayed: tokens that replays gave.
      ahead: of the hits, how many had been computed ahead.
      evicted: runs of positions that made room for others.
      states, runs, bytes: what is held.
    """

    hits: int = 0
    misses: int = 0
    replayed: int = 0
    ahead: int = 0
    evicted: int = 0
    states: int = 0
    runs: int = 0
    bytes: int = 0


class _TokenRun:
    """Distributions after one another, the token drawn from each, and the runs that leave them: by
    (position in the run, token).

    `turn` is where the latest continuation left it, None where it went to the end. Arrays are never
    changed, only replaced.
    """

    def __init__(
        self,
        kept: TopLogits,
        tokens: np.ndarray,
        state: "_CachedState",
        parent: "_TokenRun | None",
        key: tuple[int, int] | None,
    ):
        self.kept, self.tokens = kept, tokens
        self.state, self.parent, self.key = state, parent, key
        self.children: dict[tuple[int, int], _TokenRun] = {}
        self.turn: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes + sum(getattr(self.kept, name).nbytes for name in FIELDS)


class _CachedState:
    """One state's trie, and a count of its changes."""

    def __init__(self, digest: bytes):
        self.digest, self.version = digest, 0
        self.root: _TokenRun | None = None


class LogitsCache:
    """Next-token distributions by state, in host memory. Every method may be called from any
    thread.

    Attributes:
      model_key: of the model whose distributions these are.
      max_bytes: what is held stays within it.
      kept: how many tokens of each distribution are kept, or None for as many as the first write
        brings.
    """

    def __init__(self, model_key: str, max_bytes: int, kept: int | None = None):
        """An empty cache.

        Raises:
          ValueError: `max_bytes` below 0, or `kept` below 1.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 0")
        if kept is not None and kept < 1:
            raise ValueError(f"kept is {kept}; at least 1 token of a distribution has to be kept")
        self.model_key, self.max_bytes, self.kept = model_key, max_bytes, kept
        self._lock = threading.Lock()
        self._states: dict[bytes, _CachedState] = {}
        # By use, the latest last. Whoever uses a run uses what it hangs on afterwards, so that the
        # first of these is always a leaf.
        self._runs: collections.OrderedDict[_TokenRun, None] = collections.OrderedDict()
        self._ahead: collections.OrderedDict[Hashable, tuple[int, list[int]]] = (
            collections.OrderedDict()
        )
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed, self._changes = False, 0
        self._shape: tuple[int, int] | None = None
        self._bytes = self._hits = self._misses = self._replayed = self._used_ahead = (
            self._evicted
        ) = 0

    @property
    def bytes(self) -> int:
        """What is held: every array of every run, tokens included, and the states' digests."""
        return self._bytes

    @property
    def statistics(self) -> Statistics:
        """So far."""
        with self._lock:
            return Statistics(
                self._hits,
                self._misses,
                self._replayed,
                self._used_ahead,
                self._evicted,
                len(self._states),
                len(self._runs),
                self._bytes,
            )

    def check(self, model_key: str) -> None:
        """Raises ValueError where the distributions are those of another model than this."""
        if model_key != self.model_key:
            raise ValueError(
                f"this logits cache is of model {self.model_key!r}, and the model is "
                f"{model_key!r}; make another for it"
            )

    def write(
        self,
        state: Sequence[int] | np.ndarray,
        replayed: Sequence[int],
        tokens: Sequence[int],
        kept: TopLogits,
    ) -> bool:
        """Keeps what a call on `state` has computed.

        Args:
          state: the tokens before the output.
          replayed: the output's first tokens, as far as they came from here.
          tokens: those after them, drawn from the model's distributions.
          kept: these distributions, of numpy arrays [len(tokens), ...].

        Returns:
          Whether something is kept that was not. It is not where all was known, where what was
            replayed is no longer here (then
          nobody could find the rest), or where it does not fit `max_bytes` even alone.

        Raises:
          ValueError: distributions that are not finite, or not as many as tokens, or that keep
            other than the others' number of tokens.
        """
        _check_finite(tokens, kept)
        whole = np.concatenate([_int32(replayed), _int32(tokens)])
        with self._lock:
            if not len(tokens):
                return False
            self._check_shape(kept)
            digest = _digest(state)
            entry = self._states.get(digest) or _CachedState(digest)
            path, at, known = _follow(entry, whole)
            for run, after in zip(path, [*path[1:], None], strict=False):
                run.turn = None if after is None else after.key
            if path:
                self._touch(path[-1])
            if not len(replayed) <= known < len(whole):
                return False
            begin = known - len(replayed)
            added = _copied(rows(kept, slice(begin, None)))
            run, drawn = path[-1] if path else None, whole[known:].copy()
            new = _TokenRun(
                added, drawn, entry, run, None if run is None else (at - 1, int(whole[known - 1]))
            )
            size = new.bytes + (len(digest) if entry.root is None else 0)
            if sum(r.bytes for r in path) + len(digest) + new.bytes > self.max_bytes:
                return False
            if run is None or new.key is None:
                entry.root = new
                self._states[digest] = entry
            elif (
                at == len(run.tokens) and run.tokens[-1] == new.key[1]
            ):  # the run has come to its end, and goes on
                run.kept, run.tokens = (
                    _joined([run.kept, added]),
                    np.concatenate([run.tokens, drawn]),
                )
                new = run
            else:
                run.children[new.key], run.turn = new, new.key
            self._bytes += size
            entry.version = self._changed()
            self._runs[new] = None
            self._touch(new)
            while self._bytes > self.max_bytes:
                self._evict()
            return True

    def replay(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        budget: int,
        stops: frozenset[int] = frozenset(),
    ) -> list[int]:
        """What fresh sampling draws, as far as what is here tells: exactly these tokens, for this
        seed (stepwise; equation 1's state).

        Args:
          state: the tokens before the output.
          sampler, seed: of the row; its first token is drawn at position 0.
          budget: the most tokens.
          stops: tokens that end the output; the one that does is included.

        Returns:
          The output's first tokens, all of them where it ended. The last one may leave what is
            known; the next distribution is then
          the model's to compute.
        """
        digest = _digest(state)
        with self._lock:
            entry = self._states.get(digest)
            if entry is None:
                self._misses += 1
                return []
            version, ahead = self._ahead.pop((digest, sampler, seed, budget, stops), (-1, []))
        if version == entry.version:
            drawn, path = ahead, None
        else:
            drawn, path, _ = self._walk(entry, sampler, seed, budget, stops)
        with self._lock:
            if path is None:
                path = next(reversed(_follow(entry, _int32(drawn))[0]), None)
            self._touch(path)
            self._hits += 1
            self._used_ahead += drawn is ahead
            self._replayed += len(drawn)
        return list(drawn)

    def prefetch(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        budget: int,
        stops: frozenset[int] = frozenset(),
    ) -> "concurrent.futures.Future[None]":
        """Computes what `replay` of the same will give in one background thread; used unless the
        state has changed meanwhile.

        Raises:
          RuntimeError: the cache is closed.
        """
        digest = _digest(state)

        def run() -> None:
            with self._lock:
                entry = self._states.get(digest)
            if entry is None:
                return
            drawn, _, version = self._walk(entry, sampler, seed, budget, stops)
            with self._lock:
                self._ahead[digest, sampler, seed, budget, stops] = version, drawn
                while len(self._ahead) > _AHEAD:
                    self._ahead.popitem(last=False)

        with self._lock:
            if self._closed:
                raise RuntimeError("this logits cache is closed; nothing more is computed ahead")
            if self._worker is None:
                self._worker = concurrent.futures.ThreadPoolExecutor(
                    1, thread_name_prefix="logits-cache"
                )
            return self._worker.submit(run)

    def known(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and facts of all that is held, for `learn`. The arrays are `logits.tokens` [N] and
        `logits.*` [N, ...] of every field of `TopLogits`: those of all runs behind one another."""
        with self._lock:
            runs = [*self._runs]
            places = {id(run): i for i, run in enumerate(runs)}
            facts = [
                {
                    "state": run.state.digest.hex(),
                    "positions": len(run.tokens),
                    "key": run.key,
                    "turn": run.turn,
                    "parent": None if run.parent is None else places[id(run.parent)],
                }
                for run in runs
            ]
            parts = {name: [getattr(run.kept, name) for run in runs] for name in FIELDS}
            tokens = [run.tokens for run in runs]
        arrays = {
            f"logits.kept.{name}": np.concatenate(pieces)
            for name, pieces in parts.items()
            if pieces
        }
        arrays["logits.tokens"] = np.concatenate([_int32(()), *tokens])
        return arrays, {"runs": facts, "shape": self._shape}

    def learn(self, arrays: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> None:
        """Holds what another cache has held, what was used last first, as far as it fits
        `max_bytes`.

        Raises:
          ValueError: something is held already, or it keeps another number of tokens of a
            distribution.
        """
        with self._lock:
            if self._runs:
                raise ValueError(
                    "this logits cache holds something already; learn what another has held in one "
                    "that is empty"
                )
            if not facts["runs"]:
                return
            width, vocab = facts["shape"]
            if self.kept is not None and min(self.kept, vocab) != width:
                raise ValueError(
                    f"the distributions that were saved have {width} kept tokens, and this logits "
                    f"cache keeps {self.kept}; make it with kept={width}"
                )
            self._shape = width, vocab
            learned: dict[int, _TokenRun] = {}
            begins = np.cumsum([0, *(run["positions"] for run in facts["runs"])])
            # the latest first, and of one branch what it hangs on
            for i in reversed(range(len(facts["runs"]))):
                self._learn(
                    i, slice(begins[i], begins[i + 1]), arrays, facts["runs"][i], vocab, learned
                )
            self._runs.update((learned[i], None) for i in sorted(learned))
            for run in learned.values():
                run.turn = run.turn if run.turn in run.children else None

    def _learn(
        self,
        number: int,
        part: slice,
        arrays: Mapping[str, np.ndarray],
        facts: Mapping[str, Any],
        vocab: int,
        learned: "dict[int, _TokenRun]",
    ) -> None:
        parent = None if facts["parent"] is None else learned.get(facts["parent"])
        if facts["parent"] is not None and parent is None:  # there was no room for it
            return
        state = parent.state if parent else _CachedState(bytes.fromhex(facts["state"]))
        kept = TopLogits(
            **{name: arrays[f"logits.kept.{name}"][part].copy() for name in FIELDS}, vocab=vocab
        )
        key, turn = (
            None if pair is None else (int(pair[0]), int(pair[1]))
            for pair in (facts["key"], facts["turn"])
        )
        run = _TokenRun(kept, arrays["logits.tokens"][part].copy(), state, parent, key)
        size = run.bytes + (0 if parent else len(state.digest))
        if self._bytes + size > self.max_bytes:
            return
        if parent is None or key is None:
            state.root, self._states[state.digest] = run, state
        else:
            parent.children[key] = run
        run.turn, state.version = turn, self._changed()
        self._bytes += size
        learned[number] = run

    def close(self) -> None:
        """Ends the background thread; what it has not begun is dropped. What is kept can still be
        replayed."""
        with self._lock:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(cancel_futures=True)

    def hotspot(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        budget: int,
        stops: frozenset[int] = frozenset(),
        rule: Hotspot = USUAL,
    ) -> list[int]:
        """Draws again only where the model was uncertain, along the latest continuation (section
        6.2). APPROXIMATE.

        Elsewhere the continuation's token is taken unasked, so outputs are not distributed as fresh
        ones; `distance` says how far off they are. Ends after a drawn token that leaves the
        continuation. At temperature 0 nothing is uncertain: that is `replay`.

        Args:
          state, sampler, seed, budget, stops: as for `replay`.
          rule: where that is.

        Returns:
          The output's first tokens.
        """
        if sampler.temperature == 0:
            return self.replay(state, sampler, seed, budget, stops)
        kept, tokens, path = self._latest(state, budget, stops)
        with self._lock:
            self._hits += path is not None
            self._misses += path is None
        if kept is None or path is None or not len(tokens):
            return []
        hot = np.flatnonzero(rule.find(kept, sampler))
        picked = dataclasses.replace(kept, **{name: getattr(kept, name)[hot] for name in FIELDS})
        drawn = decide(picked, sampler, uniform_run(seed, 0, len(tokens))[hot])
        left = np.flatnonzero(drawn != tokens[hot])
        if len(left):
            at, token = int(hot[left[0]]), int(drawn[left[0]])
            tokens = np.append(tokens[:at], [] if token == UNDECIDED else [token])
        with self._lock:
            self._touch(path)
            self._replayed += len(tokens)
        return [int(token) for token in tokens]

    def answer(self, state: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32[n]: the tokens of the latest continuation of a state that is still here; none of
        one that is not known."""
        with self._lock:
            entry = self._states.get(_digest(state))
            parts = [tokens for _, _, tokens in _turns(entry.root)] if entry is not None else []
        return np.concatenate(parts) if parts else _int32(())

    def distance(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        budget: int,
        stops: frozenset[int] = frozenset(),
        rule: Hotspot = USUAL,
    ) -> Distance:
        """How far `hotspot` with the same arguments is from fresh sampling."""
        kept, tokens, _ = self._latest(state, budget, stops)
        if kept is None or sampler.temperature == 0:
            return Distance(np.zeros(len(tokens)), 0.0)
        return Distance.of(kept, sampler, tokens, rule.find(kept, sampler))

    def _check_shape(self, kept: TopLogits) -> None:
        width, vocab = kept.tokens.shape[1], kept.vocab
        wanted = self._shape or (width if self.kept is None else min(self.kept, vocab), vocab)
        if (width, vocab) != wanted:
            raise ValueError(
                f"distributions of {width} kept tokens of {vocab}; this logits cache keeps "
                f"{wanted[0]} of {wanted[1]}"
            )
        self._shape = wanted

    def _walk(
        self, entry: _CachedState, sampler: Sampler, seed: int, budget: int, stops: frozenset[int]
    ) -> tuple[list[int], _TokenRun | None, int]:
        """The replay, the last run that it read, and the version of the state that it began
        with."""
        with self._lock:
            run, version = entry.root, entry.version
            kept, tokens = (run.kept, run.tokens) if run is not None else (None, _int32(()))
        output: list[int] = []
        at, look, last = 0, _FIRST_LOOK, run
        while run is not None and kept is not None and at < len(tokens) and len(output) < budget:
            some = slice(at, min(at + look, len(tokens), at + budget - len(output)))
            own = tokens[some]
            drawn = redraw(rows(kept, some), sampler, seed, len(output))
            ends = np.isin(own, list(stops)) | (drawn != own) if stops else drawn != own
            first = int(np.argmax(ends)) if ends.any() else len(own)
            output += own[:first].tolist()
            if first == len(own):
                at, look = some.stop, 4 * look
                continue
            token = int(drawn[first])
            if token == UNDECIDED:
                break
            output.append(token)
            if token in stops:
                break
            with self._lock:
                run = run.children.get((at + first, token))
                if run is not None:
                    last, kept, tokens = run, run.kept, run.tokens
            at, look = 0, _FIRST_LOOK
        return output, last, version

    def _latest(
        self, state: Sequence[int] | np.ndarray, budget: int, stops: frozenset[int]
    ) -> tuple[TopLogits | None, np.ndarray, _TokenRun | None]:
        """The latest continuation of a state that is still here: distributions, tokens, and its
        last run."""
        with self._lock:
            entry = self._states.get(_digest(state))
            parts = [*_turns(entry.root)] if entry is not None else []
        if not parts:
            return None, _int32(()), None
        tokens = np.concatenate([tokens for _, _, tokens in parts])[: max(budget, 0)]
        stopped = np.flatnonzero(np.isin(tokens, list(stops)))
        tokens = tokens[: stopped[0] + 1] if len(stopped) else tokens
        return (
            rows(_joined([kept for _, kept, _ in parts]), slice(len(tokens))),
            tokens,
            parts[-1][0],
        )

    def _touch(self, run: _TokenRun | None) -> None:
        """Counts as used a run and what it hangs on, these last. Runs that were evicted meanwhile
        are left alone."""
        while run is not None:
            if run in self._runs:
                self._runs.move_to_end(run)
            run = run.parent

    def _changed(self) -> int:
        self._changes += 1
        return self._changes

    def _evict(self) -> None:
        run, _ = self._runs.popitem(last=False)
        self._bytes -= run.bytes
        self._evicted += 1
        run.state.version = self._changed()
        if run.parent is not None:
            assert run.key is not None
            del run.parent.children[run.key]
            run.parent.turn = None if run.parent.turn == run.key else run.parent.turn
        else:
            run.state.root = None
            self._bytes -= len(run.state.digest)
            del self._states[run.state.digest]


def _check_finite(tokens: Sequence[int], kept: TopLogits) -> None:
    if len(kept.tokens) != len(tokens):
        raise ValueError(
            f"{len(tokens)} tokens and {len(kept.tokens)} distributions; each token needs the one "
            "that it was drawn from"
        )
    with np.errstate(invalid="ignore"):
        largest = np.max(kept.logits, axis=1, initial=-np.inf)
        sums = np.sum(
            [np.sum(kept.below, axis=1), kept.rest, kept.rest_at_1, kept.kept_at, largest], axis=0
        )
    if len(odd := np.flatnonzero(~np.isfinite(sums))):
        raise ValueError(
            f"distribution {odd[0]} is not finite; a row with such logits ends with an error, and "
            "is not kept"
        )


def _follow(entry: _CachedState, tokens: np.ndarray) -> tuple[list[_TokenRun], int, int]:
    """The runs along `tokens`, how many positions of the last of them were used, and how many
    distributions along them are known.

    The distribution after the last of `tokens` is not counted, known or not.
    """
    path: list[_TokenRun] = []
    run, done, at = entry.root, 0, 0
    while run is not None:
        path.append(run)
        ahead = tokens[done : done + len(run.tokens)]
        differs = np.flatnonzero(ahead != run.tokens[: len(ahead)])
        if not len(differs):
            return path, len(ahead), done + len(ahead)
        at = int(differs[0]) + 1
        done += at
        run = run.children.get((at - 1, int(ahead[at - 1])))
    return path, at, done


def _turns(run: _TokenRun | None) -> Iterator[tuple[_TokenRun, TopLogits, np.ndarray]]:
    """The parts of the latest continuation, each with the token that leaves its run."""
    while run is not None:
        if run.turn is None:
            yield run, run.kept, run.tokens
            return
        at, token = run.turn
        yield run, rows(run.kept, slice(at + 1)), np.append(run.tokens[:at], np.int32(token))
        run = run.children[run.turn]


def _digest(state: Sequence[int] | np.ndarray) -> bytes:
    return hashlib.sha256(_int32(state).tobytes()).digest()


def _int32(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.asarray(tokens, np.int32)


def _copied(kept: TopLogits) -> TopLogits:
    """Arrays of its own, so that no larger one is held by them."""
    return dataclasses.replace(kept, **{name: np.array(getattr(kept, name)) for name in FIELDS})


def _joined(parts: Sequence[TopLogits]) -> TopLogits:
    return dataclasses.replace(
        parts[0],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS},
    )
