"""One server for all tests that need a model."""

import pytest

from jaxshare.serving.engine import Engine
from tests.helpers import one_layer
from tests.serving.http.served import served


@pytest.fixture(scope="session")
def engine():
    with Engine(one_layer(), max_rows=4, max_queue=64, passes=4, logits_cache=10**6) as made:
        yield made


@pytest.fixture(scope="session")
def live(engine):
    """A server of the first layer of the embedded model."""
    with served(engine) as made:
        yield made
