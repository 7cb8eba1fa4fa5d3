"""Selection and scores of completions: majority vote, best of n, pass@k.

done = by_prompt(completions)
majority_vote(done[0])  # the most frequent boxed answer to the first prompt
pass_at(completions, lambda c: answers.boxed(c.text) == right[c.prompt], k=10)
"""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

from jaxshare.argument_checks import as_integer
from jaxshare.serving.engine.completion import Completion
from jaxshare.serving.workers.text import answers


def by_prompt(completions: Iterable[Completion]) -> dict[int, list[Completion]]:
    """Groups completions by the number of their prompt.

    Prompts, and the completions of each, are in ascending order.
    """
    groups: dict[int, list[Completion]] = {}
    for completion in sorted(completions, key=lambda c: (c.prompt, c.index)):
        groups.setdefault(completion.prompt, []).append(completion)
    return groups


def majority_vote(
    completions: Iterable[Completion], answer: Callable[[str], str | None] = answers.boxed
) -> str | None:
    r"""The most frequent answer.

    This is self-consistency (Wang et al. 2023, "Self-Consistency Improves Chain of Thought").

    Args:
      completions: of one prompt.
      answer: finds the answer in a text, or None, which has no vote; default the content of the
        last `\boxed{...}`.

    Returns:
      the first of equally frequent answers; None if there is no answer at all.
    """
    return answers.vote([answer(completion.text) for completion in completions])


def mean_logprob(completion: Completion) -> float:
    """The mean log-probability per token, the stop token included; -inf without tokens.

    This compares long completions with short ones.

    Raises:
      ValueError: its log-probability was not computed.
    """
    if completion.logprob is None:
        raise ValueError(
            f"completion {completion.index} of prompt {completion.prompt} has no log-probability, "
            "which an engine computes where it is asked to; submit it with logprobs=True, or give a "
            "score of your own"
        )
    return completion.logprob / len(completion.tokens) if completion.tokens else -math.inf


def best_of_n(
    completions: Sequence[Completion], score: Callable[[Completion], float] | None = None
) -> Completion:
    """The completion of the highest score; the first of equals.

    Args:
      completions: of one prompt.
      score: of a completion, a reward model's for instance; default `mean_logprob`.

    Raises:
      ValueError: no completions, a score that is not a number, or see `mean_logprob`.
    """
    if not completions:
        raise ValueError("there are no completions to choose from; give at least 1")
    scores = [(score or mean_logprob)(completion) for completion in completions]
    for i, value in enumerate(scores):
        if math.isnan(value):  # compares with nothing, and so would hide the best one
            raise ValueError(
                f"the score of completions[{i}] is not a number; score must give one for every "
                "completion"
            )
    return completions[scores.index(max(scores))]


_MOST = 10**5
"""The most completions of `pass_at_k`: the exact number of draws takes milliseconds."""


def pass_at_k(correct: int, n: int, k: int) -> float:
    """The probability that k of n completions, drawn without replacement, include a correct one.

    This is the unbiased estimate for k fresh completions (Chen et al. 2021, "Evaluating Large
    Language Models Trained on Code", section 2.1): 1 - C(n - correct, k) / C(n, k). It is computed
    in integers and divided once, so it is exact to the last bit for any n.

    Raises:
      ValueError: k outside of 1 to n, or correct outside of 0 to n.
    """
    n = as_integer("n", n, most=_MOST)
    k, correct = as_integer("k", k), as_integer("correct", correct)
    if not 1 <= k <= n:
        raise ValueError(
            f"k is {k} with {n} completions; it must be between 1 and the number of completions"
        )
    if not 0 <= correct <= n:
        raise ValueError(
            f"correct is {correct} with {n} completions; it must be between 0 and the number of "
            "completions"
        )
    draws = math.comb(n, k)
    return (draws - math.comb(n - correct, k)) / draws


def pass_at(
    completions: Iterable[Completion], is_right: Callable[[Completion], bool], k: int
) -> float:
    """The pass@k of a set of prompts: the mean over prompts.

    Each prompt counts once, whatever its number of completions.

    Args:
      completions: of any number of prompts, at least k of each.
      is_right: True for a completion that solves its prompt, number `completion.prompt`.
      k: the number of completions drawn.

    Raises:
      ValueError: no completions, k below 1, or a prompt with fewer than k completions.
    """
    groups = by_prompt(completions)
    if not groups:
        raise ValueError("there are no completions to score; give at least 1")
    for prompt, group in groups.items():
        if len(group) < k:
            raise ValueError(
                f"prompt {prompt} has {len(group)} completions, too few for pass@{k}; sample at "
                f"least {k} of each prompt"
            )
    return statistics.fmean(
        pass_at_k(sum(bool(is_right(c)) for c in group), len(group), k) for group in groups.values()
    )
