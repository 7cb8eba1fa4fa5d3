"""Checkpoints in Orbax form against the Hugging Face folders that they were converted from."""

import gc
import json
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxshare.models import EMBEDDED, load, orbax_io
from jaxshare.models.safetensors_files import CheckpointError
from jaxshare.serving.cli import main
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("models") / "orbax"
    orbax_io.convert(EMBEDDED, target)
    return target


def equal(one, other):
    jax.tree.map(
        lambda a, b: (
            np.testing.assert_array_equal(a, b),
            a.dtype == b.dtype or pytest.fail("dtype"),
        ),
        one,
        other,
    )


def test_converted_and_back_every_bit_is_the_same(folder, tmp_path, capsys):
    assert main.main(["convert", str(folder), str(tmp_path / "back"), "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    other = tmp_path / "other"
    other.touch()
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "back").iterdir()} == {
        other.stat().st_mode & 0o777
    }
    before, after = (
        load_file(path / "model.safetensors") for path in (EMBEDDED, tmp_path / "back")
    )
    assert (
        before.keys() == after.keys()
        and out["tensors"] == len(before)
        and out["bytes"] == sum(v.nbytes for v in before.values())
    )
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        np.testing.assert_array_equal(value.view(np.uint8), after[name].view(np.uint8))
    files = {p.name for p in EMBEDDED.iterdir() if p.is_file() and p.suffix != ".py"}
    assert files <= {p.name for p in (tmp_path / "back").iterdir()}


def test_every_tensor_keeps_its_own_dtype_and_large_models_are_cut(tmp_path, monkeypatch):
    mixed = tmp_path / "mixed"
    shutil.copytree(EMBEDDED, mixed)
    tensors = load_file(mixed / "model.safetensors")
    kinds = [jnp.bfloat16, np.float16, np.float32]
    tensors = {
        name: value.astype(kinds[i % 3]) for i, (name, value) in enumerate(sorted(tensors.items()))
    }
    save_file(tensors, mixed / "model.safetensors")
    orbax_io.convert(mixed, tmp_path / "orbax")
    monkeypatch.setattr(orbax_io, "_MAX_SHARD_BYTES", 500_000)
    orbax_io.convert(tmp_path / "orbax", tmp_path / "back")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2 and index["metadata"]["total_size"] == sum(
        v.nbytes for v in tensors.values()
    )
    back = {
        name: load_file(tmp_path / "back" / file)[name]
        for name, file in index["weight_map"].items()
    }
    assert back.keys() == tensors.keys()
    for name, value in tensors.items():
        assert back[name].dtype == value.dtype, name
        np.testing.assert_array_equal(back[name].view(np.uint8), value.view(np.uint8))
    equal(load(tmp_path / "back").params, load(mixed).params)


def test_it_loads_as_the_folder_it_was_made_from(folder):
    ours, theirs = load(folder), load(EMBEDDED)
    equal(ours.params, theirs.params)
    assert (
        ours.config == theirs.config
        and ours.generation == theirs.generation
        and ours.workers == theirs.workers
    )
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    half = load(folder, dtype="bfloat16")
    equal(half.params, load(EMBEDDED, dtype="bfloat16").params)


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"tensor": 4, "kv": 2}, {"data": 8}])
def test_it_is_restored_straight_onto_a_mesh(folder, sizes):
    """Includes more devices than kv heads (2), which are repeated, and a vocabulary (402) that does
    not divide."""
    mesh = make_mesh(**sizes)
    ours, theirs = load(folder, mesh=mesh), load(EMBEDDED, mesh=mesh)
    equal(ours.params, theirs.params)
    assert jax.tree.map(lambda x: x.sharding.spec, ours.params) == jax.tree.map(
        lambda x: x.sharding.spec, theirs.params
    )
    assert ours.config == theirs.config


def test_what_cannot_be_converted_is_refused(folder, tmp_path, capsys):
    assert main.main(["convert", str(EMBEDDED), str(folder)]) == 1
    assert f"{folder} exists; give a folder that does not" in capsys.readouterr().err
    assert main.main(["convert", str(tmp_path / "nothing"), str(tmp_path / "target")]) == 1
    assert (
        "has no config.json: a model folder holds config.json and model.safetensors"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "target").exists() and not list(tmp_path.glob(".target*"))


def test_a_checkpoint_of_another_architecture_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(
        json.dumps(
            {**settings, "num_hidden_layers": 5, "layer_types": None, "intermediate_size": 450}
        )
    )
    with pytest.raises(CheckpointError) as error:
        load(other)
    for part in (
        "are not those that its config.json describes: layers_0/mlp/down/kernel has shape (144, "
        "448), not (144, 450)",
        "... and 20 more; ",
        "they are of another architecture: convert the model again",
    ):
        assert part in str(error.value)


def damaged(folder, target):
    shutil.copytree(folder, target)
    data = max(
        (p for p in (target / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size
    )
    data.write_bytes(data.read_bytes()[:100])
    return target


@pytest.mark.parametrize("sizes", [None, {"tensor": 2, "data": 2}])
def test_a_damaged_checkpoint_is_refused(folder, tmp_path, sizes):
    broken = damaged(folder, tmp_path / "broken")
    with pytest.raises(
        CheckpointError,
        match=r"params cannot be restored \(OUT_OF_RANGE: Error reading .*; convert the model "
        r"again",
    ):
        load(broken, mesh=make_mesh(**sizes) if sizes else None)
    gc.collect()  # an abandoned read would report its error here


@pytest.mark.slow
def test_a_damaged_checkpoint_gets_one_sentence(folder, tmp_path):
    """Runs a whole process: reads still running after an error would report theirs at its end."""
    broken = damaged(folder, tmp_path / "broken")
    for arguments in (
        ["generate", str(broken), "--prompt", "x"],
        ["convert", str(broken), str(tmp_path / "target")],
    ):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "jaxshare.serving.cli.main", *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and done.stdout == ""
        assert (
            done.stderr.count("\n") == 1
            and "OUT_OF_RANGE" in done.stderr
            and "convert the model again" in done.stderr
        )
    assert not (tmp_path / "target").exists()


KILLED = """
import sys, time
from jaxshare.models import orbax_io
whole = orbax_io.write_orbax
def slow(folder, tensors, config):
    def one_by_one():
        for name, value in tensors:
            print(name, flush=True)
            yield name, value
    sizes = whole(folder, one_by_one(), config)
    print("written", flush=True)
    time.sleep(60)
    return sizes
orbax_io.write_orbax = slow
from pathlib import Path
orbax_io.convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_what_is_half_written_is_not_there(tmp_path):
    """Kills the process at the last moment: all tensors on disk, the folder not renamed yet."""
    with subprocess.Popen(
        [sys.executable, "-P", "-c", KILLED, str(EMBEDDED), str(tmp_path / "target")],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        for line in process.stdout:
            if line.strip() == "written":
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "target").exists()
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        load(tmp_path / "target")
    orbax_io.convert(EMBEDDED, tmp_path / "target")
    equal(load(tmp_path / "target").params, load(EMBEDDED).params)


@pytest.mark.parametrize("sizes", [None, (2, 1)])
def test_parameters_that_are_not_finite_are_named(tmp_path, sizes, monkeypatch):
    """In either form, and on a mesh."""
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(EMBEDDED, first)
    tensors = load_file(first / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].copy()
    tensors["model.norm.weight"][1] = np.inf
    save_file(tensors, first / "model.safetensors")
    with monkeypatch.context() as unchecked:
        unchecked.setenv("JAXSHARE_CHECK_WEIGHTS", "off")
        orbax_io.convert(first, second)
    mesh = sizes and make_mesh(tensor=sizes[0], kv=sizes[1])
    with pytest.raises(CheckpointError, match=r"model.norm.weight has values that are NaN or inf"):
        load(second, mesh=mesh)
    assert load(second, mesh=mesh, check=False).mesh is mesh


@pytest.mark.parametrize(
    ("more", "value"),
    mostly_slow(
        [
            ([], -np.inf),
            (["--quantize", "int8"], np.nan),
            ([], np.nan),
            (["--quantize", "int4"], np.inf),
            (["--quantize", "fp8"], np.nan),
        ],
        2,
        several=True,
    ),
)
def test_what_is_not_finite_is_not_converted(more, value, tmp_path, capsys, monkeypatch):
    name = "model.layers.1.mlp.up_proj.weight"
    broken, target = tmp_path / "broken", tmp_path / "target"
    shutil.copytree(EMBEDDED, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name][5, 7] = value
    save_file(tensors, broken / "model.safetensors")
    assert main.main(["convert", str(broken), str(target), *more]) == 1
    assert f"{name} has values that are NaN or infinite" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["broken"]
    if not more:  # it may be converted as it is, and is still refused by what reads that
        back = tmp_path / "back"
        monkeypatch.setenv("JAXSHARE_CHECK_WEIGHTS", "off")
        assert main.main(["convert", str(broken), str(target)]) == 0
        monkeypatch.delenv("JAXSHARE_CHECK_WEIGHTS")
        assert main.main(["convert", str(target), str(back)]) == 1
        assert f"{name} has values that are NaN" in capsys.readouterr().err and not back.exists()
        assert main.main(["convert", str(target), str(back), "--quantize", "int8"]) == 1
        assert f"{name} has values that are NaN" in capsys.readouterr().err and not back.exists()
