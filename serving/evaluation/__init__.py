"""Evaluation: accuracy against the budget of forward passes, and a judge of collaboration.

Hogwild! Inference, sections 4.1 and 4.2, and section 4.3 with appendix G:

    jaxshare evaluate MODEL --task gsm8k5 --method workers --workers 1,2,4 \\
        --budgets 1024,2048,4096 --out DIR
    jaxshare judge DIR --endpoint URL --model NAME
"""

from jaxshare.deprecated import renamed
from jaxshare.serving.evaluation.checkers.cases import run_cases
from jaxshare.serving.evaluation.checkers.mathematics import Mathematician
from jaxshare.serving.evaluation.checkers.sandbox import Limits, Verdict, run_tests
from jaxshare.serving.evaluation.execution import execute
from jaxshare.serving.evaluation.judge import Endpoint, Grading, JudgeError, grade, trace_of
from jaxshare.serving.evaluation.problems import Case, Problem, Task
from jaxshare.serving.evaluation.runs import Run, RunSpec, run_specs, solve
from jaxshare.serving.evaluation.scoring import Point, Score, Scorer, passes_to, points, wilson
from jaxshare.serving.evaluation.tasks import load_task

__all__ = [
    "Case",
    "Endpoint",
    "Grading",
    "JudgeError",
    "Limits",
    "Mathematician",
    "Point",
    "Problem",
    "Run",
    "RunSpec",
    "Score",
    "Scorer",
    "Task",
    "Verdict",
    "execute",
    "grade",
    "load_task",
    "passes_to",
    "points",
    "run_cases",
    "run_specs",
    "run_tests",
    "solve",
    "trace_of",
    "wilson",
]

__getattr__ = renamed(
    __name__,
    {
        "Piece": "jaxshare.serving.evaluation.runs.RunSpec",
        "pieces": "jaxshare.serving.evaluation.runs.run_specs",
    },
)
