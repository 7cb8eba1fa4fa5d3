"""Completions of trees of prompts over shared prefixes (Hydragen)."""

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

__all__ = [
    "Branch",
    "Branches",
    "Completion",
    "Completions",
    "Prefix",
    "Prefixes",
    "best_of_n",
    "by_prompt",
    "generate",
    "majority_vote",
    "pass_at",
    "pass_at_k",
]
