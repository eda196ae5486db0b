"""The page in a browser: what it shows is compared with the API's own answers."""

import asyncio
import json
import re
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from fastapi import FastAPI
from playwright.sync_api import sync_playwright

from jaxinfer.config import SamplingParams
from jaxinfer.openai.errors import RefusedError
from jaxinfer.serve.access import Client
from jaxinfer.serve.bodies import BodyRoute
from jaxinfer.serve.page_routes import MAX_CHARACTERS, MAX_SECONDS, add_page_routes
from jaxinfer.serve.refusals import refusal_response
from jaxinfer.serve.static_page import PATHS
from tests.engine.engines import small_async_engine
from tests.serve.servers import serving, with_key

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LONG_SEED = "9007199254740993"  # 2^53 + 1, which no number of JavaScript is
KEY = "a key of the page's own tests"
CHAT = "**/v1/chat/completions"
DEFAULTS = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium is on the path; on Debian: apt-get install chromium")
    return CHROMIUM


@pytest.fixture(scope="module")
def address_with_keys(chromium, checkpoint, tmp_path_factory):
    """A server with keys, whose model has defaults of its own."""
    client = Client(digest=sha256(KEY.encode()).digest(), tenant="ann")
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("with-defaults") / "model")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **DEFAULTS}))
    with serving(small_async_engine(folder), clients=[client]) as (_, address):
        yield address


@pytest.fixture(scope="module")
def browser(chromium, address, address_with_keys):  # the servers end after it: they cannot while its event loop runs
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; in the end its console has to be free of errors, but for the expected ones.

    It asks no other host.
    """
    contexts, problems, expected = [], [], []

    def open_page(address, *, errors=(), **options):
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        contexts.append(context)
        expected.extend(errors)
        page = context.new_page()
        page.set_default_timeout(100_000)
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith((address, "blob:")) or problems.append(asked.url))
        page.goto(address)
        if not errors:
            page.wait_for_selector("#prompt:focus")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in problems if not any(part in text for part in expected)] == []


def set_up(page, pane=0, **values):
    if page.locator("#settings").is_hidden():
        page.click("#show-settings")
    settings = page.locator(".settings").nth(pane)
    for name, value in values.items():
        settings.locator(f"[name={name}]").fill(str(value))
    page.keyboard.press("Escape")  # a narrow page has them over its conversation


def compare(page):
    page.click("#show-settings")
    page.check("#compare")


def send(page, text, *, state="Done."):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    wait_for(page, state)


def wait_for(page, state="Done."):
    page.wait_for_selector(f"#state:text-is('{state}')")


def shown(page, nth=-1):
    return page.locator(".answer .plain").nth(nth).text_content()


def ask(http, path, **body):
    answer = http.post(path, json={"model": "small", "max_tokens": 8, **body}).raise_for_status()
    return answer.json()["choices"][0]


def chat(http, *turns, **body):
    """Returns the answer of the API to messages of the user and answers, by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return ask(http, "/v1/chat/completions", messages=messages, temperature=0, **body)["message"]["content"]


def answer_with(page, *deltas):
    """Lets the page's next chats be answered by some deltas, a token each; returns the bodies that it sends."""
    bodies = []
    events = [{"choices": [], "prompt_token_ids": [1, 2, 3]}]
    for delta in deltas:
        text = delta.get("content") or delta.get("reasoning_content") or ""
        row = {"token": text, "bytes": list(text.encode()), "logprob": -0.1, "top_logprobs": []}
        events.append({"choices": [{"delta": delta, "token_ids": [7], "logprobs": {"content": [row]}}]})
    events.append({"choices": [{"delta": {}, "token_ids": [], "engine_finish_reason": "stop", "seed": 5}]})
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"

    def fulfil(route):
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=stream)

    page.unroute_all()
    page.route(CHAT, fulfil)
    return bodies


def kept(page):
    """Returns all that the browser keeps of the conversations, as text."""
    return page.evaluate(
        "async () => JSON.stringify(await (await import('/page/store.js')).loadAll()) + JSON.stringify(localStorage)"
    )


def test_files_have_types_and_a_policy_and_are_sent_once(http):
    for path, name in PATHS.items():
        answer = http.get(path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        ending = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert answer.headers["content-type"].startswith(ending[name.rpartition(".")[2]])
        assert not re.search(r"(src|href|from|url)[=( ]*[\"']?(https?:)?//", answer.text)
        again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    for path in ("/page/", "/page/../app.py", "/page/%2e%2e/app.py", "/page/index.py"):
        assert http.get(path).status_code == 404


def test_conversation_is_that_of_the_api(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0.7, seed=LONG_SEED, max_tokens=8, system="be brief")
    send(page, "hello")
    send(page, "and now")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    sampling = {"temperature": 0.7, "seed": int(LONG_SEED)}
    first = ask(http, "/v1/chat/completions", messages=messages, **sampling)
    messages += [{"role": "assistant", "content": first["message"]["content"]}, {"role": "user", "content": "and now"}]
    second = ask(http, "/v1/chat/completions", messages=messages, **sampling)
    assert [shown(page, 0), shown(page, 1)] == [first["message"]["content"], second["message"]["content"]]
    assert f"seed {LONG_SEED}" in page.locator(".answer .about").first.text_content()


def test_answer_says_its_speed_and_its_context(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0, max_tokens=8)
    send(page, "hello")
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 8}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    about = page.locator(".answer .about").text_content()
    assert f"{usage['completion_tokens']} tokens · " in about
    assert re.search(r" · [1-9]\d*\.\d tokens/s · first after \d", about)
    assert f"context {usage['total_tokens']} of 96 · ended at its length limit" in about


# Markdown


class Elements(HTMLParser):
    """The elements of HTML, each with its attributes."""

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


TAGS = {
    *("p", "br", "em", "strong", "s", "code", "pre", "figure", "figcaption", "span", "blockquote", "hr", "a"),
    *("ul", "ol", "li", "h3", "h4", "h5", "h6", "div", "table", "thead", "tbody", "tr", "th", "td"),
}
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>\n\n<svg/onload=alert(1)>",
    "![a](https://example.org/a.png) ![b][b]\n\n[b]: https://example.org/b.png",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](&#106;avascript:alert(1)) [d](java\nscript:alert(1))",
    "[a](data:text/html,x) [b](vbscript:x) [c](file:///etc/passwd) [d](//example.org) [e](/v1/models) <ftp://a.b>",
    '<javascript:alert(1)> <https://example.org/"onmouseover=alert(1)>',
    '[a](https://example.org "x\\" onmouseover=\\"alert(1)") [b](<https://e.org/" onclick="x>)',
    "[r]\n\n[r]: javascript:alert(1)",
    '```"><script>alert(1)</script>\n</code></pre><script>alert(1)</script>\n```',
    "```html\n<script onload='a'>alert(1)</script>\n```\n\n    <script>\n",
    "| a | b |\n|:-:|--:|\n| <b onclick=a> | `</td><script>` |",
    "`<script>` **<b onclick=x>** # <i>\n# <script>\n> <script>\n- <iframe src=a>",
    "\x00 \u202e <\x00script>",
    ">" * 3000 + "a" + "\n" + "- " * 3000 + "b\n\n" + "> - 1. " * 2000,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_html_of_markdown_has_harmless_elements_alone(http, text):
    html = http.post("/page/markdown", json={"text": text}).raise_for_status().json()["html"]
    elements = Elements(html).found
    assert elements
    for tag, attributes in elements:
        assert tag in TAGS
        link = {"href", "title", "target", "rel"} if tag == "a" else set()
        assert attributes.keys() <= {"class", "tabindex", "start"} | link
        if tag == "a":
            assert re.match(r"https?://|mailto:", attributes["href"])
            assert "noopener" in attributes["rel"]


def test_markdown_is_that_of_commonmark_with_tables(http):
    def html(text):
        return http.post("/page/markdown", json={"text": text}).raise_for_status().json()["html"]

    assert html("a *b* **c** ~~d~~\ne") == "<p>a <em>b</em> <strong>c</strong> <s>d</s><br />\ne</p>\n"
    assert "<h3>a</h3>" in html("# a")
    assert '<th class="right">a</th>' in html("|a|\n|-:|\n|b|")
    code = "\n\ndef f(x):\n\treturn '<&>'  # é\n\n"
    figure = html(f"```python\n{code}```")
    assert "<figcaption>python</figcaption>" in figure
    assert '<span class="keyword">def</span>' in figure
    assert unescape(re.sub(r"<[^>]*>", "", figure.partition("<code>")[2])) == f"{code}\n"


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_CHARACTERS,
        "```perl\n" + "s{" * 9000,
        "|a" * 5000 + "\n" + "|-" * 5000 + "\n" + "|\n" * 40000,
    ],
    ids=["brackets", "code", "table"],
)
def test_markdown_is_bounded_in_time_and_holds_nothing_up(http, text):
    seconds = []

    def post():
        begin = time.monotonic()
        answers.append(httpx.post(f"{http.base_url}/page/markdown", json={"text": text}, timeout=60))
        seconds.append(time.monotonic() - begin)

    answers = []
    thread = threading.Thread(target=post)
    thread.start()
    waits = []
    while thread.is_alive():
        begin = time.monotonic()
        assert http.get("/health").status_code == 200
        waits.append(time.monotonic() - begin)
        time.sleep(0.02)
    thread.join()
    assert answers[0].status_code == 200 or "too long" in answers[0].json()["error"]["message"]
    assert seconds[0] < 10 * MAX_SECONDS  # of a machine that does more at the same time
    assert max(waits) < 1.0


def test_html_of_markdown_is_not_much_longer_than_its_text(http):
    def post(text):
        return http.post("/page/markdown", json={"text": text})

    repeated = "[a]: http://" + "x" * 50_000 + "\n\n" + "[a]" * 1000
    cells = "|a" * 500 + "\n" + "|-" * 500 + "\n" + "|\n" * 120

    assert len(post(repeated).raise_for_status().json()["html"]) < 2 * len(repeated)
    assert "too many for its" in post(cells).json()["error"]["message"]
    assert post("```python\n" + "1+" * 2000).raise_for_status()


def test_bad_markdown_bodies_and_foreign_pages_are_refused(http):
    too_long = http.post("/page/markdown", json={"text": "a" * (MAX_CHARACTERS + 1)})
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "text")
    assert str(MAX_CHARACTERS) in too_long.json()["error"]["message"]
    for body in ({}, {"text": 1}, {"text": "a", "more": 1}, []):
        assert http.post("/page/markdown", json=body).status_code == 400
    headers = {"Origin": "https://example.org"}
    assert http.post("/page/markdown", json={"text": "a"}, headers=headers).status_code == 403


def test_server_without_the_renderer_says_so_and_serves_the_rest(monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    app = FastAPI()
    app.router.route_class = BodyRoute

    @app.exception_handler(RefusedError)
    async def refused(_, error):
        return refusal_response(error)

    state: Any = SimpleNamespace(llm=SimpleNamespace(default_sampling_params=SamplingParams(), max_model_len=96))
    add_page_routes(app, state)

    async def answers():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as client:
            return await client.get("/page/model"), await client.post("/page/markdown", json={"text": "a"})

    with ThreadPoolExecutor() as threads:  # the browser's driver has a loop on this one
        model, markdown = threads.submit(asyncio.run, answers()).result()
    assert model.json()["renders_markdown"] is False
    assert markdown.status_code == 501
    assert "markdown-it-py" in markdown.json()["error"]["message"]


IS_AT_END = """() => {
  const { scrollHeight, scrollTop, clientHeight } = document.querySelector(".transcript");
  return scrollHeight > clientHeight && scrollHeight - scrollTop - clientHeight < 2;
}"""


def test_answer_is_shown_as_markdown_and_copied(open_page, address, http, stays_idle):
    page = open_page(address, viewport={"width": 1200, "height": 400})
    code = "def f():\n    return '<b>'\n"
    text = f"**bold** [link](https://example.org)\n\n- one\n- two\n\n|a|b|\n|-|-|\n|1|2|\n\n```python\n{code}```\n"
    text += "<img src=x onerror=alert(1)>\n\n<script>alert(2)</script> [bad](javascript:alert(3))"
    answer_with(page, *({"content": piece} for piece in re.findall(r".{1,9}", text, re.DOTALL)))
    send(page, "hello")
    page.wait_for_selector(".formatted:has-text('bad')")
    page.wait_for_function(IS_AT_END)
    formatted = page.locator(".formatted")
    assert formatted.locator("strong").text_content() == "bold"
    assert formatted.locator("li").all_text_contents() == ["one", "two"]
    assert formatted.locator("td").all_text_contents() == ["1", "2"]
    assert formatted.locator("img, script, iframe").count() == 0
    assert [link.get_attribute("href") for link in formatted.locator("a").all()] == ["https://example.org"]
    assert formatted.locator("figcaption").text_content() == "python"
    formatted.locator("figure").get_by_label("Copy code").click()
    page.wait_for_selector("[title=Copied]")
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.locator(".answer").get_by_label("Copy answer").click()
    page.wait_for_function("async (text) => await navigator.clipboard.readText() === text", arg=text)
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")  # as without https
    page.evaluate("addEventListener('copy', () => (window.copied = getSelection().toString()), { once: true })")
    page.locator(".message").get_by_label("Copy message").click()
    page.wait_for_function("() => window.copied === 'hello'")


def test_markdown_is_asked_for_a_few_times_a_second(open_page, address, http, stays_idle):
    page = open_page(address)
    rendered = []
    page.on("request", lambda asked: asked.url.endswith("/page/markdown") and rendered.append(asked.post_data_json))
    set_up(page, temperature=0, max_tokens=80)
    begin = time.monotonic()
    send(page, "hello")
    seconds = time.monotonic() - begin
    expected = http.post("/page/markdown", json={"text": shown(page)}).json()["html"]
    page.wait_for_function(
        """(html) => {
            const wanted = document.createElement('div');
            const found = document.querySelector('.formatted').cloneNode(true);
            wanted.innerHTML = html;
            for (const button of found.querySelectorAll('figure button')) button.remove();
            return wanted.innerHTML === found.innerHTML;
        }""",
        arg=expected,
    )
    assert rendered[-1] == {"text": shown(page)}
    assert len(rendered) <= 2 + seconds / 0.3


def test_answer_that_cannot_be_formatted_is_shown_as_it_is(open_page, address, http, stays_idle):
    page = open_page(address, errors=["400"])
    page.wait_for_selector("#prompt:focus")
    text = "a " * (MAX_CHARACTERS // 2) + "*b*"
    answer_with(page, {"content": text})
    send(page, "hello")
    page.wait_for_selector(".note:has-text('at most')")
    assert page.locator(".answer .plain").is_visible()
    assert shown(page) == text
    page.route(
        "**/page/model", lambda route: route.fulfill(json={**http.get("/page/model").json(), "renders_markdown": False})
    )
    page.goto(f"{address}/#")
    page.reload()
    page.wait_for_selector("#prompt:focus")
    answer_with(page, {"content": "*b*"})
    send(page, "hello")
    assert page.locator(".answer .plain").is_visible()
    assert page.locator(".note").is_hidden()


# Tokens

TIP_IS_BESIDE_ITS_TOKEN = """() => {
  const [token, tip] = [document.activeElement, document.getElementById("tip")].map((e) => e.getBoundingClientRect());
  return Math.min(Math.abs(tip.top - token.bottom), Math.abs(token.top - tip.bottom)) < 8;
}"""


def test_token_shows_its_alternatives_on_hover_and_focus(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0, max_tokens=4)
    send(page, "hello")
    rows = ask(
        http, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=4,
        logprobs=True, top_logprobs=4,
    )["logprobs"]["content"]  # fmt: skip
    tokens = page.locator(".token")
    assert tokens.count() == 0
    assert page.locator("#legend").is_hidden()
    page.select_option("#view", "tokens")
    assert page.locator("#legend").is_visible()
    assert page.locator(".formatted").is_hidden()
    assert tokens.all_text_contents() == [row["token"] for row in rows]
    tokens.first.hover()
    lines = page.locator("#tip tr")
    assert lines.count() == 4
    assert [lines.nth(i).locator("td").first.text_content() for i in range(4)] == [
        "␣" if top["token"] == " " else top["token"] for top in rows[0]["top_logprobs"]
    ]
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.textContent") == rows[1]["token"]
    assert page.locator("#tip").is_visible()
    page.set_viewport_size({"width": 1200, "height": 200})
    page.evaluate("document.querySelector('.transcript').scrollBy(0, -30)")
    page.wait_for_function(TIP_IS_BESIDE_ITS_TOKEN)


def test_fork_goes_on_from_the_tokens_before(open_page, address, http, stays_idle):
    page = open_page(address)
    page.select_option("#view", "tokens")
    set_up(page, temperature=0, max_tokens=8)
    send(page, "hello")
    whole = shown(page)
    set_up(page, repetition_penalty=1.8)  # so that the fork goes another way
    page.locator(".token").nth(3).click()
    page.wait_for_selector(".answer .about:has-text('Fork of token 4'):has-text('length')")
    wait_for(page)
    body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json={"model": "small", "max_tokens": 8, **body}).json()
    kept_ids = answer["choices"][0]["token_ids"][:3]
    prompt = answer["prompt_token_ids"] + kept_ids
    rest = ask(http, "/v1/completions", prompt=prompt, temperature=0, repetition_penalty=1.8)["text"]
    assert shown(page) == whole[:3] + rest
    page.get_by_label("Previous answer").click()
    assert shown(page) == whole
    page.get_by_label("Next answer").click()
    set_up(page, repetition_penalty="")
    send(page, "more")  # the conversation goes on with the fork
    assert shown(page) == chat(http, "hello", whole[:3] + rest, "more")


def test_reasoning_is_folded_and_calls_are_shown_and_answered(open_page, address, http, stays_idle):
    page = open_page(address)
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Basel"}'}}
    bodies = answer_with(
        page, {"reasoning_content": "Let me "}, {"reasoning_content": "think."}, {"content": "I ask."},
        {"tool_calls": [call]}, {"tool_calls": [rest]},
    )  # fmt: skip
    set_up(page, tools='[{"type": "function", "function": {"name": "weather"}}]')
    send(page, "hello")
    reasoning = page.locator(".reasoning")
    assert reasoning.locator("summary").text_content().startswith("Reasoning · 13 characters")
    assert reasoning.locator(".text").is_hidden()
    reasoning.locator("summary").click()
    assert reasoning.locator(".text").text_content() == "Let me think."
    assert page.locator(".call figcaption").text_content() == "Calls weather"
    assert page.locator(".call code").text_content() == '{\n  "city": "Basel"\n}'
    page.select_option("#view", "tokens")
    assert page.locator(".token.thought").all_text_contents() == ["Let me ", "think."]
    assert "".join(page.locator(".token").all_text_contents()) == "Let me think.I ask."
    send(page, "12 degrees")
    assert bodies[0]["tools"][0]["function"]["name"] == "weather"
    function = {"name": "weather", "arguments": '{"city": "Basel"}'}
    called = [{"id": "c1", "type": "function", "function": function}]
    assert bodies[1]["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I ask.", "tool_calls": called},
        {"role": "tool", "tool_call_id": "c1", "content": "12 degrees"},
    ]


# Messages


def test_stop_ends_the_request(open_page, address, stays_idle):
    page = open_page(address)
    set_up(page, json_schema='{"type": "string", "minLength": 60}')  # so that it does not end by itself
    page.evaluate("""() => new MutationObserver(() => {
        if (document.querySelector('.plain')?.textContent) document.getElementById('stop').click();
    }).observe(document.getElementById('panes'), {childList: true, subtree: true})""")
    send(page, "hello", state="Stopped.")
    assert "stopped" in page.locator(".answer .about").text_content()
    assert page.locator("#stop").is_hidden()
    assert page.locator("#send").is_visible()


def test_schema_holds_and_a_bad_one_is_refused_once(open_page, address, stays_idle):
    page = open_page(address, errors=["400"])
    page.wait_for_selector("#prompt:focus")
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    set_up(page, json_schema=json.dumps(schema), max_tokens=64)
    send(page, "hello")
    assert json.loads(shown(page))["a"] in (1, 2)
    set_up(page, json_schema="{nonsense")
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    assert "not JSON" in page.locator("#notice").text_content()
    assert page.input_value("#prompt") == "hello"  # it was not sent
    set_up(page, json_schema='{"type": "nonsense"}')
    send(page, "hello", state="Failed.")
    assert "nonsense" in page.locator(".answer .error").last.text_content()
    assert page.locator("#notice").is_hidden()


def test_failed_answer_is_tried_again_with_its_message(open_page, address, http, stays_idle):
    page = open_page(address, errors=["ERR_FAILED"])
    page.wait_for_selector("#prompt:focus")
    set_up(page, temperature=0, max_tokens=8)
    page.route(CHAT, lambda route: route.abort())
    send(page, "hello", state="Failed.")
    assert page.locator(".error:visible").all_text_contents() == ["the server does not answer; try again"]
    assert page.locator("#notice").is_hidden()
    assert page.locator(".message .text").text_content() == "hello"
    page.unroute_all()
    send(page, "instead")  # the failed turn is no part of the conversation
    assert shown(page) == chat(http, "instead")
    page.get_by_role("button", name="Retry").click()
    page.wait_for_function("() => document.querySelectorAll('.answer').length === 1")
    wait_for(page)
    assert shown(page) == chat(http, "hello")
    assert page.locator(".error:visible").count() == 0
    assert page.locator(".version").count() == 0  # it has taken the place of the one that failed


def test_answer_again_and_edited_message_lose_nothing(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0, max_tokens=8)
    send(page, "hello")
    send(page, "and now")
    second = shown(page)
    set_up(page, repetition_penalty=1.8)
    page.get_by_label("Answer again").last.click()
    page.wait_for_selector(".answer .version:text-is('2 of 2')")
    wait_for(page)
    first = chat(http, "hello")
    assert shown(page) == chat(http, "hello", first, "and now", repetition_penalty=1.8) != second
    page.get_by_label("Previous answer").click()
    assert shown(page) == second
    set_up(page, repetition_penalty="")
    page.locator(".message").first.hover()
    page.get_by_label("Edit message").first.click()
    field = page.get_by_label("Message", exact=True).first
    assert field.input_value() == "hello"
    field.fill("good day")
    field.press("Enter")
    page.wait_for_selector(".message .version:text-is('2 of 2')")
    wait_for(page)
    assert page.locator(".message .text").all_text_contents() == ["good day"]
    assert shown(page) == chat(http, "good day")
    page.locator(".message").first.hover()
    page.get_by_label("Previous message").click()
    assert page.locator(".message .text").all_text_contents() == ["hello", "and now"]
    assert shown(page) == second


def test_two_settings_side_by_side(open_page, address, http, stays_idle):
    page = open_page(address)
    compare(page)
    set_up(page, 0, temperature=0, max_tokens=8)
    set_up(page, 1, temperature=0, max_tokens=8, repetition_penalty=1.8)
    send(page, "hello")
    for pane, penalty in enumerate((1.0, 1.8)):
        text = page.locator(".pane").nth(pane).locator(".answer .plain").text_content()
        assert text == chat(http, "hello", repetition_penalty=penalty)


def test_plain_text_mode_continues_the_text_as_far_as_it_fits(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0)
    page.select_option("#mode", "text")
    send(page, "once")
    expected = ask(http, "/v1/completions", prompt="once", temperature=0, max_tokens=-1)["text"]
    assert len(expected) > 16  # the most that a completion has if it does not say
    assert shown(page) == expected


def test_model_without_a_chat_template_gets_plain_text(open_page, address, http, stays_idle):
    page = open_page(address, errors=["400"])
    page.wait_for_selector("#prompt:focus")
    page.route("**/tokenize", lambda route: route.fulfill(status=400, json={"error": {"message": "no template"}}))
    page.reload()
    page.wait_for_selector("#notice:has-text('no template')")
    page.unroute_all()
    set_up(page, temperature=0, max_tokens=8)
    send(page, "once")
    assert shown(page) == ask(http, "/v1/completions", prompt="once", temperature=0)["text"]


# The browser's memory


def test_reload_keeps_conversation_and_settings(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0, max_tokens=8, system="be brief")
    page.select_option("#view", "tokens")
    page.select_option("#model", "other")
    send(page, "hello")
    before = shown(page)
    about = page.locator(".answer .about").text_content()
    page.wait_for_selector("#conversations .open:has-text('hello')")
    page.reload()
    page.wait_for_selector("#prompt:focus")
    assert shown(page) == before
    assert page.locator(".answer .about").text_content() == about
    assert "".join(page.locator(".token").all_text_contents()) == before
    assert page.input_value("#model") == "other"
    assert page.input_value("[name=system] >> nth=0") == "be brief"
    assert page.input_value("[name=max_tokens] >> nth=0") == "8"
    page.locator(".token").nth(3).click()
    page.wait_for_selector(".answer .about:has-text('Fork of token 4'):has-text('length')")
    wait_for(page)
    assert shown(page)[:3] == before[:3]


def test_reload_while_an_answer_comes_keeps_its_message(open_page, address, stays_idle):
    page = open_page(address)
    page.route(CHAT, lambda route: None)  # the answer never comes
    page.fill("#prompt", "hello")
    page.press("#prompt", "Enter")
    page.wait_for_selector("#conversations .open:has-text('hello')")
    page.reload()
    page.wait_for_selector("#prompt:focus")
    assert page.locator(".message .text").text_content() == "hello"
    assert "stopped" in page.locator(".answer .about").text_content()


def test_conversations_are_listed_renamed_deleted_exported_and_imported(open_page, address, stays_idle, tmp_path):
    page = open_page(address)
    page.on("dialog", lambda dialog: dialog.accept())
    titles = page.locator("#conversations .open")
    for text in ("first", "second"):
        page.click("#new")
        answer_with(page, {"content": f"answer to the {text}"})
        send(page, text)
        page.wait_for_selector(f"#conversations li:first-child .open:text-is('{text}')")
    assert titles.all_text_contents() == ["second", "first"]
    titles.last.click()
    page.wait_for_selector(".message .text:text-is('first')")
    assert shown(page) == "answer to the first"
    page.get_by_label("Rename first").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("a <b>new</b> name")
    page.keyboard.press("Enter")
    page.wait_for_selector("#conversations .open:text-is('a <b>new</b> name')")
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "exported.json")
    page.get_by_label("Delete second").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#conversations:not(:has-text('second'))")
    page.click("#delete-all")
    page.wait_for_selector("#no-conversations")
    assert page.locator(".message").count() == 0
    page.set_input_files("#import-file", tmp_path / "exported.json")
    page.wait_for_function("() => document.querySelectorAll('#conversations .open').length === 2")
    page.locator("#conversations .open:has-text('second')").click()
    page.wait_for_selector(".message .text:text-is('second')")
    assert shown(page) == "answer to the second"
    (tmp_path / "bad.json").write_text('{"kind": "jaxinfer conversations", "conversations": [{"roots": [{}, {}]}]}')
    page.set_input_files("#import-file", tmp_path / "bad.json")
    page.wait_for_selector("#notice:has-text('another form')")
    assert titles.count() == 2


def test_browser_keeps_a_bounded_number_of_conversations_and_tokens(open_page, address):
    page = open_page(address)
    found = page.evaluate(
        """async () => {
            const [store, tree] = [await import('/page/store.js'), await import('/page/conversation.js')];
            for (let i = 0; i < 203; i++) await store.save({ ...tree.newConversation(), title: `${i}` });
            const full = { ...tree.newConversation(), title: 'full' };
            const turns = [0, 1].map(() => tree.newTurn('a'));
            const answers = turns.map((turn) => tree.add(turn.answers, tree.newAnswer()));
            tree.add(full.roots[0], turns[0]);
            tree.add(answers[0].next, turns[1]);
            for (const answer of answers) answer.promptIds = Array(30_000).fill(7);
            await store.save(full);
            const list = await store.list();
            const kept = tree.shownTurns((await store.load(full.id)).roots[0]).map(({ turn }) => tree.answerOf(turn));
            return [list.length, list.at(-1).title, kept.map((answer) => answer.promptIds?.length ?? 0)];
        }"""
    )
    assert found == [200, "4", [0, 30_000]]


def test_page_asks_for_the_key_and_keeps_it_in_the_tab(open_page, address_with_keys):
    address = address_with_keys
    assert {httpx.get(address + path).status_code for path in PATHS} == {200}
    assert {httpx.get(address + path).status_code for path in ("/page/none.js", "/page/model")} == {401}
    assert httpx.post(address + "/page/markdown", json={"text": "a"}).status_code == 401
    assert httpx.post(address + "/page/markdown", json={"text": "a"}, headers=with_key(KEY)).status_code == 200
    page = open_page(address, errors=["401"])
    for key in ("wrong", KEY):
        page.fill("#key", key)
        with page.expect_response("**/v1/models"):
            page.keyboard.press("Enter")
    page.wait_for_selector("#prompt:focus")
    page.click("#show-settings")
    fields = {name: page.locator(f"[name={name}]").first for name in (*DEFAULTS, "max_tokens")}
    shown_defaults = {name: fields[name].get_attribute("placeholder") for name in DEFAULTS if name != "max_new_tokens"}
    assert shown_defaults == {"temperature": "0.6", "top_k": "20"}
    assert fields["max_tokens"].get_attribute("placeholder") == "24"
    send(page, "hello")
    assert shown(page)
    page.wait_for_selector("#conversations .open:has-text('hello')")
    page.reload()
    page.wait_for_selector("#prompt:focus")
    assert page.evaluate("Object.values(sessionStorage)") == [KEY]
    assert "hello" in kept(page)
    assert KEY not in kept(page)


# The rest of the page


def test_live_view_has_the_numbers_of_the_metrics(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, max_tokens=8)
    page.click("#live summary")
    page.wait_for_selector("#numbers dd")
    send(page, "hello")
    page.wait_for_selector(
        "#numbers:has(div:has(dt:text('TTFT')):has(dd:text('ms'))):has(div:has-text('Pages owned0'))"
    )
    names = page.locator("#numbers dt").all_text_contents()
    numbers = dict(zip(names, page.locator("#numbers dd").all_text_contents(), strict=True))
    metrics = http.get("/metrics").text
    for state in ("owned", "cached", "free"):
        found = re.search(rf'jaxinfer:pages{{model_name="small",state="{state}"}} (\S+)', metrics)
        assert found
        assert float(numbers[f"Pages {state}"]) == float(found[1])
    assert float(numbers["Tokens/s"]) > 0
    assert numbers["Rows running"] == numbers["Queue"] == "0"


def test_quantiles_of_a_histogram(open_page, address):
    page = open_page(address)
    text = "".join(
        f'h_bucket{{le="{le}",model_name="a"}} {n}\n' for le, n in (("1.0", 2.0), ("2.0", 6.0), ("+Inf", 8.0))
    )
    found = page.evaluate(
        """async (text) => {
            const { parse, quantile } = await import('/page/live.js');
            return [0.25, 0.5, 0.99].map((share) => quantile('h', share, parse(text), new Map()));
        }""",
        text,
    )
    assert found == [1.0, 1.5, 2.0]


def test_page_works_by_keyboard_alone(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, max_tokens=8)
    page.select_option("#view", "tokens")
    page.focus("#show-history")
    reached = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.name"))
    assert {"model", "view", "new", "show-settings", "prompt", "send", "mode", "compare", "temperature"} <= reached
    page.route(CHAT, lambda route: None)  # an answer that never comes
    page.focus("#prompt")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    wait_for(page, "Answering…")
    page.keyboard.press("Escape")
    wait_for(page, "Stopped.")
    page.unroute_all()
    page.keyboard.type("hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("there")
    page.keyboard.press("Enter")
    wait_for(page)
    assert page.locator(".message .text").last.text_content() == "hello\nthere"
    page.focus(".token >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer .version:text-is('2 of 2')")
    wait_for(page)
    page.focus("#prompt")
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == "hello\nthere"
    page.keyboard.press("Escape")
    assert page.locator(".message .text").last.text_content() == "hello\nthere"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_page_is_accessible_and_fits(open_page, address, http, stays_idle, tmp_path, scheme, width):
    page = open_page(address, color_scheme=scheme, viewport={"width": width, "height": 800})
    compare(page)
    page.click("#live summary")
    page.wait_for_selector("#numbers dd")
    assert faults(page) == []
    set_up(page)  # closes the settings of a narrow page
    text = (
        "## Title\n\n- a `b` [c](https://example.org)\n\n|a|b|\n|-|-|\n|1|2|\n\n```python\nx = f('a', 1)  # long"
        + "g" * 200
    )
    answer_with(page, {"reasoning_content": "why"}, *({"content": piece} for piece in re.split(r"(?<= )", text)))
    send(page, "hello")
    page.wait_for_selector(".pane:last-child .formatted pre")
    field = page.locator("#composer").bounding_box()
    assert field["y"] + field["height"] <= 800  # in sight, at the end of the page
    assert page.locator("header").bounding_box()["height"] < 60  # one line
    assert faults(page) == []
    page.select_option("#view", "tokens")
    page.locator(".token").first.focus()
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png")
    assert faults(page) == []


def faults(page):
    """Returns what keeps a person from using the page as it is now."""
    violations = Axe().run(page).response["violations"]
    found = [v["id"] for v in violations if v["impact"] in ("serious", "critical")]
    fits = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return found if fits else [*found, "wider than its window"]
