"""The benchmark of the adapter of lm_eval: its files, its arithmetic, and a run in which a stand-in
has what both sides use of lm_eval."""

import json
import random
import re
import sys

import pytest
from transformers import AutoTokenizer

from jaxshare.models.tokenizer import of_folder
from scripts.bench import lm_eval as bench
from scripts.bench.parts.lm_eval import files


def test_made_up_problems_come_to_their_answers():
    rng, lengths = random.Random(0), set()
    for _ in range(200):
        each = files.word_problem(rng)
        steps = re.findall(r"<<([^=]+)=(\d+)>>", each["answer"])
        assert all(eval(sum_) == int(value) for sum_, value in steps)
        *_, last = each["answer"].splitlines()
        assert last == f"#### {steps[-1][1]}"
        begin = int(re.search(r"has (\d+)", each["question"])[1])
        gifts = [int(n) for n in re.findall(r"gives (\d+) of them", each["question"])]
        boxes = re.findall(r"finds (\d+) boxes .*? are (\d+) more", each["question"])
        assert begin - sum(gifts) + sum(int(a) * int(b) for a, b in boxes) == int(steps[-1][1])
        lengths.add(len(each["question"].split()))
    assert min(lengths) < 50 and max(lengths) > 70


def test_problems_of_a_file_are_read_and_a_wrong_line_is_named(tmp_path):
    file = tmp_path / "gsm8k.jsonl"
    lines = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(10)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert files.problems(9, 0, file) == lines[:9]
    assert (
        files.problems(3, 0, None) == files.problems(5, 0, None)[:3] != files.problems(3, 1, None)
    )
    with pytest.raises(ValueError, match="has 10 problems, but 11"):
        files.problems(11, 0, file)
    file.write_text(f'{json.dumps(lines[0])}\n{{"question": "What?"}}\n')
    with pytest.raises(ValueError, match=r"line 2 of .* is no problem .*answer"):
        files.problems(1, 0, file)


def test_the_tokenizer_has_a_text_for_every_token_and_both_read_it(tmp_path):
    texts = ["Question: Ada has 4 eggs, ünïcode too.\nAnswer: 4\n", "How many eggs?"]
    files.write_tokenizer(tmp_path, texts, 600)
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), of_folder(tmp_path)
    assert len(theirs) == 600
    for text in (*texts, "Other words: 17 ☃"):
        tokens = theirs.encode(text)
        assert ours.encode(text) == tokens and theirs.decode(tokens) == text
        assert not any(theirs.decode([token]).startswith("<word") for token in tokens)
    words = [theirs.decode([token]) for token in range(600)]
    assert words[:3] == ["<pad>", "<s>", "</s>"] and words[599] == "<word 599>"
    assert ours.decode([*range(600)], skip_special_tokens=True) == theirs.decode(
        [*range(600)], skip_special_tokens=True
    )
    with pytest.raises(ValueError, match="a vocabulary of 100 has no room"):
        files.write_tokenizer(tmp_path, texts, 100)


def test_texts_are_compared_one_by_one_for_the_same_contexts_alone():
    ours = {"contexts": ["a", "b", "c"], "texts": ["one", "two and", ""]}
    theirs = {"contexts": ["a", "b", "c"], "texts": ["one", "two or", "x"]}
    assert bench.compare(ours, theirs) == {
        "compared": 3,
        "equal": 1,
        "differences": [{"request": 1, "characters": 4}, {"request": 2, "characters": 0}],
    }
    with pytest.raises(RuntimeError, match="different requests"):
        bench.compare(ours, {**theirs, "contexts": ["a", "b", "d"]})
    assert bench.common(["abc", "abd", "ab"]) == 2 and bench.common(["", "a"]) == 0


def test_the_fastest_way_of_hf_is_chosen_and_first_runs_are_not_counted():
    class Side:
        """A worker whose seconds follow from the batch, and whose first run takes long."""

        def __init__(self, name, asked):
            self.name, self.asked = name, asked

        def ask(self, do, *, task, batch):
            self.asked.append((self.name, batch))
            known = {("passive", 1): 9.0, ("passive", 4): 3.0, ("default", 1): 2.0}
            is_first = self.asked.count((self.name, batch)) == 1 and batch == 1
            return {"seconds": 100.0 if is_first else known.get((self.name, batch), 5.0)}

    asked = []
    workers = {name: Side(name, asked) for name in ("passive", "default")}
    waiting, batch, tried = bench.fastest(workers, (1, 4))
    assert (waiting, batch) == ("default", 1) and len(asked) == 6
    assert tried == {
        "passive, batch 1": 9.0,
        "passive, batch 4": 3.0,
        "default, batch 1": 2.0,
        "default, batch 4": 5.0,
    }


def test_goals_are_of_the_median_and_of_texts_in_float32():
    result = {
        "model": "llama",
        "faster": {"median": 3.5, "lowest": 2.0, "highest": 9.0},
        "texts": {"compared": 20, "equal": 18},
    }
    found = [(goal.measured, goal.met) for goal in bench.goals([result], "float32")]
    assert found == [(3.5, True), (0.9, False)]
    assert [goal.measured for goal in bench.goals([result], "bfloat16")] == [3.5]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "gpt"], ["--models has 'gpt'", "llama, embedded"]),
        (["--requests", "0"], ["--requests is 0"]),
        (["--new-tokens", "0"], ["--new-tokens is 0"]),
        (["--batches", "0"], ["--batches is '0'"]),
        (["--data", "no.jsonl"], ["--data is no.jsonl"]),
        (["--output", "no/such/folder/x.json"], ["--output"]),
        (["--hf-python", "no-such-python"], ["--hf-python is no-such-python"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--python", sys.executable, "--hf-python", sys.executable, *arguments])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    assert all(word in said for word in words), said


LM_EVAL = {
    "__init__.py": """
import json
from pathlib import Path


class Request:
    def __init__(self, *args):
        self.args = args


def simple_evaluate(model, tasks, task_manager, **options):
    (name,) = tasks
    task = json.loads((task_manager.folder / f"{name}.yaml").read_text())

    def rows(split):
        file = task["dataset_kwargs"]["data_files"][split]
        return [json.loads(line) for line in Path(file).read_text().splitlines()]

    shots = [
        f"Question: {row['question']}\\nAnswer: {row['answer']}\\n\\n"
        for row in rows("train")[: task["num_fewshot"]]
    ]
    requests = [
        Request("".join(shots) + f"Question: {row['question']}\\nAnswer:", task["generation_kwargs"])
        for row in rows("test")
    ]
    texts = model.generate_until(requests)
    assert len(texts) == len(requests)
    return {"results": {name: {}}}
""",
    "tasks.py": """
from pathlib import Path


class TaskManager:
    def __init__(self, include_path, include_defaults):
        self.folder = Path(include_path)
""",
    "api/__init__.py": "",
    "api/model.py": """
class Hook:
    def add_partial(self, *args):
        pass


class LM:
    def __init__(self):
        self.cache_hook = Hook()
""",
    "api/registry.py": """
def register_model(name):
    return lambda found: found
""",
    "models/__init__.py": "",
    "models/huggingface.py": """
import sys
import types

from jaxshare.serving.evaluation.lm_eval.model import JaxshareLM


class HFLM(JaxshareLM):
    def __init__(self, folder, dtype, device, batch_size):
        super().__init__(folder, dtype=dtype, max_rows=2)
        parameter = types.SimpleNamespace(numel=lambda: 1)
        self.model = types.SimpleNamespace(parameters=lambda: [parameter])

    def generate_until(self, requests):
        assert self.batch_size_per_gpu in (1, 4)
        return super().generate_until(requests)
""",
}


@pytest.mark.slow
def test_both_sides_are_given_one_prefix_and_compared(tmp_path, monkeypatch, capsys):
    for name, text in LM_EVAL.items():
        file = tmp_path / "stand-in" / "lm_eval" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "stand-in" / "torch.py").write_text("def set_num_threads(count): pass\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))
    output = tmp_path / "out.json"
    pythons = ["--python", sys.executable, "--hf-python", sys.executable]
    small = ["--quick", "--requests", "3", "--new-tokens", "5"]
    assert bench.main([*pythons, *small, "--json", "--output", str(output)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(output.read_text())
    [result] = report["results"]
    assert result["model"] == "embedded" and result["requests"] == 3
    assert result["texts"] == {"compared": 3, "equal": 3, "differences": []}
    assert {side: len(times) for side, times in result["seconds"].items()} == {
        "jaxshare": 1,
        "hf": 1,
    }
    # Eight examples and "Question: " are common to all requests.
    lines = files.problems(8 + 3, 0, None)
    shots = "".join(f"Question: {x['question']}\nAnswer: {x['answer']}\n\n" for x in lines[:8])
    assert len(shots) + 10 <= result["prefix_characters"] < result["context_characters"]
    assert len(result["hf"]["tried"]) == 4
    assert [goal["name"].partition(":")[0] for goal in report["goals"]] == ["embedded"] * 2


@pytest.mark.slow
def test_a_side_without_lm_eval_is_named(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "stand-in" / "lm_eval"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('no lm_eval here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand-in"))
    pythons = ["--python", sys.executable, "--hf-python", sys.executable]
    assert bench.main([*pythons, "--quick"]) == 1
    said = capsys.readouterr().err
    assert "no lm_eval here" in said and "--hf-python" in said
