"""No value of any field makes the server fail: it serves it or says what is wrong."""

import json

import pytest

from tests.helpers import mostly_slow
from tests.serving.http.served import ScriptedEngine, served, until
from tests.serving.http.test_docs import BODIES

PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    *("/tokenize", "/detokenize", "/v1/score", "/v1/trees"),
]
PLAIN = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "a", "max_tokens": 3},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/trees": {"name": "a", "nodes": []},
    "/v1/score": {"prefix": "a", "candidates": ["b"]},
}
DEEP = json.loads("[" * 400 + "]" * 400)
VALUES = [
    *(None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.5, 1e308, 5e-324),
    *("", "a", "ä\x00🎉", "\ud800", "auto", "none", "json_object", "a" * 300),
    *([], [[]], [None], ["a"], [0], ["", 0], [{}], {}, {"a": None}, {"type": "function"}),
    *({"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}, {"json": {"a": "\ud800"}}),
    *([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/none"}}}], DEEP),
    *({"5": 1}, {"5": -(10**400)}, {"999999999": 1}, {"-5": 1}),
]


@pytest.fixture(scope="module")
def tiny():
    with served(ScriptedEngine(answers=["<think>Hm.</think> Yes."])) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body"), mostly_slow([*zip(PATHS, BODIES, strict=True)], 1, several=True), ids=PATHS
)
def test_every_value_is_served_or_refused(tiny, path, body):
    if path == "/v1/score":  # the engine of this test has no model that scores
        body_fields = [name for name in body.model_fields if name not in ("prefix", "candidates")]
        plain = {"candidates": []}
    else:
        body_fields, plain = [*body.model_fields], PLAIN[path]
    for streamed in [False, True] if "stream" in body_fields else [False]:
        for name in body_fields:
            for value in VALUES:
                sent = {**plain, **({"stream": True} if streamed else {}), name: value}
                content = json.dumps(sent).encode()
                answer = tiny.http.post(
                    path, content=content, headers={"Content-Type": "application/json"}
                )
                assert answer.status_code in (200, 400, 404), (name, value, answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"], (name, value)
                assert answer.status_code != 404 or name in ("model", "previous_response_id")
    until(lambda: tiny.service.num_running == 0)
