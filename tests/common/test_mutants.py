"""`python -m tools.mutants` changes what it says, runs the changed module and no file, and ends tests that hang."""

from pathlib import Path

import pytest

from tools import mutants
from tools.covering_tests import CoveringTests, record

SOURCE = '''\
"""A module: 1 < 2."""

Alias = int
LIMITS: "int | None" = 3


def f(a: "int | None", b=0.5):
    """Text: not a < b."""
    assert a < 7
    LOG.debug("%s", a + 1)
    _log.warning("%s", a + 1)
    ä = "ä" + f"{a - 1}"; check(a)
    if a <= b and not g(a):
        a += (b) - (-a)
    return a if b else [x for x in a if x]
'''
CHANGES = {
    'LIMITS: "int | None" = (4)',
    'LIMITS: "int | None" = (2)',
    'def f(a: "int | None", b=(0.5 * 2.0)):',
    'ä = "ä" + f"{a - 1}"; pass',
    "if a < b and not g(a):",
    "if a <= b or not g(a):",
    "if a <= b and (g(a)):",
    "if (not (a <= b and not g(a))):",
    "a -= (b) - (-a)",
    "a += (b) + (-a)",
    "a += (b) - ((a))",
    "return a if (not (b)) else [x for x in a if x]",
    "return a if b else [x for x in a if (not (x))]",
}


def test_every_place_is_changed_and_no_words():
    listed = [mutant.lines(SOURCE)[1] for mutant in mutants.mutants_of(Path("x.py"), SOURCE)]
    assert sorted(listed) == sorted(CHANGES)


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("zip(a, b, strict=True)", []),
        ("zip(a, b, strict=False)", ["zip(a, b, strict=True)"]),
        ("take(a, strict=True)", ["take(a, strict=False)"]),
        ("x = json.dumps(a, indent=1)", []),
        ("x = a.to(b, non_blocking=True)", []),
        ("x = a.to(b, non_blocking=False)", ["x = a.to(b, non_blocking=True)"]),
        ("x = a.reshape(-1)", ["x = a.reshape((1))"]),
        ("x = a.sum(-1)", ["x = a.sum((1))", "x = a.sum(-(0))", "x = a.sum(-(2))"]),
    ],
)
def test_what_is_equal_wherever_it_stands_is_not_drawn(line, changes):
    listed = [mutant.lines(line)[1] for mutant in mutants.mutants_of(Path("x.py"), line)]
    assert sorted(listed) == sorted(changes + ["pass"] * (not line.startswith("x =")))


def test_each_change_of_the_package_is_a_module():
    for path in sorted((mutants.ROOT / mutants.PACKAGE / "engine").rglob("*.py")):
        source = path.read_text("utf-8")
        for mutant in mutants.mutants_of(path, source)[::20]:
            compile(mutant.apply(source), path, "exec")


def test_changes_that_are_not_drawn_are_places_of_today():
    for file, before, after in mutants.equal_changes():
        source = (mutants.ROOT / mutants.PACKAGE / file).read_text("utf-8")
        lines = {mutant.lines(source) for mutant in mutants.mutants_of(Path(file), source)}
        assert (before, after) in lines, f"{file}: {before!r} is no longer there; take it out of equal_mutants.toml"


SUMS = """\
MOST = 3


def total(a, b):
    while b > 0:
        a += 1
        b -= 1
    return a


NONE = total(0, 0)


def shared(number):
    return number + 1


def elsewhere(number):
    return 2 * shared(number) - 2


def nobody():
    return 1
"""
TEST = """\
from tiny.room.sums import total


def test_total():
    assert total(2, 2) == 4
"""
LIMIT_TEST = """\
from tiny.room import sums


def test_most():
    assert sums.MOST == 3
"""
FILE = Path("src/tiny/room/sums.py")


SHARED = """\
import subprocess
import sys

import pytest
from tiny.room import sums


@pytest.fixture(scope="module")
def shared():
    return sums.shared(3)


def test_nothing(shared):
    pass


def test_something(shared):
    assert shared == 4


def test_a_process():
    subprocess.run([sys.executable, "-c", "from tiny.room import sums; assert sums.elsewhere(1) == 2"], check=True)


def test_fails():
    assert sums.total(1, 1) == 3
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A package `tiny` with one room."""
    files = {FILE: SUMS, "tests/room/test_sums.py": TEST, "src/tiny/__init__.py": "", "src/tiny/room/__init__.py": ""}
    for name, text in {**files, "tests/room/test_shared.py": SHARED, "tests/limits/test_most.py": LIMIT_TEST}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "src"))
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "PACKAGE", "src/tiny")
    yield tmp_path
    assert (tmp_path / FILE).read_text() == SUMS


@pytest.mark.slow
def test_a_line_has_the_tests_that_execute_it(tiny, tmp_path):
    (tmp_path / "work").mkdir()
    covering = record(tiny, "src/tiny", ["tests"], ["-n", "2"], tmp_path / "work")

    def tests_at(text):
        line = SUMS[: SUMS.index(text)].count("\n") + 1
        return {test.partition("/test_")[2] for test in covering.of(FILE, SUMS, line)}

    assert covering.failed == ("tests/room/test_shared.py::test_fails",)
    sums, shared = {"sums.py::test_total"}, {"shared.py::test_nothing", "shared.py::test_something"}
    apart, limits = {"shared.py::test_a_process"}, {"most.py::test_most"}
    assert tests_at("a += 1") == sums
    assert tests_at("number + 1") == shared | apart  # of a fixture: every test of its file
    assert tests_at("2 * shared") == apart  # in a process of its own
    assert tests_at("MOST") == sums | shared | apart  # at import: whoever calls a function of the file
    assert tests_at("return a") == sums | shared | apart
    assert tests_at("return 1") == sums | shared | apart | limits  # nobody is known to


OUTCOMES = {
    ("MOST = 3", "MOST = (4)"): "survived",
    ("a += 1", "a += (2)"): "caught",
    ("b -= 1", "b += 1"): "hung",
}


@pytest.mark.parametrize(
    "change", [pytest.param(change, marks=[pytest.mark.slow] * (OUTCOMES[change] == "hung")) for change in OUTCOMES]
)
def test_what_no_test_notices_is_told_from_what_one_does(change, tiny, monkeypatch):
    monkeypatch.setattr(mutants, "SHORTEST_LIMIT", 20.0)
    runs = mutants.Runs(CoveringTests({}, {"tests/room/test_sums.py::test_total": 0.0}, ()))
    (mutant,) = (mutant for mutant in mutants.mutants_of(FILE, SUMS) if mutant.lines(SUMS) == change)
    assert runs.outcome(mutant, SUMS) == OUTCOMES[change]


def test_a_commit_that_is_not_there_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        mutants.main(["--since", "nosuch"])
    _, _, message = capsys.readouterr().err.rpartition("error: ")
    assert message.startswith("--since nosuch: ")
    assert message.count("\n") == 1


def test_a_changed_file_is_not_imported_in_place_of_another_of_its_name(tiny):
    """As `statistics.py`, which is also a module of the standard library."""
    file, source = Path("src/tiny/room/colorsys.py"), "LEAST = 3\n"
    (tiny / file).write_text(source)
    (tiny / "tests/room/test_colours.py").write_text("import colorsys\n\n\ndef test_it():\n    colorsys.rgb_to_hls\n")
    runs = mutants.Runs(CoveringTests({}, {"tests/room/test_colours.py::test_it": 0.0}, ()))
    mutant, *_ = mutants.mutants_of(file, source)
    assert runs.outcome(mutant, source) == "survived"
