"""YAML as text: read by its safe forms alone, and a key that one mapping has twice is told with both lines."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yaml.nodes import Node

_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True)
class RepeatedKey:
    """A key that is in one mapping more than once. path: the keys that lead to it; lines: of the first and the last."""

    path: str
    lines: tuple[int, int]

    def __str__(self) -> str:
        first, last = self.lines
        where = f"on lines {first} and {last}" if first != last else f"on line {first}"
        return f"{self.path} is there twice, {where}: keep one of the two"


@dataclass(frozen=True)
class YamlText:
    """What a YAML text holds. value: of repeated keys the last one; repeated: in the order of their first lines."""

    value: object
    repeated: tuple[RepeatedKey, ...]


def read_yaml(text: str) -> YamlText:
    """Read a text. Raises yaml.YAMLError for one that is none, or has objects of Python's.

    A key that stands beside `<<` replaces what it merges, and is no repeated one.
    """
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        # Before values are made: that writes what `<<` merges into the mapping itself.
        repeated = tuple(sorted(_repeated(root, "", set()), key=lambda key: key.lines)) if root is not None else ()
        return YamlText(loader.construct_document(root) if root is not None else None, repeated)
    finally:
        loader.dispose()


def _repeated(node: "Node", path: str, done: set[int]) -> Iterator[RepeatedKey]:
    """The repeated keys of a node and of those inside it; done: nodes that were looked at, as aliases lead to them."""
    import yaml

    if id(node) in done:
        return
    done.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, inner in enumerate(node.value):
            yield from _repeated(inner, f"{path}.{index}", done)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[tuple[str, str], list[int]] = {}
    for key, inner in node.value:
        name = f"{path}.{key.value}" if isinstance(key, yaml.ScalarNode) else path
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE_TAG:
            lines.setdefault((key.tag, key.value), []).append(key.start_mark.line + 1)
        yield from _repeated(inner, name, done)
    for (_, value), places in lines.items():
        if len(places) > 1:
            yield RepeatedKey(f"{path}.{value}".removeprefix("."), (places[0], places[-1]))
