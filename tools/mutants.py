"""Changes single places of the package at random and runs their tests: a change that no test notices is printed.

    python -m tools.mutants server                    # 30 places of a room, or of a folder or file of it
    python -m tools.mutants server --count 100 --seed 7
    python -m tools.mutants --since main              # of the lines that were changed since a commit
    python -m tools.mutants ops --also tests/models   # with tests of another room
    python -m tools.mutants server -- -k refusals     # what stands behind -- goes to pytest

A change is a comparison, an operator, a constant or a condition that is another one, or a call that is left out. The
tests of a place are those of its room that the default run has (`-m 'not slow'`), and those that `--also` names. They
run once without a change, which tells the lines that each executes (`tools/covering_tests.py`); a change then runs
those that execute its line. They run in processes of their own, which read the changed module instead of the file:
no file of the tree is written, so work may go on beside. Tests that run four times longer than without a change hang,
and are ended. Changes that change nothing that can be observed are not drawn: single ones are listed with the reason in
`tools/equal_mutants.toml`, kinds that are equal wherever they stand are `MEANINGLESS` and `INFERRING` here. The exit
status is 1 where less than `--least` are noticed.
"""

import argparse
import ast
import difflib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tools.covering_tests import CoveringTests, record

ROOT = Path(__file__).parents[1]
PACKAGE = "src/roofline"
EQUAL = Path(__file__).with_name("equal_mutants.toml")
SHORTEST_LIMIT = 60.0  # seconds
START = 5.0  # seconds that a test process takes to import what it tests
CACHE = ".pytest_cache/mutants"  # of pytest, below ROOT: what a user's own runs remember stays

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
# (function, keyword) with values whose changes change nothing that a program computes: a strict zip is an assertion,
# blanks in a JSON file are for people, and a copy that need not be waited for has the same bytes.
MEANINGLESS = {("zip", "strict"): ("True",), ("json.dumps", "indent"): ("1", "2"), ("to", "non_blocking"): ("True",)}
INFERRING = ("reshape", "view")  # to numpy each negative size is the one to be worked out; torch refuses all but -1
# Put first on the path of the test processes: Python imports it at every start, so their children have the change too.
# The module's code has the changed file as its source, which triton.jit reads, and the true one as its `__file__`.
HOOK = """\
import importlib.abc, importlib.util, sys

class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def find_spec(self, name, path=None, target=None):
        if name != {module!r}:
            return None
        return importlib.util.spec_from_file_location(
            name, {file!r}, loader=self, submodule_search_locations={folders!r})

    def get_source(self, name):
        return open({changed!r}, encoding="utf-8").read()

    def get_code(self, name):
        return compile(self.get_source(name), {changed!r}, "exec", dont_inherit=True)

sys.meta_path.insert(0, Changed())
"""


@dataclass(frozen=True)
class Mutant:
    """One change: in a file of the tree, the text from `start` to `stop` becomes another."""

    file: Path  # below ROOT
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.stop :]

    def diff(self, source: str) -> str:
        before, after = (text.splitlines(keepends=True) for text in (source, self.apply(source)))
        return "".join(difflib.unified_diff(before, after, f"a/{self.file}", f"b/{self.file}", n=2))

    def lines(self, source: str) -> tuple[str, str]:
        """The changed lines before and after, without their indentation."""
        first = source.rfind("\n", 0, self.start) + 1
        last = source.find("\n", self.stop)
        last = len(source) if last < 0 else last
        after = source[first : self.start] + self.text + source[self.stop : last]
        return source[first:last].strip(), after.strip()


class _Places(ast.NodeVisitor):
    """The changes of one file. Left out: docstrings, annotations, assertions, log lines, declarations for mypy,
    and what `MEANINGLESS` and `INFERRING` name."""

    def __init__(self, file: Path, source: str) -> None:
        self.file, self.source = file, source
        self.starts = [0]  # of the lines, in characters
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.lines = source.splitlines(keepends=True)
        self.mutants: list[Mutant] = []
        self.left_out: set[ast.expr] = set()
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        if node not in self.left_out:
            super().visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if not isinstance(call, ast.Call) or ast.unparse(call.func).lstrip("_").startswith(("LOG.", "log.")):
            return
        self._replace(node, "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = ast.unparse(node.func)
        for (name, word), values in MEANINGLESS.items():
            if function == name or function.endswith(f".{name}"):
                values_here = [keyword.value for keyword in node.keywords if keyword.arg == word]
                self.left_out |= {value for value in values_here if ast.unparse(value) in values}
        if function.rpartition(".")[2] in INFERRING:
            signs = [arg for arg in node.args if isinstance(arg, ast.UnaryOp) and isinstance(arg.op, ast.USub)]
            self.left_out |= {sign.operand for sign in signs}
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            self._between(left, right, *COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, word, other)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in OPERATORS and not _text(node.left) and not _text(node.right):
            self._between(node.left, node.right, *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in OPERATORS:
            sign, other = OPERATORS[type(node.op)]
            self._between(node.target, node.value, f"{sign}=", f"{other}=")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._replace(node, f"({self.source[self._at(node.operand) : self._end(node.operand)]})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, f"({node.value + 1})")
            if node.value > 0:
                self._replace(node, f"({node.value - 1})")
        elif isinstance(node.value, float):
            self._replace(node, f"({node.value!r} + 1.0)" if node.value == 0 else f"({node.value!r} * 2.0)")

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words for people; a formatted value has no place in the file of its own before Python 3.12."""

    def _at(self, node: ast.expr | ast.stmt) -> int:
        return self._offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        """ast counts columns in bytes of UTF-8."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def _replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        self.mutants.append(Mutant(self.file, self._at(node), self._end(node), text))

    def _negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.UnaryOp | ast.Compare | ast.Constant):  # those have changes of their own
            self._replace(test, f"(not ({self.source[self._at(test) : self._end(test)]}))")

    def _between(self, left: ast.expr, right: ast.expr, word: str, other: str) -> None:
        """Change an operator: it is the first such word between its operands, which parentheses may stand around."""
        first, last = self._end(left), self._at(right)
        match = re.search(re.escape(word).replace(r"\ ", r"\s+"), self.source[first:last])
        if match is not None:
            self.mutants.append(Mutant(self.file, first + match.start(), first + match.end(), other))


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def mutants_of(file: Path, source: str) -> list[Mutant]:
    """Every change of a file, in its order."""
    return sorted(_Places(file, source).mutants, key=lambda mutant: (mutant.start, mutant.stop, mutant.text))


def equal_changes(path: Path = EQUAL) -> set[tuple[str, str, str]]:
    """(file below the package, line before, line after) of the changes that change nothing."""
    listed = tomllib.loads(path.read_text("utf-8"))["mutant"]
    return {(entry["file"], entry["before"], entry["after"]) for entry in listed}


def changed_lines(commit: str) -> dict[Path, set[int]]:
    """Lines of the package, counted from 1, that differ from a commit."""
    command = ["git", "diff", "-U0", "--no-ext-diff", commit, "--", PACKAGE]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    lines: dict[Path, set[int]] = {}
    file = Path()
    for line in text.splitlines():
        if line.startswith("+++ b/"):
            file = Path(line[6:])
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first = int(match[1])
            lines.setdefault(file, set()).update(range(first, first + int(match[2] or 1)))
    return {file: numbers for file, numbers in lines.items() if file.suffix == ".py"}


def candidates(place: str | None, since: str | None) -> tuple[list[Mutant], dict[Path, str]]:
    """The changes of a room or of changed lines, and the files' texts."""
    lines = changed_lines(since) if since else None
    top = ROOT / PACKAGE / (place or "")
    paths = [path.relative_to(ROOT) for path in ([top] if top.suffix == ".py" else sorted(top.rglob("*.py")))]
    sources = {path: (ROOT / path).read_text("utf-8") for path in paths if lines is None or path in lines}
    equal = equal_changes()
    mutants = []
    for path, source in sources.items():
        for mutant in mutants_of(path, source):
            line = source.count("\n", 0, mutant.start) + 1
            key = (str(path.relative_to(PACKAGE)), *mutant.lines(source))
            if (lines is None or line in lines[path]) and key not in equal:
                mutants.append(mutant)
    return mutants, sources


def tests_of(file: Path) -> str:
    """The folder of tests that mirrors a file's room, the deepest that there is."""
    folder = Path("tests") / file.relative_to(PACKAGE).parent
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


class Runs:
    """Runs with a change the tests that execute the changed line."""

    def __init__(self, covering: CoveringTests, arguments: Sequence[str] = ()) -> None:
        self.covering, self.arguments = covering, arguments

    def limit(self, tests: Sequence[str]) -> float:
        """Seconds after which these tests hang."""
        return max(SHORTEST_LIMIT, 4 * (START + sum(self.covering.seconds[test] for test in tests)))

    def outcome(self, mutant: Mutant, source: str) -> str:
        """'caught', 'hung' or 'survived'."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            changed = (
                Path(folder) / "changed" / mutant.file.name
            )  # apart: as `statistics.py` on the path it is imported
            changed.parent.mkdir()
            changed.write_text(mutant.apply(source), "utf-8")
            module = ".".join(mutant.file.relative_to("src").with_suffix("").parts)
            folders = [str((ROOT / mutant.file).parent)] if mutant.file.name == "__init__.py" else None
            names = {"module": module.removesuffix(".__init__"), "file": str(ROOT / mutant.file)}
            hook = HOOK.format(**names, folders=folders, changed=str(changed))
            (Path(folder) / "sitecustomize.py").write_text(hook, "utf-8")
            tests = self.covering.of(mutant.file, source, source.count("\n", 0, mutant.start) + 1)
            (Path(folder) / "tests").write_text("\n".join(tests), "utf-8")
            try:
                return "survived" if self._pass(Path(folder), self.limit(tests)) else "caught"
            except subprocess.TimeoutExpired:
                return "hung"

    def _pass(self, folder: Path, limit: float) -> bool:
        """Whether the tests that are listed in the folder pass with the change that lies there."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", f"cache_dir={CACHE}", f"@{folder / 'tests'}"]
        paths = filter(None, [str(folder), os.environ.get("PYTHONPATH")])
        process = subprocess.Popen(
            [*command, *self.arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with what the tests started
            process.wait()


def outcomes(runs: Runs, sample: Sequence[Mutant], sources: dict[Path, str], jobs: int) -> Iterator[tuple[Mutant, str]]:
    """Each change with its outcome, several at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        yield from zip(sample, pool.map(lambda each: runs.outcome(each, sources[each.file]), sample), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.mutants", description="What the tests do not notice.", epilog="-- ...: for pytest"
    )
    parser.add_argument("place", nargs="?", help="a room, or a folder or file below src/roofline; default: all of it")
    parser.add_argument("--since", metavar="COMMIT", help="only lines that were changed since this commit")
    parser.add_argument("--count", type=int, default=30, help="how many changes to draw (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--least", type=float, default=0.9, help="the share that must be noticed (default: 0.9)")
    parser.add_argument("--also", action="append", default=[], metavar="TESTS", help="more tests than the room's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="changes at a time (default: one a core)")
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:own])
    if options.place and not (ROOT / PACKAGE / options.place).exists():
        parser.error(f"there is no {PACKAGE}/{options.place}")
    try:
        mutants, sources = candidates(options.place, options.since)
    except subprocess.CalledProcessError as error:
        parser.error(f"--since {options.since}: {error.stderr.partition(chr(10))[0]}")
    sample = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    print(f"{len(sample)} of {len(mutants)} places, seed {options.seed}", flush=True)
    if not sample:
        return 0
    tests = sorted({*(tests_of(mutant.file) for mutant in sample), *options.also})
    with tempfile.TemporaryDirectory(prefix="covering-tests-") as folder:
        workers = ["-n", str(options.jobs)] if options.jobs > 1 else []
        covering = record(ROOT, PACKAGE, tests, [*workers, *words[own + 1 :]], Path(folder))
    print(
        f"{len(covering.seconds)} tests of {' '.join(tests)}; left out: {' '.join(covering.failed) or 'none'}",
        flush=True,
    )
    survivors, hung = [], 0
    runs = Runs(covering, words[own + 1 :])
    for number, (mutant, outcome) in enumerate(outcomes(runs, sample, sources, options.jobs), 1):
        hung += outcome == "hung"
        print(f"{number}: {outcome}", flush=True)
        if outcome == "survived":
            survivors.append(mutant)
            print(mutant.diff(sources[mutant.file]), flush=True)
    caught = len(sample) - len(survivors)
    print(f"{caught} of {len(sample)} were noticed ({hung} by hanging), {len(survivors)} were not")
    return int(caught < options.least * len(sample))


if __name__ == "__main__":
    sys.exit(main())
