"""TLS over real sockets: the certificate, its reload, and what is refused."""

import asyncio
import os
import socket
import ssl
import time

import httpx
import pytest

from roofline.common.errors import ConfigError
from roofline.common.processes import signal_handlers_as_before
from roofline.server import serve as module
from roofline.server.limits import Limits
from roofline.server.options import ServeOptions
from roofline.server.tls import Certificate

HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64)  # the beginning of a handshake
trustme = pytest.importorskip("trustme", reason="it makes the certificates")


@pytest.fixture
def authority():
    return trustme.CA()


@pytest.fixture
def files(tmp_path):
    return tmp_path / "chain.pem", tmp_path / "key.pem"


def write(issued, files) -> None:
    """As renewals do it: each file replaced at once."""
    for content, path in zip((issued.cert_chain_pems[0], issued.private_key_pem), files, strict=True):
        content.write_to_path(path.with_suffix(".new"))
        os.replace(path.with_suffix(".new"), path)


def shown(address: tuple[str, int], authority, name: str | None = "localhost", **versions) -> set[str]:
    """The names in the certificate that a connection is shown; name None: the client names no server."""
    context = ssl.create_default_context()
    context.check_hostname = name is not None
    for option, value in versions.items():
        setattr(context, option, value)
    authority.configure_trust(context)
    with (
        socket.create_connection(address, timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        return {value for _, value in secure.getpeercert()["subjectAltName"]}


@pytest.fixture
def listening(files):
    """listening(certificate): an address where each connection is greeted under TLS, in a thread."""
    import threading

    stops = []

    def start(certificate):
        server = socket.create_server(("127.0.0.1", 0))

        def greet():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                try:
                    with certificate.context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(1)
                except OSError:
                    pass

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        stops.append((server, thread))
        return server.getsockname()

    yield start
    for server, thread in stops:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


@pytest.mark.parametrize("name", ["localhost", None])
def test_new_connections_have_the_newest_certificate(authority, files, listening, name, caplog):
    write(authority.issue_cert("localhost", "first.example"), files)
    certificate = Certificate(*files)
    address = listening(certificate)
    assert shown(address, authority, name) == {"localhost", "first.example"}
    write(authority.issue_cert("localhost", "second.example"), files)
    assert "first.example" in shown(address, authority, name)  # not before it is looked at
    certificate.refresh()
    assert shown(address, authority, name) == {"localhost", "second.example"}
    for broken in (b"no certificate", authority.issue_cert("localhost").cert_chain_pems[0].bytes(), None):
        caplog.clear()
        files[0].unlink() if broken is None else files[0].write_bytes(broken)
        certificate.refresh()
        certificate.refresh()
        assert "second.example" in shown(address, authority, name)
        (line,) = caplog.messages
        assert "are no certificate with its key: " in line
        assert line.endswith(". The certificate that was read before stays.")
    write(authority.issue_cert("localhost", "third.example"), files)
    certificate.refresh()
    assert "third.example" in shown(address, authority, name)


def test_a_refresh_by_force_reads_unchanged_files(authority, files, caplog):
    caplog.set_level("INFO", "roofline.server")
    write(authority.issue_cert("localhost"), files)
    certificate = Certificate(*files)
    certificate.refresh()
    assert not caplog.messages
    certificate.refresh(True)
    assert caplog.messages == [f"{files[0]}: new connections have this certificate"]


def test_old_versions_are_refused(authority, files, listening):
    write(authority.issue_cert("localhost"), files)
    certificate = Certificate(*files)
    assert certificate.context.minimum_version == ssl.TLSVersion.TLSv1_2
    address = listening(certificate)
    assert shown(address, authority, maximum_version=ssl.TLSVersion.TLSv1_2)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"), pytest.raises(OSError):
        shown(address, authority, minimum_version=ssl.TLSVersion.TLSv1_1, maximum_version=ssl.TLSVersion.TLSv1_1)


def test_files_that_do_not_fit_end_the_start(authority, files):
    write(authority.issue_cert("localhost"), files)
    other = files[1].with_name("other.pem")
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    for pair, reason in (
        ((files[0], other), "KEY_VALUES_MISMATCH"),
        ((files[0], files[0]), "no certificate with its key: "),
        ((files[0].with_name("nothing"), files[1]), "No such file or directory"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Certificate(*pair)
    with pytest.raises(ConfigError, match="TLS needs both"):
        ServeOptions(tls_certificate=files[0])
    with pytest.raises(ConfigError, match="TLS needs both"):
        ServeOptions(tls_key=files[1])


def test_a_key_with_a_password_is_refused_and_asked_of_nobody(authority, files):
    from cryptography.hazmat.primitives import serialization

    issued = authority.issue_cert("localhost")
    write(issued, files)
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    form = serialization.PrivateFormat.PKCS8
    protection = serialization.BestAvailableEncryption(b"secret")
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, protection))
    with pytest.raises(ConfigError, match="are no certificate with its key"):
        Certificate(*files)


def test_a_server_speaks_tls_and_takes_up_a_renewed_certificate_and_keys(
    authority, files, engine, make_context, monkeypatch, tmp_path
):
    """From options to the socket, in uvicorn and uvloop."""
    import queue
    import signal
    import threading

    write(authority.issue_cert("127.0.0.1", "first.example"), files)
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "ann"\nkey = "a"\n')
    lines, outcome = queue.Queue(), []
    monkeypatch.setattr(module.log, "say", lines.put)

    def visit(client, address):
        statuses = [client.get("/stats", headers={"authorization": f"Bearer {key}"}).status_code for key in "ab"]
        end = time.monotonic() + 30
        write(authority.issue_cert("127.0.0.1", "second.example"), files)
        keys.write_text('[[keys]]\nname = "bob"\nkey = "b"\n')
        while "second.example" not in shown(address, authority, "127.0.0.1"):
            assert time.monotonic() < end, "the certificate was not read again"
            time.sleep(0.05)
        while client.get("/stats", headers={"authorization": "Bearer b"}).status_code != 200:
            assert time.monotonic() < end, "the keys were not read again"
            time.sleep(0.05)
        old = client.get("/stats", headers={"authorization": "Bearer a"}).status_code
        keys.write_text("broken")
        os.kill(os.getpid(), signal.SIGHUP)
        return [*statuses, old, client.get("/stats", headers={"authorization": "Bearer b"}).status_code]

    def visiting():
        try:
            address = lines.get(timeout=30).removeprefix("Listening on ")
            assert address.startswith("https://127.0.0.1:")
            lines.get(timeout=30)
            context = ssl.create_default_context()
            authority.configure_trust(context)
            transport = httpx.HTTPTransport(verify=context, retries=5)
            with httpx.Client(base_url=address, transport=transport, timeout=30) as client:
                outcome.append(visit(client, ("127.0.0.1", int(address.rpartition(":")[2]))))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    visitor = threading.Thread(target=visiting)
    visitor.start()
    options = ServeOptions("m", port=0, tls_certificate=files[0], tls_key=files[1], api_keys=keys)
    module.serve_engine(options, engine, make_context().text)
    visitor.join(30)
    assert outcome == [[200, 401, 401, 200]]


def test_a_handshake_that_never_ends_is_closed_in_time(authority, files, make_context):
    """A client that says nothing, and one that stops in the middle, keep their connections no longer than a request's
    headers may take."""
    write(authority.issue_cert("127.0.0.1"), files)
    options = ServeOptions(tls_certificate=files[0], tls_key=files[1])
    context = make_context(limits=Limits(read_seconds=0.3, drain_seconds=0))

    async def run() -> list[bytes]:
        server = module._http_server(options, context)
        listening = socket.create_server(("127.0.0.1", 0))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started:
            await asyncio.sleep(0.01)
        received = []
        for sent in (b"", HELLO[:20]):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            writer.write(sent)
            async with asyncio.timeout(20):
                received.append(await reader.read())
            writer.close()
        server.should_exit = True
        await serving
        return received

    with signal_handlers_as_before():  # `roofline serve` does it around its server
        assert asyncio.run(run()) == [b"", b""]
