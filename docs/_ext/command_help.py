"""The directive `command-help`: what every command of `roofline` prints for --help, as literal text under headings."""

import os
import re
import subprocess
import sys

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDTH = "100"
LISTED = re.compile(r"^[│ ]+([a-z][a-z0-9-]*)  ", re.MULTILINE)


def help_of(words: tuple[str, ...]) -> str:
    """What `roofline WORDS --help` prints, without colours and without trailing blanks."""
    variables = {**os.environ, "COLUMNS": WIDTH, "TERMINAL_WIDTH": WIDTH, "NO_COLOR": "1", "TERM": "dumb"}
    code = "from roofline.cli.main import main; main()"
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'roofline'; {code}", *words, "--help"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=True)
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())


def subcommands(text: str) -> list[str]:
    """The commands that a help text lists, in its order; none for a command without any."""
    listed = re.split(r"^.*\bCommands\b.*$", text, flags=re.MULTILINE | re.IGNORECASE)[1:]
    return [name for part in listed for name in LISTED.findall(part)]


def tree(words: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], str]]:
    """Every command with its help text, parents first."""
    text = help_of(words)
    found = [(words, text)]
    if len(words) < 3:
        for name in subcommands(text):
            found += tree((*words, name))
    return found


class CommandHelp(SphinxDirective):
    """A section a command."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for words, text in tree():
            title = " ".join(("roofline", *words))
            section = nodes.section(ids=[nodes.make_id(title)], names=[title])
            section += nodes.title(text=title)
            section += nodes.literal_block(text, text, language="text")
            sections.append(section)
        return sections


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
