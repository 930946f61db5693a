"""Files for this folder's tests."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # weights_builders

from weights_builders import GGUFBuilder


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Bytes (or a builder) -> a file of a fresh folder."""

    def save(content: bytes | GGUFBuilder, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.build())
        return path

    return save
