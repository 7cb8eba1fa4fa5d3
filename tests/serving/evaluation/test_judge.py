"""The judge of collaboration, against a stand-in server with given replies."""

import asyncio
import contextlib
import http.server
import itertools
import json
import logging
import socket
import threading
import time
from pathlib import Path

import pytest

from jaxshare.serving.cli import main
from jaxshare.serving.evaluation import Endpoint, Grading, JudgeError, Run, judge, trace_of


def completion(text: object) -> tuple[int, bytes, dict]:
    return 200, json.dumps({"choices": [{"message": {"content": text}}]}).encode(), {}


@pytest.fixture
def server():
    """`server.replies` are given in turn, the last one from then on; a reply is a text or (status,
    body, headers), and a body of several parts is sent part by part."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            made.requests.append(
                {"path": self.path, "body": body, "key": self.headers["Authorization"]}
            )
            reply = made.replies.pop(0) if len(made.replies) > 1 else made.replies[0]
            status, text, headers = completion(reply) if isinstance(reply, str) else reply
            self.send_response(status)
            parts, length = (
                ([text], {"Content-Length": str(len(text))})
                if isinstance(text, bytes)
                else (text, {})
            )
            for name, value in {**length, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has left
                for part in parts:
                    self.wfile.write(part)
                    made.sent += len(part)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        made.requests, made.replies, made.sent = [], ["Level: 3"], 0
        made.url = f"http://127.0.0.1:{made.server_address[1]}/v1"
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def step(text: str, tokens: int) -> dict:
    return {"text": text, "tokens": [5] * tokens}


def run(workers: int = 2, problem: str = "p", number: int = 0, **steps) -> Run:
    steps = steps or {
        "Alice": [step("Alice 1: I take x.", 6), step("Alice 2: x is 2.", 6)],
        "Bob": [step("Bob 1: Then y is 3.", 8)],
    }
    return Run(
        workers,
        problem,
        number,
        0,
        f"Find x and y ({problem}).",
        {"workers": steps, "answers": {}, "passes": 12},
    )


# what the judge sees


def test_a_trace_is_laid_out_worker_by_worker_and_cut():
    long = run(
        Alice=[step("abcde", 5), step("  fghij  ", 9), step("klm", 3)],
        Bob=[step("0123456789", 5), step("", 0)],
    )
    assert trace_of(long) == {"Alice": "abcde\n\nfghij\n\nklm", "Bob": "0123456789"}
    assert trace_of(long, 14) == {"Alice": "abcde\n\nfghij", "Bob": "0123456789"}
    # as large a part of the characters as of the tokens
    assert trace_of(long, 4) == {"Alice": "abcd", "Bob": "01234567"}
    assert trace_of(long, 8) == {"Alice": "abcde\n\nf", "Bob": "0123456789"}


def test_the_prompt_has_the_levels_the_problem_and_the_trace_and_says_last_what_to_do():
    text = judge.prompt_of(
        "Find {x}.",
        trace_of(run(3, Alice=[step("A", 1)], Bob=[step("B {}", 1)], Carol=[step("C", 1)])),
    )
    places = [
        text.index(part)
        for part in (
            "3 workers, Alice, Bob and Carol",
            *(f"Level {n}. " for n in range(1, 7)),
            "Find {x}.",
            '<worker name="Alice">\nA\n',
            '<worker name="Bob">\nB {}\n',
            '<worker name="Carol">\nC\n',
            "Do not solve the problem yourself",
            "Level: <number>",
        )
    ]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("reply", "level"),
    [
        ("They split it.\n\nLevel: 3", 3),
        ("Level:\n\n**3**\n", 3),
        ("**Level: 5**", 5),
        ("level 2.", 2),
        ("Level: 4/6", 4),
        ("Level: 1\nNo, better:\nLevel: 6", 6),
        ("Level: 3 of 6", 3),
        ("# Level - 2", 2),
    ],
)
def test_levels(reply, level):
    assert judge.level_of(reply) == level


# asking


def test_what_is_asked(server):
    server.replies = ["They greet.\nLevel: 2"]
    endpoint = Endpoint(f"{server.url}/", "a judge", "secret", temperature=0.5, max_tokens=77)
    assert endpoint.ask("Grade this: ü") == ("They greet.\nLevel: 2", 2)
    assert server.requests == [
        {
            "path": "/v1/chat/completions",
            "key": "Bearer secret",
            "body": {
                "model": "a judge",
                "messages": [{"role": "user", "content": "Grade this: ü"}],
                "max_tokens": 77,
                "temperature": 0.5,
            },
        }
    ]
    Endpoint(f"{server.url}/chat/completions", "b").ask("x")
    assert (
        server.requests[1]["path"] == "/v1/chat/completions" and server.requests[1]["key"] is None
    )
    assert "temperature" not in server.requests[1]["body"]


def test_what_may_pass_is_tried_again_after_longer_and_longer_pauses(server):
    server.replies = [
        (503, b"busy", {}),
        (429, b"", {"Retry-After": "9"}),
        (200, b"<html>", {}),
        (200, b'{"choices": []}', {}),
        completion(None),
        "I solved it: x = 2.",
        (200, b"Level: 3", {"Content-Length": "99999"}),
        "Level: 7",
        "Level: 4",
    ]
    pauses = []
    assert (
        Endpoint(server.url, "m", attempts=9, pause=2.0, seconds=20).ask("x", pauses.append)[1] == 4
    )
    assert pauses == [2, 9, 8, 16, 32, 60, 60, 60] and len(server.requests) == 9


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((500, b"out of order", {}), "HTTP 500 Internal Server Error: out of order"),
        ((200, b"nonsense", {}), "the reply is no chat completion"),
        (
            "I think so.",
            "the reply has no line with a level from 1 to 6 but ends with 'I think so.'",
        ),
        (completion(["x"]), r"the reply is no chat completion \(TypeError: the content is"),
        ((200, b"[]", {}), "the reply is no"),
    ],
)
def test_after_all_attempts_the_error_says_what_came_back(server, reply, words):
    server.replies = [reply]
    with pytest.raises(
        JudgeError,
        match=rf"the judge m at {server.url} gave no grade after 3 attempts \({words}.*; see to "
        r"the endpoint",
    ):
        Endpoint(server.url, "m", attempts=3).ask("x", lambda _: None)
    assert len(server.requests) == 3


@pytest.mark.parametrize("status", [401, 404, 400])
def test_a_refusal_is_not_tried_again(server, status):
    server.replies = [(status, b'{"error": "no such model"}', {})]
    with pytest.raises(
        JudgeError,
        match=rf'refuses \(HTTP {status} .*: \{{"error": "no such model"\}}\); check the address, '
        r"the model",
    ):
        Endpoint(server.url, "m").ask("x", lambda _: pytest.fail("it waits"))
    assert len(server.requests) == 1


def test_an_endpoint_that_is_down_or_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match=r"gave no grade after 2 attempts .*timed out"):
            Endpoint(url, "m", seconds=0.2, attempts=2).ask("x", lambda _: None)
    with pytest.raises(JudgeError, match=r"gave no grade after an attempt .*refused"):
        Endpoint(url, "m", attempts=1).ask("x")


# an endpoint that means harm

KEY = "sk-0123456789abcdef"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_takes_the_key_nowhere(server, status):
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.setblocking(False)
        there = f"http://localhost:{other.getsockname()[1]}/v1/chat/completions"
        server.replies = [(status, b"", {"Location": there}), "Level: 6"]
        with pytest.raises(
            JudgeError, match=rf"redirects to another address \(HTTP {status} .*key"
        ):
            Endpoint(server.url, "m", KEY).ask("x", lambda _: pytest.fail("it tries again"))
        with pytest.raises(BlockingIOError):
            other.accept()
    assert len(server.requests) == 1


def trickle():
    while True:
        time.sleep(0.02)
        yield b" "


def test_a_reply_has_a_deadline_as_a_whole(server):
    server.replies = [(200, trickle(), {})]
    begin = time.monotonic()
    with pytest.raises(JudgeError, match=r"timed out, with no whole reply in 0\.3 seconds"):
        Endpoint(server.url, "m", seconds=0.3, attempts=1).ask("x")
    assert time.monotonic() - begin < 5


def test_headers_count_for_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            with listening.accept()[0] as one, contextlib.suppress(OSError):
                one.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                for part in trickle():
                    one.sendall(part)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        with pytest.raises(JudgeError, match="timed out"):
            Endpoint(url, "m", seconds=0.3, attempts=1).ask("x")
        thread.join()


def test_an_endless_reply_is_left(server):
    server.replies = [(200, itertools.repeat(bytes(1 << 16)), {})]
    with pytest.raises(JudgeError, match="the reply is longer than 4 MiB"):
        Endpoint(server.url, "m", attempts=1).ask("x")
    assert server.sent < 32 << 20  # with what the sockets take
    server.replies = [(400, itertools.repeat(bytes(1 << 16)), {})]
    with pytest.raises(JudgeError, match="the reply is longer than 4 MiB"):
        Endpoint(server.url, "m", attempts=1).ask("x")


def test_a_compressed_reply_is_not_unpacked(server):
    server.replies = [(200, b"\x1f\x8b", {"Content-Encoding": "gzip"})]
    with pytest.raises(JudgeError, match="compressed, which was not asked for"):
        Endpoint(server.url, "m", attempts=1).ask("x")


def test_deep_json_and_half_a_character(server):
    server.replies = [(200, b"[" * (1 << 20), {})]
    with pytest.raises(JudgeError, match="the reply is JSON that is nested too deeply"):
        Endpoint(server.url, "m", attempts=1).ask("x")
    server.replies = ["\ud800 Level: 3\nLevel: 2"]
    assert Endpoint(server.url, "m").ask("x") == ("? Level: 3\nLevel: 2", 2)
    server.replies = [(429, b"", {"Retry-After": "\xb2"}), "Level: 2"]
    assert Endpoint(server.url, "m").ask("x", lambda seconds: None)[1] == 2


@pytest.mark.parametrize(
    "text",
    [
        "\n" * 1_000_000,
        " \n" * 500_000,
        "level" + " " * 1_000_000,
        "level\n" + " \n" * 500_000 + "x",
        "level " * 200_000,
        "x" + " " * 1_000_000 + "x",
        "level 3" + " " * 1_000_000 + "of 7",
        "level\n" * 200_000,
    ],
)
def test_levels_are_found_in_linear_time(text):
    begin = time.process_time()
    with pytest.raises(Exception, match="no line with a level"):
        judge.level_of(text)
    assert judge.level_of(f"{text}\nLevel: 3\n{' ' * 100_000}x") == 3
    assert time.process_time() - begin < 5  # a quadratic search takes hours


@pytest.mark.parametrize(
    "reply",
    [
        (401, f"Incorrect API key provided: {KEY}".encode(), {}),
        (400, b"x" * 295 + KEY.encode(), {}),
        (503, KEY.encode(), {}),
        (302, f"to {KEY}".encode(), {"Location": f"http://localhost:9/{KEY}"}),
        f"I saw {KEY}.",
        (200, f'{{"choices": "{KEY}"}}'.encode(), {}),
    ],
)
def test_the_key_is_in_no_error_and_no_log(server, reply, caplog):
    server.replies = [reply]
    with caplog.at_level(logging.DEBUG), pytest.raises(JudgeError) as raised:
        Endpoint(server.url, "m", KEY, attempts=1).ask("x")
    assert server.requests[0]["key"] == f"Bearer {KEY}"
    assert "sk-01" not in str(raised.value) and "sk-01" not in caplog.text


def test_a_judge_is_asked_within_an_event_loop(server):
    async def ask():
        return Endpoint(server.url, "m").ask("x")

    assert asyncio.run(ask()) == ("Level: 3", 3)


@pytest.mark.parametrize("key", ["sk-1\n", "sk 1", "sk-ü", ""])
def test_a_key_that_no_header_can_carry_is_not_shown(key):
    with pytest.raises(ValueError, match="the key of the endpoint has") as raised:
        Endpoint("http://x/v1", "m", key)
    assert "sk" not in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"url": "http://me:word@x/v1"}, "the endpoint at x has a user, a query or a fragment"),
        ({"url": "http://x/v1?key=word"}, "the endpoint at x has a user, a query or a fragment"),
        ({"url": "localhost:8000"}, "the endpoint is 'localhost:8000'; it must be an address"),
        ({"url": "file:///x"}, "must be an address"),
        ({"attempts": 0}, "attempts is 0"),
        ({"seconds": 0}, "seconds 0"),
        ({"pause": -1}, "pause -1"),
    ],
)
def test_wrong_endpoints(given, words):
    with pytest.raises(ValueError, match=words):
        Endpoint(**{"url": "http://x/v1", "model": "m", **given})


def test_averages_are_over_runs():
    levels = {
        (2, "p", 0): (1, 2, 3),
        (2, "p", 1): (4, 4, 4),
        (2, "q", 0): (6, 5, 4),
        (4, "p", 0): (3, 3, 4),
    }
    gradings = [
        Grading(*key, i, level, "")
        for key, of_run in levels.items()
        for i, level in enumerate(of_run)
    ]
    two, four = judge.average_levels(gradings)
    assert two == {
        "workers": 2,
        "level": pytest.approx(11 / 3),
        "standard_error": pytest.approx((7 / 3) ** 0.5 / 3**0.5),
        "runs": 3,
    }
    assert four == {"workers": 4, "level": pytest.approx(10 / 3), "standard_error": None, "runs": 1}


# the command


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder of `jaxshare evaluate`: two problems, for one worker and for two."""
    settings = {"format": "jaxshare evaluation 2", "settings": {"method": "workers"}}
    (tmp_path / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    made = [run(workers, problem) for problem in "pq" for workers in (1, 2)]
    (tmp_path / "runs.jsonl").write_text(
        "".join(json.dumps(vars(r)) + "\n" for r in made), encoding="utf-8"
    )
    return tmp_path


@pytest.fixture
def command(server, folder, capsys, monkeypatch):
    """Runs `jaxshare judge` without pauses; (exit code, stdout, stderr)."""
    monkeypatch.setattr(judge.time, "sleep", lambda seconds: None)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main.main(
            ["judge", str(folder), "--endpoint", server.url, "--model", "m", *arguments]
        )
        return code, *capsys.readouterr()

    return call


def test_three_gradings_of_every_run_of_two_workers(command, server, folder, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    server.replies = [f"Well, secret!\nLevel: {n}" for n in (1, 2, 4, 6, 5, 5)]
    code, out, _ = command("--json", "--key-variable", "MY_KEY")
    found = json.loads(out)
    assert code == 0 and found["gradings"] == 6 and found["from_before"] == 0
    assert found["levels"] == [
        {
            "workers": 2,
            "level": pytest.approx((7 / 3 + 16 / 3) / 2),
            "standard_error": pytest.approx(1.5),
            "runs": 2,
        }
    ]
    prompts = [request["body"]["messages"][0]["content"] for request in server.requests]
    assert (
        len(prompts) == 6
        and len(set(prompts)) == 2
        and all("Alice 1: I take x.\n\nAlice 2: x is 2." in p for p in prompts)
    )
    assert {request["key"] for request in server.requests} == {"Bearer secret"}
    kept = [json.loads(row) for row in (folder / "gradings.jsonl").read_text().splitlines()]
    assert [(k["problem"], k["grading"], k["level"]) for k in kept] == [
        ("p", 0, 1),
        ("p", 1, 2),
        ("p", 2, 4),
        ("q", 0, 6),
        ("q", 1, 5),
        ("q", 2, 5),
    ]
    assert json.loads((folder / "collaboration.json").read_text()) == found
    assert not any("secret" in path.read_text() for path in folder.iterdir())


def test_streams_of_self_consistency_are_not_called_workers(command, folder):
    settings = {"format": "jaxshare evaluation 2", "settings": {"method": "self-consistency"}}
    (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
    assert command()[1].splitlines()[1:] == ["self-consistency, 2: 3.00 +- 0.00 (2 runs)"]
    found = json.loads((folder / "collaboration.json").read_text())
    assert found["method"] == "self-consistency" and found["levels"][0]["workers"] == 2


def test_gradings_that_came_in_are_kept_and_not_asked_for_again(command, server, folder):
    server.replies = ["Level: 2", "Level: 4", (500, b"", {})]
    code, out, err = command("--attempts", "2")
    assert code == 1 and out == "" and err.count("\n") == 1
    assert (
        "gave no grade after 2 attempts" in err
        and "2 of 6 gradings are kept, and the same command goes on" in err
    )
    with open(folder / "gradings.jsonl", "ab") as file:
        file.write(b'{"workers": 2, "prob')  # killed in mid-line
    server.replies, server.requests = ["Level: 3"], []
    code, out, _ = command("--attempts", "7")
    assert (
        code == 0
        and len(server.requests) == 4
        and out == "level of collaboration, 1 to 6\n2 workers: 3.00 +- 0.00 (2 runs)\n"
    )
    code, out, _ = command("--json")
    assert len(server.requests) == 4 and json.loads(out)["from_before"] == 6


def test_another_judge_does_not_get_in_between(command, server, folder):
    command()
    for arguments, words in (
        (("--model", "n"), 'was graded with model "m", not "n"'),
        (("--gradings", "2"), "with gradings 3, not 2"),
        (("--prefix-tokens", "9"), "with prefix_tokens 4096, not 9"),
    ):
        code, _, err = command(*arguments)
        assert code == 1 and words in err and "away to start anew" in err
    (folder / "judge.json").unlink()
    assert "nothing says which judge has graded" in command()[2]


@pytest.mark.parametrize(
    "damage",
    [
        b"nonsense",
        b"{}",
        b'{"workers": 2, "problem": "p", "number": 0, "grading": 1, "level": 9, "reply": ""}',
    ],
)
def test_a_damaged_grading_is_named(command, folder, damage):
    command()
    lines = (folder / "gradings.jsonl").read_bytes().split(b"\n")
    (folder / "gradings.jsonl").write_bytes(b"\n".join([lines[0], damage, *lines[2:]]))
    code, _, err = command()
    assert code == 1 and "line 2 of" in err and "gradings.jsonl is damaged" in err


def test_folders_that_cannot_be_judged(command, folder):
    assert "--gradings is 0" in command("--gradings", "0")[2]
    runs = folder / "runs.jsonl"
    lines = runs.read_bytes().splitlines(keepends=True)
    runs.write_bytes(lines[0])
    assert "has no run of two workers or more" in command()[2]
    runs.write_bytes(lines[0] + b"{}\n")
    assert "line 2 of" in command()[2]
    runs.unlink()
    assert "runs.jsonl cannot be read" in command()[2]
    (folder / "settings.json").write_text(
        '{"format": "jaxshare evaluation 2", "settings": {"method": "sequential"}}'
    )
    assert "was written by the method sequential, which has no workers" in command()[2]
    (folder / "settings.json").write_text("{}")
    assert "has no evaluation that can be read" in command()[2]
    assert not (folder / "judge.json").exists()
