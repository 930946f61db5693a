"""`--config FILE`: a YAML file's options are the command line's, what the call says wins, and faults have a line."""

from pathlib import Path
from typing import Annotated, Any

import pytest

from roofline.backends.options import LoadOptions
from roofline.cli.option_file import MAX_BYTES, read_option_file
from roofline.cli.parser import Argument, Parser, reads_option_file
from roofline.cli.run.serve import command
from roofline.common.errors import ConfigError
from roofline.common.options import Option, Options, declared
from roofline.engine.config import EngineConfig
from roofline.server.options import ServeOptions
from tests.command_line import call_roofline

SECRET = "rl-a-key-that-nobody-should-see"
# As vLLM's documentation of `vllm serve --config` and files in the wild have them.
VLLM_FILE = """
model: meta-llama/Llama-3.1-8B-Instruct
host: "127.0.0.1"
port: 6379
uvicorn-log-level: "info"
served-model-name: llama
tensor-parallel-size: 2
max-model-len: 8192
max-num-seqs: 96
max-num-batched-tokens: 8192
dtype: auto
kv-cache-dtype: bfloat16
enable-prefix-caching: true
enable-chunked-prefill: true
enforce-eager: false
trust-remote-code: false
disable-log-requests: true
enable-auto-tool-choice: true
tool-call-parser: llama3_json
reasoning_parser: qwen3
limit-mm-per-prompt: {"image": 0}
enable-lora: true
max_lora_rank: 16
lora-modules:
  - sql=adapters/sql
  - {name: poems, path: adapters/poems}
"""


def called(words: list[str]) -> dict[str, Any]:
    """What the command is called with, but for which options were named."""
    keywords = Parser("serve", command).parse(words)
    assert keywords.pop("named") is not None
    return keywords


@pytest.fixture
def parsed(tmp_path: Path) -> Any:
    """parsed(text of a file, *words of the call) -> what the command is called with."""

    def parse(text: str, *words: str) -> dict[str, Any]:
        file = tmp_path / "serve.yaml"
        file.write_text(text)
        return called([*words, "--config", str(file)])

    return parse


def test_a_file_of_vllm_s_means_what_its_call_means(parsed):
    words = (
        "meta-llama/Llama-3.1-8B-Instruct --host 127.0.0.1 --port 6379 --served-model-name llama --tp 2 --context 8192 "
        "--max-running 96 --max-batch-tokens 8192 --kv-cache-dtype bf16 --prefix-cache --tool-call-parser llama3 "
        "--reasoning-parser think --max-adapter-rank 16 --adapter sql=adapters/sql --adapter poems=adapters/poems"
    )
    assert parsed(VLLM_FILE) == called(words.split())


def other_value(option: Option) -> object:
    """A value that the option can have, and has not by default."""
    if option.kinds == (bool,):
        return not option.default
    words = [word for word in option.allowed() if word != option.default]
    if words and (option.kinds == (str,) or not option.kinds):
        return words[-1]
    if Path in option.kinds or str in option.kinds:
        return {"allow_origin": "https://a.example", "adapter": "a=b", "extra_model": "e=f", "uds_mode": "660"}.get(
            option.name, "x"
        )
    return int(option.minimum or 0) + (2 if option.default != int(option.minimum or 0) + 2 else 3)


@pytest.mark.parametrize("name", [n for kind in (ServeOptions, LoadOptions, EngineConfig) for n in declared(kind)])
def test_every_option_of_serve_can_be_given_by_either_spelling(parsed, name):
    option = next(declared(kind)[name] for kind in (ServeOptions, LoadOptions, EngineConfig) if name in declared(kind))
    if not option.command_line:
        with pytest.raises(ConfigError, match="there is no option"):
            parsed(f"{name}: 1")
        return
    beside = {
        "pin_model": "extra-model: e=f",
        "model_megabytes": "extra-model: e=f",
        "tls_key": "tls-certificate: c",
        "tls_certificate": "tls-key: c",
        "record_ids": "record: folder",
        "uds_mode": "uds: socket",
    }.get(name, "")
    if option.backends and "cpu" not in option.backends:
        beside = f"backend: {option.backends[0]}"
    value = other_value(option)
    shown = str(value).lower() if isinstance(value, bool) else value
    dashed = option.flags[0].removeprefix("--") if option.flags else name.replace("_", "-")
    for spelling in (dashed, dashed.replace("-", "_")):
        keywords = parsed(f"{spelling}: {shown}\n{beside}")
        groups = [group for group in keywords.values() if isinstance(group, Options) and name in declared(type(group))]
        assert groups
        for group in groups:
            expected = [value] if option.repeated else Path(str(value)) if option.kinds == (Path,) else value
            assert getattr(group, name) == expected != option.default


def test_lists_empty_files_and_values_as_they_are_written(parsed):
    keywords = parsed("adapter: [a=x, 'b=y']\nspeculate: off\nserved-model-name: 0123\n")
    options = keywords["options"]
    assert (options.adapter, keywords["engine"].speculate) == (["a=x", "b=y"], "off")
    assert options.served_model_name in ("0123", ["0123"])
    assert parsed("") == parsed("# nothing\n") == called([])
    assert parsed("adapter: one=x")["options"].adapter == ["one=x"]
    assert parsed("model: m\ndraft: d\nspeculate: draft") == called(["m", "--draft", "d", "--speculate", "draft"])


@pytest.mark.parametrize(
    ("text", "words", "name", "value"),
    [
        ("port: 1", ["--port", "2"], "port", 2),
        ("page: true", ["--no-page"], "page", False),
        ("page: false", ["--page"], "page", True),
        ("no-page: true", ["--page"], "page", True),
        ("no_page: false", [], "page", True),
        ("adapter: [a=x, b=y]", ["--adapter", "c=z"], "adapter", ["c=z"]),
        ("api-key: file", ["--api-key", "call"], "api_key", "call"),
        ("max-streams-per-key: 3", ["--max-streams-per-key=4"], "max_streams", 4),
    ],
)
def test_the_call_wins_over_the_file(parsed, text, words, name, value):
    assert getattr(parsed(text, *words)["options"], name) == value


def test_what_a_file_switches_on_the_call_switches_off(parsed):
    assert parsed("exact: true")["load"].exact is True
    assert parsed("exact: true", "--no-exact")["load"].exact is False
    assert parsed("exact: false", "--exact")["load"].exact is True
    assert parsed("exact: off")["load"].exact is False
    assert parsed("model: file", "call")["model"] == "call"
    assert "--no-NAME switches off" in Parser("serve", command).help(2000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nmax-num-seq: 4", "line 2: there is no option 'max-num-seq'"),
        ("prot: 1", "line 1: there is no option 'prot'; did you mean 'port'?"),
        ("modle: x", "line 1: there is no option 'modle'; did you mean 'model'?"),
        ("\nmax-running: 0", "line 2: --max-running=0 cannot be used: give a whole number of answers, at least 1"),
        ("max-running: many", "line 1: --max-running='many' cannot be used: give a whole number"),
        ("max-running: true", "line 1: --max-running='true' cannot be used: give a whole number"),
        ("golden-check: latr", "line 1: --golden-check='latr' cannot be used: choose one of later, off; did you mean"),
        ("exact: 1", "line 1: exact: give true or false"),
        ("exact: 'true'", "line 1: exact: give true or false"),
        (
            "port:",
            "line 1: port has no value: give a whole number, at least 0 and at most 65,535, or leave the line out",
        ),
        ("api-key: null", "line 1: api-key has no value: give a text, or leave the line out"),
        ("port: [1, 2]", "line 1: port has one value, and this is a list"),
        ("model: [a, b]", "line 1: model needs one value"),
        ("adapter: [[a=b]]", "line 1: adapter: a list in a list is no option's value"),
        ("port: 1\nport: 2", "port is there twice, on lines 1 and 2"),
        ("max_running: 1\nhost: a\nmax-running: 2", "max-running is there twice, on lines 1 and 3"),
        ("max-running: 1\nmax-num-seqs: 2", "lines 1 and 2 both give --max-running: keep one of them"),
        ("context: 9\nmax-model-len: 9", "lines 1 and 2 both give --max-model-len: keep one of them"),
        ("config: other.yaml", "line 1: config: a file of options names no further one"),
        ("gpu-memory-utilization: 0.9", "line 1: there is no option --gpu-memory-utilization: --cache-tokens N is"),
        ("trust-remote-code: true", "line 1: there is no option --trust-remote-code: no code of a model's"),
        ("speculative-config: {method: ngram}", "line 1: there is no option --speculative-config: give --speculate"),
        ("\nhf-overrides: {a: 2026-01-01}", "line 2: hf-overrides: is an object that JSON cannot write"),
        ("max-num-seqs: true", "line 1: --max-running needs a value"),
        ("- port: 1", "has no options on top: write each as `name: value`"),
        ("port: 1\nhost: [a", "is no YAML at line 2"),
        ("host: &a x\nmodel: *a", "refers to a part of itself"),
        ("host: !!python/object/apply:os.getcwd []", "is no YAML"),
        ("host: !x y", "is no YAML"),
        ("? [a]\n: b", "is no YAML at line 1, column 3: found unhashable key"),
        ("? {}\n: b", "is no YAML"),
        ("a: " + "[" * 3000, ""),
        ("#" * (MAX_BYTES + 1), f"is larger than {MAX_BYTES} bytes"),
        ("served-model-name: \udcff", "is not UTF-8"),
    ],
)
def test_a_fault_has_its_place_and_its_remedy(tmp_path, text, message):
    file = tmp_path / "serve.yaml"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    result = call_roofline(["serve", "--config", str(file)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"roofline: {file}")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_what_two_options_have_against_each_other_is_told_as_of_the_call(tmp_path):
    file = tmp_path / "serve.yaml"
    for text, told in (
        ("port: 1\ntls-key: k\n", ", line 2: TLS needs both --tls-certificate and --tls-key\n"),
        ("allow-origin:\n- chat\n", ", line 1: --allow-origin 'chat' is no origin: give it as https://name or "),
        ("uds: s\nmodel: m\nhost: h", ", lines 1 and 3: --uds and --host: a server listens in one place"),
        ("port: 1", ": "),
    ):
        file.write_text(text)
        result = call_roofline(["serve", f"--config={file}", *(["--tls-key", "k"] if text == "port: 1" else [])])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"roofline: {file}{told}"), result.stderr
    result = call_roofline(["serve", "--config", str(file), "--config", str(file)])
    assert (result.exit_code, "--config is there twice" in result.stderr) == (2, True)
    missing = call_roofline(["serve", "--config", str(tmp_path / "none.yaml")])
    assert (missing.exit_code, "none.yaml: cannot be read: " in missing.stderr) == (1, True)


@pytest.mark.parametrize(
    "text",
    [
        f"api-key: {SECRET}\nport: x",
        f"api-key: '{SECRET} and more'",
        f"api-key: {SECRET}\nhost: [",
        f"api-key: *{SECRET}",
        f"api-key: !{SECRET} x",
        f"api-key: {{a: {SECRET}",
        f"api-key: '{SECRET}",
        f"api-key: [{SECRET}]",
        f"api-key: |\n  {SECRET}\n  {SECRET}",
        f"api-key: {SECRET}\napi_key: {SECRET}",
        f"api-key: %{SECRET}",
        f"exact: {SECRET}",
    ],
)
def test_no_error_shows_a_secret(tmp_path, text):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    result = call_roofline(["serve", "--config", str(file)])
    assert result.exit_code == 1
    assert SECRET not in result.stderr


def test_other_commands_have_it_with_one_line(tmp_path):
    @reads_option_file
    def grow(
        out: Annotated[Path, Argument("A folder.")],
        steps: Annotated[list[int] | None, Option("Steps.", minimum=1)] = None,
        fast: Annotated[bool, Option("Quickly.")] = False,
    ) -> None:
        """Grow."""

    file = tmp_path / "grow.yaml"
    file.write_text("out: beds\nsteps: [1, 2]\nfast: yes\n")
    assert Parser("grow", grow).parse(["--config", str(file)]) == {"out": Path("beds"), "steps": [1, 2], "fast": True}
    assert Parser("grow", grow).parse(["x", "--no-fast", f"--config={file}"]) == {
        "out": Path("x"),
        "steps": [1, 2],
        "fast": False,
    }
    file.write_text("tensor-parallel-size: 2\n")
    with pytest.raises(ConfigError, match="line 1: there is no option 'tensor-parallel-size'"):
        Parser("grow", grow).parse(["--config", str(file)])


def test_entries_keep_what_is_written(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("a_b: 0o17\nc: [1, yes]\nd: On\ne: {x: [1, no]}\nf: ~\n")
    entries = {entry.name: (entry.line, entry.texts, entry.is_list, entry.switch) for entry in read_option_file(file)}
    assert entries == {
        "a-b": (1, ("0o17",), False, None),
        "c": (2, ("1", "yes"), True, None),
        "d": (3, ("On",), False, True),
        "e": (4, ('{"x":[1,false]}',), False, None),
        "f": (5, (), False, None),
    }


def test_a_fleet_has_such_files_too(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text("model: m\nreplicas: 1\nbalance: prefix\n")
    assert (
        "balance roundrobin"
        in call_roofline(["up", "--config", str(path), "--balance", "roundrobin", "--print"]).stdout
    )
    path.write_text("model: m\nuds: /tmp/s\n")
    result = call_roofline(["up", "--config", str(path), "--print"])
    assert result.exit_code == 1
    assert f"{path}, line 2: --uds cannot be used in a fleet" in result.stderr
