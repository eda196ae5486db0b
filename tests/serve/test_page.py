"""The page in a browser: what it shows is compared with the API's own answers."""

import json
import re
import shutil
from hashlib import sha256

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

from jaxinfer.serve.access import Client
from jaxinfer.serve.static_page import PATHS
from tests.engine.engines import small_async_engine
from tests.serve.servers import serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LONG_SEED = "9007199254740993"  # 2^53 + 1, which no number of JavaScript is
KEY = "a key of the page's own tests"


@pytest.fixture(scope="module")
def chromium():
    if CHROMIUM is None:
        pytest.skip("no Chromium is on the path; on Debian: apt-get install chromium")
    return CHROMIUM


@pytest.fixture(scope="module")
def address_with_keys(chromium, checkpoint):
    client = Client(digest=sha256(KEY.encode()).digest(), tenant="ann")
    with serving(small_async_engine(checkpoint), clients=[client]) as (_, address):
        yield address


@pytest.fixture(scope="module")
def browser(chromium, address, address_with_keys):  # the servers end after it: they cannot while its event loop runs
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens the page of a server; in the end its console has to be free of errors, but for the expected ones."""
    contexts, problems, expected = [], [], []

    def open_page(address, *, errors=(), **options):
        context = browser.new_context(**options)
        contexts.append(context)
        expected.extend(errors)
        page = context.new_page()
        page.set_default_timeout(100_000)
        page.on("console", lambda message: message.type in ("error", "warning") and problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(address)
        if not errors:
            page.wait_for_selector("#prompt:focus")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in problems if not any(part in text for part in expected)] == []


def set_up(page, pane=0, **values):
    settings = page.locator(".pane").nth(pane)
    if settings.locator("details[open]").count() == 0:
        settings.locator("summary").click()
    for name, value in values.items():
        settings.locator(f"[name={name}]").fill(str(value))


def send(page, text, *, state="Done."):
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    page.wait_for_selector(f"#state:text-is('{state}')")


def shown(page, nth=-1):
    answer = page.locator(".answer").nth(nth)
    return answer.locator(".text:not(.reasoning)").text_content()


def ask(http, path, **body):
    answer = http.post(path, json={"model": "small", "max_tokens": 8, **body}).raise_for_status()
    return answer.json()["choices"][0]


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
    tokens = page.locator(".tokens button")
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
    page.set_viewport_size({"width": 1200, "height": 500})
    page.evaluate("scrollBy(0, scrollY ? -40 : 40)")
    page.wait_for_function(TIP_IS_BESIDE_ITS_TOKEN)


def test_fork_goes_on_from_the_tokens_before(open_page, address, http, stays_idle):
    page = open_page(address)
    set_up(page, temperature=0, max_tokens=8)
    send(page, "hello")
    whole = shown(page)
    set_up(page, repetition_penalty=1.8)  # so that the fork goes another way
    page.locator(".tokens button").nth(3).click()
    page.wait_for_selector(".answer:nth-of-type(2) .about:has-text('length')")
    chat = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json={"model": "small", "max_tokens": 8, **chat}).json()
    kept = answer["choices"][0]["token_ids"][:3]
    prompt = answer["prompt_token_ids"] + kept
    rest = ask(http, "/v1/completions", prompt=prompt, temperature=0, repetition_penalty=1.8)["text"]
    assert shown(page) == whole[:3] + rest
    assert page.locator(".answer.left").count() == 1
    set_up(page, repetition_penalty="")
    send(page, "more")  # the conversation goes on with the fork
    turns = [("user", "hello"), ("assistant", whole[:3] + rest), ("user", "more")]
    messages = [{"role": role, "content": content} for role, content in turns]
    more = ask(http, "/v1/chat/completions", messages=messages, temperature=0)
    assert shown(page) == more["message"]["content"]


def test_stop_ends_the_request(open_page, address, stays_idle):
    page = open_page(address)
    set_up(page, max_tokens="", json_schema='{"type": "string", "minLength": 60}')  # so that it does not end by itself
    page.evaluate("""() => new MutationObserver(() => {
        if (document.querySelector('.tokens button')) document.getElementById('stop').click();
    }).observe(document.getElementById('panes'), {childList: true, subtree: true})""")
    send(page, "hello", state="Stopped.")
    assert "stopped" in page.locator(".answer .about").text_content()
    assert page.locator("#stop").is_disabled()
    assert not page.locator("#send").is_disabled()


def test_schema_holds_and_a_bad_one_is_refused(open_page, address, stays_idle):
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
    set_up(page, json_schema='{"type": "nonsense"}')
    send(page, "hello", state="Failed.")
    assert "nonsense" in page.locator("#notice").text_content()


def test_two_settings_side_by_side(open_page, address, http, stays_idle):
    page = open_page(address)
    page.check("#compare")
    set_up(page, 0, temperature=0, max_tokens=8)
    set_up(page, 1, temperature=0, max_tokens=8, repetition_penalty=1.8)
    send(page, "hello")
    messages = [{"role": "user", "content": "hello"}]
    for pane, penalty in enumerate((1.0, 1.8)):
        expected = ask(http, "/v1/chat/completions", messages=messages, temperature=0, repetition_penalty=penalty)
        text = page.locator(".pane").nth(pane).locator(".answer .text:not(.reasoning)").text_content()
        assert text == expected["message"]["content"]


def test_live_view_has_the_numbers_of_the_metrics(open_page, address, http, stays_idle):
    page = open_page(address)
    page.click("#live summary")
    page.wait_for_selector("#numbers dd")
    set_up(page, max_tokens=8)
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


def test_plain_text_mode_continues_the_text(open_page, address, http, stays_idle):
    page = open_page(address)
    page.select_option("#mode", "text")
    set_up(page, temperature=0, max_tokens=8)
    send(page, "once")
    assert shown(page) == ask(http, "/v1/completions", prompt="once", temperature=0)["text"]


def test_page_works_by_keyboard_alone(open_page, address, stays_idle):
    page = open_page(address)
    reached = set()
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName.toLowerCase()"))
    assert {"model", "mode", "show-tokens", "compare", "clear", "summary", "prompt", "send"} <= reached
    page.focus("#prompt")
    page.keyboard.type("hello")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tokens button")
    page.keyboard.press("Escape")
    page.wait_for_selector("#stop[disabled]")
    page.focus(".transcript")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.tokens') !== null")
    page.keyboard.press("Enter")
    page.wait_for_selector(".answer.left")
    page.keyboard.press("Escape")
    page.wait_for_selector("#stop[disabled]")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_page_is_accessible_and_fits(open_page, address, stays_idle, tmp_path, scheme, width):
    page = open_page(address, color_scheme=scheme, viewport={"width": width, "height": 844})
    page.check("#compare")
    for pane in range(2):
        set_up(page, pane, max_tokens=48)
    page.click("#live summary")
    send(page, "hello")
    page.wait_for_selector("#numbers dd")
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    page.locator(".tokens button").first.focus()
    page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
    violations = Axe().run(page).response["violations"]
    assert [v["id"] for v in violations if v["impact"] in ("serious", "critical")] == []


def test_page_asks_for_the_key_and_keeps_it_in_the_tab(open_page, address_with_keys):
    address = address_with_keys
    assert {httpx.get(address + path).status_code for path in PATHS} == {200}
    assert httpx.get(address + "/page/none.js").status_code == 401
    page = open_page(address, errors=["401"])
    for key in ("wrong", KEY):
        page.fill("#key", key)
        with page.expect_response("**/v1/models"):
            page.keyboard.press("Enter")
    page.wait_for_selector("#prompt:focus")
    set_up(page, max_tokens=4)
    send(page, "hello")
    assert page.locator(".tokens button").count() > 0
    page.reload()
    page.wait_for_selector("#prompt:focus")
    assert page.evaluate("[sessionStorage.length, localStorage.length]") == [1, 0]
