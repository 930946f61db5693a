"""The commands of docs/how-to/adapters.md that write files work as the page says, on a small model."""

import re
import shlex
import sys
from pathlib import Path

import pytest

pytest.importorskip("roofline._native", reason="the C++ core is not built")
sys.path.insert(0, str(Path(__file__).parents[1] / "bundle"))

from bundle_models import write_model

from roofline.weights.adapter_files import write_adapter
from roofline.weights.adapters import read_adapter
from roofline.weights.checkpoint import open_checkpoint
from tests.adapter_files import for_checkpoint
from tests.command_line import call_roofline

PAGE = (Path(__file__).parents[2] / "docs/how-to/adapters.md").read_text()
COMMANDS = re.findall(r"^roofline (?:merge|convert) .*$", PAGE, re.MULTILINE)


def test_merge_and_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path / "model")
    base = open_checkpoint(model)
    (tmp_path / "adapters").mkdir()
    write_adapter(tmp_path / "adapters" / "sql", base.config, for_checkpoint(base.tensors))
    (tmp_path / "questions.txt").write_text("SELECT\nHow many rows are there?\n")
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 5
    for command in COMMANDS:
        # The small model has no quantised form of its own, which the page's has.
        words = [str(model) if word == "smollm2-135m" else word for word in shlex.split(command)[1:]]
        extra = ["--to", "q4"] if words[0] == "merge" and "--to" not in words else []
        result = call_roofline([*words, *extra])
        assert result.exit_code == 0, (command, result.output)
    assert (tmp_path / "smollm2-sql" / "merge_certificate.json").is_file()
    assert (tmp_path / "smollm2-sql.certificate.json").is_file()
    again, first = (read_adapter(tmp_path / "adapters" / name) for name in ("sql-again", "sql"))
    assert [(each.tensor, each.b.tobytes()) for each in again.matrices] == [
        (each.tensor, each.b.tobytes()) for each in first.matrices
    ]
