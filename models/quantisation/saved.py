"""Quantised parameters in trees of plain arrays, as Orbax saves them: in place of the parameter is
{format: {"codes": ..., "scales": ...}}, which says all that is needed to read it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxshare.quantised import FORMATS, QuantisedTensor, is_quantised

_ARRAYS = ("codes", "scales", "zeros", "offsets", "order")
_REQUIRED = _ARRAYS[:2]


def as_saved(value: Any) -> Any:
    """Returns a parameter as a tree of plain arrays."""
    if not isinstance(value, QuantisedTensor):
        return value
    arrays = {name: getattr(value, name) for name in _ARRAYS}
    return {value.format: {name: each for name, each in arrays.items() if each is not None}}


def from_saved(tree: Mapping[str, Any], dtype: np.dtype) -> QuantisedTensor:
    """Returns the quantised parameter that `as_saved` made a tree of, in a model of this dtype."""
    ((format, arrays),) = tree.items()
    return QuantisedTensor(**arrays, format=format, dtype=dtype)


def parameters_of(leaves: Mapping[tuple[str, ...], Any]) -> tuple[dict[Any, Any], list[str]]:
    """Finds the parameters in a saved tree.

    Args:
      leaves: the arrays of the tree by their paths, or anything with a shape and a dtype.

    Returns:
      The parameters by their paths, and what is wrong with quantised ones.
    """
    found: dict[tuple[str, ...], Any] = {}
    quantised: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    problems = []
    for path, leaf in leaves.items():
        if len(path) > 2 and path[-2] in FORMATS and path[-1] in _ARRAYS:
            quantised.setdefault(path[:-2], {}).setdefault(path[-2], {})[path[-1]] = leaf
        else:
            found[path] = leaf
    for path, tree in quantised.items():
        name = "/".join(path)
        missing = [each for each in _REQUIRED if each not in next(iter(tree.values()))]
        if len(tree) > 1:
            problems.append(f"{name} is there in several formats: {', '.join(sorted(tree))}")
        elif missing:
            problems.append(f"{name} lacks {' and '.join(missing)}")
        else:
            found[path] = from_saved(tree, np.dtype(np.float32))
            try:
                found[path].check_shapes(name)
            except ValueError as error:
                problems.append(str(error))
    return found, problems


def restored(
    tree: Any, parameters: Mapping[tuple[str, ...], Any], dtype: np.dtype
) -> dict[tuple[str, ...], Any]:
    """Returns the parameters of a saved tree by their paths.

    Args:
      tree: of arrays.
      parameters: from `parameters_of`.
      dtype: of the model.
    """
    values = {}
    for path, parameter in parameters.items():
        node = tree
        for key in path:
            node = node[key]
        values[path] = from_saved(node, dtype) if is_quantised(parameter) else node
    return values
