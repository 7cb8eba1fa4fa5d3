"""Keys of calls: what tells a tool that it is called once more for the same result."""

import contextlib
import contextvars
import hashlib
import json
from collections.abc import Iterator

_current: contextvars.ContextVar[tuple[str, str, tuple[int, ...]] | None] = contextvars.ContextVar(
    "jaxshare_agents_call", default=None
)


def call_key() -> str:
    """Returns the key of the call under way, inside a tool: 32 hexadecimal digits.

    A tool whose process is killed is called again when the run goes on: its result was not in the
    journal yet. The key is the same then, and in all its attempts (`retries`), and differs from that
    of every other call, also of other runs. Give it to a service that takes idempotency keys, or
    keep it beside what the tool has done, and the effect comes exactly once.

    Without a journal that is a file, a run that is started again has other keys.

    Raises:
      RuntimeError: no tool of an agent calls this.
    """
    if (at := _current.get()) is None:
        raise RuntimeError("call_key() is for the functions that agents call by tool() or llm()")
    return digest_of(*at, size=16)


def digest_of(session: str, run: str, path: tuple[int, ...], size: int) -> str:
    """Returns the digest of a firing of a run in a session, of so many bytes, in hexadecimal."""
    words = json.dumps([session, run, path])
    return hashlib.blake2b(words.encode(), digest_size=size).hexdigest()


@contextlib.contextmanager
def calling(session: str, run: str, path: tuple[int, ...]) -> Iterator[None]:
    """Lets `call_key` give the key of this firing meanwhile."""
    token = _current.set((session, run, path))
    try:
        yield
    finally:
        _current.reset(token)
