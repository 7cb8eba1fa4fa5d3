"""lm_eval's `local-completions` asks a server: the results are those of jaxshare's own adapter."""

import json

import pytest

from jaxshare.models import load
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation.lm_eval.harness import Harness
from tests.paths import FIXTURES
from tests.serving.http.served import served

pytestmark = pytest.mark.others
FOLDER = FIXTURES / "lm_eval"
EXPECTED = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
CONTEXT = 255
"""One token less than the model's context, as the client asks for one that nobody needs."""


@pytest.fixture(scope="module")
def model():
    return load(str(FOLDER / "model"), dtype="float32")


@pytest.fixture(scope="module")
def harness(model):
    return Harness.load(model, max_length=CONTEXT)


@pytest.fixture(scope="module")
def url(model):
    with Engine(model, max_rows=4) as engine, served(engine, model_names=("tiny",)) as made:
        yield made.url


def client(url, **more):
    """lm_eval's model for completions of a server."""
    from lm_eval.models.openai_completions import (  # pyright: ignore[reportMissingImports]
        LocalCompletionsAPI,
    )

    options = {"tokenizer": str(FOLDER / "model"), "max_length": CONTEXT + 1, "max_retries": 1}
    options |= {"add_bos_token": True, "base_url": f"{url}/v1/completions", "model": "tiny"}
    return LocalCompletionsAPI(**options, **more)


def answers(model, kind, arguments):
    """The results of a model of lm_eval."""
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    asked = [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]
    return getattr(model, kind)(asked)


def asked(kind, most=None):
    """The arguments of the committed requests of a kind."""
    found = [tuple(each["arguments"]) for each in EXPECTED["requests"] if each["kind"] == kind]
    return found[:most]


@pytest.mark.parametrize("options", [{}, {"batch_size": 8}, {"num_concurrent": 4}])
def test_loglikelihoods(url, harness, options):
    pairs = asked("loglikelihood", 48)
    found = answers(client(url, **options), "loglikelihood", pairs)
    expected = harness.loglikelihoods(pairs)
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], abs=1e-4
    )
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in found} == {True, False}


def test_loglikelihoods_of_pages(url, model):
    """The last page is longer than the model's context: the client reads one token less again."""
    harness = Harness.load(model, max_length=CONTEXT - 1)
    pages = asked("loglikelihood_rolling")
    found = answers(client(url), "loglikelihood_rolling", pages)
    expected = harness.rolling_loglikelihoods([text for (text,) in pages])
    assert found == pytest.approx(expected, abs=1e-3, rel=1e-6)


def test_generated_texts(url, harness):
    """Greedily, up to the stop texts of the task."""
    requests = asked("generate_until", 12)
    assert answers(client(url), "generate_until", requests) == harness.answers(requests)
