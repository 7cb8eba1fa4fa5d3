"""The input of batch jobs: JSON lines, read into prompts; bad lines are reported."""

import argparse
import codecs
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from jaxshare import Grammar, Sampler
from jaxshare.models import LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError, SlowTemplateError
from jaxshare.serving.branches.prompt_tree import MAX_COMPLETIONS, Branch, read_prompts
from jaxshare.serving.chat_template import render_marked
from jaxshare.serving.inputs import check_context, check_messages, check_sampler, encode
from jaxshare.serving.words import encode_marked

_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "bad_words", "forbidden"),
    *("forbidden_first", "min_tokens", "stop_token_ids", "ignore_eos", "sequence_bias"),
    *("max_tokens", "min_length", "stop", "include_stop", "seed", "processors", "grammar"),
)
"""The fields of `Sampler` that a line may set; a grammar is as `Grammar.of` takes it."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A prompt to complete. The engine refers to it by its index in the list.

    Attributes:
      line: its line of the input, from 1.
      id: the id that the line gives, or else the line's number.
      branch: the child indices that lead to it from the root of the line's tree; () where the line
        is no tree.
      tokens: of the whole prompt.
      n: the number of completions.
      sampler: of these, where the line has settings of its own; None for that of the job.
    """

    line: int
    id: str | float
    branch: tuple[int, ...]
    tokens: tuple[int, ...]
    n: int
    sampler: Sampler | None

    @property
    def name(self) -> str:
        """The name of the prompt in an error, such as "the prompt of line 3"."""
        branch = f"{_branch_name(self.branch)} of " if self.branch else ""
        return f"the prompt of {branch}line {self.line}"


def read_input(
    data: bytes, model: LoadedModel, options: argparse.Namespace, sampler: Sampler
) -> tuple[list[Item], list[dict[str, Any]]]:
    """Reads the prompts, in the order of the input.

    `sampler` is that of the job; a line, or a node of its tree, may change its settings.

    Returns:
      the prompts, and the bad lines: [{"line": number, "error": message}].

    Raises:
      ValueError: a chat template that does not end.
    """
    items: list[Item] = []
    bad_lines: list[dict[str, Any]] = []
    lines: dict[str | float, int] = {}
    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            found = _read_line(raw, number, model, options, sampler)
            first = lines.setdefault(found[0].id, number)
            if first != number:
                raise ValueError(
                    f"has the id {json.dumps(found[0].id)} of line {first}; give each line its own"
                )
            items += found
        except SlowTemplateError as error:  # every other line would wait as long
            raise ValueError(
                f"the model's chat template cannot be used for line {number}: {error}; mend the "
                "template, or give prompts instead of messages"
            ) from error
        except ValueError as error:
            bad_lines.append({"line": number, "error": str(error)})
        except RecursionError:
            bad_lines.append(
                {"line": number, "error": "is nested too deeply; give a tree of fewer levels"}
            )
    return items, bad_lines


def _read_line(
    raw: bytes, number: int, model: LoadedModel, options: argparse.Namespace, sampler: Sampler
) -> list[Item]:
    try:
        value = json.loads(raw.decode())
        # fails on half a surrogate pair, which JSON can escape but which is no text
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError as error:
        raise ValueError(
            f"is not JSON in UTF-8 ({error}); it must be an object or a string"
        ) from error
    if isinstance(value, str):
        value = {"text" if options.tree else "prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"is {json.dumps(value)[:40]}; it must be a JSON object or a string")
    name = value.pop("id", number)
    if type(name) not in (str, int, float) or (type(name) is float and not math.isfinite(name)):
        raise ValueError(f"has the id {json.dumps(name)[:40]}; it must be a string or a number")
    tree = (
        _node(value, (), sampler)
        if options.tree
        else Branch(
            _prompt(value, model, options.chat), n=_count(value), sampler=_sampler(value, sampler)
        )
    )
    prompts = read_prompts(tree, options.n, lambda text, first: encode(model, text, first=first))
    items = [
        Item(number, name, path, tuple(prompt.tokens), prompt.n, prompt.sampler)
        for path, prompt in zip(_paths(tree, ()), prompts, strict=True)
    ]
    for item in items:
        if outside := [t for t in item.tokens if not 0 <= t < model.config.vocab_size]:
            raise ValueError(
                f"has the token {outside[0]}; tokens of this model are between 0 and "
                f"{model.config.vocab_size - 1}"
            )
        what = f"the prompt of {_branch_name(item.branch)}" if options.tree else "the prompt"
        own = item.sampler and item.sampler.max_tokens
        check_context(model, len(item.tokens), own or options.max_new_tokens, what)
        _check_sampler(model, item.sampler)
    return items


def _check_sampler(model: LoadedModel, sampler: Sampler | None) -> None:
    try:
        if sampler:
            check_sampler(model, sampler)
    except ValueError as error:
        raise ValueError(f"has settings that cannot be obeyed: {error}") from error


def _prompt(value: dict[str, Any], model: LoadedModel, chat: bool) -> str | list[int]:
    """Reads the prompt of a line that is no tree: text, or tokens."""
    kinds = {"prompt", "messages", "tokens"}
    _check_fields(
        value,
        {*kinds, "n"},
        ' ("text" and "children" are of a tree, which --tree reads)' if "text" in value else "",
    )
    if len(kinds & {*value}) != 1:
        raise ValueError('must have one of "prompt", "messages" and "tokens"')
    if "tokens" in value:
        return _tokens(value["tokens"])
    if "messages" in value:
        return _apply_template(value["messages"], model)
    text = _text("prompt", value["prompt"])
    return _apply_template([{"role": "user", "content": text}], model) if chat else text


def _node(value: Any, path: tuple[int, ...], outer: Sampler) -> Branch:
    """Reads a node of a line's tree, with all its descendants.

    Its sampling settings change those of the outer sampler, which is its parent's or the job's.
    """
    name = _branch_name(path)
    value = {"text": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(
            f'{name} is {json.dumps(value)[:40]}; it must be an object such as {{"text": "...", '
            '"children": [...]}'
        )
    try:
        _check_fields(value, {"text", "tokens", "children", "n"})
        if len({"text", "tokens"} & {*value}) != 1:
            raise ValueError('must have one of "text" and "tokens"')
        text, n = (
            _tokens(value["tokens"]) if "tokens" in value else _text("text", value["text"]),
            _count(value),
        )
        if not isinstance(children := value.get("children", []), list):
            raise ValueError('has "children" that are no list; give a list of nodes')
        sampler = _sampler(value, outer)
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error
    nodes = [_node(child, (*path, i), sampler or outer) for i, child in enumerate(children)]
    return Branch(text, tuple(nodes), n, sampler)


def _branch_name(path: tuple[int, ...]) -> str:
    return f"branch {'.'.join(map(str, path))}" if path else "the root"


def _paths(tree: Branch, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The paths of the nodes to sample from, in the order of `read_prompts`: depth first."""
    if tree.n is not None or not tree.children:
        yield path
    for i, child in enumerate(tree.children):
        yield from _paths(child, (*path, i))


def _check_fields(value: dict[str, Any], known: set[str], hint: str = "") -> None:
    if unknown := sorted({*value} - known - {*_SAMPLING}):
        raise ValueError(
            f"has the unknown field {json.dumps(unknown[0])}{hint}; known are id, "
            f"{', '.join([*sorted(known), *_SAMPLING])}"
        )


def _text(name: str, text: Any) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(
            f'has {"an empty" if text == "" else "no text as its"} "{name}"; give at least one '
            "token of text"
        )
    return text


def _tokens(tokens: Any) -> list[int]:
    if (
        not isinstance(tokens, list)
        or not tokens
        or any(type(token) is not int or token < 0 for token in tokens)
    ):
        raise ValueError(
            'has "tokens" that are no list of whole numbers from 0 on; give at least one token'
        )
    return tokens


def _count(value: dict[str, Any]) -> int | None:
    n = value.get("n")
    if "n" in value and (type(n) is not int or n < 1):
        raise ValueError(f"has {json.dumps(n)[:40]} as its n; ask for at least 1 completion")
    if n is not None and n > MAX_COMPLETIONS:
        raise ValueError(
            f"has {str(n)[:40]} as its n; ask for at most {MAX_COMPLETIONS} completions of a prompt"
        )
    return n


def _sampler(value: dict[str, Any], outer: Sampler) -> Sampler | None:
    """The sampler of a line or node with settings of its own, or None."""
    given = {name: value[name] for name in _SAMPLING if name in value}
    try:
        if given.get("grammar") is not None:
            given["grammar"] = Grammar.of(given["grammar"])
        return dataclasses.replace(outer, **given) if given else None
    except (ValueError, TypeError) as error:
        raise ValueError(f"has a sampling setting out of range: {error}") from error


def _apply_template(messages: Any, model: LoadedModel) -> list[int]:
    tokenizer: Any = model.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        raise ValueError(
            "needs a chat template, and the model has none; write the prompt in the model's own "
            "format"
        )
    if (
        not isinstance(messages, list)
        or not messages
        or not all(
            isinstance(m, dict)
            and isinstance(m.get("role"), str)
            and isinstance(m.get("content"), str)
            for m in messages
        )
    ):
        raise ValueError(
            'has "messages" that are no list of {"role": "...", "content": "..."}; give at least '
            "one"
        )
    check_messages(model, messages)
    try:
        return encode_marked(tokenizer, render_marked(tokenizer, messages))
    except SlowTemplateError:
        raise
    except ChatTemplateError as error:
        raise ValueError(
            f"has messages that the chat template refuses ({error}); give others"
        ) from error
