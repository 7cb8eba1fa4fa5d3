"""Prompts: text, tokens and trees of them, and their full token sequences (Hydragen section 3.3).

    tree = Branch(few_shot, [Branch(problem, n=128) for problem in problems])
    prompts = read_prompts(tree, 1, encode)
    sharing = plan_sharing(build_prefix_tree(prompts), grow=max_new_tokens // 2)

A list of prompts and a tree of them are equivalent: both are read into full token sequences, from
which the prefix tree is built.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxshare import Sampler

Encode = Callable[[str, bool], list[int]]
"""(text, first) -> tokens. `first`: the text starts a prompt; only then may special tokens (BOS) be
put before it."""

_TOKEN_LIMIT = 2**31
"""Token numbers are below this: they are int32."""


@dataclasses.dataclass(frozen=True)
class Branch:
    """A node of a tree of prompts. The prompt of a node is the text from the root to its end.

    Attributes:
      text: of this node, or its tokens; never empty.
      children: continuations; each sees this node's text before its own.
      n: completions sampled where this node ends. None means that of its sampler, or else the
        call's, for a node without children, and no completions for others.
      sampler: of the completions that end here, and of those of its descendants that have none of
        their own. None means that of the parent, and of the call where no node has one. Its
        `max_tokens`, `stop`, `include_stop` and `seed` win over the call's, being nearer.
    """

    text: str | Sequence[int]
    children: Sequence["Branch"] = ()
    n: int | None = None
    sampler: Sampler | None = None


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt to complete.

    Attributes:
      number: its index in the order in which prompts are given, depth-first in a tree.
      tokens: all of them.
      n: the number of completions.
      sampler: of these, or None for that of the call.
    """

    number: int
    tokens: tuple[int, ...]
    n: int
    sampler: Sampler | None = None


Messages = Sequence[Mapping[str, Any]]
Prompts = (
    str
    | Branch
    | Sequence[int]
    | Messages
    | Sequence[str | Branch | Sequence[int] | Messages]
    | Sequence[Prompt]
)
"""One prompt as text, tokens or messages, one tree of prompts, or a list of these; or some of the
results of `read_prompts`."""


def read_prompts(
    prompts: Prompts, n: int, encode: Encode, vocab_size: int = _TOKEN_LIMIT
) -> list[Prompt]:
    """Reads all prompts as tokens.

    The whole text of a prompt is encoded at once, so its tokens are those of the full prompt given
    as one string, even where a token straddles two nodes of a tree. Only where a node is given as
    tokens, the texts before it and after it are encoded separately.

    Args:
      prompts: text, tokens, a tree, or a list of these, which need have nothing in common. A list
        of `Prompt` stays as it is, so that a part of a longer list keeps its numbers.
      n: completions of each prompt, unless its `Branch` has a number of its own.
      encode: the tokenizer; called once for each different text.
      vocab_size: below which tokens must be.

    Raises:
      ValueError: no prompt, one without text, an n below 1, or a value of another kind. The message
        names it: `prompt 3` is entry 3, from 0, and `branch 3.2.1` child 1 of its child 2.
    """
    encode = functools.cache(encode)
    check_n(n, "")
    entries = _entries(prompts)
    found: list[Prompt] = [entry for entry in entries if isinstance(entry, Prompt)]
    if len(found) == len(entries):
        return found

    def tokens(head: tuple[int, ...], text: str) -> tuple[int, ...]:
        return (*head, *encode(text, not head)) if text else head

    for number, entry in enumerate(entries):
        root = entry if isinstance(entry, Branch) else Branch(entry)
        # With each node comes what precedes it: the tokens up to the last node that is given as
        # tokens, then text that is not encoded yet; and the sampler of its parent.
        stack = [(root, f"branch {number}" if root is entry else f"prompt {number}", (), "", None)]
        while stack:
            branch, place, head, text, sampler = stack.pop()
            _check_branch(branch, place, vocab_size)
            sampler = branch.sampler or sampler
            if isinstance(branch.text, str):
                text += branch.text
            else:
                head, text = (*tokens(head, text), *map(int, branch.text)), ""
            count = branch.n if branch.children else branch.n or (sampler and sampler.n) or n
            if count:
                whole = tokens(head, text)
                if not whole:
                    raise ValueError(
                        f"{place} has text that the tokenizer makes no token of; give at least one "
                        "token of text"
                    )
                found.append(Prompt(len(found), whole, int(count), sampler))
            stack += [
                (child, f"{place}.{i}", head, text, sampler)
                for i, child in reversed([*enumerate(branch.children)])
            ]
    return found


def _entries(prompts: Any) -> Sequence[Any]:
    """The prompts as a list, where one was given alone."""
    if isinstance(prompts, (str, Branch)) or not _is_sequence(prompts):
        return [prompts]
    if len(prompts) and _is_token(prompts[0]):
        return [prompts]
    if not len(prompts):
        raise ValueError("there are no prompts; give at least one, with at least one token of text")
    return prompts


def _check_branch(branch: object, place: str, vocab_size: int) -> None:
    if not isinstance(branch, Branch):
        raise ValueError(
            f"{place} is of type {type(branch).__name__}, but children are Branch objects; wrap it "
            "as Branch(...)"
        )
    if not isinstance(branch.text, str):
        if not _is_sequence(branch.text):
            raise ValueError(
                f"{place} has text of type {type(branch.text).__name__}; give a str or a list of "
                "tokens, such as encode_messages(model, messages) makes of a dialogue"
            )
        if wrong := [
            token for token in branch.text if not _is_token(token) or not 0 <= token < _TOKEN_LIMIT
        ]:
            raise ValueError(
                f"{place} has the token {wrong[0]!r}; tokens are whole numbers of 0 or more, below "
                "2**31"
            )
        if (largest := max(branch.text, default=0)) >= vocab_size:
            raise ValueError(
                f"{place} has the token {largest}, which is outside the vocabulary of {vocab_size}"
            )
    if not len(branch.text):
        raise ValueError(f"{place} has no text; give at least one token of text, or leave it out")
    if not isinstance(branch.children, Sequence) or isinstance(branch.children, str):
        raise ValueError(
            f"{place} has children of type {type(branch.children).__name__}; give a list of Branch "
            "objects"
        )
    if branch.n is not None:
        check_n(branch.n, f" of {place}")
    if not isinstance(branch.sampler, Sampler | None):
        raise ValueError(
            f"{place} has a sampler of type {type(branch.sampler).__name__}; give a Sampler"
        )


MAX_COMPLETIONS = 2**20
"""The most completions of one prompt: each is remembered for the whole run."""


def check_n(n: Any, place: str = "") -> None:
    """Raises ValueError for a number of completions of a prompt that no run can have."""
    if not _is_token(n) or n < 1:
        raise ValueError(f"n{place} is {n!r}; ask for at least 1 completion, a whole number")
    if n > MAX_COMPLETIONS:
        raise ValueError(
            f"n{place} is {n}; ask for at most {MAX_COMPLETIONS} completions of one prompt, and for "
            "more in further runs with other seeds"
        )


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, bytes)


def _is_token(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
