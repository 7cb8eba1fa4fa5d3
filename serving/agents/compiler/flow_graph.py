"""The flow graph of an agent: a state for each wait in its source, and the states that may follow.

Compare figure 6 of Hive.

    print(agent.graph)            # a line for each state
    print(agent.graph.mermaid())  # for a page that draws Mermaid

A notebook shows the graph as a picture.
"""

import ast
import dataclasses
import html
import textwrap
from collections.abc import Iterable, Mapping

from jaxshare.serving.agents.compiler.instructions import Do, Instruction, successors
from jaxshare.serving.agents.compiler.program import Program

_KINDS = {"llm": "llm", "tool": "tool", "next": "next", "result": "result"}


@dataclasses.dataclass(frozen=True)
class FlowNode:
    """One state of the flow graph.

    Attributes:
      number: 0 for the start, then in the order of the source, the end last.
      kind: start, end, or the kind of the wait: llm, tool, next, result, yield, or await for all
        others.
      line: line of the agent's file.
      text: source of the awaited expression.
      to: numbers of the states that can come next, in order.
      errors: those of them that only an exception leads to.
    """

    number: int
    kind: str
    line: int
    text: str
    to: tuple[int, ...] = ()
    errors: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        """A text that identifies the state within its graph."""
        return self.kind if self.kind in ("start", "end") else f"{self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class FlowGraph:
    """The states of an agent and the edges between them.

    An exception that leaves the agent is neither the end nor an edge.

    Attributes:
      name: the agent's name.
      nodes: the states, by number.
      state: the number of the state of each WAIT instruction. A wait in a finally clause is one
        state, though the program has an instruction for each way there.
    """

    name: str
    nodes: tuple[FlowNode, ...]
    state: Mapping[int, int]

    @classmethod
    def of(cls, program: Program) -> "FlowGraph":
        """The graph of a compiled agent, without unreachable code."""
        instructions = program.instructions
        reached = _reached(instructions, [0], errors=True, through=True)
        waits = sorted(
            (i for i in reached if instructions[i].do is Do.WAIT),
            key=lambda i: (_source_position(instructions[i]), i),
        )
        positions = sorted({_source_position(instructions[i]) for i in waits})
        state = {i: positions.index(_source_position(instructions[i])) + 1 for i in waits}
        end = len(positions) + 1

        def states_after(start: Iterable[int], errors: bool) -> set[int]:
            found = _reached(instructions, start, errors)
            return {state.get(i, end) for i in found if instructions[i].do in (Do.WAIT, Do.RETURN)}

        def node(number: int, kind: str, line: int, text: str, indices: list[int]) -> FlowNode:
            plain = states_after([j for i in indices for j in successors(instructions, i)], False)
            handlers = [
                h
                for i in indices
                if instructions[i].do is Do.WAIT and (h := instructions[i].handler) is not None
            ]
            every = plain | states_after(
                [*handlers, *(j for i in indices for j in successors(instructions, i))], True
            )
            return FlowNode(
                number, kind, line, text, tuple(sorted(every)), frozenset(every - plain)
            )

        nodes = [node(0, "start", program.function.__code__.co_firstlineno, program.name, [0])]
        for number, position in enumerate(positions, 1):
            indices = [i for i in waits if _source_position(instructions[i]) == position]
            text = instructions[indices[0]].what
            text = text[1:-1] if instructions[indices[0]].is_yield and text[:1] == "(" else text
            nodes.append(node(number, _kind(instructions[indices[0]]), position[0], text, indices))
        return cls(program.name, (*nodes, FlowNode(end, "end", instructions[-1].line, "")), state)

    def __str__(self) -> str:
        """One line for each state: number, kind, line and text, and the next states.

        ! marks states that only an exception leads to.
        """
        end = len(self.nodes) - 1
        rows = []
        for node in self.nodes:
            to = ", ".join(
                ("end" if i == end else str(i)) + "!" * (i in node.errors) for i in node.to
            )
            label = textwrap.shorten(node.label, 60, placeholder="...")
            shown = label if node.number not in (0, end) else ""
            rows.append(
                f"{node.number:>3}  {node.kind:<6} {shown:<60} {'-> ' + to if to else ''}".rstrip()
            )
        return "\n".join([self.name, *rows])

    def mermaid(self) -> str:
        """The graph as a Mermaid state diagram."""

        def name(number: int) -> str:
            return "[*]" if number in (0, len(self.nodes) - 1) else f"s{number}"

        lines = [f"    s{node.number} : {_escaped(node.label)}" for node in self.nodes[1:-1]]
        lines += [
            f"    {name(node.number)} --> {name(to)}{' : error' if to in node.errors else ''}"
            for node in self.nodes
            for to in node.to
        ]
        return "\n".join(["stateDiagram-v2", *lines]) + "\n"

    def svg(self) -> str:
        """A picture of the states in source order; forward edges are right, backward edges left."""
        labels = [textwrap.shorten(node.label, 72, placeholder="...") for node in self.nodes]
        width = 16 + 7 * max(map(len, labels))
        left = 20 + 9 * max(
            [abs(to - node.number) for node in self.nodes for to in node.to if to <= node.number],
            default=0,
        )
        right = 20 + 9 * max([to - node.number for node in self.nodes for to in node.to], default=0)
        made = []
        for node, label in zip(self.nodes, labels, strict=True):
            y = 10 + 44 * node.number
            made.append(
                f'<rect x="{left}" y="{y}" width="{width}" height="26" rx="6" '
                f'fill="{_COLOURS[node.kind]}" stroke="#555"/>'
            )
            made.append(f'<text x="{left + 8}" y="{y + 17}">{html.escape(label)}</text>')
            for to in node.to:
                far, target, dash = (
                    9 * abs(to - node.number),
                    10 + 44 * to,
                    ' stroke-dasharray="4 3"' * (to in node.errors),
                )
                if to == node.number + 1:
                    path = f"M {left + width / 2} {y + 26} V {target - 2}"
                elif to > node.number:
                    side, bend = left + width, left + width + 10 + far
                    path = (
                        f"M {side} {y + 18} "
                        f"C {bend} {y + 18} {bend} {target + 8} {side + 2} {target + 8}"
                    )
                else:
                    bend = left - 10 - far
                    path = (
                        f"M {left} {y + 8} "
                        f"C {bend} {y + 8} {bend} {target + 18} {left - 2} {target + 18}"
                    )
                made.append(
                    f'<path d="{path}" fill="none" stroke="#555" marker-end="url(#tip)"{dash}/>'
                )
        head = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" '
            'fill="#555"/></marker></defs>'
        )
        size = f'width="{left + width + right}" height="{10 + 44 * len(self.nodes)}"'
        font = 'font-family="monospace" font-size="11"'
        start = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
        return f"{start}{head}{''.join(made)}</svg>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {
            "text/plain": str(self),
            "text/vnd.mermaid": self.mermaid(),
            "image/svg+xml": self.svg(),
        }


_COLOURS = {
    "start": "#eee",
    "end": "#eee",
    "llm": "#dcebfa",
    "tool": "#fdebd0",
    "next": "#e3f4e1",
    "result": "#e3f4e1",
    "yield": "#f3e3f5",
    "await": "#fff",
}


def _source_position(instruction: Instruction) -> tuple[int, int]:
    return instruction.line, instruction.column


def _reached(
    instructions: tuple[Instruction, ...], start: Iterable[int], errors: bool, through: bool = False
) -> set[int]:
    """The instructions reachable from these, up to the next wait or, with `through`, beyond it.

    With `errors`, exceptions lead to handlers too.
    """
    found: set[int] = set()
    todo = list(start)
    while todo:
        number = todo.pop()
        if number in found:
            continue
        found.add(number)
        instruction = instructions[number]
        if instruction.do is not Do.WAIT or through:
            todo += successors(instructions, number)
        if (
            errors
            and instruction.handler is not None
            and instruction.do in (Do.RUN, Do.TEST, Do.WAIT, Do.RETURN, Do.RAISE)
        ):
            todo.append(instruction.handler)
    return found


def _kind(instruction: Instruction) -> str:
    """The kind of a wait, by the name of the called function."""
    if instruction.is_yield:
        return "yield"
    waited = ast.parse(instruction.what, mode="eval").body
    called = (
        waited.value.func
        if isinstance(waited, ast.Await) and isinstance(waited.value, ast.Call)
        else None
    )
    name = (
        called.attr
        if isinstance(called, ast.Attribute)
        else called.id
        if isinstance(called, ast.Name)
        else ""
    )
    return _KINDS.get(name, "await")


def _escaped(text: str) -> str:
    """The text with characters that Mermaid might interpret as numeric entities."""
    return "".join(c if c.isalnum() or c in " _.,()'=+*/-" else f"#{ord(c)};" for c in text)
