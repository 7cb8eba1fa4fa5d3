"""The model that lm_eval knows as `jaxshare`.

    results = lm_eval.simple_evaluate(JaxshareLM("Qwen/Qwen3-0.6B"), tasks=["hellaswag"])

All requests of a kind are scored in one call, so that the examples of a task are read once for all
its questions. Importing this module takes lm_eval; what it does is in the modules beside it.
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]
from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]

from jaxshare import progress
from jaxshare.models import LoadedModel
from jaxshare.serving.evaluation.lm_eval.harness import Harness


@register_model("jaxshare")
class JaxshareLM(LM):
    """A model for lm_eval.

    Attributes:
      harness: answers the requests.
    """

    def __init__(
        self,
        pretrained: str | LoadedModel,
        *,
        batch_size: Any = None,
        max_batch_size: Any = None,
        device: str | None = None,
        **options: Any,
    ):
        """Loads the model.

        Args:
          pretrained: a folder or hub id, or a model that is loaded.
          batch_size, max_batch_size, device: given by lm_eval; rows are chosen by memory and passes,
            and the device is JAX's.
          options: see `Harness.load`, by the names that `--model_args` takes.

        Raises:
          ValueError, TypeError, FileNotFoundError: see `Harness.load`.
        """
        super().__init__()
        self.harness = Harness.load(pretrained, **options)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Scores (context, continuation) pairs: the log-probability of the continuation, and
        whether all its tokens are the likeliest."""
        given = [request.args for request in requests]
        with _bar(len(given), "loglikelihood") as bar:
            found = self.harness.loglikelihoods(given, lambda done: _to(bar, done))
        return self._remembered("loglikelihood", given, found)

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Scores whole texts."""
        given = [request.args for request in requests]
        found = self.harness.rolling_loglikelihoods([text for (text,) in given])
        return self._remembered("loglikelihood_rolling", given, found)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers contexts, each with its settings."""
        given = [request.args for request in requests]
        with _bar(len(given), "generate_until") as bar:
            found = self.harness.answers(given, bar.update)
        return self._remembered("generate_until", given, found)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a dialogue in the model's chat template.

        Without `add_generation_prompt` the last message is one of the assistant, which goes on.
        """
        return self.harness.render(chat_history, goes_on=not add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The model's chat template, for the record; None where none is applied."""
        return self.harness.chat_template(chat_template)

    @property
    def tokenizer_name(self) -> str:
        """A name for the tokenizer in lm_eval's caches."""
        return self.harness.texts.model.name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Facts about the model for lm_eval's results."""
        return self.harness.describe()

    def _remembered(self, kind: str, given: Sequence[Any], found: list[Any]) -> list[Any]:
        """Puts results into lm_eval's cache, if it has one."""
        for arguments, result in zip(given, found, strict=True):
            self.cache_hook.add_partial(kind, arguments, result)
        return found


def _bar(total: int, kind: str) -> progress.Activity:
    return progress.work(f"running {kind} requests", total, "requests")


def _to(bar: progress.Activity, done: int) -> None:
    bar.done = done
