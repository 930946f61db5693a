"""OpenVINO GenAI's ContinuousBatchingPipeline behind the OpenAI API, for loads: answers stream, greedily.

    python openvino_server.py FOLDER_OR_GGUF --port 8000 --max-num-seqs 64 --threads 2

Nothing of Roofline is imported here: the file runs in any interpreter that has openvino-genai. Options beside the
port, the device and the threads are fields of SchedulerConfig; those that are left out stay as the package has them.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

JsonObject = dict[str, Any]
OfPackage = Any  # objects of openvino-genai, whose types are not known where it is not installed

OWNER = "openvino-genai"
MOST_OF_A_CHARACTER = 4  # tokens: as many as UTF-8 has bytes for one
KNOWN = {"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos"}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class RequestRefused(Exception):
    """A request that this server does not answer, with the reason."""


@dataclass(eq=False)
class OpenVinoAnswer:
    """A request under way. handle: the pipeline's; pending: tokens that end within a character."""

    transport: asyncio.Transport
    handle: OfPackage
    chat: bool
    prompt_tokens: int
    tokens: int = 0
    pending: list[int] = field(default_factory=list)

    def write(self, event: JsonObject) -> None:
        """Send an event of the stream."""
        self._send(b"data: %s\n\n" % json.dumps(event).encode())

    def end(self, event: JsonObject) -> None:
        """Send the last event, and the stream's end."""
        self._send(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(event).encode())
        self.transport.write(b"0\r\n\r\n")

    def choice(self, text: str, finish: str | None = None) -> JsonObject:
        """An event with a part of the answer."""
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"choices": [{"index": 0, **content, "finish_reason": finish}]}

    def _send(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%s\r\n" % (len(data), data))


class Engine:
    """The pipeline, and the answers that it computes.

    A step of the pipeline keeps the interpreter's lock, so a second thread could do nothing meanwhile: steps are taken
    on the event loop, and what came over the sockets is read between two of them.
    """

    def __init__(self, model: str, device: str, threads: int | None, options: dict[str, str]) -> None:
        import openvino_genai

        self.genai = openvino_genai
        scheduler = _scheduler(openvino_genai.SchedulerConfig(), options)
        properties = {} if threads is None else {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, device, properties)
        self.tokenizer = self.pipeline.get_tokenizer()
        self.cached = None if scheduler.enable_prefix_caching else 0  # tokens of a prompt, where that is known
        self.name = os.path.basename(model.rstrip("/"))
        self._anchor = int(self._encode("a", special=False).data[0, -1])  # text in front, so that no space is cut off
        self._before = len(self.tokenizer.decode([self._anchor]))
        self._texts: dict[tuple[int, ...], str] = {}
        self._answers: list[OpenVinoAnswer] = []
        self._wake, self._count = asyncio.Event(), 0

    def submit(self, transport: asyncio.Transport, body: JsonObject) -> None:
        """Queue a request, and begin its answer. Raises RequestRefused."""
        _check(body)
        chat = "messages" in body
        if chat:
            text = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        else:
            text = body["prompt"]
        ids = self._encode(text, special=not chat)
        self._count += 1
        handle = self.pipeline.add_request(self._count, ids, self._config(body))
        transport.write(HEAD)
        self._answers.append(OpenVinoAnswer(transport, handle, chat, ids.shape[1]))
        self._wake.set()

    async def work(self) -> None:
        """Take steps while there are answers to compute."""
        while True:
            if not self._answers:
                self._wake.clear()
                await self._wake.wait()
            self.pipeline.step()
            self._answers = [answer for answer in self._answers if self._tell(answer)]
            for _ in range(2):  # the loop looks at its sockets, and then calls who reads them
                await asyncio.sleep(0)

    def _encode(self, text: str, special: bool) -> OfPackage:
        """Token ids [1, tokens]."""
        return self.tokenizer.encode(text, add_special_tokens=special).input_ids

    def _config(self, body: JsonObject) -> OfPackage:
        """How an answer is computed; where it may end by the model's own configuration."""
        ignored = body.get("ignore_eos", False)
        config = self.genai.GenerationConfig() if ignored else self.pipeline.get_config()
        config.do_sample, config.ignore_eos = False, ignored
        config.max_new_tokens = body["max_tokens"]
        return config

    def _tell(self, answer: OpenVinoAnswer) -> bool:
        """Send what the step brought of an answer. Returns whether there is more to come."""
        if answer.transport.is_closing():
            answer.handle.cancel()
            return False
        new, finish = [], None
        while answer.handle.can_read():
            for output in answer.handle.read().values():
                new += output.generated_ids
                finish = output.finish_reason
        answer.tokens += len(new)
        status, states = answer.handle.get_status(), self.genai.GenerationStatus
        over = status != states.RUNNING
        text = self._text(answer, new, over) if new else ""
        if text:
            answer.write(answer.choice(text))
        if not over:
            return True
        if status != states.FINISHED:
            answer.end({"error": {"message": f"the pipeline ended this request: {status.name}"}})
            return False
        reason = "length" if finish == self.genai.GenerationFinishReason.LENGTH else "stop"
        answer.end({**answer.choice("", reason), "usage": self._usage(answer)})
        return False

    def _text(self, answer: OpenVinoAnswer, new: list[int], over: bool) -> str:
        """The text of new tokens, empty while they end within a character."""
        answer.pending += new
        ids = tuple(answer.pending)
        text = self._texts.get(ids)
        if text is None:
            text = self._texts[ids] = self.tokenizer.decode([self._anchor, *ids])[self._before :]
        if text.endswith("\ufffd") and len(ids) < MOST_OF_A_CHARACTER and not over:
            return ""
        answer.pending = []
        return text

    def _usage(self, answer: OpenVinoAnswer) -> JsonObject:
        usage: JsonObject = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens}
        if self.cached is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
        return usage


def _check(body: JsonObject) -> None:
    """Raises RequestRefused for what would change an answer, and is not done here."""
    unknown = sorted(set(body) - KNOWN)
    if unknown:
        raise RequestRefused(f"this server does not know {', '.join(unknown)}: leave it out")
    if not body.get("stream") or body.get("temperature", 0) != 0:
        raise RequestRefused("this server streams greedy answers: send stream true and temperature 0")
    if not isinstance(body.get("max_tokens"), int) or body["max_tokens"] < 1:
        raise RequestRefused("max_tokens must be a number above 0")
    if "messages" not in body and not isinstance(body.get("prompt"), str):
        raise RequestRefused("prompt must be a text")


def _scheduler(config: OfPackage, options: dict[str, str]) -> OfPackage:
    """SchedulerConfig with the fields that options name. Raises ValueError."""
    for name, text in options.items():
        known = getattr(config, name, None)
        if type(known) not in (bool, int):
            raise ValueError(f"SchedulerConfig has no number or switch {name!r}")
        if type(known) is bool and text not in ("true", "false"):
            raise ValueError(f"{name} is a switch: write true or false, not {text!r}")
        if type(known) is int and not text.isdecimal():
            raise ValueError(f"{name} is a number, not {text!r}")
        setattr(config, name, text == "true" if type(known) is bool else int(text))
    return config


class OpenVinoConnection(asyncio.Protocol):
    """A client's connection, which stays open for its next requests."""

    def __init__(self, engine: Engine, version: str) -> None:
        self._engine, self._version, self._data = engine, version, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        for head, body in self._requests():
            method, path = head.split(b" ", 2)[:2]
            try:
                if method == b"GET":
                    self._get(path)
                else:
                    self._engine.submit(self._transport, json.loads(body))
            except (RequestRefused, ValueError, RuntimeError) as error:
                self._answer(b"400 Bad Request", {"error": {"message": str(error)}})

    def _requests(self) -> Iterator[tuple[bytes, bytes]]:
        """(head, body) of each request that is complete."""
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end]
            sizes = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
            last = end + 4 + (int(sizes[0]) if sizes else 0)
            if len(self._data) < last:
                return
            body, self._data = self._data[end + 4 : last], self._data[last:]
            yield head, body

    def _get(self, path: bytes) -> None:
        if path == b"/v1/models":
            self._answer(b"200 OK", {"object": "list", "data": [{"id": self._engine.name, "owned_by": OWNER}]})
        elif path == b"/version":
            self._answer(b"200 OK", {"version": self._version})
        else:
            self._answer(b"404 Not Found", {"error": {"message": "there is nothing here"}})

    def _answer(self, status: bytes, content: JsonObject) -> None:
        data = json.dumps(content).encode()
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % (status, len(data)) + data)


async def serve(engine: Engine, port: int, version: str) -> None:
    """Answer on 127.0.0.1 until SIGINT or SIGTERM, or until the pipeline fails, whose error is raised."""
    loop = asyncio.get_running_loop()
    working = loop.create_task(engine.work())
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, working.cancel)
    server = await loop.create_server(lambda: OpenVinoConnection(engine, version), "127.0.0.1", port)
    try:
        await working
    except asyncio.CancelledError:
        pass
    finally:
        server.close()


def options_of(words: list[str]) -> dict[str, str]:
    """{name: value} of words --some-name VALUE. Raises ValueError."""
    names, values = words[::2], words[1::2]
    if len(names) != len(values) or not all(name.startswith("--") for name in names):
        raise ValueError(f"options are --NAME VALUE: {' '.join(words)}")
    return {name[2:].replace("-", "_"): value for name, value in zip(names, values, strict=True)}


def main(words: list[str]) -> None:
    """Load the model, and serve it. Ends with a sentence where that is not possible."""
    try:
        from importlib.metadata import version

        number = version(OWNER)
    except ImportError:
        sys.exit(
            f"openvino-genai is not installed in {sys.executable}: `{sys.executable} -m pip install openvino-genai`, "
            "or name an interpreter that has it with --python"
        )
    if not words or not os.path.exists(words[0]):
        sys.exit(f"there is no {words[0] if words else 'model'}: name a folder that was exported, or a GGUF file")
    try:
        options = options_of(words[1:])
        port, device = int(options.pop("port", "8000")), options.pop("device", "CPU")
        threads = options.pop("threads", None)
        engine = Engine(words[0], device, None if threads is None else int(threads), options)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"openvino-genai {number} cannot serve {words[0]}: {error}")
    asyncio.run(serve(engine, port, number))


if __name__ == "__main__":
    main(sys.argv[1:])
