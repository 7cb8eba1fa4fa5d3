"""The texts of a session of workers: instructions, headers, the question, early-stop prompts.

The rules, suggestions and worked examples follow the plan of Hogwild! Inference (section 3.3 and
appendix C), in words of our own and for any number of workers.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxshare.models import ConfigError, LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.models.config_fields import REQUIRED, Fields
from jaxshare.serving.chat_template import render_with
from jaxshare.serving.words import encode_marked, mark, unmark
from jaxshare.serving.workers.prompts.texts import ALONE, EXAMPLES, RULES, SUGGESTIONS, TASK

_THINK = ("auto", "always", "never")
_JSON_TYPES = {"in_system_role": bool, "forbidden": list, "chat_template_kwargs": dict}
"""The types of the fields that are not strings."""
_OURS = ("conversation", "messages", "tokenize", "add_generation_prompt", "continue_final_message")
"""Arguments of `apply_chat_template` that a format must not set."""


class StepOpening(NamedTuple):
    """The opening of each step but a first one: its header, and a question where it is asked."""

    header: str
    question: str

    def text(self, name: str, step: int, ask: bool) -> str:
        """The text for a step of a worker."""
        return _fill(self.header, name=name, step=step) + (self.question if ask else "")


@dataclasses.dataclass(frozen=True, repr=False)
class Format:
    r"""All texts of a session.

    A model folder can have its own in workers.json: one object with these fields, lists for tuples.

    `system` and `system_alone` are templates. `{names}` is "Alice, Bob and Carol", `{count}` is 3,
    `{first}` and `{second}` are the first two names. The text between `{#further}` and
    `{/further}` is written once for each worker after the second, with its `{further}` name and its
    `{number}` from 3; it vanishes where there are two. Other braces, as in `\boxed{answer}`, stay.

    Attributes:
      system: the instructions of two or more workers, before the problem.
      system_alone: the instructions of a single worker.
      in_system_role: instructions are a system message; False puts them before the user's message,
        where they also go if the chat template refuses or drops system messages.
      separator: ends a step and opens the next.
      history_header: ends the prompt; every step brings the separator with it.
      others_header: between the history and the others' unfinished steps; "" for none.
      own_header: between those and the own step. It starts with a mark that shows that the others
        are in mid-sentence.
      step_header: opens a step; `{name}` is its author, `{step}` counts the author's steps from 1.
      greeting_first: the start of the first worker's first step, after its header, where there are
        others; `{name}` is the worker.
      greeting_later: the same for every other worker.
      question: asked from time to time at the start of a step; "" for never.
      finisher: prompts for the answer at once. It starts with the separator and leaves a box open.
      code_finisher: prompts for the program at once. It starts with the separator and leaves a code
        block open.
      forbidden: texts that workers must not sample where they are single tokens; `{bos}` and
        `{eos}` are the tokenizer's own.
      think: whether a think block is opened after the chat where the chat template has neither
        opened nor closed one: "auto" opens it if the tokenizer has a token `<think>`, "always" in
        any case, "never" leaves the chat as the template writes it.
      chat_template_kwargs: further variables of the chat template, such as {"enable_thinking":
        true}. A template that does not use them ignores them.
    """

    system: str
    system_alone: str
    in_system_role: bool = True
    separator: str = "\n\n"
    history_header: str = "### Past steps"
    others_header: str = "\n\n### Work in progress (others)"
    own_header: str = "<...>\n\n### Work in progress (own)"
    step_header: str = "**{name} [{step}]:** "
    greeting_first: str = ""
    greeting_later: str = ""
    question: str = "Quick check: am I doing redundant work? (yes/no): "
    finisher: str = (
        "\n\nMy time is up, so I answer now, as well as I can from everything that has been worked "
        "out so far. The final answer is \\boxed{"
    )
    code_finisher: str = (
        "\n\nMy time is up, so I hand in a program now, as well as I can from all that has been "
        "worked out so far. Here it is in full:\n\n```python\n"
    )
    forbidden: tuple[str, ...] = ("#", "##", "###", "####", "</think>", "{bos}", "{eos}")
    think: Literal["auto", "always", "never"] = "auto"
    chat_template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        """A line; its texts fill pages, of `help(combined)` too."""
        return f"<Format with headers {self.step_header!r}, question {self.question!r}>"

    @classmethod
    def of(cls, model: LoadedModel) -> "Format":
        """The model's own, or `COLLABORATIVE`.

        Raises:
          ConfigError: the model's workers.json does not describe a Format.
        """
        return COLLABORATIVE if model.workers is None else cls.from_json(model.workers)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str = "workers.json") -> "Format":
        """The format with the fields of a JSON object, as `dataclasses.asdict` gives it.

        Fields that are left out have their defaults.

        Raises:
          ConfigError: a field is missing, unknown or of the wrong type.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(
                f"{source} has {', '.join(unknown)}, which no session of workers uses; its fields "
                f"are {', '.join(known)}"
            )
        fields, read = Fields(values, source), {}
        for name, field in known.items():
            default = REQUIRED if field.default is dataclasses.MISSING else field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            read[name] = fields.take(name, _JSON_TYPES.get(name, str), default)
        read["forbidden"] = tuple(read["forbidden"])
        if not all(isinstance(text, str) for text in read["forbidden"]):
            raise fields.error("forbidden", "it must be a list of strings")
        if read["think"] not in _THINK:
            raise fields.error("think", f"it must be one of {', '.join(_THINK)}")
        if taken := [name for name in _OURS if name in read["chat_template_kwargs"]]:
            raise fields.error(
                "chat_template_kwargs", f"{taken[0]} is set by the session: leave it out"
            )
        return cls(**read)

    def instructions(self, names: Sequence[str]) -> str:
        """The instructions of these workers, before the problem.

        Raises:
          ValueError: no names.
        """
        if not names:
            raise ValueError(
                "a prompt is written for workers, and there are no names; give at least one"
            )
        if len(names) == 1:
            return _fill(self.system_alone, names=names[0], count=1, first=names[0])
        words = dict(
            names=f"{', '.join(names[:-1])} and {names[-1]}",
            count=len(names),
            first=names[0],
            second=names[1],
        )
        # every second part is for the further workers
        parts = re.split(r"\{#further\}(.*?)\{/further\}", self.system, flags=re.DOTALL)
        further = list(enumerate(names[2:], 3))
        parts[1::2] = [
            "".join(_fill(part, further=name, number=i, **words) for i, name in further)
            for part in parts[1::2]
        ]
        parts[::2] = [_fill(part, **words) for part in parts[::2]]
        return "".join(parts)

    def prompt(self, tokenizer: Any, problem: str, names: Sequence[str]) -> str:
        """The text that all workers read first.

        It is the instructions and the problem as a chat, an open think block, the history's header.

        A think block is opened as `think` says, unless the chat template has opened or closed one
        there itself (appendix C), so that there is never a second one. A tokenizer without a chat
        template gets plain text.

        Args:
          tokenizer: as transformers makes them.
          problem: the user's text.
          names: of the workers.

        Raises:
          ValueError: no names, or messages that the chat template refuses.
        """
        return unmark(self._marked_prompt(tokenizer, problem, names))

    def prompt_tokens(self, tokenizer: Any, problem: str, names: Sequence[str]) -> list[int]:
        """The tokens of `prompt`, in which the problem and the names have no special token.

        Raises:
          ValueError: as `prompt`.
        """
        text = self._marked_prompt(tokenizer, problem, names)
        # A chat template writes all special tokens, the first one included.
        return encode_marked(tokenizer, text, first=not tokenizer.chat_template)

    def _marked_prompt(self, tokenizer: Any, problem: str, names: Sequence[str]) -> str:
        """The text of `prompt`, with marks in the problem and the names."""
        problem = mark(tokenizer, problem)
        instructions = self.instructions([mark(tokenizer, name) for name in names])
        if not tokenizer.chat_template:
            return "\n\n".join([*filter(None, [instructions, problem]), self.history_header])
        text = self._chat(tokenizer, instructions, problem)
        opens = self.think == "always" or (
            self.think == "auto" and "<think>" in tokenizer.get_vocab()
        )
        if text.rstrip().endswith("<think>"):
            text = text.rstrip() + "\n"
        elif opens and not text.rstrip().endswith("</think>"):
            text += "<think>\n"
        return text + self.history_header

    def _chat(self, tokenizer: Any, instructions: str, problem: str) -> str:
        """The chat up to the start of the assistant's words."""
        user = {"role": "user", "content": problem}
        if instructions and self.in_system_role:
            try:
                text = self._render(tokenizer, [{"role": "system", "content": instructions}, user])
            except ChatTemplateError:  # so templates refuse a role
                text = ""
            if instructions.strip() in text:  # some drop it without an error
                return text
        if instructions:
            user["content"] = f"{instructions}\n\n{problem}"
        try:
            return self._render(tokenizer, [user])
        except ChatTemplateError as error:
            raise ValueError(
                f"the model's chat template refuses the prompt ({error}); a format with other "
                "chat_template_kwargs may do"
            ) from error

    def _render(self, tokenizer: Any, messages: list[dict[str, str]]) -> str:
        return render_with(tokenizer, messages, **self.chat_template_kwargs)

    def opening(self, name: str, step: int, *, names: Sequence[str] = (), ask: bool = False) -> str:
        """The text that opens a step, after the separator.

        It is the step's header, and the question with `ask`, or else a greeting if it is the first.

        Args:
          name: of the worker.
          step: its number, from 1.
          names: of all workers, for the greeting; there is none among fewer than two.
          ask: put the question.
        """
        opening = StepOpening(self.step_header, self.question).text(name, step, ask)
        if step == 1 and len(names) > 1 and not ask:
            greeting = self.greeting_first if name == names[0] else self.greeting_later
            return opening + _fill(greeting, name=name)
        return opening

    def forbidden_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The tokens that are exactly one of the `forbidden` texts, in ascending order."""
        special = {"{bos}": tokenizer.bos_token, "{eos}": tokenizer.eos_token}
        texts = [special.get(text, text) for text in self.forbidden]
        vocabulary = tokenizer.get_vocab()
        return tuple(sorted({vocabulary[text] for text in texts if text in vocabulary}))


def _fill(template: str, **words: Any) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: str(words.get(found[1], found[0])), template)


def collaborative(
    person: Literal["first", "second"] = "second",
    *,
    suggestions: bool = True,
    examples: bool = True,
) -> Format:
    """The texts for reasoning models that have not been trained to work together.

    Args:
      person: whether the instructions say "I" or "you".
      suggestions: with ways to share work.
      examples: with worked examples.

    Raises:
      ValueError: another person.
    """
    if person not in RULES:
        raise ValueError(
            f"person is {person!r}, but the instructions are written in the 'first' and in the "
            "'second'"
        )
    parts = [
        RULES[person],
        SUGGESTIONS[person] if suggestions else "",
        EXAMPLES if examples else "",
        TASK[person],
    ]
    return Format(
        system="\n\n".join(part.strip() for part in parts if part),
        system_alone=ALONE[person].strip(),
        greeting_first="Hi, I'm {name}. My proposal for sharing the work:",
        greeting_later="Hi, I'm {name}.",
    )


COLLABORATIVE = collaborative()
"""The texts of a session where the model has none of its own."""

PLAIN = Format(
    system="",
    system_alone="",
    history_header="",
    others_header="",
    own_header="",
    step_header="",
    question="",
    forbidden=(),
)
"""The problem alone, for decoding without workers; only the early-stop prompts are the same."""
