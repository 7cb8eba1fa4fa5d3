"""Supervisors that search an agent's states as a tree (Hive, sections 2.2 and 5.1.1).

Only states that wait for the model or choose branch: the former are random, the latter have several
options. All others are fired once. If two scores are equal, the state that is earlier in the tree
wins, so that a search gives the same result every time, however fast its firings are.

An error of an agent, a child, a value function or a judge ends the path that it is met on. It is in
the run's tree, and the error of the run where no path has come to an answer.
"""

from jaxshare.deprecated import renamed
from jaxshare.serving.agents.forest import ForestOfThoughts
from jaxshare.serving.agents.level_search import BeamSearch, TreeOfThoughts
from jaxshare.serving.agents.monte_carlo import MonteCarloTreeSearch
from jaxshare.serving.agents.repeated_runs import BestOfN, SelfConsistency, SelfRefine

__all__ = [
    "BeamSearch",
    "BestOfN",
    "ForestOfThoughts",
    "MonteCarloTreeSearch",
    "SelfConsistency",
    "SelfRefine",
    "TreeOfThoughts",
]

__getattr__ = renamed(
    __name__,
    {
        "best": "jaxshare.serving.agents.states.best",
        "majority": "jaxshare.serving.agents.repeated_runs.majority",
    },
)
