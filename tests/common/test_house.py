"""Each rule that `python -m tools.house` measures notices a planted fault; test_arrows.py has the package's own."""

from pathlib import Path

import pytest

from tools import house


def broken(folder: Path) -> set[str]:
    """The figures of a package that exceed their limits."""
    rows, _ = house.report(house.syntax(folder), folder)
    return {figure for figure, _, is_kept in rows if not is_kept}


FAULTS = {
    "participles as names": {"a/x.py": "found = 1\n"},
    "vague words as names": {"a/x.py": "def f(each): ...\n"},
    "classes with another's name": {"a/x.py": "class Answer: ...\n", "b/y.py": "class Answer: ...\n"},
    "records filled by over 5 positions": {
        "a/x.py": "@dataclass\nclass Box:\n" + "".join(f"    f{n}: int\n" for n in range(6)),
        "b/y.py": "box = x.Box(1, 2, 3, 4, 5, 6)\n",
    },
    "functions over 60 lines": {"a/x.py": "def f():\n" + "    pass\n" * 60},
    "functions over 8 parameters": {"a/x.py": "def f(self, a, b, c, d, e, f, g, *, h, i): ...\n"},
    "circles of modules": {
        "a/inner/x.py": "def f():\n    from roofline.a.inner import y\n",
        "a/inner/y.py": "import roofline.a.inner.x\n",
    },
    "circles of folders": {
        "a/inner/x.py": "from roofline.a.other import x\n",
        "a/inner/y.py": "",
        "a/other/x.py": "",
        "a/other/y.py": "from roofline.a.inner import y\n",
    },
    "`Any`, in the room with most": {"a/x.py": "from typing import Any\n" + "x: Any = 1\n" * 13},
}


@pytest.mark.parametrize("figure", FAULTS)
def test_a_planted_fault_is_noticed(figure, tmp_path):
    root = tmp_path / "roofline"
    for name, text in FAULTS[figure].items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert broken(root) == {figure}


def test_what_is_inside_the_limits_is_not_noticed(tmp_path):
    root = tmp_path / "roofline"
    (root / "a").mkdir(parents=True)
    (root / "a/x.py").write_text("def f(self, a, b, c, d, e, f, g, h):\n" + "    pass\n" * 59)
    (root / "a/y.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from roofline.a import z\nfound_at = 1\n"
    )
    (root / "a/z.py").write_text("from roofline.a import y\nclass _Part: ...\nclass Box(NamedTuple):\n    f: int\n")
    (root / "a/w.py").write_text("class _Part: ...\nbox = z.Box(1, f1=2, f2=3, f3=4, f4=5, f5=6)\n")
    assert broken(root) == set()
