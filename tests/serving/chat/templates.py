"""Chat templates that write tools, calls and results in the published forms, and tokenizers.

The templates, in tests/fixtures/chat_templates, are short ones of this repository.
"""

import functools
import types

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from jaxshare.models import LoadedModel
from tests.paths import FIXTURES

TEMPLATES = {
    name: (FIXTURES / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    for name in (
        *("hermes", "qwen3-coder", "llama3", "pythonic"),
        *("mistral", "mistral-args", "deepseek", "deepseek-v3.1"),
    )
}
ENDS = {
    "hermes": "<|im_end|>",
    "qwen3-coder": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "pythonic": "<|eot_id|>",
    "mistral": "</s>",
    "mistral-args": "</s>",
    "deepseek": "<｜end▁of▁sentence｜>",
    "deepseek-v3.1": "<｜end▁of▁sentence｜>",
}
"""The end of the model's turn."""
SPECIAL = (
    *("<s>", "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[THINK]", "[/THINK]"),
    *("<｜User｜>", "<｜Assistant｜>", *dict.fromkeys(ENDS.values())),
)
OTHERS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜tool▁sep｜>"),
)
CONTROLS = (*SPECIAL, *OTHERS)
"""The marks of all formats."""


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Of bytes, with tokens for all marks that are special or that the template writes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({token: i for i, token in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    others = [text for text in OTHERS if "think" in text or text in template]
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="<|im_end|>", chat_template=template
    )


def model_of(template: str) -> LoadedModel:
    """A model that encodes and does nothing else."""
    made = tokenizer(template)
    config = types.SimpleNamespace(vocab_size=len(made), max_positions=65536)
    return LoadedModel(config, {}, made, None)  # pyright: ignore[reportArgumentType]


def controls(template: str, tokens: list[int]) -> list[str]:
    """The control tokens among tokens, as texts."""
    return [text for text in tokenizer(template).convert_ids_to_tokens(tokens) if text in CONTROLS]
