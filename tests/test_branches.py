"""Completions of one prompt: shared against unshared, against single runs, and what is refused."""

import functools
import random

import jax
import numpy as np
import pytest

from jaxshare import Sampler
from jaxshare.models import LoadedModel, problems
from jaxshare.serving import demo
from jaxshare.serving.branches import generate

PROMPT = "<|im_start|>user\nSolve: 47 + 38<|im_end|>\n<|im_start|>assistant\n"
WARM = Sampler(temperature=1.6, top_p=0.98)


@functools.cache
def model() -> LoadedModel:
    return demo.load_embedded()


@functools.cache
def problem(seed: int = 0) -> problems.Problem:
    return problems.make_problem(random.Random(seed))


def plain_greedy(tokens: list[int], count: int) -> tuple[list[int], float]:
    """A loop over whole sequences with plain causal attention, and the log-probability of what it chose."""
    loaded, total = model(), 0.0
    causal = jax.jit(lambda params, tokens: loaded.module.apply(params, tokens, method="causal"))
    tokens, made = list(tokens), []
    for _ in range(count):
        padded = np.zeros((1, 256), np.int32)
        padded[0, :len(tokens)] = tokens
        logits = np.asarray(causal(loaded.params, padded), np.float64)[0, len(tokens) - 1]
        made.append(int(logits.argmax()))
        total += logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        tokens.append(made[-1])
        if made[-1] in loaded.generation.stop_tokens:
            break
    return made, total


def test_greedy_equals_a_plain_loop_shared_or_not():
    tokens = model().tokenizer.encode(PROMPT)
    expected, logprob = plain_greedy(tokens, 24)
    for share in (True, False):
        done = generate(model(), PROMPT, n=3, max_new_tokens=24, sampler=Sampler(), share=share)
        assert [c.tokens for c in done.completions] == [expected] * 3
        np.testing.assert_allclose([c.logprob for c in done.completions], logprob, atol=1e-3)


def test_samples_are_the_same_shared_or_not_and_for_any_n():
    shared = [c.tokens for c in generate(model(), PROMPT, n=4, max_new_tokens=24, sampler=WARM, seed=7).completions]
    unshared = [c.tokens for c in generate(model(), PROMPT, n=4, max_new_tokens=24, sampler=WARM, seed=7, share=False).completions]
    single = [generate(model(), PROMPT, n=1, max_new_tokens=24, sampler=WARM, seed=7 + i).completions[0].tokens for i in (0, 3)]
    assert shared == unshared
    assert single == [shared[0], shared[3]]
    assert len({tuple(tokens) for tokens in shared}) > 1


def test_a_shared_prompt_is_cached_once():
    tokens = model().tokenizer.encode(PROMPT)
    per_token = 2 * model().config.num_layers * model().config.num_kv_heads * model().config.head_dim * 4
    for share, copies in ((True, 1), (False, 5)):
        done = generate(model(), PROMPT, n=5, max_new_tokens=12, sampler=WARM, share=share)
        # The last token that a completion samples is never fed.
        cached = copies * len(tokens) + sum(len(c.tokens) - 1 for c in done.completions)
        assert done.kv_bytes == cached * per_token
        assert done.prompt_tokens == len(tokens)


def test_budgets_and_stops():
    done = generate(model(), PROMPT, max_new_tokens=1)
    assert [len(c.tokens) for c in done.completions] == [1] and done.completions[0].reason == "budget"
    stopped = [c for c in generate(model(), PROMPT, n=2, max_new_tokens=300, sampler=WARM).completions if c.reason == "stop"]
    assert stopped
    for completion in stopped:
        assert completion.tokens[-1] in model().generation.stop_tokens
        assert "<|im_end|>" not in completion.text


@pytest.mark.parametrize(("options", "words"), [
    ({"prompt": ""}, "the prompt is empty"),
    ({"n": 0}, "n is 0; ask for at least 1"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_new_tokens": -3}, "max_new_tokens is -3"),
    ({"prompt": "1 " * 5000}, "the prompt has .* but the model's context holds"),
])
def test_bad_input(options, words):
    with pytest.raises(ValueError, match=words):
        generate(model(), **{"prompt": PROMPT, **options})
