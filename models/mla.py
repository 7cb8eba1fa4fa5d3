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
    def cached_dim(self) -> int:
        """Entries that a cache keeps of a token in each layer."""
        return self.rope_dim + self.kv_lora_rank
