"""--approximate-kv: every command that loads a model takes it, and hands it on."""

import pytest

from jaxshare import models
from jaxshare.serving.cli import main

COMMANDS = [
    ["generate", "m", "--prompt", "x"],
    ["workers", "m", "--problem", "x"],
    ["serve", "m", "--port", "0"],
    ["calibrate", "m"],
]


class LoadedError(Exception):
    """The model would be loaded now."""


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("given", [None, "int8", "fp8"])
def test_a_model_is_loaded_with_the_form_of_its_caches(monkeypatch, command, given):
    asked = []

    def load(name, *, approximate_kv, **_):
        asked.append((name, approximate_kv))
        raise LoadedError

    monkeypatch.setattr(models, "load", load)
    with pytest.raises(LoadedError):
        main.main([*command, *(["--approximate-kv", given] if given else [])])
    assert asked == [("m", given)]


def test_a_form_that_is_not_known_is_refused(capsys):
    with pytest.raises(SystemExit):
        main.main(["generate", "m", "--prompt", "x", "--approximate-kv", "int4"])
    assert "int8" in capsys.readouterr().err
