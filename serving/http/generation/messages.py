"""Messages and tools of chats, in the forms that requests have them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxshare.serving.chat import FunctionTool
from jaxshare.serving.http.errors import bad_request, unsupported

_MOST_PARTS = 1024


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    """The function of a call, with its arguments as JSON or as an object."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    arguments: str | dict[str, Any] | None = None


class MessageCall(BaseModel):
    """A call in an assistant's message."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """A message of a dialogue. Templates make tokens of roles, so there are no others."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=_MOST_PARTS)] | None = None
    name: str | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def as_dict(self, number: int) -> dict[str, Any]:
        """Returns the message as chat templates take it.

        Args:
          number: of the message, for errors.

        Raises:
          ApiError: it has a part that is no text, or no content where there has to be some.
        """
        content = self._text(number)
        if content is None and self.role != "assistant":
            raise bad_request(
                f"message {number} of the role {self.role} has no content; give a text", "messages"
            )
        if content is None and not self.tool_calls:
            content = ""
        role = "system" if self.role == "developer" else self.role
        made: dict[str, Any] = {"role": role, "content": content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                made[name] = value
        if self.tool_calls:
            made["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        return made

    def _text(self, number: int) -> str | None:
        if self.content is None or isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type not in ("text", "input_text", "output_text") or part.text is None:
                raise unsupported(
                    f"messages.{number}.content of type {part.type[:32]}", "contents are texts"
                )
        return "".join(part.text or "" for part in self.content)


class OfferedFunction(BaseModel):
    """The function of a tool, with the JSON schema of its arguments."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> FunctionTool:
        """Returns the tool.

        Raises:
          ApiError: its name or its schema cannot be used.
        """
        given: dict[str, Any] = {"name": self.name, "description": self.description or ""}
        if self.parameters is not None:
            given["parameters"] = self.parameters
        try:
            return FunctionTool(**given)
        except (ValueError, TypeError) as error:
            raise bad_request(str(error), "tools", "invalid_value") from None


class OfferedTool(BaseModel):
    """A tool of a chat."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"] = "function"
    function: OfferedFunction


class NamedFunction(BaseModel):
    """The name of a function that has to be called."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str


class NamedTool(BaseModel):
    """The field `tool_choice` where it names a function."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"] = "function"
    function: NamedFunction
