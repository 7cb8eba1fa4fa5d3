"""Trains the embedded model by reward with TRL's GRPOTrainer, which samples from a jaxshare server.

    jaxshare serve embedded --dtype float32 --weights-folder /tmp/weights
    python examples/trl_grpo.py --weights-folder /tmp/weights [--model FOLDER] [--steps 20]

TRL needs PyTorch, and may live in an environment of its own (`pip install trl==1.16.0 openai`): it
asks the server over HTTP, and hands it new weights by a folder that both see. The reward is for a sum
that is right. The same function serves any model that transformers and jaxshare both load.
"""

import argparse
import concurrent.futures
import functools
import itertools
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from openai.types import Completion

EMBEDDED = Path(__file__).resolve().parents[1] / "models" / "embedded"


class ServerRollouts:
    """TRL's `rollout_func`: completions of a server whose weights follow the trainer's.

    Args:
      client: of the server, at its /v1.
      folder: the server's --weights-folder.
    """

    def __init__(self, client: openai.OpenAI, folder: Path):
        self._client, self._folder = client, folder
        self._model = client.models.list().data[0].id
        self._step = 0

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list]:
        """Samples one completion for each prompt; equal ones that follow each other are one request,
        whose samples share the keys and values of their prompt."""
        self._update_weights(trainer)
        groups = [(prompt, len([*equal])) for prompt, equal in itertools.groupby(prompts)]
        found: dict[str, list] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
            ask = functools.partial(self._samples, trainer)
            for answer in pool.map(ask, itertools.count(), *zip(*groups, strict=True)):
                for choice in answer.model_dump()["choices"]:
                    found["prompt_ids"].append(choice["prompt_token_ids"])
                    found["completion_ids"].append(choice["token_ids"])
                    logprobs = choice["logprobs"]["token_logprobs"]
                    found["logprobs"].append([[each] for each in logprobs])
        return found

    def _samples(self, trainer: Any, group: int, prompt: str, n: int) -> Completion:
        """Samples a group; no two groups of a run have the same seed."""
        args, process = trainer.args, trainer.accelerator.process_index
        step = trainer.state.global_step + 1
        return self._client.completions.create(
            model=self._model,
            prompt=trainer.processing_class(prompt, add_special_tokens=False)["input_ids"],
            n=n,
            max_tokens=args.max_completion_length,
            temperature=args.temperature,
            logprobs=0,
            seed=args.seed + 10**9 * step + 10**5 * process + group,
            extra_body={"return_token_ids": True},
        )

    def _update_weights(self, trainer: Any) -> None:
        """Gives the server the trainer's weights, if they have changed."""
        step = trainer.state.global_step
        if step == self._step:
            return
        if trainer.accelerator.is_main_process:
            name = f"step-{step}"
            model = trainer.accelerator.unwrap_model(trainer.model)
            model.save_pretrained(self._folder / name)
            body = {"name": name, "running": "finish"}
            self._client.post("/weights", body=body, cast_to=object)
            shutil.rmtree(self._folder / name)
        trainer.accelerator.wait_for_everyone()
        self._step = step


def right_sums(completions: Sequence[str], answer: Sequence[int], **_: Any) -> list[float]:
    """1 for a text whose last number is the answer, else 0."""
    told = [re.findall(r"\d+", text)[-1:] for text in completions]
    return [float(each == [str(right)]) for each, right in zip(told, answer, strict=True)]


def questions(tokenizer: Any, count: int, seed: int) -> list[dict[str, Any]]:
    """Sums as the embedded model was taught to be asked for them, with their answers."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        asked = f"Solve these problems and return comma-separated answers \\boxed{{answer1}}:\n1. {a} + {b}"
        turns = [{"role": "user", "content": asked}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        rows.append({"prompt": prompt, "answer": a + b})
    return rows


def main() -> None:
    """Trains, and prints for each step the mean reward."""
    parser = argparse.ArgumentParser(description="GRPO with TRL and a jaxshare server.")
    parser.add_argument("--model", type=Path, default=EMBEDDED, help="the server's model")
    parser.add_argument("--server", default="http://127.0.0.1:8000", help="its address")
    parser.add_argument("--weights-folder", type=Path, required=True, help="the server's")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    client = openai.OpenAI(base_url=f"{args.server}/v1", api_key="none")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
        processing_class=tokenizer,
        reward_funcs=right_sums,
        train_dataset=Dataset.from_list(questions(tokenizer, 64 * args.steps, 0)),
        rollout_func=ServerRollouts(client, args.weights_folder),
        args=GRPOConfig(
            output_dir=str(args.weights_folder.parent / "trl-output"),
            max_steps=args.steps,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=64,
            temperature=2.0,  # at which the model makes mistakes, so that there is something to learn
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
