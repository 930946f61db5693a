"""Options that are declared once: what is checked, what is sent on, what a draft model inherits."""

from dataclasses import dataclass
from typing import Literal

import pytest

from roofline.backends.options import LoadOptions
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.options import Options, declared, option


@dataclass(frozen=True)
class Kitchen(Options):
    oven: Literal["gas", "wood"] = option("gas", "What burns.")
    plates: int = option(2, "Places laid.", minimum=1, maximum=12, unit="plates", for_draft=False)
    heat: float = option(0.5, "Share of the full heat.", minimum=0, maximum=1)
    pan: str | None = option(None, "A pan's name.")
    salt: int | Literal["auto"] = option("auto", "Grains.", minimum=0, unit="grains")
    open: bool = option(True, "Whether guests may enter.")
    speed: float = option(1.0, "Of the cook.", minimum=0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("oven", "gass", "oven='gass' cannot be used: choose one of gas, wood; did you mean 'gas'"),
        ("plates", 0, "plates=0 cannot be used: give a whole number of plates, at least 1 and at most 12"),
        ("plates", 13, "plates=13 cannot"),
        ("plates", True, "plates=True cannot"),
        ("plates", None, "plates=None cannot"),
        ("plates", 2.0, "plates=2.0 cannot"),
        ("heat", 2, "heat=2 cannot be used: give a number, at least 0 and at most 1"),
        ("heat", float("nan"), "heat=nan cannot"),
        ("speed", float("inf"), "speed=inf cannot be used: give a number, at least 0"),
        ("salt", "much", "salt='much' cannot be used: give a whole number of grains, at least 0, or 'auto'"),
        ("open", 1, "open=1 cannot be used: give true or false"),
        ("pan", 7, "pan=7 cannot"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_to_give(name, value, message):
    with pytest.raises(ConfigError) as caught:
        Kitchen(**{name: value})
    assert message in str(caught.value)


def test_right_values_are_taken_as_they_are():
    kitchen = Kitchen("wood", 12, 1, "iron", 3, False)
    again = Kitchen(**kitchen.changes())
    assert (again.oven, again.heat, again.pan, again.salt, again.open) == ("wood", 1, "iron", 3, False)
    assert again == kitchen


def test_only_changes_travel_and_a_draft_inherits_what_is_declared_for_it():
    assert Kitchen().changes() == {}
    kitchen = Kitchen(plates=3, salt=0)
    assert kitchen.changes() == {"plates": 3, "salt": 0}
    assert kitchen.for_draft() == Kitchen(salt=0)


def test_an_unknown_keyword_is_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"Kitchen has no option 'plate'; did you mean 'plates'"):
        Kitchen.from_keywords({"plate": 1})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("plates", "3", 3), ("heat", "0.25", 0.25), ("salt", "auto", "auto"), ("salt", "7", 7), ("pan", "7", "7")],
)
def test_texts_of_the_command_line_become_values(name, text, value):
    assert declared(Kitchen)[name].parse(text) == value


def test_a_backend_refuses_the_options_that_only_others_have():
    with pytest.raises(UnsupportedError, match=r"isa='avx2' with backend 'gpu'.*backend=cpu"):
        LoadOptions(backend="gpu", isa="avx2")
    with pytest.raises(UnsupportedError, match=r"offload='auto' with backend 'cpu'.*only backend gpu.*backend=gpu"):
        LoadOptions(offload="auto")
    with pytest.raises(UnsupportedError, match=r"backend 'gqu' .*did you mean 'gpu'.*cpu, gpu, reference"):
        LoadOptions(backend="gqu")
    assert LoadOptions(exact=True, graphs=False).backend == "cpu"  # make no difference there


def test_a_draft_model_inherits_where_the_model_runs_but_not_its_weights_or_ranks():
    options = LoadOptions(backend="reference", threads=2, weights="random:1", tensor_parallel=2, max_model_len=64)
    assert options.for_draft().changes() == {"backend": "reference", "threads": 2}


def test_the_table_in_the_docs_says_what_is_declared():
    from tools.options_table import PAGE, render

    assert PAGE.read_text("utf-8") == render(), "run `python -m tools.options_table`"


def test_the_table_has_the_flag_where_it_does_not_follow_from_the_name():
    from tools.options_table import render

    rows = [line.split(" | ")[0] for line in render().splitlines() if line.startswith("| `")]
    assert "| `max_streams` (`--max-streams-per-key`)" in rows
    assert "| `max_model_len` (`--max-model-len`, `--context`)" in rows
    assert "| `draft_tokens` (no flag)" in rows
    assert "| `max_running`" in rows


@dataclass(frozen=True)
class MoreOptions(LoadOptions):
    """What adding an option takes: a line in the declaration."""

    colour: Literal["red", "blue"] = option("red", "What it is painted in.", topic="Looks", backends=("cpu",))
    brush: int | None = option(None, "Its width.", minimum=1, unit="millimetres", topic="Looks", for_draft=False)


def test_one_more_option_is_checked_offered_sent_on_inherited_and_documented(monkeypatch):
    from roofline import LLM, bundle
    from roofline.cli.parser import Parser
    from roofline.engine.process import messages
    from roofline.server.options import ServeOptions
    from roofline.server.serve import _spec
    from tools.options_table import render

    # Checks.
    with pytest.raises(ConfigError, match="colour='blu' cannot be used: choose one of red, blue; did you mean 'blue'"):
        MoreOptions(colour="blu")
    with pytest.raises(UnsupportedError, match=r"colour='blue' with backend 'gpu'.*backend=cpu"):
        MoreOptions(backend="gpu", colour="blue")

    # The command line and its help.
    def command(load: MoreOptions) -> None:
        """Paint."""

    parser = Parser("paint", command)
    load = parser.parse(["--colour", "blue", "--brush=3"])["load"]
    assert load == MoreOptions(colour="blue", brush=3)
    assert "Looks:\n  --colour red|blue  What it is painted in. Backend cpu. [default: red]" in parser.help(100)

    # What travels to an engine process, and what a draft model inherits.
    spec = _spec(ServeOptions(load=load))
    spec = messages.engine_decoder.decode(messages.encoder.encode(spec))
    assert spec.options == {"colour": "blue", "brush": 3, "text": False}
    assert spec.draft_options == {"colour": "blue"}

    # Keywords of LLM and load.
    class Loaded(Exception):
        pass

    def load_with_draft(model, options, draft, draft_options):
        raise Loaded(dict(options), dict(draft_options))

    monkeypatch.setattr("roofline.engine.llm.LoadOptions", MoreOptions)
    monkeypatch.setattr(bundle, "load_with_draft", load_with_draft)
    with pytest.raises(Loaded) as caught:
        LLM("tiny", draft="tinier", speculate="draft", colour="blue", brush=3)
    assert caught.value.args == ({"colour": "blue", "brush": 3, "draft_tokens": 4}, {"colour": "blue"})
    with pytest.raises(TypeError, match="LLM has no option 'color'; did you mean 'colour'"):
        LLM("tiny", color="blue")
    monkeypatch.setattr("roofline.bundle.loader.LoadOptions", MoreOptions)
    with pytest.raises(ConfigError, match="brush=0 cannot be used: give a whole number of millimetres"):
        bundle.load("tiny", colour="blue", brush=0)
    with pytest.raises(TypeError, match="load has no option 'color'; did you mean 'colour'"):
        bundle.load("tiny", color="blue")

    # The table in the docs.
    assert "| `colour` | `red`, `blue` | `red` | cpu | inherits | What it is painted in. |" in render(
        {"More": (MoreOptions, "Somewhere.")}
    )
