"""An HTTP endpoint that answers by a script, faults among its answers."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any


def completion(
    text: str | None = "fine", *, finish: str = "stop", **message: Any
) -> dict[str, Any]:
    """A chat completion in OpenAI's form, written by hand."""
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, **message},
                "finish_reason": finish,
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9},
    }


class Endpoint:
    """A scripted endpoint.

    Attributes:
      url: its base_url.
      script: the next answers, each (status, headers, body); "hang" for none at all.
      asked: the bodies of all requests.
      keys: the headers Authorization of all requests.
      most: the most requests that were under way at once.
    """

    def __init__(self) -> None:
        self.url = ""
        self.script: list[Any] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.now = self.most = 0
        self.lock, self.over, self.gate = threading.Lock(), threading.Event(), threading.Event()
        self.gate.set()


@contextlib.contextmanager
def scripted_endpoint(*script: Any) -> Iterator[Endpoint]:
    """Serves a script; a dictionary is a completion, the last answer is for all others."""
    one = Endpoint()
    one.script = [*script]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one.lock:
                one.asked.append(body)
                one.keys.append(self.headers["Authorization"])
                one.now += 1
                one.most = max(one.most, one.now)
                answer = one.script.pop(0) if len(one.script) > 1 else one.script[0]
            one.gate.wait(20)
            with one.lock:
                one.now -= 1
            if answer == "hang":
                one.over.wait(20)
                self.close_connection = True
                return
            if isinstance(answer, dict):
                answer = (200, {}, json.dumps(answer))
            status, headers, text = answer
            data = text.encode()
            self.send_response(status)
            plain = {"Content-Type": "application/json", "Content-Length": str(len(data))}
            for name, value in {**plain, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    one.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield one
    finally:
        one.over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
