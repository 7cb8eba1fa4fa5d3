"""MLA: the sizes of multi-head latent attention (DeepSeek-V2, section 2.1)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class MLA:
    """The sizes of multi-head latent attention. Hashable, so that it can be static under jit.

    Attributes:
      q_lora_rank: of the latent from which queries are made; 0 where they are made of the input.
      kv_lora_rank: of the latent from which the keys and values of all heads are made, which is
        what a cache keeps of a token, with one rotated part of a key for all heads.
      nope_dim, rope_dim: entries of a head's query and key that are not rotated, and that are.
      value_dim: entries of a head's value.
      bias: the projections to latents have one.
    """

    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False

    @property
    def query_dim(self) -> int:
        """Entries of a head's query."""
        return self.nope_dim + self.rope_dim

    @property
    def expands_from(self) -> int:
        """New tokens of a row from which on it takes less to make the keys and values of all heads
        than to attend to latents.

        Counted in products of numbers, for each head. Attending to a latent takes `cached_dim` and
        `kv_lora_rank` of them a query, and to a key and a value `query_dim` and `value_dim`. Making
        these takes `kv_lora_rank * (nope_dim + value_dim)`, once for all queries that read the tile.
        With DeepSeek-V3's sizes 131,072 are divided by 1,088 - 320: from 171 tokens on. The tokens'
        own queries and results, which absorbing has to multiply too, come on top.
        """
        less = self.cached_dim + self.kv_lora_rank - self.query_dim - self.value_dim
        if less <= 0:
            return 2**31
        return -(-self.kv_lora_rank * (self.nope_dim + self.value_dim) // less)

    @property
    def cached_dim(self) -> int:
        """Entries that a cache keeps of a token in each layer."""
        return self.rope_dim + self.kv_lora_rank
