"""Fields of requests that sample, which completions, chats and responses have in common."""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from jaxshare.argument_checks import INT32_MAX, INT64_MAX
from jaxshare.serving.http.errors import unsupported

_log = logging.getLogger("jaxshare.http")

MOST_TEXTS = 256
"""The most stop texts, choices or bad words of a request."""
_MOST_TOLD = 256
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

Number = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=INT32_MAX)]
Token = Annotated[int, Field(ge=0, le=INT32_MAX)]
Text = Annotated[str, Field(min_length=1)]


def matching(pattern: str, words: str) -> Any:
    """Returns what checks the text of a field, for its annotation.

    Args:
      pattern: that the whole text must match.
      words: an error's, such as "it must be a number of hours".
    """
    compiled = re.compile(pattern)

    def check(text: str) -> str:
        if not compiled.fullmatch(text):
            raise PydanticCustomError("pattern", "{words}", {"words": words})
        return text

    return Field(json_schema_extra={"pattern": f"^(?:{pattern})$"}), AfterValidator(check)


FolderName = Annotated[
    str,
    *matching(
        r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}",
        "it must be the name of a folder in the server's, of 1 to 128 letters, digits and . _ -",
    ),
]
"""The name of a folder in one of the server's, which leads nowhere else."""


class Body(BaseModel):
    """A body of a request, whose values have the types of JSON and no others.

    Fields of OpenAI's that change what an answer is, and are not here, are refused by name. All other
    unknown ones are left out, and each is logged once by its name.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Fields that are refused, with the reason."""
    LEFT_OUT: ClassVar[frozenset[str]] = frozenset({"user", "metadata", "service_tier"})
    """Fields of OpenAI's that change no answer."""

    def check_fields(self) -> None:
        """Raises ApiError for a field that is refused; logs unknown ones."""
        for name, value in (self.model_extra or {}).items():
            if name in self.REFUSED and value not in (None, False, 0, "", [], {}):
                raise unsupported(name, self.REFUSED[name])
            if name not in self.REFUSED and name not in self.LEFT_OUT:
                _tell_once(name)


_told: set[str] = set()


def _tell_once(name: str) -> None:
    """Logs a name, unless it is no word: then it could be anything, and is not for a log."""
    if _WORD.fullmatch(name) and name not in _told and len(_told) < _MOST_TOLD:
        _told.add(name)
        _log.warning("requests have the field %s, which is unknown and left out", name)


class StreamOptions(BaseModel):
    """The field `stream_options`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    include_usage: bool = False


class StructuredOutputs(BaseModel):
    """The field `structured_outputs`, one of whose fields is given."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: list[Text] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    grammar: Text | None = None


class SamplingFields(Body):
    """How tokens are sampled. None means the checkpoint's own setting."""

    model: str | None = None
    temperature: Number | None = Field(None, ge=0)
    top_p: Number | None = Field(None, gt=0, le=1)
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    min_p: Number | None = Field(None, ge=0, le=1)
    typical_p: Number | None = Field(None, gt=0, le=1)
    repetition_penalty: Number | None = Field(None, gt=0)
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    no_repeat_ngram_size: Count | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Token] | None = Field(None, max_length=MOST_TEXTS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Count | None = None
    bad_words: list[Text] | None = Field(None, max_length=MOST_TEXTS)

    guided_json: dict[str, Any] | str | None = None
    guided_regex: Text | None = None
    guided_choice: list[Text] | None = Field(None, min_length=1, max_length=MOST_TEXTS)
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None

    priority: Annotated[int, Field(ge=-INT64_MAX, le=INT64_MAX)] = 0
    agent_id: Annotated[str, Field(max_length=128)] | None = None
    resample: Literal["stepwise", "hotspot"] | None = None


class ChoiceFields(SamplingFields):
    """How choices are sampled, and whether an answer has the tokens themselves."""

    return_token_ids: bool | None = False


class JsonSchemaFormat(BaseModel):
    """The inner part of `response_format` of type json_schema."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The field `response_format`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
