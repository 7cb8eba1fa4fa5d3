"""Models for agents: the engine, and a script for tests and examples."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.agents.requests import Message, ModelCall, Reply
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import default_sampler
from jaxshare.serving.words import encode_marked, mark

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


class EngineModel:
    """A loaded model for agents: the calls of all agents are rows of one engine.

    The engine caches dialogues, so that later calls can reuse their beginnings. An answer depends
    on its dialogue, options and seed alone, in float32 token for token, whatever else the engine
    runs. A dialogue is put into the model's chat template. A model without one continues a text of
    this form, and its answer ends before the next user's message:

        System: ...

        User: ...

        Assistant:

    Attributes:
      engine: runs the calls; its `metrics` have the reused tokens and the costs.
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
        loaded = model.model if isinstance(model, Engine) else model
        if loaded.tokenizer is None:
            raise ValueError(
                "agents speak in text, but the model folder has no tokenizer; add the tokenizer's "
                "files to the folder"
            )
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        self._sampler, self._resample = sampler or default_sampler(loaded), resample
        self._sampler.refuse(
            ["n", "best_of", "seed"],
            "each call of an agent is one answer with a seed of its own; give n to llm, and the seed "
            "to the runtime",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """Answers one call; see `Model`.

        Raises:
          ValueError: a dialogue that the template refuses or that does not fit the context or the
            memory, or sampling options out of range.
          EngineError: the engine's queue is full, or the model's logits are not numbers.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {
            name: value for name in names if (value := getattr(call.options, name)) is not None
        }
        tokenizer: Any = self.engine.model.tokenizer
        has_template = bool(tokenizer.chat_template)
        if has_template:
            prompt = [dataclasses.asdict(message) for message in call.messages]
            stops = call.options.stop or None
        else:
            prompt = encode_marked(tokenizer, _plain_text(tokenizer, call.messages), first=True)
            stops = (*(call.options.stop or self._sampler.stop or ()), f"\n\n{_NAMES['user']}:")
        stream = self.engine.submit(
            prompt,
            dataclasses.replace(self._sampler, **given),
            max_new_tokens=call.options.max_new_tokens,
            stop=stops,
            seed=call.seed,
            agent_id=call.agent,
            resample=self._resample,
        )
        try:
            done = await stream
        finally:
            stream.cancel()  # no effect on a finished answer
        text = done.text if has_template else done.text.strip()
        return Reply(text, len(done.tokens), done.prompt_tokens)


def _plain_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The dialogue as text, marked for `encode_marked`."""
    marked = [(message.role, mark(tokenizer, message.content)) for message in messages]
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

    A key that equals the last user's message has the answer; else the first key, in the order of
    the script, that is a part of that message, or a function that is true of the call.

    An answer is a text, several texts, or a function of the call. The index among several texts is
    the sum of the call's path in the tree, modulo their number: so a state's second firing gets the
    second text. Further calls of one firing (n answers, or attempts) get the next ones.

    Attributes:
      calls: all calls, in order.
    """

    def __init__(
        self,
        script: Mapping[str | Callable[[ModelCall], bool], Answer],
        *,
        delay: Callable[[ModelCall], float] | None = None,
    ):
        """Makes a model from a script.

        Args:
          script: answers by key; see above.
          delay: seconds before an answer; default none.
        """
        self.script, self.delay = dict(script), delay
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
        return Reply(
            text, len(text.split()), sum(len(message.content.split()) for message in call.messages)
        )

    def _find(self, call: ModelCall) -> Answer:
        question = next(
            (message.content for message in reversed(call.messages) if message.role == "user"), ""
        )
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
