"""The tokenizer that the metadata of a GGUF file describes.

Source: llama-vocab.cpp of llama.cpp, whose splits of text these are.
"""

from typing import TYPE_CHECKING, Any

from jaxshare.models.config_fields import ConfigError, Fields
from jaxshare.models.gguf.file import GGUFFile
from jaxshare.models.gguf.settings import CONTROL

if TYPE_CHECKING:
    from jaxshare.models.tokenizer import Tokenizer

_USER_DEFINED = 4
"""The type of tokens that are found in a text before it is split."""
_SPACE = "\u2581"
"""A space in the pieces of SentencePiece."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
_LLAMA3 = (rf"{_WORDS}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",)
_QWEN2 = (rf"{_WORDS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_REST}",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(endings: str, digits: str) -> tuple[str]:
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{_UPPER}*{_LOWER}+{endings}|{first}{_UPPER}+{_LOWER}*{endings}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_REST}",
    )


_SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), _by_case(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _by_case("", r"\p{N}"),
}
"""The expressions by which a text is split before bytes are merged, one after the other, by
tokenizer.ggml.pre."""
_WHOLE_WORDS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2", "tekken"}
)
"""Those with which a piece that is a token is not merged from its bytes."""


def tokenizer_of(file: GGUFFile) -> "Tokenizer | None":
    """Returns the tokenizer of a file, with its chat template; None for a file without one.

    Raises:
      ConfigError: a kind of tokenizer that is not read, or one whose parts are missing.
    """
    found = {k: v for k, v in file.values.items() if k.startswith("tokenizer.")}
    fields = Fields(found, str(file.path))
    kind = fields.take("tokenizer.ggml.model", str, "no_vocab")
    if kind in ("no_vocab", "none"):
        return None
    if kind not in ("gpt2", "llama"):
        raise fields.error(
            "tokenizer.ggml.model",
            "only gpt2 and llama are read: put the file in a folder with the model's tokenizer.json",
        )
    tokens: list[str] = fields.take("tokenizer.ggml.tokens", list)
    if len({*tokens}) != len(tokens):
        raise ConfigError(f"{file.path} has a token twice in tokenizer.ggml.tokens")
    types = fields.take("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type", f"there are {len(tokens)} tokens")
    made = _of_bytes(fields, tokens) if kind == "gpt2" else _of_pieces(fields, file, tokens, types)
    return _with_special(fields, made, tokens, types, adds_start=kind == "llama")


def _of_bytes(fields: Fields, tokens: list[str]) -> Any:
    """BPE of bytes, each written as a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = fields.take("tokenizer.ggml.pre", str, "default")
    if pre not in _SPLITS:
        raise fields.error(
            "tokenizer.ggml.pre",
            f"only {', '.join(_SPLITS)} are read: put the file in a folder with the model's "
            "tokenizer.json",
        )
    merges = [_pair(text) for text in fields.take("tokenizer.ggml.merges", list)]
    vocab = {text: number for number, text in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    splits: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in _SPLITS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    made.decoder = decoders.ByteLevel()
    return made


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge; the first may begin with a space in old files."""
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _of_pieces(fields: Fields, file: GGUFFile, tokens: list[str], types: list[int]) -> Any:
    """BPE of SentencePiece, where pieces are merged by their scores."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = fields.take("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise fields.error("tokenizer.ggml.scores", f"there are {len(tokens)} tokens")
    if file.architecture.startswith("gemma"):
        # Its pieces are in the order of their merges, and their scores are not.
        scores = [-float(number) for number in range(len(tokens))]
    vocab = {text: number for number, text in enumerate(tokens)}
    unknown = fields.take("tokenizer.ggml.unknown_token_id", int, None)
    merges = _merges(vocab, scores, {t for t, k in zip(tokens, types, strict=True) if k == 1})
    made = Tokenizer(
        models.BPE(
            vocab,
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = fields.take("tokenizer.ggml.add_space_prefix", bool, True)
    before = [normalizers.Prepend(_SPACE)] if has_prefix else []
    made.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", _SPACE)])
    after = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    made.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *after]
    )
    return made


def _merges(vocab: dict[str, int], scores: list[float], normal: set[str]) -> list[tuple[str, str]]:
    """Every two pieces that make a third, those of the best score first."""
    found = []
    for text in normal:
        number = vocab[text]
        for place in range(1, len(text)):
            left, right = text[:place], text[place:]
            if left in vocab and right in vocab:
                found.append((-scores[number], number, vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _with_special(
    fields: Fields, made: Any, tokens: list[str], types: list[int], adds_start: bool
) -> "Tokenizer":
    """Adds the tokens that are found whole, those around a text, and the chat template."""
    from tokenizers import AddedToken, processors

    from jaxshare.models.tokenizer import Tokenizer

    for text, kind in zip(tokens, types, strict=True):
        if kind in (CONTROL, _USER_DEFINED):
            is_control = kind == CONTROL
            made.add_tokens([AddedToken(text, normalized=False, special=is_control)])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {n: fields.take(f"tokenizer.ggml.{key}_token_id", int, None) for n, key in names.items()}
    for name, token in ids.items():
        if token is not None and not 0 <= token < len(tokens):
            raise fields.error(
                f"tokenizer.ggml.{names[name]}_token_id", f"there are {len(tokens)} tokens"
            )
    special = {f"{n}_token": tokens[token] for n, token in ids.items() if token is not None}
    around = {"bos": adds_start, "eos": False}
    around = {n: fields.take(f"tokenizer.ggml.add_{n}_token", bool, b) for n, b in around.items()}
    sides = {
        n: [special[f"{n}_token"]] if around[n] and f"{n}_token" in special else [] for n in around
    }
    single = [*sides["bos"], "$A", *sides["eos"]]
    pair = [*single, *(f"{each}:1" for each in (*sides["bos"], "$B", *sides["eos"]))]
    used = [(text, tokens.index(text)) for side in sides.values() for text in side]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=used
    )
    template = fields.take("tokenizer.chat_template", str, None)
    return Tokenizer(made, special, template)
