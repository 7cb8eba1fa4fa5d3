"""Adapters over HTTP: requests name one as their model, and the server loads those of its folder."""

import dataclasses

import pytest

from jaxshare import models
from jaxshare.serving.engine import Engine
from tests.helpers import one_layer
from tests.models.test_adapters import random_adapter
from tests.serving.http.served import served

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ASKED = {"prompt": "1. 47 + 38", "seed": 4, "max_tokens": 12, "temperature": 0.0}
SCORED = {"prefix": "1. 47", "candidates": [" + 38", " - 3"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two adapters, and one for another base."""
    root, config = tmp_path_factory.mktemp("adapters"), one_layer().config
    for seed, name in enumerate(("first", "second")):
        models.save_adapter(root / name, random_adapter(config, 2, seed), config)
    wide = dataclasses.replace(config, hidden_size=2 * config.hidden_size)
    models.save_adapter(root / "wide", random_adapter(wide, 2), wide, base="another")
    (root / "empty").mkdir()
    return root


def merged(folder):
    """The model with an adapter merged into it."""
    base = one_layer()
    params = models.merged(base.params, models.load_adapter(folder, base.config), base.config)
    return dataclasses.replace(base, params=params)


def ask(made, name):
    text = made.post("/v1/completions", ASKED | {"model": name}).json()
    scores = made.post("/v1/score", SCORED | {"model": name}).json()["scores"]
    assert text["model"] == name
    return text["choices"][0]["text"], [score["logprob"] for score in scores]


def names(made):
    return {each["id"]: each.get("parent") for each in made.http.get("/v1/models").json()["data"]}


@pytest.mark.slow
def test_requests_name_adapters_which_are_loaded_and_unloaded(folder):
    model = one_layer().with_adapters({"first": folder / "first"}, max_adapters=2)
    with (
        Engine(model, max_rows=4) as engine,
        served(engine, adapters_folder=str(folder)) as made,
    ):
        assert names(made) == {"tiny": None, "first": "tiny"}
        found = {name: ask(made, name) for name in ("tiny", "first")}
        missing = made.post("/v1/completions", ASKED | {"model": "second"})
        assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
        loaded = made.post(LOAD, {"lora_name": "two", "lora_path": "second"})
        assert loaded.json() == {"object": "adapters", "adapters": ["first", "two"]}
        found["two"] = ask(made, "two")
        again = made.post(LOAD, {"lora_name": "two", "lora_path": "first"})
        assert again.status_code == 400 and "set load_inplace" in again.json()["error"]["message"]
        made.post(LOAD, {"lora_name": "two", "lora_path": "first", "load_inplace": True})
        assert ask(made, "two") == found["first"]
        assert made.http.get("/v1/models/two").json()["parent"] == "tiny"
        full = made.post(LOAD, {"lora_name": "three", "lora_path": "first"})
        assert full.status_code == 400 and "all 2 places" in full.json()["error"]["message"]
        assert "--max-adapters" in full.json()["error"]["message"]
        assert made.post(UNLOAD, {"lora_name": "first"}).json()["adapters"] == ["two"]
        assert made.post(UNLOAD, {"lora_name": "first"}).status_code == 404
        assert made.post("/v1/completions", ASKED | {"model": "first"}).status_code == 404
    for name, own in (
        ("tiny", one_layer()),
        ("first", merged(folder / "first")),
        ("two", merged(folder / "second")),
    ):
        with Engine(own, max_rows=4) as engine, served(engine) as made:
            text, scores = ask(made, "tiny")
            assert text == found[name][0] and scores == pytest.approx(found[name][1], abs=1e-3)


def test_what_is_refused(folder):
    model = one_layer().with_adapters(max_adapters=1)
    with (
        Engine(model, max_rows=4) as engine,
        served(engine, adapters_folder=str(folder)) as made,
    ):
        for path, status, words in (
            ("wide", 400, "it is an adapter for another base (another)"),
            ("empty", 400, "has no adapter_config.json"),
            ("absent", 404, "the adapter 'absent' is not there"),
        ):
            answer = made.post(LOAD, {"lora_name": "x", "lora_path": path})
            assert answer.status_code == status and words in answer.json()["error"]["message"]
            assert str(folder) not in answer.text
        for path in ("..", "../outside", "a/b", "", ".hidden", "x" * 200, str(folder / "first")):
            answer = made.post(LOAD, {"lora_name": "x", "lora_path": path})
            assert answer.status_code in (400, 422)
        taken = made.post(LOAD, {"lora_name": "tiny", "lora_path": "first"})
        assert taken.status_code == 400 and "is the name of the model" in taken.text
        assert names(made) == {"tiny": None}
    with Engine(one_layer(), max_rows=4) as engine, served(engine) as made:
        for path, body in ((LOAD, {"lora_path": "first"}), (UNLOAD, {})):
            refused = made.post(path, {"lora_name": "x", **body})
            assert refused.status_code == 501 and "--adapters-folder" in refused.text
