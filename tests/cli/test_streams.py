"""Pipes, terminals and disks that do not take what a command prints, and input that is no text."""

import io
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from roofline.cli import output, streams
from roofline.common.errors import ConfigError
from tests.command_line import call_roofline

COMMAND = (sys.executable, "-c", "import sys; from roofline.cli.main import main; sys.exit(main())")


def run(*words, **options):
    """The finished process of a command line."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 60} | options
    return subprocess.run([*COMMAND, *words], check=False, **options)


@pytest.mark.parametrize("words", [("--help",), ("list",)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line_and_status_1(words, unbuffered):
    with open("/dev/full", "w") as full:
        done = run(*words, stdout=full, env=os.environ | {"PYTHONUNBUFFERED": unbuffered})
    assert done.returncode == 1
    assert done.stderr == "roofline: the output cannot be written: the disk is full\n"


@pytest.mark.parametrize("words", [("--help",), ("list",)])
def test_a_closed_pipe_is_status_141_and_says_nothing(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(*words, stdout=writer)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_closed_streams_and_a_full_one_for_errors_lose_nothing_else():
    with open("/dev/full", "w") as full:
        assert run("nonsense", stderr=full).returncode == 2
    closed = subprocess.run(
        ["bash", "-c", '"$@" <&- 2>&-', "-", *COMMAND, "--version"], check=False, capture_output=True
    )
    assert (closed.returncode, closed.stdout.strip()) == (0, b"0.1.0")


def test_an_encoding_without_the_characters_gets_others():
    codec = {"PYTHONIOENCODING": "ascii"}
    code = "from roofline.cli import streams; streams.prepare(); print('a → é █ 日 … \\ud800')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ | codec, check=True)
    assert done.stdout == rb"a -> \xe9 # \u65e5 ... \ud800" + b"\n"


def test_names_are_not_cut_in_pipes_and_go_on_in_narrow_terminals(monkeypatch):
    name, out = "a-long-name-" * 8 + "[x]", io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    output.console().print(output.plain_table(("model", "source"), [(name, name)]))
    assert out.getvalue().count(name) == 2
    out.truncate(0)
    narrow = output.console(width=40, force_terminal=True, color_system=None)
    narrow.print(output.plain_table(("model", "source"), [(name, "here")]))
    table = output.ruled_table("title", ("op", "us"), left_aligned=("op",))
    table.add_row(name.replace("[", r"\["), "1")
    narrow.print(table)
    assert "…" not in out.getvalue()
    assert out.getvalue().replace(" ", "").replace("\n", "").count("[x]") == 2


def test_text_is_checked_and_bytes_that_are_utf8_in_another_locale_are_read():
    assert streams.checked("é → 日", "the prompt") == "é → 日"
    assert streams.checked("é".encode().decode("ascii", "surrogateescape"), "the prompt") == "é"
    with pytest.raises(ConfigError, match="the prompt is not UTF-8: byte 0xff after 2 bytes; convert it"):
        streams.checked(b"ab\xff".decode("utf-8", "surrogateescape"), "the prompt")
    with pytest.raises(ConfigError, match="a lone surrogate after 1 characters"):
        streams.checked("a\ud800", "the prompt")
    refused = call_roofline(["generate", "\udcff"])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "the prompt is not UTF-8" in refused.stderr


class Endless(io.TextIOBase):
    """Input without end and without a line's end, which counts what is read of it."""

    def __init__(self):
        self.characters_read = 0

    def read(self, size=-1):
        assert size >= 0, "without a limit it never comes back"
        self.characters_read += size
        return "\0" * size

    readline = read

    def isatty(self):
        return False


@pytest.mark.parametrize(
    ("words", "what"), [(("chat",), "a line of standard input"), (("generate", "-"), "standard input")]
)
def test_endless_input_is_refused(monkeypatch, capsys, words, what):
    from roofline.cli.main import main
    from roofline.cli.run import prepare

    template = SimpleNamespace(check_fits=lambda tokenizer: None)
    model = SimpleNamespace(sampling={})
    llm = SimpleNamespace(
        stats=lambda: None, close=lambda: None, model=model, name="tiny", chat_template=template, tokenizer=None
    )
    monkeypatch.setattr(prepare, "load_llm", lambda *_: llm)
    monkeypatch.setattr(streams, "MAX_TEXT", 1000)
    monkeypatch.setattr(sys, "stdin", Endless())
    assert main(words) == 1
    assert capsys.readouterr().err == (
        f"roofline: {what} has more than 1,000 characters, which no model reads at once; give a shorter text\n"
    )
    assert sys.stdin.characters_read == 1001


@pytest.mark.parametrize("width", [24, 40, 60, 200])
def test_a_narrow_terminal_cuts_no_figure_and_says_which_columns_it_has_not(monkeypatch, width):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    table = output.ruled_table("title", ("op", "shape", "bytes", "FLOPs", "us"), left_aligned=("op",), padding=1)
    for _ in range(2):
        table.add_row("norm_quantize_of_rows", "576 → 49152", "540.0 KiB", "1.11 M", "12,413.4")
    narrow = output.console(width=width, force_terminal=True, color_system=None)
    output.print_table(narrow, table, dispensable=("shape", "FLOPs", "bytes"))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width or width == 24
    assert text.count("12,413.4") == 2
    columns = {"shape": "576 → 49152", "FLOPs": "1.11 M", "bytes": "540.0 KiB"}
    note = " ".join(text.partition("not in ")[2].split())
    for heading, figure in columns.items():
        assert text.count(figure) == (0 if heading in note else 2), heading
    assert bool(note) == (width <= 40)
    assert not note or note.endswith("--json has all")


def test_list_has_its_figures_whole_in_40_columns(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    rows = [("a-model-with-a-long-name", "93.8 MiB", "195.9 MiB", "Apache-2.0", "2026-11-23", "hf:" + "x" * 40)]
    headings = ("model", "size", "bundle", "licence", "pulled", "source")
    table = output.plain_table(headings, rows, figures=("size", "bundle", "pulled"))
    narrow = output.console(width=40, force_terminal=True, color_system=None)
    output.print_table(narrow, table, dispensable=("licence", "source", "pulled", "bundle"))
    assert "93.8 MiB" in out.getvalue()
    assert "195.9 MiB" in out.getvalue()
    assert "not in 40 columns: licence, source, pulled; " in " ".join(out.getvalue().split())
