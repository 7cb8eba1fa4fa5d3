"""What answers agents: the engine, which runs the calls of all of them in one decode loop, and, for
tests and examples, a script."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.agents.requests import Message, ModelCall, Reply
from jaxshare.serving.engine import End, Engine
from jaxshare.serving.inputs import default_sampler

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


class EngineModel:
    """A loaded model, for agents: the calls of all of them are rows of one engine, which keeps what
    they may begin with again.

    An answer depends on its dialogue, options and seed alone, in float32 token for token, whatever
    else is asked. A dialogue is put into the model's chat template. A model without one continues a
    text of this form, and its answer ends where the next user would speak:

        System: ...

        User: ...

        Assistant:

    Attributes:
      engine: that answers; its `metrics` say what was reused and what it cost.
    """

    def __init__(
        self,
        model: LoadedModel | Engine,
        *,
        sampler: Sampler | None = None,
        resample: str | None = None,
        **options: Any,
    ):
        """Nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`; or an engine, which others may use, too.
          sampler: for what a call's options leave open; default the checkpoint's own settings.
          resample: "stepwise" has calls that come to the same state again take from the Logits
            Cache what it knows, exactly; "hotspot" approximately. The engine needs `logits_cache`
            for that.
          options: of the engine, where a model is given.

        Raises:
          ValueError: a model without a tokenizer, or options that the engine refuses.
        """
        loaded = model.model if isinstance(model, Engine) else model
        if loaded.tokenizer is None:
            raise ValueError(
                "agents speak in text, but the model folder has no tokenizer; add the tokenizer's "
                "files to the folder"
            )
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        self._sampler, self._resample = sampler or default_sampler(loaded), resample

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """See `Model`.

        Raises:
          ValueError: a dialogue that the template refuses, that does not fit the context or the
            memory, or sampling options out of range.
          EngineError: as many calls wait as may, or the model's logits are not numbers.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {
            name: value for name in names if (value := getattr(call.options, name)) is not None
        }
        loaded = self.engine.model
        if loaded.tokenizer.chat_template:  # pyright: ignore[reportOptionalMemberAccess]
            asked, stops = (
                [dataclasses.asdict(message) for message in call.messages],
                call.options.stop,
            )
        else:
            asked, stops = _plain(call.messages), (*call.options.stop, f"\n\n{_NAMES['user']}:")
        stream = self.engine.submit(
            asked,
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
            stream.cancel()  # where nobody waits any more
        text = done.text if isinstance(asked, list) else done.text.strip()
        return Reply(text, len(done.tokens) + (done.finish_reason is End.STOP), done.prompt_tokens)


def _plain(messages: Sequence[Message]) -> str:
    spoken = [
        f"{_NAMES.get(message.role, message.role)}: {message.content}" for message in messages
    ]
    return "\n\n".join([*spoken, f"{_NAMES['assistant']}:"])


class NoAnswerError(LookupError):
    """A scripted model was asked what its script has no answer to."""


Answer = str | Sequence[str] | Callable[[ModelCall], str]


class ScriptedModel:
    """No model, but a script: for tests, and for examples that show how agents work where no model
    that could serve is at hand.

        ScriptedModel({"What is 47 + 38?": "85", "Divide": ["no", "yes"], lambda call: call.agent == "judge": lambda call: str(call.seed)})

    The first entry that fits has the answer. A text fits if it is the last user's message, or else,
    in the order of the script, if it stands in that; a function fits where it says so of the call.
    An answer is a text, several texts, or a function of the call. Of several, it is the one at the
    call's place in the tree, the numbers of the firings on the way added up, around and around: so
    a state's second firing gets the second. Further calls of one firing (n answers, or attempts)
    get those behind it.

    Attributes:
      calls: all that it was asked, in order.
    """

    def __init__(
        self,
        script: Mapping[str | Callable[[ModelCall], bool], Answer],
        *,
        delay: Callable[[ModelCall], float] | None = None,
    ):
        """
        Args:
          script: see above.
          delay: seconds before an answer; default none.
        """
        self.script, self.delay = dict(script), delay
        self.calls: list[ModelCall] = []
        self._turns: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ScriptedModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """See `Model`. Words are counted as tokens.

        Raises:
          NoAnswerError: nothing in the script fits.
        """
        self.calls.append(call)
        if self.delay:
            await asyncio.sleep(self.delay(call))
        answer = self._found(call)
        if callable(answer):
            text = answer(call)
        elif isinstance(answer, str):
            text = answer
        else:
            text = answer[self._turn(call) % len(answer)]
        text = min(
            (text[:at] for stop in call.options.stop if (at := text.find(stop)) >= 0),
            key=len,
            default=text,
        )
        return Reply(
            text, len(text.split()), sum(len(message.content.split()) for message in call.messages)
        )

    def _found(self, call: ModelCall) -> Answer:
        said = next(
            (message.content for message in reversed(call.messages) if message.role == "user"), ""
        )
        if said in self.script:
            return self.script[said]
        for key, answer in self.script.items():
            if key(call) if callable(key) else key in said:
                return answer
        raise NoAnswerError(
            f"the scripted model has no answer to what agent {call.agent} asks: {said!r}"
        )

    def _turn(self, call: ModelCall) -> int:
        """Which of several answers: that of the place in the tree, and then on for each further
        seed there."""
        seeds = self._turns.setdefault((call.run, call.state), [])
        if call.seed not in seeds:
            seeds.append(call.seed)
        return sum(call.state) + seeds.index(call.seed)
