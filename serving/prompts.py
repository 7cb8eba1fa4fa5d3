"""The texts of a session of workers: what they are told, the headers in their cache, the question, and what ends a run early.

The rules, suggestions and worked examples follow the plan of Hogwild! Inference (section 3.3 and appendix C), in words of our own and
for any number of workers.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jinja2 import TemplateError

from jaxshare.models import ConfigError, LoadedModel
from jaxshare.models.fields import REQUIRED, Fields
from jaxshare.serving.prompt_texts import ALONE, EXAMPLES, RULES, SUGGESTIONS, TASK


@dataclasses.dataclass(frozen=True)
class Format:
    r"""All texts of a session. A model folder can carry its own as workers.json: one object with these fields, lists for tuples.

    `system` and `system_alone` are templates. `{names}` is "Alice, Bob and Carol", `{count}` is 3, `{first}` and `{second}` are the
    first two names. What stands between `{#further}` and `{/further}` is written once for each worker after the second, with its
    `{further}` name and its `{number}` from 3; it vanishes where there are two. Other braces, as in `\boxed{answer}`, stay.

    Attributes:
      system: what two or more workers are told before the problem.
      system_alone: what a single worker is told.
      in_system_role: as a system message; False puts it in front of the user's message. That is also where it goes if the chat template
        refuses or drops system messages.
      separator: ends a step and opens the next.
      history_header: ends the prompt; every step brings the separator with it.
      others_header: stands between the history and the others' unfinished steps; "" for none.
      own_header: stands between those and the own step. It begins with a mark that shows that the others are in mid-sentence.
      step_header: opens a step; `{name}` is its author, `{step}` counts the author's steps from 1.
      greeting_first: how the first worker's first step goes on, where there are others; `{name}` is the worker.
      greeting_later: the same for every other worker.
      question: asked from time to time at the beginning of a step; "" for never.
      finisher: asks for the answer at once. It begins with the separator and leaves a box open.
      code_finisher: asks for the program at once. It begins with the separator and leaves a code block open.
      forbidden: texts that workers must not sample where they are single tokens; `{bos}` and `{eos}` are the tokenizer's own.
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
    finisher: str = ("\n\nMy time is up, so I answer now, as well as I can from everything that has been worked out so far. "
                     "The final answer is \\boxed{")
    code_finisher: str = ("\n\nMy time is up, so I hand in a program now, as well as I can from all that has been worked out so far. "
                          "Here it is in full:\n\n```python\n")
    forbidden: tuple[str, ...] = ("#", "##", "###", "####", "</think>", "{bos}", "{eos}")

    @classmethod
    def of(cls, model: LoadedModel) -> "Format":
        """The model's own, or `COLLABORATIVE`.

        Raises:
          ConfigError: the model's workers.json does not describe a Format.
        """
        return COLLABORATIVE if model.workers is None else cls.from_json(model.workers)

    @classmethod
    def from_json(cls, values: Mapping[str, Any], source: str = "workers.json") -> "Format":
        """From the fields of a JSON object; `dataclasses.asdict` gives such an object. What is left out has its default.

        Raises:
          ConfigError: a field is missing, unknown or of the wrong type.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - set(known)):
            raise ConfigError(f"{source} has {', '.join(unknown)}, which no session of workers uses; its fields are {', '.join(known)}")
        fields, read = Fields(values, source), {}
        for name, field in known.items():
            default = REQUIRED if field.default is dataclasses.MISSING else field.default
            if name != "forbidden":
                read[name] = fields.take(name, bool if name == "in_system_role" else str, default)
                continue
            read[name] = tuple(fields.take(name, list, default))
            if not all(isinstance(text, str) for text in read[name]):
                raise fields.error(name, "it must be a list of strings")
        return cls(**read)

    def instructions(self, names: Sequence[str]) -> str:
        """What these workers are told before the problem.

        Raises:
          ValueError: no names.
        """
        if not names:
            raise ValueError("a prompt is written for workers, and there are no names; give at least one")
        if len(names) == 1:
            return _fill(self.system_alone, names=names[0], count=1, first=names[0])
        words = dict(names=f"{', '.join(names[:-1])} and {names[-1]}", count=len(names), first=names[0], second=names[1])
        parts = re.split(r"\{#further\}(.*?)\{/further\}", self.system, flags=re.DOTALL)  # every second part is for the further workers
        further = list(enumerate(names[2:], 3))
        parts[1::2] = ["".join(_fill(part, further=name, number=i, **words) for i, name in further) for part in parts[1::2]]
        parts[::2] = [_fill(part, **words) for part in parts[::2]]
        return "".join(parts)

    def prompt(self, tokenizer: Any, problem: str, names: Sequence[str]) -> str:
        """What all workers read first: the instructions and the problem as a chat, an open think block, the history's header.

        A think block is opened where the tokenizer has a token for it, unless the chat template has opened or closed one there itself
        (appendix C). A tokenizer without a chat template gets plain text. A chat template writes all special tokens, the first one
        included: encode its prompt without adding any.

        Args:
          tokenizer: as transformers makes them.
          problem: the user's text.
          names: of the workers.

        Raises:
          ValueError: no names.
        """
        told = self.instructions(names)
        if not tokenizer.chat_template:
            return "\n\n".join([*filter(None, [told, problem]), self.history_header])
        text = _chat(tokenizer, told, problem, self.in_system_role)
        if text.rstrip().endswith("<think>"):
            text = text.rstrip() + "\n"
        elif "<think>" in tokenizer.get_vocab() and not text.rstrip().endswith("</think>"):
            text += "<think>\n"
        return text + self.history_header

    def opening(self, name: str, step: int, *, names: Sequence[str] = (), ask: bool = False) -> str:
        """What opens a step, behind the separator: its header and, with `ask`, the question, or else a greeting if it is the first.

        Args:
          name: of the worker.
          step: its number, from 1.
          names: of all workers, for the greeting; there is none among fewer than two.
          ask: put the question.
        """
        header = _fill(self.step_header, name=name, step=step)
        if ask:
            return header + self.question
        if step == 1 and len(names) > 1:
            header += _fill(self.greeting_first if name == names[0] else self.greeting_later, name=name)
        return header

    def forbidden_tokens(self, tokenizer: Any) -> tuple[int, ...]:
        """The tokens that stand for one of the `forbidden` texts alone, in ascending order."""
        special = {"{bos}": tokenizer.bos_token, "{eos}": tokenizer.eos_token}
        texts = [special.get(text, text) for text in self.forbidden]
        vocabulary = tokenizer.get_vocab()
        return tuple(sorted({vocabulary[text] for text in texts if text in vocabulary}))


def _fill(template: str, **words: Any) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: str(words.get(found[1], found[0])), template)


def _chat(tokenizer: Any, told: str, problem: str, in_system_role: bool) -> str:
    """The chat up to where the assistant's words begin."""
    if told and in_system_role:
        try:
            text = _render(tokenizer, [{"role": "system", "content": told}, {"role": "user", "content": problem}])
        except TemplateError:  # how templates refuse a role
            text = ""
        if told.strip() in text:  # some drop it without a word
            return text
    return _render(tokenizer, [{"role": "user", "content": f"{told}\n\n{problem}" if told else problem}])


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def collaborative(person: Literal["first", "second"] = "second", *, suggestions: bool = True, examples: bool = True) -> Format:
    """The texts for reasoning models that have not been trained to work together.

    Args:
      person: whether the instructions say "I" or "you".
      suggestions: with ways to share work.
      examples: with worked examples.

    Raises:
      ValueError: another person.
    """
    if person not in RULES:
        raise ValueError(f"person is {person!r}, but the instructions are written in the 'first' and in the 'second'")
    parts = [RULES[person], SUGGESTIONS[person] if suggestions else "", EXAMPLES if examples else "", TASK[person]]
    return Format(
        system="\n\n".join(part.strip() for part in parts if part), system_alone=ALONE[person].strip(),
        greeting_first="Hi, I'm {name}. My proposal for sharing the work:", greeting_later="Hi, I'm {name}.")


COLLABORATIVE = collaborative()
"""What a session uses where the model brings no texts of its own."""

PLAIN = Format(system="", system_alone="", history_header="", others_header="", own_header="", step_header="", question="", forbidden=())
"""The problem alone, for decoding without workers; only what ends a run early is the same."""
