"""What a token of a prompt costs the further back it stands, by a price that is known."""

import pytest
from engine_fakes import FakeExecutable

from roofline.engine.config import EngineConfig, resolve
from roofline.engine.depth import doubling_depth


@pytest.mark.parametrize("depth", [100, 1000, 20_000])
def test_depth_is_that_of_the_price(depth):
    executable = FakeExecutable(doubling_depth=depth, num_pages=600, max_context=8192, tokens=512)
    assert doubling_depth(executable) == pytest.approx(depth, rel=0.08)
    assert resolve(EngineConfig(), executable).doubling_depth == doubling_depth(executable)
    assert resolve(EngineConfig(long_prompt_tokens=0), executable).doubling_depth is None, "nothing asks for it"


def test_where_all_tokens_cost_the_same_there_is_none():
    assert doubling_depth(FakeExecutable()) is None


def test_a_context_of_one_page_has_none():
    assert doubling_depth(FakeExecutable(doubling_depth=10, max_context=16)) is None
