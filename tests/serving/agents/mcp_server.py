"""A small MCP server, run as a program by the tests of `MCPServer`."""

import os
import sys
import time
from typing import Literal

from mcp.server.mcpserver import MCPServer

server = MCPServer("tests")
calls = 0


@server.tool()
def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count() -> int:
    """Counts its calls."""
    global calls
    calls += 1
    return calls


@server.tool(name="say/it")
def say(word: Literal["yes", "no"], times: int = 1) -> str:
    """Says a word."""
    return word * times


@server.tool()
def fail(reason: str) -> str:
    """Fails."""
    raise ValueError(reason)


@server.tool()
def die(code: int = 3) -> str:
    """Ends the server."""
    print("first words", "out of luck", sep="\n", file=sys.stderr, flush=True)
    os._exit(code)


@server.tool()
def sleep(seconds: float) -> str:
    """Sleeps."""
    time.sleep(seconds)
    return "awake"


@server.tool()
def where() -> str:
    """Tells the process and the variable MARK."""
    return f"{os.getpid()} {os.environ.get('MARK')} {os.getcwd()}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--http"]:
        server.run("streamable-http", port=int(os.environ["PORT"]))
    else:
        server.run()
