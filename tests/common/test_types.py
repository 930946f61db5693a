"""The package says that it is typed, and type checkers see every public name; tests/e2e/test_types.py asks them."""

import ast
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import roofline

PACKAGE = Path(roofline.__file__).parent


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())["tool"]
    assert settings["scikit-build"]["wheel"]["packages"] == ["src/roofline"], (
        "all files of the package are in the wheel"
    )
    assert settings["mypy"]["disallow_untyped_defs"]


@pytest.mark.parametrize("name", ["roofline", "roofline.torch"])
def test_names_that_load_late_are_typed(name: str) -> None:
    """Without an import that type checkers see, `__getattr__` makes any name an object or Any."""
    module = import_module(name)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == {*module.__all__} - {"__version__"}


def test_documented_modules_export_their_names() -> None:
    """A checker in strict mode refuses a name that a module only imports."""
    from roofline.engine import llm

    assert {"Answer", "BeamAnswer", "BeamSearchOutput", "LLM", "Output"} <= {*llm.__all__}
    assert all(hasattr(llm, name) for name in llm.__all__)
