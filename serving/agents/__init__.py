"""Agents: ordinary coroutines, compiled to flow graphs, under supervisors that search them.

Follows section 5 of Hive.
"""

from jaxshare.serving.agents.agent import Agent, agent
from jaxshare.serving.agents.budgets import Budget
from jaxshare.serving.agents.call_keys import call_key
from jaxshare.serving.agents.choices import choose
from jaxshare.serving.agents.compiler.program import UncopyableError
from jaxshare.serving.agents.compiler.variables import RefusedError
from jaxshare.serving.agents.concurrency import as_completed, first, gather, wait_for
from jaxshare.serving.agents.dialogue import Message
from jaxshare.serving.agents.dialogues import Dialogue, current_dialogue
from jaxshare.serving.agents.errors import (
    AgentError,
    AnswerError,
    BudgetError,
    DeadlockError,
    DivergedError,
    EndedError,
    ParseError,
    PausedError,
    RoundsError,
)
from jaxshare.serving.agents.judging import Judged
from jaxshare.serving.agents.questions import OpenQuestion, ask
from jaxshare.serving.agents.react import react
from jaxshare.serving.agents.requests import (
    Model,
    ModelCall,
    Options,
    Reply,
    llm,
    tool,
)
from jaxshare.serving.agents.running import run
from jaxshare.serving.agents.runs import AgentRun, Handle, spawn
from jaxshare.serving.agents.runtime import Runtime
from jaxshare.serving.agents.search import (
    BeamSearch,
    BestOfN,
    ForestOfThoughts,
    MonteCarloTreeSearch,
    SelfConsistency,
    SelfRefine,
    TreeOfThoughts,
)
from jaxshare.serving.agents.states import Inquiry, Single, State, Supervisor

__all__ = [
    "Agent",
    "AgentError",
    "AgentRun",
    "AnswerError",
    "BeamSearch",
    "BestOfN",
    "Budget",
    "BudgetError",
    "DeadlockError",
    "Dialogue",
    "DivergedError",
    "EndedError",
    "ForestOfThoughts",
    "Handle",
    "Inquiry",
    "Judged",
    "Message",
    "Model",
    "ModelCall",
    "MonteCarloTreeSearch",
    "OpenQuestion",
    "Options",
    "ParseError",
    "PausedError",
    "RefusedError",
    "Reply",
    "RoundsError",
    "Runtime",
    "SelfConsistency",
    "SelfRefine",
    "Single",
    "State",
    "Supervisor",
    "TreeOfThoughts",
    "UncopyableError",
    "agent",
    "as_completed",
    "ask",
    "call_key",
    "choose",
    "current_dialogue",
    "first",
    "gather",
    "llm",
    "react",
    "run",
    "spawn",
    "tool",
    "wait_for",
]
