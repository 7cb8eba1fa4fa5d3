"""Agents of any Python against native coroutines, straight on and with every state fired again."""

import pytest

from tests.serving.agents import more_programs, python_programs
from tests.serving.agents.python_oracle import differences

assert more_programs  # it adds to the programs
PROGRAMS = python_programs.PROGRAMS


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("function", "arguments"), PROGRAMS, ids=lambda x: x.__name__)
def test_an_agent_is_what_python_runs(function, arguments):
    found, again = differences(function, arguments)
    assert again >= 1
    assert not found, "\n".join(found)
