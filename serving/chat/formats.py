"""The forms in which models write calls and thinking, by name and by chat template."""

import dataclasses
import re
from typing import Any

from jaxshare.argument_checks import shown

THINK = {"<think>": "</think>", "[THINK]": "[/THINK]"}
"""The marks that open a think block, each with the one that closes it."""

SEPARATOR = "<｜tool▁sep｜>"
"""DeepSeek's mark between what a call is and its arguments."""


@dataclasses.dataclass(frozen=True)
class Marks:
    """The marks around calls.

    Attributes:
      start, end: around one call.
      around: before the first call and after the last.
    """

    start: str
    end: str
    around: tuple[str, ...] = ()


_DEEPSEEK = Marks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
MARKS = {
    "hermes": Marks("<tool_call>", "</tool_call>"),
    "deepseek": _DEEPSEEK,
    "deepseek-v3.1": _DEEPSEEK,
}
"""The formats in which every call has marks around it."""

PYTHON_TAG = "<|python_tag|>"
"""Llama's mark before a call, which it may leave out at the start of an answer."""

CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"
"""Mistral's marks before calls, and before the arguments of one."""

_NAMES = (
    *("plain", "hermes", "qwen3-coder", "llama3", "pythonic"),
    *("mistral", "deepseek", "deepseek-v3.1"),
)
_PYTHONIC = re.compile(r"\[\w+\(\w+=")


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """The form of an answer.

    A think block, in `<think>` or `[THINK]`, may start an answer in every format.

    Attributes:
      name: the form of calls, one of
        "plain": there are none;
        "hermes": `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen2.5, Qwen3);
        "qwen3-coder": `<tool_call><function=f><parameter=a>1</parameter></function></tool_call>`, with
        values that are not quoted (Qwen3-Coder);
        "llama3": `{"name": ..., "parameters": {...}}`, several separated by `;`, after
        `<|python_tag|>` or as the whole answer (Llama 3.1 and 3.2);
        "pythonic": the answer is `[f(a=1), g(b="x")]` (Llama 3.2 and Llama 4);
        "mistral": `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]f[ARGS]{...}`
        for each call (Mistral's models up to and from v11 of their tokenizer);
        "deepseek": DeepSeek-V3's and R1's marks around a name and a block of JSON;
        "deepseek-v3.1": the same marks around a name and JSON.
      opened: the mark of a think block that the prompt has opened; None if it has not.
    """

    name: str = "plain"
    opened: str | None = None

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise ValueError(
                f"the format is {shown(self.name)}; it must be one of {', '.join(_NAMES)}"
            )
        if self.opened is not None and self.opened not in THINK:
            raise ValueError(
                f"opened is {shown(self.opened)}; it must be None or one of {', '.join(THINK)}"
            )

    def after(self, prompt: str) -> "ChatFormat":
        """Returns the format of an answer to this prompt, which may end in an open think block.

        Args:
          prompt: the rendered text, up to the start of the answer.
        """
        end = prompt.rstrip()
        opened = next((mark for mark in THINK if end.endswith(mark)), None)
        return dataclasses.replace(self, opened=opened)


def chat_format(template: str | None) -> ChatFormat:
    """Returns the format of the answers to a chat template, "plain" if it tells no form of calls.

    Args:
      template: in Jinja; None for a model without one.
    """
    template = template or ""
    if _DEEPSEEK.start in template:
        return ChatFormat("deepseek" if "```json" in template else "deepseek-v3.1")
    if CALLS in template:
        return ChatFormat("mistral")
    if MARKS["hermes"].start in template:
        return ChatFormat("qwen3-coder" if "<function=" in template else "hermes")
    if _PYTHONIC.search(template):
        return ChatFormat("pythonic")
    if re.search(r'\{\\?"name\\?":', template) and re.search(r'\\?"parameters\\?":', template):
        return ChatFormat("llama3")
    return ChatFormat("plain")


def as_format(value: Any) -> ChatFormat:
    """Returns a format that is given as such or by name.

    Raises:
      TypeError: it is neither.
      ValueError: there is no such format.
    """
    if isinstance(value, str):
        return ChatFormat(value)
    if not isinstance(value, ChatFormat):
        raise TypeError(
            f"format is {shown(value)}; give a ChatFormat, such as chat_format gives, or a name"
        )
    return value
