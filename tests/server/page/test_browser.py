"""The page in a real browser: what is shown, by pointer, by keyboard, and to a screen reader."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from radixkv.decoding import SamplingParams
from radixkv.engine import Request, TokenDelta
from radixkv.llm import LLM
from radixkv.server.service import Service

Serve = Callable[..., tuple[str, Service]]


class Page:
    """The page as a user has it."""

    def __init__(self, chrome: webdriver.Chrome) -> None:
        self.chrome = chrome

    def open(self, url: str) -> None:
        self.chrome.get(f"{url}/")
        self.until(lambda: self.one("#connection").get_attribute("data-state") != "connecting")

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def js(self, code: str, *arguments: object) -> Any:
        return self.chrome.execute_script(code, *arguments)

    def until(self, good: Callable[[], Any]) -> Any:
        """Wait; what was drawn anew while it was looked at is looked at again."""
        redrawn = [StaleElementReferenceException]
        wait = WebDriverWait(self.chrome, 20, 0.05, ignored_exceptions=redrawn)
        return wait.until(lambda _: good())

    def click_drawn(self, selector: str) -> None:
        """Click on what may be drawn anew between being found and clicked."""
        self.until(lambda: self.one(selector).click() or True)

    def press(self, *keys: str) -> None:
        ActionChains(self.chrome).send_keys(*keys).perform()

    def names(self, kind: str) -> list[str]:
        """What a screen reader says of the tree's items of a kind, in order."""
        code = (
            "return [...document.querySelectorAll(`#tree .${arguments[0]}:not(.leaving)`)]"
            ".map((item) => item.getAttribute('aria-label'))"
        )
        names: list[str] = self.js(code, kind)
        return names

    def focused(self) -> str:
        name: str | None = self.js("return document.activeElement.getAttribute('aria-label')")
        return name or ""

    def complaints(self) -> list[str]:
        """What stands in the console, but for a refusal for want of a key."""
        log = self.chrome.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in log if "401" not in entry["message"]]


@pytest.fixture
def page(chrome: webdriver.Chrome) -> Iterator[Page]:
    """Leaves its server before that ends; whatever is said in the console is a fault."""
    its = Page(chrome)
    its.complaints()
    yield its
    said = its.complaints()
    chrome.get("about:blank")
    assert said == []


def run(service: Service, text: str, **settings: Any) -> Any:
    """A request, begun on the server's own loop."""
    loop = service.worker._loop
    assert loop is not None

    async def begin() -> Any:
        prompt = await service.on_texts(lambda llm: llm.tokenize(text))
        params = SamplingParams(temperature=0, ignore_eos=True, **settings)
        return await service.worker.submit(prompt, params, request_id=text[:8])

    return asyncio.run_coroutine_threadsafe(begin(), loop).result(30)


class Slow:
    """An observer that keeps steps as long as a real model's, so that there is time to look."""

    def stepped(self, llm: LLM, deltas: list[TokenDelta], seconds: float) -> None:
        time.sleep(0.02)

    def ended(self, request: Request) -> None:
        """Nothing of it is wanted."""


def finish(service: Service, answer: Any) -> None:
    loop = service.worker._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(answer.end(), loop).result(60)


def fill(service: Service, num_nodes: int) -> None:
    """Many nodes, as deep as wide, of blocks that nobody ever reads."""

    def work(llm: LLM) -> None:
        rng = random.Random(0)
        cache = llm.cache
        texts = [[rng.randrange(30, 90) for _ in range(32)] for _ in range(12)]
        while sum(1 for _ in cache.tree.nodes()) < num_nodes:
            for _ in range(20):
                kept = rng.choice(texts)
                text = kept[: rng.choice((16, 32))] + [rng.randrange(30, 90) for _ in range(16)]
                sequence = cache.acquire(text)
                cache.commit(sequence)
                cache.release(sequence)
                texts.append(text)

    loop = service.worker._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(service.worker.call(work), loop).result(60)


def test_the_tree_grows_while_a_request_streams(serve: Serve, page: Page) -> None:
    url, service = serve()
    page.open(url)
    assert page.chrome.title == "tiny · radixkv"
    assert page.one("#tree-empty").is_displayed()
    service.worker._observers.append(Slow())
    page.js(
        "const count = document.querySelector('#count-both'); window.seen = [];"
        "new MutationObserver(() => window.seen.push(Number(count.textContent)))"
        ".observe(count, {childList: true})"
    )
    # Two blocks to the token: a third, half full, would be shown in the prompt's step alone.
    answer = run(service, "once upon a time there was a yew", max_tokens=161)
    page.until(lambda: page.names("holder"))
    assert "; sequence once upo, " in page.names("holder")[0]
    first = page.until(lambda: page.names("node"))[0]
    assert first.startswith("once upon a time there w;")
    assert "held by 1 sequence" in first
    page.until(lambda: page.one("#running").text == "1 running")
    finish(service, answer)
    page.until(lambda: not page.names("holder"))
    page.until(lambda: page.one("#running").text == "0 running")
    assert "in 12 blocks, held by nobody" in page.names("node")[0]
    grown = [count for count in page.js("return window.seen") if count]
    assert len(set(grown)) >= 3
    assert grown == sorted(grown)
    page.until(lambda: page.one("#tokens-note").text == "161 generated in all")
    assert page.one("#ttft").text.endswith("ms")
    assert page.one("#itl").text.endswith("ms")
    page.until(lambda: page.one("#count-cached").text == "12")
    assert page.one("#count-free").text == "244"


def test_what_is_shared_and_what_parts_is_drawn_so(serve: Serve, page: Page) -> None:
    url, service = serve()
    for end in ("left", "right"):
        finish(service, run(service, f"{'a common beginning ' * 3}{end} {end * 8}", max_tokens=1))
    page.open(url)
    trunk, *branches = page.until(lambda: len(page.names("node")) == 3 and page.names("node"))
    assert trunk.startswith("a common beginning a com; 48 tokens in 3 blocks")
    levels = [item.get_attribute("aria-level") for item in page.all("#tree .node")]
    assert levels == ["2", "3", "3"]
    assert all("held by nobody" in name for name in branches)
    rows = page.js(
        "return [...document.querySelectorAll('#tree .node')]"
        ".map((item) => /,([\\d.]+)/.exec(item.getAttribute('transform'))[1])"
    )
    assert rows[0] == rows[1] != rows[2]


def test_pointing_at_a_node_shows_its_tokens(serve: Serve, page: Page) -> None:
    url, service = serve()
    text = "what this node says stands in a box beside the pointer"
    finish(service, run(service, text, max_tokens=1))
    page.open(url)
    page.until(lambda: page.names("node"))
    ActionChains(page.chrome).move_to_element(page.one("#tree .node .bar")).perform()
    page.until(lambda: text in page.js("return document.querySelector('#tip').textContent"))
    assert "held by" in page.one("#tip").text
    page.click_drawn("#tree .node .bar")
    page.until(lambda: page.js("return document.querySelector('#detail-tokens').textContent"))
    spans = page.all("#detail-tokens span")
    assert len(spans) == len(text)
    assert page.one("#tree .node").get_attribute("aria-selected") == "true"
    edges = page.js(
        "return [...document.querySelectorAll('#detail-tokens span')]"
        ".flatMap((span, at) => span.className === 'edge' ? [at + 1] : [])"
    )
    assert edges == [16, 32, 48]


def test_why_blocks_left_is_told(serve: Serve, page: Page) -> None:
    url, service = serve(num_blocks=12)
    for letter in "abcd":
        finish(service, run(service, letter * 48, max_tokens=8))
    page.open(url)
    evicted = page.until(lambda: page.all("#removed .badge.evicted"))
    assert "unused for" in evicted[0].find_element(By.XPATH, "..").text
    assert "evicted" in page.one("#removed-note").text


def test_the_tree_is_walked_by_keyboard(serve: Serve, page: Page) -> None:
    url, service = serve()
    for end in ("left", "right"):
        finish(service, run(service, f"{'a common beginning ' * 3}{end} {end * 8}", max_tokens=1))
    page.open(url)
    page.until(lambda: len(page.names("node")) == 3)
    assert len(page.all("#tree [tabindex='0']")) == 1
    page.js("document.querySelector('#zoom-in').focus()")
    page.press(Keys.TAB)
    assert page.focused() == "namespace root"
    page.press(Keys.ARROW_DOWN)
    assert page.focused().startswith("a common beginning")
    page.press(Keys.ARROW_LEFT)  # folds
    page.until(lambda: len(page.names("node")) == 1)
    assert page.js("return document.activeElement.getAttribute('aria-expanded')") == "false"
    page.press(Keys.ARROW_RIGHT)  # unfolds
    page.until(lambda: len(page.names("node")) == 3)
    page.press(Keys.ARROW_RIGHT)  # to the first child
    first = page.focused()
    assert first == page.names("node")[1]
    page.press(Keys.END)
    assert page.focused() == page.names("node")[2]
    page.press(Keys.ARROW_UP)
    assert page.focused() == first
    page.press(Keys.ENTER)
    page.until(lambda: page.all("#detail-tokens span"))
    page.press(Keys.ARROW_LEFT)
    assert page.focused() == page.names("node")[0]
    page.press(Keys.HOME)
    assert page.focused() == "namespace root"
    page.press("/", "a common", Keys.ENTER)
    assert page.focused().startswith("a common beginning")
    assert page.one("#tree-note").text == "1 found"
    assert len(page.all("#tree [tabindex='0']")) == 1


def test_focus_stays_while_the_tree_changes(serve: Serve, page: Page) -> None:
    url, service = serve()
    finish(service, run(service, "the one that is looked at, all the time", max_tokens=1))
    page.open(url)
    page.until(lambda: page.names("node"))
    page.js("document.querySelector('#zoom-in').focus()")
    page.press(Keys.TAB, Keys.ARROW_DOWN)
    finish(service, run(service, "another that comes meanwhile and stays", max_tokens=1))
    page.until(lambda: len(page.names("node")) >= 2)
    assert page.focused().startswith("the one that is looked a")


def test_a_thousand_nodes_fold_search_and_zoom(serve: Serve, page: Page) -> None:
    url, service = serve(num_blocks=2048)
    fill(service, 1100)
    page.open(url)
    page.until(lambda: page.one("#tree-note").text.startswith("1,000 nodes, "))
    assert len(page.names("node")) == 120
    assert any("more branches, Enter shows them" in name for name in page.names("more"))
    page.one("#expand").click()
    page.until(lambda: len(page.names("node")) == 1000)
    # Where they come to rest; some are still on their way.
    boxes = page.js(
        "return [...document.querySelectorAll('#tree .item:not(.leaving)')].map((item) =>"
        " [...item.getAttribute('transform').matchAll(/[\\d.]+/g)].map(Number)"
        ".concat(Number(item.querySelector('.bar').getAttribute('width'))))"
    )
    rows: dict[float, list[tuple[float, float]]] = {}
    for x, y, width in boxes:
        rows.setdefault(y, []).append((x, x + width))
    for row in rows.values():
        row.sort()
        assert all(end < begin for (_, end), (begin, _) in itertools.pairwise(row))
    assert min(second - first for first, second in itertools.pairwise(sorted(rows))) == 27
    page.one("#zoom-out").click()
    assert (
        page.js("return document.querySelector('#tree .bar').getBoundingClientRect().height") < 19
    )
    page.one("#zoom-fit").click()
    label = page.names("node")[-1].split(";")[0]
    page.one("#search").send_keys(label[:12], Keys.ENTER)
    page.until(lambda: label[:12] in page.focused())
    page.one("#expand").click()
    page.until(lambda: len(page.names("node")) < 200)


def test_finds_are_walked_and_can_be_read(serve: Serve, page: Page) -> None:
    url, service = serve()
    for text in ("a lighthouse at night", "the lighthouse keeper", "nothing of the kind"):
        finish(service, run(service, text, max_tokens=1))
    page.open(url)
    page.until(lambda: len(page.names("node")) == 3)
    for _ in range(5):
        page.one("#zoom-out").click()
    assert not page.one("#tree .label").is_displayed()
    page.one("#search").send_keys("lighthouse", Keys.ENTER)
    assert page.one("#tree-note").text == "2 found"
    assert page.one("#tree .label").is_displayed()
    first = page.focused()
    page.press("n")
    second = page.focused()
    assert {first[:6], second[:6]} == {"a ligh", "the li"}
    page.press("n")
    assert page.focused() == first
    page.press("N")
    assert page.focused() == second


def test_an_empty_page_says_what_will_stand_there(serve: Serve, page: Page) -> None:
    url, service = serve(num_blocks=12)
    page.open(url)
    page.until(lambda: page.one("#pool-note").text == "0.0 % of 12 blocks held")
    assert page.one("#tree-empty").is_displayed()
    assert page.one("#removed-empty").is_displayed()
    for letter in "abcd":
        finish(service, run(service, letter * 64, max_tokens=1))
    page.until(lambda: page.all("#removed li"))
    assert not page.one("#tree-empty").is_displayed()
    assert not page.one("#removed-empty").is_displayed()
    # What is only cached can be taken at any time: nobody holds it.
    assert page.one("#pool-note").text == "0.0 % of 12 blocks held"


def faults(page: Page, axe: str) -> list[str]:
    """What axe finds that is serious or critical."""
    page.js(axe)
    found = page.chrome.execute_async_script(
        "axe.run(document, {resultTypes: ['violations']}).then(arguments[0])"
    )
    return [
        f"{its['impact']} {its['id']}: {node['target']} {node['failureSummary']}"
        for its in found["violations"]
        if its["impact"] in ("serious", "critical")
        for node in its["nodes"]
    ]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_no_serious_fault(serve: Serve, page: Page, axe: str, theme: str) -> None:
    url, service = serve(num_blocks=24)
    for letter in "abcd":
        finish(service, run(service, letter * 48, max_tokens=8))
    running = run(service, "this one is running meanwhile", max_tokens=300)
    # The page's own policy allows no foreign script; the check alone is let past it.
    page.chrome.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    try:
        page.open(url)
        page.until(lambda: page.names("holder") and page.all("#removed li"))
        page.click_drawn("#tree .node .bar")
        while page.one("#theme-name").text != theme:
            page.one("#theme").click()
        scheme = "return getComputedStyle(document.documentElement).colorScheme"
        assert page.js(scheme) == theme
        finish(service, running)
        assert faults(page, axe) == []
    finally:
        page.js("localStorage.clear()")
        page.chrome.execute_cdp_cmd("Page.setBypassCSP", {"enabled": False})


def test_dark_as_the_system_is(serve: Serve, page: Page) -> None:
    url, _ = serve()
    ground = "return getComputedStyle(document.body).backgroundColor"
    grounds = []
    for value in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": value}]
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        page.open(url)
        grounds.append(page.js(ground))
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds == ["rgb(246, 247, 248)", "rgb(16, 19, 23)"]


def test_a_protected_page_asks_for_the_key(serve: Serve, page: Page) -> None:
    url, service = serve(api_keys=("right",), protect_page=True)
    finish(service, run(service, "only for those who have the key", max_tokens=1))
    page.open(url)
    field = page.until(lambda: page.one("#key").is_displayed() and page.one("#key"))
    assert page.names("node") == []
    field.send_keys("wrong", Keys.ENTER)
    page.until(lambda: page.one("#key").is_displayed() and not page.js("return key.value"))
    page.one("#key").send_keys("right", Keys.ENTER)
    page.until(lambda: page.names("node"))
    assert page.one("#connection").text == "live"
    page.js("sessionStorage.clear()")


def test_a_chat_forks_into_four_and_joins(serve: Serve, page: Page) -> None:
    url, service = serve(1024)
    service.worker._observers.append(Slow())
    page.open(url)
    page.one("#play-text").clear()
    page.one("#play-text").send_keys("Say something that may go four ways.", Keys.ENTER)
    page.until(lambda: len(page.names("holder")) == 4)
    trunk = page.until(lambda: [name for name in page.names("node") if "by 4 seq" in name])
    assert len(trunk) == 1
    page.until(lambda: len(page.all(".keep")) == 4)
    texts = [card.text for card in page.all("#play-branches .text")]
    assert all(texts)
    assert page.one("#play-go").text == "Join the likeliest"
    page.all(".keep")[2].click()
    page.until(lambda: page.all("#play-branches .won"))
    assert page.all("#play-branches li").index(page.one("#play-branches .won")) == 2
    page.until(lambda: len(page.names("holder")) == 1)
    page.until(lambda: any("ephemeral" in name for name in page.names("node")))
    page.one("#play-text").send_keys("And on.", Keys.ENTER)
    page.until(lambda: len(page.all(".keep")) == 4)
    page.one("#play-go").click()
    page.until(lambda: page.all("#play-branches .won"))
    assert len(page.all("#play-said li")) == 4
    page.one("#play-new").click()
    page.until(lambda: not page.names("holder"))
    assert page.one("#play-said").text == ""


def test_who_leaves_the_playground_leaves_nothing(serve: Serve, page: Page) -> None:
    url, service = serve(1024)
    service.worker._observers.append(Slow())
    page.open(url)
    page.one("#play-go").click()
    page.until(lambda: len(page.names("holder")) == 4)
    page.chrome.get("about:blank")
    loop = service.worker._loop
    assert loop is not None

    def num_sequences() -> int:
        call = service.worker.call(lambda llm: len(llm.cache.sequences))
        return asyncio.run_coroutine_threadsafe(call, loop).result(30)

    page.until(lambda: num_sequences() == 0)
