"""A test that changes what others share with it fails, and the others do not."""

import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.process_state import process_state_as_before


@pytest.mark.parametrize(
    ("change", "read", "name"),
    [
        (lambda: signal.signal(signal.SIGINT, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGINT), "SIGINT"),
        (lambda: os.chdir("/"), os.getcwd, "the working directory"),
        (lambda: os.environ.update(ROOFLINE_HOME="/x"), lambda: os.environ.get("ROOFLINE_HOME"), "a variable"),
        (lambda: os.environ.pop("ROOFLINE_BUNDLES"), lambda: os.environ.get("ROOFLINE_BUNDLES"), "a variable"),
    ],
)
def test_what_is_left_behind_is_named_and_put_back(
    change: Callable[[], object], read: Callable[[], object], name: str
) -> None:
    before = read()
    with pytest.raises(AssertionError, match=f"left behind for later tests: .*{name}"), process_state_as_before():
        change()
    assert read() == before


def test_deterministic_algorithms_of_torch_are_off_again() -> None:
    torch = pytest.importorskip("torch", reason="they are torch's")
    with process_state_as_before():
        torch.use_deterministic_algorithms(True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_examples_of_hypothesis_may_take_any_time() -> None:
    assert settings().deadline is None
