"""What type checkers make of a user's program: typed_program.py is right but for its one deliberate mistake."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("typed_program.py")
MISTAKE = next(
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if line.endswith("# the deliberate mistake")
)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mypy_finds_the_mistake_alone(tmp_path: Path) -> None:
    program = shutil.copy(PROGRAM, tmp_path)  # outside of the tree, whose own configuration is laxer
    words = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), program]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.split(":")[1] for line in errors] == [str(MISTAKE)], done.stdout + done.stderr
    assert 'Argument "temperature" to "SamplingParams" has incompatible type "str"' in errors[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pyright_finds_the_mistake_alone(tmp_path: Path) -> None:
    pyright = shutil.which("pyright") or shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("there is no pyright: npm install -g pyright")
    shutil.copy(PROGRAM, tmp_path)
    settings = {"typeCheckingMode": "strict", "include": [PROGRAM.name], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    words = [pyright, "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    errors = json.loads(done.stdout)["generalDiagnostics"]
    assert [(each["range"]["start"]["line"] + 1, each["rule"]) for each in errors] == [(MISTAKE, "reportArgumentType")]
