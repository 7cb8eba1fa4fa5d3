"""The fixture that several tests of evaluation have in common."""

import pytest

from jaxshare.serving.evaluation.checkers.mathematics import Mathematician


@pytest.fixture(scope="module")
def mathematician():
    pytest.importorskip("math_verify")
    with Mathematician() as made:
        yield made
