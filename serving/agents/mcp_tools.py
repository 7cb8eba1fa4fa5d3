"""Tools of MCP servers, as functions that agents and chats call."""

import asyncio
import os
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Self

from jaxshare.argument_checks import as_float, as_integer, as_texts, shown
from jaxshare.extras import MissingExtraError
from jaxshare.serving.agents.errors import AgentError
from jaxshare.serving.agents.loop_thread import LoopThread
from jaxshare.serving.chat import FunctionTool

_LAST_BYTES, _LAST_LINES = 4096, 5
"""The end of what a server has written to stderr that errors show."""

_END_SECONDS = 8.0
"""Seconds for a server to end; the package ends its process by force before."""


class MCPServerError(AgentError):
    """An MCP server does not start, cannot be reached, or has ended."""


class MCPToolError(AgentError):
    """A tool of an MCP server has failed, or refuses its arguments; the server runs on."""


class MCPServer:
    """An MCP server and its tools, for `llm(tools=)`, `tool`, `react` and chats.

        with MCPServer(command=["uvx", "mcp-server-time"]) as server:
            print(run(solve, "Which day is it?", server.tools(), model=model))

    Without a `with` block, as in a file for `jaxshare agents run`, the first use starts the server,
    and the end of the program ends it. The connection is kept in a thread of its own, so that any
    event loop may call the tools: that of `run`, of `Runtime.run` or a notebook's. Takes the
    package `mcp`: pip install 'jaxshare[mcp]'.
    """

    def __init__(
        self,
        command: Sequence[str] | None = None,
        *,
        url: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        restarts: int = 0,
    ):
        """Makes a server; nothing is started yet.

        Args:
          command: a program and its arguments, which speaks MCP by stdin and stdout.
          url: of a server that runs already, by streamable HTTP, instead of a command.
          env: variables of the program, beside the few that it has of this one's.
          cwd: its working directory.
          timeout: seconds for the start, and for one call of a tool.
          restarts: times that a server that has ended is started again, each with the first call
            after the one that found it ended. No call is repeated: it may have had an effect.

        Raises:
          ValueError, TypeError: neither a command nor a url, or both, or numbers out of range.
          ImportError: mcp is not installed.
        """
        _package()
        if (command is None) == (url is None):
            raise ValueError("give either a command or a url of an MCP server")
        self._command, self._url = as_texts("command", command), url
        if url is None and (isinstance(command, str) or not self._command):
            raise ValueError(
                f"command is {shown(command)}; give a list of the program and its arguments"
            )
        if url is not None and not re.match(r"https?://[^@]+$", url):
            raise ValueError(
                f"url is {shown(url)}; it must be an address such as http://localhost:8000/mcp"
            )
        self._env, self._cwd = dict(env or {}), cwd
        self._timeout = as_float("timeout", timeout)
        if self._timeout <= 0:
            raise ValueError(f"timeout is {shown(timeout)}; it must be above 0")
        self._restarts = as_integer("restarts", restarts, 0)
        self._thread = LoopThread("jaxshare-mcp")
        self._lock = asyncio.Lock()  # of the thread's loop
        self._session: _Session | None = None
        self._tools: tuple[FunctionTool, ...] = ()
        self._is_closed = False

    @property
    def name(self) -> str:
        """The command or the address, for errors."""
        return self._url or shlex.join(self._command)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MCPServer":
        return self

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        self._is_closed = False
        await self._thread.call(self._connected())
        return self

    async def __aexit__(self, *raised: object) -> None:
        await asyncio.to_thread(self.close)

    def start(self) -> None:
        """Starts the server, unless it runs.

        Raises:
          MCPServerError: it does not start, cannot be reached, or has ended before.
        """
        self._is_closed = False
        self._thread.begin(self._connected()).result()

    def close(self) -> None:
        """Ends the server; until it is started again, calls of its tools are errors."""
        self._is_closed = True
        if self._session is not None:
            self._thread.begin(self._ended()).result()
        self._thread.close()
        self._lock = asyncio.Lock()

    def tools(self) -> tuple[FunctionTool, ...]:
        """Returns the server's tools, and starts it where it does not run.

        What a tool's name may not have here becomes `_`. The result of a tool is the text that the
        server gives, and of parts that are no text a note.

        Raises:
          MCPServerError: it does not start, cannot be reached, or has ended before.
        """
        self.start()
        return self._tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls a tool in the thread's loop."""
        mcp = _package()
        session = await self._connected()
        try:
            async with asyncio.timeout(self._timeout):
                result = await session.client.call_tool(name, arguments)
        except TimeoutError:
            raise TimeoutError(
                f"the tool {name} of the MCP server {self.name} has not ended within "
                f"{self._timeout:g} seconds; see to it, or give the server a longer timeout"
            ) from None
        except mcp.MCPError as error:
            if self._is_end(error):
                raise await self._death(session, f"when its tool {name} was called") from error
            raise MCPToolError(f"the MCP server {self.name}: {error}") from error
        except Exception as error:  # of the connection, or what is no result
            if not session.serving.done():
                raise MCPToolError(
                    f"the MCP server {self.name} gives no result: {error}"
                ) from error
            raise await self._death(session, f"when its tool {name} was called") from error
        text = "\n".join(map(_text_of, result.content))
        if result.is_error:
            raise MCPToolError(text or "it has failed and says no more")
        return text

    def _is_end(self, error: Any) -> bool:
        """Returns whether an error says that the connection has ended."""
        closed = error.code == _types().CONNECTION_CLOSED
        return closed and (self._url is not None or error.message == "Connection closed")

    async def _connected(self) -> "_Session":
        """Starts a session where there is none, in the thread's loop."""
        async with self._lock:
            if self._is_closed:
                raise MCPServerError(
                    f"the MCP server {self.name} is closed; call its tools before the end of its "
                    "`with` block, or start it again"
                )
            if self._session is None:
                self._session = await self._begun()
            elif self._session.death is not None:
                if self._session.restarts >= self._restarts:
                    raise MCPServerError(self._session.death)
                restarts = self._session.restarts + 1
                try:
                    session = await self._begun()
                except MCPServerError:
                    self._session.restarts = restarts
                    raise
                session.restarts, self._session = restarts, session
            return self._session

    async def _begun(self) -> "_Session":
        session = _Session(self._url or self._parameters())
        try:
            async with asyncio.timeout(self._timeout):
                await session.ready
            self._tools = tuple(map(self._tool, session.tools))
        except TimeoutError:
            await session.end()
            raise MCPServerError(
                f"the MCP server {self.name} has not answered within {self._timeout:g} seconds of "
                f"its start; give the command of a server, or a longer timeout{session.words}"
            ) from None
        except Exception as error:
            await session.end()
            raise MCPServerError(
                f"the MCP server {self.name} {'cannot be reached' if self._url else 'does not start'} "
                f"({type(error).__name__}: {_one_line(error)}); give {self._remedy()}"
                f"{session.words}"
            ) from error
        return session

    def _remedy(self) -> str:
        return "the address of one that runs" if self._url else "the command of one"

    def _parameters(self) -> Any:
        program, *arguments = self._command
        return _package().StdioServerParameters(
            command=program, args=arguments, env=self._env, cwd=self._cwd
        )

    async def _death(self, session: "_Session", when: str) -> MCPServerError:
        """Ends a session that is broken, and returns the error that says so."""
        await session.end()  # first, so that all of stderr is there
        left = self._restarts - session.restarts
        more = "; it is started again with the next call" if left > 0 else ""
        remedy = "" if more else f"; start another, or give restarts={self._restarts + 3}"
        session.death = f"the MCP server {self.name} has ended{remedy}{session.words}"
        return MCPServerError(
            f"the MCP server {self.name} ended {when}{more or remedy}{session.words}"
        )

    async def _ended(self) -> None:
        async with self._lock:
            if self._session is not None:
                await self._session.end()
            self._session = None

    def _tool(self, told: Any) -> FunctionTool:
        name = re.sub(r"[^\w.-]", "_", told.name)
        function = _RemoteFunction(self, told.name)
        return FunctionTool(name, told.description or "", told.input_schema, function)


class _Session:
    """A connection to a server, which a task of the thread's loop holds open.

    Attributes:
      ready: is set once `tools` are known, or has the error of the start.
      client: of the package, once it is connected.
      serving: the task.
      tools: that the server has.
      restarts: times that the server was started again before.
      death: what to say to later calls once the server has ended.
      words: the last that it has written to stderr, for the end of an error, once it has ended.
    """

    def __init__(self, server: Any):
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.client: Any = None
        self.tools: list[Any] = []
        self.restarts, self.words = 0, ""
        self.death: str | None = None
        self._over = asyncio.Event()
        self.serving = asyncio.ensure_future(self._serve(server))

    async def end(self) -> None:
        """Ends the connection, and with it the server's process."""
        self._over.set()
        if self.client is not None:
            await asyncio.wait([self.serving], timeout=_END_SECONDS)
        self.serving.cancel()
        await asyncio.wait([self.serving], timeout=_END_SECONDS)

    async def _serve(self, server: Any) -> None:
        with tempfile.TemporaryFile() as stderr:
            try:
                if not isinstance(server, str):
                    server = _package().stdio_client(server, errlog=stderr)
                async with _package().Client(server) as client:
                    self.client, cursor = client, None
                    while True:
                        page = await client.list_tools(cursor=cursor)
                        self.tools += page.tools
                        if not (cursor := page.next_cursor):
                            break
                    self.ready.set_result(None)
                    await self._over.wait()
            except BaseException as error:
                if not self.ready.done():
                    self.ready.set_exception(_cause(error))
                # Else it is the noise of a connection that has ended, of which the calls are told.
                if isinstance(error, asyncio.CancelledError):
                    raise
            finally:
                self.words = _last_words(stderr.fileno())


def _last_words(file: int) -> str:
    size = os.fstat(file).st_size
    data = os.pread(file, _LAST_BYTES, max(0, size - _LAST_BYTES))
    lines = [line.strip() for line in data.decode(errors="replace").splitlines()]
    lines = [line for line in lines if line][-_LAST_LINES:]
    return f"; the last on its stderr: {' | '.join(lines)}" if lines else ""


class _RemoteFunction:
    """A tool of a server as an async function of arguments by name; copies of a state share it."""

    def __init__(self, server: MCPServer, name: str):
        self._server, self.__name__ = server, name

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RemoteFunction":
        return self

    async def __call__(self, **arguments: Any) -> str:
        server = self._server
        return await server._thread.call(server._call(self.__name__, arguments))


def _cause(error: BaseException) -> BaseException:
    """The only error in groups of errors; an error for a cancellation, which no future can hold."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else ConnectionError("it was ended")


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:297]}..."


def _text_of(part: Any) -> str:
    """The text of a part of a result, or a note on another one."""
    if (text := getattr(part, "text", None)) is not None:
        return text
    inner = getattr(part, "resource", None)
    if (text := getattr(inner, "text", None)) is not None:
        return text
    kind = getattr(part, "mime_type", None) or getattr(inner, "mime_type", None)
    return f"[{part.type}{f' of type {kind}' if kind else ''}, which is no text]"


def _package() -> Any:
    try:
        import mcp  # here, because it takes a second and is optional
    except ImportError:
        raise MissingExtraError(
            "MCPServer takes the package mcp, which is not installed", "mcp"
        ) from None
    return mcp


def _types() -> Any:
    import mcp_types

    return mcp_types
