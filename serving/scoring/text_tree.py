"""The tree of texts to score, and the positions whose distributions are needed.

Every common prefix is a node, which is fed once. The texts that part at a node's end all take their
next token's log-probability from one distribution.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from jaxshare.serving.branches.prompt_tree import Prompt
from jaxshare.serving.branches.sharing_plan import build_prefix_tree


@dataclasses.dataclass(frozen=True, eq=False)
class TokenText:
    """A text of which some last tokens are scored.

    Attributes:
      name: for errors, such as "candidate 3".
      tokens: int32[T], one at least.
      start: index of the first token to score. The first token of all has nothing before it, and
        no log-probability.
    """

    name: str
    tokens: np.ndarray
    start: int

    @property
    def num_scored(self) -> int:
        """The number of its tokens that have a log-probability."""
        return len(self.tokens) - max(1, self.start)


@dataclasses.dataclass(eq=False)
class FedNode:
    """A node of the tree: tokens that are fed once for all texts below it.

    Attributes:
      tokens: int32[T].
      parent: index of the node before it in depth-first order, -1 for none.
      position: of its first token in the texts.
      text: index of a text below it.
      wanted: by index of a token of the node, the tokens that are scored after it, each with the
        indices of the texts that have it there.
    """

    tokens: np.ndarray
    parent: int
    position: int
    text: int
    wanted: dict[int, dict[int, list[int]]] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.position + len(self.tokens)


def feeding_order(texts: Sequence[TokenText]) -> list[FedNode]:
    """The nodes of the tree of these texts in depth-first order, parents before children.

    Last tokens are not fed: nothing is asked after them.
    """
    prompts = [Prompt(i, tuple(text.tokens[:-1].tolist()), 1) for i, text in enumerate(texts)]
    nodes: list[FedNode] = []
    path: list[int] = []
    stack = [(build_prefix_tree(prompts), 0)]
    while stack:
        visited, depth = stack.pop()
        del path[depth:]
        if visited.tokens:
            parent = path[-1] if path else -1
            position = nodes[parent].end if path else 0
            path.append(len(nodes))
            tokens = np.asarray(visited.tokens, np.int32)
            nodes.append(FedNode(tokens, parent, position, visited.first))
        for prompt in visited.ends:
            _want(prompt.number, texts[prompt.number], [nodes[i] for i in path])
        stack += [(child, len(path)) for child in reversed(visited.children)]
    return nodes


def _want(number: int, text: TokenText, path: Sequence[FedNode]) -> None:
    """Notes at the nodes of a text's path which of its tokens are scored after which."""
    for node in reversed(path):
        first = max(text.start, node.position + 1)
        for index in range(first, min(node.end + 1, len(text.tokens))):
            wanted = node.wanted.setdefault(index - 1 - node.position, {})
            wanted.setdefault(int(text.tokens[index]), []).append(number)
        if node.position < text.start:
            break


def batches(texts: Sequence[TokenText], tokens: int, least: int = 1) -> list[list[int]]:
    """Cuts texts into batches, in an order in which those with a common prefix are neighbours.

    Args:
      texts: in any order.
      tokens: of a batch, about.
      least: batches, where there are so many texts.

    Returns:
      The indices of each batch.
    """
    order = sorted(range(len(texts)), key=lambda i: texts[i].tokens.tobytes())
    total = sum(len(text.tokens) for text in texts)
    size = min(tokens, -(-total // least))
    ends = itertools.accumulate(len(texts[i].tokens) for i in order)
    groups = itertools.groupby(
        zip(order, ends, strict=True), key=lambda pair: (pair[1] - 1) // size
    )
    return [[index for index, _ in group] for _, group in groups]
