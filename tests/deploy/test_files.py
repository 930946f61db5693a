"""Files that other programs start servers from; the judges are systemd-analyze, hadolint, compose-spec and HAProxy."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from roofline.deploy.container import MODELS
from roofline.deploy.files.compose import HAPROXY, ComposeStack
from roofline.deploy.files.dockerfile import IMAGES, PORT, USER_ID, dockerfile
from roofline.deploy.files.stopping import stop_seconds
from roofline.deploy.files.unit import ServiceUnit
from roofline.server.app import create_app
from roofline.server.context import Context
from roofline.server.keys import Keys
from roofline.server.limits import Limits
from tests import judges
from tests.command_line import call_roofline
from tests.server.conftest import BytesText, FakeEngine, protocol_of, serving

ROOT = Path(__file__).parents[2]
JUDGES = ROOT / "build" / "judges"  # where `make test-judges` installs them
MOST_EXPOSURE = 2.0  # of systemd-analyze security, whose scale ends at 10


def program_of(name: str) -> str:
    """The path of a program, which may lie beside this Python's or among the judges. Skips the test where it is
    missing, or fails it in the run that must have all judges."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), f"{JUDGES}/bin", os.environ["PATH"], "/usr/sbin"))
    path = shutil.which(name, path=beside)
    if path is None and name == "hadolint" and os.environ.get("ROOFLINE_TEST_JUDGES"):
        pytest.fail("hadolint, which `make test-judges` installs, is not there")
    if path is None:
        pytest.skip(f"{name} is not installed")
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that systemd may start, in a folder whose name needs care."""
    path = tmp_path / "50 % of $HOME" / "roofline"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def unit(program: Path, *words: str) -> str:
    made = call_roofline(["deploy", "systemd", "smollm2-135m", "--program", str(program), *words])
    assert made.exit_code == 0, made.stderr
    return made.stdout


def verified(folder: Path, text: str) -> str:
    """What systemd finds wrong with a unit."""
    path = folder / "roofline.service"
    path.write_text(text)
    words = [program_of("systemd-analyze"), "verify", "--man=no", str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return done.stderr + ("" if done.returncode == 0 else f"status {done.returncode}")


@pytest.mark.parametrize("gpu", ["none", "nvidia", "amd"])
def test_systemd_takes_the_unit_and_finds_little_exposed(tmp_path, program, gpu):
    (tmp_path / "keys.toml").touch()
    text = unit(
        program, "--gpu", gpu, "--", "--api-keys", f"{tmp_path}/keys.toml", "--served-model-name", 'a "b" c%d$HOME\\'
    )
    assert verified(tmp_path, text) == ""
    words = [program_of("systemd-analyze"), "security", "--offline=true", "--no-pager", f"{tmp_path}/roofline.service"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    score = re.search(r"Overall exposure level for roofline\.service: ([\d.]+)", told)
    assert score is not None, told
    assert float(score[1]) <= MOST_EXPOSURE


def test_systemd_would_find_what_is_wrong(tmp_path, program):
    text = unit(program)
    for right, wrong in (("Type=notify", "Type=notified"), (str(program.name), "rooflin"), ("[Install]", "[Instal]")):
        assert verified(tmp_path, text.replace(right, wrong)) != ""


def test_what_the_unit_says(tmp_path, program):
    model = tmp_path / "m.gguf"
    model.touch()
    made = call_roofline(["deploy", "systemd", str(model), "--program", str(program), "--", "--uds=/run/roofline/s"])
    lines = made.stdout.splitlines()
    path = str(program).replace("%", "%%")  # systemd-analyze above knows that of the path $ stays
    assert f'ExecStart="{path}" serve {model} --uds=/run/roofline/s' in lines
    stop = next(int(line.partition("=")[2]) for line in lines if line.startswith("TimeoutStopSec="))
    assert stop > Limits().drain_seconds
    assert {"Type=notify", "KillMode=mixed", "ProtectHome=yes", "MemoryDenyWriteExecute=yes"} <= set(lines)
    text = ServiceUnit(
        program=Path("/opt/roofline/bin/roofline"),
        words=("/home/ann/my model", "--config-is-none"),
        environment=Path("/etc/roofline/environment"),
        credentials={"--tls-key": Path("/etc/ssl/key.pem")},
        gpu="nvidia",
        readable=(Path("/home/ann/my model"), Path("/srv/adapter")),
    ).text()
    for line in (
        'ExecStart=/opt/roofline/bin/roofline serve "/home/ann/my model" --config-is-none --tls-key %d/tls-key',
        "LoadCredential=tls-key:/etc/ssl/key.pem",
        "ProtectHome=tmpfs",
        'BindReadOnlyPaths="/home/ann/my model"',
        "DevicePolicy=closed",
    ):
        assert line in text.splitlines()
    assert "MemoryDenyWriteExecute" not in text
    assert "/srv/adapter" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "--api-key", "k"], "--api-key would be in a file that everybody may read: write ROOFLINE_API_KEY="),
        (["--", "--port", "80"], "--port 80: a server without privileges has one above 1023"),
        (["--", "--api-keys", "keys.toml"], "--api-keys keys.toml: give the whole path"),
        (["--", "--adapter", "a=adapters/a"], "a adapters/a: give the whole path"),
        (["--", "--max-runing", "1"], "did you mean '--max-running'"),
        (["--program", "roofline"], "--program roofline: give the whole path"),
        (["--program", "/home/ann/.venv/bin/roofline"], "the unit takes homes away from the server; install it"),
        (["--", "--served-model-name", "a\nExecStartPre=/bin/x"], "a unit of systemd holds no line breaks"),
    ],
)
def test_what_no_unit_is_made_of(words, message):
    made = call_roofline(["deploy", "systemd", "smollm2-135m", *words])
    assert (made.exit_code in (1, 2), made.stdout) == (True, "")
    assert message in made.stderr


@pytest.mark.parametrize("chip", IMAGES)
def test_hadolint_has_nothing_to_say_of_the_dockerfiles(tmp_path, chip):
    text = call_roofline(["deploy", "docker", "--chip", chip]).stdout
    assert text == dockerfile(chip)
    for content, clean in ((text, True), (text.replace("# hadolint ignore=DL3008\n", ""), False)):
        (tmp_path / "Dockerfile").write_text(content)
        words = [program_of("hadolint"), "--no-color", str(tmp_path / "Dockerfile")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert ((done.returncode, done.stdout) == (0, "")) == clean, done.stdout


@pytest.mark.parametrize("chip", IMAGES)
def test_what_the_dockerfiles_do(chip):
    steps = re.sub(r"\\\n\s*", "", dockerfile(chip)).splitlines()
    bases = [step.split()[1] for step in steps if step.startswith("FROM ")]
    assert len(bases) == 2
    assert all(re.fullmatch(r"[a-z/]+:[0-9][\w.-]+", base) for base in bases), "names are pinned"
    copied = [step.split()[1:-1] for step in steps if step.startswith("COPY ") and "--from" not in step]
    for source in (name for names in copied for name in names):
        assert (ROOT / source).exists(), source
        assert f"!{source}" in (ROOT / ".dockerignore").read_text().splitlines()
    assert {step.partition(" ")[0] for step in steps[steps.index(f"USER {USER_ID}") + 1 :]} <= {
        *("WORKDIR", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT", "CMD", "#"),
    }
    assert f'VOLUME ["{MODELS}", "/var/cache/roofline"]' in steps
    entry = json.loads(next(step.partition(" ")[2] for step in steps if step.startswith("ENTRYPOINT")))
    assert subprocess.run([sys.executable, *entry[1:], "--version"], capture_output=True, timeout=60).returncode == 0
    assert "0.0.0.0" not in dockerfile(chip)


@contextlib.contextmanager
def served(engine: FakeEngine, key: str | None = None) -> Iterator[str]:
    """The address of a server over a fake engine."""
    limits = Limits()
    context = Context(
        engine=engine, text=BytesText(), name="tiny", created=1, limits=limits, keys=Keys(key), host="0.0.0.0",
        open_probes=True,
    )  # fmt: skip
    with serving(create_app(context), http=protocol_of(limits)) as address:
        yield address


def test_the_probe_of_a_container_tells_a_server_from_none():
    (probe,) = (step for step in dockerfile("cpu").splitlines() if '"python3", "-c"' in step)
    command = json.loads(probe.strip().removeprefix("CMD "))
    with served(FakeEngine()) as address:
        for port, status in ((address.rpartition(":")[2], 0), ("1", 1)):
            code = command[2].replace(f":{PORT}/", f":{port}/")
            assert code != command[2]
            assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == status


@pytest.mark.parametrize("chip", IMAGES)
def test_compose_spec_takes_the_compose_file(chip):
    compose_spec = judges.judge("compose_spec")
    words = ["compose", "/models/tiny", "--chip", chip, "--replicas", "3", "--cores", "4", "--gigabytes", "8"]
    text = call_roofline(["deploy", *words, "--", "--served-model-name", "a$b"]).stdout
    parsed = compose_spec.PyCompose.from_yaml(text)
    for check in (parsed.validate, parsed.validate_configs, parsed.validate_volumes):
        assert check() is None
    for right, wrong in (("restart: unless", "restart: un"), ("cap_drop:", "cap_drops:"), ("source: h", "source: g")):
        with pytest.raises(ValueError):
            compose_spec.PyCompose.from_yaml(text.replace(right, wrong)).validate_configs()


def test_what_the_compose_file_says():
    text = call_roofline(["deploy", "compose", "/models/tiny", "--", "--max-running", "16", "--user-x=$"]).stderr
    assert "there is no option --user-x" in text
    read = yaml.safe_load(call_roofline(["deploy", "compose", "/models/t", "--", "--served-model-name", "a$b"]).stdout)
    model = read["services"]["model"]
    assert model["command"] == ["serve", "/models/t", "--served-model-name", "a$$b", "--open-probes"]
    assert model["environment"] == {"ROOFLINE_API_KEY": "${ROOFLINE_API_KEY:?give clients a key}"}
    assert "ports" not in model  # the balancer alone is reached from outside, and of this machine
    assert read["services"]["balancer"]["ports"] == ["127.0.0.1:9080:9080"]
    assert read["configs"]["haproxy"]["content"].count("$") == 0
    for word in ("--host=0.0.0.0", "--port=1", "--api-key=k", "--uds=s", "--open-probes"):
        refused = call_roofline(["deploy", "compose", "m", "--", word])
        assert (refused.exit_code, "the file says where containers listen" in refused.stderr) == (1, True)


@contextlib.contextmanager
def haproxy(folder: Path, text: str, port: int) -> Iterator[None]:
    settings = folder / "haproxy.cfg"
    settings.write_text(text)
    running = subprocess.Popen([program_of("haproxy"), "-db", "-f", str(settings)], stdout=subprocess.DEVNULL)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            threading.Event().wait(0.02)
        yield
    finally:
        running.kill()
        running.wait(10)


def test_haproxy_balances_by_that_configuration(tmp_path):
    (configuration,) = yaml.safe_load(ComposeStack(chip="cpu", words=("m",), replicas=2).text())["configs"].values()
    (tmp_path / "haproxy.cfg").write_text(configuration["content"])
    check = [program_of("haproxy"), "-c", "-f", str(tmp_path / "haproxy.cfg")]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = HAPROXY.format(port=port, replicas=2, model_port=PORT).replace(" resolvers docker init-addr none", "")
    template = next(line for line in text.splitlines() if "server-template" in line)
    engine = FakeEngine()
    with (
        served(engine, "k") as first,
        served(engine, "k") as second,
        haproxy(tmp_path, text.replace(template, f"    server a {first[7:]}\n    server b {second[7:]}"), port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
    ):
        assert client.get("/v1/models").status_code == 401
        assert client.get("/ready").json() == {"status": "ready"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
        answer = client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k"})
        assert answer.headers["x-request-id"]
        assert answer.text.endswith("data: [DONE]\n\n")
        engine.up = False  # of both
        for _ in range(200):
            if (status := client.get("/health").status_code) == 503:
                break
            threading.Event().wait(0.05)
        assert status == 503, "no server is left once they are not ready"


REFUSE_WRITTEN_CODE = (  # what MemoryDenyWriteExecute asks of newer kernels: prctl(2), PR_SET_MDWE
    "import ctypes, os, sys\n"
    "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0): sys.exit(77)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


def allowed_calls(*names: str) -> set[str]:
    """The system calls of systemd's groups, which hold others."""
    calls: set[str] = set()
    for name in names:
        words = [program_of("systemd-analyze"), "syscall-filter", name]
        lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[1:]
        for entry in filter(None, (line.partition("#")[0].strip() for line in lines)):
            calls |= allowed_calls(entry) if entry.startswith("@") else {entry}
    return calls


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_lives_with_what_the_unit_forbids(smollm2_path, tmp_path):
    """Code that is written and then run, and system calls: as the kernel and strace see them."""
    pytest.importorskip("roofline._native", reason="the native module is not built")
    socket_path, calls = tmp_path / "s", tmp_path / "calls"
    serve = ["-m", "roofline", "serve", str(smollm2_path), "--uds", str(socket_path), "--golden-check", "off"]
    python = [sys.executable, "-c", REFUSE_WRITTEN_CODE, sys.executable, *serve, "--threads", "1"]
    tracer = [program_of("strace"), "-f", "-c", "-o", str(calls), *python]
    server = subprocess.Popen(tracer, stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    reading = threading.Thread(target=lambda: lines.extend(server.stderr or ()), daemon=True)
    reading.start()
    try:
        transport = httpx.HTTPTransport(uds=str(socket_path))
        with httpx.Client(base_url="http://localhost", transport=transport, timeout=120) as client:
            for _ in range(2400):
                if server.poll() == 77:
                    pytest.skip("this kernel has no PR_SET_MDWE")
                assert server.poll() is None, lines
                with contextlib.suppress(httpx.TransportError):
                    if client.get("/ready").status_code == 200:
                        break
                threading.Event().wait(0.1)
            body = {"model": str(smollm2_path), "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            for form in ({}, {"response_format": {"type": "json_object"}}):
                answer = client.post("/v1/chat/completions", json=body | form)
                assert answer.status_code == 200, answer.text
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        for pid in (
            Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split() if server.poll() is None else ()
        ):
            os.kill(int(pid), signal.SIGKILL)
        server.kill()
        server.wait(10)
        reading.join(10)
    used = {line.split()[-1] for line in calls.read_text().splitlines() if re.match(r"\s*\d+\.\d+\s", line)} - {"total"}
    assert len(used) > 40
    assert used - (allowed_calls("@system-service") - allowed_calls("@privileged")) == set()


def test_whoever_ends_a_server_waits_as_long_as_its_answers_may_take() -> None:
    assert stop_seconds([]) == stop_seconds(["model"]) == 45
    assert stop_seconds(["model", "--drain-seconds", "120"]) == 135
    assert stop_seconds(["--drain-seconds=0", "model"]) == 15
    unit = ServiceUnit(program=Path("/opt/r"), words=("m", "--drain-seconds=120"), environment=Path("/etc/r"))
    assert "TimeoutStopSec=135\n" in unit.text()
