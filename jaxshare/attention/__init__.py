"""Block attention: `api` chooses a backend, `plan` and `tiling` say what one pass reads, `xla` and
`reference` are the backends without kernels (those with kernels are in `jaxshare.pallas`), and
`merge` and `block_share` work on log-sum-exps."""

from jaxshare.attention.api import BACKENDS, append_and_attend, block_attention, preferred
from jaxshare.attention.plan import Plan, make_plan

__all__ = [
    "BACKENDS",
    "Plan",
    "append_and_attend",
    "block_attention",
    "make_plan",
    "preferred",
]
