"""Which tests execute a line: recorded with coverage.py while the tests run once.

`record` runs the tests with this module as a pytest plugin. It notes for each line the test that was running; code of a
fixture that several tests share counts for all of them, and so do processes that a test starts.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

FOLDER, SOURCE = "COVERING_TESTS", "COVERING_TESTS_SOURCE"  # environment variables: where to write, and of which files
ALL = "*"  # the context of what every test shares
OUTCOMES = "outcomes.json"
# A process that a test starts writes a file of its own. One that is killed writes none.
CHILD = """\
import os
if "PYTEST_CURRENT_TEST" in os.environ:
    import atexit
    from tools import covering_tests
    recording = covering_tests.recording(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
    recording.start()
    atexit.register(lambda: (recording.stop(), recording.save()))
"""


def recording(context: str | None = None) -> coverage.Coverage:
    """What notes the lines of this process."""
    file, source = Path(os.environ[FOLDER]) / "lines", [os.environ[SOURCE]]
    return coverage.Coverage(str(file), data_suffix=True, source=source, config_file=False, context=context)


class Recorder:
    """The plugin of a test process."""

    def __init__(self) -> None:
        self._recording = recording()
        self._context = ""
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._recording.start()

    def _switch(self, context: str) -> str:
        """Lines count for `context` from here on; returns the one before."""
        before, self._context = self._context, context
        self._recording.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        result = yield
        self._switch("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: "pytest.FixtureDef[object]", request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(request.node.nodeid.partition("::")[0] if fixturedef.scope != "session" else ALL)
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_unconfigure(self) -> None:
        self._recording.stop()
        self._recording.save()
        if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that gets the reports of all
            outcomes = {"seconds": self._seconds, "failed": sorted(self._failed)}
            (Path(os.environ[FOLDER]) / OUTCOMES).write_text(json.dumps(outcomes))


def pytest_configure(config: pytest.Config) -> None:
    if FOLDER in os.environ:
        config.pluginmanager.register(Recorder())


@dataclass(frozen=True)
class CoveringTests:
    """What a recorded run knows.

    lines: of each file, by line, the contexts that executed it. seconds: of each test. failed: tests that fail while
    lines are recorded, as one does that counts imports; they are never chosen.
    """

    lines: dict[Path, dict[int, set[str]]]
    seconds: dict[str, float]
    failed: tuple[str, ...]

    def of(self, file: Path, source: str, line: int) -> list[str]:
        """The tests that may notice a change of a line, shortest first, file by file.

        What runs at import is noticed by tests of any function of its file. A line that no test is known to execute
        may run in a process that was killed: that gives all tests.
        """
        by_line = self.lines.get(file, {})
        statements = _statements(source)
        contexts: set[str] = set()
        for first, last, inside in statements:
            if first <= line <= last and inside:
                contexts |= {name for at in range(first, last + 1) for name in by_line.get(at, ())}
        # The context "" is that of imports, whose functions run before any test does.
        if "" in contexts or not any(inside and first <= line <= last for first, last, inside in statements):
            within = {at for first, last, inside in statements if inside for at in range(first, last + 1)}
            contexts |= {name for at in within for name in by_line.get(at, ())}
        contexts.discard("")
        passing = [test for test in self.seconds if test not in self.failed]
        chosen = passing
        if contexts and ALL not in contexts:
            chosen = [test for test in passing if test in contexts or test.partition("::")[0] in contexts]
        totals: dict[str, float] = {}
        for test in chosen:
            totals[test.partition("::")[0]] = totals.get(test.partition("::")[0], 0.0) + self.seconds[test]
        return sorted(
            chosen, key=lambda test: (totals[test.partition("::")[0]], test.partition("::")[0], self.seconds[test])
        )


def _statements(source: str) -> list[tuple[int, int, bool]]:
    """(first line, last line, whether it lies in a function) of each statement; of compound ones the head alone."""
    lines = []

    def visit(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.stmt) and not function:
                body = getattr(child, "body", None)
                last = body[0].lineno - 1 if body else child.end_lineno or child.lineno
                lines.append((child.lineno, max(child.lineno, last), inside))
            visit(child, inside or function)

    visit(ast.parse(source), False)
    return lines


def record(root: Path, package: str, tests: Sequence[str], arguments: Sequence[str], folder: Path) -> CoveringTests:
    """Run tests below `root` once and note which lines of `package` they execute.

    folder: for files that are needed meanwhile. Raises SystemExit where pytest runs no tests.
    """
    child = folder / "child"
    child.mkdir()
    (child / "sitecustomize.py").write_text(CHILD)
    paths = [str(child), str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.covering_tests", "-m", "not slow", *tests, *arguments]
    # Of a pytest that this one is started by: its workers and tests are not ours.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    places = {FOLDER: str(folder), SOURCE: str(root / package)}
    done = subprocess.run(
        command,
        cwd=root,
        env={**own, **places, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    if not (folder / OUTCOMES).exists() or done.returncode not in (0, 1):
        raise SystemExit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\nThe tests cannot be run: mend them first.")
    outcomes = json.loads((folder / OUTCOMES).read_text())
    total = coverage.Coverage(str(folder / "lines"), config_file=False)
    total.combine([str(path) for path in folder.glob("lines.*")])
    data = total.get_data()
    lines = {
        Path(name).relative_to(root): {at: set(contexts) for at, contexts in data.contexts_by_lineno(name).items()}
        for name in data.measured_files()
    }
    return CoveringTests(lines, outcomes["seconds"], tuple(outcomes["failed"]))
