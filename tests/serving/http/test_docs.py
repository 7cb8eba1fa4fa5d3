"""docs/server.md and docs/page.md name all options, endpoints and fields."""

import argparse
import re

import pytest
from pydantic import BaseModel

from jaxshare.serving.cli import serve
from jaxshare.serving.http.endpoints.batches import BatchFields
from jaxshare.serving.http.endpoints.chat import ChatFields
from jaxshare.serving.http.endpoints.completions import CompletionFields
from jaxshare.serving.http.endpoints.responses import ResponseFields
from jaxshare.serving.http.endpoints.tokens import DetokenizeFields, ScoreFields, TokenizeFields
from jaxshare.serving.http.endpoints.trees import TreeFields
from jaxshare.serving.http.endpoints.weights import WeightsFields
from jaxshare.serving.http.endpoints.workers import SayFields, SessionFields, WorkerFields
from tests.paths import ROOT
from tests.serving.http.served import ScriptedEngine, served

PAGE = "".join(
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("server.md", "page.md")
)
BODIES = [
    ChatFields,
    CompletionFields,
    ResponseFields,
    TokenizeFields,
    DetokenizeFields,
    ScoreFields,
    TreeFields,
]
OF_SESSIONS = [SessionFields, SayFields, WorkerFields, BatchFields, WeightsFields]


@pytest.mark.parametrize("body", [*BODIES, *OF_SESSIONS])
def test_every_field_is_described(body: type[BaseModel]):
    assert [name for name in body.model_fields if f"`{name}`" not in PAGE] == []


def test_every_option_is_described():
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    options = [name for action in parser._actions for name in action.option_strings]
    assert [name for name in options if f"`{name}`" not in PAGE and len(name) > 2] == ["--help"]


def test_every_endpoint_is_described():
    with served(ScriptedEngine()) as made:
        paths = made.http.get("/openapi.json").json()["paths"]
    told = set(re.findall(r"(?:GET|POST|DELETE) (/[\w/{}.]*)", PAGE))
    found = {
        re.sub(r":path|\{(\w+)\}", lambda m: f"{{{m[1]}}}" if m[1] else "", path) for path in paths
    }
    assert found <= told | {"/v1/responses/{identity}"} and told <= found | {"/openapi.json", "/"}
