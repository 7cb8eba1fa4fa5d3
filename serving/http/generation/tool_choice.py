"""The choice of tools: whether a model may call functions, has to, or has to call a certain one.

A call that has to come is sampled under a grammar of JSON, and read as such, whatever form the
model's own calls have: the arguments of the function that is named, or a list of calls.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxshare import Grammar
from jaxshare.serving.chat import FunctionTool, as_tools
from jaxshare.serving.http.errors import bad_request
from jaxshare.serving.http.generation.grammars import AskedGrammar

_MOST_CALLS = 16


@dataclasses.dataclass(frozen=True)
class Offer:
    """The tools of a request, and what has to be called.

    Attributes:
      tools: that the prompt describes; none where the model may call none.
      named: the function that has to be called, or None.
      required: True where any of the tools has to be called.
      parallel: False for one call at most.
    """

    tools: tuple[FunctionTool, ...] = ()
    named: FunctionTool | None = None
    required: bool = False
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """True if the answer is JSON of calls alone."""
        return self.required or self.named is not None

    def grammar(self) -> AskedGrammar | None:
        """Returns the grammar of an answer that has to call; None for another."""
        if self.named is not None:
            return AskedGrammar("tools", Grammar.json_schema(self.named.parameters))
        if not self.required:
            return None
        kinds = [
            {
                "type": "object",
                "properties": {"name": {"const": tool.name}, "arguments": dict(tool.parameters)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in self.tools
        ]
        most = _MOST_CALLS if self.parallel else 1
        calls = {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": most}
        return AskedGrammar("tools", Grammar.json_schema(calls))

    def calls(self, text: str) -> list[tuple[str, str]] | None:
        """Returns the names and the JSON arguments of a list of calls that had to come.

        Args:
          text: the whole answer.

        Returns:
          The calls in order; None where the text was cut off before its end.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, list) or not all(map(_is_call, found)):
            return None
        return [(one["name"], json.dumps(one["arguments"], ensure_ascii=False)) for one in found]


def _is_call(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and "arguments" in value


def offer_of(
    tools: Sequence[FunctionTool] | None, choice: str | None, named: str | None, parallel: bool
) -> Offer:
    """Returns what a request offers.

    Args:
      tools: of the request; None for none.
      choice: "none", "auto" or "required"; None for "auto".
      named: the function that has to be called, or None.
      parallel: several calls may be made.

    Raises:
      ApiError: two tools have one name, or tool_choice asks for what is not offered.
    """
    try:
        offered = as_tools(tools)
    except (ValueError, TypeError) as error:
        raise bad_request(str(error), "tools", "invalid_value") from None
    if named is not None:
        found = _by_name(offered).get(named)
        if found is None:
            raise bad_request(
                f"tool_choice names {named[:64]!r}, which is none of the tools", "tool_choice"
            )
        return Offer(offered, named=found, parallel=parallel)
    if choice == "required" and not offered:
        raise bad_request("tool_choice is 'required', but there are no tools", "tool_choice")
    if choice == "none":
        return Offer(parallel=parallel)
    return Offer(offered, required=choice == "required", parallel=parallel)


def _by_name(tools: Sequence[FunctionTool]) -> Mapping[str, FunctionTool]:
    return {tool.name: tool for tool in tools}
