"""Values of another kind are refused by name, before anything is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxshare
from jaxshare import KVCache, Layout, decode
from jaxshare.attention.plan import make_plan
from jaxshare.serving import Workers, generate
from jaxshare.serving.agents.backends import EngineModel
from jaxshare.serving.branches import Branches
from jaxshare.serving.engine import Engine
from jaxshare.serving.inputs import encode_messages
from jaxshare.serving.workers.prompts.format import PLAIN
from tests.helpers import one_layer

PROBLEM = "1. 47 + 38"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: generate("embedded", PROBLEM), "model is 'embedded'.*load.'embedded'"),
        (lambda model: generate(None, PROBLEM), "model is None"),
        (lambda model: Engine("folder"), "model is 'folder'.*load.'folder'"),
        (lambda model: EngineModel("embedded"), "model is 'embedded'"),
        (lambda model: Workers("embedded", PROBLEM), "model is 'embedded'"),
        (lambda model: Branches("embedded", PROBLEM), "model is 'embedded'"),
        (
            lambda model: generate(model, PROBLEM, share="never"),
            "share is 'never'; it must be True",
        ),
        (lambda model: generate(model, PROBLEM, share=0), "share is 0"),
        (lambda model: Workers(model, PROBLEM, sampler=0.7), "sampler is of type float"),
        (lambda model: Workers(model, [1, 2]), "the problem is of type list"),
        (
            lambda model: decode(model, model.params, None, passes=1),
            "give model.module, and model.v",
        ),
        (lambda model: generate(model, PROBLEM, stop=5), "stop is 5; it must be a text or a list"),
    ],
)
def test_a_value_of_another_kind(call, words):
    with pytest.raises(TypeError, match=words):
        call(one_layer())


def test_a_text_is_no_list_of_names():
    with pytest.raises(ValueError, match=r"names is 'Alice,Bob'.*\['Alice', 'Bob'\]"):
        Workers(one_layer(), PROBLEM, names="Alice,Bob")


@pytest.mark.parametrize("prompts", [[1, 402], [[1, 2], [3, 999_999]], [np.asarray([5, 402])]])
def test_a_token_outside_the_vocabulary(prompts):
    with pytest.raises(
        ValueError, match=r"prompt [01] has the token \d+, which is outside the vocab"
    ):
        generate(one_layer(), prompts, max_new_tokens=2)


def test_prompts_of_all_kinds_are_the_same():
    """Arrays of JAX, messages, and lists of both, beside their tokens."""
    model = one_layer()
    tokens, messages = [5, 6, 7], [{"role": "user", "content": PROBLEM}]
    encoded = encode_messages(model, messages)
    options = {"max_new_tokens": 4, "seed": 1}

    def texts(prompts):
        return [each.tokens for each in generate(model, prompts, **options).completions]

    (plain,), (dialogue,) = texts(tokens), texts([encoded])
    assert texts(jnp.asarray(tokens)) == texts([jnp.asarray(tokens)]) == [plain]
    assert texts(messages) == [dialogue]
    assert texts([messages, tokens]) == texts([encoded, tokens])
    with Engine(model, max_rows=4) as engine:
        stream = engine.submit(jnp.asarray(tokens), max_new_tokens=4)
        assert len(stream.wait().tokens) == 4


@pytest.mark.parametrize(
    ("blocks", "count", "words"),
    [
        ([[0, 7]], [1], "row 0 lists block 7, but the cache has blocks 0 to 2"),
        ([[0, 1]], [6], "row 0 brings 6 tokens, but block 1 holds 0 of at most 5"),
        ([[0, 1]], [9], "count must lie between 0 and the 8 tokens given"),
    ],
)
def test_a_pass_that_cannot_be_is_not_planned(blocks, count, words):
    cache = KVCache.create(one_layer().config, [8, 5, 3])
    with pytest.raises(ValueError, match=words):
        make_plan(cache, Layout.from_blocks(blocks), jnp.asarray(count), 8)


def test_objects_are_shown_in_a_line():
    """In a notebook they would otherwise fill pages with arrays and tokens."""
    model = one_layer()
    cache = KVCache.create(model.config, [8, 5, *[1] * 20])
    assert repr(cache).startswith("<KVCache: 22 blocks (0/8, 0/5, 0/1")
    assert "... 14 more" in repr(cache)
    traced = []
    jax.jit(lambda given: traced.append(repr(given)) or given.lengths)(cache)
    assert traced[0].startswith("<KVCache: 22 blocks, 1 layer, "), "inside jit without numbers"
    layout = Layout.from_blocks([[0]])
    _, after = model.forward([[5, 6]], [2], cache, layout)
    assert "(2/8, 0/5" in repr(after) and "has consumed" in repr(cache)
    done = generate(model, PROBLEM, n=2, max_new_tokens=4)
    session = Workers(model, PROBLEM, budget=16, record=True, stop_on="never")
    result = session.run(finish_at=[16])
    session.pause("Bob")
    with Engine(model) as engine:
        shown = [cache, after, done, session, result, session.trace, engine, model]
        shown.append(Branches(model, PROBLEM, max_new_tokens=4))
        for each in shown:
            assert len(repr(each)) < 400 and "\n" not in repr(each)
    assert [*done] == done.completions and len(done) == 2 and done[1] is done.completions[1]
    assert len(repr(PLAIN)) < 200 and "question" in repr(PLAIN)
    assert "made_once" not in dir(jaxshare) and "KVCache" in dir(jaxshare)
    assert "2 with 8 tokens" in repr(done) and "float32" in repr(model)
    assert "Alice" in repr(session) and "16 of 16 passes" in repr(session)
    assert repr(engine).endswith("shut down>")
