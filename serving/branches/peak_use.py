"""The most that a run has in memory at a time: rows, blocks and tokens."""

import collections
import dataclasses
from collections.abc import Sequence

from jaxshare.arena import ALIGNMENT
from jaxshare.serving.branches.row_budget import RowBudget
from jaxshare.serving.branches.sharing_plan import Sample, SharingPlan


@dataclasses.dataclass(frozen=True)
class PeakUse:
    """The maximum of what runs at a time.

    Attributes:
      rows: the number of rows.
      blocks: the number of blocks of the tree.
      tokens: capacity of all blocks, those of the rows included.
      max_sample_tokens: capacity that the largest sample needs alone.
      largest_prompt: the number of its prompt.
    """

    rows: int
    blocks: int
    tokens: int
    max_sample_tokens: int
    largest_prompt: int


def peak_use(
    sharing: SharingPlan,
    samples: Sequence[Sample],
    max_new_tokens: int,
    max_rows: int,
    budget: RowBudget,
) -> PeakUse:
    """The maximum that neighbouring samples need together, within the rows and the memory."""
    shared = footprints([len(block.tokens) for block in sharing.blocks])
    ref_counts: collections.Counter[int] = collections.Counter()
    rows = tokens = first = 0
    peak = PeakUse(1, 0, 0, 0, 0)
    own = footprints([len(s.suffix) + max_new_tokens for s in samples])
    # A window of neighbours slides over the samples, as wide as it fits.
    for last, sample in enumerate(samples):
        path = sharing.path(sample.block)
        if (alone := own[last] + sum(shared[b] for b in path)) > peak.max_sample_tokens:
            peak = dataclasses.replace(peak, max_sample_tokens=alone, largest_prompt=sample.prompt)
        rows += 1
        tokens += own[last] + sum(shared[b] for b in path if not ref_counts[b])
        ref_counts.update(path)
        while rows > 1 and (
            rows > max_rows or not budget.fits(rows, tokens, rows + len(ref_counts))
        ):
            left = sharing.path(samples[first].block)
            ref_counts.subtract(left)
            rows -= 1
            tokens -= own[first] + sum(shared[b] for b in left if not ref_counts[b])
            ref_counts -= collections.Counter()  # drops entries of 0
            first += 1
        peak = dataclasses.replace(
            peak,
            rows=max(peak.rows, rows),
            blocks=max(peak.blocks, len(ref_counts)),
            tokens=max(peak.tokens, tokens),
        )
    return peak


def footprints(capacities: Sequence[int]) -> list[int]:
    """The maximum number of arena tokens for each of these blocks, packed in any order."""
    # Before a large block that follows a small one, up to a tile is lost to alignment.
    gap = ALIGNMENT - 1 if capacities and min(capacities) < ALIGNMENT <= max(capacities) else 0
    return [size + (-size % ALIGNMENT + gap if size >= ALIGNMENT else 0) for size in capacities]
