"""The trie of a state: runs of distributions with the tokens sampled from them, and branches where
another token was sampled."""

import dataclasses
import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare.decoding.sampling_params import Sampler
from jaxshare.decoding.top_logits import TopLogits
from jaxshare.serving.logits_cache.replay import FIELDS, UNDECIDED, redraw, rows

_FIRST_LOOK = 32
"""Positions that a replay samples first; then four times as many each time. Most end early."""


class TokenRun:
    """Consecutive distributions, the token sampled from each, and the branches that leave them.

    Arrays are never changed, only replaced.

    Attributes:
      top_logits: the distributions, [n, ...].
      tokens: int32[n].
      state, parent, key: where it is in the trie; the key is that of `parent.children`.
      children: the branches, by (position in this run, token).
      latest_branch: the key where the latest continuation left it, None where it went to the end.
    """

    def __init__(
        self,
        top_logits: TopLogits,
        tokens: np.ndarray,
        state: "CachedState",
        parent: "TokenRun | None",
        key: tuple[int, int] | None,
    ):
        self.top_logits, self.tokens = top_logits, tokens
        self.state, self.parent, self.key = state, parent, key
        self.children: dict[tuple[int, int], TokenRun] = {}
        self.latest_branch: tuple[int, int] | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its arrays."""
        return self.tokens.nbytes + sum(getattr(self.top_logits, name).nbytes for name in FIELDS)

    def continues_with(self, key: tuple[int, int] | None, position: int) -> bool:
        """Returns whether a run with this key would only continue this one, of which `position` is
        used."""
        return key is not None and position == len(self.tokens) and self.tokens[-1] == key[1]

    def append(self, top_logits: TopLogits, tokens: np.ndarray) -> None:
        """Appends distributions and tokens at the end."""
        self.top_logits = joined([self.top_logits, top_logits])
        self.tokens = np.concatenate([self.tokens, tokens])


class CachedState:
    """The trie of one state.

    Attributes:
      digest: of the state's tokens.
      version: changes with the trie.
      root: the run that starts after the state.
    """

    def __init__(self, digest: bytes):
        self.digest, self.version = digest, 0
        self.root: TokenRun | None = None

    def follow(self, tokens: np.ndarray) -> tuple[list[TokenRun], int, int]:
        """Follows tokens from the root.

        The distribution after the last of `tokens` is not counted, cached or not.

        Returns:
          The runs along them, how many positions of the last run were used, and how many
            distributions along them are cached.
        """
        path: list[TokenRun] = []
        run, num_cached, position = self.root, 0, 0
        while run is not None:
            path.append(run)
            rest = tokens[num_cached : num_cached + len(run.tokens)]
            differs = np.flatnonzero(rest != run.tokens[: len(rest)])
            if not len(differs):
                return path, len(rest), num_cached + len(rest)
            position = int(differs[0]) + 1
            num_cached += position
            run = run.children.get((position - 1, int(rest[position - 1])))
        return path, position, num_cached

    def place(self, tokens: np.ndarray) -> tuple[TokenRun | None, int]:
        """The run, and the position in it, of the distribution after these tokens.

        The position is the run's length where the run ends there, and the run None where the tokens
        have left all runs.
        """
        if not len(tokens):
            return self.root, 0
        path, position, num_cached = self.follow(tokens)
        run = path[-1] if path and num_cached == len(tokens) else None
        if run is not None and position and run.tokens[position - 1] != tokens[-1]:
            run = None
        return run, position if run else 0

    def latest(self) -> Iterator[tuple[TokenRun, TopLogits, np.ndarray]]:
        """The parts of the latest continuation, each with the token that leaves its run."""
        run = self.root
        while run is not None:
            if run.latest_branch is None:
                yield run, run.top_logits, run.tokens
                return
            position, token = run.latest_branch
            tokens = np.append(run.tokens[:position], np.int32(token))
            yield run, rows(run.top_logits, slice(position + 1)), tokens
            run = run.children[run.latest_branch]

    def walk(
        self,
        lock: threading.Lock,
        sampler: Sampler,
        seed: int,
        max_new_tokens: int,
        stops: frozenset[int],
        begun: Sequence[int] = (),
    ) -> "tuple[list[int], TokenRun | None, int]":
        """Computes a replay; see `LogitsCache.replay`.

        Holds `lock` only while it reads the trie, not while it samples.

        Args:
          lock: of the trie.
          sampler, seed, max_new_tokens, stops: as for the replay.
          begun: the output's first tokens, after which it goes on.

        Returns:
          The tokens with those that it began with, the last run that it read, and the state's
            version at the start.
        """
        with lock:
            version, (run, position) = self.version, self.place(int32(begun))
            top_logits, tokens = (run.top_logits, run.tokens) if run else (None, int32(()))
        output: list[int] = [*begun]
        look, last = _FIRST_LOOK, run
        while (
            run is not None
            and top_logits is not None
            and position < len(tokens)
            and len(output) < max_new_tokens
        ):
            end = min(position + look, len(tokens), position + max_new_tokens - len(output))
            part = slice(position, end)
            own = tokens[part]
            sampled = redraw(rows(top_logits, part), sampler, seed, len(output))
            ends = np.isin(own, list(stops)) | (sampled != own) if stops else sampled != own
            first = int(np.argmax(ends)) if ends.any() else len(own)
            output += own[:first].tolist()
            if first == len(own):
                position, look = end, 4 * look
                continue
            token = int(sampled[first])
            if token == UNDECIDED:
                break
            output.append(token)
            if token in stops:
                break
            with lock:
                run = run.children.get((position + first, token))
                if run is not None:
                    last, top_logits, tokens = run, run.top_logits, run.tokens
            position, look = 0, _FIRST_LOOK
        return output, last, version


def latest_continuation(
    parts: Sequence[tuple[TokenRun, TopLogits, np.ndarray]],
    max_new_tokens: int,
    stops: frozenset[int],
) -> tuple[TopLogits | None, np.ndarray, TokenRun | None]:
    """Joins the parts of `CachedState.latest`, cut after `max_new_tokens` or a stop token.

    Returns:
      The distributions, the tokens, and the last run.
    """
    if not parts:
        return None, int32(()), None
    tokens = np.concatenate([tokens for _, _, tokens in parts])[: max(max_new_tokens, 0)]
    stopped = np.flatnonzero(np.isin(tokens, list(stops)))
    tokens = tokens[: stopped[0] + 1] if len(stopped) else tokens
    top_logits = joined([top_logits for _, top_logits, _ in parts])
    return rows(top_logits, slice(len(tokens))), tokens, parts[-1][0]


def state_digest(state: Sequence[int] | np.ndarray) -> bytes:
    """SHA-256 of a state's tokens."""
    return hashlib.sha256(int32(state).tobytes()).digest()


def int32(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Tokens as an int32 array."""
    return np.asarray(tokens, np.int32)


def copied(top_logits: TopLogits) -> TopLogits:
    """A copy, which keeps no larger array alive."""
    arrays = {name: np.array(getattr(top_logits, name)) for name in FIELDS}
    return dataclasses.replace(top_logits, **arrays)


def joined(parts: Sequence[TopLogits]) -> TopLogits:
    """Distributions one after another."""
    return dataclasses.replace(
        parts[0],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS},
    )


def check_distributions(tokens: Sequence[int], top_logits: TopLogits) -> None:
    """Refuses distributions that are not finite, or not one for each token.

    Raises:
      ValueError: as described.
    """
    if len(top_logits.tokens) != len(tokens):
        raise ValueError(
            f"{len(tokens)} tokens and {len(top_logits.tokens)} distributions; each token needs "
            "the one that it was sampled from"
        )
    with np.errstate(invalid="ignore"):
        largest = np.max(top_logits.logits, axis=1, initial=-np.inf)
        below = np.sum(top_logits.below, axis=1)
        sums = np.sum(
            [below, top_logits.rest, top_logits.rest_at_1, top_logits.kept_at, largest], axis=0
        )
    if len(odd := np.flatnonzero(~np.isfinite(sums))):
        raise ValueError(
            f"distribution {odd[0]} is not finite; a row with such logits ends with an error, and "
            "is not kept"
        )


def snapshot_runs(runs: Sequence[TokenRun]) -> list[dict[str, Any]]:
    """Metadata of runs, for `restored_run`."""
    numbers = {id(run): i for i, run in enumerate(runs)}
    return [
        {
            "state": run.state.digest.hex(),
            "positions": len(run.tokens),
            "key": run.key,
            "turn": run.latest_branch,
            "parent": None if run.parent is None else numbers[id(run.parent)],
        }
        for run in runs
    ]


def snapshot_arrays(
    top_logits: Sequence[TopLogits], tokens: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Arrays of all runs, one after another: `logits.tokens` and `logits.kept.*`."""
    parts = {name: [getattr(each, name) for each in top_logits] for name in FIELDS}
    arrays = {
        f"logits.kept.{name}": np.concatenate(pieces) for name, pieces in parts.items() if pieces
    }
    arrays["logits.tokens"] = np.concatenate([int32(()), *tokens])
    return arrays


def restored_run(
    part: slice,
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    vocab: int,
    parent: TokenRun | None,
) -> TokenRun:
    """A run from a snapshot, not in any trie yet.

    Args:
      part: its positions in the arrays.
      arrays, metadata: as of `snapshot_arrays`, and its own of `snapshot_runs`.
      vocab: of the model.
      parent: the run that it leaves, or None.
    """
    state = parent.state if parent else CachedState(bytes.fromhex(metadata["state"]))
    top_logits = TopLogits(
        **{name: arrays[f"logits.kept.{name}"][part].copy() for name in FIELDS}, vocab=vocab
    )
    key, branch = (
        None if pair is None else (int(pair[0]), int(pair[1]))
        for pair in (metadata["key"], metadata["turn"])
    )
    run = TokenRun(top_logits, arrays["logits.tokens"][part].copy(), state, parent, key)
    run.latest_branch = branch
    return run
