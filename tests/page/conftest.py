"""A browser, a server of the embedded model, and pages that must tell no error."""

import os
import shutil
from pathlib import Path

import pytest

from jaxshare.models import EMBEDDED, load
from jaxshare.serving.engine import Engine
from tests.paths import ROOT
from tests.serving.http.served import served

SHOTS = ROOT / "build" / "page"


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    for item in items:
        if item.path.parent == folder:
            item.add_marker(pytest.mark.page)


@pytest.fixture(scope="session")
def browser():
    """Chromium: the program that $CHROMIUM names, or one of the path."""
    from playwright.sync_api import sync_playwright

    program = (
        os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    )
    assert program, "there is no Chromium; install it (apt-get install chromium) or set $CHROMIUM"
    SHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        # Containers often run as root, where Chromium has no sandbox of its own.
        made = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
def live(tmp_path_factory):
    """A server of the embedded model."""
    folder = str(tmp_path_factory.mktemp("sessions"))
    with (
        Engine(load(EMBEDDED), max_rows=8, max_queue=64) as engine,
        served(engine, show_texts=True, sessions_folder=folder) as made,
    ):
        yield made


@pytest.fixture
def open_page(browser):
    """Opens pages; each must have told no error in the end."""
    contexts, errors = [], []

    def opened(server, view="chat", **settings):
        context = browser.new_context(
            **{"viewport": {"width": 1200, "height": 900}, "reduced_motion": "reduce", **settings}
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.set_default_timeout(60_000)
        page.goto(f"{server.url}/#{view}")
        return page

    opened.errors = errors  # type: ignore[attr-defined]
    yield opened
    for context in contexts:
        context.close()
    assert errors == []
