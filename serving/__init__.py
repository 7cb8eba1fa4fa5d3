"""Serving: completions of trees of prompts, workers over one cache, agents, and the command
line."""

from jaxshare.serving.branches.generate import Completions, generate
from jaxshare.serving.branches.prefix import Prefix, Prefixes
from jaxshare.serving.branches.prompt_tree import Branch
from jaxshare.serving.branches.run import Branches
from jaxshare.serving.branches.selection import (
    best_of_n,
    by_prompt,
    majority_vote,
    pass_at,
    pass_at_k,
)
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.kvcache.sharing_cost import Costs
from jaxshare.serving.scoring import TextScore, prompt_logprobs, score
from jaxshare.serving.workers.layouts import WorkersLayout, combined, contiguous, interleaved
from jaxshare.serving.workers.prompts.format import COLLABORATIVE, PLAIN, Format, collaborative
from jaxshare.serving.workers.results import Answer, Result
from jaxshare.serving.workers.session import Workers
from jaxshare.serving.workers.text.answers import AnswerRule, box_answers, code_answers
from jaxshare.serving.workers.text.transcript import Event, Step

__all__ = [
    "COLLABORATIVE",
    "PLAIN",
    "Answer",
    "AnswerRule",
    "Branch",
    "Branches",
    "Completion",
    "Completions",
    "Costs",
    "Event",
    "Format",
    "Prefix",
    "Prefixes",
    "Result",
    "Step",
    "TextScore",
    "Workers",
    "WorkersLayout",
    "best_of_n",
    "box_answers",
    "by_prompt",
    "code_answers",
    "collaborative",
    "combined",
    "contiguous",
    "generate",
    "interleaved",
    "majority_vote",
    "pass_at",
    "pass_at_k",
    "prompt_logprobs",
    "score",
]
