"""Log-probabilities of given texts against plain causal attention over each whole text alone."""

import copy
import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxshare import Grammar, Rope, Sampler
from jaxshare.models import Generation, LoadedModel
from jaxshare.models.layers import Decoder
from jaxshare.serving import TextScore, prompt_logprobs, score
from jaxshare.serving.errors import NotANumberError
from jaxshare.serving.kvcache.pool import Pool
from jaxshare.serving.scoring import passes
from jaxshare.serving.scoring.text_tree import TokenText, batches
from jaxshare.sharding import make_mesh
from tests.core.decoding.test_sampling import expected_probabilities
from tests.helpers import TINY, init, mostly_slow, one_layer, padded, tiny_params

CONTEXT = 600
RNG = np.random.default_rng(5)


def tiny(**changes) -> LoadedModel:
    config = dataclasses.replace(TINY, **{"max_positions": CONTEXT, **changes})
    return LoadedModel(config, tiny_params(), None, Generation())


def random_tokens(size: int) -> list[int]:
    return RNG.integers(0, TINY.vocab_size, size).tolist()


@functools.cache
def causal(module: Decoder):
    return jax.jit(lambda params, tokens: module.apply(params, tokens, method="causal"))


def plain_logprobs(tokens: Sequence[int], model: LoadedModel) -> np.ndarray:
    """float64[T, V]: the distribution after each token of one whole text."""
    row, module = padded(tokens, (32, 256, 1024)), Decoder(model.config)
    logits = np.asarray(causal(module)(model.params, row)[0, : len(tokens)], np.float64)
    largest = logits.max(axis=-1, keepdims=True)
    return logits - largest - np.log(np.exp(logits - largest).sum(axis=-1, keepdims=True))


def check(found: TextScore, prefix: Sequence[int], text: Sequence[int], model: LoadedModel):
    """Compares a score with the oracle."""
    assert found.tokens == tuple(text)
    whole, start = [*prefix, *text], len(prefix)
    oracle = plain_logprobs(whole, model)
    scored = range(max(1, start), len(whole))
    expected = [oracle[i - 1, whole[i]] for i in scored]
    logprobs = list(found.logprobs)
    if not start:
        assert logprobs.pop(0) is None
    np.testing.assert_allclose(np.asarray(logprobs, float), expected, atol=2e-5)
    assert found.logprob == pytest.approx(sum(expected), abs=1e-3)
    assert found.greedy == all(oracle[i - 1].argmax() == whole[i] for i in scored)


def different_tokens(texts: Sequence[Sequence[int]]) -> int:
    """The tokens that are fed if each common prefix is fed once, and no last token is."""
    return len({tuple(text[:i]) for text in texts for i in range(1, len(text))})


@pytest.fixture
def fed(monkeypatch) -> list[int]:
    """The numbers of tokens that each pass feeds."""
    counts: list[int] = []
    run = passes.score_positions

    def counted(module, params, tokens, count, *rest):
        counts.append(int(np.sum(count)))
        return run(module, params, tokens, count, *rest)

    monkeypatch.setattr(passes, "score_positions", counted)
    return counts


@pytest.mark.parametrize("before", mostly_slow((300, 1)))
def test_candidates_of_ragged_lengths(before, fed):
    """Some are shorter than a row of a pass, some longer than a pass."""
    model, prefix = tiny(), random_tokens(before)
    candidates = [random_tokens(size) for size in (1, 4, 70, 2, 290, 1, 17)]
    likeliest = int(plain_logprobs(prefix, model)[-1].argmax())
    candidates.append([likeliest])
    scores = score(model, prefix, candidates)
    for found, text in zip(scores, candidates, strict=True):
        check(found, prefix, text, model)
    assert scores[-1].greedy and not scores[2].greedy
    assert sum(fed) == different_tokens([[*prefix, *text] for text in candidates])


def test_one_candidate_of_one_token(fed):
    model = tiny()
    (found,) = score(model, [7], [[9]])
    check(found, [7], [9], model)
    assert fed == [1]


def test_many_candidates_take_few_passes(fed):
    model, prefix = tiny(), random_tokens(40)
    candidates = [random_tokens(1 + i % 5) for i in range(100)]
    for found, text in zip(score(model, prefix, candidates), candidates, strict=True):
        check(found, prefix, text, model)
    assert len(fed) <= 4


def test_candidates_of_one_token_take_the_pass_of_the_prefix(fed):
    model, prefix = tiny(), random_tokens(40)
    scores = score(model, prefix, [[token] for token in range(TINY.vocab_size)])
    found = [one.logprob for one in scores]
    np.testing.assert_allclose(found, plain_logprobs(prefix, model)[-1], atol=2e-5)
    assert [one.greedy for one in scores].count(True) == 1
    assert fed == [40]


def test_equal_candidates_are_scored_once_and_alike(fed):
    model, prefix, text = tiny(), random_tokens(5), random_tokens(9)
    first, second, longer = score(model, prefix, [text, text, [*text, 3]])
    assert first == second
    check(longer, prefix, [*text, 3], model)
    assert sum(fed) == 5 + 9


def test_a_text_may_fill_the_context():
    model = tiny()
    prefix, text = random_tokens(CONTEXT - 10), random_tokens(10)
    (found,) = score(model, prefix, [text])
    check(found, prefix, text, model)
    with pytest.raises(
        ValueError,
        match=f"candidate 1 has 11 tokens after 590 of its prefix, but the model's context holds "
        f"{CONTEXT}; shorten one of them",
    ):
        score(model, prefix, [text, [*text, 1]])


def test_what_prefixes_have_in_common_is_fed_once(fed):
    """As examples before several questions."""
    model, examples = tiny(), random_tokens(100)
    prefixes = [[*examples, *random_tokens(size)] for size in (20, 7, 0)]
    candidates = [[random_tokens(3), random_tokens(5)], [random_tokens(2)], [random_tokens(4)]]
    scores = score(model, prefixes, candidates)
    assert [len(each) for each in scores] == [2, 1, 1]
    for found, prefix, texts in zip(scores, prefixes, candidates, strict=True):
        for one, text in zip(found, texts, strict=True):
            check(one, prefix, text, model)
    whole = [[*a, *b] for a, texts in zip(prefixes, candidates, strict=True) for b in texts]
    assert sum(fed) == different_tokens(whole) <= 100 + 20 + 7 + 2 + 4 + 1 + 3


def test_the_likeliest_tokens_are_those_of_a_sort():
    model, prefix, text = tiny(), random_tokens(11), random_tokens(40)
    (found,) = score(model, prefix, [text], top_logprobs=20)
    oracle = plain_logprobs([*prefix, *text], model)[10:50]
    assert found.top_logprobs is not None
    tokens = [[token for token, _ in top] for top in found.top_logprobs]
    assert tokens == np.argsort(-oracle, axis=-1, kind="stable")[:, :20].tolist()
    values = [[value for _, value in top] for top in found.top_logprobs]
    np.testing.assert_allclose(values, -np.sort(-oracle, axis=-1)[:, :20], atol=2e-5)


def test_of_equal_logits_the_lowest_token_is_the_likeliest():
    params = tiny_params()["params"]
    head = {"kernel": jnp.zeros_like(params["head"]["kernel"])}
    flat = dataclasses.replace(tiny(), params={"params": {**params, "head": head}})
    lowest, other = score(flat, [5], [[0, 0], [0, 1]], top_logprobs=3)
    assert lowest.greedy and not other.greedy
    assert lowest.top_logprobs == other.top_logprobs
    assert [[token for token, _ in top] for top in lowest.top_logprobs or ()] == [[0, 1, 2]] * 2
    np.testing.assert_allclose(other.logprobs, -np.log(TINY.vocab_size), rtol=1e-5)


def test_the_first_token_of_all_has_no_logprob():
    model, text = tiny(), random_tokens(33)
    found = prompt_logprobs(model, text, top_logprobs=2)
    check(found, [], text, model)
    assert found.top_logprobs is not None
    assert [len(top) for top in found.top_logprobs] == [0, *[2] * 32]
    assert score(model, [], [text], top_logprobs=2) == [found]
    assert prompt_logprobs(model, [4]) == TextScore((4,), (None,), 0.0, True)


def nested_texts() -> list[list[int]]:
    """Texts of two tokens, which are beginnings of each other and part anywhere."""
    rng, texts = np.random.default_rng(2), [[1]]
    for _ in range(150):
        start = texts[rng.integers(len(texts))]
        start = start[: rng.integers(1, len(start) + 1)]
        texts.append([*start, *rng.integers(0, 2, rng.integers(1, 120)).tolist()][:250])
    return [*texts, texts[3], texts[5][:9]]


@pytest.mark.slow
def test_any_tree_of_texts(fed):
    model, texts = tiny(), nested_texts()
    scores = [found for (found,) in score(model, [[]] * len(texts), [[text] for text in texts])]
    for found, text in zip(scores, texts, strict=True):
        check(found, [], text, model)
    assert sum(fed) == different_tokens(texts)
    assert len(fed) > 10


def scattering_texts() -> list[list[int]]:
    """A text of 257 tokens, and others that part from it after some tokens, in such an order that
    the memory between its pieces is free in small runs alone."""
    rng, texts, chain = np.random.default_rng(39), [], []
    sizes, kind = [3, 6, 12, 40], int(rng.integers(1, 5))
    while len(chain) < 256 - int(rng.integers(0, 130)):
        leaf = int(rng.integers(1, sizes[kind - 1]))
        step = int(rng.integers(1, sizes[int(rng.integers(0, kind))]))
        texts.append([*chain, *[1] * leaf, 3][:257])
        chain += [2] * step
        if rng.random() < 0.02:
            kind = int(rng.integers(1, 5))
    return [*texts, [*chain, *[2] * 257][:257]]


def test_memory_in_small_runs_is_moved_together(monkeypatch):
    moved, compact = [], Pool.compact

    def counted(self, *arguments):
        moved.append(compact(self, *arguments))
        return moved[-1]

    monkeypatch.setattr(Pool, "compact", counted)
    model, texts = tiny(), scattering_texts()
    scores = [found for (found,) in score(model, [[]] * len(texts), [[text] for text in texts])]
    assert moved == [True]
    for found, text in zip(scores, texts, strict=True):
        check(found, [], text, model)


def test_batches_keep_common_prefixes_together():
    texts = [TokenText("", np.asarray(tokens, np.int32), 0) for tokens in nested_texts()]
    for size, least in ((10**6, 1), (10**6, 3), (500, 1), (1, 1)):
        cut = batches(texts, size, least)
        order = [i for batch in cut for i in batch]
        assert sorted(order) == [*range(len(texts))] and all(cut) and len(cut) >= least
        keys = [texts[i].tokens.tobytes() for i in order]
        assert keys == sorted(keys)
    assert batches([], 10) == []


def test_texts_of_several_batches(monkeypatch):
    monkeypatch.setattr("jaxshare.serving.scoring.scores._BATCH_TOKENS", 64)
    model, prefix = tiny(), random_tokens(20)
    candidates = [random_tokens(size) for size in (3, 9, 4, 1, 12)]
    done: list[int] = []
    scores = score(model, prefix, candidates, on_scored=done.append)
    for found, text in zip(scores, candidates, strict=True):
        check(found, prefix, text, model)
    assert done == [1, 2, 3, 4, 5]


def test_keys_are_rotated_as_the_length_of_each_text_wants():
    """As longrope does: one call with a short and a long text."""
    short = Rope(tuple(f / 3 for f in TINY.rope.frequencies), 1.2)
    model, prefix = tiny(short_rope=short, short_positions=40), random_tokens(10)
    texts = [random_tokens(5), random_tokens(31), random_tokens(32)]
    for found, text in zip(score(model, prefix, texts), texts, strict=True):
        check(found, prefix, text, model.for_context(len(prefix) + len(text) - 1))


@pytest.mark.parametrize("axes", mostly_slow(({"tensor": 2}, {"data": 2, "tensor": 2, "kv": 2})))
def test_a_mesh_gives_the_same_scores(axes):
    """The vocabulary of 101 tokens is on every device; that of 104 is split."""
    vocab = 101 if axes == {"tensor": 2} else 104
    config = dataclasses.replace(TINY, vocab_size=vocab, max_positions=CONTEXT)
    model = LoadedModel(config, init(config), None, Generation())
    prefix, candidates = random_tokens(70), [random_tokens(size) for size in (3, 1, 30, 8)]
    scores = score(model.on(make_mesh(**axes)), prefix, candidates, top_logprobs=3)
    for found, text in zip(scores, candidates, strict=True):
        check(found, prefix, text, model)
    alone = score(model, prefix, candidates, top_logprobs=3)
    assert [
        [token for token, _ in top] for found in scores for top in found.top_logprobs or ()
    ] == [[token for token, _ in top] for found in alone for top in found.top_logprobs or ()]


# Texts.


def encoded(text: str) -> list[int]:
    return one_layer().tokenizer.encode(text)


def test_the_tokens_of_a_candidate_are_those_of_the_whole_text():
    prefix, candidates = "Solve: 47", [" + 38", "0", " - 1\n\nAlice 1:"]
    for found, text in zip(score(one_layer(), prefix, candidates), candidates, strict=True):
        whole, before = encoded(prefix + text), encoded(prefix)
        assert whole[: len(before)] == before
        check(found, before, whole[len(before) :], one_layer())


def test_a_candidate_that_would_straddle_the_border_is_encoded_by_itself():
    """The prefix's last token would be another one in the whole text."""
    assert encoded("Ques") + encoded("tion") != encoded("Question")
    (found,) = score(one_layer(), "Ques", ["tion"])
    check(found, encoded("Ques"), encoded("tion"), one_layer())


def test_texts_and_tokens_may_be_mixed():
    expected = score(one_layer(), "Solve: 47", [" + 38"])
    tokens = encoded("Solve: 47 + 38")[len(encoded("Solve: 47")) :]
    assert score(one_layer(), "Solve: 47", [np.asarray(tokens)]) == expected
    assert score(one_layer(), np.asarray(encoded("Solve: 47")), [tokens]) == expected
    several = score(one_layer(), ["Solve: 47", encoded("Solve: 47")], [[" + 38"], [tokens]])
    assert several == [expected, expected]


def with_bos() -> LoadedModel:
    """A model whose tokenizer puts a token before texts, as that of Llama does."""
    tokenizer = copy.deepcopy(one_layer().tokenizer)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A",
        special_tokens=[("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))],
    )
    return dataclasses.replace(one_layer(), tokenizer=tokenizer)


def test_a_token_that_starts_all_texts_is_the_first_one():
    bos, text = encoded("<|im_start|>"), encoded("Solve: 47")
    assert len(bos) == 1
    whole = prompt_logprobs(with_bos(), "Solve: 47")
    check(whole, [], bos + text, one_layer())
    # It is the prefix of a text without another one.
    (found,) = score(with_bos(), "", ["Solve: 47"])
    check(found, bos, text, one_layer())
    (found,) = score(with_bos(), "Solve:", [" 47"])
    check(found, bos + encoded("Solve:"), encoded(" 47"), one_layer())
    (found,) = score(one_layer(), "", ["Solve: 47"])
    check(found, [], text, one_layer())


# Bad input.


@pytest.mark.parametrize(
    ("prefix", "candidates", "error", "message"),
    [
        ([1], [], ValueError, "there are no candidates; give at least one"),
        ([1], [[2], []], ValueError, "candidate 1 is empty; give at least one token of text"),
        ([1], [[2, 101]], ValueError, "a token of candidate 0 is 101; it must be at most 100"),
        ([1, -1], [[2]], ValueError, "a token of the prefix is -1; it must be at least 0"),
        ([1], [[2.5]], TypeError, "a token of candidate 0 is 2.5; it must be an integer"),
        ([1], "text", TypeError, "candidates is 'text'; it must be a list of texts"),
        ([1], 3, TypeError, "candidates is 3; it must be a list"),
        (5, [[2]], TypeError, "the prefix is 5; it must be a list"),
        ([1], [7], TypeError, "candidate 0 is 7; it must be a list"),
        ([[1], [2]], [[[3]]], ValueError, "candidates has 1 lists for 2 prefixes; give each"),
        ([[1], [2]], [[[3]], []], ValueError, "there are no candidates of prefix 1; give"),
        ([[1], [2]], [[[3]], [[101]]], ValueError, "a token of candidate 0 of prefix 1 is 101"),
        ([1], [[1] * CONTEXT], ValueError, f"has {CONTEXT} tokens after 1 of its prefix, but"),
        ([1], ["text"], ValueError, "the model folder has no tokenizer, so candidate 0 must be"),
        ("text", [[1]], ValueError, "the model folder has no tokenizer, so the prefix must be"),
    ],
)
def test_bad_input_is_refused_before_any_work(prefix, candidates, error, message, fed):
    with pytest.raises(error, match=message):
        score(tiny(), prefix, candidates)
    assert fed == []


def test_bad_options_and_texts_are_refused():
    with pytest.raises(ValueError, match="top_logprobs is 21; it must be at most 20"):
        score(tiny(), [1], [[2]], top_logprobs=21)
    with pytest.raises(ValueError, match="top_logprobs is -1; it must be at least 0"):
        prompt_logprobs(tiny(), [1], top_logprobs=-1)
    with pytest.raises(ValueError, match="candidate 1 is empty; give at least one token of text"):
        score(one_layer(), "Solve", ["a", ""])
    with pytest.raises(ValueError, match="is empty; give at least one token"):
        prompt_logprobs(one_layer(), "")
    with pytest.raises(ValueError, match=r"the text has .* characters, but the model's context"):
        prompt_logprobs(one_layer(), "word " * 10**6)


def test_logits_that_are_not_numbers_name_their_text():
    """The embedding of one token overflows, in a candidate and in a prefix."""
    params = tiny_params()["params"]
    table = params["embed"]["embedding"].at[50].set(jnp.inf)
    broken = {"params": {**params, "embed": {"embedding": table}}}
    model = dataclasses.replace(tiny(), params=broken)
    check(score(model, [1, 2], [[3, 50]])[0], [1, 2], [3, 50], tiny())  # 50 is not fed
    with pytest.raises(NotANumberError, match="for candidate 1 are not numbers after"):
        score(model, [1, 2], [[3, 4], [50, 4], [4, 4]])
    with pytest.raises(NotANumberError, match="for candidate 0 of prefix 1 are not numbers"):
        score(model, [[1, 2], [50, 2]], [[[3]], [[4]]])


CHANGED = Sampler(0.7, top_k=20, top_p=0.9, min_p=0.01, bias={4: 2.0}, forbidden=(6,))


@pytest.mark.parametrize("axes", mostly_slow([None, {"tensor": 2}]), ids=str)
def test_log_probabilities_of_the_chances_that_a_sampler_draws_with(axes):
    model = tiny() if axes is None else tiny().on(make_mesh(**axes))
    prefix, candidates = random_tokens(9), [random_tokens(5), [4, 6, 4], [6]]
    scores = score(model, prefix, candidates, sampler=CHANGED, top_logprobs=5)
    for found, text in zip(scores, candidates, strict=True):
        oracle = plain_logprobs([*prefix, *text], tiny())[len(prefix) - 1 :]
        for place, token in enumerate(text):
            chances = expected_probabilities(oracle[place].astype(np.float32), CHANGED)
            with np.errstate(divide="ignore"):
                logs = np.log(chances)
            np.testing.assert_allclose(found.logprobs[place], logs[token], atol=1e-4)
            likeliest = sorted(np.flatnonzero(chances), key=lambda t: (-chances[t], t))[:5]
            assert [t for t, _ in found.top_logprobs[place]] == likeliest
    assert scores[2].logprob == -np.inf and not scores[2].greedy


def test_of_a_prompt_too_and_with_the_model_s_own_it_is_the_same():
    text = random_tokens(12)
    whole = prompt_logprobs(tiny(), text, sampler=Sampler(1.0))
    assert whole.logprobs[0] is None
    np.testing.assert_allclose(
        whole.logprobs[1:], prompt_logprobs(tiny(), text).logprobs[1:], atol=1e-5
    )


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            Sampler(repetition_penalty=1.1, typical_p=0.5),
            "repetition_penalty cannot be had for given",
        ),
        (Sampler(forbidden_first=(3,)), "forbidden_first cannot be had"),
        (Sampler(grammar=Grammar.choices(["a"])), "no tokenizer"),
        (Sampler(n=2), "sampler's n is 2, but given texts are not sampled"),
        (Sampler(forbidden=(10**6,)), "outside the vocabulary"),
        (0.7, "it must be a Sampler"),
    ],
    ids=str,
)
def test_a_sampler_that_needs_more_than_one_place_is_refused(sampler, message):
    with pytest.raises((ValueError, TypeError), match=message):
        score(tiny(), [3], [[4]], sampler=sampler)
