"""Lines and jobs of `jaxshare batch` under grammars, on the embedded model."""

import json

import pytest

from jaxshare.serving.cli.main import main
from tests.helpers import folder_of_first_layers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(folder_of_first_layers(tmp_path_factory.mktemp("model") / "one", 1))


def test_lines_have_grammars_of_their_own_or_that_of_the_job_and_a_bad_one_is_named(
    model, tmp_path, capsys
):
    lines = [
        {"id": "own", "prompt": "Say", "grammar": {"choices": ["red", "green"]}},
        {"id": "bad", "prompt": "Say", "grammar": {"regex": "(a"}},
        {"id": "json", "prompt": "Say", "grammar": {"json_schema": {"type": "boolean"}}},
        {"id": "job", "prompt": "Say"},
    ]
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("\n".join(map(json.dumps, lines)))
    job = ["batch", model, "--input", str(given), "--output", str(out), "--choice", "blue"]
    assert main(job) == 3
    printed = capsys.readouterr().err
    assert (
        "line 2: has settings that cannot be obeyed: the regular expression does not compile"
        in printed
    )
    found = {line["id"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert found["own"]["text"] in ("red", "green") and found["json"]["text"] in ("true", "false")
    assert found["job"]["text"] == "blue" and {*found} == {"own", "json", "job"}
    assert {line["finish_reason"] for line in found.values()} == {"stop"}
    assert main([*job[:-1], "black", "--resume"]) == 1
    assert "began with --grammar" in capsys.readouterr().err
