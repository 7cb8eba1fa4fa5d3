"""The process that runs a program and then its tests, under limits.

Started by `sandbox.run_tests`; uses the standard library alone. Reads one JSON object from stdin,
and writes one to a file descriptor at the end, with the given mark: so a program that ends the
process early has not passed.
"""

import functools
import json
import os
import resource
import signal
import sys
import types

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
)


def main() -> None:
    given = json.loads(sys.stdin.buffer.read())
    report = os.fdopen(given["report"], "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    _limit(resource.RLIMIT_CPU, given["seconds"], spare=1)
    _limit(resource.RLIMIT_AS, given["memory"])
    _limit(resource.RLIMIT_FSIZE, given["files"])
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGXCPU, functools.partial(_late, given["seconds"]))
    if given["block"]:
        sys.addaudithook(_refuse)
    error = _run(given["program"], "program") or _run(given["tests"], "tests")
    json.dump({"mark": given["mark"], "error": error}, report)
    report.flush()
    os._exit(0)  # without waiting for threads of the program


def _limit(kind: int, limit: int, spare: int = 0) -> None:
    """Lowers a limit; a process that exceeds it by `spare` is killed."""
    hard = resource.getrlimit(kind)[1]
    new_hard = limit + spare if hard == resource.RLIM_INFINITY else min(limit + spare, hard)
    resource.setrlimit(kind, (min(limit, new_hard), new_hard))


def _late(seconds: int, *_: object) -> None:
    raise TimeoutError(f"more than {seconds} seconds of processor time")


def _run(source: str, what: str) -> str | None:
    """Runs code in the module `solution`, so that `__name__ == "__main__"` is false.

    Returns:
      Its error, or None.
    """
    module = sys.modules.setdefault("solution", types.ModuleType("solution"))
    try:
        exec(compile(source, what, "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too
        return f"the {what}: {type(error).__name__}: {error}"[:500]
    return None


def _refuse(event: str, _: object) -> None:
    if event.startswith((*_NETWORK, *_PROCESSES)):
        raise PermissionError(f"{event} is not allowed here")


if __name__ == "__main__":
    main()
