"""The tokenizer of a checkpoint that has a tokenizer.json.

It needs the package tokenizers alone. Its methods are those of transformers' tokenizers that
jaxshare calls, with the same names and results; for others, and for tokenizers without a
tokenizer.json, there is `transformers.AutoTokenizer`, whose objects `LoadedModel` takes, too.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from jaxshare.models.chat_rendering import render

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that have a name in all checkpoints."""
_TEMPLATES = "additional_chat_templates"
_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""Texts that lose their spaces where tokenizer_config.json says clean_up_tokenization_spaces."""


class Tokenizer:
    """Text to tokens and back, and prompts of chats.

    Attributes:
      backend_tokenizer: of the package tokenizers.
      chat_template: in Jinja, or several by name, or None; it may be set.
      special_tokens_map: special tokens by name, such as eos_token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        *,
        cleans_spaces: bool = False,
    ):
        """Makes a tokenizer.

        Args:
          backend: is kept, and neither truncates nor pads from now on.
          special: see `special_tokens_map`; tokens that it does not have yet are added to it.
          chat_template: see the class.
          cleans_spaces: decoded texts lose spaces before punctuation, unless tokens are of BPE.
        """
        backend.no_truncation()
        backend.no_padding()
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        new = dict.fromkeys(text for text in (special or {}).values() if text not in known)
        backend.add_tokens([tokenizers.AddedToken(text, special=True) for text in new])
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(special or {})
        self._cleans_spaces = cleans_spaces and type(backend.model).__name__ != "BPE"

    def __repr__(self) -> str:
        return f"Tokenizer({len(self):,} tokens, {self.special_tokens_map})"

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """Encodes one text; `input_ids` are its tokens, `attention_mask` is 1 for each."""
        tokens = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, verbose: bool = True
    ) -> list[int]:
        """Encodes a text, in which special tokens are found.

        Args:
          text: of any length.
          add_special_tokens: put the tokens around it that tokenizer.json names for a whole text.
          verbose: has no effect.
        """
        if not isinstance(text, str):
            raise TypeError(f"a tokenizer encodes one text at a time, not a {type(text).__name__}")
        # A batch of one leaves other threads the interpreter.
        (encoded,) = self.backend_tokenizer.encode_batch(
            [text], add_special_tokens=add_special_tokens
        )
        return encoded.ids

    def decode(
        self, tokens: int | Sequence[int] | np.ndarray, skip_special_tokens: bool = False
    ) -> str:
        """The text of tokens; numbers that no token has are left out."""
        numbers = tokens if isinstance(tokens, list) else np.atleast_1d(np.asarray(tokens)).tolist()
        text = self.backend_tokenizer.decode(numbers, skip_special_tokens=skip_special_tokens)
        for spaced in _CLEANED if self._cleans_spaces else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def get_vocab(self) -> dict[str, int]:
        """The number of each token, added ones included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that are found whole in a text, by number."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The number of a token, or a list of them; that of unk_token, or None, for unknown ones."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        number = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.unk_token
        if number is None and unknown is not None and tokens != unknown:
            return self.convert_tokens_to_ids(unknown)
        return number

    def convert_ids_to_tokens(self, tokens: int | Sequence[int]) -> Any:
        """The name of a token in the vocabulary, or a list of them; None for no token."""
        if isinstance(tokens, int | np.integer):
            return self.backend_tokenizer.id_to_token(int(tokens))
        return [self.convert_ids_to_tokens(token) for token in tokens]

    @property
    def bos_token(self) -> str | None:
        """The token before a text, if there is one."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text, if there is one."""
        return self.special_tokens_map.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        """The token of unknown words, if there is one."""
        return self.special_tokens_map.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills a batch, if there is one."""
        return self.special_tokens_map.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """The number of `bos_token`."""
        return self._number(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """The number of `eos_token`."""
        return self._number(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        """The number of `unk_token`."""
        return self._number(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        """The number of `pad_token`."""
        return self._number(self.pad_token)

    def _number(self, token: str | None) -> int | None:
        return None if token is None else self.backend_tokenizer.token_to_id(token)

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """Returns the chat template that is used.

        Args:
          chat_template: the name of one of several, or a template.
          tools: where they are given, the template named tool_use is preferred.

        Raises:
          ValueError: there is none, or there are several and none of them is the default.
        """
        found = self.chat_template
        if isinstance(found, Mapping):
            if chat_template is not None:
                return found.get(chat_template, chat_template)
            names = (("tool_use",) if tools is not None else ()) + ("default",)
            if not (named := [found[name] for name in names if name in found]):
                raise ValueError(
                    f"the tokenizer has the chat templates {', '.join(sorted(found))}, and none is "
                    "the default: pass the name of one as chat_template"
                )
            return named[0]
        if chat_template is not None:
            return chat_template
        if found is None:
            raise ValueError(
                "the tokenizer has no chat template: pass one as chat_template, or set "
                "tokenizer.chat_template"
            )
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Renders a chat, in a process with limits of time and memory, and encodes it.

        Special tokens in the words of messages are special: for words of others there is
        `jaxshare.serving`, whose prompts make no control token of them.

        Args:
          messages: each with a role and content; of types that JSON has.
          tools: JSON schemas of functions.
          chat_template: see `get_chat_template`.
          add_generation_prompt: end with the start of the assistant's words.
          tokenize: encode the text; else it is returned.
          return_dict: return what calling the tokenizer does; else the tokens alone.
          variables: further ones that the template sees.

        Raises:
          ChatTemplateError: see `chat_rendering.render`.
          TypeError: an argument of transformers' method that this one does not have.
        """
        for name in ("continue_final_message", "padding", "truncation", "return_tensors"):
            if variables.pop(name, None):
                raise TypeError(
                    f"apply_chat_template does not take {name} here; the tokenizers of "
                    "transformers do: transformers.AutoTokenizer.from_pretrained(FOLDER)"
                )
        text = render(
            self.get_chat_template(chat_template, tools),
            messages,
            {
                **self.special_tokens_map,
                **variables,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if not tokenize:
            return text
        encoded = self(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and chat templates to a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": self._cleans_spaces,
            **self.special_tokens_map,
        }
        (folder / "tokenizer_config.json").write_text(
            json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        found = self.chat_template
        named = found if isinstance(found, Mapping) else {"default": found} if found else {}
        for name, template in named.items():
            file = folder / "chat_template.jinja"
            if name != "default":
                (folder / _TEMPLATES).mkdir(exist_ok=True)
                file = folder / _TEMPLATES / f"{name}.jinja"
            file.write_text(template, encoding="utf-8")


def of_folder(folder: Path) -> Tokenizer:
    """Reads tokenizer.json, with what tokenizer_config.json and chat_template.jinja say.

    Which tokens a text has is said by tokenizer.json alone, but for tokens that only the other
    files add; classes that tokenizer_config.json names do not change it.

    Raises:
      Exception: of many types, for files that cannot be read.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    settings = _object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        # Files that transformers 4 and older versions wrote.
        settings |= _object(folder / "special_tokens_map.json")
    special = {key: _content(key, settings.get(key)) for key in NAMED}
    further = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    for key, value in settings.items():
        if key.endswith("_token") and key not in NAMED and isinstance(value, str):
            special[key] = value
    if isinstance(further, dict):
        special |= {key: _content(key, value) for key, value in further.items()}
        further = None
    named = {name: text for name, text in special.items() if text is not None}
    if backend.padding is not None:
        named.setdefault("pad_token", backend.padding["pad_token"])
    _add_tokens(backend, folder, settings, {*named.values()})
    length = settings.get("model_max_length", 0)
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise ValueError(f"model_max_length is {length!r}, which is no number")
    made = Tokenizer(
        backend,
        named,
        _chat_template(folder, settings),
        cleans_spaces=bool(settings.get("clean_up_tokenization_spaces")),
    )
    known = {token.content for token in made.added_tokens_decoder.values()}
    texts = [_content("extra_special_tokens", value) or "" for value in further or ()]
    backend.add_tokens(
        [tokenizers.AddedToken(text, special=True) for text in texts if text not in known]
    )
    return made


def _object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is no JSON object")
    return found


def _content(name: str, value: Any) -> str | None:
    """The text of a special token in JSON."""
    text = value.get("content") if isinstance(value, dict) else value
    if text is not None and not isinstance(text, str):
        raise ValueError(f"{name} is {value!r}, which is no token")
    return text


def _add_tokens(
    backend: tokenizers.Tokenizer, folder: Path, settings: Mapping[str, Any], special: set[str]
) -> None:
    """Adds the tokens that other files than tokenizer.json name, in the order of their numbers."""
    named: dict[int, tokenizers.AddedToken] = {}
    if "added_tokens_decoder" in settings:
        for number, values in settings["added_tokens_decoder"].items():
            token = tokenizers.AddedToken(**values)
            token.special = token.special or token.content in special
            named[int(number)] = token
    else:
        for text, number in _object(folder / "added_tokens.json").items():
            is_special = text in special
            named[number] = tokenizers.AddedToken(
                text, normalized=not is_special, special=is_special
            )
        # The newer file wins.
        named |= backend.get_added_tokens_decoder()
    # With other flags they take the place of those of the same text.
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for _, token in sorted(named.items()) if repr(token) not in known])


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template in a file of its own, or those by name, or that of tokenizer_config.json."""
    files = {"default": folder / "chat_template.jinja"}
    if (folder / _TEMPLATES).is_dir():
        files |= {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    found = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found["default"] if [*found] == ["default"] else found
    given = settings.get("chat_template")
    if isinstance(given, list):
        return {each["name"]: each["template"] for each in given}
    return given
