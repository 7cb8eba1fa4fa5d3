"""A side of scripts.bench.lm_eval, in an environment that has lm_eval: with jaxshare, or with torch for
lm_eval's own backend `hf`. One JSON object a line, in on stdin, out on stdout.

    (at the start)                       -> versions
    {"do": "load", "side": "jaxshare" or "hf", "folder": PATH, "dtype": NAME, "threads": N}
                                         -> parameters; PATH has `model` and `tasks`
    {"do": "run", "task": NAME, "batch": N or null}
                                         -> seconds of the model, contexts, texts

`threads` and `batch` are of `hf`; jaxshare has its own. Every answer has `idle_seconds` and
`idle_cpu_seconds`; what cannot be done is answered with {"error": SENTENCE}.
"""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

from scripts.bench.peers.conversation import Conversation
from scripts.lm_eval.recorded import evaluate

_PACKAGES = ("lm_eval", "torch", "transformers", "jax", "jaxlib", "flax", "numpy")


class HarnessSide:
    """The model, and the folder with its tasks."""

    def load(self, side: str, folder: str, dtype: str, threads: int) -> dict[str, Any]:
        self.folder, self.side = Path(folder), side
        if side == "hf":
            import torch  # pyright: ignore[reportMissingImports]
            from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

            torch.set_num_threads(threads)
            self.model: Any = HFLM(f"{folder}/model", dtype=dtype, device="cpu", batch_size=1)
            return {"parameters": sum(each.numel() for each in self.model.model.parameters())}
        from jaxshare.serving.evaluation.lm_eval.model import JaxshareLM

        self.model = JaxshareLM(f"{folder}/model", dtype=dtype)
        return {"parameters": self.model.get_model_info()["model_num_parameters"]}

    def run(self, task: str, batch: int | None) -> dict[str, Any]:
        if self.side == "hf":
            self.model.batch_size_per_gpu = batch
        found = evaluate(self.model, self.folder, (task,))
        requests = found["requests"]
        return {
            "seconds": found["seconds"],
            "contexts": [each["arguments"][0] for each in requests],
            "texts": [each["result"] for each in requests],
        }


def main() -> None:
    """Answers requests for as long as they come."""
    conversation = Conversation()
    try:
        import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return conversation.say(error=str(error))
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    conversation.say(versions=found)
    conversation.answer_requests(HarnessSide())


if __name__ == "__main__":
    main()
