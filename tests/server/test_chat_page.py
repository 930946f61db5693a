"""The chat page in headless Chromium, over a server whose engine says what a test tells it to."""

import asyncio
import json
import re
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

import pytest

from roofline.server.limits import Limits
from roofline.server.models import ExtraModel, Models
from tests.server.conftest import BytesText, FakeEngine

BUSY = "document.querySelector('#send').getAttribute('aria-label') === 'Stop the answer'"
READY = "document.querySelector('#send').getAttribute('aria-label') === 'Send the message'"
PROMPTS = "[...document.querySelectorAll('.user .plain')].map((node) => node.innerText)"
SCROLLER = "document.querySelector('#scroller')"
REST = f"({SCROLLER}.scrollHeight - {SCROLLER}.scrollTop - {SCROLLER}.clientHeight)"  # pixels below what is visible
ANSWERS = "[...document.querySelectorAll('.assistant .prose')].map((node) => node.innerText)"


class PausedEngine(FakeEngine):
    """Stays where `pause_at` ids of an answer are out, until that is None."""

    pause_at: int | None = None

    async def _events(self, ids, params, request_id):
        count = 0
        async for event in super()._events(ids, params, request_id):
            yield event
            count += 1
            while count == self.pause_at and request_id in self.open:
                await asyncio.sleep(0.005)

    @property
    def prompts(self) -> list[str]:
        return [bytes(ids).decode() for ids, _ in self.submitted]


@pytest.fixture
def engine() -> PausedEngine:
    return PausedEngine()


def write(page, text):
    page.evaluate("document.querySelector('#text').focus()")
    page.write(text)


def ask(page, text, *, answers=None):
    """Send a message; answers: how many there are to be, all complete, before this returns."""
    write(page, text)
    page.press("Enter")
    if answers is not None:
        page.wait(f"{READY} && document.querySelectorAll('.assistant .figures').length === {answers}")


def named(label):
    return f"[aria-label={json.dumps(label)}]"


def test_an_answer_is_shown_while_it_comes(open_page, engine):
    engine.answer, engine.pause_at = b"Hello, **wor**ld.\n\nSecond.", 11
    page = open_page()
    ask(page, "Say hello")
    page.wait(f"{BUSY} && document.querySelector('.assistant strong')?.innerText === 'wo'")
    assert page.evaluate("document.querySelector('.assistant').getAttribute('aria-busy')") == "true"
    engine.pause_at = None
    page.wait(f"{READY} && document.querySelector('.figures')")
    assert page.evaluate(ANSWERS) == ["Hello, world.\n\nSecond."]
    assert page.text(".user .bubble") == "Say hello"
    assert re.fullmatch(r"27 tokens · [\d,.]+ tokens/s · first after [\d.]+ m?s", page.text(".figures"))
    said = page.evaluate("[...document.querySelectorAll('#announcer p')].map((node) => node.innerText)")
    assert said == ["Hello, world.", "Second.", "The answer is complete."]
    assert engine.prompts == ["<user>Say hello"]
    page.press("Tab")
    host = urlsplit(page.evaluate("location.href")).netloc
    assert {urlsplit(url).netloc for url in page.requests} == {host}


def test_escape_stops_and_the_text_stays(open_page, engine):
    engine.pause_at = 5
    page = open_page()
    ask(page, "Say hello")
    page.wait(f"{BUSY} && {ANSWERS}[0] === 'Hello'")
    page.press("Escape")
    page.wait(f"{READY} && document.querySelector('.notice')")
    assert page.text(".notice") == "You stopped this answer."
    assert page.evaluate(ANSWERS) == ["Hello"]
    end = time.monotonic() + 60
    while not engine.aborted:  # the server sees a moment later that nobody reads any more
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(engine.aborted) == 1


def test_thoughts_are_told_apart_and_not_sent_back(open_page, engine):
    engine.answer, engine.pause_at = b"<think>Hm, *well*.</think>Hello.", 15
    page = open_page()
    ask(page, "Say hello")
    page.wait("document.querySelector('.thoughts summary')?.innerText === 'Thinking…'")
    engine.pause_at = None
    page.wait(f"{READY} && document.querySelector('.figures')")
    assert page.text(".thoughts") == "Thoughts"  # closed
    page.click(".thoughts summary")
    assert page.text(".thoughts .plain") == "Hm, *well*."
    assert page.evaluate(ANSWERS) == ["Hello."]
    ask(page, "Again", answers=2)
    assert engine.prompts[1] == "<user>Say hello<assistant>Hello.<user>Again"


def paused_at_the_end(open_page, engine):
    """A page that has followed the first 66 of 120 paragraphs of an answer to their end."""
    engine.answer, engine.pause_at = b"line\n\n" * 120, 400
    page = open_page(1200, 500)
    ask(page, "Say much")
    page.wait(f"document.querySelectorAll('.prose p').length > 60 && {REST} < 2")
    return page


@pytest.mark.slow
def test_the_reader_is_not_taken_to_the_end(open_page, engine):
    """An answer is followed at its end, and left alone where the reader has scrolled up."""
    page = paused_at_the_end(open_page, engine)
    page.evaluate("document.querySelector('#scroller').scrollTop = 100")
    page.wait("!document.querySelector('#jump').hidden")
    engine.pause_at = None
    page.wait(f"{READY} && document.querySelectorAll('.prose p').length === 120")
    assert page.evaluate("document.querySelector('#scroller').scrollTop") == 100
    page.click("#jump")
    page.wait(f"{REST} < 2 && document.querySelector('#jump').hidden")


def test_a_reader_who_scrolls_before_the_browser_reports_the_last_scrolling_is_left_alone(open_page, engine):
    page = paused_at_the_end(open_page, engine)
    # The list grows and the page goes to the new end; in the same frame, before that is reported, the reader goes back.
    page.evaluate(f"""(() => {{
        const list = document.querySelector("#messages"), more = document.createElement("div");
        new ResizeObserver((_, observer) => {{ observer.disconnect(); {SCROLLER}.scrollTop -= 500; }}).observe(list);
        more.style.height = "1000px";
        list.append(more);
    }})()""")
    page.wait("!document.querySelector('#jump').hidden")
    assert 490 < page.evaluate(REST) < 510


@pytest.mark.slow
def test_enter_and_shift_and_enter(open_page, engine):
    page = open_page()
    write(page, "one")
    page.press("Enter", shift=True)
    page.write("two")
    page.press("Enter")
    page.wait(f"{READY} && document.querySelector('.figures')")
    assert page.evaluate(PROMPTS) == ["one\ntwo"]
    assert page.evaluate("document.querySelector('#text').value") == ""
    assert page.evaluate("document.activeElement.id") == "text"


def test_another_answer_is_a_branch(open_page, engine):
    page = open_page()
    ask(page, "Say hello", answers=1)
    engine.answer = b"Good evening."
    page.click(named("Answer again"))
    page.wait(f"{READY} && {ANSWERS}[0] === 'Good evening.'")
    assert engine.prompts == ["<user>Say hello"] * 2
    assert page.text(".assistant .branches") == "2/2"
    page.click(".assistant " + named("Previous version"))
    page.wait(f"{ANSWERS}[0] === 'Hello, world.'")
    ask(page, "And then?", answers=2)  # goes on from the branch that is shown
    assert engine.prompts[-1] == "<user>Say hello<assistant>Hello, world.<user>And then?"
    page.click(".assistant " + named("Next version"))
    page.wait("document.querySelectorAll('.message').length === 2")
    assert page.evaluate(ANSWERS) == ["Good evening."]


@pytest.mark.slow
def test_an_edited_message_is_a_branch(open_page, engine):
    page = open_page()
    ask(page, "Say hello", answers=1)
    page.evaluate("document.querySelector('#text').focus()")
    page.press("ArrowUp")
    assert page.evaluate("document.activeElement.value") == "Say hello"
    page.press("Escape")
    assert page.evaluate(PROMPTS) == ["Say hello"]
    page.click(named("Edit this message"))
    page.evaluate("document.activeElement.select()")
    page.write("Say goodbye")
    page.press("Enter")
    page.wait(f"{READY} && {PROMPTS}[0] === 'Say goodbye' && document.querySelector('.figures')")
    assert engine.prompts == ["<user>Say hello", "<user>Say goodbye"]
    assert page.text(".user .branches") == "2/2"
    page.click(".user " + named("Previous version"))
    page.wait(f"{PROMPTS}[0] === 'Say hello'")
    assert page.evaluate("document.querySelector('.user .branches').getAttribute('aria-label')") == "Version 1 of 2"


def test_conversations_stay_in_the_browser(open_page, engine):
    page = open_page()
    ask(page, "The first", answers=1)
    engine.answer = b"Another."
    page.click(named("Answer again"))
    page.wait(f"{READY} && {ANSWERS}[0] === 'Another.'")
    page.click(".assistant " + named("Previous version"))
    page.click("#new")
    ask(page, "The second", answers=1)
    titles = "[...document.querySelectorAll('#conversations .title')].map((node) => node.innerText)"
    page.wait(f"{titles}.join() === 'The second,The first'")
    page.reload()
    page.wait(f"{PROMPTS}.join() === 'The second'")
    page.click("#conversations li:last-child .title")
    page.wait(f"{PROMPTS}.join() === 'The first' && {ANSWERS}.join() === 'Hello, world.'")
    assert page.text(".assistant .branches") == "1/2"
    assert page.evaluate("document.title") == "The first · Roofline"

    page.evaluate(f"document.querySelector('{named('Rename The first')}').click()")
    page.write("A better name")
    page.press("Enter")
    page.wait(f"{titles}.includes('A better name')")
    page.evaluate(f"document.querySelector('{named('Delete A better name')}').click()")
    page.wait(f"{titles}.join() === 'The second' && {PROMPTS}.length === 0")
    page.click(".toast button")
    page.wait(f"{titles}.includes('A better name')")


def test_what_the_browser_cannot_keep_is_said(open_page):
    page = open_page()
    count, size, own = page.evaluate("""(async () => {
        const { Store, MOST_CONVERSATIONS, MOST_CHARACTERS } = await import("/page/store.js");
        const store = new Store();
        const row = (_, i) => [String(i), { id: String(i), size: 1 }];
        store.summaries = new Map(Array.from({ length: MOST_CONVERSATIONS }, row));
        const count = [store.full("new", 1), store.full("7", 1)];
        store.summaries = new Map([["a", { id: "a", size: MOST_CHARACTERS - 10 }]]);
        return [count, [store.full("b", 11), store.full("b", 10)], store.full("a", MOST_CHARACTERS)];
    })()""")
    assert count == [
        "This page keeps at most 500 conversations, so the latest messages are not kept. "
        "Delete or export conversations.",
        None,
    ]
    assert size == [
        "This page keeps at most 64 MB, so the latest messages are not kept. Delete or export conversations.",
        None,
    ]
    assert own is None


@pytest.mark.slow
def test_without_a_database_it_says_so_and_works(open_page, engine, live):
    address = live()
    page = open_page(address=address)
    page.call(
        "Page.addScriptToEvaluateOnNewDocument",
        source="Object.defineProperty(window, 'indexedDB', { get() { throw new DOMException('', 'SecurityError'); } })",
    )
    page.reload()
    page.wait("document.querySelector('#model').textContent === 'tiny'")
    assert "conversations are gone when the tab is closed" in page.text("#banner")
    ask(page, "Say hello", answers=1)
    page.wait("document.querySelectorAll('#conversations .title').length === 1")


def test_system_prompt_and_sampling(open_page, engine):
    page = open_page()
    ask(page, "First", answers=1)
    params = engine.submitted.pop()[1]
    assert (params.temperature, params.top_p) == (0.7, 0.9)  # what is not set is as in `roofline chat`
    changed = "document.querySelector('#settings').classList.contains('changed')"
    assert page.evaluate(changed) is False
    page.click("#new")
    page.click("#settings")
    page.click("#settings-reset")
    page.evaluate("document.querySelector('#system').focus()")
    page.write("Be brief.")
    page.evaluate("document.querySelector('#setting-temperature').focus()")
    page.write("7")
    page.press("Enter")
    page.wait("document.querySelector('#settings-problem').innerText")
    assert page.text("#settings-problem") == "Temperature is from 0 to 2."
    assert page.evaluate("document.activeElement.id") == "setting-temperature"
    page.evaluate("document.activeElement.select()")
    page.write("0,5")
    for name, value in (("setting-seed", "7"), ("setting-top_k", "20"), ("stop-strings", "END\\n")):
        page.evaluate(f"document.querySelector('#{name}').focus()")
        page.write(value)
    page.click("#settings-form [type=submit]")
    page.wait("!document.querySelector('#settings-dialog').open")
    ask(page, "Say hello", answers=1)
    ids, params = engine.submitted[0]
    assert bytes(ids).decode() == "<system>Be brief.<user>Say hello"
    assert (params.temperature, params.seed, params.top_k, params.stop) == (0.5, 7, 20, ("END\n",))
    assert params.top_p == 1.0
    assert page.evaluate(changed) is True
    page.click("#new")  # a new one begins with the same
    ask(page, "Again", answers=1)
    assert bytes(engine.submitted[1][0]).decode() == "<system>Be brief.<user>Again"


def test_text_files_go_with_a_message(open_page, engine, tmp_path):
    files = {"notes.md": b"a ``` b\n", "big.txt": b"x" * (256 * 1024 + 1), "image.png": b"\x89PNG\xff\x00", "no": b""}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    page = open_page()
    page.choose_files("#file-input", *(tmp_path / name for name in files))
    page.wait("document.querySelectorAll('#toasts .toast').length === 3")
    problems = page.evaluate("[...document.querySelectorAll('#toasts .toast')].map((node) => node.innerText)")
    assert problems == [
        "big.txt: the file has 257 KB, and a message takes files of up to 256 KB.",
        "image.png: this is not a text file in UTF-8.",
        "no: the file is empty.",
    ]
    assert "notes.md" in page.text("#files")
    ask(page, "Read this", answers=1)
    assert engine.prompts == ["<user>notes.md\n````\na ``` b\n````\n\nRead this"]
    assert page.text(".user summary").startswith("notes.md")
    assert page.evaluate("document.querySelector('#files').hidden") is True


def test_export_and_import(open_page, engine, tmp_path):
    page = open_page()
    ask(page, "Say hello", answers=1)
    page.click(named("Answer again"))
    page.wait(f"{READY} && document.querySelector('.assistant .branches')?.innerText === '2/2'")
    page.allow_downloads(tmp_path)
    page.click("#export")
    page.wait("document.querySelector('.toast')?.innerText === 'Exported one conversation.'")
    exported = page.downloaded(tmp_path)
    content = json.loads(exported.read_text())
    assert (content["format"], content["version"], len(content["conversations"][0]["nodes"])) == ("roofline-chat", 1, 3)

    other = open_page()  # storage of its own
    other.choose_files("#import-input", exported)
    other.wait(f"{PROMPTS}.join() === 'Say hello'")
    assert other.text(".assistant .branches") == "2/2"
    other.choose_files("#import-input", exported)  # again: a copy, nothing is replaced
    other.wait("document.querySelectorAll('#conversations .title').length === 2")


NODE = {"id": "a", "parent": None, "role": "user", "text": "Hi"}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "The file is not JSON."),
        ({"format": "other"}, "The file is no export of this page."),
        ({"version": 2}, "The file is of version 2; this page reads version 1."),
        ({"conversations": {}}, "conversations is not a list."),
        ({"conversations": [{"nodes": [{**NODE, "parent": "b"}]}]}, "[0].nodes[0].parent names no earlier message."),
        ({"conversations": [{"nodes": [NODE, NODE]}]}, "[0].nodes[1].id is missing or there twice."),
        ({"conversations": [{"nodes": [{**NODE, "role": "system"}]}]}, ".role is neither user nor assistant."),
        ({"conversations": [{"nodes": [{**NODE, "text": 3}]}]}, "[0].nodes[0].text is not a text."),
        ({"conversations": [{"nodes": [{**NODE, "attachments": [{"name": "a"}]}]}]}, ".attachments[0].text is not a"),
        ({"conversations": [{"nodes": [], "sampling": {"temperature": "hot"}}]}, "Temperature is not a number."),
        ({"conversations": [{"nodes": [], "sampling": {"tools": 1}}]}, "[0].sampling: tools is not a setting"),
    ],
)
def test_a_file_that_is_no_export_is_refused_with_the_place(module_page, content, sentence):
    text = content if isinstance(content, str) else json.dumps({"format": "roofline-chat", "version": 1, **content})
    message = module_page.evaluate(f"""(async () => {{
        const {{ imported }} = await import("/page/transfer.js");
        try {{ imported({json.dumps(text)}); return "taken"; }} catch (error) {{ return error.message; }}
    }})()""")
    assert sentence in message


def test_a_full_queue_is_said_with_when_to_come_back(open_page, engine):
    page = open_page(limits=Limits(queued=0))
    ask(page, "Say hello")
    page.wait("document.querySelector('.failed')")
    assert page.text(".failed p") == (
        "The server is busy: 0 requests are already waiting. It asks to try again in 5 seconds."
    )
    assert page.evaluate("document.querySelector('.failed').getAttribute('role')") == "alert"
    assert page.evaluate(PROMPTS) == ["Say hello"]


@pytest.mark.slow
def test_a_refusal_is_the_servers_sentence(open_page, engine):
    page = open_page()
    ask(page, "x" * 1200)
    page.wait("document.querySelector('.failed')")
    assert "1000" in page.text(".failed p")
    assert page.evaluate("document.querySelectorAll('.failed button').length") == 1


@pytest.mark.slow
def test_an_engine_that_fails_leaves_what_it_said(open_page, engine):
    engine.error = "a kernel failed"
    page = open_page()
    ask(page, "Say hello")
    page.wait(f"{READY} && document.querySelector('.failed')")
    assert page.text(".failed p") == "The engine failed while this request was running; it was not completed."
    assert page.evaluate(ANSWERS) == ["He"]
    engine.error = None
    page.click(".failed button")
    page.wait(f"{READY} && {ANSWERS}[0] === 'Hello, world.'")
    assert page.text(".assistant .branches") == "2/2"  # the text of the failed one stays beside


class Wire:
    """Carries bytes between a browser and a server until it is cut."""

    def __init__(self, address: str) -> None:
        target = urlsplit(address)
        self.target = (target.hostname, target.port)
        self.sockets: list[socket.socket] = []
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
                server = socket.create_connection(self.target)
            except OSError:
                return
            self.sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while part := source.recv(65536):
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def cut(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)
        self.listening.close()
        for each in self.sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no polite end
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
            finally:
                each.close()


def test_a_connection_that_breaks_leaves_the_text(open_page, engine, live):
    engine.pause_at = 5
    wire = Wire(live())
    page = open_page(address=wire.address)
    ask(page, "Say hello")
    page.wait(f"{BUSY} && {ANSWERS}[0] === 'Hello'")
    wire.cut()
    page.wait(f"{READY} && document.querySelector('.failed')")
    assert page.text(".failed p").startswith("The connection to the server was lost")
    assert page.evaluate(ANSWERS) == ["Hello"]
    ask(page, "Are you there?")
    page.wait("document.querySelectorAll('.failed').length === 2")
    assert page.evaluate("document.querySelectorAll('.failed p')[1].innerText") == (
        "The server cannot be reached. Is it running?"
    )


@pytest.fixture
def two_models(live) -> str:
    """The address of a server of the models "tiny" and "other"."""

    async def start():
        return FakeEngine(b"I am the other."), BytesText()

    return live(models_of=lambda context: Models(context, [ExtraModel("other", start, 1)], 1))


def test_of_several_models_one_is_chosen_and_stays_so(open_page, two_models):
    page = open_page(address=two_models)
    assert page.evaluate("[...document.querySelectorAll('#models option')].map((node) => node.value)") == [
        "tiny",
        "other",
    ]
    ask(page, "Say hello", answers=1)
    choose = "(node) => { node.value = 'other'; node.dispatchEvent(new Event('change')) }"
    page.evaluate(f"({choose})(document.querySelector('#models'))")
    ask(page, "And you?", answers=2)
    assert page.evaluate(ANSWERS) == ["Hello, world.", "I am the other."]
    page.reload()
    page.wait("document.querySelector('#model').textContent === 'other'")
    assert page.evaluate("document.querySelector('#models').value") == "other"


def test_a_link_names_the_model(open_page, browser, two_models):
    page = browser.open(f"{two_models}/?model=other")
    page.wait("document.querySelector('#model').textContent === 'other'")
    ask(page, "Who is there?", answers=1)
    assert page.evaluate(ANSWERS) == ["I am the other."]
    page.reload()  # into the conversation, still with that model
    page.wait("document.querySelector('#model').textContent === 'other'")
    choose = "(node) => { node.value = 'tiny'; node.dispatchEvent(new Event('change')) }"
    page.evaluate(f"({choose})(document.querySelector('#models'))")
    assert page.evaluate("location.search") == ""  # a choice on the page ends what the link says
    page.reload()
    page.wait("document.querySelector('#model').textContent === 'tiny'")
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_a_link_may_have_a_system_prompt(browser, live, engine):
    page = browser.open(f"{live()}/?model=tiny&system=Be%20brief%20%26%20%3Cb%3Ekind%3C%2Fb%3E.")
    page.wait("document.querySelector('#model').textContent === 'tiny'")
    assert page.evaluate("document.querySelector('#settings').classList.contains('changed')")
    ask(page, "Say hello", answers=1)
    assert engine.prompts == ["<system>Be brief & <b>kind</b>.<user>Say hello"]
    page.click("#new")  # begins as new chats do
    ask(page, "Again", answers=1)
    assert engine.prompts[1] == "<user>Again"
    assert page.problems == []
    page.close()


@pytest.mark.slow
def test_a_link_to_a_model_that_is_not_served_says_so(browser, live):
    page = browser.open(f"{live()}/?model=gone")
    page.wait("document.querySelector('.toast') !== null")
    assert page.text(".toast span") == "This server has no model “gone”: tiny answers."
    assert page.text("#model") == "tiny"
    page.close()


@pytest.mark.slow
def test_one_model_needs_no_choice(open_page):
    page = open_page()
    assert page.evaluate("document.querySelector('#models').hidden")
    assert not page.evaluate("document.querySelector('#model').classList.contains('off-screen')")


def test_the_key_is_asked_for_and_stays_in_the_tab(open_page, engine):
    page = open_page(api_key="s3cret", wait=False)
    page.wait("document.querySelector('#key-dialog').open")
    page.write("wrong")
    page.press("Enter")
    page.wait("document.querySelector('#key-problem').innerText")
    assert page.text("#key-problem") == "The server does not take this key."
    page.write("s3cret")
    page.press("Enter")
    page.wait("document.querySelector('#model').textContent === 'tiny'")
    ask(page, "Say hello", answers=1)
    assert page.evaluate("[...Object.values(sessionStorage)]") == ["s3cret"]
    assert "s3cret" not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
    page.wait("document.querySelector('#strip-cache dd').innerText === '25 %'")
    page.evaluate("sessionStorage.setItem('roofline-api-key', 'changed')")  # as when the server has another one now
    ask(page, "Again")
    page.wait("document.querySelector('#key-dialog').open")
    page.write("s3cret")
    page.press("Enter")
    page.wait(f"{READY} && document.querySelectorAll('.assistant .figures').length === 2 && {ANSWERS}[1]")
    assert page.evaluate(ANSWERS) == ["Hello, world."] * 2
