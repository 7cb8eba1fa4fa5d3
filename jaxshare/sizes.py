"""Sizes that arrays are padded to, so that few programs serve many."""


def bucket(number: int) -> int:
    """The least power of two that is not smaller; 1 for nothing."""
    return 1 << max(number - 1, 0).bit_length()
