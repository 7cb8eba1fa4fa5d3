"""What answers agents: the engine, which runs the calls of all of them in one decode loop, and, for tests and examples, a script."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare import Sampler
from jaxshare.models import LoadedModel
from jaxshare.serving.agents.calls import Message, ModelCall, Reply
from jaxshare.serving.agents.engine import Request, Rows
from jaxshare.serving.inputs import default_sampler, encode

_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Calls that were answered together.

    Attributes:
      calls: each with its agent, run and state, in the order in which they were asked.
      prompt_tokens: of all prompts together.
      unique_tokens: of these, what is left when every common prefix counts once: what was stored and fed at most.
      new_tokens: sampled.
      passes: forward passes, those over the prompts included.
      seconds: of wall time.
    """

    calls: tuple[ModelCall, ...]
    prompt_tokens: int
    unique_tokens: int
    new_tokens: int
    passes: int
    seconds: float


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A call, and who waits for its answer."""

    call: ModelCall
    sampler: Sampler
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Reply]
    wanted: bool = True

    def settle(self, outcome: Reply | Exception) -> None:
        """From the engine's thread."""
        self.wanted = False
        with contextlib.suppress(RuntimeError):  # where the loop is closed, nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, outcome)

    def _settle(self, outcome: Reply | Exception) -> None:
        if not self.future.done():
            self.future.set_exception(outcome) if isinstance(outcome, Exception) else self.future.set_result(outcome)


class EngineModel:
    """A loaded model, for agents. Calls that wait at the same time are run together; what their prompts begin with is stored once.

    An answer depends on its dialogue, options and seed alone, in float32 token for token, whatever else is asked. A dialogue is put into
    the model's chat template. A model without one continues a text of this form, and its answer ends where the next user would speak:

        System: ...

        User: ...

        Assistant:

    Attributes:
      batches: how many there have been.
    """

    def __init__(self, model: LoadedModel, *, sampler: Sampler | None = None, max_rows: int = 16, max_kv_bytes: int = 2 * 1024**3,
                 gather: float = 0.005, on_batch: Callable[[Batch], None] | None = None):
        """Nothing is computed yet.

        Args:
          model: from `jaxshare.models.load`.
          sampler: for what a call's options leave open; default the checkpoint's own settings.
          max_rows: calls that run at a time, at most; what is more waits for a row.
          max_kv_bytes: bound on the memory for keys and values, which is taken as it is needed.
          gather: seconds to wait for more calls before a batch begins.
          on_batch: called after every batch, in the engine's thread.

        Raises:
          ValueError: a model without a tokenizer, or a bound below 1.
        """
        self._rows = Rows(model, max_rows, max_kv_bytes)
        self._model, self._sampler, self._gather, self._on_batch = model, sampler or default_sampler(model), gather, on_batch
        self._tokenizer: Any = model.tokenizer
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._thread: threading.Thread | None = None
        self.batches = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "EngineModel":
        return self

    async def answer(self, call: ModelCall) -> Reply:
        """See `Model`.

        Raises:
          ValueError: a dialogue that the template refuses, that does not fit the context or the memory, or sampling options out of range.
        """
        names = ("temperature", "top_k", "top_p", "min_p")
        given = {name: value for name in names if (value := getattr(call.options, name)) is not None}
        loop = asyncio.get_running_loop()
        waiting = _Waiting(call, dataclasses.replace(self._sampler, **given), loop, loop.create_future())
        with self._lock:
            self._waiting.append(waiting)
            if not self._thread:
                # It ends when nothing waits. Not a daemon: the program must not end in the midst of a pass.
                self._thread = threading.Thread(target=self._work, name="jaxshare-engine")
                self._thread.start()
        try:
            return await waiting.future
        finally:
            waiting.wanted = False

    def join(self) -> None:
        """Waits until nothing is under way any more; `on_batch` has been called for all batches then."""
        with self._lock:
            thread = self._thread
        if thread:
            thread.join()

    def _work(self) -> None:
        """The engine's thread: one batch after the other."""
        while True:
            time.sleep(self._gather)
            with self._lock:
                batch, self._waiting = [waiting for waiting in self._waiting if waiting.wanted], []
                if not batch:
                    self._thread = None
                    return
            try:
                self._answer(batch)
            except Exception as error:
                for waiting in batch:
                    if waiting.wanted:
                        waiting.settle(error)

    def _answer(self, batch: Sequence[_Waiting]) -> None:
        asked: dict[Request, _Waiting] = {}
        for waiting in batch:
            try:
                request = self._request(waiting)
                self._rows.check(request)
                asked[request] = waiting
            except Exception as error:
                waiting.settle(error)

        def done(request: Request, text: str, tokens: int) -> None:
            text = text if self._tokenizer.chat_template else text.strip()
            asked[request].settle(Reply(text, tokens, len(request.tokens)))

        if not asked:
            return
        self.batches += 1
        spent = self._rows.run([*asked], done)
        if self._on_batch:
            self._on_batch(Batch(tuple(waiting.call for waiting in asked.values()), **dataclasses.asdict(spent)))

    def _request(self, waiting: _Waiting) -> Request:
        call, stops = waiting.call, waiting.call.options.stop
        if self._tokenizer.chat_template:
            try:
                # As tokens, because the template has the special tokens in it already.
                tokens = self._tokenizer.apply_chat_template([dataclasses.asdict(message) for message in call.messages], tokenize=True,
                                                             add_generation_prompt=True, return_dict=False,
                                                             tokenizer_kwargs={"verbose": False})
            except Exception as error:  # of a language of its own: whatever the template raises
                roles = ", ".join(message.role for message in call.messages)
                raise ValueError(f"the model's chat template refuses the dialogue of agent {call.agent} ({error}); its roles are "
                                 f"{roles}") from error
        else:
            tokens, stops = encode(self._model, _plain(call.messages)), (*stops, f"\n\n{_NAMES['user']}:")
        return Request(tuple(tokens), waiting.sampler, call.seed, call.options.max_new_tokens, stops, lambda: waiting.wanted)


def _plain(messages: Sequence[Message]) -> str:
    spoken = [f"{_NAMES.get(message.role, message.role)}: {message.content}" for message in messages]
    return "\n\n".join([*spoken, f"{_NAMES['assistant']}:"])


class NoAnswerError(LookupError):
    """A scripted model was asked what its script has no answer to."""


Answer = str | Sequence[str] | Callable[[ModelCall], str]


class ScriptedModel:
    """No model, but a script: for tests, and for examples that show how agents work where no model that could serve is at hand.

        ScriptedModel({"What is 47 + 38?": "85", "Divide": ["no", "yes"], lambda call: call.agent == "judge": lambda call: str(call.seed)})

    The first entry that fits has the answer. A text fits if it is the last user's message, or else, in the order of the script, if it
    stands in that; a function fits where it says so of the call. An answer is a text, several texts, or a function of the call. Of several,
    it is the one at the call's place in the tree, the numbers of the firings on the way added up, around and around: so a state's second
    firing gets the second. Further calls of one firing (n answers, or attempts) get those behind it.

    Attributes:
      calls: all that it was asked, in order.
    """

    def __init__(self, script: Mapping[str | Callable[[ModelCall], bool], Answer], *, delay: Callable[[ModelCall], float] | None = None):
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
        text = min((text[:at] for stop in call.options.stop if (at := text.find(stop)) >= 0), key=len, default=text)
        return Reply(text, len(text.split()), sum(len(message.content.split()) for message in call.messages))

    def _found(self, call: ModelCall) -> Answer:
        said = next((message.content for message in reversed(call.messages) if message.role == "user"), "")
        if said in self.script:
            return self.script[said]
        for key, answer in self.script.items():
            if key(call) if callable(key) else key in said:
                return answer
        raise NoAnswerError(f"the scripted model has no answer to what agent {call.agent} asks: {said!r}")

    def _turn(self, call: ModelCall) -> int:
        """Which of several answers: that of the place in the tree, and then on for each further seed there."""
        seeds = self._turns.setdefault((call.run, call.state), [])
        if call.seed not in seeds:
            seeds.append(call.seed)
        return sum(call.state) + seeds.index(call.seed)
