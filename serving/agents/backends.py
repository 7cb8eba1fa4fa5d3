"""Models for agents: the engine, and a script for tests and examples."""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import FinishReason, Sampler
from jaxshare.argument_checks import as_float
from jaxshare.models import LoadedModel
from jaxshare.serving.agents.requests import Model, ModelCall, Reply
from jaxshare.serving.agents.streaming import Tell
from jaxshare.serving.chat import (
    AnswerStream,
    ChatEvent,
    ChatFormat,
    ContentDelta,
    ThinkingDelta,
    chat_format,
    parse_answer,
)
from jaxshare.serving.chat.formats import as_format
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.stream import Stream
from jaxshare.serving.inputs import check_model, default_sampler, encode_messages
from jaxshare.serving.words import encode_marked, mark

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


_MAX_SHARES = 10_000


class EngineModel:
    """A loaded model for agents: the calls of all agents are rows of one engine.

    The engine caches dialogues, so that later calls can reuse their beginnings. An answer depends
    on its dialogue, options and seed alone, in float32 token for token, whatever else the engine
    runs. A dialogue is put into the model's chat template, and a think block at the start of the
    answer is its `reasoning`. A model without a template continues a text of this form, and its
    answer ends before the next user's message:

        System: ...

        User: ...

        Assistant:

    Attributes:
      engine: runs the calls; its `metrics` have the reused tokens and the costs.
      contributions: (seconds, the contribution of each active agent) after each of the last answers,
        if the engine's policy knows contributions; see `contribution_picture`.
    """

    def __init__(
        self,
        model: LoadedModel | Engine,
        *,
        sampler: Sampler | None = None,
        resample: str | None = None,
        **options: Any,
    ):
        """Makes the engine, unless one is given; nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`; or an engine, which may have other users too.
          sampler: settings for the options that a call leaves open, `max_tokens` and `stop` among
            them; default the checkpoint's own.
          resample: "stepwise" lets calls that come to the same state again reuse the cached logits
            of the Logits Cache, exactly; "hotspot" approximately. Both need an engine with
            `logits_cache`.
          options: options of the engine, if a model is given.

        Raises:
          ValueError: a model without a tokenizer, a sampler with n, best_of or seed, which calls
            have themselves, or options that the engine refuses.
        """
        check_model(model)
        loaded = model.model if isinstance(model, Engine) else model
        if loaded.tokenizer is None:
            raise ValueError(
                "agents speak in text, but the model folder has no tokenizer; add the tokenizer's "
                "files to the folder"
            )
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        self._sampler, self._resample = sampler or default_sampler(loaded), resample
        self.contributions = collections.deque[tuple[float, Mapping[str, float]]](
            maxlen=_MAX_SHARES
        )
        self._sampler.refuse(
            ["n", "best_of", "seed"],
            "each call of an agent is one answer with a seed of its own; give n to llm, and the seed "
            "to the runtime",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call; see `Model`.

        The answer is constrained to the call's grammar, unless the prompt opens a think block, which
        comes before it.

        Raises:
          ValueError: a dialogue or tools that the template refuses, or a dialogue that does not fit
            the context or the memory, tools without a template, or sampling options out of range.
          EngineError: the engine's queue is full, or the model's logits are not numbers.
        """
        return await self._answer(call, None)

    async def stream(self, call: ModelCall, tell: Tell) -> Reply:
        """Answers one call in pieces; see `StreamingModel`. Errors as of `answer`."""
        return await self._answer(call, tell)

    async def _answer(self, call: ModelCall, tell: Tell | None) -> Reply:
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {
            name: value for name in names if (value := getattr(call.options, name)) is not None
        }
        tokenizer: Any = self.engine.model.tokenizer
        form = None
        if tokenizer.chat_template:
            messages = [message.as_dict() for message in call.messages]
            prompt = encode_messages(
                self.engine.model, messages, call.tools, call.chat_template_kwargs
            )
            form = _format(tokenizer, call, prompt)
            stops = call.options.stop or None
        else:
            prompt = encode_marked(tokenizer, _plain_text(tokenizer, call), first=True)
            stops = (*(call.options.stop or self._sampler.stop or ()), f"\n\n{_NAMES['user']}:")
        if call.grammar and not (form and form.opened):
            given["grammar"] = call.grammar
        stream = self.engine.submit(
            prompt,
            dataclasses.replace(self._sampler, **given),
            max_new_tokens=call.options.max_new_tokens,
            stop=stops,
            seed=call.seed,
            agent_id=call.agent,
            resample=self._resample,
            next_seed=call.next_seed if self._resample == "stepwise" else None,
            place=call.place,
            adapter=call.options.adapter,
        )
        try:
            if tell is not None:
                await _tell_pieces(stream, form, call, tell)
            done = await stream
        finally:
            stream.cancel()  # no effect on a finished answer
        if shares := self.engine.metrics.contributions:
            self.contributions.append((time.perf_counter(), shares))
        is_cut = done.finish_reason in (FinishReason.LENGTH, FinishReason.CACHE_FULL)
        counts = len(done.tokens), done.prompt_tokens
        if form is None:
            return Reply(done.text.strip(), *counts, is_cut=is_cut)
        return _reply(done.text, form, call, counts, is_cut)


async def _tell_pieces(
    stream: Stream, form: ChatFormat | None, call: ModelCall, tell: Tell
) -> None:
    """Tells the pieces of an answer that together are the texts of its `_reply`."""
    if form is None:
        held = ""  # whitespace that may be at the begin or the end
        started = False
        async for chunk in stream:
            if chunk.restarted:
                held, started = "", False
            text = held + chunk.text
            text = text if started else text.lstrip()
            shown = text.rstrip()
            held, started = text[len(shown) :], started or bool(shown)
            tell(shown, False)
        return
    reader = AnswerStream(form, tools=call.tools)
    async for chunk in stream:
        if chunk.restarted:  # what was told before cannot be taken back
            reader = AnswerStream(form, tools=call.tools)
        _tell_events(reader.feed(chunk.text), tell)
    _tell_events(reader.finish(), tell)


def _tell_events(events: Sequence[ChatEvent], tell: Tell) -> None:
    for event in events:
        if isinstance(event, ContentDelta | ThinkingDelta):
            tell(event.text, isinstance(event, ThinkingDelta))


_END_OF_PROMPT = 16
"""The tokens at the end of a prompt in which it may open a think block."""


def _format(tokenizer: Any, call: ModelCall, prompt: Sequence[int]) -> ChatFormat:
    """The format of the answer to a prompt."""
    tools = [tool.schema() for tool in call.tools]
    template = tokenizer.get_chat_template(**({"tools": tools} if tools else {}))
    return chat_format(template).after(tokenizer.decode(prompt[-_END_OF_PROMPT:]))


def _reply(
    text: str, form: ChatFormat | str, call: ModelCall, counts: tuple[int, int], is_cut: bool
) -> Reply:
    """A reply with the parts of an answer's text."""
    answer = parse_answer(text, form, tools=call.tools)
    return Reply(answer.content, *counts, answer.thinking, answer.tool_calls, answer.broken, is_cut)


def _plain_text(tokenizer: Any, call: ModelCall) -> str:
    """The dialogue as text, marked for `encode_marked`.

    Raises:
      ValueError: the call has what needs a chat template.
    """
    if call.tools or call.chat_template_kwargs or any(one.tool_calls for one in call.messages):
        raise ValueError(
            "the model has no chat template, so it takes no tools, no calls in messages and no "
            "chat_template_kwargs; leave them out, or use a model with a template"
        )
    marked = [(message.role, mark(tokenizer, message.content)) for message in call.messages]
    turns = [f"{_NAMES.get(role, mark(tokenizer, role))}: {content}" for role, content in marked]
    return "\n\n".join([*turns, f"{_NAMES['assistant']}:"])


class NoAnswerError(LookupError):
    """The script of a scripted model has no answer to a call."""


Answer = str | Sequence[str] | Callable[[ModelCall], str]


class ScriptedModel:
    """Answers from a script instead of a model: for tests and examples.

        ScriptedModel({
            "What is 47 + 38?": "85",
            "Divide": ["no", "yes"],
            lambda call: call.agent == "judge": lambda call: str(call.seed),
        })

    A key that equals the last message of the user or of a tool has the answer; else the first key,
    in the order of the script, that is a part of that message, or a function that is true of the
    call.

    An answer is a text, several texts, or a function of the call. The index among several texts is
    the sum of the call's path in the tree, modulo their number: so a state's second firing gets the
    second text. Further calls of one firing (n answers, or attempts) get the next ones. A think
    block at its start, and calls of the tools that are offered, are taken out of a text.

    Attributes:
      calls: all calls, in order.
    """

    def __init__(
        self,
        script: Mapping[str | Callable[[ModelCall], bool], Answer],
        *,
        delay: Callable[[ModelCall], float] | None = None,
        format: ChatFormat | str = "hermes",
    ):
        """Makes a model from a script.

        Args:
          script: answers by key; see above.
          delay: seconds before an answer; default none.
          format: in which the texts have calls of tools; see `ChatFormat`.
        """
        self.script, self.delay, self.format = dict(script), delay, as_format(format)
        self.calls: list[ModelCall] = []
        # Seeds of the calls of each firing, by (run, state).
        self._seeds: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScriptedModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call; see `Model`. Words are counted as tokens.

        Raises:
          NoAnswerError: nothing in the script fits.
        """
        self.calls.append(call)
        if self.delay:
            await asyncio.sleep(self.delay(call))
        answer = self._find(call)
        if callable(answer):
            text = answer(call)
        elif isinstance(answer, str):
            text = answer
        else:
            text = answer[self._index(call) % len(answer)]
        text = min(
            (text[:end] for stop in call.options.stop if (end := text.find(stop)) >= 0),
            key=len,
            default=text,
        )
        read = sum(len(message.content.split()) for message in call.messages)
        return _reply(text, self.format, call, (len(text.split()), read), False)

    def _find(self, call: ModelCall) -> Answer:
        asked = (one for one in reversed(call.messages) if one.role in ("user", "tool"))
        question = next((message.content for message in asked), "")
        if question in self.script:
            return self.script[question]
        for key, answer in self.script.items():
            if key(call) if callable(key) else key in question:
                return answer
        raise NoAnswerError(
            f"the scripted model has no answer to what agent {call.agent} asks: {question!r}"
        )

    def _index(self, call: ModelCall) -> int:
        """The index among several answers: the position in the tree, plus one per earlier seed."""
        seeds = self._seeds.setdefault((call.run, call.state), [])
        if call.seed not in seeds:
            seeds.append(call.seed)
        return sum(call.state) + seeds.index(call.seed)


class Priced:
    """A model whose answers have a price, for the `money` of budgets.

        Priced(EngineModel(model), prompt=0.5, new=2.0)  # for a million tokens

    Attributes:
      model: gives the answers.
      prompt, new: prices of a million tokens read and of a million tokens generated.
    """

    def __init__(self, model: Model, *, prompt: float, new: float):
        self.model = model
        self.prompt, self.new = as_float("prompt", prompt), as_float("new", new)
        for name, price in (("prompt", self.prompt), ("new", self.new)):
            if price < 0:
                raise ValueError(
                    f"{name} is {price}; give the price of a million tokens, from 0 on"
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Priced":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """The model's answer, with its price."""
        reply = await self.model.answer(call)
        tokens = reply.prompt_tokens * self.prompt + reply.new_tokens * self.new
        return dataclasses.replace(reply, cost=tokens / 1e6)
