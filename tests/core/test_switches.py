"""Environment variables that turn something off."""

import io

import pytest

from jaxshare import cpu
from jaxshare.models.safetensors_io import is_checked
from jaxshare.progress import Display
from jaxshare.switches import is_on


@pytest.mark.parametrize(
    ("value", "on"),
    [(each, True) for each in ("on", "1", "True", "")]
    + [(each, False) for each in ("off", "OFF", "0", "false")],
)
def test_a_variable_is_on_or_off(monkeypatch, value, on):
    monkeypatch.setenv("JAXSHARE_SOMETHING", value)
    assert is_on("JAXSHARE_SOMETHING") is on


def test_what_is_not_set_is_on(monkeypatch):
    monkeypatch.delenv("JAXSHARE_SOMETHING", raising=False)
    assert is_on("JAXSHARE_SOMETHING")


@pytest.mark.parametrize("value", ["maybe", "of", "2", " off"])
@pytest.mark.parametrize(
    ("variable", "ask"),
    [
        ("JAXSHARE_CPU_KERNELS", cpu.available.__wrapped__),
        ("JAXSHARE_CHECK_WEIGHTS", is_checked),
        ("JAXSHARE_PROGRESS", lambda: Display(io.StringIO).begin("work")),
    ],
)
def test_anything_else_is_refused_by_name(monkeypatch, variable, ask, value):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable} is '{value}', but it must be on or off$"):
        ask()
