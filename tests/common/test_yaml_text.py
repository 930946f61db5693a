"""YAML is read with the keys that are there twice, as OmegaConf, which reads LLM Foundry's files, refuses them."""

import pytest
import yaml

from roofline.common.yaml_text import read_yaml


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("a: 1\nb: 2\n", []),
        ("a: 1\n'a': 2\n", ["a is there twice, on lines 1 and 2: keep one of the two"]),
        ("a: 1\n1: 2\n'1': 3\n", []),  # a number and a text
        ("a: {b: 1, b: 2}\n", ["a.b is there twice, on line 1: keep one of the two"]),
        ("- x: 1\n  y: 2\n  x: 3\n", ["0.x is there twice, on lines 1 and 3: keep one of the two"]),
        ("a:\n  b: 1\n  c: {d: 1}\n  b: 2\na: 3\n", ["a is there twice, on lines 1 and 5", "a.b is there twice"]),
        # What `<<` merges is replaced by a key beside it, also where it is merged further.
        ("x: &x {lr: 1, eps: 2}\ny: &y\n  <<: *x\n  lr: 3\nz:\n  lr: 4\n  <<: *y\n", []),
        ("x: &x {a: 1}\ny: &y {b: 2}\nz:\n  <<: *x\n  <<: *y\n", []),
        ("x: &x {a: 1, a: 2}\ny: *x\nz: *x\n", ["x.a is there twice, on line 1"]),  # once, in its own place
        ("", []),
    ],
)
def test_keys_that_are_there_twice(text: str, repeated: list[str]) -> None:
    read = read_yaml(text)
    assert read.value == yaml.safe_load(text)
    lines = [str(key) for key in read.repeated]
    assert [line[: len(start)] for line, start in zip(lines, repeated, strict=True)] == repeated


@pytest.mark.parametrize("text", ["a: [1\n", "a: !!python/object/apply:os.getcwd []\n", "a: 1\n---\nb: 2\n"])
def test_what_is_no_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        read_yaml(text)
