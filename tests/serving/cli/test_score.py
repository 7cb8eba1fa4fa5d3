"""`jaxshare score`: what it prints, and one clear sentence for each mistake."""

import functools
import io
import json

import jax
import numpy as np
import pytest

from jaxshare.serving.cli import main
from tests.helpers import folder_of_first_layers, one_layer, padded

PREFIX, CANDIDATES = "Solve: 47", [" + 38", " - 9 is", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(folder_of_first_layers(tmp_path_factory.mktemp("shallow") / "model", 1))


@pytest.fixture
def file(tmp_path) -> str:
    path = tmp_path / "candidates.txt"
    path.write_text("\n".join([*CANDIDATES, ""]))
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main.main(["score", *arguments])
    return code, *capsys.readouterr()


@functools.cache
def causal():
    return jax.jit(functools.partial(one_layer().module.apply, method="causal"))


def expected(prefix: str, candidate: str) -> list[float]:
    """The log-probabilities of a candidate's tokens by plain attention over the whole text."""
    model = one_layer()
    tokens, start = model.tokenizer.encode(prefix + candidate), len(model.tokenizer.encode(prefix))
    wide = np.asarray(causal()(model.params, padded(tokens, [64])), np.float64)[0]
    return [
        wide[i - 1, tokens[i]] - np.log(np.exp(wide[i - 1]).sum())
        for i in range(max(1, start), len(tokens))
    ]


@pytest.mark.slow
def test_json_has_the_scores_of_each_line(capsys, folder, file):
    given = "--prefix", PREFIX, "--candidates", file, "--top-logprobs", "2", "--json"
    code, out, _ = run(capsys, folder, *given)
    assert code == 0
    scores = json.loads(out)["scores"]
    assert [each["text"] for each in scores] == CANDIDATES
    for each in scores:
        logprobs = expected(PREFIX, each["text"])
        np.testing.assert_allclose(each["logprobs"], logprobs, atol=1e-4)
        assert each["logprob"] == pytest.approx(sum(logprobs), abs=1e-4)
        assert [len(top) for top in each["top_logprobs"]] == [2] * len(each["tokens"])


def test_a_table_has_a_line_for_each_candidate(capsys, folder, file, tmp_path):
    prefix = tmp_path / "prefix.txt"
    prefix.write_text(PREFIX)
    code, out, _ = run(capsys, folder, "--prefix-file", str(prefix), "--candidates", file)
    assert code == 0
    _, *lines = out.splitlines()
    assert [float(line.split()[0]) for line in lines] == [
        pytest.approx(sum(expected(PREFIX, text)), abs=1e-3) for text in CANDIDATES
    ]
    assert [line.endswith(text) for line, text in zip(lines, CANDIDATES, strict=True)] == [True] * 3


def test_without_a_prefix_candidates_are_whole_texts(capsys, folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Solve: 47"))
    code, out, _ = run(capsys, folder, "--candidates", "-", "--json")
    (only,) = json.loads(out)["scores"]
    assert code == 0 and only["logprobs"][0] is None
    np.testing.assert_allclose(only["logprobs"][1:], expected("", "Solve: 47"), atol=1e-4)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("a\n\nb\n", (), "line 2 of {path} is empty; take it out: each line is a candidate"),
        ("", (), "the list of candidates is empty; give at least one word"),
        (
            "a",
            ("--top-logprobs", "3"),
            "--top-logprobs needs --json, whose object has them; the table has none",
        ),
        ("a", ("--top-logprobs", "21"), "--top-logprobs is 21; it must be 0 to 20"),
    ],
)
def test_mistakes_are_one_sentence(content, options, message, capsys, folder, tmp_path):
    path = tmp_path / "candidates.txt"
    path.write_text(content)
    code, out, err = run(capsys, folder, "--prefix", "x", "--candidates", str(path), *options)
    assert (code, out) == (1, "")
    assert err.splitlines()[-1] == f"jaxshare: error: {message.format(path=path)}"
