"""HAProxy's runtime API: one line is sent to its socket, and the answer ends with the connection."""

import asyncio
from pathlib import Path

from roofline.common.errors import RooflineError

ANSWER_SECONDS = 5.0


class RuntimeCommandError(RooflineError):
    """HAProxy refused a command of its runtime API, or did not answer."""


async def ask_haproxy(path: Path, command: str) -> str:
    """Return the answer to a command. Raises RuntimeCommandError where HAProxy does not answer in time."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(path))
            try:
                writer.write(f"{command}\n".encode())
                await writer.drain()
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as error:
        raise RuntimeCommandError(f"HAProxy does not answer {command!r}: {error}") from error
    return answer.decode(errors="replace").strip()


async def order_haproxy(path: Path, command: str) -> None:
    """Have a command carried out. Raises RuntimeCommandError for an answer, which is always a complaint."""
    answer = await ask_haproxy(path, command)
    if answer and not answer.startswith(("no need to change", "IP changed", "nothing changed")):
        raise RuntimeCommandError(f"HAProxy refused {command!r}: {answer}")
