"""docs/how-to/extending.md does what it says: its Python blocks are run in order, in a process of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"


@pytest.mark.slow
def test_the_document_runs(tmp_path: Path) -> None:
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    pytest.importorskip("torch", reason="the reference backend needs it")
    text = DOCUMENT.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 8
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * (len(blocks) + 1), "a block that no test runs"
    code = ""
    for block in blocks:  # every line keeps its number in the document
        code += "\n" * (text[: block.start(1)].count("\n") - code.count("\n")) + block.group(1)
    script = tmp_path / "extending.py"
    script.write_text(f"{code}\nprint('the end')\n")
    variables = {**os.environ, "ROOFLINE_HOME": str(tmp_path)}
    # From standard input, so that what it registers lies in no file, as the document says.
    done = subprocess.run(
        [sys.executable, "-"], stdin=script.open(), env=variables, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the end\n")
    assert not (tmp_path / "bundles").exists()
