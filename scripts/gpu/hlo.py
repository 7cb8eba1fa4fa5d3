"""Reads the text of a program that XLA has compiled."""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

_RESULT = re.compile(r"^\s*(?:ROOT )?%\S+ = (.*?) ([a-z][a-z0-9-]*)\(")


_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]")


_TYPED = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


# Names for memory that is there already.
_IN_PLACE = frozenset(
    {
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
        "dynamic-update-slice",
        "scatter",
    }
)


# What the GPU does nothing for.
_FREE = frozenset(
    {
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "constant",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
        "after-all",
    }
)


# What devices do together.
_COLLECTIVES = frozenset(
    {
        "all-reduce",
        "all-gather",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
        "reduce-scatter",
    }
)


_OF_OURS = re.compile(r'custom_call_target="(?:mosaic_gpu_v2|__gpu\$xla\.gpu\.triton)"')


def computations(text: str) -> dict[str, list[str]]:
    """The instructions of each computation of an HLO text, by its name; the entry's is "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%(\S+) .*\{$", line):
            lines = found.setdefault("ENTRY" if head[1] else head[2], [])
        elif _RESULT.match(line):
            lines.append(line)
    return found


def executed(found: Mapping[str, Sequence[str]], name: str = "ENTRY") -> Iterator[str]:
    """The instructions that computation `name` runs, those of its loops and branches once each;
    bodies of fusions and reductions are no instructions of their own."""
    for line in found[name]:
        yield line
        if opcode(line) in ("while", "conditional", "call"):
            for called in re.findall(
                r"(?:body|condition|to_apply|true_computation|false_computation)=%([^\s,}]+)", line
            ):
                yield from executed(found, called)
            if branches := re.search(r"branch_computations=\{([^}]*)\}", line):
                for called in re.findall(r"%([^\s,]+)", branches[1]):
                    yield from executed(found, called)


def opcode(line: str) -> str:
    """The opcode of an instruction."""
    match = _RESULT.match(line)
    assert match, line
    return match[2]


def large_results(text: str, elements: int) -> Counter[str]:
    """Instructions that write an array of `elements` or more to new memory, by what they do; a
    fusion counts as what its results are.

    Updates of a part of an array, which XLA makes in place, and kernels whose result is an
    argument's memory do not count.
    """
    found, kinds = computations(text), Counter()
    for line in executed(found):
        done = opcode(line)
        in_place = done in _IN_PLACE or done.endswith("-done")
        if (
            in_place
            or largest(line) < elements
            or (done == "custom-call" and "output_to_operand_aliasing" in line)
        ):
            continue
        if done == "fusion" and (called := re.search(r"calls=%([^\s,}]+)", line)):
            kinds.update(
                kind for kind in _written_by(found[called[1]], elements) if kind not in _IN_PLACE
            )
        else:
            kinds[done.removesuffix("-start")] += 1
    return kinds


def _written_by(body: Sequence[str], elements: int) -> Iterator[str]:
    """The kinds of a fusion's large results."""
    lines = {
        match[1]: line for line in body if (match := re.match(r"\s*(?:ROOT )?(%\S+) = ", line))
    }

    def source(line: str) -> str:
        done = opcode(line)
        operand = re.search(r"\((%[^\s,)]+)", line[_RESULT.match(line).end() - 1 :])
        if (
            done not in ("bitcast", "dynamic-update-slice", "scatter")
            or not operand
            or operand[1] not in lines
        ):
            return done
        # An update is in place only of what came in: of anything else, all of it is written.
        found = source(lines[operand[1]])
        return done if found == "parameter" else found

    root = next(line for line in body if line.lstrip().startswith("ROOT"))
    parts = (
        [
            lines[name]
            for name in re.findall(r"%[^\s,()]+", root[_RESULT.match(root).end() :])
            if name in lines
        ]
        if opcode(root) == "tuple"
        else [root]
    )
    yield from (source(part) for part in parts if largest(part) >= elements)


def largest(line: str) -> int:
    """Elements of the largest array of an instruction's result."""
    match = _RESULT.match(line)
    assert match, line
    return max(
        (math.prod(int(n) for n in dims.split(",") if n) for dims in _ARRAY.findall(match[1])),
        default=0,
    )


def launches(lines: Iterator[str] | Sequence[str]) -> list[str]:
    """Those of the instructions that the GPU has to be told to do: kernels, copies, calls of
    libraries, collectives."""
    return [
        line for line in lines if opcode(line) not in _FREE and not opcode(line).endswith("-done")
    ]


def operand_bytes(text: str) -> Callable[[str], list[tuple[str, int]]]:
    """Returns a function of an instruction of this text that gives the dtype and the bytes of each
    array that it is given, in their order."""
    results = {
        match[1]: match[2]
        for line in text.splitlines()
        if (match := re.match(r"\s*(?:ROOT )?(%\S+) = (.*?) [a-z][a-z0-9-]*\(", line))
    }

    def found(line: str) -> list[tuple[str, int]]:
        match = _RESULT.match(line)
        assert match, line
        given = line[match.end() :].partition(")")[0]
        return [
            (dtype, math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8)
            for name in re.findall(r"%[^\s,()]+", given)
            for dtype, bits, dims in _TYPED.findall(results.get(name, ""))
        ]

    return found


def kernel_calls(lines: Iterator[str] | Sequence[str]) -> list[str]:
    """Those of the instructions that call a kernel of a backend's own."""
    return [line for line in lines if _OF_OURS.search(line)]


@dataclasses.dataclass(frozen=True)
class Collective:
    """An instruction that the devices carry out together.

    Attributes:
      kind: "all-reduce", "all-gather" and so on.
      axes: of the mesh, over which, with commas between; empty where the HLO does not name them.
      elements: of the largest array that one device has of it.
      bytes: of its results on each device.
      line: the instruction.
    """

    kind: str
    axes: str
    elements: int
    bytes: int
    line: str

    def __str__(self) -> str:
        return f"{self.kind} over {self.axes or 'devices that have no name'}"


def collectives(lines: Iterator[str] | Sequence[str]) -> list[Collective]:
    """The collectives among instructions, each once, whether they are waited for at once or
    later."""
    found = []
    for line in lines:
        kind = opcode(line).removesuffix("-start")
        if kind in _COLLECTIVES:
            found.append(Collective(kind, _axes(line), largest(line), _result_bytes(line), line))
    return found


def _axes(line: str) -> str:
    """The axes of the mesh that a collective is over, without those of one device."""
    named = re.search(r"replica_groups=mesh\[([^]]*)\] \{([^}]*)\}", line)
    if named is None:
        return ""
    alone = set(re.findall(r"'(\w+)'=1\b", named[1]))
    return ",".join(axis for axis in re.findall(r"'(\w+)'", named[2]) if axis not in alone)


def _result_bytes(line: str) -> int:
    """Bytes of a collective's results; one that is waited for later has its operands before."""
    match = _RESULT.match(line)
    assert match, line
    found = [
        math.prod(int(n) for n in dims.split(",") if n) * int(bits or 8) // 8
        for _, bits, dims in _TYPED.findall(match[1])
    ]
    return sum(found[len(found) // 2 :] if match[2].endswith("-start") else found)
