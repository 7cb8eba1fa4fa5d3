"""`jaxshare doctor`: what it finds is what Python and JAX say, and each fault is named with what
would do."""

import dataclasses
import importlib.metadata
import json

import jax.numpy as jnp
import pytest

from jaxshare.models import EMBEDDED, ModelConfig
from jaxshare.pallas.device import H200, assume_device
from jaxshare.serving.cli import main
from jaxshare.serving.tuning import diagnosis
from jaxshare.serving.tuning.diagnosis import Package, diagnose

EMBEDDED_CONFIG = ModelConfig.from_json(EMBEDDED)


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = main.main(("doctor", *arguments))
    return code, capsys.readouterr().out


def test_a_sound_installation(capsys):
    code, out = run(capsys, "--json", "--model", "embedded")
    found = json.loads(out)
    assert (code, found["problems"]) == (0, [])
    assert found["backend"] == "cpu" and found["preferred"] == ["cpu", "xla"]
    versions = {package["name"]: package["version"] for package in found["packages"]}
    assert versions["jax"] == importlib.metadata.version("jax")
    assert all(versions.values())
    assert [device["platform"] for device in found["devices"]] == ["cpu"]
    reasons = {check["name"]: check["reason"] for check in found["backends"]}
    assert "NVIDIA" in reasons["mosaic_gpu"] and "NVIDIA" in reasons["triton"]
    assert reasons["cpu"] is reasons["xla"] is None
    assert found["shape"] == "4 heads, 2 kv heads, head dim 32, float32"


def test_the_text_has_what_the_json_has(capsys):
    code, out = run(capsys)
    assert code == 0 and out.rstrip().endswith("nothing is to be mended")
    assert f"jax {importlib.metadata.version('jax')}" in " ".join(out.split())
    assert "attention         cpu (32 heads, 8 kv heads, head dim 128, bfloat16)" in out
    assert "not triton: it runs on NVIDIA GPUs" in out
    assert max(map(len, out.splitlines())) <= 100 or "/" in out


def test_a_gpu_takes_the_first_backend_that_serves_the_model():
    with assume_device(H200):
        assert diagnose().backend == "mosaic_gpu"
        found = diagnose(dataclasses.replace(EMBEDDED_CONFIG, head_dim=36), jnp.bfloat16)
        assert found.backend == "xla"
        assert diagnose(dtype=jnp.float32).backend == "xla"
    reasons = {check.name: check.reason for check in found.backends}
    assert "36" in (reasons["mosaic_gpu"] or "") and "36" in (reasons["triton"] or "")


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.2", "<3,>=2.2", True),
        ("2.1.9", "<3,>=2.2", False),
        ("3.0", "<3,>=2.2", False),
        ("2.10.0", "<3,>=2.2", True),
        ("2.9rc1", "<3,>=2.2", True),
        (None, "<3,>=2.2", False),
        ("0.1", "", True),
    ],
)
def test_versions_are_compared_as_the_index_does(version, wanted, fits):
    assert Package("x", version, wanted).fits is fits


def test_a_package_that_is_missing_or_old_is_named(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "flax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "jinja2" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, out = run(capsys)
    text = " ".join(out.split())
    assert code == 1
    assert "flax is missing (<0.13,>=0.12.7)" in text and "jinja2 0.0.1 (<4,>=3.1)" in text
    assert "pip install --upgrade jaxshare" in text


def test_a_missing_extra_is_no_fault_but_is_named(monkeypatch, capsys):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "fastapi":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    code, out = run(capsys)
    assert code == 0 and "the HTTP server: no: pip install 'jaxshare[serve]'" in out


def test_cuda_is_more_than_jax(capsys):
    """JAX itself is installed, its plugin for GPUs is not."""
    assert "NVIDIA GPUs: no: pip install 'jaxshare[cuda13]'" in run(capsys)[1]


def test_faults_of_the_machine(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(diagnosis.cpu, "available", lambda: False)
    monkeypatch.setattr(diagnosis, "_DRIVER", tmp_path / "file")
    code, out = run(capsys)
    text = " ".join(out.split())
    assert code == 1
    assert "set JAXSHARE_CACHE to one that can be" in text
    assert "the CPU kernels are not used; unset JAXSHARE_CPU_KERNELS" in text
    assert "has an NVIDIA driver, but JAX runs on cpu; pip install 'jaxshare[cuda13]'" in text
    assert "attention xla (" in text


def test_secrets_are_not_shown(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    monkeypatch.setenv("JAXSHARE_API_KEY", "k-123")
    out = run(capsys)[1]
    assert "HF_TOKEN=(set)" in out and "JAXSHARE_API_KEY=(set)" in out
    assert "hf_abc" not in out and "k-123" not in out


def test_a_model_that_is_not_there(capsys):
    assert main.main(("doctor", "--model", "/nowhere/model")) == 1
    assert "there is no model folder /nowhere/model" in capsys.readouterr().err
