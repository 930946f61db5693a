"""The engine's end of the socket to its owner, in this process."""

import select
import socket
import struct
import threading
import time

import pytest

from roofline.common.errors import RooflineError
from roofline.engine.events import Event
from roofline.engine.process import main, messages
from roofline.engine.process.main import Channel
from roofline.engine.process.messages import Abort, Close, StepReport
from roofline.engine.stats import EngineStats

FRAME = messages.frame(Abort("a", 1))


@pytest.fixture
def pair():
    """The owner's socket, and the channel at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(10)
        yield ours, Channel(theirs)


def test_messages_are_taken_whole_however_they_arrive(pair):
    ours, channel = pair
    assert channel.receive(wait=False) == []
    stream = FRAME * 2 + messages.frame(Close())
    cut = len(FRAME) + 2  # within a length
    ours.sendall(stream[:cut])
    assert channel.receive(wait=True) == [Abort("a", 1)]
    ours.sendall(stream[cut:-1])
    assert channel.receive(wait=True) == [Abort("a", 1)]
    assert channel.receive(wait=False) == []
    ours.sendall(stream[-1:])
    assert channel.receive(wait=True) == [Close()]
    assert not channel.closed


def test_waiting_ends_after_its_time_and_with_the_owner(pair):
    ours, channel = pair
    began = time.monotonic()
    assert channel.receive(wait=True, seconds=0.01) == []
    assert 0.01 <= time.monotonic() - began < 1.0
    began = time.monotonic()
    assert channel.receive(wait=False, seconds=30.0) == []
    ours.sendall(FRAME)
    ours.close()
    assert channel.receive(wait=True, seconds=30.0) == [Abort("a", 1)]
    assert channel.receive(wait=True) == []
    assert channel.closed
    assert time.monotonic() - began < 15


def test_a_message_of_the_largest_size_is_one_and_a_larger_one_breaks_the_stream(pair, monkeypatch):
    ours, channel = pair
    monkeypatch.setattr(messages, "MAX_MESSAGE", len(FRAME) - 4)
    ours.sendall(FRAME)
    assert channel.receive(wait=True) == [Abort("a", 1)]
    ours.sendall(struct.pack("<I", len(FRAME) - 3))
    with pytest.raises(RooflineError, match=f"a message of {len(FRAME) - 3} bytes"):
        channel.receive(wait=True)


def report(size):
    return StepReport([Event("x" * size, 0, [])], EngineStats())


def received(ours, size):
    data = b""
    while len(data) < size:
        data += ours.recv(1 << 20)
    return data


def test_sending_waits_for_a_slow_owner_from_a_limit_on(pair, monkeypatch):
    """Far more than the socket takes at once is left to be sent later, by whatever comes next."""
    ours, channel = pair
    monkeypatch.setattr(main, "UNSENT_LIMIT", 4 << 20)
    first, second = report(3 << 20), report(8 << 20)
    sending = threading.Thread(target=channel.send, args=(first,), daemon=True)
    sending.start()
    sending.join(10)
    assert not sending.is_alive()
    sending = threading.Thread(target=channel.send, args=(second,))
    sending.start()
    sending.join(0.2)
    assert sending.is_alive(), "more than the limit waits"
    size = len(messages.frame(first) + messages.frame(second))
    data = b""
    while sending.is_alive():
        data += ours.recv(1 << 16)
        sending.join(0.001)
    assert len(data) < size - (2 << 20), "the rest is not waited for"
    finishing = threading.Thread(target=channel.finish)
    finishing.start()
    data += received(ours, size - len(data))
    finishing.join(10)
    assert data == messages.frame(first) + messages.frame(second)
    assert not finishing.is_alive()


def test_an_owner_that_is_gone_is_not_waited_for(pair, monkeypatch):
    ours, channel = pair
    monkeypatch.setattr(main, "UNSENT_LIMIT", 0)
    ours.close()
    channel.send(report(1 << 22))
    channel.finish()
    assert channel.closed


def test_a_full_socket_is_waited_for_without_work(pair):
    """Between two tries to write, the kernel is asked to say when there is room."""
    ours, channel = pair
    steps, flush = [], channel._flush

    class Poll:
        def modify(self, sock, events):
            assert events == select.POLLOUT

        def poll(self):
            steps.append("wait")
            received(ours, 1)

    channel._poll = Poll()
    channel._flush = lambda: (steps.append("write"), flush())
    channel._out += b"x" * (8 << 20)
    flush()
    channel._wait_writable()
    assert steps == ["wait", "write"]
