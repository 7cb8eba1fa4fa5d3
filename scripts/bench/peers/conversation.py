"""The end of `scripts.bench.peer.Worker` in the other process. It needs nothing but Python."""

import json
import os
import sys
import time
from typing import Any


class Conversation:
    """Says JSON objects on stdout, and answers those that come on stdin, one a line each."""

    def __init__(self) -> None:
        # A library that prints must not print into the conversation.
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def say(self, **found: Any) -> None:
        print(json.dumps(found), file=self._out, flush=True)

    def answer_requests(self, session: Any) -> None:
        """Answers requests by the methods of `session` that have their names, with the time and the
        CPU time since the answer before; what cannot be done with {"error": SENTENCE}."""
        since, since_cpu = time.perf_counter(), time.process_time()
        for line in sys.stdin:
            request = json.loads(line)
            idle = {
                "idle_seconds": time.perf_counter() - since,
                "idle_cpu_seconds": time.process_time() - since_cpu,
            }
            try:
                found = getattr(session, request.pop("do"))(**request)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
            since, since_cpu = time.perf_counter(), time.process_time()
            self.say(**found, **idle)
