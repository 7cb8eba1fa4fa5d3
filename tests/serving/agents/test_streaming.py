"""Pieces of answers as they come: put together, they are the answers."""

import asyncio
import contextlib

import pytest

from jaxshare import Sampler
from jaxshare.serving.agents import (
    BestOfN,
    Message,
    ModelCall,
    Options,
    Reply,
    Runtime,
    agent,
    llm,
    spawn,
)
from jaxshare.serving.agents.backends import EngineModel, ScriptedModel
from jaxshare.serving.agents.streaming import AnswerPiece
from jaxshare.serving.chat import as_tools
from tests.serving.http.served import ScriptedEngine


def weather(city: str) -> str:
    """Tells the weather."""
    return f"{city}: rain"


class Slow:
    """A model that tells an answer in three pieces, between which others get their turn."""

    def __init__(self) -> None:
        self.is_cancelled = False

    async def answer(self, call: ModelCall) -> Reply:
        return Reply("never")

    async def stream(self, call: ModelCall, tell) -> Reply:
        name = call.messages[-1].content
        try:
            for piece in (f"{name}:", " a", " b"):
                tell(piece, False)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise
        return Reply(f"{name}: a b", 3)


@agent
async def one(name):
    return await llm(name)


@agent
async def two():
    children = [spawn(one, name) for name in ("x", "y")]
    return [await child for child in children]


def joined(pieces) -> dict:
    """The texts of all answers, by run, state and seed; each has one last piece, after the others."""
    texts: dict = {}
    ended = set()
    for piece in pieces:
        key = piece.run, piece.state, piece.agent, piece.seed
        assert key not in ended
        texts[key] = texts.get(key, "") + piece.text
        if piece.is_last:
            assert piece.text == ""
            ended.add(key)
    assert ended == {*texts}
    return texts


def test_pieces_of_agents_side_by_side_say_whose_they_are():
    pieces: list[AnswerPiece] = []
    runtime = Runtime(Slow(), on_token=pieces.append)
    run = asyncio.run(runtime.run(two))
    assert run.accepted.value == ["x: a b", "y: a b"]
    texts = joined(pieces)
    ids = [child.id for child in run.children]
    assert {key[:3]: text for key, text in texts.items()} == {
        (ids[0], (0, 0), "one"): "x: a b",
        (ids[1], (0, 0), "one"): "y: a b",
    }
    # Neither waits for the other one to end.
    assert {piece.run for piece in pieces[:2]} == {*ids}


def test_a_model_that_has_no_pieces_tells_the_whole():
    pieces: list[AnswerPiece] = []
    model = ScriptedModel({"x": ["<think>Hm.</think>first", "second"]})
    runtime = Runtime(model, on_token=pieces.append)
    searched = one.under(BestOfN(2, lambda state: len(state.value or "")))
    asyncio.run(runtime.run(searched, "x"))
    told = [(piece.text, piece.is_reasoning, piece.is_last, piece.state[0]) for piece in pieces]
    assert told[:3] == [("Hm.", True, False, 0), ("first", False, False, 0), ("", False, True, 0)]
    assert told[3:] == [("second", False, False, 1), ("", False, True, 1)]
    assert len({piece.seed for piece in pieces}) == 2


def test_several_answers_at_once_have_seeds_of_their_own():
    @agent
    async def several():
        return await llm("x", n=3)

    pieces: list[AnswerPiece] = []
    run = asyncio.run(Runtime(Slow(), on_token=pieces.append).run(several))
    assert run.accepted.value == ["x: a b"] * 3
    assert [*joined(pieces).values()] == ["x: a b"] * 3


def test_a_run_is_read_in_one_loop():
    async def whole():
        stream = Runtime(Slow()).stream(two)
        assert stream.run is None
        pieces = [piece async for piece in stream]
        assert stream.run is not None and stream.run.accepted is not None
        return pieces, stream.run.accepted.value

    pieces, value = asyncio.run(whole())
    assert value == ["x: a b", "y: a b"] == [*joined(pieces).values()]


def test_the_loop_raises_the_error_of_the_agent():
    @agent
    async def fails():
        await llm("x")
        raise LookupError("nothing there")

    async def whole(pieces):
        async for piece in Runtime(Slow()).stream(fails):
            pieces.append(piece)

    pieces: list = []
    with pytest.raises(LookupError, match="nothing there"):
        asyncio.run(whole(pieces))
    assert "".join(piece.text for piece in pieces) == "x: a b"


def test_a_loop_that_is_left_ends_the_run():
    async def whole():
        model = Slow()
        async with contextlib.aclosing(aiter(Runtime(model).stream(one, "x"))) as stream:
            piece = await anext(stream)
        return model.is_cancelled, piece.text

    assert asyncio.run(whole()) == (True, "x:")


# The engine's texts come a few tokens at a time.


def engine_pieces(template: str, text: str, tools=()) -> tuple[Reply, list[tuple[str, bool]]]:
    engine = ScriptedEngine(template, [text])
    model = EngineModel.__new__(EngineModel)
    model.__dict__.update(engine=engine, _sampler=Sampler(), _resample=None)
    call = ModelCall(
        (Message("user", "Rain?"),), Options(200), 1, "a", "a", (0,), as_tools(list(tools))
    )
    told: list[tuple[str, bool]] = []
    whole = asyncio.run(model.answer(call))
    engine.piece = 1
    reply = asyncio.run(model.stream(call, lambda *piece: told.append(piece)))
    assert reply == whole
    assert "".join(text for text, thinks in told if not thinks) == reply.text
    assert "".join(text for text, thinks in told if thinks) == (reply.reasoning or "")
    return reply, told


def test_pieces_of_the_engine_are_the_reply_s_texts():
    text = (
        "<think>It may rain.</think>\n\nI look it up. \n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    reply, told = engine_pieces("hermes", text, [weather])
    assert reply.reasoning == "It may rain." and reply.text == "I look it up."
    assert [one.arguments for one in reply.tool_calls] == [{"city": "Oslo"}]
    assert len([text for text, thinks in told if text and not thinks]) > 1
    assert len([text for text, thinks in told if text and thinks]) > 1


def test_pieces_have_what_was_no_call_after_all():
    text = 'So <tool_call>{"name": "wind", "arguments": {}}</tool_call> it is.'
    reply, _ = engine_pieces("hermes", text, [weather])
    assert reply.broken and "wind" in reply.text
