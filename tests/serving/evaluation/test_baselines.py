"""The methods that workers are compared with: the embedded model against plain loops, and a model
that follows a script, counted by hand."""

import collections
import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxshare import FinishReason, KVCache, Layout, Sampler
from jaxshare.models import LoadedModel
from jaxshare.models.generation_config import Generation
from jaxshare.seeds import stream_seed
from jaxshare.serving import PLAIN, Result
from jaxshare.serving.evaluation import arithmetic
from jaxshare.serving.evaluation.baselines import (
    METHODS,
    self_consistency,
    sequential,
    skeleton_of_thought,
)
from tests.helpers import TINY, init
from tests.serving.branches.test_branches import embedded as model
from tests.serving.branches.test_branches import plain_greedy, problem

WARM = Sampler(temperature=2.4, top_k=8)
EMBEDDED = dict(budget=240, finisher_tokens=24)


@functools.cache
def prompt() -> list[int]:
    text = model().tokenizer.apply_chat_template(
        problem().messages(), tokenize=False, add_generation_prompt=True
    )
    return model().tokenizer.encode(text)


def tokens(result: Result, name: str) -> list[int]:
    return [token for step in result.steps if step.worker == name for token in step.tokens]


@functools.cache
def warm(seed: int, finish_at: tuple[int, ...] = (30, 100, 240)) -> Result:
    return sequential(
        model(), problem().prompt(), sampler=WARM, seed=seed, finish_at=finish_at, **EMBEDDED
    )


# one stream


@pytest.mark.slow
def test_sequential_is_a_plain_loop():
    result = sequential(model(), problem().prompt(), **EMBEDDED)
    expected, _ = plain_greedy(prompt(), 256 - len(prompt()), model)
    assert len(expected) > 60
    assert tokens(result, "Alice")[: len(expected)] == expected
    assert result.steps[0].text == model().tokenizer.decode(result.steps[0].tokens)
    assert result.passes == sum(len(step.tokens) for step in result.steps) + 1  # the stop token
    assert result.finish_reason is FinishReason.ANSWER


def test_sequential_solves_problems():
    right = []
    for seed in range(5):
        answer = sequential(model(), problem(seed).prompt(), **EMBEDDED).answers[240]
        right += arithmetic.check(f"\\boxed{{{answer.value}}}", problem(seed))
        assert answer.extra_passes == 0
    assert np.mean(right) >= 0.95


def test_answers_do_not_depend_on_how_many_are_asked_for():
    result = warm(0)
    assert sorted(result.answers) == [30, 100, 240]
    assert [result.answers[at].passes for at in (30, 100)] == [30, 100]
    assert result.answers[30].extra_passes > 0 and result.answers[30].text.startswith(
        "\n\nAlice 6: \\boxed{"
    )
    for at in (30, 100):
        single = warm(0, (at,))
        assert single.answers == {at: result.answers[at]}
        assert [step.tokens for step in single.steps] == [step.tokens for step in result.steps]


def test_without_early_stop_only_what_is_written_counts():
    result = sequential(
        model(), problem().prompt(), finish_at=(100, 240), early_stop=False, **EMBEDDED
    )
    assert result.answers[100].value is None and result.answers[240].value == ", ".join(
        map(str, problem().answers)
    )
    assert [answer.extra_passes for answer in result.answers.values()] == [0, 0]
    assert (
        result.texts["Alice"].startswith(result.answers[100].text)
        and result.answers[240].text == result.texts["Alice"]
    )


# several streams


@pytest.mark.slow
def test_samples_are_separate_runs_and_vote():
    result = self_consistency(
        model(),
        problem().prompt(),
        workers=3,
        sampler=WARM,
        seed=6,
        finish_at=(30, 100, 240),
        answer_by="vote",
        **EMBEDDED,
    )
    single = [warm(stream_seed(6, i)) for i in range(3)]
    assert len(set(result.texts.values())) == 3
    for name, other in zip(result.names, single, strict=True):
        assert tokens(result, name) == tokens(other, "Alice")
        assert result.texts[name] == other.texts["Alice"]
    assert result.passes == max(other.passes for other in single)
    for at, answer in result.answers.items():
        votes = collections.Counter(
            other.answers[at].value for other in single if other.answers[at].value is not None
        )
        assert answer.value == (votes.most_common(1)[0][0] if votes else None)
        assert answer.extra_passes == sum(other.answers[at].extra_passes for other in single)
    # the first is outvoted
    assert result.answers[100].value not in (None, single[0].answers[100].value)


@pytest.mark.slow
def test_the_finisher_reads_all_samples_one_after_the_other():
    result = self_consistency(
        model(),
        problem().prompt(),
        workers=2,
        sampler=WARM,
        seed=1,
        finish_at=(40,),
        budget=40,
        finisher_tokens=24,
    )
    finisher = model().tokenizer.encode("\n\nAlice 6: \\boxed{")
    cache = KVCache.create(model().config, (256, 64, 64, 64), jnp.float32)
    made: list[int] = []
    # Each stream begins with the last token of the prompt.
    for block, seen, fed in (
        (0, [0], prompt()[:-1]),
        (1, [0, 1], [prompt()[-1], *tokens(result, "sample 1")]),
        (2, [0, 2], [prompt()[-1], *tokens(result, "sample 2")]),
        (3, [0, 1, 2, 3], finisher),
    ):
        logits, cache = model().forward(
            [fed], [len(fed)], cache, Layout.from_blocks([seen], width=4)
        )
        assert int(cache.lengths[block]) == len(fed)
    for _ in range(24):
        made.append(int(jnp.argmax(logits[0])))
        logits, cache = model().forward([made[-1:]], [1], cache, Layout.from_blocks([[0, 1, 2, 3]]))
    text = result.answers[40].text
    assert len(text) > len("\n\nAlice 6: \\boxed{") + 5
    assert model().tokenizer.decode(finisher + made).startswith(text)


# an outline and its points, by a model whose next token depends on the last one alone

LETTERS = "bcdefghijklmnopqrstu"
PHRASES = ["\n\n", "\n\nNow", "1.", "\n2.", "\n3.", " add", " square", "\\boxed{7}"]
OUTLINE = ["1.", " add", "\n2.", *LETTERS, "\n3.", " square", "\n\nNow"]
# the second takes two passes to feed, which do not count
TITLES = ["1. add", f"2. {LETTERS}", "3. square"]
# tokens that the threads have with the seeds below, the one that stops them included
LENGTHS = [7, 2, 13]


def scripted(outline: list[str], goes_on: float = 0.8) -> LoadedModel:
    """A model that writes the outline after its first entry, in a thread one x after the other,
    and at last a box.

    Args:
      goes_on: how likely a further x is.
    """
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
        )
    )
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        decoders.ByteLevel(),
    )
    backend.add_tokens(PHRASES)
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    size = backend.get_vocab_size()
    follows = {text: {after: 1.0} for text, after in itertools.pairwise(outline)}
    follows |= {
        "\n": {"x": 1.0},
        "x": {"x": goes_on, "<end>": max(1 - goes_on, 1e-30)},
        "\n\n": {"\\boxed{7}": 1.0},
        "\\boxed{7}": {"<end>": 1.0},
        "{": {"9": 1.0},
        "9": {"}": 1.0},
    }
    chances = np.full((size, size), 1e-30)
    for text, after in follows.items():
        for following, chance in after.items():
            (left,), (right,) = (tokenizer.encode(t) for t in (text, following))
            chances[left, right] = chance
    config = dataclasses.replace(
        TINY,
        vocab_size=size,
        hidden_size=size,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        qk_norm=False,
        qkv_bias=False,
        norm_eps=1e-12,
    )
    # The layers add nothing, a normed one-hot vector is sqrt(size) long, and the head looks up what
    # follows it.
    params = jax.tree.map(jnp.zeros_like, init(config))
    params["params"]["norm"]["scale"] = jnp.ones(size)
    params["params"]["embed"]["embedding"] = jnp.eye(size)
    params["params"]["head"]["kernel"] = jnp.asarray(np.log(chances).T / size**0.5, jnp.float32)
    return LoadedModel(
        config,
        params,
        tokenizer,
        Generation(tuple(tokenizer.encode("<end>")), Sampler(1.0)),
    )


def dealt(lengths: list[int], workers: int) -> list[list[int]]:
    """The pass in which each thread gets each token, by dealing them out."""
    left, given, passes = list(lengths), [[] for _ in lengths], 0
    while any(left):
        queue = [i for i, n in enumerate(left) if n]
        while queue:
            passes += 1
            for i in [queue.pop(0) for _ in range(min(workers, len(queue)))]:
                given[i].append(passes)
                left[i] -= 1
    return given


@functools.cache
def script() -> LoadedModel:
    return scripted(OUTLINE)


@functools.cache
def skeleton(workers: int | None, budget: int = 200, finish_at: tuple[int, ...] = ()) -> Result:
    return skeleton_of_thought(
        script(), "Solve it.", workers=workers, budget=budget, finish_at=finish_at, seed=741
    )


@pytest.mark.slow
def test_threads_and_what_comes_before_and_after():
    result, outline = skeleton(None), len(OUTLINE) - 1
    assert result.names == ("outline", *TITLES, "main")
    assert result.texts == {
        "outline": "".join(OUTLINE),
        "main": "\\boxed{7}",
        **{title: f"{title}\n{'x' * (n - 1)}" for title, n in zip(TITLES, LENGTHS, strict=True)},
    }
    assert {step.worker: step.ended for step in result.steps} == {
        "outline": None,
        "main": outline + 13 + 2,
        **{title: outline + n for title, n in zip(TITLES, LENGTHS, strict=True)},
    }
    assert result.answers[200].value == "7" and result.answers[200].extra_passes == 0
    assert (
        result.passes == result.answers[200].passes == outline + 13 + 2
        and result.finish_reason is FinishReason.ANSWER
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "passes"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, 7 + 2 + 13), (2, 2 * 2 + 11))
        ),
        (3, 13),
    ],
)
def test_threads_in_turn(workers, passes):
    result, outline = skeleton(workers), len(OUTLINE) - 1
    assert result.texts == skeleton(None).texts
    ended = {step.worker: step.ended for step in result.steps}
    assert [ended[title] for title in TITLES] == [
        outline + turns[-1] for turns in dealt(LENGTHS, workers)
    ]
    assert result.passes == outline + passes + 2


@pytest.mark.slow
def test_a_budget_counts_over_all_stages():
    outline = len(OUTLINE) - 1
    result = skeleton(2, 200, (5, outline, outline + 3, 200))
    guess = PLAIN.finisher + "9}"
    assert [(at, a.passes, a.value, a.text == guess) for at, a in result.answers.items()] == [
        (5, 5, "9", True),
        (outline, outline, "9", True),
        (outline + 3, outline + 3, "9", True),
        (200, outline + 17, "7", False),
    ]
    assert result.texts == skeleton(2).texts

    short = skeleton(2, outline + 3)
    written = [
        min(sum(at <= 3 for at in turns), n - 1)
        for turns, n in zip(dealt(LENGTHS, 2), LENGTHS, strict=True)
    ]
    assert [short.texts[title].count("x") for title in TITLES] == written == [2, 1, 1]
    assert (
        short.passes == outline + 3
        and short.finish_reason is FinishReason.LENGTH
        and short.answers[outline + 3].value == "9"
    )
    assert [step.ended for step in short.steps if step.worker in TITLES] == [
        outline + 3,
        None,
        None,
    ]

    shorter = skeleton(2, 5)
    assert (
        shorter.names == ("outline",)
        and shorter.texts["outline"] == "".join(OUTLINE[:6])
        and shorter.answers[5].value == "9"
    )


@pytest.mark.slow
def test_an_outline_without_points_is_dropped():
    result = skeleton_of_thought(scripted(["1.", "\n\nNow"]), "Solve it.", budget=40)
    assert result.names == ("outline", "main") and result.texts == {
        "outline": "1.\n\nNow",
        "main": "\\boxed{7}",
    }
    assert result.passes == 1 + 2 and result.answers[40].value == "7"


@pytest.mark.slow
def test_threads_leave_half_of_the_context():
    endless = scripted(OUTLINE, goes_on=1.0)
    endless = dataclasses.replace(
        endless, config=dataclasses.replace(endless.config, max_positions=1200)
    )
    result = skeleton_of_thought(endless, "Solve it.", budget=1000)
    written = {result.texts[title].count("x") for title in TITLES}
    assert len(written) == 1 and 50 < written.pop() < 200
    assert result.answers[1000].value == "7"


@pytest.mark.slow
def test_skeleton_with_a_model_that_has_not_learned_it():
    result = skeleton_of_thought(
        model(), problem().prompt(), workers=2, finish_at=(5, 240), **EMBEDDED
    )
    assert result.answers[5].passes == 5 and 5 < result.passes <= 240
    assert result.steps[0].worker == "outline" and result.steps[0].text.startswith("1.")


# all of them


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_methods_are_called_alike(name):
    events = []
    result = METHODS[name](
        script(),
        "Solve it.",
        workers=2,
        budget=80,
        finish_at=[3, 80],
        format=PLAIN,
        finisher_tokens=8,
        on_event=events.append,
    )
    assert sorted(result.answers) == [3, 80] and result.passes <= 80
    assert result.answers[80].value == ("9" if name == "self-consistency" else "7")
    assert json.loads(json.dumps(result.as_json()))["passes"] == result.passes
    assert [event.passes for event in events] == sorted(event.passes for event in events)
    for worker in result.names:
        assert (
            "".join(event.text for event in events if event.worker == worker)
            == result.texts[worker]
        )


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        *[(name, {"budget": 0}, "budget is 0; it must be at least 1") for name in METHODS],
        *[
            (
                name,
                {"finish_at": [41]},
                "finish_at has 41; it must lie between 1 and the budget of 40",
            )
            for name in METHODS
        ],
        *[
            (name, {"kind": "poem"}, "kind is 'poem'; it must be one of box, code")
            for name in METHODS
        ],
        *[
            (name, {"workers": 0}, "workers is 0; it must be at least 1")
            for name in ("self-consistency", "vote", "skeleton", "workers")
        ],
        ("self-consistency", {"answer_by": "shouting"}, "answer_by is 'shouting'"),
        (
            "self-consistency",
            {"budget": 1500, "workers": 3},
            "3 texts of up to 1500 tokens .* but the model's context holds 4096; lower",
        ),
    ],
)
def test_bad_input(name, options, words):
    with pytest.raises(ValueError, match=words):
        METHODS[name](script(), "Solve it.", **{"budget": 40, **options})
