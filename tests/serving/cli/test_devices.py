"""Commands and sessions on meshes of devices: the same texts as on one device, in float32 token for
token."""

import functools
import json

import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.models import EMBEDDED, load
from jaxshare.serving import Branch, Prefixes, Workers, generate
from jaxshare.serving.cli import main
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import token_bytes
from jaxshare.serving.workers.inspection.probe import attention_shares
from jaxshare.sharding import make_mesh
from tests.helpers import mostly_slow

SAMPLER = Sampler(temperature=1.2, top_p=0.95)
MESHES = [
    (1, 2, 2),
    pytest.param((1, 4, 1), marks=pytest.mark.slow),
    pytest.param((1, 1, 8), marks=pytest.mark.slow),
    pytest.param((2, 2, 2), marks=pytest.mark.slow),
]


@functools.cache
def model_on(shape=None):
    return load(
        EMBEDDED,
        mesh=None if shape is None else make_mesh(data=shape[0], tensor=shape[1], kv=shape[2]),
    )


# Workers.


def session_of(model):
    session = Workers(
        model,
        "Solve these problems: 1. 47 + 38 2. 12 * 7",
        budget=56,
        sampler=SAMPLER,
        seed=5,
        step_tokens=32,
    )
    for _ in session.stream(40):  # in the midst of a step, so that there is something to attend to
        pass
    return session


@functools.cache
def session_alone():
    session = session_of(model_on())
    return (
        [(s.worker, s.text) for s in session.steps],
        attention_shares(session),
        session.finish().value,
    )


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_workers_write_on_a_mesh_what_they_write_on_one_device(shape):
    steps, masses, value = session_alone()
    session = session_of(model_on(shape))
    assert [(s.worker, s.text) for s in session.steps] == steps and len(steps) > 2
    found = attention_shares(session)
    assert found.keys() == masses.keys() and len(masses) == 2
    for worker, shares in masses.items():
        assert found[worker].keys() == shares.keys()
        np.testing.assert_allclose([*found[worker].values()], [*shares.values()], atol=1e-5)
    assert session.finish().value == value


# Branches.

TREE = Branch(
    "Compute these. ",
    children=[
        Branch("17 + 25 =", n=3),
        Branch("6 * 7 = ", n=2, children=[Branch("and 3 * 4 =", n=3)]),
    ],
)


HOT = Sampler(temperature=2.0)
"""With which the branches of one prompt part."""


@functools.cache
def branches_alone():
    return generate(model_on(), TREE, max_new_tokens=12, sampler=HOT, seed=2, share=True)


@pytest.mark.parametrize("shape", mostly_slow([*MESHES[1:], (2, 2, 1), (1, 2, 2)], len(MESHES[1:])))
def test_branches_write_on_a_mesh_what_they_write_on_one_device(shape):
    """With two data groups: each writes some of them."""
    expected = branches_alone()
    found = generate(model_on(shape), TREE, max_new_tokens=12, sampler=HOT, seed=2, share=True)
    assert [(c.prompt, c.index, c.tokens) for c in found.completions] == [
        (c.prompt, c.index, c.tokens) for c in expected.completions
    ]
    assert len({tuple(c.tokens) for c in found.completions}) > 3
    np.testing.assert_allclose(
        [c.logprob for c in found.completions], [c.logprob for c in expected.completions], atol=1e-3
    )
    assert (found.prompt_tokens, found.unique_tokens) == (
        expected.prompt_tokens,
        expected.unique_tokens,
    )


@pytest.mark.slow
def test_a_run_over_data_groups_that_fails_or_is_left_ends_all_of_them():
    from jaxshare.serving.branches.data_parallel import branches

    model = model_on((2, 1, 1))
    run = branches(model, "Compute 1 + 1.", n=6, max_new_tokens=40, sampler=SAMPLER)
    assert len(run.runs) == 2 and [len(r.sample_ids) for r in run.runs] == [3, 3]
    stream = run.stream()
    first = next(stream)
    stream.close()
    assert first.tokens

    def fail(run):
        raise RuntimeError("that is enough")

    with pytest.raises(RuntimeError, match="that is enough"):
        list(branches(model, "Compute 1 + 1.", n=6, max_new_tokens=4).stream(fail))
    with pytest.raises(
        ValueError, match="a prefix is in the memory of one data group; run it with data=1"
    ):
        branches(model, None, prefix=Prefixes(model, max_tokens=64).add("Compute"), n=2)


# The engine.


def calls(engine):
    """Calls with much in common, of two priorities, more than the memory holds."""
    rng = np.random.default_rng(4)
    stem = rng.integers(3, 400, 150).tolist()
    cuts = ((150, 20), (60, 90), (150, 5), (0, 170), (150, 33), (60, 12))
    prompts = [[*stem[:cut], *rng.integers(3, 400, more).tolist()] for cut, more in cuts]
    engine.submit(prompts[3], SAMPLER, max_new_tokens=14, seed=9, resample="stepwise").wait()
    engine.drain()
    again = [
        engine.submit(prompts[3], SAMPLER, max_new_tokens=14, seed=seed, resample="stepwise").wait()
        for seed in (9, 10)
    ]
    assert again[0].replayed_tokens == len(again[0].tokens)
    streams = [
        engine.submit(
            prompt,
            SAMPLER if i % 2 else Sampler(),
            max_new_tokens=14,
            seed=i,
            priority=int(i == 4),
            agent_id=f"a{i % 3}",
        )
        for i, prompt in enumerate([*prompts, *prompts[:2]])
    ]
    return [stream.wait().tokens for stream in streams] + [done.tokens for done in again]


@functools.cache
def engine_alone():
    with Engine(model_on(), max_rows=2, logits_cache=10**7, resample_always=True) as engine:
        return calls(engine)


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
def test_an_engine_answers_on_a_mesh_what_it_answers_on_one_device(shape):
    """Under pressure: blocks are packed, leave for host memory, come back and are fed again."""
    model = model_on(shape)
    size = token_bytes(model)
    with Engine(
        model,
        max_rows=3,
        kv_bytes=512 * size,
        host_kv_bytes=256 * size,
        logits_cache=10**7,
        resample_always=True,
    ) as engine:
        assert calls(engine) == engine_alone()
        session = Workers(
            model,
            "Solve: 47 + 38",
            engine=engine,
            budget=20,
            sampler=SAMPLER,
            seed=5,
            history_tokens=96,
            step_tokens=16,
        )
        session.run()
        steps = [(s.worker, s.text) for s in session.steps]
        session.close()
    alone = Workers(
        model_on(),
        "Solve: 47 + 38",
        budget=20,
        sampler=SAMPLER,
        seed=5,
        history_tokens=96,
        step_tokens=16,
    )
    alone.run()
    assert steps == [(s.worker, s.text) for s in alone.steps]


# The command line.


@pytest.mark.slow
def test_a_batch_over_data_groups_writes_the_file_of_one_device(tmp_path, capsys):
    lines = [{"prompt": f"Compute {a} + {b}."} for a in (3, 41) for b in (5, 6)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def run(name, *more):
        assert (
            main.main(
                [
                    "batch",
                    "embedded",
                    "--input",
                    str(tmp_path / "in.jsonl"),
                    "--output",
                    str(tmp_path / name),
                    "--n",
                    "2",
                    "--max-new-tokens",
                    "8",
                    "--temperature",
                    "1",
                    *more,
                ]
            )
            == 0
        )
        # Log-probabilities are rounded sums, whose last digit may differ.
        return [
            {**json.loads(line), "logprob": None}
            for line in (tmp_path / name).read_text().splitlines()
        ]

    alone = run("alone.jsonl")
    assert run("mesh.jsonl", "--data", "2", "--tensor", "2") == alone and len(alone) == 8
    # Half a job of two groups goes on as a job of one.
    half = (tmp_path / "alone.jsonl").read_text().splitlines(keepends=True)[3:6]
    (tmp_path / "half.jsonl").write_text("".join(half))
    (tmp_path / "half.jsonl.job").write_bytes((tmp_path / "mesh.jsonl.job").read_bytes())
    assert run("half.jsonl", "--resume", "--data", "2") == alone
    capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["generate", "embedded", "--prompt", "x", "--tensor", "16"],
            "data 1 x tensor 16 x kv 1 needs 16 devices, but there are 8 cpu",
        ),
        (
            ["generate", "embedded", "--prompt", "x", "--expert", "2", "--kv", "2"],
            "the model has no experts, which expert=2 would split; use tensor=2",
        ),
        (
            ["generate", "embedded", "--prompt", "x", "--tensor", "3"],
            "4 query heads do not divide over tensor=3 devices; tensor may be 1,",
        ),
        (
            ["workers", "embedded", "--problem", "x", "--kv", "0"],
            "--kv is 0; it must be at least 1 device",
        ),
        (
            ["batch", "embedded", "--input", "none", "--output", "none", "--data", "9"],
            "needs 9 devices, but there are 8 cpu devices",
        ),
    ],
)
def test_devices_that_are_not_there_are_an_error(command, message, capsys):
    assert main.main(command) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_generate_runs_on_a_mesh_from_the_command_line(capsys):
    command = [
        "generate",
        "embedded",
        "--prompt",
        "Compute 17 + 25.",
        "--max-new-tokens",
        "12",
        "--json",
    ]
    found = []
    for more in ([], ["--tensor", "2", "--kv", "2", "--data", "2"]):
        assert main.main([*command, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["completions"][0]["tokens"])
    assert found[0] == found[1]


# Evaluations.


@pytest.mark.slow
def test_an_evaluation_over_data_groups_comes_to_what_it_comes_to_on_one_device(tmp_path, capsys):
    command = [
        "evaluate",
        "embedded",
        "--task",
        "sums",
        "--workers",
        "2",
        "--budgets",
        "16,96",
        "--samples",
        "3",
        "--questions",
        "2",
        "--json",
    ]
    found = []
    for name, more in (("mesh", ["--data", "2"]), ("alone", [])):
        assert main.main([*command, "--out", str(tmp_path / name), *more]) == 0
        runs = map(json.loads, (tmp_path / name / "runs.jsonl").read_text().splitlines())
        texts = {
            (run["workers"], run["problem"]): (run["result"]["workers"], run["result"]["answers"])
            for run in runs
        }
        found.append((json.loads(capsys.readouterr().out)["points"], texts))
    assert found[0] == found[1] and len(found[0][1]) == 3


def test_a_session_is_one_group_of_rows(capsys):
    assert main.main(["workers", "no-such-model", "--problem", "1 + 1", "--data", "2"]) == 1
    assert (
        "--data is 2, but a session is one group of rows; spread it with" in capsys.readouterr().err
    )
