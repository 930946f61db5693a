"""Writes docs/options.md, the table of options, from their declarations.

python -m tools.options_table            # write it
python -m tools.options_table --check    # exit status 1 where the file says something else
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from roofline.backends.options import LoadOptions
from roofline.common.options import Option, Options, declared
from roofline.deploy.options import FleetOptions
from roofline.engine.config import EngineConfig
from roofline.engine.params import SamplingParams
from roofline.server.options import ServeOptions

PAGE = Path(__file__).parents[1] / "docs" / "options.md"
GROUPS = {
    "Loading a model": (
        LoadOptions,
        "Keywords of `LLM` and `roofline.bundle.load`, and flags of commands that run a model.",
    ),
    "Engine": (EngineConfig, "Keywords of `LLM`, and flags of `generate`, `chat` and `serve`."),
    "Serving": (ServeOptions, "Flags of `serve`."),
    "Fleets": (FleetOptions, "Flags of `up`, beside those of loading, engine and serving, which each server gets."),
    "Sampling": (SamplingParams, "Fields of `SamplingParams`, and flags of `generate` and `chat`."),
}
HEAD = """\
# Options

Every option is declared once, as a field of a class; this page is written from the declarations by
`python -m tools.options_table`. An option `max_running` is the keyword `max_running=` in Python and the flag
`--max-running` on the command line; a switch that is on has `--no-` before its name. Where the flag is another, or
there are several, they stand behind the name. A draft model that is loaded beside the model inherits the options
that are marked so.
"""


def render(groups: Mapping[str, tuple[type[Options], str]] = GROUPS) -> str:
    """The page's text."""
    parts = [HEAD]
    for title, (kind, where) in groups.items():
        loading = issubclass(kind, LoadOptions)
        head = ["Option", "Values", "Default", *(["Backends", "Draft"] if loading else []), "Meaning"]
        lines = [f"## {title}\n", f"{where}\n", _row(head), _row(["---"] * len(head))]
        lines += [_row(_cells(option, loading)) for option in declared(kind).values()]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _cells(option: Option, loading: bool) -> list[str]:
    default = "" if option.default is None else f"`{option.default}`"
    backends = ", ".join(option.backends) or "all"
    if option.backends and option.elsewhere == "ignored":
        backends += "; no effect elsewhere"
    where = [backends, "inherits" if option.for_draft else ""] if loading else []
    return [_name(option), ", ".join(_values(option)), default, *where, option.help]


def _name(option: Option) -> str:
    """The option's name, with its flags where they are not the one that follows from it."""
    if not option.command_line:
        return f"`{option.name}` (no flag)"
    if option.flags in ((), ("--" + option.name.replace("_", "-"),)):
        return f"`{option.name}`"
    return f"`{option.name}` ({', '.join(f'`{flag}`' for flag in option.flags)})"


def _values(option: Option) -> Iterator[str]:
    if bool in option.kinds:
        yield "true, false"
    elif option.kinds and not (option.kinds == (str,) and option.allowed()):
        name = {int: "whole number", float: "number", str: "text", Path: "path"}[option.kinds[0]]
        yield name + (f" of {option.unit}" if option.unit else "")
        for word, limit in (("at least", option.minimum), ("at most", option.maximum)):
            if limit is not None:
                yield f"{word} {limit:g}"
    yield from (f"`{word}`" for word in option.allowed())


def main() -> int:
    """Write or check the page."""
    if "--check" in sys.argv[1:]:
        same = PAGE.read_text("utf-8") == render()
        print("docs/options.md is as the declarations say" if same else "run `python -m tools.options_table`")
        return int(not same)
    PAGE.write_text(render(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
