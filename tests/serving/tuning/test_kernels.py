"""Tuning: the whole command over made-up times, and the measurement itself on XLA's backend."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from jaxshare import models
from jaxshare.attention import api
from jaxshare.pallas import chosen_tiles, tiles
from jaxshare.pallas.chosen_tiles import Key, choose_mosaic, choose_triton
from jaxshare.pallas.device import H200, Device, assume_device
from jaxshare.pallas.tiles import MosaicTiles, TritonTiles
from jaxshare.serving.cli import main
from jaxshare.serving.tuning import kernels
from jaxshare.serving.tuning.kernels import Effort, KernelShape, Pass
from tests.helpers import mostly_slow

SHAPE = ("--heads", "32", "--kv-heads", "4", "--head-dim", "128")  # G = 8
SLOW, FAST = MosaicTiles(128, 2, 1), MosaicTiles(64, 5, 1)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Sets and yields an empty cache folder."""
    monkeypatch.setenv("JAXSHARE_CACHE", str(tmp_path / "cache"))
    chosen_tiles.read_tiles.cache_clear()
    yield tmp_path / "cache"
    chosen_tiles.read_tiles.cache_clear()


class Clock:
    """A replacement of `kernels.prepare` that makes up times and records its calls.

    With 64 rows FAST takes half the usual time over private blocks, and 1.2 times the usual time
    over shared ones, which take ten times as long: the lowest if both count the same, but not in
    sum. SLOW does not compile. The triton backend is fastest with a span of 32 and 3 stages.
    """

    def __init__(self):
        self.jobs, self.runs = [], []

    def __call__(self, job: Pass, backend: str, choice: tiles.KernelConfig) -> kernels.Run:
        self.jobs.append((job, backend, choice))
        if choice == SLOW:
            raise RuntimeError("ptxas: too many registers\nand more lines")
        if backend == "mosaic_gpu":
            factor = {(True, True): 1.2, (True, False): 0.5}.get(
                (choice == FAST and job.rows == 64, job.shared), 1.0
            )
        else:
            factor = 0.7 if (choice.span, choice.num_stages) == (32, 3) else 0.9
        seconds = (1e-3 if job.shared else 1e-4) * factor
        noise = iter([1.0, 50.0, 1.01, *[0.99] * 100])  # one round in which the machine was busy

        def run() -> float:
            self.runs.append((job, backend, choice))
            return seconds * next(noise)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(kernels, "prepare", clock)
    return clock


def run(capsys, *arguments: str, device: Device = H200) -> tuple[int, str, str]:
    with assume_device(device):
        code = main.main(["tune", *arguments])
    return code, *capsys.readouterr()


def test_the_best_of_every_bucket_is_kept_and_used(capsys, clock, folder):
    code, out, _ = run(capsys, *SHAPE, "--rows", "64,2,1,64", "--json")
    result = json.loads(out)
    assert (
        code == 0
        and result["device"] == "NVIDIA H200"
        and result["file"] == str(folder / "tiles.json")
    )
    found = {(b["backend"], b["queries"]): b["tiles"] for b in result["best"]}
    assert set(found) == {
        (backend, queries) for backend in ("mosaic_gpu", "triton") for queries in (8, 16, 512)
    }
    assert found["mosaic_gpu", 512] == dataclasses.asdict(FAST)
    assert (found["triton", 512]["span"], found["triton", 512]["num_stages"]) == (32, 3)
    # The built-in tiles are taken where nothing is faster.
    assert (
        found["mosaic_gpu", 8]
        == dataclasses.asdict(tiles.built_in_mosaic(H200, 128, 8))
        == result["best"][0]["built_in"]
    )

    assert choose_mosaic(H200, 128, 8, 512, "bfloat16") == FAST
    assert choose_triton(H200, 128, 8, 512, "bfloat16") == TritonTiles(**found["triton", 512])
    assert choose_mosaic(H200, 128, 4, 512, "bfloat16") != FAST  # another G

    measured = result["measurements"]
    (fast,) = [
        m
        for m in measured
        if m["tiles"] == dataclasses.asdict(FAST) and m["rows"] == 64 and m["shared"]
    ]
    assert fast["microseconds"] == pytest.approx(1200, rel=0.02)  # the busy round does not count
    for backend in ("mosaic_gpu", "triton"):
        passes = {(m["rows"], m["shared"]) for m in measured if m["backend"] == backend}
        assert passes == {(1, False), (2, True), (2, False), (64, True), (64, False)}
    failed = [m for m in measured if m["tiles"] == dataclasses.asdict(SLOW)]
    assert failed and all(
        m["microseconds"] is None and m["reason"] == "RuntimeError: ptxas: too many registers"
        for m in failed
    )
    assert out.count("\n") == 1 and "kernels" not in out


def test_candidates_are_measured_in_turn(capsys, clock):
    run(capsys, *SHAPE, "--rows", "2", "--backend", "triton", "--json")
    passes = dict.fromkeys(job for job, _, _ in clock.runs)
    assert len(passes) == 2
    for job in passes:
        order = [choice for of, _, choice in clock.runs if of == job]
        once = order[: len(set(order))]
        assert len(set(once)) == len(once) > 1 and order == once * job.effort.rounds
    assert {backend for _, backend, _ in clock.jobs} == {"triton"}
    assert {job.effort for job, _, _ in clock.jobs} == {Effort()}


def test_the_table_that_is_printed(capsys, clock, folder):
    code, out, err = run(
        capsys, *SHAPE, "--rows", "1,64", "--backend", "mosaic_gpu", "--quick", "--dtype", "float16"
    )
    title, _, *rows, kept = out.splitlines()
    assert (
        code == 0
        and title
        == "microseconds of one attention layer on NVIDIA H200: 32 heads, 4 kv heads, dim 128, "
        "float16"
    )
    assert [row.split()[:5] for row in rows] == [
        ["mosaic_gpu", "1", "private", "101.0", "101.0"],
        ["mosaic_gpu", "64", "shared", "1010.0", "1212.0"],
        ["mosaic_gpu", "64", "private", "101.0", "50.5"],
    ]
    assert (
        rows[1].endswith("tile 64, stages 5, query stages 1, code stages 1, overlap")
        and kept == f"kept in {folder / 'tiles.json'}"
    )
    assert (
        "left out: mosaic_gpu, tile 128, stages 2, query stages 1, code stages 1, overlap and 2 more: "
        "RuntimeError: ptxas: too many registers\n" in err
    )
    assert {job.effort for job, _, _ in clock.jobs} == {kernels.QUICK}


def test_what_the_file_holds_for_other_shapes_and_devices_stays(capsys, clock, folder, tmp_path):
    file = tmp_path / "elsewhere" / "mine.json"
    for device, more in (
        (H200, ()),
        (Device("NVIDIA H100", 90, 132), ()),
        (H200, ("--dtype", "float16")),
        (H200, ()),
    ):
        assert (
            run(
                capsys,
                *SHAPE,
                "--rows",
                "64",
                "--backend",
                "mosaic_gpu",
                "--output",
                str(file),
                *more,
                device=device,
            )[0]
            == 0
        )
    assert chosen_tiles.decode_tiles(file.read_text(encoding="utf-8")) == {
        "NVIDIA H200": {
            Key("mosaic_gpu", 128, 8, 512, dtype): FAST for dtype in ("bfloat16", "float16")
        },
        "NVIDIA H100": {Key("mosaic_gpu", 128, 8, 512, "bfloat16"): FAST},
    }
    assert not folder.exists() and choose_mosaic(H200, 128, 8, 512, "bfloat16") != FAST
    assert [path.name for path in file.parent.iterdir()] == ["mine.json"]


def test_a_file_that_cannot_be_read_is_written_anew(capsys, clock, folder):
    folder.mkdir()
    (folder / "tiles.json").write_text("half a fi", encoding="utf-8")
    assert run(capsys, *SHAPE, "--rows", "64")[0] == 0
    assert choose_mosaic(H200, 128, 8, 512, "bfloat16") == FAST


def test_rows_of_one_bucket_are_one_choice(capsys, clock):
    _, out, _ = run(capsys, *SHAPE, "--rows", "5,6,7,8", "--json")
    result = json.loads(out)
    assert [b["queries"] for b in result["best"]] == [64, 64]
    assert {m["rows"] for m in result["measurements"]} == {5, 6, 7, 8}


def test_a_backend_that_cannot_serve_is_left_out(capsys, clock, monkeypatch):
    def prepare(job, backend, choice):
        if backend == "mosaic_gpu":
            raise NotImplementedError("it runs on GPUs of compute capability 9.0")
        return clock(job, backend, choice)

    monkeypatch.setattr(kernels, "prepare", prepare)
    code, out, err = run(capsys, *SHAPE, "--rows", "1")
    assert code == 0 and "nothing could be measured" in out.splitlines()[2]
    assert (
        "more: it runs on GPUs of compute capability 9.0" in err
        and "NotImplementedError" not in err
    )
    code, out, err = run(capsys, *SHAPE, "--rows", "1", "--backend", "mosaic_gpu")
    assert (code, out) == (1, "")
    assert err.endswith(
        "jaxshare: error: no kernel could be measured on this NVIDIA H200: mosaic_gpu: it runs on "
        "GPUs of compute capability 9.0\n"
    )


def test_a_pass_that_does_not_fit_the_gpu_does_not_count(capsys, clock, monkeypatch, folder):
    def prepare(job, backend, choice):
        if job.shared:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return clock(job, backend, choice)

    monkeypatch.setattr(kernels, "prepare", prepare)
    assert run(capsys, *SHAPE, "--rows", "64", "--backend", "mosaic_gpu")[0] == 0
    assert choose_mosaic(H200, 128, 8, 512, "bfloat16") == FAST


def test_what_was_found_before_an_interruption_is_kept(capsys, clock, monkeypatch):
    def prepare(job, backend, choice):
        if job.rows == 256:
            raise KeyboardInterrupt
        return clock(job, backend, choice)

    monkeypatch.setattr(kernels, "prepare", prepare)
    assert run(capsys, *SHAPE, "--rows", "64,256")[0] == 130
    assert choose_mosaic(H200, 128, 8, 512, "bfloat16") == FAST


def test_a_place_that_cannot_be_written(capsys, clock, tmp_path):
    code, out, err = run(capsys, *SHAPE, "--rows", "1", "--output", str(tmp_path))
    assert (
        (code, out) == (1, "") and "--output is" in err and "that is a folder; give a file" in err
    )


def test_a_disk_that_is_full_costs_no_measurement(capsys, clock, monkeypatch):
    def save(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kernels, "save", save)
    code, out, err = run(capsys, *SHAPE, "--rows", "1,64", "--backend", "mosaic_gpu", "--json")
    found = json.loads(out)
    assert (
        code == 1
        and len(found["best"]) > 1
        and {m["rows"] for m in found["measurements"]} >= {1, 64}
    )
    assert (
        "the tiles cannot be kept in" in err
        and "No space left" in err
        and "give another --output" in err
    )


def test_the_shape_of_a_model(capsys, clock, tmp_path):
    config = json.loads((models.EMBEDDED / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "config.json"
    file.write_text(
        json.dumps(
            config
            | {
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 96,
                "dtype": "float16",
            }
        )
    )
    # the folder has no weights
    code, out, _ = run(capsys, "--model", str(file.parent), "--rows", "1", "--json")
    assert code == 0 and json.loads(out)["shape"] == {
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_dim": 96,
        "dtype": "float16",
    }
    code, out, _ = run(
        capsys, "--model", str(file.parent), "--rows", "1", "--json", "--dtype", "bfloat16"
    )
    assert json.loads(out)["shape"]["dtype"] == "bfloat16"
    file.write_text(
        json.dumps(
            config
            | {
                "num_attention_heads": 12,
                "num_key_value_heads": 4,
                "head_dim": 96,
                "dtype": "float32",
            }
        )
    )
    code, _, err = run(capsys, "--model", str(file.parent), "--rows", "1")
    assert code == 1 and "the dtype is float32" in err and "--dtype" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "either with --model or with --heads, --kv-heads and --head-dim"),
        ((*SHAPE, "--model", "x"), "either with --model or with"),
        (("--heads", "8"), "--kv-heads is missing"),
        (("--heads", "8", "--kv-heads", "2"), "--head-dim is missing"),
        (("--heads", "8", "--kv-heads", "3", "--head-dim", "64"), "8 heads and 3 kv heads"),
        (("--heads", "0", "--kv-heads", "0", "--head-dim", "64"), "0 heads and 0 kv heads"),
        (("--heads", "8", "--kv-heads", "2", "--head-dim", "72"), "the head dim is 72"),
        ((*SHAPE, "--dtype", "float32"), "the dtype is float32"),
        ((*SHAPE, "--rows", "1;2"), "--rows is '1;2'"),
        ((*SHAPE, "--rows", "4,0"), "--rows has 0"),
        (("--model", "no/such/folder"), "there is no model folder no/such/folder"),
    ],
)
def test_mistakes_get_one_sentence(capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert code == 1 and out == "" and words in err
    assert err.startswith("jaxshare: error: ") and err.count("\n") == 1


def test_without_a_gpu_it_says_so(capsys, folder):
    assert main.main(["tune", *SHAPE, "--json"]) == 1
    out, err = capsys.readouterr()
    assert (
        out == ""
        and err.startswith("jaxshare: error: there is no NVIDIA GPU here")
        and err.count("\n") == 1
    )
    assert not folder.exists()


def test_passes_are_as_large_as_they_may_be():
    for rows in (1, 2, 64, 1024):
        for shape in (KernelShape(32, 8, 128), KernelShape(32, 32, 128), KernelShape(8, 1, 64)):
            for shared in (False, True):
                job = Pass(shape, rows, shared)
                token = 2 * shape.num_kv_heads * shape.head_dim * 2
                if rows == 64 and shape.num_kv_heads > 1:
                    # more than any cache of a GPU, and less than most GPUs' memory
                    assert 2**26 < (job.prefix + rows * job.suffix) * token <= 2**30
                assert job.suffix >= 64 and 1 <= job.iterations <= 64
                assert (job.prefix > 0) == shared


SMALL = Pass(
    KernelShape(4, 2, 64), 3, shared=True, effort=Effort(rounds=1, seconds=1e-9, cache_bytes=2**17)
)


@pytest.fixture(scope="module")
def one_layer():
    """Reduces an iteration of the measured loop to one layer, to compile less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_LAYERS", 1)
        yield
    kernels._inputs.cache_clear()


@pytest.mark.slow
def test_measuring_compiles_with_the_tiles_and_takes_time(monkeypatch, one_layer):
    seen = []

    def backend(q, keys, values, plan, scale):
        seen.append((choose_triton(H200, 64, 2, 6, keys.dtype), q.shape))
        assert keys.shape[1] >= 256 + 3 * 64
        return api.reference_attention(q, keys, values, plan, scale)

    monkeypatch.setitem(api.BACKENDS, "triton", backend)
    for choice in (TritonTiles(16, 64, 4, 2), TritonTiles(16, 64, 4, 3)):
        seen.clear()
        assert 0 < kernels.prepare(SMALL, "triton", choice)() < 60
        assert set(seen) == {(choice, (3, 1, 4, 64))}


WRONG = {
    "in one head": lambda out: out.at[-1, :, 0].multiply(1.2),
    "everywhere": lambda out: out * jnp.nan,
}


@pytest.mark.parametrize("how", mostly_slow(WRONG))
def test_wrong_answers_are_not_measured(monkeypatch, one_layer, how):
    monkeypatch.setitem(
        api.BACKENDS,
        "triton",
        lambda *arguments: WRONG[how](api.reference_attention(*arguments)),
    )
    with pytest.raises(
        ValueError, match=r"its output differs from XLA's by \S+, relative; it is not used"
    ):
        # Warps that no other test uses, so that nothing traced for them is reused.
        kernels.prepare(SMALL, "triton", TritonTiles(16, 64, 2 ** (4 + [*WRONG].index(how)), 2))


def test_a_backend_that_is_not_for_this_device_says_why(one_layer):
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        kernels.prepare(SMALL, "mosaic_gpu", MosaicTiles(64, 2, 1))
