"""Structured output: grammars compiled for a model's tokenizer."""

from jaxshare.serving.grammars.compiled import CompiledGrammar, GrammarError, compile_grammar

__all__ = ["CompiledGrammar", "GrammarError", "compile_grammar"]
