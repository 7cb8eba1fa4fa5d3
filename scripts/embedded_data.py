"""Tokenizer and training samples of the embedded model: lone solutions, few-shot chats, and what one of two workers sees.

A sample is (tokens, weights): weights[i] is not 0 where tokens[i] is something the writer would itself generate at that place.
"""

import dataclasses
import random

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxshare.models.problems import (
    BOX,
    NAMES,
    SEPARATOR,
    WAIT,
    Problem,
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
"""The weight of a viewer's own paragraph, of which a sample has but one, against the paragraphs it sees in the history."""
PAD, END = SPECIAL[0], SPECIAL[2]
CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Digits stand alone; a blank line is one piece, also after a line break; a space belongs to the digit's left neighbour.
_PIECES = (r"\n(?=\n\n(?!\n))|\n\n|\p{N}| ?\p{L}+(?: (?=\p{N}))?| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\s+")

Sample = tuple[list[int], list[int]]


def train_tokenizer(vocab_size: int, seed: int) -> Tokenizer:
    """Byte-level BPE over generated chats: every byte has a token, so that any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    rng = random.Random(f"tokenizer/{seed}")
    texts = []
    for i in range(2000):
        problem = make_problem(rng)
        names = NAMES[:1 + i % 2]
        texts += [m["role"] + "\n" + m["content"] for m in problem.messages(names)] + ["assistant\n" + problem.solution()]
        name = rng.choice(NAMES)
        texts += [SEPARATOR + header(name, rng.randint(1, 6)) + body
                  for body in (problem.body(rng.randint(1, 5)), problem.body(BOX), wait_body(name))]
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Codec:
    """The few encodings that samples are made of. `encode` is exact at the joints: a piece never crosses a separator's start."""

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
        return self.encode("".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n")


def lone_sample(codec: Codec, rng: random.Random) -> Sample:
    problem = make_problem(rng)
    prompt = codec.chat(problem.messages())
    written = [*codec.encode(problem.solution()), codec.end]
    return prompt + written, [0] * len(prompt) + [1] * len(written)


def few_shot_sample(codec: Codec, rng: random.Random, length: int) -> Sample:
    """As many solved turns as fit `length`; every turn is learned."""
    problems = [make_problem(rng)]
    tokens, weights = lone_turns(codec, problems)
    while True:
        problems.append(make_problem(rng))
        longer = lone_turns(codec, problems)
        if len(longer[0]) > length:
            return tokens, weights
        tokens, weights = longer


def lone_turns(codec: Codec, problems: list[Problem]) -> Sample:
    tokens, weights = [], []
    for i, problem in enumerate(problems):
        prompt = codec.chat(few_shot_messages(problems[:i], problem))[len(tokens):]
        written = [*codec.encode(problem.solution()), codec.end]
        tokens += prompt + written
        weights += [0] * len(prompt) + [1] * len(written)
    return tokens, weights


@dataclasses.dataclass(frozen=True)
class View:
    """What a worker sees when it decides on a paragraph, in the order of the combined layout, and the paragraph it then writes.

    Token lists; `kind_fixed` is False where the paragraph began with " Question" before the view came to be as it is (the other
    worker claimed the last question meanwhile), so that the view does not explain it.
    """

    name: str
    prompt: list[int]
    history: list[list[int]]
    foreign: list[int]
    opening: list[int]
    body: list[int]
    kind_fixed: bool

    @property
    def context(self) -> list[int]:
        return [*self.prompt, *(t for paragraph in self.history for t in paragraph), *self.foreign, *self.opening]


class _Worker:
    def __init__(self, name: str, pace: float, delay: int):
        self.name, self.pace, self.delay, self.step = name, pace, delay, 0
        self.block: list[int] = []
        self.queue: list[int] = []
        self.started = 0
        self.asking = False


def simulate(codec: Codec, problem: Problem, rng: random.Random) -> list[View]:
    """Two workers that keep to `next_move`, a token at a time, at uneven pace: the view of every paragraph that was begun."""
    workers = [_Worker(name, rng.uniform(0.5, 1.0), rng.randint(0, 30) if rng.random() < 0.5 else 0) for name in NAMES]
    prompt, history, views = codec.chat(problem.messages(NAMES)), [], []
    question = codec.encode(" Question 1")[:1]
    at_once = rng.random() < 0.5

    def begin(worker: _Worker) -> None:
        worker.step += 1
        opening = [codec.separator, *codec.encode(header(worker.name, worker.step))]
        worker.block, worker.queue, worker.started = ([*opening], [], len(opening)) if at_once else ([], opening, len(opening))

    for worker in workers:
        begin(worker)
    while True:
        for worker, other in rng.sample([workers, workers[::-1]], 2):
            if worker.delay:
                worker.delay -= 1
                continue
            if rng.random() > worker.pace:
                continue
            if worker.queue:
                worker.block.append(worker.queue.pop(0))
            elif len(worker.block) == worker.started or worker.asking:
                seen = codec.text([t for p in history for t in p] + other.block)
                move = next_move(worker.name, seen)
                if move > 0 and not worker.asking:
                    worker.asking = True
                    worker.block += question
                    continue
                kind_fixed = move > 0 or not worker.asking
                if worker.asking and move <= 0:
                    unsolved = sorted(claimed(seen) - set(results(seen))) or sorted(claimed(seen))
                    move = unsolved[0] if worker.name == NAMES[0] else unsolved[-1]
                body = codec.encode(wait_body(other.name) if move == WAIT else problem.body(move))
                opening = worker.block[:worker.started]
                views.append(View(worker.name, prompt, [*history], [*other.block], opening, body, kind_fixed))
                if move == BOX:
                    return views
                already = len(worker.block) - worker.started
                worker.queue, worker.asking = body[already:], False
                worker.block.append(worker.queue.pop(0))
            else:
                history.append(worker.block)
                begin(worker)


def view_sample(codec: Codec, rng: random.Random) -> Sample:
    """One view of a simulation. Learned: the bodies in the history after their claim, and the viewer's own body and its end."""
    views = simulate(codec, make_problem(rng), rng)
    view = rng.choices(views, weights=[1 + len(v.history) for v in views])[0]
    tokens, weights = [*view.prompt], [0] * len(view.prompt)
    for paragraph in view.history:
        tokens += paragraph
        learned = len(view.opening) + 2  # the separator and the header, then two tokens that say what is taken up
        weights += [0] * learned + [1] * (len(paragraph) - learned)
    end = codec.end if codec.text(view.body).startswith(" \\boxed") else codec.separator
    tokens += [*view.foreign, *view.opening, *view.body, end]
    weights += [0] * (len(view.foreign) + len(view.opening)) + [OWN * int(view.kind_fixed), *[OWN] * len(view.body)]
    return tokens, weights


def batch(codec: Codec, samples: list[Sample], length: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[R, length + 1] padded tokens and float32[R, length] weights of the tokens after the first."""
    tokens = np.full((len(samples), length + 1), codec.pad, np.int32)
    weights = np.zeros((len(samples), length + 1), np.float32)
    for row, (ids, learned) in enumerate(samples):
        if len(ids) > length + 1:
            raise ValueError(f"a sample of {len(ids)} tokens does not fit {length + 1}")
        tokens[row, :len(ids)], weights[row, :len(ids)] = ids, learned
    return tokens, weights[:, 1:]
