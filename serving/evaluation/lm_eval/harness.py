"""The answers of one model to lm_eval's requests, as plain values."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxshare import models
from jaxshare.argument_checks import INT32_MAX, as_integer, shown
from jaxshare.models import LoadedModel
from jaxshare.models.chat_rendering import ChatTemplateError
from jaxshare.quantised import is_quantised
from jaxshare.serving.chat_template import render_with
from jaxshare.serving.engine import Engine
from jaxshare.serving.evaluation.lm_eval.generation import generate_answers
from jaxshare.serving.evaluation.lm_eval.texts import HarnessTexts, prefix_token
from jaxshare.serving.scoring.scores import score_texts

_MARK = "\U000f0010"
"""A private character at the end of a message that goes on, which no template looks at."""


@dataclasses.dataclass(frozen=True)
class Harness:
    """One model, and how its requests are read.

    Attributes:
      texts: encodes for the model.
      engine_options: of the engine that generates; see `Engine`.
      template_options: further variables of the chat template.
    """

    texts: HarnessTexts
    engine_options: Mapping[str, Any]
    template_options: Mapping[str, Any]

    @classmethod
    def load(
        cls,
        pretrained: str | LoadedModel,
        *,
        revision: str | None = None,
        dtype: str | None = None,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        max_rows: int = 16,
        kv_bytes: int | None = None,
        seed: int = 0,
        enable_thinking: bool | None = None,
    ) -> "Harness":
        """Loads a model.

        Args:
          pretrained: a folder or hub id, or a model that is loaded.
          revision, dtype: see `jaxshare.models.load`; "auto" is the checkpoint's own dtype.
          max_length: the most tokens of a text that are read at a time; longer ones are cut at the
            left, or scored in pieces. Default the model's context.
          add_bos_token: put the tokenizer's special tokens before texts; default as the tokenizer
            does by itself.
          prefix_token_id: the token before texts without a context; default that of the start of a
            text, or else that of the end.
          max_rows, kv_bytes, seed: of the engine that generates; see `Engine`.
          enable_thinking: a variable of some chat templates; default theirs.

        Raises:
          FileNotFoundError: no such model.
          ValueError: a model without a tokenizer, or an option out of range.
          TypeError: an option of another type.
        """
        model = pretrained
        if isinstance(pretrained, str):
            dtype = None if dtype == "auto" else dtype
            model = models.load(pretrained, dtype=dtype, revision=revision)
        if not isinstance(model, LoadedModel):
            raise TypeError(
                f"pretrained is {shown(pretrained)}; it must be a folder, a hub id or a model"
            )
        if model.tokenizer is None:
            raise ValueError(
                "the model folder has no tokenizer, and requests are texts; add the tokenizer's "
                "files to the folder"
            )
        most = model.config.max_positions
        length = most if max_length is None else as_integer("max_length", max_length, 1, most)
        vocabulary = model.config.vocab_size
        before = (
            prefix_token(model.tokenizer)
            if prefix_token_id is None
            else as_integer("prefix_token_id", prefix_token_id, 0, vocabulary - 1)
        )
        engine = {"max_rows": as_integer("max_rows", max_rows, 1), "kv_bytes": kv_bytes}
        engine["seed"] = as_integer("seed", seed, 0, INT32_MAX)
        template = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        return cls(HarnessTexts(model, before, length, add_bos_token), engine, template)

    def loglikelihoods(
        self,
        pairs: Sequence[tuple[str, str]],
        on_scored: Callable[[int], None] | None = None,
    ) -> list[tuple[float, bool]]:
        """Scores (context, continuation) pairs.

        Args:
          pairs: texts.
          on_scored: called with the number of pairs that are scored, as it grows.

        Returns:
          For each the log-probability of the continuation after the context, and whether all its
          tokens are the likeliest.

        Raises:
          ValueError: see `HarnessTexts.pair`.
          NotANumberError: the model's logits are not finite.
        """
        texts = [self.texts.pair(context, continuation) for context, continuation in pairs]
        scores = score_texts(self.texts.model, texts, on_scored=on_scored)
        return [(score.logprob, score.greedy) for score in scores]

    def rolling_loglikelihoods(self, texts: Sequence[str]) -> list[float]:
        """The log-probability of each whole text after the prefix token; 0 for one without
        tokens.

        Raises:
          NotANumberError: the model's logits are not finite.
        """
        pieces = [[*self.texts.windows(text)] for text in texts]
        scores = iter(score_texts(self.texts.model, [each for some in pieces for each in some]))
        return [math.fsum(next(scores).logprob for _ in some) for some in pieces]

    def answers(
        self,
        requests: Sequence[tuple[str, Mapping[str, Any]]],
        on_answered: Callable[[], Any] = lambda: None,
    ) -> list[str]:
        """Generates an answer to each context; arguments and errors as in `generate_answers`."""
        # One data group of a mesh generates.
        with Engine(self.texts.model.replicas()[0], **self.engine_options) as engine:
            return generate_answers(engine, self.texts, requests, on_answered)

    def render(self, messages: Sequence[Mapping[str, str]], *, goes_on: bool = False) -> str:
        """Renders a dialogue in the chat template, without a system message where that refuses one.

        Args:
          messages: with role and content.
          goes_on: the last message is not finished; otherwise an answer of the assistant starts.

        Raises:
          ChatTemplateError: the template refuses the messages.
          ValueError: the template leaves out a message that is to go on.
        """
        given = [dict(message) for message in messages]
        if goes_on:
            given[-1]["content"] += _MARK
        options = {**self.template_options, "add_generation_prompt": not goes_on}
        try:
            text = render_with(self.texts.model.tokenizer, given, **options)
        except ChatTemplateError:
            others = [message for message in given if message["role"] != "system"]
            if len(others) == len(given):
                raise
            text = render_with(self.texts.model.tokenizer, others, **options)
        if goes_on and _MARK not in text:
            raise ValueError(
                "the chat template leaves out the last message, so that it cannot go on; ask for a "
                "new answer instead"
            )
        return text.rpartition(_MARK)[0] if goes_on else text

    def chat_template(self, chosen: bool | str | None) -> str | None:
        """The chat template that `render` uses, or None where none is asked for.

        Raises:
          ValueError: a template by name, or a model without one.
        """
        if chosen is False or chosen is None:
            return None
        if chosen is not True:
            raise ValueError(
                f"the chat template {shown(chosen)} is asked for by name; the tokenizer's default "
                "is the one that is used"
            )
        tokenizer: Any = self.texts.model.tokenizer
        return tokenizer.get_chat_template()

    def describe(self) -> dict[str, Any]:
        """Facts about the model: its number of parameters, its dtype and its fingerprint."""
        model = self.texts.model
        leaves = jax.tree.leaves(model.params, is_leaf=is_quantised)
        return {
            "model_num_parameters": sum(leaf.size for leaf in leaves),
            "model_dtype": str(model.dtype),
            "model_sha": model.fingerprint,
        }
