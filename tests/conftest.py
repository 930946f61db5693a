"""Fixtures that several rooms share."""

import os
from pathlib import Path

import pytest

# Tests of bundles switch it on with a ROOFLINE_HOME of their own; no other leaves compiled models in the user's cache.
os.environ.setdefault("ROOFLINE_BUNDLES", "off")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct Q4_1 as a GGUF file: ROOFLINE_TEST_GGUF, or what `roofline pull smollm2-135m` stored."""
    named = os.environ.get("ROOFLINE_TEST_GGUF")
    if named:
        return Path(named)
    from roofline.weights import sources

    stored = sources.stored("smollm2-135m")
    if stored is None:
        pytest.skip("the model smollm2-135m is not there: run `roofline pull smollm2-135m`")
    return stored
