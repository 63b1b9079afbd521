"""The page of the server in a headless browser: tokens arrive, drafts are marked, figures run, errors are shown."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import pytest

for missing in ("fastapi", "uvicorn", "prometheus_client", "openai"):
    pytest.importorskip(missing, reason='pip install ".[serve,test]"')
playwright = pytest.importorskip("playwright.sync_api", reason='pip install ".[browser]"')

from eagle_triton import EAGLEConfig, EAGLEInference, EaModel
from eagle_triton.serve.app import PAGE
from tests.test_serve import PROMPT, serving

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell", "msedge")


def browser_path() -> str | None:
    """A Chromium on the path."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        path = browser_path() or started.chromium.executable_path
        if not os.path.exists(path):
            pytest.skip("no Chromium here: playwright install chromium")
        found = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def inference() -> EAGLEInference:
    return EAGLEInference(None, EaModel.from_pretrained("demo"), EAGLEConfig(slots=2, fallback=False))


@pytest.fixture
def server(inference):
    with serving(inference) as running:
        yield running


@pytest.fixture
def page(browser, server) -> Iterator:
    opened = browser.new_page(viewport={"width": 1000, "height": 820})
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    home = (f"http://127.0.0.1:{server.client.port}/", "data:")
    opened.on("request", lambda request: None if request.url.startswith(home) else problems.append(request.url))
    opened.goto(f"http://127.0.0.1:{server.client.port}/")
    yield opened
    opened.close()
    assert problems == []


def ask(page, prompt: str, **fields: str) -> None:
    page.fill("#prompt", prompt)
    for name, value in fields.items():
        page.fill(f"#{name}", value)
    page.click("#start")


def test_an_answer_with_its_drafts(page, server):
    page.wait_for_function("document.querySelector('#model').textContent !== ''")
    assert page.inner_text("#model") == "demo, 512 tokens of prompt and answer"
    want = server.client.complete(max_tokens=60)
    ask(page, PROMPT, max_tokens="60")
    page.wait_for_function("document.querySelector('#start').disabled === false && document.querySelector('#bars div')")
    assert page.evaluate("document.querySelector('#answer').textContent") == PROMPT + want.choices[0].text
    assert page.inner_text("#tokens") == "60"
    drafted = page.locator("#answer .model").count()
    accepted, proposed = map(int, page.inner_text("#accepted").split(" of "))
    assert 0 < drafted <= accepted < proposed
    assert 1 < float(page.inner_text("#tau")) < 5 and page.inner_text("#first").endswith(" ms")
    assert re.fullmatch(r"eagle: \d+ steps, \d+ of \d+ drafts accepted", page.inner_text("#drafters"))
    assert page.locator("#bars div").count() > 1


def test_stop_frees_the_slot(page, server):
    ask(page, PROMPT, max_tokens="400", temperature="1", seed="3")
    page.wait_for_function("Number(document.querySelector('#tokens').textContent) > 5")
    assert server.engine._live
    assert re.match(r"eagle: \d+ steps", page.inner_text("#drafters")) and page.locator("#bars div").count() > 0  # live
    page.click("#stop")
    page.wait_for_function("document.querySelector('#start').disabled === false")
    page.wait_for_timeout(500)
    assert not server.engine._live and page.is_hidden("#problem")


def test_a_message_and_what_is_refused(page):
    page.select_option("#kind", "chat")
    ask(page, "import os", max_tokens="8")
    page.wait_for_function("document.querySelector('#tokens').textContent === '8'")
    ask(page, "x " * 600, max_tokens="8")
    page.wait_for_selector("#problem:not([hidden])")
    assert "maximum context length is 512 tokens" in page.inner_text("#problem")
    ask(page, "<b>&amp;", max_tokens="2")  # text stays text
    page.wait_for_function("document.querySelector('#start').disabled === false")
    assert page.locator("#answer b").count() == 0


def test_a_key(browser, inference):
    with serving(inference, api_key="secret") as running:
        page = browser.new_page()
        page.goto(f"http://127.0.0.1:{running.client.port}/")
        page.wait_for_function("document.querySelector('#model').textContent === 'a key is needed'")
        page.fill("#key", "secret")
        page.locator("#key").blur()
        page.wait_for_function("document.querySelector('#model').textContent.startsWith('demo')")
        page.close()


def test_the_page_fetches_nothing_from_elsewhere():
    text = PAGE.read_text(encoding="utf-8")
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", text.replace("data:,", ""))
