"""Each view of the page, used by script in a browser, against what the server itself tells."""

import json
import re
import threading

import pytest

from tests.serving.http.served import ScriptedEngine, served, until

HTML = "<b>bold</b><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
PROBLEM = "Solve: 1. 17 + 25 2. 60 - 18"


@pytest.fixture(scope="module")
def scripted():
    with served(ScriptedEngine(answers=[f"<think>{HTML}</think>{HTML}"])) as made:
        yield made


def is_clean(page) -> bool:
    """True if no text has become markup."""
    return page.evaluate(
        "window.hacked === undefined && document.querySelectorAll('main img, main script, main b')"
        ".length === 0"
    )


def say(page, text):
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send").click()


def begin(page, **settings):
    """Begins a session of workers with these values of fields; returns its identity."""
    page.get_by_text("More settings").click()
    for label, value in {"Problem": PROBLEM, **settings}.items():
        field = page.get_by_label(label, exact=True)
        if field.evaluate("each => each.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    with page.expect_response(lambda a: a.url.endswith("/v1/workers") and a.status == 200) as made:
        page.get_by_role("button", name="Begin").click()
        page.get_by_role("heading", name="Being written").wait_for()
    del made
    return page.request.get(f"{page.url.split('#')[0]}v1/workers").json()["data"][-1]["id"]


def end(page):
    page.get_by_role("button", name="Delete session").click()
    page.get_by_role("heading", name="Being written").wait_for(state="detached")


# Chat.


def test_a_chat_shows_what_was_said_and_what_a_model_writes_as_text(open_page, scripted):
    page = open_page(scripted)
    say(page, HTML)
    page.get_by_text("were cached").wait_for()
    articles = page.locator(".message > .words")
    assert articles.all_text_contents() == [HTML, HTML]
    page.get_by_text("Thinking").click()
    assert page.locator(".thinking .words").text_content() == HTML
    assert is_clean(page)
    assert page.title() == "Chat · jaxshare"


def test_the_dialogue_and_the_settings_are_what_the_server_gets(open_page):
    engine = ScriptedEngine(answers=["First.", "Second."])
    with served(engine) as made:
        page = open_page(made)
        page.get_by_text("Settings").click()
        page.get_by_label("Instructions").fill("Be brief.")
        page.get_by_label("Temperature").fill("0.5")
        page.get_by_label("Most tokens").fill("33")
        for text in ("One?", "Two?"):
            say(page, text)
            page.get_by_role("button", name="Send").wait_for()
            page.get_by_text("were cached").wait_for()
        first, second = engine.prompts
        assert first.index("Be brief.") < first.index("One?")
        assert [second.index(text) for text in ("One?", "First.", "Two?")] == sorted(
            second.index(text) for text in ("One?", "First.", "Two?")
        )
        options = engine.asked[1][1]
        assert options["sampler"].temperature == 0.5 and options["max_new_tokens"] == 33
        page.get_by_role("button", name="New dialogue").click()
        assert page.locator(".message").count() == 0


def test_stop_ends_the_request_and_keeps_what_was_written(open_page, live):
    page = open_page(live)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("7000")
    page.get_by_label("Temperature").fill("3")
    page.route(  # so that it does not end before it is stopped
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True})
        ),
    )
    say(page, "What is 17 + 25?")
    page.locator(".message.assistant .words").filter(has_text=re.compile(r"\S")).last.wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped").wait_for()
    written = page.locator(".message.assistant > .words").text_content()
    assert written
    until(lambda: live.service.num_running == 0)
    page.wait_for_timeout(300)
    assert page.locator(".message.assistant > .words").text_content() == written


def test_an_error_of_the_server_is_a_sentence(open_page, live):
    page = open_page(live)
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("900000")
    say(page, "Hello")
    page.get_by_text("tokens and 900000 more may follow").wait_for()
    # Browsers tell of answers that are no success; this one was asked for.
    assert all("400" in each for each in open_page.errors)
    open_page.errors.clear()


# Workers.


def test_workers_write_into_columns_and_their_steps_into_the_history(open_page, live):
    page = open_page(live, "workers")
    identity = begin(page, Names="Ann, Ben", Budget="200")
    page.get_by_text(re.compile("^Ended ")).wait_for()
    told = live.http.get(f"/v1/workers/{identity}").json()
    finished = [step for step in told["steps"] if step["ended"] is not None]
    cards = page.locator(".history .card")
    page.locator(".card").nth(len(finished) - 1).wait_for()
    shown = [
        re.sub(r"\s+", " ", text).strip() for text in cards.locator(".words").all_text_contents()
    ]
    for card, step in zip(shown, finished, strict=True):
        text = re.sub(r"\s+", " ", step["text"]).strip()
        assert text.endswith(card) and len(text) - len(card) <= len(step["worker"]) + 8
    assert [f"{s['worker']} step {s['step']}" for s in finished] == [
        re.match(r"\w+ step \d+", text)[0]  # pyright: ignore[reportOptionalSubscript]
        for text in cards.locator("h3").all_text_contents()
    ]
    assert page.locator(".column h3").all_text_contents() == ["Ann", "Ben"]
    assert len(finished) >= 2
    answer = live.http.post(f"/v1/workers/{identity}/finish").json()
    page.get_by_role("button", name="Answer as it stands").click()
    page.locator(".answer").filter(has_text=answer["value"] or "No answer").wait_for()
    end(page)
    assert live.http.get(f"/v1/workers/{identity}").status_code == 404


def test_answers_come_at_the_budgets_that_were_asked_for(open_page, live):
    page = open_page(live, "workers")
    identity = begin(
        page, Names="Ann, Ben", Budget="96", Ends="never", **{"Answers at": "32, 64 96"}
    )
    page.locator(".answer").nth(2).wait_for()
    told = live.http.get(f"/v1/workers/{identity}").json()["answers"]
    assert [each["budget"] for each in told] == [32, 64, 96]
    shown = page.locator(".answer").all_text_contents()
    for text, each in zip(shown, told, strict=True):
        assert text.startswith(f"{each['value'] or 'No answer'} after {each['passes']} passes")
    assert page.get_by_role("button", name="Pause all").is_disabled()
    end(page)


def test_a_session_is_saved_deleted_and_goes_on(open_page, live):
    page = open_page(live, "workers")
    begin(page, Names="Ann, Ben", Budget="96")
    page.get_by_text(re.compile("^Ended ")).wait_for()
    words = page.locator(".history").text_content()
    page.get_by_role("button", name="Save").click()
    page.get_by_text(re.compile("^Saved after ")).wait_for()
    end(page)
    page.get_by_text("Saved sessions").click()
    page.get_by_role("button", name="Go on").click()
    page.get_by_text(re.compile("^Ended ")).wait_for()
    until(lambda: page.locator(".history").text_content() == words)
    end(page)
    page.get_by_role("button", name="Delete save").click()
    page.get_by_text("Saved sessions").wait_for(state="hidden")
    assert live.http.get("/v1/workers/saves").json()["data"] == []


def test_a_person_speaks_and_a_worker_pauses_joins_and_leaves(open_page, live):
    page = open_page(live, "workers")
    identity = begin(
        page,
        Names="Ann, Ben",
        Budget="6000",
        Ends="never",
        Temperature="2",
        **{"Room for workers": "3"},
    )
    for name in ("Ann", "Ben"):
        page.get_by_role("button", name=f"Pause or resume {name}").click()
        page.get_by_role("region", name=name).get_by_text("paused").wait_for()
    page.get_by_label("Words to all workers").fill(HTML)
    page.get_by_role("button", name="Say").click()
    card = page.locator(".card.person")
    assert card.locator(".words").text_content() == HTML and is_clean(page)
    states = live.http.get(f"/v1/workers/{identity}").json()["workers"]
    assert {name: each["state"] for name, each in states.items()} == dict.fromkeys(
        ("Ann", "Ben"), "paused"
    )
    page.get_by_label("Name of the new worker").fill("Cid")
    page.get_by_role("button", name="Add worker").click()
    page.get_by_role("region", name="Cid").wait_for()
    page.get_by_role("button", name="Remove Ann").click()
    page.get_by_role("region", name="Ann", exact=True).wait_for(state="detached")
    page.get_by_role("button", name="Pause all").click()
    page.locator("#watch").check()
    table = page.get_by_role("table")
    if states:
        page.get_by_role("button", name="Resume all").click()
    table.wait_for()
    for row in table.locator("tbody tr").all():
        parts = [float(text.rstrip("%")) for text in row.locator(".value").all_text_contents()]
        assert parts and abs(sum(parts) - 100) <= 1 + len(parts) / 2
    page.get_by_role("button", name="Remove Ben").click()
    page.get_by_role("region", name="Ben", exact=True).wait_for(state="detached")
    page.get_by_role("button", name="Remove Cid").click()
    page.get_by_text("Cid is the only worker").wait_for()
    open_page.errors.clear()  # the browser's own words on the answer 400
    end(page)


def test_a_session_is_found_again_after_a_reload(open_page, live):
    page = open_page(live, "workers")
    begin(page, Names="Ann", Budget="60")
    page.get_by_text(re.compile("^Ended ")).wait_for()
    before = page.locator(".card .words").all_text_contents()
    page.reload()
    page.get_by_role("button", name=re.compile("Session 1")).click()
    page.get_by_text(re.compile("^Ended ")).wait_for()
    assert page.locator(".card .words").all_text_contents() == before
    end(page)


# Cache, trees, engine.


def test_the_cache_shows_every_run_and_how_it_begins(open_page, live):
    for _ in range(2):
        live.post("/v1/completions", {"prompt": HTML, "max_tokens": 4})
    page = open_page(live, "cache")
    page.locator("tbody tr").first.wait_for()
    runs = live.http.get("/v1/engine/cache").json()["runs"]
    until(lambda: page.locator("tbody tr").count() == min(len(runs), 400))
    excerpts = page.locator("td.excerpt").all_text_contents()
    assert any(text.startswith("<b>bold</b>") for text in excerpts) and is_clean(page)
    rects = page.locator(".map rect:not(.lease)").count()
    assert rects == sum(run["place"] == "accelerator" for run in runs)


def test_a_tree_that_is_posted_is_shown_and_grows(open_page, live):
    nodes = [
        {"id": "a", "label": HTML, "text": HTML},
        {"id": "b", "parent": "a", "label": "second", "score": 0.5, "fate": "kept"},
    ]
    live.post("/v1/trees", {"name": "search", "nodes": nodes})
    page = open_page(live, "trees")
    page.locator(".node", has_text="second").wait_for()
    assert page.locator(".node .label").all_text_contents() == [HTML, "second"] and is_clean(page)
    assert page.locator("li li .node .score").text_content() == "0.50"
    nodes.append({"id": "c", "parent": "b", "label": "third", "score": 0.75, "fate": "accepted"})
    live.post("/v1/trees", {"name": "search", "nodes": nodes})
    page.locator("li li li .node.accepted", has_text="third").wait_for()
    live.http.delete("/v1/trees/search")


def test_samples_of_a_prompt_are_a_tree_of_what_they_share(open_page, live):
    page = open_page(live, "trees")
    page.get_by_label("Samples", exact=True).fill("5")
    page.get_by_label("Most tokens").fill("12")
    page.get_by_role("button", name="Sample", exact=True).click()
    page.get_by_text("A score is the mean").wait_for()
    leaves = page.evaluate(
        "[...document.querySelectorAll('.tree li')].filter(li => !li.querySelector('li'))"
        ".map(li => parseInt(li.querySelector('.label').textContent))"
    )
    ends = page.locator(".node.ended").count()
    assert sum(leaves) == 5 and 1 <= len(leaves) <= ends
    top = page.locator(".outline > li > ul > li > .node .label").all_text_contents()
    assert sum(int(text.split()[0]) for text in top) == 5


def test_the_engine_shows_a_request_while_it_runs(open_page, live):
    page = open_page(live, "engine")
    page.get_by_text("No request runs now").wait_for()
    body = {"prompt": "1. 17 + 25", "max_tokens": 6000, "ignore_eos": True, "agent_id": "<i>maths"}
    thread = threading.Thread(target=live.post, args=("/v1/completions", body))
    thread.start()
    page.get_by_role("cell", name="<i>maths").wait_for()
    assert page.locator(".dot").count() == 8 and page.locator(".dot.decoding").count() >= 1
    assert is_clean(page)
    thread.join()
    page.get_by_text("No request runs now").wait_for()


# Keys, and the rules of the page.


def test_a_key_is_asked_for_and_a_wrong_one_again(open_page):
    with served(ScriptedEngine(answers=["Hello."]), api_keys=("secret",)) as made:
        page = open_page(made)
        for key in ("wrong", "secret"):
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use this key").click()
        say(page, "Hi")
        page.locator(".message.assistant", has_text="Hello.").wait_for()
        assert all("401" in each for each in open_page.errors)
        open_page.errors.clear()


def test_no_program_runs_but_those_of_the_page(open_page, scripted):
    page = open_page(scripted)
    page.evaluate(
        "const made = document.createElement('script'); made.textContent = 'window.hacked = 3';"
        "document.body.append(made)"
    )
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in each for each in open_page.errors)
    open_page.errors.clear()


def test_nothing_is_asked_of_another_host(open_page, live):
    page, hosts = open_page(live), set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    for view in ("workers", "cache", "trees", "engine", "chat"):
        page.goto(f"{live.url}/#{view}")
        page.reload()
        page.wait_for_timeout(200)
    assert hosts == {live.url.removeprefix("http://")}
