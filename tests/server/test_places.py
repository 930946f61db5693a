"""Paths among options are tried before a model is fetched or loaded; "Listening on" is said once it is true."""

import os
import signal
import socket

import pytest

from roofline.cli import main
from roofline.common.errors import ConfigError
from roofline.server import serve as module
from roofline.server.batches.files import Files
from roofline.server.limits import Limits
from roofline.server.options import ServeOptions
from roofline.server.places import check_places


@pytest.fixture
def too_late(monkeypatch):
    def fail(*_):
        raise AssertionError("a model would have been loaded")

    monkeypatch.setattr("roofline.cli.run.prepare.prepare", fail)
    monkeypatch.setattr(module, "make_engine", fail)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_text("notes")
    return path


IN_A_FILE = [
    *(["--batch-folder", "{file}"], ["--batch-folder", "{file}/batches"], ["--record", "{file}/record"]),
    *(["--response-store", "{file}/responses"], ["--api-keys", "{file}/keys"], ["--receipt-key", "{file}/key"]),
    *(["--tls-certificate", "{file}/a", "--tls-key", "{file}/b"], ["--adapter", "sql={file}/adapter"]),
]


@pytest.mark.parametrize("flags", IN_A_FILE, ids=" ".join)
def test_serve_names_a_bad_path_before_anything_is_loaded(too_late, file, capsys, flags):
    words = [word.replace("{file}", str(file)) for word in flags]
    assert main.main(["serve", "tiny", "--port", "0", *words]) == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(file) in message
    assert file.read_text() == "notes"


def test_serve_names_an_adapter_that_is_none_before_anything_is_loaded(too_late, tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 0}')
    assert main.main(["serve", "tiny", "--port", "0", "--adapter", f"sql={tmp_path}"]) == 1
    assert f"{tmp_path}/adapter_config.json: r: " in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["-o", "{file}/out"], ["-o", "{file}2", "--errors", "{file}/errors"]], ids=" ".join)
def test_batch_names_a_bad_path_before_anything_is_loaded(too_late, file, capsys, flags):
    words = [word.replace("{file}", str(file)) for word in flags]
    assert main.main(["batch", str(file), "-m", "tiny", *words]) == 1
    message = capsys.readouterr().err
    assert message == f"roofline: {words[-1]}: cannot be written: a part of the path is a file\n"


def test_a_program_that_serves_is_told_of_a_bad_path_too(too_late, file):
    with pytest.raises(ConfigError, match=r"batch_folder=.*the folder cannot be written: a part of the path is a file"):
        module.serve(ServeOptions("tiny", port=0, batch_folder=file))


def test_a_folder_that_another_server_has_is_named(tmp_path):
    files = Files(tmp_path, Limits())
    with pytest.raises(ConfigError, match="another server has this folder"):
        check_places(ServeOptions(batch_folder=tmp_path))
    files.close()
    check_places(ServeOptions(batch_folder=tmp_path))
    Files(tmp_path, Limits()).close()


def test_paths_that_can_be_used_are_left_empty(tmp_path):
    options = ServeOptions(batch_folder=tmp_path / "new" / "batches", response_store=tmp_path / "responses")
    check_places(options)
    kept = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert kept == {"new", "responses", *(f"new/batches{part}" for part in ("", "/files", "/batches", "/lock"))}


def test_listening_is_said_once_connections_are_taken(engine, make_context, monkeypatch):
    """A connection of the moment in which it is said is not refused."""
    lines = []

    def say(line):
        lines.append(line)
        if line.startswith("Listening on http://127.0.0.1:"):
            socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2])), timeout=10).close()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module.log, "say", say)
    module.serve_engine(ServeOptions("m", port=0), engine, make_context().text)
    assert [line.split()[0] for line in lines] == ["Listening", "Ready:"]


@pytest.mark.parametrize(
    ("name", "default", "least", "less"),
    [
        ("stall_seconds", 10.0, 0.1, 0.09),
        ("canary_seconds", 30.0, 0, -0.1),
        ("ping_seconds", 15.0, 0, -0.1),
        ("first_token_timeout", 1800.0, 0, -0.1),
        ("request_timeout", 7200.0, 0, -0.1),
        ("stored_response_days", 30.0, 0, -0.1),
        ("max_queued_requests", 256, 1, 0),
        ("max_streams", 256, 1, 0),
        ("max_stored_responses", 10_000, 0, -1),
        ("max_stored_bytes", 134_217_728, 1, 0),
        ("batch_at_once", 16, 1, 0),
        ("data_parallel", 1, 1, 0),
        ("model_megabytes", 0, 0, -1),
    ],
)
def test_an_option_has_its_documented_default_and_bound(name, default, least, less):
    assert getattr(ServeOptions(), name) == default
    more = {"extra_model": ["a=b"]} if name == "model_megabytes" else {}
    for value in (least, least + 1):
        assert getattr(ServeOptions(**{name: value}, **more), name) == value
    with pytest.raises(ConfigError, match=name):
        ServeOptions(**{name: less})
