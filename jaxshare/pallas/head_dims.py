"""The shapes of heads that the GPU kernels of either backend support."""

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
"""Of keys whose values are stored, with as many entries."""
LATENT_DIMS = {576: 512}
"""Of keys whose last entries, this many, are the values, and whose others are rotated (multi-head
latent attention)."""
MAX_QUERY_HEADS = 128
"""Query heads of a kv head."""


def shares_queries(head_dim: int, codes: bool) -> bool:
    """True where two warpgroups of a mosaic_gpu kernel have the same queries and half of the
    results' columns each.

    One warpgroup's registers do not have all of these: 512 columns of latents, and, where the cache
    approximates (`codes`), 256, since one more warpgroup takes registers to convert.
    """
    return head_dim in LATENT_DIMS or (codes and head_dim > 192)


def store_columns(head_dim: int, codes: bool) -> int:
    """Columns of a head that the mosaic_gpu kernel stores through shared memory at once, in
    float32. `codes`: the cache approximates, and codes have to fit beside wide heads."""
    if head_dim % 64:
        return head_dim
    return 32 if codes and head_dim > 128 else 64


def check_head_dim(head_dim: int, value_dim: int, rotated: int) -> None:
    """Checks the shape of a cache's heads.

    Args:
      head_dim: entries of a key.
      value_dim: entries of a stored value; 0 where values are a part of keys.
      rotated: entries of a key that are rotated.

    Raises:
      NotImplementedError: the kernels do not support it.
    """
    if value_dim:
        if head_dim not in HEAD_DIMS:
            raise NotImplementedError(
                f"its head dims are {', '.join(map(str, HEAD_DIMS))}; this one is {head_dim}"
            )
    elif LATENT_DIMS.get(head_dim) != head_dim - rotated:
        served = ", ".join(f"{key} with {value}" for key, value in LATENT_DIMS.items())
        raise NotImplementedError(
            f"where values are a part of keys its head dims are {served} of values; this one is "
            f"{head_dim} with {head_dim - rotated}"
        )
