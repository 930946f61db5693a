"""How commands speak to a running fleet: a line of JSON is sent to its control socket, and lines come back.

    {"command": "roll", "model": "..."}

is answered by {"progress": "..."}, any number of times, then {"result": {...}} or {"error": "..."}.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from roofline.common.errors import ConfigError, RooflineError
from roofline.common.json_types import JsonObject
from roofline.deploy.supervisor.folder import FleetFolder

MAX_LINE_BYTES = 1 << 20
CONNECT_SECONDS = 5.0

Tell = Callable[[str], Awaitable[None]]
Handler = Callable[[JsonObject, Tell], Awaitable[JsonObject]]


class ControlServer:
    """Takes commands of this user's other processes. handle: carries one out; what it raises of ours is told back."""

    def __init__(self, path: Path, handle: Handler) -> None:
        self._path, self._handle = path, handle
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on a socket that only this user can open."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._path), limit=MAX_LINE_BYTES)
        self._path.chmod(0o600)

    def close(self) -> None:
        """Take no more commands."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def send(content: JsonObject) -> None:
            try:
                writer.write(json.dumps(content).encode() + b"\n")
                await writer.drain()
            except OSError:  # who asked has left; what was asked for goes on
                pass

        try:
            line = await reader.readline()
            command = json.loads(line)
            if not isinstance(command, dict):
                raise ConfigError("a command is an object")
            await send({"result": await self._handle(command, lambda text: send({"progress": text}))})
        except RooflineError as error:
            await send({"error": str(error)})
        except ValueError as error:  # no JSON, or a line that is too long
            await send({"error": f"this is no command: {error}"})
        finally:
            writer.close()


def send_command(
    folder: FleetFolder, command: JsonObject, tell: Callable[[str], None] = lambda text: None
) -> JsonObject:
    """Have a running fleet carry out a command, and return its result. Raises RooflineError with what it refuses, and
    ConfigError where no fleet of that name runs."""
    try:
        for answer in _exchange(folder.control, command):
            if "progress" in answer:
                tell(str(answer["progress"]))
            elif "error" in answer:
                raise RooflineError(str(answer["error"]))
            elif isinstance(answer.get("result"), dict):
                result: JsonObject = answer["result"]
                return result
    except (ConnectionRefusedError, FileNotFoundError):
        raise ConfigError(
            f"no fleet named {folder.name!r} runs here: start one by `roofline up MODEL`, or give --name"
        ) from None
    except (OSError, ValueError) as error:
        raise RooflineError(f"the fleet {folder.name!r} does not answer: {error}") from error
    raise RooflineError(f"the fleet {folder.name!r} ended before it answered")


def _exchange(path: Path, command: JsonObject) -> Iterator[JsonObject]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(CONNECT_SECONDS)
        connection.connect(str(path))
        connection.settimeout(None)  # a roll takes as long as it takes
        connection.sendall(json.dumps(command).encode() + b"\n")
        with connection.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES):
                answer = json.loads(line)
                if isinstance(answer, dict):
                    yield answer
