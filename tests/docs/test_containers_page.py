"""The commands of docs/how-to/containers.md: those of ours run as they stand, and what Docker and systemd are told is
compared with the files that they make."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from roofline.cli.commands import find
from roofline.deploy.container import container_words
from tests.command_line import call_roofline

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/containers.md").read_text()
LINES = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
ELSEWHERE = [
    line for block in re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("roofline ")])
def test_files_are_made_as_the_page_says(line):
    command, _, file = line.partition(" > ")
    words = shlex.split(command)[1:]
    made = call_roofline(words)
    assert (made.exit_code, made.stderr) == (0, "")
    marks = {"roofline.service": "[Unit]", "Dockerfile": "\nFROM ", "compose.yaml": "services:"}
    marks["fleet.yaml"] = "kind: Deployment"
    assert marks[file] in made.stdout
    assert isinstance(find(words)[1], str)


def test_what_docker_is_told_fits_the_image():
    (run,) = (shlex.split(line) for line in ELSEWHERE if line.startswith("docker run "))
    image = call_roofline(["deploy", "docker"]).stdout
    volumes = [run[number + 1].split(":")[1] for number, word in enumerate(run) if word == "-v"]
    assert f"VOLUME {str(volumes).replace(chr(39), chr(34))}" in image
    assert "EXPOSE 8000" in image
    assert "127.0.0.1:8000:8000" in run
    (named,) = re.findall(r"`docker run \.\.\. roofline:cpu (serve [^`]+)`", PAGE)
    assert container_words(shlex.split(named), {"ROOFLINE_API_KEY": "k"})[-2:] == ["--host", "0.0.0.0"]
    compose = yaml.safe_load(call_roofline(["deploy", "compose", "m"]).stdout)
    assert compose["services"]["balancer"]["ports"] == ["127.0.0.1:9080:9080"]
    variables = [line.partition("=")[0] for line in ELSEWHERE if "docker compose" in line]
    assert list(compose["services"]["model"]["environment"]) == variables


def test_what_the_page_says_of_the_unit():
    unit = call_roofline(["deploy", "systemd", "m", "--program", "/opt/roofline/bin/roofline"]).stdout
    for setting in ("Type=notify", "WatchdogSec=60", "EnvironmentFile=-/etc/roofline/environment", "KillMode=mixed"):
        assert setting in unit.splitlines()
    assert any("/etc/roofline/environment" in line for line in ELSEWHERE)
    for name, folder in (("Cache", "/var/cache"), ("State", "/var/lib"), ("Runtime", "/run")):
        assert f"{name}Directory=roofline" in unit
        assert f"`{folder}/roofline`" in PAGE


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_contract_of_sagemaker_without_docker(smollm2_path, tmp_path):
    pytest.importorskip("roofline._native", reason="the native module is not built")
    (tmp_path / "model.gguf").symlink_to(smollm2_path)
    make, start = (line for line in LINES if not line.startswith("roofline "))
    variables = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    variables["ROOFLINE_THREADS"] = "1"
    subprocess.run(["bash", "-euc", make], cwd=tmp_path, env=variables, check=True, timeout=60)
    server = subprocess.Popen(["bash", "-c", start], cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    lines, end = [], time.monotonic() + 200
    for line in server.stderr:
        lines.append(line)
        if line.startswith("Ready: "):
            break
        assert time.monotonic() < end, lines
    assert any(re.match(r"Listening on http://0\.0\.0\.0:\d+", line) for line in lines), lines
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    for pid in children or [str(server.pid)]:  # bash may have become `timeout`
        os.kill(int(pid), signal.SIGTERM)
    server.communicate(timeout=60)
    assert server.returncode == 0
