"""The command that docs/how-to/add-inside.md adds works as the page says."""

import re
import sys
import types
from pathlib import Path

import pytest

from roofline.cli import commands, main

PAGE = (Path(__file__).parents[2] / "docs/how-to/add-inside.md").read_text()


@pytest.fixture
def pages_command(monkeypatch: pytest.MonkeyPatch):
    """run(words): the command `roofline pages` of the page, registered as it says."""
    section = PAGE.split("## A command\n")[1].split("\n## ")[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line)
    module = types.ModuleType("roofline.cli.models.NAME")
    exec(compile(code, "add-inside.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (name, place) = re.findall(r'`"(\w+)": "([\w.:]+)"`', section)[0]
    monkeypatch.setitem(commands.ROOT.commands, name, place)

    def run(*words: str) -> int:
        return main.main([name, *words])

    return run


def test_the_command_runs(pages_command, capsys):
    assert pages_command("toy", "--tokens", "100") == 0
    assert capsys.readouterr().out == "toy: 7 pages\n"


def test_its_help_and_its_errors_come_from_the_declaration(pages_command, capsys):
    assert pages_command("--help") == 0
    assert "Say how many pages a cache of so many tokens has." in capsys.readouterr().out
    assert pages_command("toy", "--tokens", "3") != 0
    assert "give a whole number, at least 16" in capsys.readouterr().err
