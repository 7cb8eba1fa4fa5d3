"""Flow graphs of agents against graphs that were drawn by hand."""

import re
import xml.etree.ElementTree

from jaxshare.serving.agents.compiler.flow_graph import FlowGraph
from jaxshare.serving.agents.compiler.instructions import Do
from jaxshare.serving.agents.compiler.program import Waiting, compiled
from tests.serving.agents import agent_suite
from tests.serving.agents.agent_oracle import ask

llm = tool = spawn = context_gather = simulate = find = ask
"""What the agents call; only their names matter."""


async def bug_repair(bug):
    """The agent of figure 6 of the paper."""
    gather = spawn(context_gather, bug)
    while True:
        code = await gather.next()
        patch = await llm(f"Repair {bug!r} in {code}; <{{}}> # --> end")
        if await tool(simulate, patch):
            break
        gather.resume(patch)
    return patch


async def context_gather_(bug):
    seen = []
    for query in await llm(bug):
        code = await tool(find, query)
        seen.append((yield code))
    yield seen


async def careful(question):
    try:
        answer = await llm(question)
        if not answer:
            return None
    except ValueError:
        answer = await question
    finally:
        note = await tool(len, question)
    return note, answer


async def joined(first, second):
    return_ = await first.result() if await ask(1) else [await second.result(), (yield)]
    first(return_)


async def plain(x):
    return x


async def endless():
    while True:
        await ask("again")


def graph(function):
    """(kind, line from the def, next states) of each state.

    0 is the start, -1 the end; negative errors are left out.
    """
    made = FlowGraph.of(compiled(function))
    end, first = len(made.nodes) - 1, function.__code__.co_firstlineno
    assert (
        [node.number for node in made.nodes] == list(range(end + 1))
        and made.nodes[0].kind == "start"
        and made.nodes[-1].kind == "end"
    )
    states = [
        (
            n.kind,
            n.line - first,
            sorted("end" if to == end else to for to in n.to)
            if end not in n.to
            else [*(to for to in n.to if to != end), "end"],
        )
        for n in made.nodes[:-1]
    ]
    return made, states, [{"end" if to == end else to for to in n.errors} for n in made.nodes[:-1]]


def test_bug_repair_has_the_shape_of_figure_6():
    made, states, errors = graph(bug_repair)
    assert states == [("start", 0, [1]), ("next", 4, [2]), ("llm", 5, [3]), ("tool", 6, [1, "end"])]
    assert not any(errors)
    assert [node.text for node in made.nodes[1:3]] == [
        "await gather.next()",
        "await llm(f'Repair {bug!r} in {code}; <{{}}> # --> end')",
    ]


def test_context_gather_yields_in_a_loop():
    _, states, errors = graph(context_gather_)
    # A yield inside an expression, and one that is a statement.
    assert states == [
        ("start", 0, [1]),
        ("llm", 2, [2, 4]),
        ("tool", 3, [3]),
        ("yield", 4, [2, 4]),
        ("yield", 5, ["end"]),
    ]
    assert not any(errors)


def test_exceptions_are_edges_of_their_own():
    _, states, errors = graph(careful)
    # The code after the start may raise before it waits, and a ValueError in 1 goes to 2; in any
    # case, 3 comes last.
    assert states == [
        ("start", 0, [1, 2, 3]),
        ("llm", 2, [2, 3]),
        ("await", 6, [3]),
        ("tool", 8, ["end"]),
    ]
    assert errors == [{2, 3}, {2}, set(), set()]


def test_waits_in_one_expression_are_states_in_its_order():
    _, states, _ = graph(joined)
    assert states == [
        ("start", 0, [2]),
        ("result", 1, ["end"]),
        ("await", 1, [1, 3]),
        ("result", 1, [4]),
        ("yield", 1, ["end"]),
    ]


def test_the_smallest():
    assert graph(plain)[1] == [("start", 0, ["end"])]
    assert graph(endless)[1] == [("start", 0, [1]), ("await", 2, [1])]


def test_every_run_of_the_suite_stays_on_the_edges():
    """Each step of a run is an edge, if no exception is thrown in."""
    steps = 0
    for function, args in agent_suite.SUITE:
        program = compiled(function)
        made = FlowGraph.of(program)
        frame, at, value = program.begin(([], *args), {}), 0, None
        while True:
            try:
                went = program.send(frame, value)
            except BaseException:
                break
            to = made.state[went.position] if isinstance(went, Waiting) else len(made.nodes) - 1
            assert to in made.nodes[at].to, (function.__name__, at, to)
            steps += 1
            if not isinstance(went, Waiting):
                break
            at, value = to, getattr(went.value, "value", None)
        assert set(made.state) <= {
            i for i, instruction in enumerate(program.instructions) if instruction.do is Do.WAIT
        }
    assert steps > 300


def test_it_can_be_printed():
    text = str(FlowGraph.of(compiled(bug_repair))).splitlines()
    assert text[0] == "bug_repair" and len(text) == 6
    line = bug_repair.__code__.co_firstlineno + 4
    assert re.fullmatch(rf"  1  next   {line}: await gather\.next\(\) +-> 2", text[2])
    assert text[4].endswith("-> 1, end") and text[5] == "  4  end"
    assert "-> 2!, 3" in str(FlowGraph.of(compiled(careful)))


def test_mermaid_is_escaped():
    made = FlowGraph.of(compiled(bug_repair)).mermaid().splitlines()
    assert made[0] == "stateDiagram-v2"
    edges = [line.strip() for line in made if "-->" in line]
    assert edges == ["[*] --> s1", "s1 --> s2", "s2 --> s3", "s3 --> s1", "s3 --> [*]"]
    for line in made[1 : -len(edges)]:
        assert re.fullmatch(r"    s\d+ : ([\w .,()'=+*/-]|#\d+;)+", line), line
    text = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), made[2])
    assert text.endswith("await llm(f'Repair {bug!r} in {code}; <{{}}> # --> end')")
    assert "s1 --> s2 : error" in FlowGraph.of(compiled(careful)).mermaid()


def test_notebooks_get_a_picture():
    for function in (bug_repair, careful, plain, endless):
        made = FlowGraph.of(compiled(function))
        bundle = made._repr_mimebundle_()
        assert bundle["text/plain"] == str(made) and bundle["text/vnd.mermaid"] == made.mermaid()
        picture = xml.etree.ElementTree.fromstring(bundle["image/svg+xml"])
        tags = [child.tag.rpartition("}")[2] for child in picture]
        assert tags.count("rect") == tags.count("text") == len(made.nodes)
        assert tags.count("path") == sum(len(node.to) for node in made.nodes)
