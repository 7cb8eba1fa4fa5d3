"""Checks of the engine's settings and of requests, before anything is computed."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import jax
import numpy as np

from jaxshare import Sampler
from jaxshare.arena import ALIGNMENT, arena_size
from jaxshare.argument_checks import (
    INT32_MAX,
    INT64_MAX,
    as_adapter_name,
    as_integer,
    as_list,
    shown,
)
from jaxshare.decoding.logprobs import BOTH, PROCESSED, as_logprobs
from jaxshare.models import LoadedModel
from jaxshare.seeds import stream_seed
from jaxshare.serving.checkpoints import SaveError
from jaxshare.serving.engine.request import Request
from jaxshare.serving.engine.stream import StreamState
from jaxshare.serving.errors import TooLongError
from jaxshare.serving.inputs import (
    as_sampler,
    as_top_logprobs,
    check_both,
    check_completions,
    check_sampler,
    chosen,
    encode,
    encode_messages,
    is_dialogue,
    stop_texts,
    token_bytes,
)
from jaxshare.serving.kvcache.free_memory import cache_free_bytes, host_free_bytes
from jaxshare.serving.kvcache.policy import SearchPlace
from jaxshare.serving.kvcache.pool import standard_tokens, whole_tiles
from jaxshare.serving.logits_cache.cache import LogitsCache

_MAX_DEFAULT_BYTES = 2 * 1024**3
_A_PROMPT = "a prompt is a text, messages with role and content, or a list of tokens"
Messages = Sequence[Mapping[str, str]]
Prompt = str | Messages | Sequence[int] | np.ndarray
Samples = tuple[int, int | None] | None
"""See `samples_of_prompt`."""


class SubmitOptions(TypedDict, total=False):
    """The types of the arguments of `Engine.submit` by name."""

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    include_stop: bool | None
    seed: int | None
    agent_id: str | None
    priority: int
    resample: str | None
    logprobs: bool | str
    top_logprobs: int
    tools: Sequence[Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    next_seed: int | None
    place: SearchPlace | None
    adapter: str | None


def check_engine(**at_least_1: int) -> list[int]:
    """Returns settings as ints; refuses those below 1.

    Raises:
      ValueError, TypeError: as described.
    """
    return [as_integer(name, value, 1, INT32_MAX) for name, value in at_least_1.items()]


def check_checkpoints(model: LoadedModel, folder: str | os.PathLike) -> None:
    """Refuses checkpoints of an engine whose model is on devices of several processes.

    Raises:
      SaveError: as described.
    """
    if is_shared(model):
        raise SaveError(
            f"the checkpoint in {os.fspath(folder)} would hold keys and values of devices of "
            "several processes, each of which can read only its own; save and restore engines "
            "whose model is on this process's devices"
        )


def is_shared(model: LoadedModel) -> bool:
    """Returns whether the model is on devices of several processes."""
    return model.mesh is not None and model.mesh.is_multi_process


def memory_sizes(
    model: LoadedModel, kv_bytes: int | None, host_kv_bytes: int, max_rows: int
) -> tuple[int, int]:
    """(tokens on the accelerator, tokens in host memory) for these numbers of bytes.

    Raises:
      ValueError: there is no memory for one token, more than is free, host memory for less than one
        block, or host memory for a model on devices of several processes.
    """
    host_kv_bytes = as_integer("host_kv_bytes", host_kv_bytes)
    if host_kv_bytes and is_shared(model):
        raise ValueError(
            f"host_kv_bytes is {host_kv_bytes}, but the model is on devices of several processes, "
            "each of which can read only its own part of the keys and values; give 0, and more "
            "kv_bytes"
        )
    size = token_bytes(model)
    if kv_bytes is None:
        one_context = min(arena_size(model.config.max_positions), _MAX_DEFAULT_BYTES // size)
        tokens = max(standard_tokens(model, max_rows, _MAX_DEFAULT_BYTES), whole_tiles(one_context))
    else:
        tokens = whole_tiles(as_integer("kv_bytes", kv_bytes) // size)
    if tokens < 1:
        raise ValueError(
            f"kv_bytes is {kv_bytes}, but one token's keys and values take {size}; raise kv_bytes"
        )
    if not is_shared(model):
        _check_free("kv_bytes", tokens * size, cache_free_bytes(model), "the devices have")
    if 0 != host_kv_bytes < size * ALIGNMENT:
        raise ValueError(
            f"host_kv_bytes is {host_kv_bytes}, but a block of {ALIGNMENT} tokens takes "
            f"{size * ALIGNMENT}; give at least that, or 0 to keep nothing in host memory"
        )
    _check_free("host_kv_bytes", host_kv_bytes, host_free_bytes(), "the host has")
    return tokens, host_kv_bytes // size


def _check_free(name: str, bytes: int, free: int, where: str) -> None:
    if bytes > free:
        raise ValueError(f"{name} takes {bytes} bytes, but {where} {free} free; give less")


def _logits_source(model: LoadedModel) -> str:
    """The identity of the model, and of how its caches approximate, for a Logits Cache."""
    kept = (
        "" if model.approximate_kv is None else f" with keys and values as {model.approximate_kv}"
    )
    return model.fingerprint + kept


def logits_cache_for(
    model: LoadedModel, given: int | LogitsCache, num_top_logits: int
) -> LogitsCache | None:
    """The Logits Cache of an engine: the given one, a new one of this many bytes, or None for 0.

    Raises:
      ValueError: a negative number, or a cache of another model.
    """
    if isinstance(given, LogitsCache):
        given.check(_logits_source(model))
        given.num_top_logits = given.num_top_logits or num_top_logits
        return given
    given = as_integer("logits_cache", given)
    if given < 0:
        raise ValueError(f"logits_cache is {given}; give a number of bytes, or 0 for none")
    if not given:
        return None
    return LogitsCache(_logits_source(model), given, min(num_top_logits, model.config.vocab_size))


def emptied(cache: LogitsCache, model: LoadedModel) -> LogitsCache:
    """Another Logits Cache of the size of this one, for a model with other weights."""
    return LogitsCache(_logits_source(model), cache.max_bytes, cache.num_top_logits)


def prompt_tokens(
    model: LoadedModel,
    prompt: Prompt,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """The int32 tokens of a prompt; for tools and chat_template_kwargs see `encode_messages`.

    Raises:
      ValueError: the prompt is empty or of another kind, it has a token outside the vocabulary, it
        is a text and the model has no tokenizer, or the template refuses its messages.
      TypeError: it is nothing of the kind.
    """
    prompt = np.asarray(prompt) if isinstance(prompt, jax.Array) else prompt
    messages = is_dialogue(prompt)
    if (tools or chat_template_kwargs) and not messages:
        name = "tools" if tools else "chat_template_kwargs"
        raise ValueError(f"{name} are for the chat template, but the prompt is no list of messages")
    if isinstance(prompt, str):
        encoded = encode(model, prompt)
    elif not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise TypeError(f"{_A_PROMPT}, not {type(prompt).__name__}")
    elif isinstance(prompt, np.ndarray) and prompt.ndim != 1:
        raise ValueError(_A_PROMPT)
    elif messages:
        encoded = encode_messages(model, prompt, tools, chat_template_kwargs)  # pyright: ignore[reportArgumentType]
    elif isinstance(prompt, np.ndarray):
        encoded = prompt
    else:
        encoded = as_list("the prompt", prompt)
    if not len(encoded):
        raise ValueError("the prompt is empty; give at least one token of text")
    try:
        tokens, vocab = np.asarray(encoded), model.config.vocab_size
    except (ValueError, TypeError) as error:
        raise ValueError(_A_PROMPT) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(_A_PROMPT)
    if (outside := (tokens < 0) | (tokens >= vocab)).any():
        raise ValueError(
            f"the prompt's token {int(tokens[outside.argmax()])} is outside the vocabulary of {vocab}"
        )
    return tokens.astype(np.int32)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """How a request is answered, checked, and in Python's own types."""

    sampler: Sampler
    max_new_tokens: int
    stops: tuple[str, ...]
    seed: int | None
    agent: str
    priority: int
    resample: str | None
    logprobs: str | None
    includes_stop: bool
    num_top_logprobs: int
    next_seed: int | None = None
    place: SearchPlace | None = None
    adapter: str | None = None

    def request(
        self, number: int, tokens: np.ndarray, stream: StreamState, index: int = 0
    ) -> Request:
        """Makes the request of a sample of a prompt; its seed is still to be set."""
        return Request(
            number,
            tokens,
            self.sampler.for_prompt(len(tokens)),
            0,
            self.max_new_tokens,
            self.agent,
            self.priority,
            stream,
            self.resample,
            self.num_top_logprobs,
            index=index,
            next_seed=None if self.next_seed is None else stream_seed(self.next_seed),
            scored=self.logprobs is not None,
            processed=self.logprobs in (PROCESSED, BOTH),
            both=self.logprobs == BOTH,
            place=self.place,
        )

    @classmethod
    def checked(
        cls,
        model: LoadedModel,
        *,
        sampler: Any,
        max_new_tokens: Any,
        stop: Any,
        seed: Any,
        agent_id: Any,
        priority: Any,
        resample: Any,
        logprobs: Any,
        include_stop: Any,
        top_logprobs: Any,
        kept_logits: int,
        next_seed: Any = None,
        place: Any = None,
        adapter: Any = None,
    ) -> "RequestOptions":
        """Refuses options that the engine cannot serve; they are those of `Engine.submit`, where None
        is for those of the sampler, and the logits that its Logits Cache keeps, 0 without one.

        Raises:
          ValueError, TypeError: as described.
        """
        if agent_id is not None and not isinstance(agent_id, str):
            raise TypeError(f"agent_id is {shown(agent_id)}; it must be a text")
        if place is not None and not isinstance(place, SearchPlace):
            raise TypeError(f"place is {shown(place)}; it must be a SearchPlace, or None")
        sampler = as_sampler(sampler)
        include_stop = chosen("include_stop", include_stop, sampler, False)
        seed = chosen("seed", seed, sampler)
        if not isinstance(include_stop, bool | np.bool_):
            raise TypeError(f"include_stop is {shown(include_stop)}; it must be True or False")
        options = cls(
            sampler,
            as_integer("max_new_tokens", chosen("max_tokens", max_new_tokens, sampler, 256), 1),
            stop_texts(model, chosen("stop", stop, sampler)),
            None if seed is None else as_integer("seed", seed),
            agent_id or "",
            as_integer("priority", priority, -INT64_MAX, INT64_MAX),
            resample,
            as_logprobs(logprobs),
            bool(include_stop),
            as_top_logprobs(model, top_logprobs),
            None if next_seed is None else as_integer("next_seed", next_seed),
            place,
            as_adapter_name(adapter),
        )
        if resample is not None:
            options._check_resample(kept_logits > 0)
        if 0 < kept_logits < options.num_top_logprobs:
            raise ValueError(
                f"top_logprobs is {top_logprobs}, but the engine's Logits Cache keeps {kept_logits} "
                "logits; ask for at most as many, or make the engine with more kept_logits"
            )
        check_both(options.logprobs, options.num_top_logprobs)
        check_sampler(model, options.sampler)
        return options

    def _check_resample(self, has_logits_cache: bool) -> None:
        """Refuses what the Logits Cache cannot serve, as `checked` does."""
        if not isinstance(self.resample, str) or self.resample not in ("stepwise", "hotspot"):
            raise ValueError(
                f"resample is {shown(self.resample)}; it must be None, 'stepwise' or 'hotspot'"
            )
        if self.logprobs or self.num_top_logprobs:
            name = "logprobs" if self.logprobs else "top_logprobs"
            raise ValueError(
                f"{name} cannot be had with resample, which takes tokens from the Logits Cache; "
                "leave one of them out"
            )
        if not has_logits_cache:
            raise ValueError(
                f"resample is {self.resample!r}, but the engine has no Logits Cache; make it with "
                "logits_cache=BYTES"
            )
        if name := self.sampler.not_redrawn:
            raise ValueError(
                f"{name} cannot be had with resample, which samples again from distributions that "
                "the Logits Cache has kept; leave one of them out"
            )


def samples_of_prompt(sampler: Sampler, n: Any, best_of: Any, resample: str | None) -> Samples:
    """(completions to sample, how many of the best of them to give), or None where neither n nor
    best_of is given by the call or its sampler. Without best_of all are given.

    Raises:
      ValueError, TypeError: see `check_completions`; or both best_of and resample.
    """
    n, best_of = chosen("n", n, sampler), chosen("best_of", best_of, sampler)
    if best_of is not None and resample is not None:
        raise ValueError(
            "best_of cannot be had with resample, which knows no log-probabilities; leave one of "
            "them out"
        )
    if n is None and best_of is None:
        return None
    sampled, kept = check_completions(n, best_of)
    return sampled, None if best_of is None else kept


def check_length(
    prompt: int,
    max_new_tokens: int,
    *,
    context: int,
    capacity: int,
    available: int,
    bytes_per_token: int,
) -> None:
    """Refuses a request that can never fit.

    Args:
      prompt: its tokens.
      max_new_tokens: of the request.
      context: positions of the model.
      capacity: tokens of the engine's memory; available: those of them that are not leased to
        sessions.
      bytes_per_token: of keys and values.

    Raises:
      TooLongError: as described.
    """
    tokens = prompt + max_new_tokens
    if tokens > context:
        raise TooLongError(
            f"the prompt has {prompt} tokens and max_new_tokens is {max_new_tokens}, but the "
            f"model's context holds {context}; shorten the prompt or lower max_new_tokens"
        )
    if tokens > capacity:
        raise TooLongError(
            f"a prompt of {prompt} tokens and an output of {max_new_tokens} need keys and values "
            f"of {tokens} tokens, {tokens * bytes_per_token} bytes, but there is room for "
            f"{capacity}, {capacity * bytes_per_token} bytes; raise kv_bytes or shorten them"
        )
    if tokens > available:
        raise TooLongError(
            f"a prompt of {prompt} tokens and an output of {max_new_tokens} need {tokens} of the "
            f"engine's {capacity} tokens, but sessions have all but {available} of them; close "
            "one, raise kv_bytes or shorten them"
        )
