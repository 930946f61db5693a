"""Drives headless Chromium over the pipe of its DevTools protocol: no package beside the standard library."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
MISSING = "there is no chromium"
SECONDS = 60.0  # for anything that should happen at once, on a machine that does much else
# Chromium reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(name), fcntl.F_DUPFD, 10) for name in sys.argv[1:3])
os.dup2(commands, 3), os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
OPTIONS = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--no-first-run", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
]  # fmt: skip
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}


class Browser:
    """A running Chromium. Close it."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        read_commands, self._commands = os.pipe()
        self._answers, write_answers = os.pipe()
        command = [sys.executable, "-c", LAUNCH, str(read_commands), str(write_answers), CHROMIUM, *OPTIONS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={folder}"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._id = b"", 0
        self.pages: dict[str, Page] = {}  # by the id of their session

    def call(self, method: str, session: str | None = None, /, **parameters: object) -> dict[str, Any]:
        """What a command of the protocol returns. Raises RuntimeError for what Chromium refuses."""
        self._id += 1
        message: dict[str, object] = {"id": self._id, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while True:
            answer = self._receive(end, method)
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("sessionId") in self.pages:
                self.pages[answer["sessionId"]].heard(answer["method"], answer["params"])

    def _receive(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer {method}"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def open(self, address: str, width: int = 1200, height: int = 800, **media: str) -> "Page":
        """A page with storage of its own; media: features such as prefers_color_scheme='dark'."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.size(width, height)
        page.media(**media)
        page.go(address)
        return page

    def close(self) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(30)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._commands)
            os.close(self._answers)


class Page:
    """A tab, with what went wrong in it (`problems`) and what it asked for (`requests`)."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context
        self.problems: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def heard(self, method: str, parameters: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and parameters["entry"]["source"] in ("security", "violation", "deprecation"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.evaluate("window.before = true")
        self.call("Page.reload")
        self.wait("!window.before && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it becomes."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"].get("exception", {}).get("description", expression))
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + SECONDS
        while True:
            try:
                value = self.evaluate(f"Boolean({expression})")
            except (AssertionError, RuntimeError):  # between two documents
                if time.monotonic() > end:
                    raise
                value = None
            if value:
                return
            state = f"{expression} did not become true; {self.problems}" if time.monotonic() > end else ""
            assert not state, f"{state}\n{self.evaluate('document.body.innerText')}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The visible text of an element, which there must be."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of an element; another one on top of it is an error."""
        name = json.dumps(selector)
        x, y, hit = self.evaluate(
            f"""(() => {{
            const node = document.querySelector({name});
            node.scrollIntoView({{block: "nearest"}});
            const box = node.getBoundingClientRect(), x = box.x + box.width / 2, y = box.y + box.height / 2;
            return [x, y, node.contains(document.elementFromPoint(x, y))];
            }})()"""
        )
        assert hit, f"{selector} lies under something else"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str) -> None:
        """Types text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        code = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def choose_files(self, selector: str, *paths: Path) -> None:
        """Chooses files in a file field."""
        found = self.call("Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})")["result"]
        self.call("DOM.setFileInputFiles", files=[str(path) for path in paths], objectId=found["objectId"])

    def allow_downloads(self, folder: Path) -> None:
        self._browser.call(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder), browserContextId=self._context
        )

    def downloaded(self, folder: Path) -> Path:
        """The one file that a download has left, once it is complete."""
        end = time.monotonic() + SECONDS
        while not (files := [path for path in folder.iterdir() if path.suffix == ".json"]):
            assert time.monotonic() < end, f"no download in {sorted(folder.iterdir())}"
            time.sleep(0.02)
        return files[0]

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def media(self, **features: str) -> None:
        """Features such as prefers_color_scheme='dark'."""
        pairs = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def tree(self) -> list[tuple[str, str]]:
        """(role, name) of what screen readers see, in order."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n["ignored"]]

    def picture(self, path: Path) -> None:
        """A picture of what is visible, for people."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        del self._browser.pages[self._session]
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)
