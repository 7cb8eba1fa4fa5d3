"""Makes a small checkpoint, and what lm_eval's backend `hf` answers with it: the other side
of tests/serving/evaluation/test_lm_eval.py and of scripts/lm_eval/compare.py.

Runs in an environment of its own with torch, transformers 5 and lm_eval; JAX is not needed there.
Into the folder are written:

    model           the checkpoint with its tokenizer, as save_pretrained writes it
    tasks           a copy of the tasks
    expected.json   every request with its result, the metrics of each task, and the seconds
"""

import argparse
import json
import random
import shutil
from pathlib import Path

import torch
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from scripts.lm_eval.recorded import evaluate

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures" / "lm_eval"
CONTEXT, VOCABULARY, SEED = 256, 320, 4
STEPS, BATCH, WIDTH = 300, 8, 128
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and their pairs, which puts <s> before texts as that of Llama does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=CONTEXT
    )
    whole.chat_template = TEMPLATE
    return whole


def lessons(tasks: Path) -> list[str]:
    """The questions of the tasks with their answers."""
    lines = [
        json.loads(line)
        for name in ("choices_examples", "choices")
        for line in (tasks / f"{name}.jsonl").read_text().splitlines()
    ]
    return [
        f"Question: {line['question']}\nAnswer: {line['choices'][line['answer']]}\n\n"
        for line in lines
    ]


def make_checkpoint(folder: Path, tasks: Path) -> None:
    """Trains a model until it knows most answers, so that some are the likeliest, and writes it."""
    texts = lessons(tasks)
    tokenizer = tokenizer_of([path.read_text() for path in sorted(tasks.glob("*.jsonl"))])
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(SEED)
    model, rng = AutoModelForCausalLM.from_config(config), random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        batch = [
            tokenizer.encode("".join(rng.sample(texts, len(texts))))[:WIDTH] for _ in range(BATCH)
        ]
        tokens = torch.tensor(batch)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FIXTURES)
    out = parser.parse_args().out.resolve()
    torch.set_num_threads(1)  # one order of summation everywhere
    if out != FIXTURES:
        shutil.copytree(FIXTURES / "tasks", out / "tasks", dirs_exist_ok=True)
    shutil.rmtree(out / "model", ignore_errors=True)
    make_checkpoint(out / "model", out / "tasks")
    model = HFLM(str(out / "model"), dtype="float32", device="cpu", batch_size=1)
    expected = evaluate(model, out)
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    print(f"{len(expected['requests'])} requests in {expected['seconds']:.1f} s")


if __name__ == "__main__":
    main()
