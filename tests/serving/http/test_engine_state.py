"""/v1/engine: what it tells of rows, cache and rates, and who is told how cached texts begin."""

import json
import threading
import time

import pytest

from tests.serving.http.served import ScriptedEngine, served, sse_events, until

COMPLETIONS = "/v1/completions"
PROMPT = "1. 17 + 25 2. 3 * 4 3. 100 - 58"
LONG = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "agent_id": "maths"}


def test_a_running_request_is_a_row_and_its_tokens_are_cached(live):
    tokens = live.post("/tokenize", {"prompt": PROMPT}).json()["count"]
    request = threading.Thread(target=live.post, args=(COMPLETIONS, LONG))
    request.start()

    def rows():
        return [
            row
            for row in live.http.get("/v1/engine/stats").json()["requests"]
            if row["agent"] == "maths" and row["sampled_tokens"]
        ]

    until(rows)
    (row,) = rows()
    assert row["prompt_tokens"] == tokens and row["max_tokens"] == 400
    assert row["state"] == "decoding" and row["sampled_tokens"] <= 400
    until(lambda: any(r["readers"] for r in live.http.get("/v1/engine/cache").json()["runs"]))
    request.join()
    until(lambda: not live.http.get("/v1/engine/stats").json()["requests"])
    cache = live.http.get("/v1/engine/cache").json()
    runs = [run for run in cache["runs"] if "maths" in run["agents"]]
    assert sum(run["cached"] for run in runs) >= tokens + 399
    assert all(run["readers"] == 0 and not run["writing"] for run in cache["runs"])
    assert all(run["parent"] is None or run["parent"] < i for i, run in enumerate(cache["runs"]))
    assert not any("text" in run for run in cache["runs"])


def test_a_prompt_that_is_cached_raises_the_hit_rate(live):
    def fresh():
        time.sleep(0.3)  # all who look within a quarter of a second see the same
        return live.http.get("/v1/engine/stats").json()

    live.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    before = fresh()
    live.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    after = fresh()
    read = after["prompt_tokens"] - before["prompt_tokens"]
    reused = after["reused_tokens"] - before["reused_tokens"]
    assert read - 1 <= reused <= read and read > 0
    assert after["hit_rate"] == pytest.approx(
        after["reused_tokens"] / after["prompt_tokens"], abs=1e-4
    )


def test_a_session_has_a_part_of_the_memory(live):
    before = live.http.get("/v1/engine/stats").json()["memory"]["session_bytes"]
    made = live.post("/v1/workers", {"problem": "1. 3 + 4", "budget": 32}).json()

    def leased():
        return live.http.get("/v1/engine/stats").json()["memory"]["session_bytes"]

    until(lambda: leased() > before)
    cache = live.http.get("/v1/engine/cache").json()
    size = sum(lease["capacity"] for lease in cache["leases"]) * cache["bytes_per_token"]
    assert size == leased()
    live.http.delete(f"/v1/workers/{made['id']}")
    live.post(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2})
    until(lambda: leased() == before)


def test_the_stream_goes_on_until_the_client_goes(live):
    with live.http.stream("GET", "/v1/engine/stats?stream=true") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = ""
        for part in answer.iter_text():
            text += part
            if text.count("\n\n") >= 3:
                break
    events = sse_events(text[: text.rindex("\n\n")])
    assert [name for name, _ in events] == ["stats"] * len(events) and len(events) >= 3
    assert json.loads(events[0][1])["object"] == "engine.stats"


def test_texts_are_shown_where_the_server_is_told_to(engine):
    with served(engine, show_texts=True) as made:
        made.post(COMPLETIONS, {"prompt": "<b>bold & brave</b>", "max_tokens": 2})

        def texts():
            runs = made.http.get("/v1/engine/cache").json()["runs"]
            return [run["text"] for run in runs]

        until(lambda: any("<b>bold & brave</b>"[:8] in text for text in texts()))


def test_a_page_needs_no_key_and_what_it_asks_for_does():
    with served(ScriptedEngine(), api_keys=("secret",)) as made:
        page = made.http.get("/")
        assert page.status_code == 200 and "text/html" in page.headers["content-type"]
        policy = page.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy
        assert page.headers["x-content-type-options"] == "nosniff"
        assert made.http.get("/page/app.js").status_code == 200
        for name in ("../app.py", "%2e%2e%2fapp.py", "app.py", "", "nothing.js"):
            assert made.http.get(f"/page/{name}").status_code in (401, 404)
        for path in ("/v1/engine/stats", "/v1/engine/cache", "/v1/trees", "/v1/workers"):
            assert made.http.get(path).status_code == 401


def test_the_page_asks_for_nothing_but_its_own_files():
    with served(ScriptedEngine()) as made:
        html = made.http.get("/").text
        names = [part.split('"')[0] for part in html.split('="/page/')[1:]]
        assert names and all(made.http.get(f"/page/{name}").status_code == 200 for name in names)
        assert "http://" not in html and "https://" not in html and "style=" not in html
