"""Chat templates with marks at the control tokens in people's words, and with tools."""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxshare.models import LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError, SlowTemplateError, render
from jaxshare.serving.chat.dialogue import (
    checked_messages,
    forms_of_calls,
    has_calls,
    with_other_names,
)
from jaxshare.serving.chat.tools import FunctionTool
from jaxshare.serving.words import mark_messages, mark_values, restore_marks


class UnusedToolsError(ChatTemplateError):
    """A chat template writes nothing of the tools that are offered."""


def render_marked(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[FunctionTool] = (),
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Renders messages with marks at the control tokens in their words; see `words.encode_marked`.

    Words are all texts in messages, in calls of functions and their results, in descriptions of
    tools and in variables.

    Args:
      tokenizer: with a chat template.
      messages: see `chat.dialogue.checked_messages`.
      tools: that are offered to the model.
      variables: further ones that the template sees.

    Raises:
      UnusedToolsError: the template writes nothing of the tools.
      ChatTemplateError: see `render`; or the template writes nothing of the calls in messages.
      TypeError, ValueError: a message has another form.
    """
    marked = mark_messages(tokenizer, checked_messages(messages))
    extra = mark_values(tokenizer, dict(variables or {}))
    schemas = mark_values(tokenizer, [tool.schema() for tool in tools])

    def rendered(messages: Sequence[Mapping[str, Any]], tools: Any = schemas) -> str:
        return render_with(tokenizer, messages, **{**extra, "tools": tools or None})

    form = _form_with_calls(marked, rendered) if has_calls(marked) else marked
    text = rendered(form)
    if tools and text == _without_tools(lambda: rendered(form, None)):
        raise UnusedToolsError(
            "it writes nothing of tools; offer none, or use a template that knows them"
        )
    return restore_marks(text, marked, schemas, extra)


def _form_with_calls(
    messages: list[dict[str, Any]], rendered: Callable[[Sequence[Mapping[str, Any]]], str]
) -> list[dict[str, Any]]:
    """The messages in the form in which a template writes their calls."""
    errors = []
    for form in forms_of_calls(messages):
        try:
            if rendered(form) != rendered(with_other_names(form)):
                return form
        except SlowTemplateError:
            raise
        except ChatTemplateError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    raise ChatTemplateError("it writes nothing of the calls of functions in messages")


def _without_tools(rendered: Callable[[], str]) -> str | None:
    """The text without tools; None if the template refuses to write one."""
    try:
        return rendered()
    except SlowTemplateError:
        raise
    except ChatTemplateError:
        return None


def render_with(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Renders messages in a tokenizer's chat template.

    Args:
      tokenizer: with a chat template.
      messages: see `render`.
      variables: further ones that the template sees; with `tools`, the template for them is taken
        where a tokenizer has one of its own.

    Raises:
      ChatTemplateError: see `render`.
    """
    tools = variables.get("tools")
    try:
        template = tokenizer.get_chat_template(**({"tools": tools} if tools else {}))
    except ValueError as error:  # several by name, and none of them the default
        raise ChatTemplateError(str(error)) from error
    if not isinstance(template, str):
        raise ChatTemplateError("it is not a text")
    special = {name: _plain(token) for name, token in tokenizer.special_tokens_map.items()}
    return render(template, messages, {**special, **variables})


def _plain(token: Any) -> str | list[str]:
    return [str(one) for one in token] if isinstance(token, (list, tuple)) else str(token)


def with_chat_template(model: LoadedModel, template: str) -> LoadedModel:
    """Returns the model with another chat template, in Jinja; `model` keeps its own.

    Raises:
      ValueError: the model has no tokenizer.
      ChatTemplateError: the template is no Jinja, or refuses a message of a person.
    """
    if model.tokenizer is None:
        raise ValueError("the model has no tokenizer, so it takes no chat template")
    tokenizer: Any = copy.copy(model.tokenizer)
    tokenizer.chat_template = template
    try:
        render_with(tokenizer, [{"role": "user", "content": "Hello"}])
    except ChatTemplateError as error:
        raise ChatTemplateError(f"the given chat template cannot be used: {error}") from error
    return dataclasses.replace(model, tokenizer=tokenizer)


def read_chat_template(file: str | None) -> str | None:
    """The chat template in the file of an option; None without.

    Raises:
      ValueError: it cannot be read; the option is named.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(
            f"--chat-template {file} cannot be read ({why}); give a Jinja file"
        ) from error
