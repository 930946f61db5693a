"""docs/how-to/torch.md does what it says: its Python blocks are run in order, in a process of their own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "torch.md"


@pytest.mark.slow
def test_the_document_runs():
    pytest.importorskip("roofline._native", reason="the cpu backend is not built")
    pytest.importorskip("torch")
    pytest.importorskip("transformers", reason="the model is transformers'")
    text = DOCUMENT.read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(blocks), "a block that no test runs"
    code = "\n".join((*blocks, "print('the end')"))
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the end\n")
