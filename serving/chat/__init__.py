"""Chats with functions: tools that are offered to a model, and answers with calls and thinking."""

from jaxshare.serving.chat.answers import (
    ArgumentsDelta,
    BrokenCall,
    CallBroken,
    CallFinished,
    CallStarted,
    ChatAnswer,
    ChatEvent,
    ContentDelta,
    ThinkingDelta,
    ToolCall,
)
from jaxshare.serving.chat.formats import ChatFormat, chat_format
from jaxshare.serving.chat.returns import Returns, as_returns
from jaxshare.serving.chat.stream import AnswerStream, parse_answer
from jaxshare.serving.chat.tools import (
    FunctionTool,
    ToolResult,
    as_tools,
    call,
    tool,
    tool_messages,
)

__all__ = [
    "AnswerStream",
    "ArgumentsDelta",
    "BrokenCall",
    "CallBroken",
    "CallFinished",
    "CallStarted",
    "ChatAnswer",
    "ChatEvent",
    "ChatFormat",
    "ContentDelta",
    "FunctionTool",
    "Returns",
    "ThinkingDelta",
    "ToolCall",
    "ToolResult",
    "as_returns",
    "as_tools",
    "call",
    "chat_format",
    "parse_answer",
    "tool",
    "tool_messages",
]
