"""A container's entry: which model, where it listens, and SageMaker's contract end to end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from roofline.bundle.manifest import CODE
from roofline.cli.parser import Parser
from roofline.cli.run.serve import command
from roofline.common.errors import ConfigError
from roofline.deploy.container import container_words, only_model_in
from roofline.server.options import ServeOptions

KEY = {"ROOFLINE_API_KEY": "k"}


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A folder with a model in it."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder.parent


@pytest.fixture
def sagemaker(tmp_path: Path) -> Path:
    """SageMaker's folder, with a model that was unpacked into it."""
    folder = tmp_path / "sagemaker"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder


@pytest.mark.parametrize(
    ("words", "environment", "own"),
    [
        ([], KEY, ["serve", "MODELS/tiny", "--host", "0.0.0.0"]),
        (["serve"], {}, ["serve", "MODELS/tiny"]),
        (["serve", "m", "--port", "1"], KEY, ["serve", "m", "--port", "1", "--host", "0.0.0.0"]),
        (["serve", "m", "--host", "::"], {}, ["serve", "m", "--host", "::"]),
        (["m"], KEY, ["m"]),
        (["--max-running", "2"], {}, ["serve", "MODELS/tiny", "--max-running", "2"]),
        (["serve", "m", "--api-keys=keys.toml"], {}, ["serve", "m", "--api-keys=keys.toml", "--host", "0.0.0.0"]),
        (["serve"], {"ROOFLINE_API_KEY": " "}, ["serve", "MODELS/tiny"]),
        (["serve"], {"ROOFLINE_MODEL": "smollm2-135m"}, ["serve", "smollm2-135m"]),
        (["serve"], {"HF_MODEL_ID": "org/repo"}, ["serve", "hf:org/repo"]),
        (["serve", "--config", "c.yaml"], KEY, ["serve", "--config", "c.yaml"]),
        (["serve", "--uds=/s"], KEY, ["serve", "MODELS/tiny", "--uds=/s"]),
        (["info", "x"], {}, ["info", "x"]),
        (["--version"], {}, ["--version"]),
        (["serve", "--help"], {}, ["serve", "--help"]),
        (["serve"], {"SM_ROOFLINE_MAX_RUNNING": "8"}, ["serve", "MODELS/tiny"]),  # of SageMaker alone
    ],
)
def test_words_of_a_container(volume, tmp_path, words, environment, own):
    found = container_words(words, environment, tmp_path / "none", volume)
    assert found == [word.replace("MODELS", str(volume)) for word in own]


@pytest.mark.parametrize(
    ("words", "environment", "more"),
    [
        (["serve"], {}, ["--host", "0.0.0.0", "--port", "8080"]),
        (["serve"], {"SAGEMAKER_BIND_TO_PORT": "9001"}, ["--host", "0.0.0.0", "--port", "9001"]),
        (["serve"], {"HF_MODEL_ID": "org/repo"}, ["--host", "0.0.0.0", "--port", "8080"]),  # what is there comes first
        (
            ["serve"],
            {"SM_VLLM_MAX_MODEL_LEN": "64", "SM_ROOFLINE_EXACT": "true", "SM_ROOFLINE_PAGE": "false", "OTHER": "1"},
            ["--exact", "--max-model-len=64", "--no-page", "--host", "0.0.0.0", "--port", "8080"],
        ),
        (["serve", "--port=1"], {}, ["--port=1", "--host", "0.0.0.0"]),
    ],
)
def test_words_in_sagemaker(sagemaker, tmp_path, words, environment, more):
    own = ["serve", str(sagemaker / "model.gguf"), *more]
    assert container_words(words, environment, sagemaker, tmp_path / "none") == own
    options = Parser("serve", command).parse(own[1:])["options"]
    assert isinstance(options, ServeOptions)
    assert options.host == "0.0.0.0"
    moved = sagemaker.rename(tmp_path / "elsewhere")
    environment = {**environment, "SM_MODEL_DIR": str(moved)}
    assert container_words(words, environment, sagemaker, tmp_path / "none") == [
        own[0],
        str(moved / "model.gguf"),
        *more,
    ]


def test_variables_stand_behind_the_model_and_before_what_the_call_says(sagemaker, tmp_path):
    environment = {"SM_ROOFLINE_MAX_RUNNING": "8", "SM_ROOFLINE_PAGE": ""}
    words = container_words(["serve", "m", "--max-running", "2"], environment, sagemaker, tmp_path / "none")
    assert words[:6] == ["serve", "m", "--max-running=8", "--page", "--max-running", "2"]
    options = Parser("serve", command).parse(words[1:])
    assert options["load"].max_running == 2  # type: ignore[attr-defined]


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no model: name one"):
        container_words(["serve"], {}, tmp_path / "none", tmp_path)
    run = [sys.executable, "-m", "roofline.deploy.container", "serve"]
    environment = {**os.environ, "SM_MODEL_DIR": str(tmp_path)}
    environment.pop("HF_MODEL_ID", None)
    failed = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("roofline: there is no model")
    assert failed.stderr.count("\n") == 1


def test_the_only_model_of_a_folder(tmp_path):
    assert only_model_in(tmp_path) is None
    assert only_model_in(tmp_path / "none") is None
    parts = tmp_path / "a" / "b"
    parts.mkdir(parents=True)
    for number in (1, 2):
        (parts / f"m-{number:05}-of-00002.gguf").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "config.json").touch()
    assert only_model_in(tmp_path) == parts / "m-00001-of-00002.gguf"
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / CODE).touch()
    with pytest.raises(
        ConfigError, match=r"holds 2 models \(m-00001-of-00002\.gguf, c\): name one, with ROOFLINE_MODEL"
    ):
        only_model_in(tmp_path)
    (parts / "m-00001-of-00002.gguf").unlink()
    assert only_model_in(tmp_path) == tmp_path / "c"


def test_without_a_key_the_container_is_told_of_it(tmp_path):
    run = [sys.executable, "-m", "roofline.deploy.container", "serve", str(tmp_path / "none.gguf")]
    environment = {name: value for name, value in os.environ.items() if name != "ROOFLINE_API_KEY"}
    told = [subprocess.run(run, env=each, capture_output=True, text=True, timeout=60).stderr
            for each in (environment, {**environment, **KEY})]  # fmt: skip
    assert ["no key: the server is reached from inside its container alone" in text for text in told] == [True, False]
    assert all("none.gguf: there is no such file or folder" in text for text in told)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sagemaker_starts_asks_and_stops_it(smollm2_path, tmp_path):
    """As its documentation has it: `serve`, a model in the folder, /ping until 200, /invocations, SIGTERM."""
    pytest.importorskip("roofline._native", reason="the native module is not built")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / smollm2_path.name).symlink_to(smollm2_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"SM_MODEL_DIR": str(tmp_path / "model"), "SAGEMAKER_BIND_TO_PORT": str(port)}
    variables |= {"SM_VLLM_MAX_NUM_SEQS": "4", "SM_ROOFLINE_CACHE_TOKENS": "1024", "ROOFLINE_THREADS": "1"}
    container = subprocess.Popen(
        [sys.executable, "-m", "roofline.deploy.container", "serve"],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(container.stderr or ()), daemon=True)
    reading.start()
    try:
        # From its own host name, as SageMaker's agent reaches it; no key, no model in the body.
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers={"host": "container.example"}, timeout=60
        ) as agent:
            end, status = time.monotonic() + 200, 0
            while status != 200:
                assert container.poll() is None, lines
                assert time.monotonic() < end, lines
                try:
                    status = agent.get("/ping").status_code
                except httpx.TransportError:
                    time.sleep(0.1)
                else:
                    assert status in (200, 503)
            accept = {"accept": "application/json", "content-type": "application/json"}
            messages = [{"role": "user", "content": "Hi"}]
            bodies = ({"messages": messages, "max_tokens": 4}, {"prompt": "Hi", "max_tokens": 4}, {"inputs": "Hi"})
            answers = [agent.post("/invocations", content=json.dumps(body), headers=accept) for body in bodies]
            assert [answer.status_code for answer in answers] == [200, 200, 200]
            assert answers[0].json()["choices"][0]["message"]["content"]
            assert agent.get("/limits").json()["context_tokens"] == 1024
        container.send_signal(signal.SIGTERM)
        assert container.wait(30) == 0
    finally:
        container.kill()
        container.wait(10)
        reading.join(10)
    assert any(f"0.0.0.0:{port}" in line for line in lines)
