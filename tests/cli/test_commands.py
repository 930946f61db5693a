"""The command line: quick help, one-line errors, and what each command prints, over fakes."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from roofline.cli.run.chat import Session
from roofline.common.errors import CapacityError, ConfigError, RequestError
from roofline.engine.events import Usage
from roofline.engine.params import SamplingParams
from roofline.engine.stats import EngineStats
from roofline.text.templates.template import NO_TEMPLATE
from tests.command_line import call_roofline

COMMANDS = (
    *("pull", "list", "rm", "show", "generate", "chat", "serve", "doctor", "profile", "parity", "tune", "data"),
    "kernels",
)
STATS = EngineStats(
    prefill_tokens=100,
    prefill_seconds=0.05,
    decode_tokens=36,
    decode_seconds=0.2,
    limit_seconds=0.1,
    priced_seconds=0.25,
)
LINE = "prefill: 2000.0 tok/s, decode: 180.0 tok/s, 40.0% of the roof"


class FakeTemplate:
    """A chat template that the model has, or has not."""

    fitting = True

    def fits(self, tokenizer):
        return self.fitting

    def check_fits(self, tokenizer):
        if not self.fitting:
            raise RequestError(400, "no_chat_template", NO_TEMPLATE)


class FakeLLM:
    """Says back what it was asked, in two pieces."""

    def __init__(self, name="tiny"):
        self.name, self.asked, self.closed = name, [], False
        self.model = SimpleNamespace(executable=SimpleNamespace(fingerprint="feed"), load_seconds=0.5, sampling={})
        self.interrupt = self.fail = False
        self.tokenizer, self.chat_template = None, FakeTemplate()

    def stream(self, asked, params, adapter=None):
        self.asked.append((json.loads(json.dumps(asked)), params))
        if self.fail:
            raise CapacityError("A prompt", 9, 8, "tokens", "Shorten it.")
        yield "you said: "
        if self.interrupt:
            raise KeyboardInterrupt
        yield asked if isinstance(asked, str) else asked[-1]["content"]

    def chat(self, messages, params, adapter=None):
        text = "".join(self.stream(messages, params))
        return SimpleNamespace(text=text, ids=[1, 2], prompt_ids=[5], finish_reason="stop", usage=Usage(1, 2, 0, 7))

    def generate(self, prompt, params, adapter=None):
        return [self.chat(prompt, params)]

    def stats(self):
        return STATS

    def close(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


@pytest.fixture
def llm(monkeypatch):
    from roofline.cli.run import prepare as ready

    fake = FakeLLM()
    monkeypatch.setattr(ready, "load_llm", lambda *_args, **_kwargs: fake)
    return fake


@pytest.fixture
def run():
    return lambda *words, **kwargs: call_roofline(words, **kwargs)


def processor_seconds_of_children() -> float:
    """What they computed: on a busy machine the clock on the wall says little."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_is_quick_and_lists_every_command(run_python):
    code = "import sys; sys.argv = ['roofline', '--help']; from roofline.cli.main import main; sys.exit(main())"
    fastest = float("inf")
    for _ in range(5):
        before = processor_seconds_of_children()
        printed = run_python(code)
        fastest = min(fastest, processor_seconds_of_children() - before)
    for command in (*COMMANDS, "bench"):
        assert f" {command} " in printed
    assert fastest < 0.3


def test_no_command_imports_heavy_things_before_it_runs(run_python):
    code = (
        "import sys; import roofline.cli.main as m\n"
        "for group in ((), ('bench',), ('tune',), ('train',), ('data',)): m.main([*group, '--help'])\n"
        "print(*{'numpy', 'fastapi', 'msgspec', 'jinja2', 'rich'} & set(sys.modules), 'imported')"
    )
    assert run_python(code).splitlines()[-1] == "imported"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_data_commands_have_help(run):
    assert "verify-order" in run("data", "--help").output
    assert "order.json" in run("data", "verify-order", "--help", env={"COLUMNS": "200"}).output


def test_bench_engine_has_help(run):
    assert "--rows" in run("bench", "engine", "--help", env={"COLUMNS": "200"}).output


@pytest.mark.parametrize(("options", "key"), [((), "from-environment"), (("--api-key", "given"), "given")])
def test_serve_takes_the_key_from_the_environment(run, monkeypatch, options, key):
    from roofline.cli.run import prepare as ready
    from roofline.server import serve

    served = []
    monkeypatch.setenv("ROOFLINE_API_KEY", "from-environment")
    monkeypatch.setattr(ready, "prepare", lambda *_args: None)
    monkeypatch.setattr(serve, "serve", served.append)
    assert run("serve", *options).exit_code == 0
    assert served[0].api_key == key


def test_serve_hands_on_how_to_speculate(run, monkeypatch):
    from roofline.cli.run import prepare as ready
    from roofline.server import serve

    served, prepared = [], []
    monkeypatch.setattr(ready, "prepare", lambda model, *_args: prepared.append(model))
    monkeypatch.setattr(serve, "serve", served.append)
    words = ("--speculate", "draft", "--draft", "tiny", "--speculate-tokens", "6", "--kv-cache-dtype", "int8")
    assert run("serve", "large", *words).exit_code == 0
    assert prepared == ["large", "tiny"]
    spec = serve._spec(served[0])
    assert (spec.source, spec.draft) == ("large", "tiny")
    assert (spec.config.speculate, spec.config.speculate_tokens) == ("draft", 6)
    assert spec.options["draft_tokens"] == 6
    assert spec.options["kv_cache_dtype"] == "int8"
    assert spec.draft_options == {"kv_cache_dtype": "int8"}
    assert run("serve").exit_code == 0
    assert "draft_tokens" not in serve._spec(served[1]).options
    for words in (("--draft", "tiny"), ("--speculate", "draft")):
        result = run("serve", *words)
        assert result.exit_code == 1
        assert "needs both --speculate draft and --draft MODEL" in result.stderr


def test_serve_loads_as_large_a_step_as_its_engine_is_to_fill(run, monkeypatch):
    """More answers at a time than a model is loaded for by itself; a draft model holds as many."""
    from roofline.cli.run import prepare as ready
    from roofline.server import serve

    served = []
    monkeypatch.setattr(ready, "prepare", lambda *_args: None)
    monkeypatch.setattr(serve, "serve", served.append)
    sizes = {"max_running": 200, "max_batch_tokens": 1024}
    words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    assert run("serve", *words, "--speculate", "draft", "--draft", "tiny").exit_code == 0
    spec = serve._spec(served[0])
    assert sizes.items() <= spec.options.items()
    assert sizes.items() <= spec.draft_options.items()
    assert (spec.config.max_running, spec.config.max_batch_tokens) == (200, 1024)
    assert run("serve").exit_code == 0
    spec = serve._spec(served[1])
    assert not sizes.keys() & spec.options.keys()
    assert (spec.config.max_running, spec.config.max_batch_tokens) == (None, None)


def test_generate_hands_on_how_to_speculate(run, llm, monkeypatch):
    from roofline.cli.run import prepare as ready

    calls = []
    monkeypatch.setattr(ready, "load_llm", lambda *args: calls.append(args) or llm)
    assert run("generate", "hi", "--speculate", "ngram", "--speculate-tokens", "3").exit_code == 0
    assert run("chat", "--speculate", "ngram", input="hi\n").exit_code == 0
    assert [(engine.speculate, draft, engine.speculate_tokens) for _, _, engine, draft in calls] == [
        ("ngram", None, 3),
        ("ngram", None, 4),
    ]
    assert run("generate", "hi", "--speculate", "maybe").exit_code == 2


def test_serve_and_generate_hand_on_where_to_run(run, llm, monkeypatch):
    from roofline.cli.run import prepare as ready
    from roofline.engine.process import messages
    from roofline.server import serve

    served, prepared, given = [], [], []
    monkeypatch.setattr(ready, "prepare", lambda *args: prepared.append(args))
    monkeypatch.setattr(serve, "serve", served.append)
    words = ("--backend", "gpu", "--device", "amd:0", "--exact", "--tp", "4", "--pp", "2")
    wanted = {"backend": "gpu", "device": "amd:0", "exact": True}
    shared = {"tensor_parallel": 4, "pipeline_parallel": 2}
    assert run("serve", "large", *words, "--speculate", "draft", "--draft", "tiny").exit_code == 0
    assert prepared == [("large", None, None, "gpu"), ("tiny", None, None, "gpu")]
    spec = messages.engine_decoder.decode(messages.encoder.encode(serve._spec(served[0])))
    assert (wanted | shared).items() <= spec.options.items()
    assert wanted.items() <= spec.draft_options.items()
    assert not shared.keys() & spec.draft_options.keys(), "a draft runs on rank 0 alone"
    monkeypatch.setattr(ready, "load_llm", lambda _model, load, *_args: given.append(load.changes()) or llm)
    assert run("generate", "hi", *words).exit_code == 0
    assert (wanted | shared).items() <= given[0].items()
    result = run("chat", "--device", "amd:0", input="hi\n")
    assert (result.exit_code, "--device 'amd:0' with backend 'cpu'" in result.stderr) == (1, True)
    result = run("generate", "hi", "--backend", "gpu", "--offload", "some")
    assert (result.exit_code, "--offload='some' cannot be used: give a whole number of layers" in result.stderr) == (
        2,
        True,
    )


def test_serve_gives_each_replica_a_place_of_its_own(run, monkeypatch):
    from roofline.cli.run import prepare as ready
    from roofline.hardware import cores
    from roofline.server import serve

    served, prepared = [], []
    monkeypatch.setattr(ready, "prepare", lambda *args: prepared.append(args))
    monkeypatch.setattr(serve, "serve", served.append)
    monkeypatch.setattr(cores, "split_cores", lambda parts: [[]] * parts)
    assert run("serve", "large", "--dp", "3", "--threads", "7", "--speculate", "ngram").exit_code == 0
    assert prepared == [("large", 2, None, "cpu")], "roofs are those of one replica's threads"
    engines = serve.make_engine(served[0]).engines
    assert [engine.spec.options["replica"] for engine in engines] == [(0, 3), (1, 3), (2, 3)]
    assert [engine.spec.options["threads"] for engine in engines] == [2, 2, 2]
    result = run("serve", "large", "--dp", "8", "--threads", "7")
    assert (result.exit_code, "--dp 8 needs 8 threads, 7 are available" in result.stderr) == (1, True)
    assert run("serve", "large", "--dp", "2", "--backend", "gpu", "--tp", "4").exit_code == 0
    engines = serve.make_engine(served[1]).engines
    assert [engine.spec.options["replica"] for engine in engines] == [(0, 2), (1, 2)]
    assert [engine.spec.draft_options["replica"] for engine in engines] == [(0, 8), (4, 8)], "on rank 0's device"
    assert not any("threads" in engine.spec.options or engine.spec.cores for engine in engines)


def test_benches_hand_on_where_to_run_and_know_no_isa_there(run, monkeypatch):
    from roofline.bench import engine
    from roofline.bench.profile import profile

    given = []
    record = {"model": "m", "rows": {}, "chosen": {"device": "amd:0 a GPU"}, "load_s": 1.0}
    monkeypatch.setattr(engine, "bench_engine", lambda _model, _rows, *, load, **_options: given.append(load) or record)
    found = profile.Profiled("m", {"device": "amd:0 a GPU", "datasheet": "bf16 1 Top/s"}, ())
    monkeypatch.setattr(profile, "profile_model", lambda _model, _steps, load: given.append(load) or found)
    for words in (("bench", "engine"), ("profile",)):
        result = run(*words, "m", "--backend", "gpu", "--device", "amd:0", "--exact", "--offload", "auto")
        assert result.exit_code == 0, result.output
        assert "on amd:0 a GPU" in result.output or "datasheet: bf16 1 Top/s" in result.output
        assert given[-1].changes() == {"backend": "gpu", "device": "amd:0", "exact": True, "offload": "auto"}
        assert run(*words, "m", "--backend", "reference").exit_code == 2, "its figures say nothing"


def test_only_a_cpu_s_roofs_are_measured_before_a_model_runs(monkeypatch):
    from roofline.backends.cpu import roofs
    from roofline.cli.run import prepare as ready

    pulled, measured = [], []
    monkeypatch.setattr(ready, "pull", pulled.append)
    monkeypatch.setattr(roofs, "stored_roofs", lambda **_options: None)
    monkeypatch.setattr(roofs, "ensure_roofs", lambda **_options: measured.append("cpu"))
    for backend in ("gpu", "reference", "cpu"):
        ready.prepare("model", None, None, backend)
        assert measured == (["cpu"] if backend == "cpu" else [])
    assert pulled == ["model"] * 3


def test_version(run):
    import roofline

    assert run("--version").output.strip() == roofline.__version__


def test_errors_are_one_line_with_exit_code_1(run, monkeypatch):
    from roofline.cli.run import prepare as ready

    def broken(*_args, **_kwargs):
        raise ConfigError("there is no model 'x'")

    monkeypatch.setattr(ready, "load_llm", broken)
    result = run("generate", "hi")
    assert result.exit_code == 1
    assert result.stderr == "roofline: there is no model 'x'\n"
    assert result.stdout == ""
    debug = run("--debug", "generate", "hi")
    assert isinstance(debug.exception, ConfigError)


def test_bad_parameters_are_errors_of_the_user(run, llm):
    result = run("generate", "hi", "--top-p", "0")
    assert result.exit_code == 1
    assert "--top-p" in result.stderr
    assert run("generate", "hi", "--max-tokens", "-1").exit_code == 2


def test_generate_streams_then_prints_figures(run, llm):
    result = run("generate", "hello", "--seed", "3", "--temperature", "0.5", "--max-tokens", "9")
    assert result.stdout == "you said: hello\n"
    assert result.stderr.strip() == LINE
    asked, params = llm.asked[0]
    assert asked == [{"role": "user", "content": "hello"}]
    assert (params.seed, params.temperature, params.max_tokens) == (3, 0.5, 9)
    assert llm.closed


def test_generate_raw_and_from_stdin(run, llm):
    assert run("generate", "-", "--raw", input="from stdin").stdout == "you said: from stdin\n"
    assert llm.asked[0][0] == "from stdin"
    assert run("generate", "again", "--no-stream").stdout == "you said: again\n"


def test_generate_json_is_one_object(run, llm):
    result = run("generate", "hello", "--json")
    record = json.loads(result.stdout)
    assert record["text"] == "you said: hello"
    times = dict.fromkeys(("queue_seconds", "prefill_seconds", "decode_seconds"))
    assert record["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "cached_tokens": 0, "seed": 7, **times}
    assert record["stats"]["decode_tok_s"] == 180.0
    assert record["stats"]["share_of_roof"] == 0.4
    assert record["fingerprint"] == "feed"


def test_roofs_that_steps_were_faster_than_are_measured_again(monkeypatch, capsys):
    """The stored ones were measured on a busy machine; the share is one of the new ones, which are kept."""
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    from roofline.backends.cpu import executable as cpu
    from roofline.backends.cpu import roofs
    from roofline.cli.run.prepare import confirm_roofs, figures_line

    class Executable(SimpleNamespace):
        threads, isa, weight_bytes = 2, "avx2", 100
        limit_seconds = staticmethod(lambda works, roofs, working_set: 0.05 * len(works))
        step_cost = staticmethod(lambda: SimpleNamespace(work=(1,), limit_seconds=8.0))

    monkeypatch.setattr(cpu, "CpuExecutable", Executable)
    calls = []
    monkeypatch.setattr(roofs, "ensure_roofs", lambda **options: calls.append(options))
    llm = SimpleNamespace(engine=SimpleNamespace(executable=Executable()))
    assert confirm_roofs(llm, STATS) is STATS
    assert not calls
    wrong = replace(STATS, limit_seconds=16.0, correction=64.0)  # 6,400 % of the stored roofs
    assert figures_line(wrong).endswith("100.0% of the roof")
    assert figures_line(confirm_roofs(llm, wrong)).endswith("40.0% of the roof")
    assert calls == [{"quick": True, "threads": 2, "isa": "avx2", "again": True}]
    assert "measuring them again" in capsys.readouterr().err


def test_figures_without_roofs():
    from roofline.cli.run.prepare import figures, figures_line

    assert figures_line(EngineStats()).endswith("roof not measured")
    drafts = EngineStats(drafts=3, draft_tokens=12, accepted_tokens=9)
    assert figures_line(drafts).endswith(", 75% of 12 drafted tokens right")
    assert figures(EngineStats())["share_of_roof"] is None


@pytest.mark.parametrize(
    ("recommended", "words", "expected"),
    [
        ({}, [], {"temperature": 0.7, "top_p": 0.9}),
        ({}, ["--temperature", "1"], {"top_p": 0.9}),  # typed, though it is the library's default
        ({"temperature": 0.6, "top_k": 20}, [], {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "top_k": 20}, ["--top-k", "0", "--seed", "3"], {"temperature": 0.6, "seed": 3}),
        ({"repetition_penalty": 1.1}, [], {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}),
    ],
)
def test_commands_sample_as_the_model_recommends(run, llm, recommended, words, expected):
    llm.model.sampling = recommended
    run("generate", "hi", *words)
    run("chat", *words, input="hi\n")
    generated, chatted = (params.changes() for _, params in llm.asked)
    assert generated == expected | {"max_tokens": 256}
    assert chatted == expected


def test_generate_and_chat_take_a_system_message_and_stops(run, llm):
    run("generate", "hi", "--system", "Be brief.", "--stop", "END", "--stop", "\n")
    run("chat", "--system", "Be brief.", "--stop", "END", input="hi\n")
    for messages, params in llm.asked:
        assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        assert params.stop[0] == "END"
    assert llm.asked[0][1].stop == ("END", "\n")
    refused = run("generate", "hi", "--raw", "--system", "Be brief.")
    assert (refused.exit_code, refused.stderr.count("\n")) == (1, 1)


def test_chat_takes_the_model_by_place_or_by_name(run, llm, monkeypatch):
    from roofline.cli.run import prepare as ready

    names = []
    monkeypatch.setattr(ready, "load_llm", lambda name, *_: names.append(name) or llm)
    run("chat", "one")
    run("chat", "-m", "two")
    run("chat")
    run("generate", "hi", "--model", "three")
    assert names == ["one", "two", "smollm2-135m", "three"]


def test_help_is_a_command_too(run):
    assert run("help").stdout == run("--help").stdout
    assert "\n  help " in run("help").stdout
    assert "\n  help " not in run("help", "tune").stdout
    assert run("help", "tune").stdout == run("tune", "--help").stdout
    assert run("help", "generate").stdout == run("generate", "--help").stdout
    assert run("help", "generat").exit_code == 2
    misplaced = run("--no-tuned", "generate", "hi")
    assert "there is no option --no-tuned before the command; options of one follow it" in misplaced.stderr


def test_chat_piped(run, llm):
    script = 'hello\n\n/stats\n/nope\n/set temperature=0.25;stop=["x"]\nbye\n/reset\n/help\n/exit\nnot read\n'
    result = run("chat", "--system", "Be brief.", "--seed", "1", input=script)
    assert result.exit_code == 1  # of /nope
    assert result.stdout.startswith("you said: hello\n")
    assert "of the roof" in result.stdout
    assert "temperature=0.25, stop=('x',)" in result.stdout
    assert "/reload" in result.stdout
    assert "there is no command /nope" in result.stderr
    assert "not read" not in result.stdout
    messages, params = llm.asked[1]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "you said: hello"
    assert (params.temperature, params.stop, params.seed) == (0.25, ("x",), 1)


@pytest.mark.parametrize("text", ["temperature", "heat=1", "temperature=-1", "n=x"])
def test_chat_set_refuses_and_changes_nothing(llm, text):
    from roofline.common.errors import RooflineError

    session = Session(lambda _: llm, "tiny")
    with pytest.raises(RooflineError):
        session._set(f"seed=4;{text}")
    assert session.params == SamplingParams()


def test_a_model_without_a_chat_template_continues_and_does_not_chat(run, llm):
    llm.chat_template.fitting = False
    result = run("generate", "The sky")
    assert result.stdout == "you said: The sky\n"
    assert "has no chat template: it continues the prompt as it is" in result.stderr
    assert llm.asked[-1][0] == "The sky"
    assert "no chat template" not in run("generate", "--raw", "The sky").stderr
    refused = run("generate", "--system", "Be brief.", "The sky")
    assert refused.exit_code == 1
    assert "leave --system out" in refused.stderr
    llm.closed = False
    refused = run("chat", input="hello\n")
    assert refused.exit_code == 1
    assert "the model has no chat template" in refused.stderr
    assert llm.closed
    assert len(llm.asked) == 2


def test_ctrl_c_stops_the_answer_not_the_program(run, llm):
    llm.interrupt = True
    result = run("chat", input="hello\nagain\n")
    assert result.exit_code == 0
    assert len(llm.asked) == 2
    assert llm.asked[1][0][1] == {"role": "assistant", "content": "you said: "}
    assert llm.closed


def test_a_message_that_does_not_fit_is_not_kept(run, llm):
    llm.fail = True
    result = run("chat", input="long\nagain\n")
    assert result.exit_code == 1  # a pipe's reader is told
    assert result.stderr.count("Shorten it.") == 2
    assert [m["content"] for m in llm.asked[1][0]] == ["again"]


def test_reload_frees_first_and_survives_a_wrong_name(capsys):
    made = []

    def load(name):
        assert all(llm.closed for llm in made), "two models at the same time"
        if name == "wrong":
            raise ConfigError("there is no model 'wrong'")
        made.append(FakeLLM(name))
        return made[-1]

    session = Session(load, "tiny")
    session._answer("hello")
    session._reload("other")
    assert session.llm.name == "other"
    assert session.messages == []
    with pytest.raises(ConfigError):
        session._reload("wrong")
    assert session.llm.name == "other"
    assert not session.llm.closed


def test_doctor_shows_what_it_knows(run, monkeypatch):
    from roofline.cli.measure import doctor

    roofs = {"int8_ops": 2e12, "bf16_flops": 9e11, "f32_flops": 5e11, "reads": ((1 << 20, 4e11),), "threads": 2}
    report = {
        "version": "1", "threads": {"value": 2, "reason": "why"}, "isa": {"value": "avx2", "reason": "forced"},
        "machine": {
            "chip": "EPYC", "vendor": "AMD", "arch": "x86_64", "isas": ("avx2", "portable"), "cores_online": 4,
            "cores_allowed": 3, "cpu_quota": 2.5, "memory_total": 1 << 34, "memory_limit": None,
            "memory_available": None,
            "caches": [{"level": 3, "bytes": 32 << 20, "shared_by": 4}], "numa_nodes": 2, "numa_balancing": True,
            "huge_pages": "madvise", "warnings": ["NUMA balancing is on. Mend: sysctl kernel.numa_balancing=0"],
        },
        "gpus": {
            "devices": [], "torch": None, "findings": [{"cause": "A node is closed.", "remedy": "usermod -aG render"}],
        },
        "roofs": {**roofs, "isa": "avx2", "measured": "today"}, "kernels": {"linear": {"Q4_1": "tiles 16"}},
        "extensions": [{"name": "lion", "package": "roofline-lion"}], "environment": {"ROOFLINE_HOME": None},
        "weights": [
            {"bundle": "/b/intact", "time": 0.0, "problem": None},
            {"bundle": "/b/old", "time": 0.0, "problem": "flipped"},
        ],
    }  # fmt: skip
    monkeypatch.setattr(doctor, "examine", lambda *_: report)
    shown = run("doctor", env={"COLUMNS": "200"}).stdout
    for part in (
        "EPYC",
        "quota 2.50",
        "2.0 Top/s",
        "today with 2 threads, avx2; again: doctor --measure",
        "1.0 MiB: 400.0 GB/s",
        "kernel.numa_balancing=0",
        "Q4_1: tiles 16",
        "lion (roofline-lion)",
        "A node is closed. Mend: usermod -aG render",
        "forced",
        "as they were written, compared ",
        "CHANGED since they were written",
        "warning flipped",
    ):
        assert part in shown
    assert json.loads(run("doctor", "--json").stdout)["machine"]["chip"] == "EPYC"


@pytest.mark.parametrize(
    ("words", "kind", "text"),
    [
        (["--schema", "form"], "json_schema", '{"type": "object"}'),
        (["--grammar", "form"], "lark", '{"type": "object"}'),
        (["--regex", "a+"], "regex", "a+"),
        (["--choice", "yes", "--choice", "no"], "choice", '["yes","no"]'),
    ],
)
def test_generate_hands_on_the_form_of_the_answer(run, llm, tmp_path, monkeypatch, words, kind, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "form").write_text('{"type": "object"}')
    assert run("generate", "hi", *words, "--max-tokens", "9").exit_code == 0
    params = llm.asked[0][1]
    assert (params.constraint.kind, params.constraint.text, params.max_tokens) == (kind, text, 9)
    assert run("generate", "hi").exit_code == 0
    assert llm.asked[1][1].constraint is None


def test_a_form_that_cannot_be_is_one_line(run, llm, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "large").write_text("x" * 70_000)
    for words, message in (
        (["--schema", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--schema", str(tmp_path / "bytes")], "is not UTF-8"),
        (["--grammar", str(tmp_path / "large")], "has 70000 bytes, more than the 65536"),
        (["--regex", "a", "--choice", "b"], "--regex and --choice both give the answer's form"),
        (["--regex", "a" * 5000], "the regex has 5,000 bytes"),
        (["--choice", ""], "not a list of non-empty texts"),
    ):
        result = run("generate", "hi", *words)
        assert result.exit_code == 1
        assert message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not llm.asked


def test_the_package_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "roofline", "eval", "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == call_roofline(["eval", "--help"]).stdout
