"""Addresses that are refused, and what is told of a server that cannot be reached."""

import socket

import httpx
import pytest

from roofline.common.addresses import check_address, why_unreachable
from roofline.common.errors import ConfigError


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://127.0.0.1:99999", "its port is no number from 1 to 65535"),
        ("https://host:65536/v1", "its port is no number from 1 to 65535"),
        ("http://host:0", "its port is no number from 1 to 65535"),
        ("http://host:-1", "its port is no number from 1 to 65535"),
        ("http://host:http", "its port is no number from 1 to 65535"),
        ("http://[::1", "is no address: Invalid IPv6 URL"),
        ("http://", "is no address of a server"),
        ("ftp://host", "is no address of a server"),
        ("host:8000", "is no address of a server"),
    ],
)
def test_what_is_no_address_is_refused_in_a_sentence(address, why):
    with pytest.raises(ConfigError) as refusal:
        check_address(address)
    assert why in str(refusal.value)
    assert str(refusal.value).startswith(address)


@pytest.mark.parametrize(
    "address", ["http://host", "https://host/v1", "http://host:1", "http://host:65535", "http://[::1]:8"]
)
def test_addresses(address):
    check_address(address)


def test_why_a_server_cannot_be_reached():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(httpx.ConnectError, match="Errno") as refused:
            httpx.get(f"http://127.0.0.1:{closed.getsockname()[1]}", trust_env=False)
    assert why_unreachable(refused.value) == "Connection refused"
    several = OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno -2] Name or service not known")
    assert why_unreachable(several) == "Multiple exceptions: Connect call failed, Name or service not known"
