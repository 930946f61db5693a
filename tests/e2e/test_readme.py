"""The README's commands do what it says: every fenced bash block is run, line by line."""

import json
import os
import re
import stat
import subprocess
from pathlib import Path

import pytest
from e2e_serving import ROOFLINE

README = (Path(__file__).parents[2] / "README.md").read_text()
COMMANDS = [
    line.strip()
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture(scope="module")
def shell(environment, model, tmp_path_factory):
    """shell(command line) -> finished process, with `roofline` on PATH and the model in a fresh ROOFLINE_HOME."""
    folder = tmp_path_factory.mktemp("readme")
    script = folder / "bin" / "roofline"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {ROOFLINE[0]} -c "{ROOFLINE[2]}" "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    variables = {
        **environment,
        "PATH": f"{script.parent}{os.pathsep}{environment['PATH']}",
        "ROOFLINE_HOME": str(folder),
    }
    _store(variables, model)
    return lambda line: subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], env=variables, cwd=folder, capture_output=True, text=True, timeout=240
    )


def _store(variables: dict[str, str], model: Path) -> None:
    """Put the model where `roofline pull` would."""
    code = (
        "import json, sys\nfrom dataclasses import asdict\nfrom pathlib import Path\n"
        "from roofline.weights import sources\n"
        "entry = sources.catalog()['smollm2-135m']\nfolder = sources._folder(entry.name)\nfolder.mkdir(parents=True)\n"
        "(folder / entry.file).symlink_to(Path(sys.argv[1]).resolve())\n"
        "facts = (entry.name, entry.source, entry.file, entry.sha256, entry.size, entry.licence, 'today')\n"
        "made = sources.StoredModel(*facts)\n"
        "(folder / 'manifest.json').write_text(json.dumps(asdict(made)))\n"
        "assert sources.stored_path(entry.name)\n"
    )
    subprocess.run([ROOFLINE[0], "-c", code, str(model)], env=variables, check=True, timeout=60)


def test_there_are_commands():
    assert len(COMMANDS) >= 5
    assert any(line.startswith("roofline generate") for line in COMMANDS)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", COMMANDS)
def test_command(shell, line):
    for _ in range(3):  # beside other programs the roofs may come out too low: then that is said, and nothing else
        result = shell(line)
        if "machine busy" not in result.stderr:
            break
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() or " > " in line, "it says what it did, unless what it printed went to a file"
    if "--json" in line:
        assert json.loads(result.stdout)


def test_files_that_the_readme_links_to_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target


def test_make_commands_that_the_readme_names_exist():
    targets = set(re.findall(r"^([a-z-]+):", (Path(__file__).parents[2] / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", README)) <= targets
