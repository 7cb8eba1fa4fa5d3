"""How the page looks: no view is too wide, every text can be read, and the keyboard reaches all."""

import pytest

from tests.page.conftest import SHOTS
from tests.page.test_views import begin, end, say
from tests.paths import ROOT

LOOKS = (ROOT / "tests" / "page" / "looks.js").read_text(encoding="utf-8")
VIEWS = ("chat", "workers", "cache", "trees", "engine")
WIDTHS = {360: 740, 1600: 1000}


def fill(page, live, view):
    """Brings a view into a state in which all of its parts are seen."""
    if view == "chat":
        page.get_by_text("Settings").click()
        page.get_by_label("Most tokens").fill("40")
        say(page, "What is 17 + 25? " + "x" * 300)
        page.get_by_text("were cached").wait_for()
    elif view == "workers":
        begin(page, Names="Ann, Ben, Cid, Dan", Budget="6000", Ends="never", Temperature="2")
        page.get_by_role("button", name="Pause all").click()
        page.get_by_label("Words to all workers").fill("y" * 200)
        page.get_by_role("button", name="Say").click()
        page.locator(".card.person").wait_for()
        page.get_by_role("button", name="Answer as it stands").click()
        page.locator(".answer").wait_for()
        page.get_by_text("New session").click()
    elif view == "trees":
        page.get_by_label("Most tokens").fill("24")
        page.get_by_role("button", name="Sample", exact=True).click()
        page.get_by_text("A score is the mean").wait_for()
    elif view == "cache":
        page.locator("tbody tr").first.wait_for()
    else:
        page.locator(".tile").first.wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_and_its_texts_can_be_read(open_page, live, view, width, scheme):
    live.post("/v1/completions", {"prompt": "1. 17 + 25", "max_tokens": 4})
    viewport = {"width": width, "height": WIDTHS[width]}
    page = open_page(live, view, viewport=viewport, color_scheme=scheme)
    page.evaluate(LOOKS)
    fill(page, live, view)
    page.screenshot(path=SHOTS / f"{view}-{scheme}-{width}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    read = page.evaluate("looks.contrast()")
    assert read["found"] == [] and read["count"] > 15
    assert page.evaluate("looks.nameless()") == []
    if view == "workers":
        end(page)


def test_the_measure_of_contrast_finds_what_is_too_faint(open_page, live):
    page = open_page(live)
    page.evaluate(LOOKS)
    page.evaluate(
        "const p = document.createElement('p'); p.textContent = 'faint words';"
        "p.style.color = '#999'; document.querySelector('main').append(p)"
    )
    assert ["faint words" in each for each in page.evaluate("looks.contrast()")["found"]] == [True]


@pytest.mark.parametrize("view", VIEWS)
def test_the_keyboard_reaches_everything_and_shows_where_it_is(open_page, live, view):
    page = open_page(live, view)
    page.evaluate(LOOKS)
    page.wait_for_timeout(300)
    usable = set(page.evaluate("looks.usable()"))
    assert len(usable) >= 6
    page.evaluate("document.activeElement.blur(); document.querySelector('.skip').focus()")
    reached = set()
    for _ in range(3 * len(usable)):
        at = page.evaluate("looks.focused()")
        if at["number"] is not None:
            assert at["seen"], at
            reached.add(at["number"])
        page.keyboard.press("Tab")
    assert usable - reached == set()


def test_the_keyboard_alone_can_chat_and_change_the_view(open_page, live):
    page = open_page(live)
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("What is 17 + 25?")
    page.keyboard.press("Enter")
    page.locator(".message.assistant").wait_for()
    page.evaluate("document.querySelector('.skip').focus()")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Workers").wait_for()
    assert page.get_by_role("link", name="Workers").get_attribute("aria-current") == "page"


def test_steps_fly_only_where_motion_is_welcome(open_page, live):
    flown = {}
    for motion in ("reduce", "no-preference"):
        page = open_page(live, "workers", reduced_motion=motion)
        page.evaluate(
            "window.flown = 0; new MutationObserver(all => all.forEach(one => "
            "one.addedNodes.forEach(node => { if (node.classList?.contains('ghost')) "
            "window.flown += 1 }))).observe(document.body, { childList: true })"
        )
        begin(page, Names="Ann, Ben", Budget="120")
        page.get_by_text("Ended ").first.wait_for()
        page.locator(".card").nth(1).wait_for()
        flown[motion] = page.evaluate("window.flown")
        end(page)
    assert flown["reduce"] == 0 and flown["no-preference"] >= 2
