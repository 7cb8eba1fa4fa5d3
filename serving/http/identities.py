"""Identities of what clients may ask for again."""

import secrets


def new_id(kind: str, replica: str = "") -> str:
    """Returns an identifier that cannot be guessed, such as `chatcmpl-...`.

    Args:
      kind: its beginning.
      replica: that holds what it identifies, see `Service.replica`.
    """
    return f"{kind}{replica}{'-' if replica else ''}{secrets.token_hex(16)}"
