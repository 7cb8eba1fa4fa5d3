"""A planner gives parts of a question to workers, and a summary agent keeps its dialogue short.

    jaxshare agents run examples/research.py
    jaxshare agents run examples/research.py --model Qwen/Qwen3-8B -- How do tides work?

Hive (sections 3.2 and 8.3) has such a summary agent: what a search has found is long, and the
agent that goes on with it needs a few words. Here the planner works in a dialogue of its own, from
which it forks one for each worker, so that all of them begin with what is in the engine's cache.
"""

from jaxshare.serving.agents import Dialogue, agent, gather, llm, spawn, tool
from jaxshare.serving.agents.backends import ScriptedModel

FACTS = {
    "moon": "The moon pulls the water on its side more than the earth. " * 3,
    "sun": "The sun pulls too, less than half as much. " * 3,
}
PARTS = 2


def look_up(topic: str) -> str:
    """What is known about a topic."""
    return " ".join(fact for name, fact in FACTS.items() if name in topic.lower()) or "nothing"


@agent
async def worker(dialogue, part):
    """Answers one part of the question, in a copy of the planner's dialogue."""
    found = await tool(look_up, part)
    return await llm(f"Your part: {part}\nFound: {found}\nReport.", dialogue=dialogue)


@agent
async def summary(part):
    """Shortens messages of another agent."""
    said = "\n".join(f"{one.role}: {one.content}" for one in part)
    return await llm(f"Shorten this:\n{said}", max_new_tokens=100)


@agent
async def research(question):
    """Returns (the answer, the number of messages that it was made from)."""
    talk = Dialogue({"role": "system", "content": "You answer questions, part by part."})
    plan = await llm(f"{question}\nName {PARTS} parts, one a line.", dialogue=talk)
    parts = [line for line in plan.splitlines() if line.strip()][:PARTS]
    reports = await gather(*[spawn(worker, talk, part) for part in parts])
    for part, report in zip(parts, reports, strict=True):
        talk.append([{"role": "user", "content": part}, {"role": "assistant", "content": report}])
    await talk.summarise(by=summary)
    drafts = await llm("Answer the question.", dialogue=talk, n=2)
    talk.choose(min(drafts, key=len))
    return await llm("Say it for a child.", dialogue=talk), len(talk)


# What `jaxshare agents run` looks for.

AGENT, MODEL = research, "scripted"


def arguments(args: list[str]):
    return [" ".join(args) or "How do tides work?"]


def shown(value: tuple[str, int]) -> str:
    return f"{value[0]}\n({value[1]} messages)"


def scripted() -> ScriptedModel:
    parts = ["The moon's part", "The sun's part"]
    reports = {f"Your part: {part}": f"{part.split()[1]} pulls." for part in parts}
    shortened = "Asked how tides work; moon and sun pull the water."
    return ScriptedModel(
        {
            "Shorten this": shortened,
            "Name 2 parts": "\n".join(parts),
            **reports,
            "Answer the question.": ["Moon and sun pull the water up.", "The moon, and the sun."],
            "Say it for a child.": "The moon pulls at the sea.",
        }
    )
