"""/v1/weights: other weights of a server's model, from checkpoints in its folder."""

import asyncio
import functools
import json
import shutil
from types import SimpleNamespace

import numpy as np
import openai
import pytest
import safetensors.numpy

from examples import trl_grpo
from jaxshare import models
from jaxshare.serving import prompt_logprobs
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.stream import Detokenizer, Stream, StreamState, TokenChunk
from jaxshare.serving.http.errors import ApiError
from jaxshare.serving.http.generation.running import Running, SampledChoice
from tests.helpers import folder_of_first_layers
from tests.serving.http.replicas.test_front import ScriptedReplicas, fronted
from tests.serving.http.served import served

PATH = "/v1/weights"
ASKED = {"prompt": "1. 47 + 38", "seed": 4, "max_tokens": 12, "temperature": 1.0}


def written(folder, change) -> None:
    """Changes the tensors of a checkpoint."""
    file = folder / "model.safetensors"
    tensors = {name: change(name, x) for name, x in safetensors.numpy.load_file(file).items()}
    safetensors.numpy.save_file(tensors, file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints: another one, one with NaN, one of another model, and one that is none."""
    root, rng = tmp_path_factory.mktemp("weights"), np.random.default_rng(1)
    for name in ("first", "step-1", "nan", "wide"):
        folder_of_first_layers(root / name, 1)
    written(root / "step-1", lambda _, x: x + (0.02 * rng.normal(size=x.shape)).astype(x.dtype))
    norm = "model.norm.weight"
    written(root / "nan", lambda name, x: np.full_like(x, np.nan) if name == norm else x)
    config = json.loads((root / "wide" / "config.json").read_text())
    config["rms_norm_eps"] = 0.125
    (root / "wide" / "config.json").write_text(json.dumps(config))
    (root / "empty").mkdir()
    return root


def test_other_weights(folder):
    model = models.load(folder / "first", dtype="float32")
    with (
        Engine(model, max_rows=4) as engine,
        served(engine, weights_folder=str(folder)) as made,
    ):
        before = made.post("/v1/completions", ASKED).json()["choices"][0]
        assert "params_versions" not in before
        assert made.http.get(PATH).json() == {"object": "weights", "version": 0}
        for name, status, words in (
            ("nan", 400, "norm"),
            ("wide", 400, "are of another model: their config.json says something else"),
            ("empty", 400, "the weights 'empty' cannot be read"),
            ("step-2", 404, "the weights 'step-2' are not there"),
        ):
            answer = made.post(PATH, {"name": name})
            assert answer.status_code == status and words in answer.json()["error"]["message"]
            assert str(folder) not in answer.text
        for name in ("..", "../outside", "a/b", "", ".hidden", "x" * 200):
            assert made.post(PATH, {"name": name}).status_code in (400, 422)
        assert made.post(PATH, {"name": "step-1", "running": "wait"}).status_code in (400, 422)
        same = made.post("/v1/completions", ASKED).json()["choices"][0]
        assert same == before and made.http.get(PATH).json()["version"] == 0

        answer = made.post(PATH, {"name": "step-1", "running": "continue", "version": 7})
        assert answer.status_code == 200 and answer.json() == {"object": "weights", "version": 7}
        after = made.post("/v1/completions", ASKED).json()["choices"][0]
        assert after["params_versions"] == [[12, 7]] and after["text"] != before["text"]
        scored = made.post("/v1/score", {"prefix": "1. 47", "candidates": [" + 38", " - 3"]}).json()
        assert made.post(PATH, {"name": "step-1", "version": 7}).status_code == 400
        assert "jaxshare_params_version 7" in made.http.get("/metrics").text
        other = models.load(folder / "step-1", dtype="float32")
        assert made.service.model.fingerprint == other.fingerprint
    with Engine(other, max_rows=4) as engine, served(engine) as made:
        assert made.post("/v1/completions", ASKED).json()["choices"][0]["text"] == after["text"]
        body = {"prefix": "1. 47", "candidates": [" + 38", " - 3"]}
        assert made.post("/v1/score", body).json()["scores"] == scored["scores"]
        refused = made.post(PATH, {"name": "step-1"})
        assert (
            refused.status_code == 501 and "--weights-folder" in refused.json()["error"]["message"]
        )


async def _pieces(running):
    return [piece async for piece in running.pieces()]


def test_a_stream_whose_answer_restarts_ends_with_an_error():
    state = StreamState(Detokenizer(None, ()))
    stream = Stream(state, lambda: None)
    running = Running([SampledChoice(0, 0, stream)], lambda _: None)
    state.put(TokenChunk((1, 2), ""))
    assert state.next_chunk() == TokenChunk((1, 2), "")
    state.restart()
    state.put(TokenChunk((3,), ""))
    with pytest.raises(ApiError, match="the weights of the model have changed") as error:
        asyncio.run(_pieces(running))
    assert (error.value.status, error.value.code) == (409, "restarted")


class _Weights(ScriptedReplicas):
    """Replicas whose weights are exchanged by a script."""

    answers = ()

    async def ask_all(self, method, *args):
        assert method == "whole" and args[0].path == PATH
        self.asked.append((args[0].method, args[0].body))
        return [(name, status, json.dumps(body).encode()) for name, status, body in self.answers]


def test_all_replicas_take_them_and_those_that_fail_are_named():
    replicas = _Weights("a", "b")
    good = [(name, 200, {"object": "weights", "version": 3}) for name in "ab"]
    bad = ("a", 400, {"error": {"message": "norm/scale is NaN", "code": "invalid_value"}})
    with fronted(replicas) as (http, *_):
        replicas.answers = good
        told = http.get(PATH).json()
        assert told == {"object": "weights", "version": 3, "replicas": {"a": 3, "b": 3}}
        answer = http.post(PATH, json={"name": "step-1"})
        assert answer.status_code == 200 and answer.json() == told
        assert replicas.asked[-1][0] == "POST" and b"step-1" in replicas.asked[-1][1]
        replicas.answers = [bad, good[1]]
        answer = http.post(PATH, json={"name": "step-1"})
        message = "replica a: norm/scale is NaN; 1 of 2 replicas have the weights"
        assert answer.status_code == 400 and answer.json()["error"]["message"] == message


def test_a_trainer_of_trl_samples_and_hands_over_its_weights(folder, tmp_path):
    """The example's `rollout_func` with what it uses of a trainer; TRL is not imported."""
    model = models.load(folder / "first", dtype="float32")
    prompts = [*3 * ["1. 47 + 38"], "2. 3 * 4", "1. 47 + 38"]
    trainer = SimpleNamespace(
        args=SimpleNamespace(max_completion_length=12, temperature=1.0, seed=7),
        processing_class=lambda text, **_: {"input_ids": model.tokenizer.encode(text)},
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(
            is_main_process=True,
            process_index=0,
            wait_for_everyone=lambda: None,
            unwrap_model=lambda model: model,
        ),
        model=SimpleNamespace(
            save_pretrained=functools.partial(shutil.copytree, folder / "step-1")
        ),
    )
    with (
        Engine(model, max_rows=4) as engine,
        served(engine, weights_folder=str(tmp_path)) as made,
        openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client,
    ):
        rollouts = trl_grpo.ServerRollouts(client, tmp_path)
        found = []
        for step, version in ((0, 0), (0, 0), (1, 1)):
            trainer.state.global_step = step
            found.append(rollouts(prompts, trainer))
            assert made.http.get(PATH).json()["version"] == version
    first, again, other = found
    assert first == again != other and not [*tmp_path.iterdir()]
    assert first["prompt_ids"] == [model.tokenizer.encode(prompt) for prompt in prompts]
    assert len({*map(tuple, first["completion_ids"])}) == len(prompts), "samples differ in a group"
    for step, weights in ((first, "first"), (other, "step-1")):
        sampled_from = models.load(folder / weights, dtype="float32")
        for prompt, tokens, told in zip(*step.values(), strict=True):
            scores = prompt_logprobs(sampled_from, [*prompt, *tokens]).logprobs[-len(tokens) :]
            assert [each for (each,) in told] == pytest.approx(scores, abs=1e-3)
