"""Tokenizer and training samples of the embedded model: lone solutions, few-shot chats, and what
one of two workers sees.

A sample is (tokens, weights): weights[i] is not 0 where tokens[i] is something the writer would
itself generate at that place.
"""

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxshare.serving.evaluation.arithmetic import (
    BOX,
    NAMES,
    SEPARATOR,
    WAIT,
    SumsProblem,
    claimed,
    few_shot_messages,
    header,
    make_problem,
    next_move,
    results,
    wait_body,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
OWN = 3
"""The weight of a viewer's own paragraph, of which a sample has but one, against the paragraphs it
sees in the history."""
MIDDLE = 0.03
"""How often a simulated worker is looked at before a token in the middle of a paragraph."""
PAD, END = SPECIAL[0], SPECIAL[2]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Digits are pieces of their own; a blank line is one piece, also after a line break; a space
# belongs to the digit's left neighbour.
_PIECES = (
    r"\n(?=\n\n(?!\n))|\n\n|\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+"
)

Sample = tuple[list[int], list[int]]


def train_tokenizer(vocab_size: int, seed: int, more: Sequence[str] = ()) -> Tokenizer:
    """Byte-level BPE over generated chats and `more` texts: every byte has a token, so that any
    text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    rng = random.Random(f"tokenizer/{seed}")
    texts = [*more]
    for i in range(2000):
        problem = make_problem(rng)
        names = NAMES[: 1 + i % 2]
        texts += [m["role"] + "\n" + m["content"] for m in problem.messages(names)] + [
            "assistant\n" + problem.solution()
        ]
        name = rng.choice(NAMES)
        texts += [
            SEPARATOR + header(name, rng.randint(1, 6)) + body
            for body in (problem.body(rng.randint(1, 5)), problem.body(BOX), wait_body(name))
        ]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Codec:
    """The few encodings that samples are made of. `encode` is exact at the joints: a piece never
    crosses a separator's start."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.end, self.pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
        [self.separator] = self.encode(SEPARATOR)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The chat template's tokens, with the generation prompt."""
        return self.encode(
            "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
            + "<|im_start|>assistant\n"
        )


def lone_sample(codec: Codec, rng: random.Random) -> Sample:
    problem = make_problem(rng)
    prompt = codec.chat(problem.messages())
    written = [*codec.encode(problem.solution()), codec.end]
    return prompt + written, [0] * len(prompt) + [1] * len(written)


def few_shot_sample(codec: Codec, rng: random.Random, length: int) -> Sample:
    """A chat of as many solved turns as fit `length`; every turn is learned."""
    problems = [make_problem(rng)]
    tokens, weights = lone_turns(codec, problems)
    while True:
        problems.append(make_problem(rng))
        longer = lone_turns(codec, problems)
        if len(longer[0]) > length:
            return tokens, weights
        tokens, weights = longer


def lone_turns(codec: Codec, problems: list[SumsProblem]) -> Sample:
    tokens, weights = [], []
    for i, problem in enumerate(problems):
        prompt = codec.chat(few_shot_messages(problems[:i], problem))[len(tokens) :]
        written = [*codec.encode(problem.solution()), codec.end]
        tokens += prompt + written
        weights += [0] * len(prompt) + [1] * len(written)
    return tokens, weights


@dataclasses.dataclass(frozen=True)
class View:
    """The tokens that a worker sees at one moment, in the order of the combined layout, and the
    paragraph that it is writing then.

    Lists of tokens. `written` is how many tokens of `body` are written: 0 where it starts, more
    where the other worker's block has grown, moved or started anew meanwhile.
    """

    name: str
    prompt: list[int]
    history: list[list[int]]
    foreign: list[int]
    opening: list[int]
    body: list[int]
    written: int

    @property
    def context(self) -> list[int]:
        """All that is visible, up to the next token to write."""
        return [
            *self.prompt,
            *(t for p in self.history for t in p),
            *self.foreign,
            *self.opening,
            *self.body[: self.written],
        ]


@dataclasses.dataclass
class _Worker:
    name: str
    pace: float
    delay: int
    step: int = 0
    block: list[int] = dataclasses.field(default_factory=list)
    queue: list[int] = dataclasses.field(default_factory=list)
    opening: list[int] = dataclasses.field(default_factory=list)
    body: list[int] = dataclasses.field(default_factory=list)
    asking: bool = False

    def begin(self, codec: Codec, *, at_once: bool) -> None:
        """Begins a paragraph; `at_once`: with its whole opening in the block already."""
        self.step += 1
        self.opening = [codec.separator, *codec.encode(header(self.name, self.step))]
        self.body, self.block, self.queue = [], [], [*self.opening]
        if at_once:
            self.block, self.queue = self.queue, []


def simulate(codec: Codec, problem: SumsProblem, rng: random.Random) -> list[View]:
    """Two workers that keep to `next_move`, a token at a time, at uneven pace, until one has boxed
    the answers: a view of every paragraph as it is begun, and of some in their middle."""
    workers = [
        _Worker(name, rng.uniform(0.5, 1.0), rng.randint(0, 30) if rng.random() < 0.5 else 0)
        for name in NAMES
    ]
    prompt, history, views = codec.chat(problem.messages(NAMES)), [], []
    [question, _] = codec.encode(" Question 1")
    at_once = rng.random() < 0.5

    def look(worker: _Worker, other: _Worker, written: int) -> None:
        views.append(
            View(
                worker.name,
                prompt,
                [*history],
                [*other.block],
                worker.opening,
                worker.body,
                written,
            )
        )

    for worker in workers:
        worker.begin(codec, at_once=at_once)
    while True:
        for worker, other in rng.sample([workers, workers[::-1]], 2):
            if worker.delay:
                worker.delay -= 1
            elif rng.random() > worker.pace:
                continue
            elif worker.queue:
                if worker.body and rng.random() < MIDDLE:
                    look(worker, other, len(worker.body) - len(worker.queue))
                worker.block.append(worker.queue.pop(0))
            elif not worker.body:
                seen = codec.text([t for p in history for t in p] + other.block)
                move = next_move(worker.name, seen, problem)
                if move > 0 and not worker.asking:
                    worker.asking = True
                    worker.block.append(question)
                    continue
                # the other took the last question since this one wrote " Question"
                overtaken = worker.asking and move <= 0
                if overtaken:
                    move = _unsolved(worker.name, seen)
                worker.body = codec.encode(
                    wait_body(other.name) if move == WAIT else problem.body(move)
                )
                look(worker, other, int(overtaken))
                worker.queue = worker.body[int(worker.asking) :]
                worker.asking = False
                worker.block.append(worker.queue.pop(0))
            elif is_box(codec, worker.body):
                return views
            else:
                history.append(worker.block)
                worker.begin(codec, at_once=at_once)


def _unsolved(name: str, seen: str) -> int:
    """The question that a worker solves too, where all are taken: the first or last unsolved."""
    questions = sorted(claimed(seen) - set(results(seen))) or sorted(claimed(seen))
    return questions[0] if name == NAMES[0] else questions[-1]


def is_box(codec: Codec, body: list[int]) -> bool:
    return codec.text(body).startswith(" \\boxed")


def view_sample(codec: Codec, rng: random.Random) -> Sample:
    """One view of a simulation. Learned: the bodies in the history after their claim, and the
    viewer's own body and its end."""
    views = simulate(codec, make_problem(rng), rng)
    view = rng.choices(views, weights=[1 + len(v.history) for v in views])[0]
    tokens, weights = [*view.prompt], [0] * len(view.prompt)
    for paragraph in view.history:
        tokens += paragraph
        # the separator and the header, then two tokens that say what is taken up
        learned = len(view.opening) + 2
        weights += [0] * learned + [1] * (len(paragraph) - learned)
    coming = [
        *view.body[view.written :],
        codec.end if is_box(codec, view.body) else codec.separator,
    ]
    weights += [0] * (len(view.context) - len(weights)) + [OWN] * len(coming)
    return [*view.context, *coming], weights


def batch(codec: Codec, samples: list[Sample], length: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[R, length + 1] padded tokens and float32[R, length] weights of the tokens after the
    first."""
    tokens = np.full((len(samples), length + 1), codec.pad, np.int32)
    weights = np.zeros((len(samples), length + 1), np.float32)
    for row, (ids, learned) in enumerate(samples):
        if len(ids) > length + 1:
            raise ValueError(f"a sample of {len(ids)} tokens does not fit {length + 1}")
        tokens[row, : len(ids)], weights[row, : len(ids)] = ids, learned
    return tokens, weights[:, 1:]
