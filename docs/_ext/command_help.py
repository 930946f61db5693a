"""The directive `command-help`: what every command of `roofline` prints for --help, as literal text under headings."""

import os
import subprocess
import sys

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from roofline.cli.commands import ROOT, CommandGroup

WIDTH = "100"


def help_of(words: tuple[str, ...]) -> str:
    """What `roofline WORDS --help` prints, without colours and without trailing blanks."""
    variables = {**os.environ, "COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    code = "import sys; from roofline.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'roofline'; {code}", *words, "--help"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def commands(words: tuple[str, ...] = (), entry: CommandGroup | str = ROOT) -> list[tuple[str, ...]]:
    """The words that call each command, groups before what is in them."""
    below = entry.commands.items() if isinstance(entry, CommandGroup) else ()
    return [words, *(deeper for name, part in below for deeper in commands((*words, name), part))]


class CommandHelp(SphinxDirective):
    """A section a command."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for words in commands():
            text = help_of(words)
            title = " ".join(("roofline", *words))
            section = nodes.section(ids=[nodes.make_id(title)], names=[title])
            section += nodes.title(text=title)
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
