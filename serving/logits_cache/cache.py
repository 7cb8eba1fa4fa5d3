"""The Logits Cache (Hive, section 6): distributions of the model, kept in host memory by state, so
that sampling a state again needs no pass.

For each exact state, a prompt's tokens, the cache keeps the distributions along every continuation
that was computed, as a trie: a run of positions, and runs that branch off where another token was
sampled. A replay samples with the seed and the positions that the decode loop would use, and
follows whichever earlier continuation has the same tokens (the paper follows one). It ends where
nothing is cached, or where the cached logits do not decide the sample, and never gives a token that
the loop would not: see `jaxshare.serving.logits_cache.replay`.
"""

import collections
import concurrent.futures
import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.logits_cache import trie
from jaxshare.serving.logits_cache.hotspot import USUAL, Distance, Hotspot, sampled_where_hot
from jaxshare.serving.logits_cache.replay import rows
from jaxshare.serving.logits_cache.statistics import Statistics
from jaxshare.serving.logits_cache.trie import CachedState, TokenRun, int32, state_digest

_MAX_AHEAD = 256
"""Replays that are kept computed ahead."""


class LogitsCache:
    """Next-token distributions by state, in host memory. Every method is thread-safe.

    Attributes:
      model_key: the model of these distributions.
      max_bytes: the contents stay within it.
      num_top_logits: tokens that are kept of each distribution, or None for as many as the first
        write has.
    """

    def __init__(self, model_key: str, max_bytes: int, num_top_logits: int | None = None):
        """Creates an empty cache.

        Raises:
          ValueError: `max_bytes` below 0, or `num_top_logits` below 1.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be at least 0")
        if num_top_logits is not None and num_top_logits < 1:
            raise ValueError(f"num_top_logits is {num_top_logits}; it must be at least 1")
        self.model_key, self.max_bytes = model_key, max_bytes
        self.num_top_logits = num_top_logits
        self._lock = threading.Lock()
        self._states: dict[bytes, CachedState] = {}
        # By use, the latest last. A run's ancestors are touched after it, so that the first of all
        # is always a leaf.
        self._runs: collections.OrderedDict[TokenRun, None] = collections.OrderedDict()
        self._ahead: collections.OrderedDict[Hashable, tuple[int, list[int]]] = (
            collections.OrderedDict()
        )
        self._worker: concurrent.futures.ThreadPoolExecutor | None = None
        self._closed, self._num_changes = False, 0
        self._shape: tuple[int, int] | None = None
        self._bytes = self._hits = self._misses = self._replayed = 0
        self._followed = self._used_ahead = self._evicted = 0

    @property
    def bytes(self) -> int:
        """Bytes of every array of every run, tokens included, and of the states' digests."""
        return self._bytes

    @property
    def statistics(self) -> Statistics:
        """The counts so far."""
        with self._lock:
            counts = self._hits, self._misses, self._replayed, self._followed, self._used_ahead
            return Statistics(
                *counts, self._evicted, len(self._states), len(self._runs), self._bytes
            )

    def has(self, digest: Hashable) -> bool:
        """Returns whether a state is cached; the digest is that of `trie.state_digest`."""
        return digest in self._states

    def check(self, model_key: str) -> None:
        """Raises ValueError if the distributions are of another model."""
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
        top_logits: TopLogits,
    ) -> bool:
        """Writes the distributions that a request on `state` has computed.

        Args:
          state: the tokens before the output.
          replayed: the output's first tokens, as far as they came from the cache.
          tokens: those after them, sampled from the model's distributions.
          top_logits: these distributions, of numpy arrays [len(tokens), ...].

        Returns:
          Whether something new is kept. Nothing is where all was cached, where the replayed tokens
            are no longer cached (then the rest could not be found), or where it alone is larger
            than `max_bytes`.

        Raises:
          ValueError: distributions that are not finite, or not as many as tokens, or with another
            number of tokens than the others.
        """
        trie.check_distributions(tokens, top_logits)
        whole = np.concatenate([int32(replayed), int32(tokens)])
        with self._lock:
            if not len(tokens):
                return False
            self._check_shape(top_logits)
            digest = state_digest(state)
            entry = self._states.get(digest) or CachedState(digest)
            path, position, num_cached = entry.follow(whole)
            for run, after in zip(path, [*path[1:], None], strict=False):
                run.latest_branch = None if after is None else after.key
            if path:
                self._touch(path[-1])
            if not len(replayed) <= num_cached < len(whole):
                return False
            start = num_cached - len(replayed)
            new = TokenRun(
                trie.copied(rows(top_logits, slice(start, None))),
                whole[num_cached:].copy(),
                entry,
                path[-1] if path else None,
                (position - 1, int(whole[num_cached - 1])) if path else None,
            )
            if sum(r.bytes for r in path) + len(digest) + new.bytes > self.max_bytes:
                return False
            self._insert(new, position)
            while self._bytes > self.max_bytes:
                self._evict()
            return True

    def _insert(self, new: TokenRun, position: int) -> None:
        """Inserts a run after `position` used positions of its parent."""
        entry, parent = new.state, new.parent
        self._bytes += new.bytes + (len(entry.digest) if entry.root is None else 0)
        if parent is None or new.key is None:
            entry.root = new
            self._states[entry.digest] = entry
        elif parent.continues_with(new.key, position):
            parent.append(new.top_logits, new.tokens)
            new = parent
        else:
            parent.children[new.key], parent.latest_branch = new, new.key
        entry.version = self._next_version()
        self._runs[new] = None
        self._touch(new)

    def replay(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        max_new_tokens: int,
        stops: frozenset[int] = frozenset(),
    ) -> list[int]:
        """Gives exactly the tokens that fresh sampling with this seed gives, as far as they are
        decided here (stepwise; equation 1's state).

        Args:
          state: the tokens before the output.
          sampler, seed: of the row; its first token is sampled at position 0.
          max_new_tokens: the longest output.
          stops: tokens that end the output; the one that does is included.

        Returns:
          The output's first tokens, all of them where it ended. The last one may leave the cached
            continuations; the next distribution is then the model's to compute.
        """
        digest = state_digest(state)
        with self._lock:
            entry = self._states.get(digest)
            if entry is None:
                self._misses += 1
                return []
            version, ahead = self._ahead.pop(
                (digest, sampler, seed, max_new_tokens, stops), (-1, [])
            )
        if version == entry.version:
            output, run = ahead, None
        else:
            output, run, _ = entry.walk(self._lock, sampler, seed, max_new_tokens, stops)
        with self._lock:
            if run is None:
                run = next(reversed(entry.follow(int32(output))[0]), None)
            self._touch(run)
            self._hits += 1
            self._used_ahead += output is ahead
            self._replayed += len(output)
        return list(output)

    def go_on(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        max_new_tokens: int,
        stops: frozenset[int],
        output: Sequence[int],
    ) -> list[int]:
        """Goes on with a replay that has come to the end of what was cached then.

        Args:
          state, sampler, seed, max_new_tokens, stops: as for `replay`.
          output: the replayed tokens so far.

        Returns:
          The tokens after them, as of `replay`; none where nothing more is cached or decided. The
            first ones make a miss a hit.
        """
        with self._lock:
            entry = self._states.get(state_digest(state))
        if entry is None:
            return []
        whole, run, _ = entry.walk(self._lock, sampler, seed, max_new_tokens, stops, output)
        new = whole[len(output) :]
        with self._lock:
            if new:
                self._touch(run)
                self._followed += len(new)
                self._hits += not output
                self._misses -= not output
        return new

    def prefetch(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        seed: int,
        max_new_tokens: int,
        stops: frozenset[int] = frozenset(),
    ) -> "concurrent.futures.Future[None]":
        """Computes `replay` with the same arguments ahead, in one background thread.

        The result is used unless the state changes before.

        Raises:
          RuntimeError: the cache is closed.
        """
        digest = state_digest(state)

        def run() -> None:
            with self._lock:
                entry = self._states.get(digest)
            if entry is None:
                return
            output, _, version = entry.walk(self._lock, sampler, seed, max_new_tokens, stops)
            with self._lock:
                self._ahead[digest, sampler, seed, max_new_tokens, stops] = version, output
                while len(self._ahead) > _MAX_AHEAD:
                    self._ahead.popitem(last=False)

        with self._lock:
            if self._closed:
                raise RuntimeError("this logits cache is closed; nothing more is computed ahead")
            if self._worker is None:
                self._worker = concurrent.futures.ThreadPoolExecutor(
                    1, thread_name_prefix="logits-cache"
                )
            return self._worker.submit(run)

    def snapshot(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Arrays and metadata of the contents, for `restore`.

        The arrays are `logits.tokens` [N] and `logits.kept.*` [N, ...] of every field of
        `TopLogits`: those of all runs one after another.
        """
        with self._lock:
            runs = [*self._runs]
            metadata = trie.snapshot_runs(runs)
            top_logits, tokens = [run.top_logits for run in runs], [run.tokens for run in runs]
        return trie.snapshot_arrays(top_logits, tokens), {"runs": metadata, "shape": self._shape}

    def restore(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> None:
        """Restores a snapshot, the most recently used runs first, as far as it fits `max_bytes`.

        Raises:
          ValueError: the cache is not empty, or keeps another number of tokens of a distribution.
        """
        with self._lock:
            if self._runs:
                raise ValueError("this logits cache is not empty; restore into an empty one")
            if not metadata["runs"]:
                return
            width, vocab = metadata["shape"]
            if self.num_top_logits is not None and min(self.num_top_logits, vocab) != width:
                raise ValueError(
                    f"the distributions that were saved have {width} kept tokens, and this logits "
                    f"cache keeps {self.num_top_logits}; make it with num_top_logits={width}"
                )
            self._shape = width, vocab
            restored: dict[int, TokenRun] = {}
            starts = np.cumsum([0, *(run["positions"] for run in metadata["runs"])])
            # The latest first; a parent was touched after its children, so it comes before them.
            for i in reversed(range(len(metadata["runs"]))):
                number = metadata["runs"][i]["parent"]
                parent = None if number is None else restored.get(number)
                if number is None or parent is not None:  # otherwise the parent did not fit
                    part = slice(starts[i], starts[i + 1])
                    run = trie.restored_run(part, arrays, metadata["runs"][i], vocab, parent)
                    if self._add_restored(run):
                        restored[i] = run
            self._runs.update((restored[i], None) for i in sorted(restored))
            for run in restored.values():
                run.latest_branch = run.latest_branch if run.latest_branch in run.children else None

    def _add_restored(self, run: TokenRun) -> bool:
        """Adds a restored run to its trie, unless it does not fit."""
        size = run.bytes + (0 if run.parent else len(run.state.digest))
        if self._bytes + size > self.max_bytes:
            return False
        if run.parent is None or run.key is None:
            run.state.root, self._states[run.state.digest] = run, run.state
        else:
            run.parent.children[run.key] = run
        run.state.version = self._next_version()
        self._bytes += size
        return True

    def close(self) -> None:
        """Ends the background thread and drops its queue. Replays still work."""
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
        max_new_tokens: int,
        stops: frozenset[int] = frozenset(),
        rule: Hotspot = USUAL,
    ) -> list[int]:
        """Samples again only where the model was uncertain, along the latest continuation (section
        6.2). APPROXIMATE.

        Elsewhere the continuation's token is taken without sampling, so outputs are not distributed
        as fresh ones; `distance` says how far off they are. Ends after a sampled token that leaves
        the continuation. At temperature 0 nothing is uncertain: that is `replay`.

        Args:
          state, sampler, seed, max_new_tokens, stops: as for `replay`.
          rule: the positions to sample again.

        Returns:
          The output's first tokens.
        """
        if sampler.temperature == 0:
            return self.replay(state, sampler, seed, max_new_tokens, stops)
        top_logits, tokens, run = self._latest(state, max_new_tokens, stops)
        with self._lock:
            self._hits += run is not None
            self._misses += run is None
        if top_logits is None or run is None or not len(tokens):
            return []
        tokens = sampled_where_hot(top_logits, tokens, sampler, seed, rule)
        with self._lock:
            self._touch(run)
            self._replayed += len(tokens)
        return tokens

    def latest_output(self, state: Sequence[int] | np.ndarray) -> np.ndarray:
        """int32[n]: the tokens of a state's latest continuation that is still cached, or none."""
        with self._lock:
            entry = self._states.get(state_digest(state))
            parts = [tokens for _, _, tokens in entry.latest()] if entry is not None else []
        return np.concatenate(parts) if parts else int32(())

    def distance(
        self,
        state: Sequence[int] | np.ndarray,
        sampler: Sampler,
        max_new_tokens: int,
        stops: frozenset[int] = frozenset(),
        rule: Hotspot = USUAL,
    ) -> Distance:
        """The distance of `hotspot` with the same arguments from fresh sampling."""
        top_logits, tokens, _ = self._latest(state, max_new_tokens, stops)
        if top_logits is None or sampler.temperature == 0:
            return Distance(np.zeros(len(tokens)), 0.0)
        return Distance.of(top_logits, sampler, tokens, rule.find(top_logits, sampler))

    def _check_shape(self, top_logits: TopLogits) -> None:
        width, vocab = top_logits.tokens.shape[1], top_logits.vocab
        own = width if self.num_top_logits is None else min(self.num_top_logits, vocab)
        expected = self._shape or (own, vocab)
        if (width, vocab) != expected:
            raise ValueError(
                f"distributions of {width} kept tokens of {vocab}; this logits cache keeps "
                f"{expected[0]} of {expected[1]}"
            )
        self._shape = expected

    def _latest(
        self, state: Sequence[int] | np.ndarray, max_new_tokens: int, stops: frozenset[int]
    ) -> tuple[TopLogits | None, np.ndarray, TokenRun | None]:
        """The latest continuation of a state, cut; see `trie.latest_continuation`."""
        with self._lock:
            entry = self._states.get(state_digest(state))
            parts = [*entry.latest()] if entry is not None else []
        return trie.latest_continuation(parts, max_new_tokens, stops)

    def _touch(self, run: TokenRun | None) -> None:
        """Marks a run and its ancestors as used, the root last; evicted runs are ignored."""
        while run is not None:
            if run in self._runs:
                self._runs.move_to_end(run)
            run = run.parent

    def _next_version(self) -> int:
        self._num_changes += 1
        return self._num_changes

    def _evict(self) -> None:
        """Evicts the least recently used run, which is a leaf."""
        run, _ = self._runs.popitem(last=False)
        self._bytes -= run.bytes
        self._evicted += 1
        run.state.version = self._next_version()
        parent = run.parent
        if parent is not None:
            assert run.key is not None
            del parent.children[run.key]
            parent.latest_branch = None if parent.latest_branch == run.key else parent.latest_branch
        else:
            run.state.root = None
            self._bytes -= len(run.state.digest)
            del self._states[run.state.digest]
