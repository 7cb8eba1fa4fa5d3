"""Trials of a device: what is right is found to be, and what is wrong is named, with what would do."""

import dataclasses
import json

import numpy as np
import pytest

from jaxshare.attention import api
from jaxshare.models import EMBEDDED, ModelConfig, load
from jaxshare.serving.cli import main, trial
from jaxshare.serving.cli.trial import Trial, problem_of, trials
from jaxshare.serving.tuning import diagnosis
from tests.helpers import mostly_slow

CONFIG = ModelConfig.from_json(EMBEDDED)


@pytest.mark.slow
def test_what_this_device_computes_is_right():
    found = trials(load(EMBEDDED))
    assert [each.name for each in found] == [
        *("attention by cpu", "attention by xla"),
        *("a text of generate", "a session of workers"),
    ]
    assert all(each.is_right and each.error < 1e-5 for each in found)


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16", "float16"]))
def test_a_wrong_backend_is_found(monkeypatch, dtype):
    right = api.BACKENDS["xla"]
    attend = trial._AttentionTrial(CONFIG, np.dtype(dtype))
    assert attend.backends == ["cpu", "xla"]
    assert attend.error("xla")() <= trial._allowed(dtype)
    monkeypatch.setitem(api.BACKENDS, "xla", lambda *a, **more: right(*a, **more).at[1].mul(1.05))
    assert attend.error("xla")() > trial._allowed(dtype)


def test_each_way_to_be_wrong_is_named(monkeypatch):
    """A text and a session that another pass does not confirm, and a device that fails."""
    monkeypatch.setattr(diagnosis, "SERVING", ())
    monkeypatch.setattr(trial, "_of_a_text", lambda _: float("nan"))

    def fails(_):
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: at 0x7f\nand more")

    monkeypatch.setattr(trial, "_of_workers", fails)
    text, session = trials(load(EMBEDDED))
    assert not text.is_right and text.error == float("inf")
    assert not session.is_right and session.error is None
    assert problem_of(text).startswith(
        "a text of generate is off by inf, where 0.01 may be rounding:"
    )
    said = "a session of workers failed: RuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS: at 0x7f: do not"
    assert problem_of(session).startswith(said)


def test_the_command_says_what_is_wrong(monkeypatch, capsys):
    found = [Trial("attention by xla", 0.5, 0.02), Trial("a text of generate", 0.001, 0.01)]
    monkeypatch.setattr(trial, "trials", lambda model, config, dtype: found)
    assert main.main(["doctor", "--compute"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "computed WRONG: attention by xla (off by 0.5 of 0.02)" in said
    assert "right: a text of generate (off by 0.001 of 0.01)" in said
    assert "to mend: attention by xla is off by 0.5, where 0.02 may be rounding" in said
    assert main.main(["doctor", "--compute", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in told["trials"]] == [each.name for each in found]
    assert len(told["problems"]) == 1


def test_a_model_without_a_tokenizer_is_no_fault_of_the_device():
    with pytest.raises(ValueError, match="the model folder has no tokenizer"):
        trials(dataclasses.replace(load(EMBEDDED), tokenizer=None))
