"""The arithmetic, arguments and documents of the benchmark of sharing, and that what it times is
what it says; the times are no matter."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxshare import KVCache, Layout, block_attention
from jaxshare.models import LoadedModel, load
from jaxshare.models.generation_config import Generation
from jaxshare.serving import Costs
from jaxshare.sharding import make_mesh
from scripts.bench import peer
from scripts.bench import sharing as bench
from scripts.bench.parts.sharing import attention, needles, plots
from scripts.bench.parts.sharing import decode as decoding
from scripts.bench.parts.sharing import generate as generating
from scripts.bench.parts.sharing import options as sharing_options
from scripts.bench.parts.sharing import report as sharing_report
from tests.helpers import TINY, tiny_params
from tests.paths import FIXTURES

SHARED, UNSHARED, NO_ATTENTION, THEIRS, SDPA, PRODUCT = (
    getattr(attention, name)
    for name in ("SHARED", "UNSHARED", "NO_ATTENTION", "THEIRS", "SDPA", "PRODUCT")
)
PRODUCT_SECONDS = 2 * 2048**3 / 100e9
"""Of a product at 100 GFLOP/s."""


@pytest.fixture(scope="module")
def model():
    return LoadedModel(
        TINY, jax.tree.map(lambda p: p.astype(jnp.bfloat16), tiny_params()), None, Generation()
    )


@pytest.mark.slow
# What is timed.

@pytest.mark.parametrize("shared", [True, False])
def test_the_attention_that_is_timed_sees_prefix_and_suffix(shared):
    run = attention.Attention(TINY, 3, 40, 8, shared=shared, seed=0)
    expected = jax.jit(functools.partial(block_attention, implementation="reference"))(
        run.q, run.keys, run.values, run.plan
    )
    np.testing.assert_allclose(
        run.attend(1).astype(jnp.float32), expected.astype(jnp.float32), atol=0.05
    )
    seen = np.asarray(run.plan.visible)
    assert seen.tolist() == ([[40, 8]] * 3 if shared else [[48]] * 3)
    assert int(run.plan.read_tokens) == (40 + 3 * 8 if shared else 3 * 48)
    assert run.turn() > 0


@pytest.mark.slow
def test_a_turn_decodes_from_the_same_lengths_every_time(model):
    run = decoding.Decoding(
        decoding.first_layers(model, 1), 2, 30, shared=True, suffix=8, room=12, steps=4, seed=0
    )
    decoding.compile_all([run])
    for turn in (1, 2):
        assert run.turn() > 0
        assert (
            np.asarray(run.state.cache.lengths).tolist() == [30, 12, 12]
            and len(run.state.cache.keys) == 1
        )
        run.check(turn)
    with pytest.raises(RuntimeError, match="before their 12 passes"):
        run.check(3)


def test_what_is_not_shared_is_copied(model):
    run = decoding.Decoding(model, 2, 30, shared=False, suffix=8, room=12, steps=4, seed=0)
    assert np.asarray(run.state.cache.lengths).tolist() == [38, 38] and np.asarray(
        run.state.layout.blocks
    ).tolist() == [[0], [1]]


@pytest.mark.slow
def test_the_ceiling_does_all_of_a_pass_but_attention(model):
    free, tokens = decoding.AttentionFreeModel.of(model), [[3, 4, 5], [6, 7, 0]]
    layout, count = Layout.from_blocks([[0], [1]]), [3, 2]
    _, ours = model.forward(tokens, count, KVCache.create(TINY, (8, 8)), layout)
    logits, theirs = free.forward(tokens, count, KVCache.create(TINY, (8, 8)), layout)
    # The first layer's keys do not depend on attention; how many tokens are cached does in no
    # layer.
    np.testing.assert_array_equal(ours.keys[0], theirs.keys[0])
    assert (
        np.asarray(theirs.lengths).tolist() == [3, 2]
        and float(jnp.abs(theirs.values[-1].astype(jnp.float32)).max()) > 0
    )
    # Nothing of one token reaches another, so the last token's logits are those of that token
    # alone.
    alone, _ = free.forward([[5, 0, 0], [7, 0, 0]], [1, 1], KVCache.create(TINY, (8, 8)), layout)
    np.testing.assert_allclose(logits, alone, atol=1e-2)
    assert isinstance(free.for_context(16).module, decoding.AttentionFree)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_experts", "gpt_oss_gqa_sharded", "embedded"])
def test_the_ceiling_is_there_for_every_kind_of_attention_and_on_a_mesh(name):
    mesh = make_mesh(tensor=2) if name == "embedded" else None
    path = name if mesh else FIXTURES / "parity" / name
    model = load(path, dtype="float32", mesh=mesh)
    free, layout = decoding.AttentionFreeModel.of(model), Layout.from_blocks([[0], [1]])

    def logits(tokens, count):
        cache = KVCache.create(model.config, (8, 8), jnp.float32, mesh=mesh)
        found, cache = free.forward(tokens, count, cache, layout)
        assert np.asarray(cache.lengths).tolist() == count
        return np.asarray(found)

    # Nothing of one token reaches another.
    alone = logits([[5, 0, 0], [7, 0, 0]], [1, 1])
    np.testing.assert_allclose(logits([[3, 4, 5], [6, 7, 0]], [3, 2]), alone, atol=1e-4)


@pytest.mark.parametrize(("private", "shares"), [(1000, True), (0, False)])
def test_the_rule_is_asked_as_generate_asks_it(model, private, shares):
    costs = Costs(
        shared_start=1, shared_tile=1, shared_token_row=0, private_row=0, private_tile=private
    )
    assert decoding.chooses_sharing(model, 4, 300, costs) is shares


# Arithmetic.


def test_attention_is_two_products():
    # Scores of 3 rows, 2 heads and 5 tokens take 4 multiplications and 4 additions each; so does
    # the sum of as many values.
    assert attention.attention_flops(3, 2, 4, 5) == 2 * (3 * 2 * 5 * (4 + 4))
    config = dataclasses.replace(TINY, num_layers=3, num_kv_heads=2, head_dim=4)
    assert attention.copies_bytes(config, 7, 11) == sum(
        2 * 7 * 11 * 4 * 2 for _ in ("keys", "values") for _ in range(3)
    )


def test_attention_summary_has_rates_and_each_rounds_ratios():
    config = dataclasses.replace(TINY, num_heads=8, head_dim=64)
    flops = 4 * 64 * 8 * 64 * 4160
    found = attention.summarise(
        config,
        64,
        4096,
        64,
        {
            SHARED: [flops / 50e9] * 3,
            UNSHARED: [4 * flops / 50e9, 6 * flops / 50e9, 5 * flops / 50e9],
            PRODUCT: [PRODUCT_SECONDS] * 3,
        },
    )
    assert found["sides"][SHARED]["gflops"] == pytest.approx(50) and found[
        "product_gflops"
    ] == pytest.approx(100)
    assert found["sides"][SHARED]["of_products"] == pytest.approx(0.5) and found["sides"][UNSHARED][
        "of_products"
    ] == pytest.approx(0.1)
    assert found["slower_than_shared"] == {
        UNSHARED: pytest.approx({"median": 5, "lowest": 4, "highest": 6})
    }


def test_a_step_is_predicted_from_one_without_attention():
    config = dataclasses.replace(TINY, num_layers=10, num_heads=8, head_dim=64)
    # 10 layers of 4 * 64 * 8 * 64 * 4160 operations at 100 and at 50 GFLOP/s, on top of 40 and 50
    # ms.
    predicted = decoding.predict(
        config, 64, 4160, [0.04, 0.05], [PRODUCT_SECONDS, 2 * PRODUCT_SECONDS]
    )
    assert predicted == pytest.approx([0.04 + 0.05452595, 0.05 + 0.1090519], rel=1e-6)
    found = decoding.summarise(
        config,
        64,
        4096,
        64,
        {
            SHARED: [0.1, 0.2, 0.1],
            NO_ATTENTION: [0.04] * 3,
            THEIRS: [2.0, 2.0, 3.0],
            PRODUCT: [PRODUCT_SECONDS] * 3,
        },
    )
    assert found["sides"][SHARED]["tokens_per_second"] == pytest.approx(640)
    assert found["slower_than_shared"][THEIRS]["median"] == pytest.approx(20)
    assert found["shared_to_predicted"]["median"] == pytest.approx(0.1 / 0.09452595)


def test_a_choice_costs_nothing_where_it_is_the_better_one():
    times = {
        (SHARED, 1): [1.0, 1.0, 1.0],
        (SHARED, 2): [1.1, 1.1, 1.1],
        (UNSHARED, 1): [1.5] * 3,
        (UNSHARED, 2): [1.5] * 3,
    }
    found = decoding.summarise_rule(8, 256, {"default": SHARED, "calibrated": UNSHARED}, times)
    assert found["better"] == SHARED and found["better_to_itself"] == pytest.approx(1.1)
    assert found["chosen_to_better"]["default"] == 1.0
    # Three rounds of 1.5 to 1.0 and three of 1.5 to 1.1.
    assert found["chosen_to_better"]["calibrated"] == pytest.approx((1.5 + 1.5 / 1.1) / 2)
    assert sharing_report.worst_choices(
        [found, {**found, "chosen_to_better": {"default": 1.2, "calibrated": 1.0}}]
    ) == pytest.approx({"default": 1.2, "calibrated": (1.5 + 1.5 / 1.1) / 2})


def test_needles_summary_has_the_line_through_the_medians():
    found = generating.summarise_needles(
        {n: {SHARED: [9.0, 2 + n / 4, 0.0], NO_ATTENTION: [1.0] * 3} for n in (4, 8, 20)}, 30.0
    )
    assert found["seconds"] == {
        SHARED: {"4": 3.0, "8": 4.0, "20": 7.0},
        NO_ATTENTION: dict.fromkeys(("4", "8", "20"), 1.0),
        UNSHARED: {"4": 30.0},
    }
    assert found["line"][SHARED] == pytest.approx(
        {"seconds_at_none": 2, "seconds_a_question": 0.25}
    )
    assert found["unshared_to_shared"] == 10 and found["last_to_first"] == pytest.approx(7 / 3)


RESULTS = {
    "attention": [
        {
            "rows": 64,
            "prefix": 4096,
            "suffix": 64,
            "slower_than_shared": {UNSHARED: {"median": 7.9}},
            "sides": {SHARED: {"of_products": 0.56}},
        },
        {
            "rows": 16,
            "prefix": 4096,
            "suffix": 64,
            "slower_than_shared": {UNSHARED: {"median": 99.0}},
            "sides": {SHARED: {"of_products": 0.99}},
        },
    ],
    "end-to-end": [
        {
            "batch": 64,
            "prefix": 4096,
            "slower_than_shared": {UNSHARED: {"median": 3.1}, THEIRS: {"median": 14.0}},
            "shared_to_predicted": {"median": 1.2},
        }
    ],
    "needles": {
        "questions": [16, 64, 256],
        "last_to_first": 17.0,
        "documents": {"longest_to_shortest": {"median": 1.7}},
    },
    "levels": {"one_level_to": {generating.TWO: {"median": 1.4}, generating.MORE: {"median": 1.6}}},
    "rule": [
        {"chosen": {"default": SHARED}, "chosen_to_better": {"default": worst}}
        for worst in (1.0, 1.02)
    ],
}


def test_goals_are_those_of_what_was_measured():
    found = [(goal.measured, goal.goal, goal.met) for goal in bench.goals(RESULTS, "model")]
    assert found == [
        (7.9, 8.0, False),
        (None, 10.0, None),
        (0.56, 0.55, True),
        (3.1, 3.0, True),
        (14.0, 15.0, False),
        (1.2, 1.25, True),
        (17.0, pytest.approx(17.6), True),
        (1.7, 1.6, False),
        (1.6, 1.5, True),
        (1.02, 1.03, True),
    ]
    assert bench.goals({}, "model") == []
    # Other heads than the model's, and other numbers of questions, have no goal.
    assert bench.goals({"attention": RESULTS["attention"]}, "paper") == []
    assert bench.goals({"needles": {"questions": [8, 16], "last_to_first": 2.0}}, "model") == []


# Needles.

TEXT = " ".join(
    f"Sentence {i} is here to be read,\nand nothing {'more' * (i % 3)} follows!" for i in range(400)
)


def words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize(("tokens", "questions"), [(600, 10), (1500, 40), (3500, 300)])
def test_every_fact_stands_in_the_document_once(tokens, questions):
    hidden = needles.hide(TEXT, tokens, questions, words, seed=1)
    assert tokens - 20 < words(hidden.prefix) <= tokens
    assert len(hidden.examples) == 5 and len(hidden.facts) == min(questions, 256)
    everything = [*hidden.examples, *hidden.facts]
    assert len({fact.name for fact in everything}) == len(everything)
    assert all(
        hidden.document.count(f"The dog named {fact.name} has fur that is {fact.color}.") == 1
        for fact in everything
    )
    assert all(hidden.document.count(f"dog named {fact.name} ") == 1 for fact in everything)
    # What is left without the facts is the begin of the text.
    rest = hidden.document
    for fact in everything:
        rest = rest.replace(fact.sentence, "")
    assert " ".join(TEXT.split()).startswith(" ".join(rest.split()))
    # Examples are answered behind the document, and what is asked is not.
    behind = hidden.prefix[len(hidden.document) :]
    assert all(f"{fact.question} {fact.color}" in behind for fact in hidden.examples)
    assert not any(fact.name in behind for fact in hidden.facts)


def test_facts_are_spread_over_the_document():
    hidden = needles.hide(TEXT, 1500, 40, words, seed=1)
    places = sorted(
        hidden.document.index(fact.sentence) / len(hidden.document)
        for fact in (*hidden.examples, *hidden.facts)
    )
    assert max(np.diff([0, *places, 1])) < 3 / 46


def test_more_questions_than_facts_come_again():
    hidden = needles.hide(TEXT, 3500, 300, words, seed=1)
    asked = hidden.questions(300)
    assert (
        len(asked) == 300 and len({fact.name for fact in asked}) == 256 and asked[256] == asked[0]
    )
    assert (
        asked[0].question
        == f"Question: What color is the fur of the dog named {asked[0].name}?\nAnswer:"
    )


@pytest.mark.parametrize(("tokens", "word"), [(300, "--document is 300"), (100_000, "--text has")])
def test_a_document_that_cannot_be_made_is_refused(tokens, word):
    with pytest.raises(needles.UnfitError, match=word):
        needles.hide(TEXT, tokens, 40, words, seed=0)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (" red", True),
        ("Red.\n\nQuestion:", True),
        ("\n red and blue", True),
        (" reddish", False),
        (" It is red", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_begins_with_the_color(text, right):
    assert needles.Fact("Rubo", "red").is_answered(text) is right


def test_accuracy_is_the_part_that_is_right():
    facts = needles.make_facts(4, random.Random(0))
    assert (
        needles.accuracy(facts, [facts[0].color, "?", facts[2].color, f" {facts[3].color}!"])
        == 0.75
    )


# Plots and arguments.


def test_every_part_is_drawn(tmp_path):
    config = dataclasses.replace(TINY, num_layers=1)
    few = {SHARED: [1.0], PRODUCT: [1.0]}
    results = {
        "attention": [
            attention.summarise(
                config,
                rows,
                prefix,
                64,
                few | ({SDPA: [3.0], UNSHARED: [2.0]} if rows < 64 else {}),
            )
            for rows in (16, 64)
            for prefix in (1024, 4096)
        ],
        "end-to-end": [
            decoding.summarise(config, batch, 1024, 64, few | {NO_ATTENTION: [0.5]})
            for batch in (16, 64)
        ],
        "needles": {
            "document_tokens": 100,
            **generating.summarise_needles(
                {n: {SHARED: [n], NO_ATTENTION: [1.0]} for n in (4, 8)}, 9.0
            ),
        },
        "levels": {
            "problems": 2,
            "samples": 3,
            **generating.summarise_levels(
                {generating.ONE: [3.0], generating.MORE: [1.0]},
                dict.fromkeys((generating.ONE, generating.MORE), (4, 100, 7)),
            ),
        },
        "rule": [
            decoding.summarise_rule(
                rows,
                64,
                {"default": SHARED},
                {(side, turn): [rows] for side in (SHARED, UNSHARED) for turn in (1, 2)},
            )
            for rows in (2, 8)
        ],
    }
    files = plots.draw(results, tmp_path)
    assert [file.name for file in files] == [
        f"sharing-{part}.png" for part in sharing_options.PARTS
    ]
    assert all(
        file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size < 150_000 for file in files
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--parts", "attention,speed"], ["--parts has 'speed'", "end-to-end"]),
        (["--rounds", "0"], ["--rounds is 0"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--document", "0"], ["--document is 0"]),
        (["--problems", "1"], ["--problems is 1", "at least 2"]),
        (["--samples", "many"], ["--samples", "'many'"]),
        (["--max-copies-gib", "0"], ["--max-copies-gib is 0"]),
        (["--heads", "many"], ["--heads", "paper"]),
        (["--output", "no/such/folder/result.json"], ["--output", "folder that exists"]),
        (["--plots", __file__], ["--plots", "that is a file"]),
        (["--text", "no/such/text"], ["--text is no/such/text"]),
        (["--torch-python", "python"], ["--torch-python and --without-torch"]),
    ],
)
def test_bad_arguments_are_told_in_one_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--quick", "--without-torch", *arguments])
    told = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and told.startswith("scripts.bench.sharing: ")
        and told.count("\n") == 1
    )
    assert all(word in told for word in said), told


def test_without_a_text_it_says_how_to_name_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAXSHARE_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--quick", "--parts", "needles"])
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and "--text" in told and told.count("\n") == 1
    assert bench.parse(["--quick", "--parts", "levels,rule"]).text is None  # which hide no needles


def test_without_a_text_needles_are_left_out_and_said_to_be(monkeypatch, tmp_path, capsys):
    """A fresh clone has no text: `make bench WHAT=sharing` asks for no part by name."""
    monkeypatch.setenv("JAXSHARE_DATA", str(tmp_path))
    options = bench.parse(["--quick", "--without-torch"])
    assert (
        options.parts == tuple(part for part in sharing_options.PARTS if part != "needles")
        and options.text is None
    )

    def measure_all(options, workers):
        return {
            "parameters": 1,
            "rounds": 1,
            "parts": options.parts,
            "left_out": options.left_out,
        }, {}

    monkeypatch.setattr(bench, "measure_all", measure_all)
    for quick in (["--quick"], ["--plots", str(tmp_path / "plots")]):
        assert bench.main([*quick, "--without-torch", "--json"]) == 0
        out, err = capsys.readouterr()
        report = json.loads(out)
        assert (
            err.count("\n") == 1
            and "the part needles is left out: there is no war_and_peace.txt in $JAXSHARE_DATA"
            in err
        )
        assert "--text" in report["settings"]["left_out"]["needles"]
    assert [
        (goal["name"].partition(":")[0], goal["measured"], goal["met"]) for goal in report["goals"]
    ] == [("needles", None, None)] * 2
    (tmp_path / "war_and_peace.txt").write_text("Well, Prince.", encoding="utf-8")
    assert bench.parse(["--quick", "--without-torch"]).left_out == {}


def test_without_an_environment_for_torch_it_says_how_to_get_one(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peer, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--quick", "--parts", "attention"])
    told = capsys.readouterr().err
    assert (
        stopped.value.code == 2
        and "make parity" in told
        and "--torch-python" in told
        and told.count("\n") == 1
    )
    # which measure nothing against it
    assert bench.parse(["--quick", "--parts", "levels,rule"]).torch_python is None


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None,
    reason="needs a Python without PyTorch, and this one has it",
)
def test_a_python_without_torch_is_refused_before_any_work(capfd):
    assert bench.main(["--quick", "--parts", "attention", "--torch-python", sys.executable]) == 2
    told = capfd.readouterr().err
    assert "No module named 'torch'" in told and "--torch-python" in told and told.count("\n") == 1


def test_what_was_asked_for_replaces_the_defaults():
    options = bench.parse(
        [
            "--without-torch",
            "--parts",
            "levels",
            "--rounds",
            "2",
            "--problems",
            "120",
            "--samples",
            "128",
        ]
    )
    assert (
        options.scale.rounds,
        options.scale.runs,
        options.scale.problems,
        options.scale.samples,
    ) == (2, 2, 120, 128)
    assert (
        options.scale.document == sharing_options.FULL.document
        and options.plots == sharing_options.PLOTS
    )
    assert bench.parse(["--quick", "--parts", "levels"]).plots is None
