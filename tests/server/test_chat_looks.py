"""The chat page for everybody: names for screen readers, contrast, narrow windows, keys alone, the strip of figures."""

import pytest

from roofline.engine.stats import EngineStats

READY = "document.querySelector('#send').getAttribute('aria-label') === 'Send the message'"
ANSWER = (
    b"A `code`, a [link](https://example.org) and\n\n> a quote\n\n```py\n" + b"x = 1  # " * 30 + b"\n```\n\n"
    b"| a long head of a column | another long head | a third | a fourth |\n|-|-|-|-|\n| 1 | 2 | 3 | 4 |\n\n"
    b"https://example.org/" + b"a" * 300
)
# The contrast of every text that is seen with what lies behind it, after WCAG 2: [ratio, text, colours] below 4.5.
LOW_CONTRAST = """(() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const over = (top, below) => top.slice(0, 3).map((value, i) => (value * top[3] + below[i] * (255 - top[3])) / 255);
  const behind = (node) => {
    if (!node) return [255, 255, 255];
    const colour = rgba(getComputedStyle(node).backgroundColor);
    return colour[3] === 255 ? colour.slice(0, 3) : over(colour, behind(node.parentElement));
  };
  const light = (colour) => colour.map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const low = [];
  let count = 0;
  for (const node of document.querySelectorAll("body *, dialog[open] *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true }) || node.closest(".off-screen, :disabled")) continue;
    if (node.closest("noscript, .skip")) continue;
    count += 1;
    const below = behind(node);
    const [a, b] = [light(over(rgba(getComputedStyle(node).color), below)), light(below)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([ratio, node.innerText.slice(0, 30), node.className, below]);
  }
  return [count, low];
})()"""


def ask(page, text):
    page.evaluate("document.querySelector('#text').focus()")
    page.write(text)
    page.press("Enter")
    page.wait(f"{READY} && document.querySelector('.assistant:last-child .foot button')")


@pytest.fixture
def talk(open_page, engine):
    """talk(width, ...): a page with an answer that has everything, a message with a file, and an error."""

    def start(*size, **options):
        engine.answer = ANSWER
        page = open_page(*size, **options)
        ask(page, "Say hello")
        engine.error = "a kernel failed"
        ask(page, "And again")
        return page

    return start


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_contrast(talk, scheme):
    page = talk(media={"prefers_color_scheme": scheme})
    count, low = page.evaluate(LOW_CONTRAST)
    assert count > 25
    assert low == []
    page.click("#settings")
    assert page.evaluate(LOW_CONTRAST)[1] == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(23, 25, 27)"
    assert dark == (scheme == "dark")


def test_the_switch_goes_before_the_system(open_page):
    page = open_page(media={"prefers_color_scheme": "light"})
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    names = []
    for _ in range(3):
        names.append(page.evaluate("document.querySelector('#theme').getAttribute('aria-label')"))
        page.click("#theme")
    assert names == ["Colours: as the system", "Colours: light", "Colours: dark"]
    page.click("#theme")
    page.click("#theme")
    assert page.evaluate(colour) != light
    page.reload()
    page.wait(f"{colour} !== '{light}'")


@pytest.mark.slow
def test_narrow_windows_do_not_scroll_sideways(talk):
    page = talk(360, 740)
    for selector in ("html", "#scroller", "#dock", "header"):
        node = f"document.querySelector('{selector}')"
        assert page.evaluate(f"{node}.scrollWidth <= {node}.clientWidth"), selector
    outside = page.evaluate("""[...document.querySelectorAll("#main *")].filter((node) => node.checkVisibility()
        && !node.closest("pre, .wide, .off-screen") && node.getBoundingClientRect().right > innerWidth + 0.5)
        .map((node) => node.outerHTML.slice(0, 80))""")
    assert outside == []
    page.click("#settings")
    dialog = "document.querySelector('#settings-dialog')"
    assert page.evaluate(f"{dialog}.scrollWidth <= {dialog}.clientWidth")
    page.press("Escape")
    page.click("#menu")
    assert page.evaluate("document.activeElement.id") == "new"
    assert page.evaluate("document.querySelector('#main').inert") is True
    page.press("Escape")
    page.wait("document.activeElement.id === 'menu' && document.querySelector('#sidebar').inert")


@pytest.mark.slow
def test_what_is_pressed_is_large_enough(talk):
    """24 pixels at least, as WCAG 2.2 asks (2.5.8)."""
    page = talk(360, 740)
    small = page.evaluate("""[...document.querySelectorAll("button, summary, input")].filter((node) =>
        node.checkVisibility({visibilityProperty: true}) && !node.closest("[inert]"))
        .map((node) => [node.getBoundingClientRect(), node.outerHTML.slice(0, 80)])
        .filter(([box]) => box.width < 24 || box.height < 24)""")
    assert small == []


def test_everything_has_a_name(talk):
    page = talk()
    tree = page.tree()
    controls = {"button", "textbox", "link", "searchbox", "spinbutton", "checkbox", "combobox"}
    assert [entry for entry in tree if entry[0] in controls and not entry[1].strip()] == []
    for entry in (
        ("navigation", "Conversations"),
        ("main", "Conversation"),
        ("textbox", "Message"),
        ("button", "Send the message"),
        ("button", "Attach text files"),
        ("button", "System prompt and sampling"),
        ("button", "New chat"),
        ("button", "Copy this answer"),
        ("button", "Copy this code"),
        ("button", "Answer again"),
        ("button", "Edit this message"),
        ("region", "Code in py"),
        ("region", "Table"),
        ("log", "Spoken answers"),
        ("heading", "Chat with tiny"),
        ("heading", "You"),
        ("heading", "Answer"),
    ):
        assert entry in tree, entry
    assert "alert" in {role for role, _ in tree}
    page.click("#settings")
    inside = page.tree()
    assert ("dialog", "System prompt and sampling") in inside
    assert ("textbox", "Temperature") in inside
    assert [entry for entry in inside if entry[0] in controls and not entry[1].strip()] == []


def test_tab_goes_through_the_page_in_order(open_page):
    page = open_page()
    page.evaluate("document.activeElement.blur()")
    page.evaluate("document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    order = []
    for _ in range(12):
        page.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = page.evaluate(
            "[getComputedStyle(document.activeElement).outlineStyle, document.activeElement.matches('#text')]"
        )
        assert outline[0] != "none" or outline[1], order  # the message field shows it on its frame
    expected = ["skip", "new", "import", "export", "menu", "settings", "theme"]
    assert order[: len(expected)] == expected
    assert order[-2:] == ["text", "attach"]


@pytest.mark.slow
def test_less_motion_where_it_is_asked_for(open_page):
    moving = "getComputedStyle(document.querySelector('.level')).transitionDuration"
    assert open_page().evaluate(moving) == "0.5s"
    assert open_page(media={"prefers_reduced_motion": "reduce"}).evaluate(moving) == "0s"


def test_the_strip_shows_the_servers_figures(open_page, engine):
    def stats() -> EngineStats:
        reading["tokens"] += 50
        return EngineStats(
            running=1, waiting=3, pages_used=30, pages_total=120, decode_tokens=reading["tokens"],
            decode_seconds=reading["tokens"] / 100, priced_seconds=reading["tokens"] / 100,
            limit_seconds=reading["tokens"] / 200,
        )  # fmt: skip

    reading = {"tokens": 0}
    engine.stats = stats
    page = open_page()
    figure = "document.querySelector('#strip-{} dd').innerText".format
    page.wait(f"{figure('roof')} === '50 %' && {figure('queue')} === '3' && {figure('cache')} === '25 %'")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")  # reads again
    page.wait(f"Number({figure('rate')}.replace(',', '')) > 0")
    assert "30 of 120 pages" in page.evaluate("document.querySelector('#strip-cache').title")
    assert "100 on average" in page.evaluate("document.querySelector('#strip-rate').title")
    assert page.evaluate(figure("first-token")) == "–"
    ask(page, "Say hello")
    page.wait(f"/^[0-9.]+ m?s$/.test({figure('first-token')})")


@pytest.mark.slow
def test_roofs_that_are_not_measured_are_not_guessed(open_page, engine):
    page = open_page()
    page.wait("document.querySelector('#strip-cache dd').innerText === '25 %'")
    assert page.text("#strip-roof dd") == "–"
    assert page.evaluate("document.querySelector('#strip-roof').title") == "The roofs of this chip are not measured"
