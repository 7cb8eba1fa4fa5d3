"""Settings of the server and of its command, refused before a model is loaded."""

import dataclasses
import socket

import pytest

from jaxshare import Sampler, models
from jaxshare.serving.cli import main
from jaxshare.serving.http import server as server_module
from jaxshare.serving.http.generation.fields import SamplingFields
from jaxshare.serving.http.generation.sampling import sampler_of, stops_of
from jaxshare.serving.http.settings import ServerSettings, is_loopback, read_keys
from tests.helpers import one_layer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model_names": ()}, "served_model_name is empty"),
        ({"model_names": ("a b",)}, "served_model_name is 'a b'"),
        ({"api_keys": ("a b",)}, "an API key has a character"),
        ({"api_keys": ("ä",)}, "an API key has a character"),
        ({"api_keys": ("",)}, "api_key is"),
        ({"max_body_bytes": 10}, "max_body_bytes is 10"),
        ({"max_choices": 0}, "max_choices is 0"),
        ({"grace": -1}, "grace is -1"),
        ({"request_seconds": float("nan")}, "request_seconds is nan"),
        ({"tool_format": "odd"}, "the format is 'odd'"),
    ],
)
def test_settings_out_of_range_are_refused(given, words):
    with pytest.raises(ValueError, match=words) as error:
        ServerSettings(**{"model_names": ("m",), **given})
    assert "ä" not in str(error.value)


def test_keys_are_in_no_text_of_the_settings():
    assert "secret" not in repr(ServerSettings(("m",), ("secret",)))


def test_keys_come_from_options_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    assert read_keys(["zero"], str(file), "three") == ("zero", "three", "one", "two")
    assert read_keys(None, None, None) == read_keys(None, None, "") == ()


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff"])
def test_a_file_without_keys_is_no_open_door(tmp_path, content):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match="--api-key-file"):
        read_keys(None, str(file), None)


def test_loopback_addresses_are_known():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_fields_that_are_left_out_are_the_default_s():
    default = Sampler(temperature=0.7, top_k=5, bias={3: 1.0}, stop_token_ids=(4,))
    assert sampler_of(SamplingFields(), default, None, None) == default
    changed = sampler_of(
        SamplingFields(
            temperature=0, top_k=-1, logit_bias={"5": 2}, stop_token_ids=[6], min_tokens=2
        ),
        default,
        None,
        None,
    )
    assert changed == dataclasses.replace(
        default,
        temperature=0.0,
        top_k=0,
        bias={3: 1.0, 5: 2.0},
        stop_token_ids=(4, 6),
        min_tokens=2,
    )


def test_stop_texts_are_one_or_several():
    assert stops_of(SamplingFields()) is None
    assert stops_of(SamplingFields(stop="a")) == ["a"]
    assert stops_of(SamplingFields(stop=["a", "b"])) == ["a", "b"]
    assert stops_of(SamplingFields(stop=[])) == []


# The command.


@pytest.fixture
def unloaded(monkeypatch):
    """A command that fails where it would load a model."""

    def load(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr(models, "load", load)
    monkeypatch.delenv("JAXSHARE_API_KEY", raising=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--port", "-1"], "--port is -1"),
        (["--data", "2"], "--data is 2"),
        (["--grace", "-1"], "grace is -1"),
        (["--kv-bytes", "much"], "--kv-bytes is 'much'"),
        (["--max-body", "much"], "--max-body is 'much'"),
        (["--host", "no such host"], "--host no such host"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 is no address of this machine"),
        (["--api-key", "a b"], "an API key"),
        (["--tool-format", "odd"], "the format is 'odd'"),
        (["--allow-origin", "example"], "--allow-origin is 'example'"),
        (["--allow-origin", "https://example.org/page"], "--allow-origin is"),
        (["--allowed-host", "https://example.org"], "--allowed-host is"),
        (["--sessions-folder", "/proc/saves"], "--sessions-folder /proc/saves cannot be written"),
    ],
)
def test_options_are_refused_in_a_sentence(unloaded, capsys, options, words):
    assert main.main(["serve", "embedded", "--port", "0", *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith("jaxshare: error: ") and words in error and error.count("\n") == 1


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(unloaded, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main.main(["serve", "embedded", "--port", str(taken.getsockname()[1])]) == 1
    assert "cannot be listened at" in capsys.readouterr().err


def test_packages_that_are_missing_are_named(unloaded, capsys, monkeypatch):
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else found(name)
    )
    assert main.main(["serve", "embedded"]) == 1
    assert "pip install 'jaxshare[serve]'" in capsys.readouterr().err
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else found(name)
    )
    assert main.main(["serve", "embedded", "--ray"]) == 1
    assert "pip install 'jaxshare[ray-serve]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [("127.0.0.1", "", False), ("0.0.0.0", "", True), ("0.0.0.0", "key", False)],
)
def test_an_open_door_is_warned_of(monkeypatch, capsys, host, key, warned):
    ended = []
    monkeypatch.setattr(models, "load", lambda *_, **__: one_layer())
    monkeypatch.setenv("JAXSHARE_API_KEY", key)
    monkeypatch.setattr(
        server_module.DrainingServer,
        "serve_until_told",
        lambda server, warm_up: ended.append((server.service.settings, warm_up)),
    )
    options = ["--host", host, "--port", "0", "--served-model-name", "m", "--max-model-len", "64"]
    assert main.main(["serve", "embedded", *options]) == 0
    ((settings, warm_up),) = ended
    assert settings.model_names == ("m",) and warm_up
    assert settings.api_keys == ((key,) if key else ())
    told = capsys.readouterr()
    assert ("without an API key" in told.err) is warned
    assert not key or key not in told.err + told.out
