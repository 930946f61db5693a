"""Addresses of servers that users name, and why a server cannot be reached."""

import re
from urllib.parse import urlsplit

from roofline.common.errors import ConfigError

_NUMBER = re.compile(r"\[Errno -?\d+\] ")  # of the operating system's errors, which tells a reader nothing


def check_address(address: str) -> None:
    """Raise ConfigError where an address is not http:// or https:// with a host, and a port that there can be."""
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise ConfigError(f"{address} is no address: {error}; write it as http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address} is no address of a server; write it as http://HOST:PORT")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError(f"{address}: its port is no number from 1 to 65535; correct it")


def why_unreachable(error: BaseException) -> str:
    """What the operating system says of a connection that failed, whatever a library raised for it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return without_numbers(str(error))


def without_numbers(text: str) -> str:
    """An error's text without the operating system's numbers."""
    return _NUMBER.sub("", text)
