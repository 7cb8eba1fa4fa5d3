"""The log of the server as JSON: an object on each line, with the identity of the request."""

import io
import json
import logging
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from jaxshare.serving.http import request_log
from tests.serving.http.served import ScriptedEngine, served, until

COMPLETIONS = "/v1/completions"


@pytest.fixture
def lines():
    """The lines that the server logs as JSON, parsed when called."""
    written, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(written)
    handler.setFormatter(request_log.formatter("json"))
    logger = logging.getLogger("jaxshare.http")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_each_request_is_an_object(lines):
    begin = datetime.now(UTC)
    with served(ScriptedEngine(answers=["Yes."])) as made:
        answer = made.post(COMPLETIONS, {"prompt": "secret"})
    (line,) = [each for each in lines() if each.get("path") == COMPLETIONS]
    assert line["request_id"] == answer.headers["x-request-id"]
    assert (line["method"], line["status"], line["level"]) == ("POST", 200, "info")
    assert 0 < line["seconds"] < 60
    assert begin.timestamp() - 1 <= datetime.fromisoformat(line["time"]).timestamp()
    assert datetime.fromisoformat(line["time"]).utcoffset() == datetime.now(UTC).utcoffset()
    assert "secret" not in json.dumps(lines())


def test_what_is_logged_within_a_request_is_of_it(lines):
    """A field that is not known is logged by its name, while the request is read."""
    with served(ScriptedEngine(answers=["Yes."] * 2)) as made:
        first = made.post(COMPLETIONS, {"prompt": "a", "unheard_of_field": 1})
        made.post(COMPLETIONS, {"prompt": "a"})
    (line,) = [each for each in lines() if "unheard_of_field" in each["message"]]
    assert line["request_id"] == first.headers["x-request-id"]


def test_requests_at_the_same_time_keep_their_identities(lines):
    names = [f"client-{i}" for i in range(12)]
    with served(ScriptedEngine(answers=["Yes."] * 12)) as made:
        barrier = threading.Barrier(len(names))

        def ask(name: str) -> str:
            barrier.wait()
            headers = {"X-Request-ID": name}
            asked = made.http.post(
                COMPLETIONS, json={"model": "tiny", "prompt": name}, headers=headers
            )
            return asked.headers["x-request-id"]

        with ThreadPoolExecutor(len(names)) as threads:
            assert [*threads.map(ask, names)] == names
    logged = [each["request_id"] for each in lines() if each.get("path") == COMPLETIONS]
    assert sorted(logged) == sorted(names)


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", '{"a":1}', "é"])
def test_an_identity_that_could_forge_a_line_is_replaced(given):
    made = request_log.begin_request([(b"X-Request-Id", given.encode())])
    assert re.fullmatch("[0-9a-f]{24}", made)


@pytest.mark.parametrize("given", ["a", "x" * 128, "4bf92f35-77b3.4da6:a3_ce"])
def test_a_proxy_s_identity_is_kept(given):
    assert request_log.begin_request([(b"X-Request-Id", given.encode())]) == given


def test_an_exception_is_one_line_with_its_traceback():
    logger = logging.getLogger("jaxshare.http")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        arguments = logger.name, logging.ERROR, "file", 1, "it failed\n%s", ("x",)
        record = logger.makeRecord(*arguments, sys.exc_info())
    text = request_log.formatter("json").format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert line["message"] == "it failed\nx" and "second" in line["exception"]
    assert "ValueError" in line["exception"] and line["level"] == "error"


def test_what_other_libraries_log_has_the_form_of_the_server_and_comes_once(capsys):
    """Orbax gives the root logger a handler when it first saves."""
    root, other = logging.getLogger(), logging.StreamHandler()
    notices, absl = request_log.notices, logging.getLogger("absl")
    before = absl.propagate, [*absl.handlers]
    with request_log.logged_to_stderr("info", "json"):
        root.addHandler(other)
        other.setStream(sys.stderr)
        try:
            logging.getLogger("jaxshare.http").info("one")
            absl.warning("two %s", "parts")
            absl.info("nothing")
            notices.info("three")
        finally:
            root.removeHandler(other)
    told = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [each["message"].split(": ")[-1][:9] for each in told[:3]] == [
        *("one", "two parts", "three"),
    ]
    assert len(told) == 3
    assert (absl.propagate, absl.handlers) == (before[0], before[1])


def test_notices_as_text_are_of_the_command(capsys):
    with request_log.logged_to_stderr("error", "text"):
        request_log.notices.info("ready after %.1f s", 2)
        request_log.notices.warning("nobody asks for a key")
        logging.getLogger("jaxshare.http").warning("not told")
    assert capsys.readouterr().err.splitlines() == [
        *("jaxshare: ready after 2.0 s", "jaxshare: warning: nobody asks for a key"),
    ]


def test_the_end_in_the_engine_is_of_the_request(lines, live):
    """The engine's thread logs it, with what `extra` has."""
    logger = logging.getLogger("jaxshare.engine")
    (handler,) = [each for each in logging.getLogger("jaxshare.http").handlers if each.level == 0][
        :1
    ]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        answer = live.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2})
        found = [each for each in lines() if each["message"] == "ended"]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [each["request_id"] for each in found] == [answer.headers["x-request-id"]]
    assert (found[0]["prompt_tokens"], found[0]["new_tokens"]) == (1, 2)


def test_records_say_of_whom_what_and_how_much_and_where_it_failed(lines):
    with served(ScriptedEngine(answers=["secret"]), max_body_bytes=20_000) as made:
        chat = {"messages": [{"role": "user", "content": "secret words"}], "n": 2}
        used = made.post("/v1/chat/completions", chat).json()["usage"]
        made.post("/v1/chat/completions", {**chat, "stream": True})
        made.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"secret": 500}})
        made.post(COMPLETIONS, {"prompt": "a" * 30_000})
        made.http.post(COMPLETIONS, json={"prompt": "a"}, headers={"Host": "secret.example"})
        made.post(COMPLETIONS, {"prompt": "a", "model": "secret"})
        made.http.get(COMPLETIONS)
        made.http.get("/v1/secret")
        until(lambda: len(lines()) == 8)  # the record of a stream may come after its end
    told = [each for each in lines() if "status" in each]
    chats = [each for each in told if "chat" in each["path"]]
    others = [each for each in told if each not in chats]
    assert len(chats) == 2
    for each in chats:
        assert (each["client"], each["model"]) == ("127.0.0.1", "tiny")
        assert each["prompt_tokens"] == used["prompt_tokens"]
        assert each["completion_tokens"] == used["completion_tokens"]
    assert [(e["path"], e["status"], e.get("code"), e.get("param")) for e in others] == [
        (COMPLETIONS, 400, "invalid_value", "logit_bias"),
        (COMPLETIONS, 413, "body_too_large", None),
        (COMPLETIONS, 403, "host_not_allowed", None),
        (COMPLETIONS, 404, "model_not_found", "model"),
        (COMPLETIONS, 405, None, None),
        ("other", 404, None, None),
    ]
    assert "secret" not in json.dumps(told)
