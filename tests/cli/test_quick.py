"""The quick way into a command reads what Typer would read, and leaves the rest to Typer."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from roofline.cli import app, quick
from roofline.cli.run import chat, generate, serve
from roofline.common.errors import ConfigError

MODULES = {"generate": generate, "serve": serve, "chat": chat}
SOME = (
    "--model -m --max-tokens --seed --temperature --raw --stream --no-stream --json -5 --seed=3 --raw=1 - -- -x 0 7 x "
    "--temperature=-1 --help --no-raw 1e2 --threads --port --host --weights nan "
    "--speculate ngram --speculate-tokens 15 16 --draft --backend gpu --device auto --exact --tp --offload"
)
WORDS = st.lists(st.sampled_from(SOME.split(" ")), max_size=6)


def by_typer(name: str, words: list[str], monkeypatch: Any) -> dict[str, Any] | None:
    """What the command gets, None when it is not called."""
    got: list[dict[str, Any]] = []
    command = next(c for c in app.app.registered_commands if c.name == name)
    monkeypatch.setattr(command, "callback", _spy(command.callback, got))
    CliRunner().invoke(app.app, [name, *words])
    return got[0] if got else None


def _spy(function: Any, got: list[dict[str, Any]]) -> Any:
    def call(**values: Any) -> None:
        got.append(values)

    call.__annotations__, call.__signature__ = function.__annotations__, function.__signature__  # type: ignore
    return call


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["generate", "serve", "chat"]), WORDS)
def test_it_reads_as_typer_does(name: str, words: list[str]) -> None:
    quickly = quick.parse(MODULES[name].command, words)
    if quickly is not None:
        with pytest.MonkeyPatch.context() as patch:
            read = by_typer(name, words, patch)
            assert read is not None
            assert repr(sorted(read.items())) == repr(sorted(quickly.items()))  # repr: not a number equals nothing


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["hi", "--model", "x", "--max-tokens", "1", "--temperature", "0"], {"prompt": "hi", "model": "x"}),
        (["-", "-m", "y", "--seed=-3", "--no-stream"], {"prompt": "-", "seed": -3, "stream": False}),
        (["--raw", "--json", "a b"], {"raw": True, "as_json": True, "prompt": "a b"}),
    ],
)
def test_ordinary_calls_are_quick(words: list[str], wanted: dict[str, Any]) -> None:
    values = quick.parse(generate.command, words)
    assert values is not None
    assert wanted.items() <= values.items()
    assert len(values) == 23


def test_the_rest_is_for_typer() -> None:
    for words in ([], ["pull"], ["--version"], ["--debug", "generate", "x"], ["generate"], ["generate", "x", "--nope"]):
        assert quick.run(words) is None
    for words in (["x", "y"], ["x", "--help"], ["x", "--max-tokens", "0"], ["x", "--seed"], ["x", "--seed", "--raw"]):
        assert quick.parse(generate.command, words) is None


def test_errors_and_interrupts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> SimpleNamespace:
        def load(*_: Any, **__: Any) -> Any:
            raise error

        return SimpleNamespace(load_llm=load, figures=None, figures_line=None)

    for error, code, said in ((ConfigError("no"), 1, "roofline: no\n"), (KeyboardInterrupt(), 130, "Aborted!\n")):
        monkeypatch.setitem(sys.modules, "roofline.cli.run.prepare", fail(error))
        assert quick.run(["generate", "x"]) == code
        assert capsys.readouterr().err == said


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys, types\n"
        "from roofline.cli import quick; from roofline.cli.run import generate\n"
        "generate.command = lambda prompt: [print('x' * 100) for _ in range(10000)]\n"
        "generate.command.__annotations__ = {'prompt': __import__('typing').Annotated[str, quick.Argument()]}\n"
        "sys.exit(quick.run(['generate', 'x']))\n"
    )
    shell = f'{sys.executable} -c "$0" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell, code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "1"
    assert "Traceback" not in done.stderr


def test_the_quick_way_imports_no_typer(run_python: Callable[..., str]) -> None:
    code = (
        "import sys; from roofline.cli import quick; from roofline.cli.run import generate, serve\n"
        "print(*{'typer', 'rich', 'click'} & set(sys.modules))"
    )
    assert run_python(code).strip() == ""
