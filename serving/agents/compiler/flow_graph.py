"""The flow graph of an agent (Hive, figure 6): one state for each place where it waits, and where
it can go from there.

    print(agent.graph)            # a line for each state
    print(agent.graph.mermaid())  # for a page that draws Mermaid

In a notebook the graph is a picture.
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
    """A state.

    Attributes:
      number: 0 for the start, then as the places stand in the source, the end last.
      kind: start or end, or what is waited for: llm, tool, next, result, yield, or await for all
        else.
      line: of the agent's file.
      text: what is waited for, in the agent's words.
      to: states that can come next, in order; `errors` those of them that only an exception leads
        to.
    """

    number: int
    kind: str
    line: int
    text: str
    to: tuple[int, ...] = ()
    errors: frozenset[int] = frozenset()

    @property
    def label(self) -> str:
        """What tells it apart from the others."""
        return self.kind if self.kind in ("start", "end") else f"{self.line}: {self.text}"


@dataclasses.dataclass(frozen=True)
class FlowGraph:
    """An agent's states and what may follow what. An exception that leaves the agent is no end, and
    no edge.

    Attributes:
      name: the agent's.
      nodes: by their numbers.
      state: the number of the state in which each waiting instruction of the program is. What a
        finally clause waits for is one state, though the program has it once for each way there.
    """

    name: str
    nodes: tuple[FlowNode, ...]
    state: Mapping[int, int]

    @classmethod
    def of(cls, program: Program) -> "FlowGraph":
        """The graph of a compiled agent; code that cannot be reached is not in it."""
        instructions = program.instructions
        reached = _reached(instructions, [0], errors=True, through=True)
        waits = sorted(
            (i for i in reached if instructions[i].do is Do.WAIT),
            key=lambda i: (_place(instructions[i]), i),
        )
        places = sorted({_place(instructions[i]) for i in waits})
        state = {i: places.index(_place(instructions[i])) + 1 for i in waits}
        end = len(places) + 1

        def leads(begin: Iterable[int], errors: bool) -> set[int]:
            found = _reached(instructions, begin, errors)
            return {state.get(i, end) for i in found if instructions[i].do in (Do.WAIT, Do.RETURN)}

        def node(number: int, kind: str, line: int, text: str, at: list[int]) -> FlowNode:
            plain = leads([j for i in at for j in successors(instructions, i)], False)
            handlers = [
                h
                for i in at
                if instructions[i].do is Do.WAIT and (h := instructions[i].handler) is not None
            ]
            every = plain | leads(
                [*handlers, *(j for i in at for j in successors(instructions, i))], True
            )
            return FlowNode(
                number, kind, line, text, tuple(sorted(every)), frozenset(every - plain)
            )

        nodes = [node(0, "start", program.function.__code__.co_firstlineno, program.name, [0])]
        for number, place in enumerate(places, 1):
            at = [i for i in waits if _place(instructions[i]) == place]
            text = instructions[at[0]].what
            text = text[1:-1] if instructions[at[0]].is_yield and text[:1] == "(" else text
            nodes.append(node(number, _kind(instructions[at[0]]), place[0], text, at))
        return cls(program.name, (*nodes, FlowNode(end, "end", instructions[-1].line, "")), state)

    def __str__(self) -> str:
        """One line a state: its number, its kind, its line and text, and where it can go; ! marks
        where only an exception leads."""
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
        """The graph as a state diagram of Mermaid."""

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
        """A picture: the states in the order of the source, ways forward at their right, ways back
        at their left."""
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
                    way = f"M {left + width / 2} {y + 26} V {target - 2}"
                elif to > node.number:
                    side, bend = left + width, left + width + 10 + far
                    way = f"M {side} {y + 18} C {bend} {y + 18} {bend} {target + 8} {side + 2} {target + 8}"
                else:
                    bend = left - 10 - far
                    way = f"M {left} {y + 8} C {bend} {y + 8} {bend} {target + 18} {left - 2} {target + 18}"
                made.append(
                    f'<path d="{way}" fill="none" stroke="#555" marker-end="url(#tip)"{dash}/>'
                )
        head = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" '
            'fill="#555"/></marker></defs>'
        )
        size = f'width="{left + width + right}" height="{10 + 44 * len(self.nodes)}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="11">{head}{"".join(made)}</svg>'

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


def _place(instruction: Instruction) -> tuple[int, int]:
    return instruction.line, instruction.column


def _reached(
    instructions: tuple[Instruction, ...], begin: Iterable[int], errors: bool, through: bool = False
) -> set[int]:
    """The instructions that can be run from these on, up to the next wait or through all; with
    errors, also because one raises."""
    found: set[int] = set()
    todo = list(begin)
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
    """What a wait is for, by what is called."""
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
    """Text that Mermaid shows as it is: what it might take for its own is written as an entity, by
    number."""
    return "".join(c if c.isalnum() or c in " _.,()'=+*/-" else f"#{ord(c)};" for c in text)
