"""The page on adding a family says what stands in the tree: the code of its example, its rows, functions, messages."""

import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "add-a-family.md").read_text("utf-8")
SECTIONS = dict(part.split("\n", 1) for part in PAGE.split("\n## ")[1:])
MODULES = {
    **{name: f"roofline.models.{name}" for name in ("llama", "olmo2", "qwen", "phi3", "smollm3", "gemma")},
    **{name: f"roofline.weights.families.shared.{name}" for name in ("hf_fields", "gguf_fields", "layer_kinds")},
    "ops": "roofline.ops",
}


@pytest.mark.parametrize("heading", ["The mathematics", "The files"])
def test_the_code_is_that_of_the_tree(heading: str) -> None:
    """A test of what the file computes is one of what the page shows."""
    path = re.findall(r"`(src/roofline/[\w/]+gemma1\.py)`", SECTIONS[heading])[0]
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[heading], re.DOTALL)
    assert (ROOT / path).read_text("utf-8").endswith(f'"""\n\n{code}')


def test_functions_and_rows_that_are_named_exist() -> None:
    named = set(re.findall(rf"`({'|'.join(MODULES)})\.(\w+)", PAGE))
    assert len(named) > 15
    for module, name in named:
        assert hasattr(import_module(MODULES[module]), name), f"{module}.{name}"
    for row, path in (
        ('"gemma1": "roofline.models.gemma1"', "src/roofline/models/registry.py"),
        ('"gemma": "gemma1"', "src/roofline/weights/families/table.py"),
        ('GgufCase("gemma", CASES["gemma"].config, HEADS, plus_one)', "tests/weights/gguf_families.py"),
    ):
        assert row in PAGE
        assert row in (ROOT / path).read_text("utf-8")
    constants = dict(re.findall(r"`([_A-Z]+)`(?: \([^)]*\))? of `([\w/.]+\.py)`", PAGE))
    assert len(constants) > 5
    for name, path in constants.items():
        assert re.search(rf"^{name}\b", (ROOT / path).read_text("utf-8"), re.MULTILINE), f"{name} of {path}"


def test_messages_that_are_explained_are_those_of_the_tests() -> None:
    sources = "".join(
        path.read_text("utf-8") for folder in ("src", "tests") for path in sorted((ROOT / folder).rglob("*.py"))
        if path != Path(__file__)
    )  # fmt: skip
    table = SECTIONS["The tests"].split("| what a test says")[1]
    messages = [
        text
        for row in table.splitlines()
        if row.startswith("|")
        for text in re.findall("`([^`]+)`", row.split(" | ")[0])
        if " " in text
    ]
    assert len(messages) > 5
    for message in messages:
        assert message.partition("NAME")[0].strip() in sources, message
