"""The arithmetic, arguments and judgement of the benchmark of attention, and the roofline's page;
the times are no matter for a test."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare.attention.api import BACKENDS
from jaxshare.pallas.work_items import WorkForm, make_work
from scripts.bench import attention as bench
from scripts.bench import peer, roofline
from scripts.bench.parts.attention import cases, chip, plots, speed
from scripts.bench.parts.attention import measurements as parts
from scripts.bench.parts.attention.scale import MODEL
from scripts.bench.peers import torch_attention as worker
from tests.paths import ROOT

Heads, Case, Side = cases.Heads, cases.Case, speed.Side
COPY, PRODUCT, UNSHARED = speed.COPY, speed.PRODUCT, speed.UNSHARED
NAMES = [goal.name for goal in parts.goals({}, tiny=False)]


A_POINT = {
    "case": "2 rows",
    "kv_heads": 1,
    "group": 4,
    "sides": {},
    "copy_gigabytes_per_second": 1.0,
    "product_teraflops": 1.0,
    "skipped": {},
}


# The command.


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run of the command gave."""

    code: int
    printed: dict
    written: dict


def command(folder: Path, *arguments: str) -> Run:
    file = folder / "result.json"
    # What tests are strict about, the libraries that are measured here need not be.
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        said = {name: (folder / name).open("w+", encoding="utf-8") for name in ("out", "err")}
        for name, stream in said.items():
            patch.setattr(sys, f"std{name}", stream)
        code = bench.main(["--cpu", "--json", "--output", str(file), *arguments])
    told = {}
    for name, stream in said.items():
        stream.close()
        told[name] = (folder / name).read_text(encoding="utf-8")
    return Run(code, json.loads(told["out"]), json.loads(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One part of it, at tiny sizes; PyTorch's side by a Python that cannot be it."""
    folder = tmp_path_factory.mktemp("run")
    return command(
        folder,
        "--parts",
        "private",
        "--torch-python",
        sys.executable,
        "--plots",
        str(folder / "plots"),
    )


@pytest.mark.slow
def test_without_a_gpu_it_runs_at_tiny_sizes_and_measures_no_goal(run):
    assert run.code == 0 and run.printed == run.written
    assert [goal["name"] for goal in run.printed["goals"]] == NAMES and len(NAMES) == 10
    assert all(goal["measured"] is None and goal["met"] is None for goal in run.printed["goals"])
    assert run.printed["machine"]["device"]["platform"] == "cpu" and run.printed["settings"]["cpu"]
    (point,) = run.printed["results"]["private"]
    assert {"xla", "reference", speed.JAX_XLA} <= set(point["sides"])
    assert all(side["microseconds"] > 0 and side["of_copy"] > 0 for side in point["sides"].values())
    assert bench.as_text(run.printed)


def test_what_cannot_be_measured_has_a_reason(run):
    (point,) = run.printed["results"]["private"]
    for backend in speed.KERNELS:
        (check,) = [
            check for check in run.printed["results"]["correctness"] if check["backend"] == backend
        ]
        assert (
            check["right"] is None and "NVIDIA GPU" in check["reason"] and "cpu" in check["reason"]
        )
        assert point["skipped"][backend] == check["reason"]
    assert {speed.JAX_CUDNN, speed.PALLAS} <= set(point["skipped"])
    assert run.printed["settings"]["torch_skipped"]


def test_what_is_measured_before_an_interruption_is_written(tmp_path, monkeypatch):
    points = iter([{**A_POINT, "case": "first"}])

    def measure_one(*_):
        if (point := next(points, None)) is None:
            raise KeyboardInterrupt
        return point

    monkeypatch.setattr(parts, "measure_contexts", measure_one)
    found = command(tmp_path, "--parts", "contexts", "--without-torch")
    assert found.code == 1 and found.written["interrupted"]
    assert [point["case"] for point in found.written["results"]["contexts"]] == ["first"]


def test_the_seed_is_another_one_every_time():
    assert bench.parse(["--without-torch"]).seed != bench.parse(["--without-torch"]).seed
    assert bench.parse(["--without-torch", "--seed", "7"]).seed == 7


@pytest.mark.slow
def test_every_part_runs(tmp_path):
    found = command(tmp_path, "--without-torch", "--plots", str(tmp_path / "plots"))
    assert found.code == 0 and set(found.printed["results"]) == set(parts.PARTS)
    assert set(found.printed["results"]["workers"]["to_one_row"]) == {"xla"}
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {
        "attention-roofline.png",
        "attention-workers.png",
    }
    (step,) = found.printed["results"]["step"]
    assert step["sides"]["xla"]["milliseconds"] > 0 and set(step["skipped"]) == set(speed.KERNELS)
    assert bench.as_text(found.printed)


def test_without_a_gpu_and_without_cpu_it_says_so_in_one_sentence(capsys):
    assert bench.main(["--without-torch", "--json"]) == 2
    said = capsys.readouterr()
    assert (
        not said.out
        and said.err.startswith("scripts.bench.attention: there is no NVIDIA GPU")
        and said.err.count("\n") == 1
    )
    assert "--cpu" in said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "private,plans"], ["--parts has 'plans'", "correctness", "step"]),
        (["--rounds", "0"], ["--rounds is 0"]),
        (["--seed", "-1"], ["seed -1", "from 0 to"]),
        (["--rounds", "many"], ["--rounds", "'many'"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
        (["--plots", __file__], ["--plots", "that is a file"]),
        (
            ["--torch-python", "no/such/python"],
            ["--torch-python is no/such/python", "no such program"],
        ),
        (["--torch-python", "python", "--without-torch"], ["--torch-python and --without-torch"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--cpu", *arguments])
    told = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and told.startswith("scripts.bench.attention: ")
        and told.count("\n") == 1
    )
    assert all(word in told for word in said), told


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None,
    reason="needs a Python without PyTorch, and this one has it",
)
def test_the_other_python_says_what_it_lacks(run):
    assert run.printed["settings"]["torch_skipped"] == "No module named 'torch'"
    with (
        pytest.raises(peer.WorkerError, match="torch"),
        speed.Worker(sys.executable, worker.__name__, {}) as other,
    ):
        other.begin()


# Wrong answers.


def test_a_backend_that_is_a_little_wrong_is_found_and_not_timed(run, tmp_path, monkeypatch):
    def wrong(q, keys, values, plan, scale):
        """Everything right but one head of one row, which is 5 % too long."""
        out = BACKENDS["reference"](q, keys, values, plan, scale)
        return out.at[1, 0, 2].multiply(1.05)

    monkeypatch.setitem(BACKENDS, "triton", wrong)
    try:
        found = command(tmp_path, "--parts", "private", "--without-torch")
    finally:
        speed.attend_often.clear_cache()
    assert found.code == 1
    (check,) = [
        check for check in found.printed["results"]["correctness"] if check["backend"] == "triton"
    ]
    assert check["right"] is False and check["tolerance"] < check["error"] < 0.06
    (point,) = found.printed["results"]["private"]
    assert (
        "triton" not in point["sides"]
        and "wrong by" in point["skipped"]["triton"]
        and "xla" in point["sides"]
    )


def test_a_backend_that_breaks_is_wrong_and_one_that_refuses_is_not(monkeypatch):
    def breaks(*_):
        raise RuntimeError("out of registers")

    def refuses(*_):
        raise NotImplementedError("not today")

    monkeypatch.setitem(BACKENDS, "mosaic_gpu", breaks)
    monkeypatch.setitem(BACKENDS, "triton", refuses)
    monkeypatch.setattr(cases, "expected", lambda case, inputs: ([0], np.zeros(0)))
    skipped, made = {}, a_bench(("mosaic_gpu", "triton"))
    case = cases.private(Heads(1, 2, 16), 1, 20)
    assert made.check(case, cases.make(case, 0), skipped) == []
    assert [check["right"] for check in made.checks] == [False, None]
    assert (
        skipped["mosaic_gpu"] == "RuntimeError: out of registers"
        and "not today" in skipped["triton"]
    )


@pytest.fixture(scope="module")
def ragged():
    """Three rows over shared and own blocks, the last token of one row padding; what the reference
    says of it."""
    case = Case(
        "ragged", Heads(1, 2, 16), ((0, 1), (2, 0), (0, 3)), (30, 5, 0, 8), (2, 2, 1), width=2
    )
    inputs = cases.make(case, 3)
    return case, inputs, np.asarray(cases.truth(inputs))


@pytest.mark.parametrize("change", [-1, 1])
def test_reading_one_token_too_few_or_too_many_shows(ragged, change):
    case, inputs, right = ragged
    exact = cases.error(case, jnp.asarray(right, jnp.bfloat16), [0, 1, 2], right)
    assert exact < cases.tolerance("bfloat16")
    cache = dataclasses.replace(inputs.cache, lengths=inputs.cache.lengths.at[0].add(change))
    other = np.asarray(cases.truth(dataclasses.replace(inputs, cache=cache)))
    assert cases.error(case, jnp.asarray(other), [0, 1, 2], right) > 10 * cases.tolerance(
        "bfloat16"
    )


def test_padding_is_not_judged_and_what_is_not_finite_is_wrong(ragged):
    case, _, right = ragged
    out = right.copy()
    out[2, 1] = np.nan
    assert cases.error(case, jnp.asarray(out), [0, 1, 2], right) == 0
    out[0, 1, 1, 3] = np.inf
    assert cases.error(case, jnp.asarray(out), [0, 1, 2], right) == np.inf


def test_an_error_is_a_part_of_the_right_answers_length():
    case = cases.private(Heads(1, 2, 2), 1, 5)
    right = np.asarray([[[[3.0, 4.0], [0.0, 1.0]]]])
    out = np.asarray([[[[3.3, 4.4], [0.0, 1.05]]]], np.float32)
    assert cases.error(case, jnp.asarray(out), [0], right) == pytest.approx(0.1, rel=1e-4)
    assert cases.tolerance("float16") == 3 * 2**-10 and cases.tolerance("bfloat16") == 3 * 2**-7


@pytest.mark.slow
def test_some_rows_alone_are_judged_as_among_all():
    case = dataclasses.replace(
        cases.many_rows(Heads(1, 2, 16), 7, "bfloat16")[1], lengths=(40, 30, 20, *range(7))
    )
    inputs = cases.make(case, 1)
    rows, right = cases.expected(case, inputs)
    assert rows == [0, 2, 4, 6]
    real = [i for i, row in enumerate(rows) if case.count[row]]
    np.testing.assert_allclose(
        right[real], np.asarray(cases.truth(inputs))[np.asarray(rows)[real]], rtol=1e-5, atol=1e-5
    )


# Arithmetic.


def a_bench(backends=speed.BACKENDS, **more):
    """Of ceilings of 2 MB copies and 128 x 128 x 128 products."""
    return speed.Bench(
        **{
            "backends": backends,
            "ceilings": speed.Ceilings(1_000_000, 128, 2),
            "worker": None,
            "rounds": 3,
            "kernel_calls": 64,
            "calls": 8,
            "turn_seconds": 0.03,
            "items": 132,
            "seed": 0,
            "say": lambda _: None,
        }
        | more
    )


def test_what_a_pass_reads_and_computes():
    heads = Heads(num_kv_heads=2, group=3, head_dim=4)
    shared = cases.shared(heads, 5, 100, 10)
    # Keys and values of 2 heads, 4 entries and 2 bytes; 100 tokens of the prefix once, 10 of each
    # row, the new one among them.
    assert shared.layer_bytes == 2 * 2 * 4 * 2 * (100 + 5 * 10)
    # Scores and sums, 2 operations each, for 6 heads of 4 entries.
    assert shared.layer_flops == 5 * (2 + 2) * 6 * 4 * 110
    assert cases.private(heads, 5, 110).layer_bytes == 2 * 2 * 4 * 2 * 5 * 110
    workers = cases.workers(heads, 3, 100, 10)
    assert workers.rows == ((0, 2, 3, 1), (0, 1, 3, 2), (0, 1, 2, 3)) and workers.after == [
        100,
        10,
        10,
        10,
    ]
    assert workers.layer_flops == 3 * 4 * 6 * 4 * 130
    # Three new tokens see 5, 6 and 7; rows that bring nothing see nothing.
    wide = Case("wide", heads, ((0,), (1,)), (4, 9), (3, 0), width=3)
    assert wide.layer_flops == 4 * 6 * 4 * (5 + 6 + 7) and wide.layer_bytes == 2 * 2 * 4 * 2 * 7


def test_a_summary_has_medians_and_each_rounds_parts_of_the_ceilings():
    ceilings = speed.Ceilings(1_000_000, 1000, 1)
    side = Side(turn=lambda: 0.0, read_bytes=3e6, flops=4e9)
    found = speed.summarise(
        {"ours": side},
        {"ours": [1e-3, 3e-3, 2e-3], COPY: [1e-3, 0.5e-3, 1e-3], PRODUCT: [1e-3, 2e-3, 2e-3]},
        ceilings,
    )
    # A copy reads and writes: 2 MB in 1 ms are 2 GB/s. A product of 1000 is 2 GFLOP.
    assert found["copy_gigabytes_per_second"] == pytest.approx(2) and found[
        "product_teraflops"
    ] == pytest.approx(1)
    ours = found["sides"]["ours"]
    assert ours["microseconds"] == pytest.approx(2000) and ours[
        "gigabytes_per_second"
    ] == pytest.approx(1.5)
    assert ours["teraflops"] == pytest.approx(2)
    # 3 to 2, 1 to 4, 1.5 to 2; and 4 to 2, 4/3 to 1, 2 to 1.
    assert ours["of_copy"] == pytest.approx(0.75) and ours["of_products"] == pytest.approx(2)
    assert ours["round_seconds"] == [1e-3, 3e-3, 2e-3]


def test_a_step_is_held_against_reading_it_once():
    found = parts.summarise_step(
        4, 128, 8e6, {"xla": [8e-3, 10e-3, 16e-3]}, [1e-3] * 3, speed.Ceilings(1_000_000, 128, 1)
    )
    assert found["limit_milliseconds"] == pytest.approx(4)  # 8 MB at 2 GB/s
    assert found["sides"]["xla"]["of_limit"] == pytest.approx(0.4) and found["sides"]["xla"][
        "tokens_per_second"
    ] == pytest.approx(400)


def test_loops_go_through_more_than_the_cache_and_last_long_enough():
    small = cases.private(Heads(8, 4, 128), 1, 1024)  # 4 MB a layer
    assert speed.layers_for(small, 100) == 64 and speed.layers_for(small, 8) == 8
    assert speed.layers_for(cases.private(Heads(8, 4, 128), 64, 8192), 8) == 1
    assert a_bench().loop(small, "xla")[0] == 8 and a_bench().loop(small, "mosaic_gpu")[0] == 64
    calls, passes = a_bench().loop(small)
    assert 0.02 < calls * passes * (small.layer_bytes / 3e12 + 1e-5) < 0.04
    assert a_bench(turn_seconds=0.0).loop(small) == (8, 1)


def test_a_side_with_fewer_rows_counts_for_all():
    case = cases.private(Heads(1, 2, 16), 2, 20)
    side = speed.ours(
        a_bench(kernel_calls=1, calls=1, turn_seconds=0.0), case, None, "xla", scaled=4.0
    )
    assert (side.read_bytes, side.flops, side.scaled) == (
        4 * case.layer_bytes,
        4 * case.layer_flops,
        4.0,
    )


def results():
    """Hand-made: what `measure` gives, as far as goals look at it."""
    private = [
        {"group": group, "sides": {"triton": {"of_copy": 0.5}, "xla": {"of_copy": 0.1}}}
        for group in (4, 8)
    ]
    private[1]["sides"]["mosaic_gpu"] = {"of_copy": 0.9}
    return {
        "private": private,
        "shared": {
            "sides": {"mosaic_gpu": {"of_products": 0.61}},
            "times_faster_than_unshared": {"mosaic_gpu": {"median": 14.0}, "xla": {"median": 99.0}},
        },
        "workers": {
            "to_one_row": {
                "xla": {"2": {"median": 3.0}, "4": {"median": 3.0}},
                "mosaic_gpu": {"2": {"median": 1.04}},
            }
        },
        "plan": {
            "4 workers": {"GPU backends": {"microseconds": 29.0}, "xla": {"microseconds": 1.0}}
        },
        "step": [{"batch": 64, "sides": {"xla": {"of_limit": 0.3}}}],
    }


def test_goals_are_those_of_the_backend_that_is_preferred_there():
    found = [(goal.measured, goal.goal, goal.met) for goal in parts.goals(results(), tiny=False)]
    assert found == [
        (0.5, 0.85, False),
        (0.9, 0.85, True),
        (0.61, 0.6, True),
        (14.0, 20.0, False),
        (1.04, 1.05, True),
        (3.0, 1.15, False),
        (29.0, 30.0, True),
        (None, 30.0, None),
        (None, 0.8, None),
        (0.3, 0.8, False),
    ]
    assert [goal.name for goal in parts.goals(results(), tiny=False)][1].endswith("(mosaic_gpu)")
    assert all(goal.measured is None for goal in parts.goals(results(), tiny=True))


def test_the_model_is_of_the_size_that_its_name_says():
    config = parts.ModelConfig.from_json(MODEL)
    shapes = jax.eval_shape(
        lambda: parts.Decoder(config).init(
            jax.random.key(0), jnp.zeros((1, 2), jnp.int32), method="causal"
        )
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 6_738_415_616


@pytest.mark.skipif(not plots.available(), reason="needs matplotlib")
def test_every_part_is_drawn(tmp_path):
    ceilings = speed.Ceilings(1_000_000, 1000, 1)
    sides = {
        name: Side(lambda: 0.0, 1e6, 1e9)
        for name in ("mosaic_gpu", f"mosaic_gpu, {UNSHARED}", speed.JAX_CUDNN)
    }
    point = {
        "case": "some rows",
        "group": 4,
        **speed.summarise(sides, {name: [1e-3] for name in (*sides, COPY, PRODUCT)}, ceilings),
    }
    workers = {
        "history": 9,
        "to_one_row": {"mosaic_gpu": {"2": {"median": 1.1}, "4": {"median": 1.2}}},
    }
    files = plots.draw({"private": [point, point], "shared": point, "workers": workers}, tmp_path)
    assert [file.name for file in files] == ["attention-roofline.png", "attention-workers.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    assert plots.draw({"plan": {}}, tmp_path) == []


# The roofline.


def test_the_page_has_what_the_program_prints(capsys):
    page = (ROOT / "benchmarks" / "roofline.md").read_text(encoding="utf-8")
    assert roofline.main([]) == 0
    printed = capsys.readouterr().out
    for table in roofline.tables():
        assert table in page, (
            f"benchmarks/roofline.md is not what scripts/bench/roofline.py prints:\n{table}"
        )
        assert table in printed
    assert "Everything on this page is predicted" in page and "not measured" in printed


def test_predictions_are_of_the_goals_and_say_that_they_are_predicted(capsys):
    assert roofline.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["predicted_not_measured"] is True
        and [p["name"] for p in found["predictions"]] == NAMES
    )
    for p in found["predictions"]:
        assert p["careful"] >= p["hopeful"] if p["at_most"] else p["hopeful"] >= p["careful"], p[
            "name"
        ]


def test_work_is_cut_into_equal_items():
    assert chip.cut([5, 1, 3], 3) == [[(0, 3)], [(0, 2), (1, 1)], [(2, 3)]]
    assert chip.cut([1, 0, 1], 3) == [[(0, 1)], [(2, 1)], []]
    assert chip.cut([5, 1, 3], 3, 1) == [[(0, 3)], [(0, 2), (1, 1)], [(2, 3)]]
    assert chip.cut([6, 1, 1, 1], 2, 1) == [[(0, 6)], [(1, 1), (2, 1), (3, 1)]]


def test_private_rows_wait_for_memory():
    found = roofline.attention(
        cases.private(Heads(8, 4), 64, 8192), roofline.H200, roofline.HOPEFUL
    )
    # Keys and values of 64 * 8192 tokens, 8 heads, 128 entries, 2 bytes, at 90 % of 4.8 TB/s.
    assert found.memory == pytest.approx(
        2 * 64 * 8192 * 8 * 128 * 2 / 4.32e12
    ) and found.memory > max(found.level_2, found.item)
    assert found.memory < found.seconds < found.memory + 10e-6
    assert found.tiles == 64 * 8 * 128


@pytest.mark.slow
def test_the_roofline_cuts_as_the_work_plan_does():
    case = cases.shared(Heads(2, 8, 16), 20, 300, 9)  # 160 queries of the prefix: two segments
    form = WorkForm(group=8, kv_heads=2, span=chip.SPAN, tile=64, num_items=7, alignment=8, setup=1)
    work = make_work(cases.make(case, 0).plan, form)
    segments = chip.segments(case, 64)
    count = int(work.count)
    assert [(s.queries, s.tiles) for s in segments] == list(
        zip(
            np.asarray(work.segments.queries)[:count].tolist(),
            np.asarray(work.segments.tiles)[:count].tolist(),
            strict=True,
        )
    )
    items = chip.cut([s.tiles for s in segments * 2], 7, 1)
    first, last, begin, behind = np.asarray(work.items).T
    assert [sum(tiles for _, tiles in pieces) for pieces in items] == (last - first).tolist()
    assert [(pieces[0][0], pieces[-1][0] + 1) for pieces in items] == list(
        zip(begin.tolist(), behind.tolist(), strict=True)
    )
