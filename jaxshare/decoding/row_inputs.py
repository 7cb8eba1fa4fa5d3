"""The inputs of rows on the host: checks them, and makes them arrays of one shape.

`RowInputs` has what the rows of a new state start with, `Admission` what rows of a state that is
in use are given to write next.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np
from jaxtyping import Bool, Int

from jaxshare.decoding.changes import Start
from jaxshare.decoding.history import History
from jaxshare.decoding.processors import check_processor, find_processor
from jaxshare.decoding.sampling_params import Sampler
from jaxshare.layout import Layout
from jaxshare.seeds import stream_seed


@dataclasses.dataclass(frozen=True)
class RowInputs:
    """The inputs of each of the R rows of a new state.

    Attributes:
      prompts: tokens to feed before a row samples; empty for a row not in use.
      samplers: how the row samples.
      seeds: integers of 64 bits.
      max_new_tokens: tokens that the row may sample.
    """

    prompts: list[list[int]]
    samplers: list[Sampler]
    seeds: list[int]
    max_new_tokens: list[int]

    @classmethod
    def create(
        cls,
        rows: int,
        prompts: Sequence[Sequence[int]],
        samplers: Sampler | Sequence[Sampler],
        seeds: int | Sequence[int],
        max_new_tokens: int | Sequence[int],
    ) -> Self:
        """Gives each row its own entry; the arguments are those of `DecodeState.create`, where one
        sampler, seed or number is for all rows, and of one seed row r gets `stream_seed(seeds, r)`.

        Raises:
          ValueError: a number of entries other than `rows`.
        """
        made = cls(
            [*map(list, prompts), *([[]] * (rows - len(prompts)))],
            [samplers] * rows if isinstance(samplers, Sampler) else list(samplers),
            [stream_seed(seeds, r) for r in range(rows)] if isinstance(seeds, int) else list(seeds),
            [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens),
        )
        for field in dataclasses.fields(made):
            if (count := len(getattr(made, field.name))) != rows:
                raise ValueError(
                    f"{field.name} has {count} entries, but the layout has {rows} rows"
                )
        return made

    def check(self, layout: Layout, vocab_size: int, has_logits: bool) -> None:
        """Checks tokens and numbers of them.

        Raises:
          ValueError: a token outside the vocabulary in a prompt, a bias or a ban, a grammar, a
            negative number of tokens to sample, a row in use with nothing to feed and no logits, a
            sampler with a field of calls, or a logits processor that does not serve the vocabulary.
        """
        in_use = layout.count_listed() > 0
        for r, (prompt, sampler) in enumerate(zip(self.prompts, self.samplers, strict=True)):
            if outside := [t for t in prompt if not 0 <= t < vocab_size]:
                raise ValueError(
                    f"the prompt of row {r} has token {outside[0]}, outside the vocabulary of "
                    f"{vocab_size}"
                )
            if in_use[r] and not prompt and not has_logits:
                raise ValueError(
                    f"row {r} has an empty prompt and no logits to sample from; give it at least "
                    "one token"
                )
            sampler.refuse(
                None,
                f"row {r} of a state takes seeds and max_new_tokens apart and knows no texts; leave "
                "the field out, or sample with generate or an engine",
            )
            if outside := [t for t in sampler.tokens if t >= vocab_size]:
                raise ValueError(
                    f"the sampler of row {r} names token {outside[0]}, outside the vocabulary of "
                    f"{vocab_size}"
                )
            if sampler.grammar:
                raise ValueError(
                    f"the sampler of row {r} has a grammar, which must be compiled for a "
                    "tokenizer; use `jaxshare.serving.generate` or an engine"
                )
            for name, _ in sampler.processors:
                check_processor(find_processor(name), vocab_size)
            if self.max_new_tokens[r] < 0:
                raise ValueError(
                    f"max_new_tokens of row {r} is {self.max_new_tokens[r]}; it must be at least 0"
                )

    def history(self, texts: Sequence[Sequence[int]] | None, vocab_size: int) -> History:
        """The texts that samplers look at, with places for all that rows may sample.

        Args:
          texts: of each row so far; None for its prompt.
          vocab_size: V.

        Raises:
          ValueError: another number of texts than of rows.
        """
        texts = self.prompts if texts is None else texts
        if len(texts) != len(self.samplers):
            raise ValueError(
                f"texts has {len(texts)} entries, but the layout has {len(self.samplers)} rows"
            )
        longest = [len(t) + most for t, most in zip(texts, self.max_new_tokens, strict=True)]
        history = History.for_samplers(self.samplers, longest, vocab_size)
        for row, (text, sampler) in enumerate(zip(texts, self.samplers, strict=True)):
            if sampler.looks_back:
                history = history.with_text(row, text, len(text))
        return history

    def pending(self, width: int) -> Int[np.ndarray, "R W"]:
        """The prompts as queues of `width` tokens."""
        return _queues(self.prompts, len(self.prompts), width)


@dataclasses.dataclass(frozen=True)
class Admission:
    """The rows that `DecodeState.admit` starts, and the inputs of each of them.

    Attributes:
      rows: row numbers, each once.
      blocks: the blocks that the row sees, in order; it writes the last.
      seeds, max_new_tokens, num_sampled, pending, recorded, scored: as for `DecodeState.admit`.
    """

    rows: Sequence[int]
    blocks: Sequence[Sequence[int]]
    seeds: Sequence[int]
    max_new_tokens: Sequence[int]
    num_sampled: Sequence[int]
    pending: Sequence[Sequence[int]]
    recorded: Sequence[bool]
    scored: Sequence[bool]

    def check_counts(self, num_logits: int) -> None:
        """Raises ValueError for counts that do not agree, and for a row that is named twice."""
        for name, count in (
            ("blocks", len(self.blocks)),
            ("logits", min(num_logits, len(self.rows))),
            ("seeds", len(self.seeds)),
            ("max_new_tokens", len(self.max_new_tokens)),
            ("num_sampled", len(self.num_sampled)),
            ("pending", len(self.pending)),
            ("recorded", len(self.recorded)),
            ("scored", len(self.scored)),
        ):
            if count != len(self.rows):
                raise ValueError(
                    f"{name} has {count} entries, but {len(self.rows)} rows are to be admitted"
                )
        if len(set(self.rows)) < len(self.rows):
            raise ValueError(f"rows must name each row once; got {list(self.rows)}")

    def check_rows(
        self, running: Bool[np.ndarray, " R"], *, max_listed: int, max_pending: int
    ) -> None:
        """Checks each row against the state.

        Raises:
          ValueError: a row that is running or does not exist, a negative block, more blocks than
            the layout is wide, a negative number of tokens to sample, or more pending tokens
            than the queue holds.
        """
        for row, seen, most in zip(self.rows, self.blocks, self.max_new_tokens, strict=True):
            if negative := [block for block in seen if block < 0]:
                raise ValueError(f"row {row} lists block {negative[0]}; blocks are numbered from 0")
            if not 0 <= row < len(running):
                raise ValueError(
                    f"there is no row {row}; the state has rows 0 to {len(running) - 1}"
                )
            if running[row]:
                raise ValueError(f"row {row} is running; end it before it is given something new")
            if not 1 <= len(seen) <= max_listed:
                raise ValueError(
                    f"row {row} would list {len(seen)} blocks, but the layout has room for 1 to "
                    f"{max_listed}"
                )
            if most < 0:
                raise ValueError(f"max_new_tokens of row {row} is {most}; it must be at least 0")
        for row, tokens in zip(self.rows, self.pending, strict=True):
            if len(tokens) > max_pending:
                raise ValueError(
                    f"row {row} would have more than the {max_pending} tokens pending that its "
                    "queue holds; create the state with a longer queue, or feed them before"
                )

    def listed(self, blocks: Int[np.ndarray, "R N"]) -> Int[np.ndarray, "R N"]:
        """The blocks of a layout in which the admitted rows list theirs."""
        blocks = blocks.copy()
        for row, seen in zip(self.rows, self.blocks, strict=True):
            blocks[row] = [*seen, *[-1] * (blocks.shape[1] - len(seen))]
        return blocks

    def starts(self, processed: bool) -> list[Start]:
        """The inputs of the rows, one by one; `processed` is the kind of log-probabilities."""
        return [
            Start(*values, processed=processed)
            for values in zip(
                self.seeds,
                self.max_new_tokens,
                self.num_sampled,
                self.pending,
                self.recorded,
                self.scored,
                strict=True,
            )
        ]


def _queues(lists: Sequence[Sequence[int]], rows: int, width: int) -> np.ndarray:
    queues = np.zeros((rows, width), np.int32)
    for r, tokens in enumerate(lists):
        queues[r, : len(tokens)] = tokens
    return queues
