"""The licence of a model's weights, where its files name one."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.files import read_regular
from roofline.common.yaml_text import read_yaml

if TYPE_CHECKING:
    from roofline.weights.checkpoint import Checkpoint

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.MULTILINE | re.DOTALL)
_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "LICENCE.md")
MAX_CHARACTERS = 200  # of a licence's name
MAX_FILE = 1 << 20  # bytes of a card or a licence


def licence_of(checkpoint: "Checkpoint") -> str:
    """The name that the files give to the licence, such as ``apache-2.0``; empty where they give none.

    A GGUF file names it in ``general.license``; a folder in the front matter of its README.md, or in config.json, or
    the first line of its file LICENSE does.
    """
    if checkpoint.kind == "gguf":
        values = checkpoint.metadata
        return _named(values.get("general.license"), values.get("general.license.name"))
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return _of_card(folder) or _named(checkpoint.metadata.get("license"), None) or _of_text(folder)


def _of_card(folder: Path) -> str:
    import yaml

    matter = _FRONT_MATTER.match(_text(folder / "README.md"))
    try:
        card = read_yaml(matter[1]) if matter else None
    except yaml.YAMLError:
        return ""
    if card is None or not isinstance(card.value, dict):
        return ""
    if any(key.path in ("license", "license_name") for key in card.repeated):
        return ""  # two licences, or none
    return _named(card.value.get("license"), card.value.get("license_name"))


def _of_text(folder: Path) -> str:
    for name in _FILES:
        for line in _text(folder / name).splitlines():
            if words := line.strip().lstrip("#").strip():
                return _named(words, None)
    return ""


def _text(path: Path) -> str:
    """A file's text; empty where there is none, or one of another size than such files have."""
    try:
        return read_regular(path, MAX_FILE).decode("utf-8", "replace") if path.is_file() else ""
    except (ConfigError, OSError):
        return ""


def _named(licence: object, other: object) -> str:
    """One name or several as a text; `other` is the name of a licence that is called ``other``."""
    names = licence if isinstance(licence, list) else [licence]
    if names == ["other"] and other:
        names = [other]
    return ", ".join(" ".join(name.split()) for name in names if isinstance(name, str))[:MAX_CHARACTERS]
