"""The command line is made from declarations: what words mean, what is refused, what help lists."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import pytest

from roofline.backends.options import LoadOptions
from roofline.cli.parser import Argument, Only, Parser, UsageError, Without, summary
from roofline.cli.run import generate
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, option
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from tests.command_line import call_roofline


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["hi", "--model", "x", "--max-tokens", "1", "--temperature", "0"], {"prompt": "hi"}),
        (["-", "-m", "y", "--seed=-3", "--stop", "a"], {"prompt": "-"}),
        (["--json", "a b"], {"as_json": True, "prompt": "a b"}),
        (["--", "--raw"], {"prompt": "--raw"}),
    ],
)
def test_words_become_the_command_s_arguments(words: list[str], values: dict[str, Any]) -> None:
    keywords = Parser("generate", generate.command).parse(words)
    named = keywords.pop("named")
    assert isinstance(named, frozenset)
    assert named >= values.keys()
    assert ("model" in named) == ("--model" in words or "-m" in words)
    assert values.items() <= keywords.items()
    plain = {name: value for name, value in keywords.items() if not isinstance(value, Options)}
    assert plain == values


def test_groups_get_the_options_that_they_declare_and_shared_ones_go_to_all() -> None:
    words = ["hi", "-mtiny", "--max-running", "3", "--tp=2", "--seed", "-5", "--offload", "0", "--temperature", "1e-1"]
    keywords = Parser("generate", generate.command).parse(words)
    assert keywords["models"].model == "tiny"  # type: ignore[attr-defined]
    assert keywords["load"] == LoadOptions(max_running=3, tensor_parallel=2)
    assert keywords["engine"] == EngineConfig(max_running=3)
    assert keywords["params"] == SamplingParams(seed=-5, temperature=0.1, max_tokens=256)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "PROMPT is missing"),
        (["x", "y"], "an argument too many: 'y'"),
        (["x", "--nope"], "there is no option --nope"),
        (["x", "--max-token", "3"], "did you mean '--max-tokens'"),
        (["x", "--max-tokens", "-1"], "--max-tokens=-1 cannot be used: give a whole number of tokens, at least 0"),
        (["x", "--max-tokens", "1.5"], "--max-tokens='1.5' cannot be used"),
        (["x", "--seed"], "--seed needs a value: give a whole number"),
        (["x", "--seed", "--raw"], "--seed needs a value"),
        (["x", "--raw=1"], "--raw takes no value"),
        (["x", "--temperature", "nan"], "--temperature=nan cannot be used"),
        (["x", "--speculate", "ngramm"], "choose one of off, ngram, draft, mtp; did you mean 'ngram'"),
        (["x", "--offload", "some"], "give a whole number of layers, at least 0, or 'auto'"),
    ],
)
def test_what_is_not_understood_is_one_line_with_exit_code_2(words: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Parser("generate", generate.command).parse(words)
    assert message in str(caught.value)
    result = call_roofline(["generate", *words])
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@dataclass(frozen=True)
class Garden(Options):
    beds: int = option(3, "Beds.", flags=("--beds", "-b"))
    fence: bool = option(True, "Whether there is one.", topic="Around it")
    shed: Path | None = option(None, "Where the tools are.", topic="Around it")


def test_lists_paths_required_options_and_parts_of_groups() -> None:
    def command(
        files: Annotated[list[Path], Argument("Files.")],
        out: Annotated[Path, Option("A folder.", flags=("--out", "-o"))],
        garden: Annotated[Garden, Without("beds")] = Garden(beds=7),
        steps: Annotated[list[int] | None, Option("Steps.", minimum=1)] = None,
        load: Annotated[LoadOptions, Only("threads")] = LoadOptions(),
    ) -> None:
        """Grow."""

    parser = Parser("grow", command)
    keywords = parser.parse(["a", "--steps", "1", "b", "-o", "c", "--steps=2", "--no-fence", "--shed", "d"])
    assert keywords == {
        "files": [Path("a"), Path("b")],
        "out": Path("c"),
        "steps": [1, 2],
        "garden": Garden(7, False, Path("d")),
        "load": LoadOptions(),
    }
    for words, message in ((["a"], "--out is missing"), (["-o", "c"], "FILES is missing"), (["--beds", "1"], "--beds")):
        with pytest.raises(UsageError, match=message):
            parser.parse(words)
    text = parser.help(100)
    for part in ("Usage: roofline grow [OPTIONS] FILES", "Grow.", "--fence/--no-fence", "Around it:", "--threads N"):
        assert part in text
    assert "--backend" not in text


def test_unknown_commands_and_groups_without_one() -> None:
    result = call_roofline(["generat"])
    assert (result.exit_code, "did you mean 'generate'" in result.stderr) == (2, True)
    for words in ([], ["data"], ["bench"]):
        result = call_roofline(words)
        assert (result.exit_code, "Commands:" in result.stdout) == (2, True)
        assert call_roofline([*words, "--help"]).exit_code == 0
    assert "(roofline bench --help tells more)" in call_roofline(["bench", "nothing"]).stderr
    assert "did you mean '--max-batch-tokens'" in call_roofline(["serve", "--max-batch"]).stderr
    assert call_roofline(["--nope"]).exit_code == 2
    assert "Commands:" in call_roofline(["-h"]).stdout
    assert "generate" in call_roofline(["--help", "generate"]).stdout


def test_tune_and_train_run_where_no_command_of_theirs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.cli.commands import find

    assert find(["tune", "tiny"]) == ("tune run", "tuning.tune:run", ["tiny"])
    assert find(["tune"]) == ("tune run", "tuning.tune:run", [])
    assert find(["tune", "run", "tiny"]) == ("tune run", "tuning.tune:run", ["tiny"])
    assert find(["tune", "export"]) == ("tune export", "tuning.files:export", [])
    assert find(["train", "a.yaml", "--set", "b=1"]) == ("train run", "training.train:run", ["a.yaml", "--set", "b=1"])


def test_errors_and_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("figures", "figures_line", "confirm_roofs", "sampling", "load_beside")

    def fail(error: BaseException) -> SimpleNamespace:
        def load(*_: Any, **__: Any) -> Any:
            raise error

        keeps = {"with_place_for": lambda *options: options, "system_message": lambda text: []}
        return SimpleNamespace(load_llm=load, **dict.fromkeys(names), **keeps)

    for error, code, text in ((ConfigError("no"), 1, "roofline: no\n"), (KeyboardInterrupt(), 130, "Aborted!\n")):
        monkeypatch.setitem(sys.modules, "roofline.cli.run.prepare", fail(error))
        result = call_roofline(["generate", "x"])
        assert (result.exit_code, result.stderr) == (code, text)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    code = (
        "import sys\n"
        "from roofline.cli import main\n"
        "from roofline.cli.run import generate\n"
        "def command(): [print('x' * 100) for _ in range(10000)]\n"
        "generate.command = command\n"
        "sys.exit(main.main(['generate']))\n"
    )
    shell = f'{sys.executable} -c "$0" | head -1; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", shell, code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "141"
    assert "Traceback" not in done.stderr


def test_reading_a_call_imports_nothing_large(run_python: Callable[..., str]) -> None:
    code = (
        "import sys; from roofline.cli.parser import Parser; from roofline.cli.run import chat, generate, serve\n"
        "Parser('generate', generate.command).parse(['hi', '--max-tokens', '1'])\n"
        "print(*{'argparse', 'rich', 'msgspec', 'numpy', 'asyncio', 'difflib'} & set(sys.modules))"
    )
    assert run_python(code).strip() == ""


@pytest.mark.parametrize("words", [["generate", "x"], ["chat", "--adapter", "x"], ["serve"]])
def test_numpy_is_told_to_start_no_threads_before_it_is_imported(run_python, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Its BLAS would start threads that spin beside ours: a tenth of the start's processor time."""
    code = (
        "import sys; from roofline.cli.main import main; from roofline.common import env\n"
        "def stop(): print('numpy' in sys.modules); sys.exit()\n"
        "env.quiet_numpy = stop\n"
        f"main({words!r})"
    )
    assert run_python(code).strip() == "False"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "x", "--context", "9", "--max-model-len=8"], "--context and --max-model-len say the same"),
        (["chat", "one", "--model", "two"], "MODEL and --model say the same"),
        (["chat", "-mone", "--model", "two"], "-m and --model say the same"),
    ],
)
def test_one_option_by_two_names_is_refused(words: list[str], message: str) -> None:
    result = call_roofline(words)
    assert (result.exit_code, message in result.stderr) == (2, True)


@pytest.mark.parametrize(("flag", "named"), [("--context", "--context"), ("--max-model-len", "--max-model-len")])
def test_an_error_of_the_library_names_the_flag_that_was_typed(
    flag: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from roofline.cli.run import prepare

    def load(*_: object) -> None:
        raise ConfigError("max_model_len=9 is not between 1 and 8; lower max_model_len or raise cache_tokens=N")

    monkeypatch.setattr(prepare, "load_llm", load)
    said = call_roofline(["generate", "x", flag, "9"]).stderr
    assert said == f"roofline: {named} 9 is not between 1 and 8; lower {named} or raise --cache-tokens N\n"


@pytest.mark.parametrize(
    "message",
    [
        "there is no model 'a seed=3'; did you mean \"its seed=3\"?",
        "my seed=3.gguf: there is no such file",
        "there is no file seed=5/x.gguf",
        "models/of seed=7/max_tokens 3.gguf: tensor 'x' is missing",
    ],
)
def test_what_only_looks_like_an_option_stays_as_it_was_typed(message: str) -> None:
    parser = Parser("generate", generate.command)
    parser.parse(["x", "--model", "my seed=3.gguf", "--draft=./seed=5/x.gguf", "--seed", "1"])
    assert parser.in_flags(message) == message
    assert parser.in_flags(f"{message}; lower max_tokens='9', or the models' seed=2") == (
        f"{message}; lower --max-tokens '9', or the models' --seed 2"
    )


def test_lists_of_commands_have_whole_sentences() -> None:
    """Also where a docstring's first sentence is longer than its line."""

    def command() -> None:
        """Write something, and say in a sentence that is longer than
        its line why.

        What follows is not of it.
        """

    assert summary(command) == "Write something, and say in a sentence that is longer than its line why."
    listed = call_roofline(["--help"]).stdout
    told = re.split(r"\n  (?=\S)", listed.partition("Commands:\n")[2].partition("\n\n")[0])
    assert len(told) > 20
    assert [each for each in told if not each.rstrip().endswith((".", ")"))] == []
