"""Identities of what clients may ask for again."""

import secrets


def new_id(kind: str) -> str:
    """Returns an identity that cannot be guessed, such as `chatcmpl-...`."""
    return f"{kind}{secrets.token_hex(16)}"
