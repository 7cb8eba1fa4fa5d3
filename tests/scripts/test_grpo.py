"""Training by reward. Oracles: the formulas of GRPO and Dr. GRPO as they are published, sample by
sample on the pass over whole sequences; a session of one worker; a reward that is easy to raise."""

import dataclasses
import itertools
import json
import math
import random
import statistics
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import FinishReason, Sampler
from jaxshare.models import EMBEDDED, LoadedModel, load, reencode_logits
from jaxshare.models.layers import Decoder
from jaxshare.serving import Format, Workers
from jaxshare.serving.checkpoints import SavedCheckpoint
from jaxshare.serving.engine import Engine
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.evaluation.arithmetic import BOX, Dependent, Question, SumsProblem
from jaxshare.serving.evaluation.tasks import load_task
from jaxshare.serving.rollouts import RolloutBatch, pack
from jaxshare.serving.workers.results import Answer, Result, Step
from jaxshare.trace.attention import TraceBatch
from scripts.train import grpo
from scripts.train.lessons import Shape
from scripts.train.reward import exercises, policy_gradient, practice, team
from scripts.train.reward.options import parse
from scripts.train.training import empty_sums
from tests.helpers import folder_of_first_layers, one_layer

PROBLEM = SumsProblem(
    (Question("47 + 38", 47, "+", 38), Dependent(1, 2, 7), Question("20 - 6", 20, "-", 6))
)
SHAPE = Shape(tokens=128, tiles=16, blocks=16, pairs=32)
SIZES = ((20, (9, 1, 4)), (31, (7, 12, 5)), (17, (3, 3, 3)))
"""The tokens of each prompt, and of its samples."""
GAINS = np.asarray([[1.2, -0.7, np.nan], [-1.0, 0.5, 0.9], [np.nan] * 3], np.float32)


# Advantages and rewards


@pytest.mark.parametrize("variant", policy_gradient.VARIANTS)
def test_advantages_are_those_of_the_papers(variant):
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.25, 3.0, math.nan, -1.0], [2.0, 2.0, 2.0, math.nan]]
    rewards += [[math.nan, 5.0, math.nan, math.nan], [math.nan] * 4]
    found = policy_gradient.advantages(np.asarray(rewards), variant)
    assert found.dtype == np.float32
    for group, gains in zip(rewards[:2], found.tolist(), strict=False):
        kept = [reward for reward in group if not math.isnan(reward)]
        mean, spread = statistics.mean(kept), statistics.pstdev(kept)
        for reward, gain in zip(group, gains, strict=True):
            expected = (reward - mean) / (spread if variant == "grpo" else 1.0)
            assert gain == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert np.isnan(found[2:]).all(), "equal rewards, and single ones, teach nothing"


def test_a_reward_that_fails_leaves_its_sample_out_and_is_named():
    def reward(value):
        if value == 2:
            raise KeyError("no answer")
        return value

    samples = [(f"sample {value}", (value,)) for value in (0.5, 2, 3.0, math.inf, 2)]
    found, failures = exercises.rewarded(reward, samples)
    np.testing.assert_array_equal(found, [0.5, np.nan, 3.0, np.nan, np.nan])
    assert failures.count == 3
    assert str(failures) == (
        "sample 2: KeyError: 'no answer'; sample inf: the reward is inf, which is no finite number"
    )
    empty, none = exercises.rewarded(reward, [])
    assert empty.shape == (0,) and none.count == 0


@pytest.mark.parametrize(
    ("solved", "move", "text", "right"),
    [
        ((1,), 2, " Question 2: 85+85+7. Answer 2: 177.", 1.0),
        ((1,), 2, " Question 3: 20-6. Answer 3: 14.", 0.0),
        ((1, 2), 3, " Question 3: 20-6. Answer 3: 14.", 1.0),
        ((1,), 2, " Question 2: 85+85+7. Answer 2: 178.", 0.0),
        ((1,), 2, " Question 1: 47+38. Answer 1: 85.", 0.0),
        ((), 1, " Question 2: 85+85+7. Answer 2: 177.", 0.0),
        ((1,), 2, " Answer 2: 177. Answer 3: 14.", 0.0),
        ((1,), 2, " I wait for Bob.", 0.0),
        ((1, 2, 3), BOX, " \\boxed{85, 177, 14}", 1.0),
        ((1, 2, 3), BOX, " \\boxed{85, 177, 15}", 0.0),
        ((1, 2, 3), BOX, " Question 1: 47+38. Answer 1: 85.", 0.0),
    ],
)
def test_the_checker_rewards_one_right_answer_to_the_next_question(solved, move, text, right):
    exercise = exercises.Exercise(PROBLEM, solved, move, ())
    assert exercises.right_answer(exercise, text) == right


# The gradient


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return one_layer()


def sampled() -> RolloutBatch:
    """Random tokens as three samples of each of three prompts."""
    rng = np.random.default_rng(0)
    count = 3 * len(SIZES)
    done = [Completion("", (), FinishReason.STOP)] * count
    found = RolloutBatch.empty(done, [i // 3 for i in range(count)], 64, 0)
    for row in range(count):
        prompt, sizes = SIZES[row // 3]
        size = sizes[row % 3]
        own = slice(prompt, prompt + size)
        shared = np.random.default_rng(100 + row // 3).integers(3, 402, prompt)
        found.tokens[row, :prompt], found.tokens[row, own] = shared, rng.integers(3, 402, size)
        found.prompt_mask[row, :prompt], found.completion_mask[row, own] = True, True
        found.prompt_lengths[row], found.completion_lengths[row] = prompt, size
    return found


def chosen(model: LoadedModel, batch: RolloutBatch, params, temperature: float):
    """The log-probabilities of all tokens but the first, by the pass over whole sequences."""
    logits = Decoder(model.config).apply(params, batch.tokens[:, :-1], method="causal")
    found = jax.nn.log_softmax(logits / temperature)
    return jnp.take_along_axis(found, batch.tokens[:, 1:, None], axis=-1)[..., 0]


def published(model, batch, params, reference, length, objective):
    """The mean over samples of the formula in the module's docstring, sample by sample."""
    now = chosen(model, batch, params, objective.temperature)
    before = chosen(model, batch, reference, objective.temperature)
    total, count = 0.0, 0
    for row, gain in enumerate(GAINS.ravel().tolist()):
        if math.isnan(gain):
            continue
        start, size = int(batch.prompt_lengths[row]), int(batch.completion_lengths[row])
        own = slice(start - 1, start - 1 + size)
        ratio = jnp.exp(now[row, own] - batch.processed_logprobs[row, 1:][own])
        cut = jnp.clip(ratio, 1 - objective.low, 1 + objective.high)
        other = jnp.exp(before[row, own] - now[row, own])
        penalty = other - jnp.log(other) - 1
        each = jnp.minimum(ratio * gain, cut * gain) - objective.kl * penalty
        total, count = total + jnp.sum(each) / (length or size), count + 1
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "temperature"), [(None, 1.0), pytest.param(16, 0.7, marks=pytest.mark.slow)]
)
def test_an_update_has_the_gradients_of_the_published_objective(model, length, temperature):
    """Prompts read once for their groups, in batches of one shape, against whole sequences; ratios
    on both sides of the clip, and a divergence."""
    objective = policy_gradient.Objective(0.2, 0.3, 0.1, temperature)
    params, rng = model.named_params, np.random.default_rng(1)
    reference = jax.tree.map(
        lambda p: p + 0.01 * rng.standard_normal(p.shape).astype(np.float32), params
    )
    batch = sampled()
    noise = 0.3 * rng.standard_normal((len(batch.tokens), 63))
    batch.processed_logprobs[:, 1:] = noise + np.asarray(chosen(model, batch, params, temperature))
    episodes = policy_gradient.group_episodes(batch, GAINS, SHAPE, length)
    assert sum(episode.samples for episode in episodes) == np.isfinite(GAINS).sum() == 5
    total = empty_sums(params, policy_gradient.NAMES)
    for learned, samples in policy_gradient.batches(episodes, SHAPE):
        total = policy_gradient.add_gradients(
            total,
            params,
            reference,
            learned,
            jnp.float32(samples),
            module=model.module,
            objective=objective,
        )
    count = float(total["weight"])
    assert count == 5 and total["tokens"] == 9 + 1 + 7 + 12 + 5
    assert 0 < total["clipped"] < total["tokens"] and total["divergence"] > 0 < total["drift"]
    with jax.numpy_dtype_promotion("standard"):
        value, gradients = jax.jit(
            jax.value_and_grad(lambda p: published(model, batch, p, reference, length, objective))
        )(params)
    assert float(total["objective"]) / count == pytest.approx(float(value), abs=1e-4)
    scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients))
    for ours, theirs in zip(
        jax.tree.leaves(total["gradients"]), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(-ours / count, theirs, atol=1e-4 * scale)


def test_a_group_that_is_larger_than_a_batch_is_divided():
    """By blocks and by tokens; what it learns stays the same."""
    batch, small = sampled(), Shape(tokens=48, tiles=16, blocks=3)
    whole = policy_gradient.group_episodes(batch, GAINS, SHAPE)
    parts = policy_gradient.group_episodes(batch, GAINS, small)
    assert [each.samples for each in whole] == [2, 3] and len(parts) > 2
    assert all(each.lesson.trace.num_tokens <= 48 for each in parts)

    def told(episodes, name):
        return np.concatenate([getattr(each, name) for each in episodes]).tolist()

    for name in ("advantages", "sampled_with"):
        assert told(parts, name) == told(whole, name)
    assert told([e.lesson for e in parts], "targets") == told([e.lesson for e in whole], "targets")
    with pytest.raises(ValueError, match="--tokens is 40, but a prompt and its sample have 43"):
        policy_gradient.group_episodes(batch, GAINS, Shape(tokens=40))


# Exercises


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load(EMBEDDED, dtype="float32")


def test_exercises_are_of_dependent_questions_that_can_be_solved(embedded):
    book = exercises.ExerciseBook(embedded, Format.of(embedded))
    drawn = [book.draw(random.Random(seed), 0.0) for seed in range(20)]
    for exercise in drawn:
        question = exercise.problem.questions[exercise.move - 1]
        assert isinstance(question, Dependent) and question.source in exercise.solved
        assert exercise.move not in exercise.solved
        text = embedded.tokenizer.decode(exercise.tokens)
        assert exercise.problem.prompt() in text
        assert text.endswith(f"\n\nAlice {len(exercise.solved) + 1}:")
        for number in exercise.solved:
            assert f" Answer {number}: {exercise.problem.answers[number - 1]}." in text
    plain = [book.draw(random.Random(seed), 1.0) for seed in range(20)]
    kinds = {
        BOX if each.move == BOX else type(each.problem.questions[each.move - 1]) for each in plain
    }
    assert kinds == {BOX, Question}


def test_held_out_problems_are_those_of_the_task():
    task = load_task("sums-dependent", samples=4)
    held = exercises.held_out(4)
    assert [p.prompt() for p in held] == [p.text for p in task.problems]
    assert [tuple(map(str, p.answers)) for p in held] == [p.answers for p in task.problems]


@pytest.mark.slow
def test_problems_are_solved_as_a_session_of_one_worker_solves_them(embedded):
    problems = exercises.held_out(6)
    book = exercises.ExerciseBook(embedded, Format.of(embedded))
    with Engine(embedded, max_rows=8) as engine:
        texts = book.solve(engine, problems)
        shares = book.measure(engine, problems)
    right = []
    for problem, text in zip(problems, texts, strict=True):
        session = Workers(
            embedded, problem.prompt(), names=["Alice"], budget=400, sampler=Sampler(0.0)
        )
        result = session.run()
        assert text.split("\n\n")[1:] == [step.text.removesuffix("\n\n") for step in result.steps]
        [answer] = result.answers.values()
        found = (answer.value or "").split(", ")
        right += [a == str(b) for a, b in zip(found, problem.answers, strict=True)]
    assert shares["all"] == pytest.approx(np.mean(right))


@pytest.mark.slow
def test_what_a_session_has_sampled_is_found_in_its_trace(embedded):
    """Every token of greedy workers is the likeliest by the core's own re-encoding."""
    result, lesson = team.play(
        embedded,
        Format.of(embedded),
        PROBLEM,
        workers=2,
        budget=120,
        temperature=0.0,
        seed=3,
    )
    assert len(lesson.at) == result.tokens > 60 and (lesson.weights == 1).all()
    logits = reencode_logits(
        embedded.module,
        embedded.params,
        TraceBatch.of([lesson.trace]),
        jnp.asarray(lesson.at)[None],
    )
    np.testing.assert_array_equal(jnp.argmax(logits[0], axis=-1), lesson.targets)
    assert result.passes < 120, "an answer has ended it"


def answered(value: str | None, passes: int, *steps: tuple[str, int | None]) -> Result:
    """A result with an answer and finished steps, each with the passes after which it ended."""
    made = [
        Step("Alice", number, text, 0, ended, [], False, False)
        for number, (text, ended) in enumerate(steps, 1)
    ]
    answer = Answer(value, "", passes, 0)
    return Result(("Alice", "Bob"), made, {100: answer}, passes, FinishReason.ANSWER, 0.0, 0.0, 0)


RIGHT = "85, 177, 14"
FIRST, THIRD = "Question 1: 47+38. Answer 1: 85.", "Question 3: 20-6. Answer 3: 14."


@pytest.mark.parametrize(
    ("result", "reward"),
    [
        (answered(RIGHT, 40), 0.8),
        (answered(RIGHT, 100), 0.5),
        (answered(RIGHT, 40, (FIRST, 10), (THIRD, 20)), (0.95 + 0.8 + 0.9) / 3),
        # the first time counts, and what is wrong or not finished does not
        (answered(RIGHT, 40, (FIRST, 30), (FIRST, 10)), (0.95 + 0.8 + 0.8) / 3),
        (answered(RIGHT, 40, (FIRST.replace("85", "84"), 10), (THIRD, None)), 0.8),
        # an answer that the box does not have is worth nothing
        (answered("85, 177, ?", 40, (THIRD, 20)), 0.8 * 2 / 3),
        (answered("85, 177", 40), 0.8 * 2 / 3),
        (answered("1, 2, 3, 4", 40, (FIRST, 10)), 0.0),
        (answered(None, 100, (FIRST, 10)), 0.0),
    ],
)
def test_sessions_are_rewarded_for_right_answers_in_few_passes(result, reward):
    assert team.right_and_soon(PROBLEM, result) == pytest.approx(reward)


def test_of_a_group_those_samples_are_learned_from_whose_rewards_vary_most():
    """Against all choices of as many."""
    rng = np.random.default_rng(3)
    groups = np.stack(
        [rng.integers(0, 2, 7), rng.standard_normal(7), [1, 0, 0, 0, 0, 0, 0], np.ones(7)]
    ).astype(float)
    groups[1, [0, 4]] = np.nan
    for count in (2, 3, 7):
        found = policy_gradient.widest(groups, count)
        for group, kept in zip(groups, found, strict=True):
            real = [each for each in group.tolist() if not math.isnan(each)]
            chosen = kept[np.isfinite(kept)]
            assert len(chosen) == min(count, len(real))
            best = max(map(np.var, itertools.combinations(real, len(chosen))))
            assert np.var(chosen) == pytest.approx(best)
            np.testing.assert_array_equal(kept[np.isfinite(kept)], group[np.isfinite(kept)])


# Runs


def ones(exercise, text) -> float:
    """A reward that is easy to raise: the share of ones in a text. Some samples have none."""
    if text.startswith("9"):
        raise ValueError("a nine")
    return text.count("1") / (1 + len(text))


def broken(exercise, text) -> float:
    raise RuntimeError("this function is not finished")


def arguments(folder, *more: str) -> list[str]:
    return [
        *("--prompts", "4", "--samples", "4", "--tokens", "1024", "--rows", "16"),
        *("--evaluate-every", "0", "--max-new-tokens", "32", "--json"),
        *("--reward", "tests.scripts.test_grpo:ones"),
        *("--run-dir", str(folder / "run"), "--out", str(folder / "out")),
        *more,
    ]


def run(capsys, folder, *more: str) -> dict:
    with jax.numpy_dtype_promotion("standard"):  # optax's own
        grpo.main(arguments(folder, *more))
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model cut off after its first layer, whose texts vary."""
    return folder_of_first_layers(tmp_path_factory.mktemp("model") / "first", 1)


def drawn_on_the_host(engine, prompts, samples, sampler, seed, max_new_tokens):
    """Samples that follow from the seed and the engine's weights, bit by bit. An engine's own are
    those of an engine of the same weights to rounding alone: its passes have the rows that have
    arrived."""
    held = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(engine.model.params)]
    rng = np.random.default_rng([seed % 2**63, zlib.crc32(b"".join(held))])
    made = rng.integers(3, 402, (len(prompts), samples, 5))
    done = [
        Completion(
            engine.model.tokenizer.decode(tokens),
            tuple(tokens.tolist()),
            FinishReason.STOP,
            index=i,
            logprobs=(-6.0,) * 5,
            processed_logprobs=(-6.0,) * 5,
            version_runs=((5, engine.params_version),),
        )
        for of_prompt in made
        for i, tokens in enumerate(of_prompt)
    ]
    groups = [done[samples * p : samples * (p + 1)] for p in range(len(prompts))]
    return pack(engine.model, [np.asarray(p, np.int32) for p in prompts], groups)


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on_as_a_whole_one(capsys, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(practice, "paragraphs", drawn_on_the_host)
    more = ("--model", str(folder), "--steps", "6", "--kl", "0.01", "--save-seconds", "0")
    whole = run(capsys, tmp_path / "whole", *more)
    assert whole["steps"] == 6 and whole["samples"] == 6 * 16
    assert (tmp_path / "whole" / "run" / "training.png").stat().st_size > 1000
    step = grpo._Trainer._step

    def some(trainer):
        if trainer._run.step == 3:
            raise KeyboardInterrupt
        step(trainer)

    with monkeypatch.context() as patch:
        patch.setattr(grpo._Trainer, "_step", some)
        with pytest.raises(KeyboardInterrupt):
            run(capsys, tmp_path / "parts", *more)
    for wrong, words in (
        ((), "has a run already; add --resume"),
        (("--resume", "--seed", "1"), "was made with seed=0, not 1"),
    ):
        with pytest.raises(SystemExit):
            run(capsys, tmp_path / "parts", *more, *wrong)
        assert words in capsys.readouterr().err
    resumed = run(capsys, tmp_path / "parts", "--resume", *more)
    ours, theirs, first = (
        jax.tree.leaves(load(path).params)
        for path in (tmp_path / "parts" / "out", tmp_path / "whole" / "out", folder)
    )
    for a, b, before in zip(ours, theirs, first, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, before)
    del whole["cpu_seconds"], resumed["cpu_seconds"], whole["out"], resumed["out"]
    assert resumed == whole and whole["samples_left_out"] > 0


@pytest.mark.slow
def test_the_reward_of_an_easy_task_grows_within_a_few_steps(capsys, tmp_path, folder):
    run(capsys, tmp_path, "--model", str(folder), "--steps", "10", "--learning-rate", "0.02")
    with SavedCheckpoint(tmp_path / "run" / "saves") as saved:
        rewards = saved.metadata["history"]["reward"]
    assert len(rewards) == 10 and np.mean(rewards[-3:]) > 1.5 * np.mean(rewards[:3])


@pytest.mark.slow
def test_a_reward_function_that_always_fails_ends_the_run_with_its_words(capsys, tmp_path, folder):
    with pytest.raises(SystemExit) as error:
        run(
            capsys,
            tmp_path,
            "--model",
            str(folder),
            "--steps",
            "2",
            "--reward",
            "tests.scripts.test_grpo:broken",
        )
    assert error.value.code == 2
    words = capsys.readouterr().err
    assert "no sample could be rewarded: sample 0 of prompt 0 in step 0: RuntimeError" in words


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--steps", "0"], "--steps must be positive; got 0"),
        (["--samples", "1"], "--samples is 1; a group needs at least 2"),
        (["--clip-low", "1"], "--clip-low is 1.0; a ratio cannot fall by 1"),
        (["--plain", "2"], "--plain from 0 to 1; got 0.0 and 2.0"),
        (["--kl", "nan"], "--kl must be at least 0"),
        (["--workers", "9"], "--workers is 9; give 1 to 6"),
        (["--reward", "nothing"], "--reward nothing cannot be imported"),
        (["--reward", "json:nothing"], "has no attribute 'nothing'"),
        (["--model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(capsys, tmp_path, more, words):
    with pytest.raises(SystemExit) as error:
        grpo.main([*arguments(tmp_path), *more])
    assert error.value.code == 2 and words in capsys.readouterr().err


def test_defaults_are_those_of_the_command_line():
    args, _ = parse([])
    assert dataclasses.asdict(policy_gradient.Objective())["low"] == args.clip_low
