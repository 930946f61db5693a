"""Fixtures with real processes: skipped, with the reason, where the native module or the model is missing."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for e2e_serving, which tests of this folder share

from e2e_serving import ROOFLINE, Served, serving


@pytest.fixture(scope="session")
def model(smollm2_path) -> Path:
    pytest.importorskip("roofline._native", reason="the native module is not built")
    return smollm2_path


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """Ours, with the package importable from where this test session has it."""
    import roofline

    source = str(Path(roofline.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}


@pytest.fixture(scope="module")
def served(environment, model) -> Iterator[Served]:
    """With one thread: beside other test processes two spend as much time again in waiting for each other."""
    with serving(environment, model, "--cache-tokens", "8192", "--threads", "1") as running:
        yield running


class Shell:
    """A folder with `roofline` on PATH, and the model smollm2-135m in a ROOFLINE_HOME of its own."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        script = folder / "bin" / "roofline"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {ROOFLINE[0]} -c "{ROOFLINE[2]}" "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        path = f"{script.parent}{os.pathsep}{environment['PATH']}"
        self.variables = {**environment, "PATH": path, "ROOFLINE_HOME": str(folder)}

    def __call__(self, line: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a command line to its end."""
        words = ["bash", "-euo", "pipefail", "-c", line]
        return subprocess.run(
            words, env=self.variables, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )

    def start(self, line: str) -> subprocess.Popen[str]:
        """Run a command line that goes on."""
        words = ["bash", "-c", f"exec {line}"]
        return subprocess.Popen(words, env=self.variables, cwd=self.folder, stderr=subprocess.PIPE, text=True)

    def store(self, model: Path) -> None:
        """Put the model where `roofline pull` would."""
        code = (
            "import json, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
            "from roofline.weights import sources\n"
            "entry = sources.catalog()['smollm2-135m']\nfolder = sources._folder(entry.name)\n"
            "folder.mkdir(parents=True)\n(folder / entry.file).symlink_to(Path(sys.argv[1]).resolve())\n"
            "facts = (entry.name, entry.source, entry.file, entry.sha256, entry.size, entry.licence, 'today')\n"
            "made = sources.StoredModel(*facts)\n"
            "(folder / 'manifest.json').write_text(json.dumps(asdict(made)))\n"
            "assert sources.stored_path(entry.name)\n"
        )
        subprocess.run([ROOFLINE[0], "-c", code, str(model)], env=self.variables, check=True, timeout=60)


@pytest.fixture(scope="module")
def shell(environment, model, tmp_path_factory) -> Shell:
    made = Shell(environment, tmp_path_factory.mktemp("shell"))
    made.store(model)
    return made
