"""The checkpoints, the tokenizer and the tasks of scripts.bench.lm_eval, as files that both sides
read."""

import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxshare.models import EMBEDDED
from scripts.bench.lib import write_checkpoint
from scripts.bench.parts.decode.sides import MODEL

SHOTS = 8
TASK, WARM_UP = "gsm8k_shaped", "gsm8k_shaped_warm_up"
UNTIL = ("Question:", "</s>", "<|im_end|>")
"""The texts that end an answer, as in lm_eval's gsm8k."""
SPECIAL = ("<pad>", "<s>", "</s>")

_NAMES = ("Ada", "Ben", "Chandra", "Dilek", "Emeka", "Farah", "Goran", "Hana", "Iris", "Jonas")
_THINGS = ("apples", "books", "coins", "drawings", "eggs", "flowers", "marbles", "tickets")
_PLACES = ("at the market", "from a neighbour", "in the garden", "at school", "on the way home")


def word_problem(rng: random.Random) -> dict[str, str]:
    """A question of a few steps and its answer in words, in the form and about the length of those
    of GSM8K: fields "question" and "answer", whose last line is "#### N"."""
    name, other = rng.sample(_NAMES, 2)
    thing, begin = rng.choice(_THINGS), rng.randint(12, 90)
    question = [f"{name} has {begin} {thing}."]
    answer, have = [], begin
    for _ in range(rng.randint(2, 4)):
        number, place = rng.randint(2, 9), rng.choice(_PLACES)
        if rng.random() < 0.5 and have > number:
            question.append(
                f"{rng.choice(_PLACES).capitalize()}, {name} gives {number} of them to {other}, who "
                "is glad to have them."
            )
            answer.append(
                f"After giving {number} away, {name} has {have} - {number} = "
                f"<<{have}-{number}={have - number}>>{have - number} {thing}."
            )
            have -= number
        else:
            each = rng.randint(2, 6)
            more = number * each
            question.append(
                f"Then {name} finds {number} boxes {place}, and in every box there are {each} more "
                f"{thing}."
            )
            answer += [
                f"The boxes have {number} * {each} = <<{number}*{each}={more}>>{more} {thing}.",
                f"Now {name} has {have} + {more} = <<{have}+{more}={have + more}>>{have + more} "
                f"{thing}.",
            ]
            have += more
    question.append(f"How many {thing} does {name} have in the end?")
    return {"question": " ".join(question), "answer": "\n".join([*answer, f"#### {have}"])}


def problems(count: int, seed: int, data: Path | None) -> list[dict[str, str]]:
    """The problems of a run, examples first: of a file as GSM8K has it, or made up.

    Raises:
      ValueError: a line of the file that is no problem, or too few of them.
    """
    if data is None:
        rng = random.Random(seed)
        return [word_problem(rng) for _ in range(count)]
    found = []
    for number, line in enumerate(data.read_text(encoding="utf-8").splitlines(), 1):
        try:
            value = json.loads(line)
            found.append({name: str(value[name]) for name in ("question", "answer")})
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {data} is no problem with question and answer "
                f"({type(error).__name__}: {error}); give a file such as gsm8k_test.jsonl"
            ) from error
    if len(found) < count:
        raise ValueError(
            f"{data} has {len(found)} problems, but {count} are asked for with the examples; ask for "
            "fewer --requests"
        )
    return found[:count]


def write_tasks(
    folder: Path, lines: Sequence[Mapping[str, str]], *, new_tokens: int, warm_up: int
) -> None:
    """Writes the tasks: the first SHOTS problems are the examples before every question.

    Args:
      folder: gets `tasks`, whose data lm_eval looks for from `folder`.
      lines: of `problems`.
      new_tokens: of an answer, at most.
      warm_up: questions of the task that comes before.
    """
    tasks = folder / "tasks"
    tasks.mkdir()
    questions = lines[SHOTS:]
    for name, some in (
        ("examples", lines[:SHOTS]),
        (TASK, questions),
        (WARM_UP, questions[:warm_up]),
    ):
        text = "".join(json.dumps(line) + "\n" for line in some)
        (tasks / f"{name}.jsonl").write_text(text, encoding="utf-8")
    for name in (TASK, WARM_UP):
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"train": "tasks/examples.jsonl", "test": f"tasks/{name}.jsonl"}
            },
            "output_type": "generate_until",
            "training_split": "train",
            "test_split": "test",
            "fewshot_split": "train",
            "num_fewshot": SHOTS,
            "fewshot_config": {"sampler": "first_n"},
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_target": " {{answer}}",
            "generation_kwargs": {
                "until": list(UNTIL),
                "do_sample": False,
                "temperature": 0.0,
                "max_gen_toks": new_tokens,
            },
            "metric_list": [{"metric": "exact_match"}],
            "metadata": {"version": 1.0},
        }
        # JSON is YAML.
        (tasks / f"{name}.yaml").write_text(json.dumps(task, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path, texts: Sequence[str], vocabulary: int) -> None:
    """Writes a tokenizer of bytes and their pairs in these texts, as a Hugging Face folder has it.

    Tokens that the pairs do not fill up to `vocabulary` are words that no text is encoded to, so that
    a model of random weights has a text for each of its tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[*SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    content = json.loads(tokenizer.to_str())
    words = content["model"]["vocab"]
    if len(words) > vocabulary:
        raise ValueError(f"a vocabulary of {vocabulary} has no room for {len(words)} tokens")
    words |= {f"<word {i}>": i for i in range(len(words), vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_llama(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Writes the Llama of scripts.bench.decode, with a tokenizer for these texts."""
    folder.mkdir()
    write_checkpoint(folder, MODEL, seed)
    write_tokenizer(folder, texts, MODEL["vocab_size"])


def write_embedded(folder: Path, texts: Sequence[str], seed: int) -> None:
    """Copies the embedded model, which needs nothing of the texts or the seed."""
    shutil.copytree(EMBEDDED, folder)


MODELS: Mapping[str, Callable[[Path, Sequence[str], int], None]] = {
    "llama": write_llama,
    "embedded": write_embedded,
}
