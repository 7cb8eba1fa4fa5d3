"""Inputs of every kind of run: the prompt's tokens, context checks, the checkpoint's settings."""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxshare import Sampler
from jaxshare.argument_checks import INT32_MAX, as_integer, as_list, as_texts, shown
from jaxshare.decoding.logprobs import BOTH
from jaxshare.decoding.processors import check_processor, find_processor
from jaxshare.decoding.sampling_params import check_best_of
from jaxshare.models import LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.quantised_cache import SCALE_BYTES
from jaxshare.serving.chat.dialogue import checked_messages
from jaxshare.serving.chat.tools import as_tools
from jaxshare.serving.chat_template import UnusedToolsError, render_marked
from jaxshare.serving.grammars.compiled import compile_grammar
from jaxshare.serving.words import check_length, check_tokens, encode_marked
from jaxshare.sharding import KV, MODEL_AXES, axis_size

MOST_LOGPROBS = 20
"""The most likeliest tokens whose log-probabilities are given in each place."""
_log = logging.getLogger("jaxshare.generate")

RESERVED = (
    "messages",
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
)
"""Variables of a chat template that are set here."""
_DEEPEST = 64


def encode(model: LoadedModel, prompt: str | Sequence[int], *, first: bool = True) -> list[int]:
    """Encodes a prompt.

    Args:
      model: the model with the tokenizer.
      prompt: text, or tokens, which are returned unchanged. The texts of special tokens become
        special tokens, so that a dialogue can be written out by hand; words of others belong into
        messages, which `encode_messages` keeps apart from the template.
      first: the text is at the start of a context, where some tokenizers add a special token.

    Raises:
      ValueError: an empty prompt, text for a model without a tokenizer or with that of another
        one, or far more text than the context holds.
    """
    if not isinstance(prompt, str):
        given = as_list("the prompt", prompt)
        prompt = [as_integer("a token of the prompt", token, 0, INT32_MAX) for token in given]
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token of text")
    if not isinstance(prompt, str):
        return prompt
    if model.tokenizer is None:
        raise ValueError(
            "the model folder has no tokenizer, so a prompt must be given as tokens; add the "
            "tokenizer's files to the folder"
        )
    check_length(model.tokenizer, len(prompt), model.config.max_positions)
    # not verbose, because `check_context` reports a prompt that is too long
    tokens = model.tokenizer.encode(prompt, add_special_tokens=first, verbose=False)
    return check_tokens(tokens, model.config.vocab_size)


def encode_messages(
    model: LoadedModel,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encodes a dialogue in the model's chat template, up to the start of the model's answer.

    Special tokens come from the template alone: their texts in messages are ordinary tokens, and so
    are those in calls of functions, in their results, in tools and in chat_template_kwargs.

    Args:
      model: with a tokenizer that has a chat template.
      messages: each with a role and content. An assistant's may have `tool_calls`, and a message of
        the role "tool" has a call's result.
      tools: that the model may call, as `jaxshare.serving.chat.as_tools` takes them; None for none.
      chat_template_kwargs: further variables of the template, such as {"enable_thinking": False}.

    Raises:
      ValueError: a model without a template or with the tokenizer of another, messages that have
        another form or that the template refuses, tools that it does not know, or far more text
        than the context holds.
      TypeError: a message is no dict, something is no tool, or chat_template_kwargs no dict.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError("the model has no chat template, so it cannot take messages; give a text")
    offered, variables = as_tools(tools), _checked_variables(chat_template_kwargs)
    messages = checked_messages(messages)
    check_messages(model, [*messages, *(tool.schema() for tool in offered), variables])
    try:
        text = render_marked(tokenizer, messages, offered, variables)
    except UnusedToolsError as error:
        raise ValueError(
            f"the model's chat template cannot offer {', '.join(tool.name for tool in offered)}: "
            f"{error}"
        ) from error
    except ChatTemplateError as error:
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise ValueError(
            f"the model's chat template refuses the messages ({error}); their roles are {roles}"
        ) from error
    return check_tokens(encode_marked(tokenizer, text), model.config.vocab_size)


def _checked_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"chat_template_kwargs is {shown(given)}; it must be a dict with names")
    if taken := [name for name in RESERVED if name in given]:
        raise ValueError(f"chat_template_kwargs has {taken[0]}, which is set here; leave it out")
    return dict(given)


def check_messages(model: LoadedModel, messages: Sequence[Mapping[str, object]]) -> None:
    """Raises ValueError for messages that are far too long for the model's context."""
    texts = [value for message in messages for value in message.values()]
    check_length(model.tokenizer, _characters(texts), model.config.max_positions)


def _characters(value: object) -> int:
    """The characters of all texts in a value, and of all names.

    Raises:
      ValueError: it is nested too deeply.
    """
    count, level = 0, [value]
    for _ in range(_DEEPEST):
        count += sum(len(one) for one in level if isinstance(one, str))
        inner: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += [*one.keys(), *one.values()]
            elif isinstance(one, list | tuple):
                inner += one
        if not inner:
            return count
        level = inner
    raise ValueError(f"the messages are nested more than {_DEEPEST} levels deep; give plainer ones")


def check_context(
    model: LoadedModel, prompt_tokens: int, max_new_tokens: int, what: str = "the prompt"
) -> None:
    """Raises ValueError if a prompt and its new tokens may exceed the model's context."""
    if prompt_tokens + max_new_tokens > model.config.max_positions:
        raise ValueError(
            f"{what} has {prompt_tokens} tokens and {max_new_tokens} more may follow, but the "
            f"model's context holds {model.config.max_positions}; shorten the prompt or lower "
            "max_new_tokens"
        )


def is_dialogue(prompt: Any) -> bool:
    """Returns whether a prompt is a list of messages, and no text and no tokens."""
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes)
    return is_list and isinstance(next(iter(prompt), None), Mapping)


def check_model(model: Any) -> None:
    """Raises TypeError for what is the name of a model, or none, in place of a model."""
    if model is None or isinstance(model, str | os.PathLike):
        name = "embedded" if model is None else os.fspath(model)
        raise TypeError(
            f"model is {model!r}, which is no model; give what jaxshare.models.load({name!r}) returns"
        )


def default_sampler(model: LoadedModel) -> Sampler:
    """Returns the checkpoint's own sampling settings."""
    return model.generation.sampler


def chosen(name: str, given: Any, sampler: Sampler, default: Any = None) -> Any:
    """Returns a setting of a call: its argument, or where that is None the sampler's field of this
    name, or where that is None, too, the default."""
    if given is not None:
        return given
    value = getattr(sampler, name)
    return default if value is None else value


def check_completions(n: Any, best_of: Any) -> tuple[int, int]:
    """(completions of a prompt to sample, how many of them to give); None is for none given.

    Raises:
      ValueError: a number below 1, or fewer to sample than to give.
      TypeError: it is no integer.
    """
    kept = 1 if n is None else as_integer("n", n, 1, INT32_MAX)
    sampled = kept if best_of is None else as_integer("best_of", best_of, 1, INT32_MAX)
    check_best_of(kept, sampled)
    return sampled, kept


def stop_texts(model: LoadedModel, stop: Any) -> tuple[str, ...]:
    """Returns the texts that end an output.

    Args:
      model: the model with the tokenizer.
      stop: one, several, or None for the checkpoint's own.

    Raises:
      ValueError: an empty text, or a model without a tokenizer.
      TypeError: it is no text and no list of texts.
    """
    stops = model.generation.stop_texts if stop is None else as_texts("stop", stop)
    if stops and model.tokenizer is None:
        raise ValueError(
            "the model folder has no tokenizer, so no output can end at a text; add the "
            "tokenizer's files to the folder, or give no stop"
        )
    return stops


def as_top_logprobs(model: LoadedModel, count: Any) -> int:
    """Returns the number of likeliest tokens to give the log-probabilities of, at each place.

    Raises:
      ValueError: it is out of range.
      TypeError: it is no integer.
    """
    return as_integer("top_logprobs", count, 0, min(MOST_LOGPROBS, model.config.vocab_size))


def check_both(kind: str | None, top_logprobs: int) -> tuple[str | None, int]:
    """Returns its arguments; refuses the likeliest tokens beside log-probabilities of both kinds.

    Raises:
      ValueError: as described.
    """
    if kind == BOTH and top_logprobs:
        raise ValueError(
            f"top_logprobs is {top_logprobs} and logprobs 'both', but the likeliest tokens are of one "
            "kind; give logprobs='raw' or 'processed', or leave top_logprobs out"
        )
    return kind, top_logprobs


def as_sampler(value: Any) -> Sampler:
    """Returns a sampler; raises TypeError for anything else."""
    if not isinstance(value, Sampler):
        raise TypeError(f"sampler is of type {type(value).__name__}; it must be a Sampler")
    return value


def check_sampler(model: LoadedModel, sampler: Sampler) -> None:
    """Raises ValueError if a sampler names a token outside the model's vocabulary, or leaves none to
    choose, or has a logits processor that does not serve it."""
    vocab = model.config.vocab_size
    grammar = compile_grammar(model, sampler)
    if grammar and not grammar.table and model.mesh is not None and model.mesh.is_multi_process:
        raise ValueError(
            "the sampler's grammar is no table, so that a host has to read along, but the model is on "
            "devices of several processes; give a regular grammar that is small"
        )
    if outside := [token for token in sampler.tokens if token >= vocab]:
        raise ValueError(
            f"the sampler names token {min(outside)}, outside the vocabulary of {vocab}"
        )
    if len(sampler.forbidden) >= vocab and len({*sampler.forbidden} & {*range(vocab)}) == vocab:
        raise ValueError(
            f"the sampler forbids all {vocab} tokens of the vocabulary, so none could be chosen; "
            "allow at least one"
        )
    for name, _ in sampler.processors:
        check_processor(find_processor(name), vocab)


def warn_of_equal_texts(counts: Iterable[tuple[int, Sampler]]) -> None:
    """Logs a warning if n > 1 completions of a prompt would be equal, at temperature 0.

    `counts` are the number of completions and the sampler of each prompt.
    """
    n = max((n for n, sampler in counts if sampler.temperature == 0), default=0)
    if n > 1:
        _log.warning(
            "all %d completions of a prompt will be equal, because temperature 0 takes the "
            "likeliest token every time; give a temperature above 0, such as 0.7, or ask for one "
            "completion",
            n,
        )


def cache_dtype(model: LoadedModel) -> jnp.dtype:
    """Returns the dtype of cached keys and values, which is that of the parameters.

    Where the model's caches approximate (`LoadedModel.approximate_kv`), that of what their codes
    stand for.
    """
    return model.dtype


def token_bytes(model: LoadedModel) -> int:
    """Returns the bytes of one cached token.

    Keys and values of all layers, on all devices of one data group of the mesh; where they are
    codes, with their scales.
    """
    c, is_exact = model.config, model.approximate_kv is None
    size, scale = (cache_dtype(model).itemsize, 0) if is_exact else (1, SCALE_BYTES)
    each = sum(numbers * size + scale for numbers in (c.head_dim, c.value_dim) if numbers)
    return c.num_layers * c.num_kv_heads * each


def cache_devices(model: LoadedModel) -> int:
    """Returns the number of devices over which a cache of the model is distributed."""
    return axis_size(model.mesh, (*MODEL_AXES, KV))
