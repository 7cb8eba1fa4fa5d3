"""The identity of a model in the files of a job: all of the model that its texts depend on.

A job that goes on with other weights under the same name would mix the texts of two models.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxshare.models import Generation, LoadedModel
from jaxshare.models.fingerprint import same_fingerprint
from jaxshare.models.sources import local_folder
from jaxshare.serving.inputs import cache_dtype

_NAMES = {
    "dtype": "the dtype of its parameters",
    "weights": "its parameters",
    "approximate_kv": "the approximation of its keys and values",
    "adapters": "its adapters",
    "tokenizer": "its tokenizer",
    "chat_template": "its chat template",
    "generation": "its generation settings",
}
_log = logging.getLogger("jaxshare")


def identity(model: LoadedModel) -> dict[str, Any]:
    """Returns what tells a model from others of its name, as JSON holds it.

    Without "dtype" and "weights" for a model whose parameters are not in this process.
    """
    found: dict[str, Any] = {}
    if model.params:
        found = {"dtype": str(cache_dtype(model)), "weights": model.fingerprint}
    given, off = _settings(model.generation), _settings(Generation())
    # Settings that earlier versions did not know are there where they are on.
    generation = {k: v for k, v in given.items() if k in _ALWAYS or v != off[k]}
    generation = json.loads(json.dumps(generation))  # as it comes out of a file
    template = model.tokenizer.chat_template if model.tokenizer else None
    if model.approximate_kv is not None:  # which earlier versions did not know
        found["approximate_kv"] = model.approximate_kv
    if model.adapters and model.adapters.loaded:  # likewise
        loaded = model.adapters.loaded.values()
        found["adapters"] = {each.name: each.digest.hex() for each in loaded}
    return {
        **found,
        "tokenizer": _tokenizer_hash(model.tokenizer),
        "chat_template": _hash(json.dumps(template)) if template else None,
        "generation": generation,
    }


def files_stamp(name: str) -> dict[str, str]:
    """Returns {"files": a hash of the names, sizes and times of a model's files}, or {} if they are
    not local.

    While it is the same, a finished job need not load the model to know that it has not changed.
    """
    folder = local_folder(name)
    found = []
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):  # a link that leads nowhere
            about = file.stat()
            if stat.S_ISREG(about.st_mode):
                found.append((str(file.relative_to(folder)), about.st_size, about.st_mtime_ns))
    return {"files": _hash(json.dumps(found))} if found else {}


def is_surely_same(saved: Mapping[str, Any], name_then: str | None, name: str) -> bool:
    """Returns whether the model of a job need not be loaded to know that it is the one it began with.

    Where an earlier version began the job, or the files are not local, the name decides.

    Args:
      saved: the identity of the job, with `files_stamp`.
      name_then, name: the name of the model when the job began, and now.
    """
    if not _same_name(name_then, name):
        return False
    now = files_stamp(name)
    return not now or "files" not in saved or saved["files"] == now["files"]


def check_ended_job(
    what: str,
    saved: Mapping[str, Any],
    load: Callable[[], LoadedModel],
    advice: str,
    names: tuple[str | None, str],
) -> None:
    """Checks that a job that has ended was of the model that is named now; see `check_identity`.

    The model is loaded only where its name or its files are not those that they were.
    """
    if not is_surely_same(saved, *names):
        check_identity(what, saved, load(), advice, names)


def _same_name(then: str | None, now: str | None) -> bool:
    """Returns whether two names are of one model: equal, or of one folder or file."""
    if then is None or now is None or then == now:
        return True
    places = local_folder(then), local_folder(now)
    return all(place.exists() for place in places) and places[0].samefile(places[1])


def _settings(generation: Generation) -> dict[str, Any]:
    """All settings by name."""
    found: dict[str, Any] = {}
    for name, value in dataclasses.asdict(generation).items():
        found |= value if name == "sampler" else {name: value}
    return found


def check_identity(
    what: str,
    saved: Mapping[str, Any],
    model: LoadedModel,
    advice: str,
    names: tuple[str | None, str | None] = (None, None),
) -> dict[str, Any]:
    """Checks that a job goes on with the model that it began with.

    Its name may be another one, since a folder may have been moved. What cannot be compared, because
    an earlier version did not save it or because the parameters are on other machines, is named in a
    warning.

    Args:
      what: the job, such as "the job of out.jsonl".
      saved: the identity when it began; other keys are ignored.
      model: the model now.
      advice: the end of the error message, such as "give another --output".
      names: of the model when the job began, and now; None if they are not known.

    Returns:
      The identity to save from now on.

    Raises:
      ValueError: the model is another one.
    """
    now = identity(model)
    if not _same_name(*names) and not ("weights" in saved and "weights" in now):
        raise ValueError(
            f"{what} began with the model {names[0]}, not {names[1]}, and their parameters cannot be "
            f"compared; give {names[0]}, or {advice}"
        )
    differing = [name for name in _NAMES if not _same(name, saved, now)]
    if "dtype" in differing:
        differing = [name for name in differing if name != "weights"]  # which have that dtype
    if differing:
        raise ValueError(_difference(what, saved, now, differing, names, advice))
    if unknown := [
        what
        for name, what in _NAMES.items()
        if name not in _WHERE_ON and (name not in saved or name not in now)
    ]:
        _log.warning(
            "warning: %s goes on without a comparison of %s with the model that it began with, "
            "because an earlier version of jaxshare began it or they are on other machines; if "
            "they have changed since then, its texts are of two models",
            what,
            ", ".join(unknown),
        )
    return {**now, **{name: saved[name] for name in _NAMES if name in saved}}


def _difference(
    what: str,
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    differing: Sequence[str],
    names: tuple[str | None, str | None],
    advice: str,
) -> str:
    """The error for a model with other parts than the one that a job began with."""
    changes = [_NAMES[name] + _details(name, saved.get(name), now.get(name)) for name in differing]
    parts = " and ".join(changes)
    # all but one of the names are plural
    is_one = len(changes) == 1 and differing[0] in _SINGULAR
    if not _same_name(*names):
        return (
            f"{what} began with the model {names[0]}, and {names[1]} is another one: {parts} "
            f"{'is' if is_one else 'are'} different; give {names[0]}, or {advice}"
        )
    return (
        f"{what} began with another model of this name: {parts} {'has' if is_one else 'have'} "
        f"changed; {advice}, or put the files of the model back as they were"
    )


def _same(name: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Returns True if one part of the identity is the same, or is known of one alone."""
    if name in _WHERE_ON:
        return saved.get(name) == now.get(name)
    if name not in saved or name not in now:
        return True
    if name == "weights":
        return same_fingerprint(saved[name], now[name])
    return saved[name] == now[name]


_ALWAYS = ("stop_tokens", "temperature", "top_k", "top_p", "min_p")
_WHERE_ON = ("approximate_kv", "adapters")
"""Parts that are there where they are on."""
_SINGULAR = ("dtype", "approximate_kv", "tokenizer", "chat_template")


def _details(name: str, then: Any, now: Any) -> str:
    """The values that differ, in brackets, where they are short enough to read."""
    if name in ("dtype", "approximate_kv"):
        return f" ({then}, now {now})"
    if name == "generation":
        fields = [f for f in {**then, **now} if then.get(f) != now.get(f)]
        return f" ({', '.join(f'{f} {then.get(f)}, now {now.get(f)}' for f in fields)})"
    return ""


def _tokenizer_hash(tokenizer: Any) -> str | None:
    """A hash of all that a tokenizer does, but for the padding and truncation of its last call."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "to_str"):
        return _hash(json.dumps(sorted(tokenizer.get_vocab().items())))
    content = json.loads(backend.to_str())
    return _hash(json.dumps({**content, "padding": None, "truncation": None}))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
