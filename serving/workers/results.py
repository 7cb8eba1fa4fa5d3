"""The results of a session of workers, or of one of the baselines."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxshare import FinishReason
from jaxshare.deprecated import warn_renamed
from jaxshare.serving.workers.text.transcript import Step

_FORMER_WORDS = {
    FinishReason.ANSWER: "answer",
    FinishReason.STOP: "stopped",
    FinishReason.CACHE_FULL: "full",
    FinishReason.LENGTH: "budget",
    FinishReason.PAUSED: "paused",
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer of a session: given by the workers or found by the early finisher.

    Attributes:
      value: the answer, or None if there is none.
      text: the text it was found in: the workers' own words, or the early-stop prompt and what was
        written after it.
      passes: forward passes of the workers before it.
      extra_passes: those of the finisher; 0 where the workers had answered.
    """

    value: str | None
    text: str
    passes: int
    extra_passes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Result:
    """The result of a run.

    Attributes:
      names: of the workers.
      steps: all steps in the order in which they were finished, unfinished ones last.
      answers: by budget of forward passes, for each requested.
      passes: forward passes of the workers; those over the prompt and the finisher's are not
        counted.
      finish_reason: the reason why the run is over: ANSWER, STOP (of all workers), CACHE_FULL or
        LENGTH (the budget is used up); PAUSED if it is not.
      seconds: of wall time in the workers' passes; prefill_seconds: in those over the prompt.
        Compilation is not counted.
      kv_bytes: keys and values cached at the end, over all layers.
      compile_seconds: of wall time in compilation, in the process that made the result.
      versions: (passes, version of the weights from then on) of a session on an engine, in the process
        that made the result; see `Engine.update_params`.
    """

    names: tuple[str, ...]
    steps: list[Step]
    answers: dict[int, Answer]
    passes: int
    finish_reason: FinishReason
    seconds: float
    prefill_seconds: float
    kv_bytes: int
    compile_seconds: float = 0.0
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def ended(self) -> str:
        """The former name of `finish_reason`, with the former words."""
        warn_renamed("Result.ended", "Result.finish_reason")
        return former_word(self.finish_reason)

    @property
    def tokens(self) -> int:
        """Tokens sampled, all workers together."""
        return sum(len(step.tokens) for step in self.steps)

    def __repr__(self) -> str:
        """A line: the answers, and what they cost."""
        answers = {budget: answer.value for budget, answer in self.answers.items()}
        return (
            f"<Result of {', '.join(self.names)}: answers {answers}; {len(self.steps)} steps with "
            f"{self.tokens} tokens in {self.passes} passes, {self.seconds:.2f} s; "
            f"{self.finish_reason}>"
        )

    @property
    def texts(self) -> dict[str, str]:
        """Each worker's own words, its steps joined."""
        return {
            name: "".join(step.text for step in self.steps if step.worker == name)
            for name in self.names
        }

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `jaxshare workers --json` prints it."""
        writers = dict.fromkeys((*self.names, *(step.worker for step in self.steps)))
        return {
            "workers": {
                name: [dataclasses.asdict(step) for step in self.steps if step.worker == name]
                for name in writers
            },
            "history": [[step.worker, step.number] for step in self.steps],
            "answers": {
                str(budget): dataclasses.asdict(answer) for budget, answer in self.answers.items()
            },
            "passes": self.passes,
            "tokens": self.tokens,
            "finish_reason": str(self.finish_reason),
            "seconds": self.seconds,
            "prefill_seconds": self.prefill_seconds,
            "kv_bytes": self.kv_bytes,
            "compile_seconds": self.compile_seconds,
        }


def former_word(reason: FinishReason) -> str:
    """The word that `Workers.ended` and `Result.ended` had for a finish reason: "stopped"."""
    return _FORMER_WORDS[reason]


def check_finish_at(finish_at: Sequence[int], budget: int) -> None:
    """Raises ValueError for a pass to answer at that is below 1 or beyond the budget."""
    if odd := [passes for passes in finish_at if not 1 <= passes <= budget]:
        raise ValueError(
            f"finish_at has {odd[0]}; it must lie between 1 and the budget of {budget} forward "
            "passes"
        )
