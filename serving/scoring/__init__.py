"""Scoring: log-probabilities of given texts, with every common prefix fed once."""

from jaxshare.serving.scoring.scores import TextScore, prompt_logprobs, score

__all__ = ["TextScore", "prompt_logprobs", "score"]
