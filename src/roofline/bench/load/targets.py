"""What a load is sent to: a server that runs somewhere, or a server that is started here and ended afterwards."""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

import httpx

import roofline
from roofline.common.addresses import why_unreachable
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonObject
from roofline.common.loopback import LOOPBACK
from roofline.common.processes import describe_end

if TYPE_CHECKING:
    from roofline.bench.load.in_process import EngineThread

OURS, IN_PROCESS = "roofline:", "engine:"  # a server of ours, and our engine in this process
LLAMA_CPP, OPENVINO = "llama.cpp:", "openvino:"  # servers of others, by the models that they load
FORMS = f"an address (http://...), {OURS}MODEL, {IN_PROCESS}MODEL, {OPENVINO}FOLDER, {LLAMA_CPP}FILE.gguf"
KEY_VARIABLE = "ROOFLINE_API_KEY"  # that servers of ours read their key from
START_SECONDS = 600.0  # in which a server must be ready
END_SECONDS = 20.0  # in which a server that is told to end must have ended
ASK_SECONDS = 10.0


@dataclass(frozen=True)
class Target:
    """A server that answers. name: as it was written; url: of its API, ending in /v1; model: that requests name;
    engine, version: as far as the server tells them; options: of a server that was started here; local_model: the
    model's name here, of a server of ours; pid: of a server that was started here; further_urls: of servers beside it,
    among which requests go in turn; in_process: an engine of this process, which takes the place of a server;
    fingerprint, replicas: as servers of ours tell them."""

    name: str
    url: str
    model: str
    engine: str = ""
    version: str = ""
    options: dict[str, str] = field(default_factory=dict)
    local_model: str = ""
    pid: int | None = None
    in_process: "EngineThread | None" = None
    fingerprint: str = ""
    replicas: int = 1
    further_urls: tuple[str, ...] = ()


@contextmanager
def open_target(name: str, model: str | None = None, key: str | None = None) -> Iterator[Target]:
    """The server that a name means, while the block runs.

    name: an address, or several with commas; ``roofline:MODEL`` with options of `roofline serve` behind it;
    ``engine:MODEL`` with options of `LLM`; ``llama.cpp:FILE.gguf`` with options of llama-server; ``openvino:FOLDER``
    with --python of the interpreter that has openvino-genai, and options of `bench/peers/openvino_server.py`; or the
    command line of another server, in which {port} stands for a free port of 127.0.0.1 and `python` for this
    interpreter. model: None takes the first that the server lists.

    Raises ConfigError where the server cannot be started or asked.
    """
    if is_address(name):
        yield _ask_all(name, model, key)
        return
    if name.startswith(IN_PROCESS):
        with _in_process(name) as target:
            yield target
        return
    port = _free_port()
    local, command = _command(name, str(port))
    with tempfile.TemporaryFile() as output:
        process = _start(command, output, key)
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _wait(process, url, output, key, local)
            target = _ask(name, url, model, key)
            version = roofline.__version__ if local else target.version
            flags = _flags(command)
            yield replace(target, version=version, options=flags, local_model=local, pid=process.pid)
        finally:
            _end(process)


def _command(name: str, port: str) -> tuple[str, list[str]]:
    """The model's name here, of a server of ours, and the command that starts a target. Raises ConfigError."""
    if name.startswith(OURS):
        local, *options = _split(name.removeprefix(OURS))
        command = [sys.executable, "-m", "roofline", "serve", local, "--port", port, "--no-access-log", *options]
        return local, command
    if name.startswith(OPENVINO):
        return "", _openvino(_split(name.removeprefix(OPENVINO)), port)
    if name.startswith(LLAMA_CPP):
        return "", _llama_cpp(_split(name.removeprefix(LLAMA_CPP)), port)
    words = [sys.executable if part == "python" else part for part in _split(name)]
    if "{port}" not in name:
        raise ConfigError(f"{name!r} is no target: give {FORMS}, or a command line with {{port}}")
    return "", [part.replace("{port}", port) for part in words]


def _openvino(words: list[str], port: str) -> list[str]:
    """The command of a server of OpenVINO GenAI's ContinuousBatchingPipeline. words: the model, --python with the
    interpreter that has openvino-genai (this one is the default), options of the server."""
    from roofline.bench.peers import openvino_server

    python = sys.executable
    if "--python" in words:
        at = words.index("--python")
        python, words = " ".join(words[at + 1 : at + 2]), words[:at] + words[at + 2 :]
    if not words or not python:
        raise ConfigError(f"name the model, and behind --python an interpreter: {OPENVINO}FOLDER --python .../python")
    return [python, str(Path(openvino_server.__file__)), *words, "--port", port]


def _llama_cpp(words: list[str], port: str) -> list[str]:
    """The command of llama.cpp's own server. Raises ConfigError where it is not installed."""
    program = shutil.which("llama-server")
    if program is None:
        raise ConfigError(
            "llama-server is not on the PATH: install llama.cpp, or name the program in a command line, "
            f'"/.../llama-server -m {words[0]} --port {{port}}"; llama-cpp-python has no server that computes several '
            "requests at a time, so it is no target"
        )
    return [program, "-m", words[0], "--port", port, *words[1:]]


@contextmanager
def _in_process(name: str) -> Iterator[Target]:
    from roofline.bench.load.in_process import open_engine

    model, *_ = words = _split(name.removeprefix(IN_PROCESS))
    flags = _flags(words)
    with open_engine(model, flags) as engine:
        yield Target(
            name=name,
            url=name,
            model=model,
            engine="roofline",
            version=roofline.__version__,
            options=flags,
            local_model=model,
            pid=None,
            in_process=engine,
            fingerprint=engine.fingerprint,
        )


def is_address(name: str) -> bool:
    """Whether a name means a server that runs somewhere, or several with commas."""
    return name.startswith(("http://", "https://"))


def addresses(name: str) -> list[str]:
    """Those of a name of servers that run somewhere."""
    return [address.strip() for address in name.split(",")]


def is_local(name: str) -> bool:
    """Whether the server that a name means runs on this machine."""
    return not is_address(name) or all(urlsplit(address).hostname in LOOPBACK for address in addresses(name))


def backend_of(name: str) -> str:
    """The backend that computes of roofline:MODEL and engine:MODEL, "" of other targets."""
    return _flags(_split(name)).get("backend", "cpu") if name.startswith((OURS, IN_PROCESS)) else ""


def _flags(command: list[str]) -> dict[str, str]:
    """The options of a command line by name, without the port, which is another one each time."""
    flags: dict[str, str] = {}
    for word, behind in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--") and word != "--port":
            name, _, value = word.removeprefix("--").partition("=")
            flags[name] = value or ("" if behind.startswith("-") else behind)
    return flags


def _split(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no command line: {error}") from error
    if not words:
        raise ConfigError(f"a target is empty: give an address, {OURS}MODEL, or a command line with {{port}}")
    return words


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _start(command: list[str], output: IO[bytes], key: str | None) -> "subprocess.Popen[bytes]":
    variables = {**os.environ, KEY_VARIABLE: key or ""}
    try:
        # A session of its own: Ctrl-C ends the measurement first, and the server by `_end`.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {cause_of(error)}") from error


def _wait(process: "subprocess.Popen[bytes]", url: str, output: IO[bytes], key: str | None, local: str) -> None:
    """Wait until a server that was started lists its models, one of ours until it is ready. Raises ConfigError."""
    ready = f"{url.removesuffix('/v1')}/ready" if local else f"{url}/models"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended at its start ({describe_end(process.returncode)}): {_tail(output)}")
        try:
            if httpx.get(ready, headers=_headers(key), timeout=ASK_SECONDS).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise ConfigError(f"the server was not ready within {START_SECONDS:.0f} s: {_tail(output)}")


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    lines = [line for line in output.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-3:]) or "it printed nothing"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a server that was started here, by its id, and what it started by their session's."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _headers(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def _ask_all(name: str, model: str | None, key: str | None) -> Target:
    """The target of one address or several. Raises ConfigError where one does not answer, or serves another model."""
    first, *others = (_ask(name, address, model, key) for address in addresses(name))
    for other in others:
        if other.model != first.model:
            raise ConfigError(
                f"{other.url} lists the model {other.model!r} first, {first.url} {first.model!r}: name one that all of "
                "them have with --model"
            )
    versions, prints = (dict.fromkeys(getattr(each, what) for each in (first, *others)) for what in _TOLD)
    return replace(
        first,
        version="+".join(filter(None, versions)),
        fingerprint="+".join(filter(None, prints)),
        replicas=sum(each.replicas for each in (first, *others)),
        further_urls=tuple(other.url for other in others),
    )


_TOLD = ("version", "fingerprint")


def _ask(name: str, address: str, model: str | None, key: str | None) -> Target:
    """The target at an address, with what it says of itself. Raises ConfigError where it does not answer."""
    url = address.rstrip("/")
    url = url if url.endswith("/v1") else f"{url}/v1"
    try:
        response = httpx.get(f"{url}/models", headers=_headers(key), timeout=ASK_SECONDS)
        listed = response.json().get("data") if response.status_code == 200 else None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{address} cannot be asked: {why_unreachable(error)}; give the address of a running server"
        ) from error
    cards = [card for card in listed or [] if isinstance(card, dict) and card.get("id")]
    if not cards and model is None:
        raise ConfigError(
            f"{url}/models answers {response.status_code} and lists no model: give the address of an "
            "OpenAI-compatible server, or name its model with --model"
        )
    owner = str(cards[0].get("owned_by", "")) if cards else ""
    facts = _read_json(url, "ready", key)  # of servers of ours
    replicas = facts.get("replicas")
    return Target(
        name,
        url,
        model or str(cards[0]["id"]),
        owner,
        version=str(_read_json(url, "version", key).get("version", "")),  # as vLLM and others tell it
        fingerprint=str(facts.get("system_fingerprint", "")),
        replicas=len(replicas) if isinstance(replicas, list) and replicas else 1,
    )


def _read_json(url: str, route: str, key: str | None) -> JsonObject:
    """The object that a route beside the API answers, an empty one where there is none."""
    try:
        answer = httpx.get(f"{url.removesuffix('/v1')}/{route}", headers=_headers(key), timeout=ASK_SECONDS)
        facts = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}
