"""Compiled grammars: as a table for the device, or as a matcher of llguidance for the host."""

import collections
import dataclasses
import json
import threading
from collections.abc import Sequence
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
from jsonschema.validators import validator_for

from jaxshare import Grammar, Sampler
from jaxshare.argument_checks import shown
from jaxshare.decoding.grammar_tables import GrammarTable
from jaxshare.models import LoadedModel
from jaxshare.serving.grammars.byte_grammar import byte_grammar
from jaxshare.serving.grammars.patterns import BeyondError, Pattern, choice, read_regex
from jaxshare.serving.grammars.schema_pattern import schema_pattern
from jaxshare.serving.grammars.token_table import token_table
from jaxshare.serving.grammars.vocabulary import GrammarVocabulary

_MOST_KEPT = 256
_JSON: Any = {"whitespace_flexible": True, "whitespace_pattern": r"(\n {0,16}| )?"}
"""Where JSON admits any white space, one space or one line break with its indentation comes: enough
to print it nicely, and no text gets lost in spaces."""
_LONGEST = 2**20


class GrammarError(ValueError):
    """A grammar that cannot be compiled, or cannot be had with other settings."""


@dataclasses.dataclass(frozen=True, eq=False)
class CompiledGrammar:
    """A grammar over the tokens of one model.

    Attributes:
      grammar: as it was given.
      vocabulary: of the model.
      table: for the device; None where the host computes the masks.
    """

    grammar: Grammar
    vocabulary: GrammarVocabulary
    table: GrammarTable | None
    _matcher: Any

    def matcher(self, tokens: Sequence[int] = ()) -> llguidance.LLMatcher:
        """A new matcher that has read these tokens."""
        matcher = self._matcher.deep_copy()
        if tokens:
            matcher.consume_tokens([*tokens])
        return matcher

    def begins(self) -> bool:
        """Returns whether any token can come first."""
        if self.table:
            return bool((self.table.transitions[self.table.start] >= 0).any())
        mask = llguidance.numpy.allocate_token_bitmask(1, len(self.vocabulary.tokens))
        llguidance.numpy.fill_next_token_bitmask(self.matcher(), mask)
        return bool(mask.any())

    def admits(self, tokens: Sequence[int]) -> bool:
        """Returns whether these tokens, without one that ends the text, are a whole text of it."""
        matcher = self.matcher(tokens)
        return not matcher.is_error() and matcher.is_accepting()


def compile_grammar(model: LoadedModel, sampler: Sampler) -> CompiledGrammar | None:
    """Compiles the grammar of a sampler, once; None if it has none.

    Raises:
      GrammarError: it does not compile, the message says where; or the model or the sampler leave
        no token that could end a text.
    """
    if sampler.grammar is None:
        return None
    if model.tokenizer is None:
        raise GrammarError(
            "the model folder has no tokenizer, so no grammar can be read along; add the "
            "tokenizer's files to the folder"
        )
    if sampler.ignore_eos and not sampler.stop_token_ids:
        raise GrammarError(
            "ignore_eos cannot be had with a grammar, whose text ends with a stop token; leave one "
            "of them out"
        )
    if sampler.min_tokens or sampler.min_length:
        name = "min_tokens" if sampler.min_tokens else "min_length"
        raise GrammarError(
            f"{name} cannot be had with a grammar, which says where the text may end; leave one "
            "of them out"
        )
    own = () if sampler.ignore_eos else tuple(model.generation.stop_tokens)
    stops = tuple(dict.fromkeys((*own, *sampler.stop_token_ids)))
    if not stops:
        raise GrammarError(
            "the model has no stop token, with which the text of a grammar could end; give one in "
            "stop_token_ids"
        )
    vocabulary = GrammarVocabulary.of(model.tokenizer, model.config.vocab_size, stops)
    return _kept(sampler.grammar, vocabulary)


_compiled: collections.OrderedDict[tuple[Grammar, int], CompiledGrammar] = collections.OrderedDict()
_lock = threading.Lock()


def _kept(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    key = grammar, id(vocabulary)
    with _lock:
        found = _compiled.get(key)
        if found is not None:
            _compiled.move_to_end(key)
            return found
    made = _compile(grammar, vocabulary)
    with _lock:
        _compiled[key] = made
        while len(_compiled) > _MOST_KEPT:
            _compiled.popitem(last=False)
    return made


def _compile(grammar: Grammar, vocabulary: GrammarVocabulary) -> CompiledGrammar:
    if len(grammar.source) > _LONGEST:
        raise GrammarError(
            f"the {_name(grammar)} has {len(grammar.source)} characters; at most {_LONGEST} are read"
        )
    matcher = llguidance.LLMatcher(vocabulary.reader, _description(grammar), log_level=0)
    if matcher.is_error():
        raise GrammarError(f"the {_name(grammar)} does not compile: {_reason(matcher)}")
    try:
        table = token_table(byte_grammar(_pattern(grammar)), vocabulary)
    except BeyondError:
        table = None
    made = CompiledGrammar(grammar, vocabulary, table, matcher)
    if not made.begins():
        raise GrammarError(
            f"no text of the {_name(grammar)} can be made of the model's tokens; give one that "
            "admits some text"
        )
    return made


def _pattern(grammar: Grammar) -> Pattern:
    """A grammar as a pattern. Raises BeyondError if it is none, or not known to be."""
    if grammar.kind == "choices":
        return choice(json.loads(grammar.source))
    if grammar.kind == "regex":
        return read_regex(grammar.source)
    if grammar.kind == "json_schema":
        return schema_pattern(json.loads(grammar.source))
    raise BeyondError("it may not be regular")


def _description(grammar: Grammar) -> str:
    """A grammar in the form that llguidance reads."""
    source, to = grammar.source, llguidance.LLMatcher
    if grammar.kind == "json_schema":
        schema = json.loads(source)
        if schema is False:
            raise GrammarError("the JSON schema is false, under which nothing is valid")
        source = "{}" if schema is True else source
        _check_schema(schema)
        return to.grammar_from_json_schema(source, defaults=_JSON)
    if grammar.kind == "regex":
        return to.grammar_from_regex(source)
    if grammar.kind == "choices":
        texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(source))
        return to.grammar_from_lark(f"start: {' | '.join(texts)}")
    return to.grammar_from_lark(source)


def _check_schema(schema: Any) -> None:
    try:
        validator_for(schema, jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(map(str, error.absolute_path)) or "its top"
        raise GrammarError(
            f"the JSON schema is not valid at {where}: {shown(error.message)}"
        ) from None
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None


def _name(grammar: Grammar) -> str:
    return {
        "json_schema": "JSON schema",
        "regex": "regular expression",
        "lark": "Lark grammar",
    }.get(grammar.kind, "list of choices")


def _reason(matcher: Any) -> str:
    """The first lines of an error of llguidance in one line."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    return " ".join(lines)[:500]
