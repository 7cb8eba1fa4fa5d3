"""A process that runs a program, the tests of a program, or a program on one case, under limits.

Uses the standard library alone. `sandbox.run_tests` starts it twice: the process of the program runs
it and answers the calls of the other one, which runs the tests, compares, and alone has the file
descriptor that the verdict goes to. `cases.run_cases` starts it once for each case; what the program
prints or returns is compared by who started it.
"""

import builtins
import contextlib
import functools
import json
import os
import resource
import signal
import sys
import types
from pathlib import Path
from typing import Any

# The process is isolated from its script's folder, and these two need nothing of the package.
sys.path.insert(0, str(Path(__file__).parent))
import sandbox_calls
import sandbox_view

sys.path.pop(0)

_NETWORK = (
    "socket.connect",
    "socket.bind",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostby",
)
_PROCESSES = (
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "os.startfile",
    "os.kill",
)
_LOST = "ended before its tests did: it ends itself, or takes more time or memory than it may"


def main() -> None:
    """Reads its orders, a JSON object, from stdin, and runs the program or the tests."""
    with open(0, "rb", closefd=False) as file:  # sys.stdin is left for the program
        given = json.loads(file.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if given["view"]:
        sandbox_view.enter(given["folder"], given["files"])
    if given.get("report") is not None:
        sandbox_view.hide_memory()
    _limit(resource.RLIMIT_CPU, given["seconds"], spare=1)
    _limit(resource.RLIMIT_AS, given["memory"])
    _limit(resource.RLIMIT_FSIZE, given["files"])
    _limit(resource.RLIMIT_CORE, 0)
    if given["namespaces"]:  # elsewhere it counts all processes of the user
        _limit(resource.RLIMIT_NPROC, given["processes"])
    signal.signal(signal.SIGXCPU, functools.partial(_late, given["seconds"]))
    if not given["namespaces"]:
        sys.addaudithook(_refuse)
    if "stdin" in given:
        _run_case(given)
        return  # to the end of the interpreter, which waits for threads
    sys.modules[sandbox_calls.MODULE] = types.ModuleType(sandbox_calls.MODULE)
    if given["report"] is None:
        _run_program(given)
    else:
        _run_tests(given)
    os._exit(0)  # without waiting for threads


def _run_program(given: dict[str, Any]) -> None:
    module = sys.modules[sandbox_calls.MODULE]
    process = os.getpid()
    error = _run(given["preamble"], "preamble", module.__dict__)
    error = error or _run(given["source"], "program", module.__dict__)
    if os.getpid() != process:
        return  # one that the program has forked and that has come to the program's end
    calls = sandbox_calls.Calls(
        given["calls"], {"error": lambda: error, "name": module.__dict__.__getitem__}
    )
    with contextlib.suppress(sandbox_calls.Lost):
        calls.serve()


def _run_tests(given: dict[str, Any]) -> None:
    calls = sandbox_calls.Calls(given["calls"])
    try:
        error = calls.ask("error")
        error = error if error is None else str(error)[:500]
    except sandbox_calls.Lost:
        error = _LOST
    if error is None:
        names = _Names(calls)
        sys.modules[sandbox_calls.MODULE].__dict__["__getattr__"] = names.attribute
        module = {"__name__": sandbox_calls.MODULE, "__builtins__": names}
        error = _run(given["source"], "tests", module)
    with open(given["report"], "w", encoding="utf-8") as report:
        json.dump({"error": _LOST if calls.lost else error}, report)


def _run_case(given: dict[str, Any]) -> None:
    """Runs a program as `__main__` with its input in stdin, or calls its function.

    An exception is raised, so that it ends the interpreter as it would end any program.
    """
    function = given["function"]
    name = "__main__" if function is None else sandbox_calls.MODULE
    module = sys.modules[name] = types.ModuleType(name)
    files = {"stderr": 2} if function is not None else {"stdin": 0, "stdout": 1, "stderr": 2}
    for file, number in files.items():
        os.dup2(given[file], number)
        os.close(given[file])
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    sys.argv = ["program.py"]
    for source in (given["preamble"], given["source"]):
        exec(compile(source, "program", "exec", dont_inherit=True), module.__dict__)
    if function is not None:
        with open(given["stdin"], encoding="utf-8") as file:
            arguments = [json.loads(line) for line in file.read().split("\n")]
        holder = module.Solution() if hasattr(module, "Solution") else module
        value = getattr(holder, function)(*arguments)
        with open(given["stdout"], "w", encoding="utf-8") as file:
            json.dump(value, file, default=lambda other: other.item())  # numbers of NumPy


class _Names(dict):
    """Python's own names for the tests, and after them the program's, as though in one module.

    A program that gives a name of Python's own, such as `len`, another meaning does so for itself
    alone; tests that mean the program's say `from solution import len`.
    """

    def __init__(self, calls: sandbox_calls.Calls):
        super().__init__(vars(builtins))
        self._calls = calls

    def __missing__(self, name: str) -> Any:
        return self._calls.ask("name", name)

    def attribute(self, name: str) -> Any:
        """An attribute of the module `solution`, as `import` asks for it."""
        try:
            return self._calls.ask("name", name)
        except KeyError:
            raise AttributeError(f"the program has no {name}") from None


def _limit(kind: int, limit: int, spare: int = 0) -> None:
    """Lowers a limit; a process that exceeds it by `spare` is killed."""
    hard = resource.getrlimit(kind)[1]
    new_hard = limit + spare if hard == resource.RLIM_INFINITY else min(limit + spare, hard)
    resource.setrlimit(kind, (min(limit, new_hard), new_hard))


def _late(seconds: int, *_: object) -> None:
    raise TimeoutError(f"more than {seconds} seconds of processor time")


def _run(source: str, what: str, names: dict[str, Any]) -> str | None:
    """Runs code in the module `solution`, so that `__name__ == "__main__"` is false.

    Returns:
      Its error, or None.
    """
    try:
        exec(compile(source, what, "exec"), names)
    except BaseException as error:  # SystemExit too
        return f"the {what}: {type(error).__name__}: {error}"[:500]
    return None


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith((*_NETWORK, *_PROCESSES)):
        raise PermissionError(f"{event} is not allowed here")
    # /proc has the variables and the memory of other processes in files of these names.
    if (
        event in ("open", "os.symlink", "os.link")
        and isinstance(arguments[0], str | bytes)
        and os.path.basename(os.fsdecode(arguments[0])) in ("environ", "mem")
    ):
        raise PermissionError(f"{event} is not allowed here for files of this name")


if __name__ == "__main__":
    main()
