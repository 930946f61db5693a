"""When steps are captured, and what a capture that fails leaves behind."""

import pytest

torch = pytest.importorskip("torch")

from roofline.backends.gpu.runtime import graphs as graphs_module  # noqa: E402
from roofline.backends.gpu.runtime.graphs import Graphs, bucket, padded  # noqa: E402
from roofline.backends.gpu.runtime.step import StepSizes  # noqa: E402
from roofline.ops.batch import BatchLimits  # noqa: E402

ONE, FOUR = StepSizes(1, 1, 1, 1, 256), StepSizes(4, 4, 4, 1, 256)


class Recorded(Graphs):
    """Captures nothing; `done` is what ran, in order."""

    def __init__(self):
        super().__init__(self.listed, lambda sizes: sizes)
        self.done, self.broken = [], None

    def listed(self, step):
        if self.broken == "run":
            raise RuntimeError("no memory")
        self.done.append(("list", step.rows))

    def _capture(self, step):
        if self.broken == "capture":
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        self.done.append(("capture", step.rows))
        return self

    def replay(self):
        self.done.append(("replay",))


def test_the_second_step_of_a_bucket_is_captured_and_later_ones_replayed():
    graphs = Recorded()
    for sizes in (ONE, FOUR, ONE, ONE):
        assert graphs.step(sizes) is sizes
    assert graphs.done == [("list", 1), ("list", 4), ("capture", 1), ("replay",), ("replay",)]


def test_after_a_failed_capture_all_steps_run_from_the_list():
    graphs = Recorded()
    for sizes in (ONE, ONE, FOUR):
        graphs.step(sizes)
    graphs.broken = "capture"
    graphs.done.clear()
    for sizes in (FOUR, FOUR, ONE):
        assert graphs.step(sizes) is sizes
    assert graphs.done == [("list", 4), ("list", 4), ("replay",)]
    assert graphs.failed == "RuntimeError: operation not permitted"
    graphs.broken = None
    graphs.step(FOUR)
    assert graphs.done[-1] == ("list", 4)


def test_a_first_step_that_failed_is_not_captured_next():
    """What it did not get to was neither compiled nor loaded."""
    graphs = Recorded()
    graphs.broken = "run"
    with pytest.raises(RuntimeError, match="no memory"):
        graphs.step(ONE)
    graphs.broken = None
    graphs.step(ONE)
    assert graphs.done == [("list", 1)]


def test_buckets_hold_their_tokens():
    for most in (1, 7, 64, 256):
        for tokens in range(1, most + 1):
            assert tokens <= bucket(tokens, most) <= most


def test_what_steps_are_padded_to():
    limits = BatchLimits(tokens=512, segments=64, rows=256, pages=64)
    for sizes, wanted in (
        (StepSizes(3, 3, 3, 1, 300), StepSizes(4, 4, 4, 1, 400)),
        (StepSizes(70, 70, 64, 3, 20), StepSizes(96, 96, 64, 4, 256)),  # drafts
        (StepSizes(9, 9, 1, 9, 9, decodes=0), StepSizes(16, 16, 16, 16, 256)),
        (StepSizes(10, 10, 3, 8, 9, decodes=2), StepSizes(16, 16, 16, 8, 256)),
        (StepSizes(256, 256, 32, 8, 90), StepSizes(256, 256, 64, 8, 256)),
        (StepSizes(10, 3, 3, 8, 9, decodes=2), None),  # a chunk of a prompt beside sequences that decode
        (StepSizes(10, 1, 1, 10, 90), StepSizes(16, 1, 1, 16, 256)),  # of a prompt alone
        (StepSizes(17, 17, 1, 17, 17), StepSizes(24, 32, 1, 24, 256)),
        (StepSizes(300, 3, 3, 200, 399), StepSizes(320, 4, 4, 256, 400)),
        (StepSizes(300, 0, 1, 300, 300), StepSizes(320, 0, 1, 320, 400)),  # no row of logits is wanted
        (StepSizes(512, 60, 60, 9, 20), StepSizes(512, 64, 64, 16, 256)),
    ):
        assert padded(sizes, limits, 400) == wanted
    assert padded(StepSizes(1025, 1, 1, 1025, 1025), BatchLimits(4096, 4, 4, 512), 4096) is None


def test_the_graphs_of_prompts_met_last_are_kept(monkeypatch):
    monkeypatch.setattr(graphs_module, "_MOST_PROMPT_GRAPHS", 2)
    graphs = Recorded()
    first, second, third = (StepSizes(tokens, 1, 1, tokens, 256) for tokens in (32, 64, 96))
    for sizes in (ONE, ONE, first, first, second, second, first, third, third):
        graphs.step(sizes)
    assert graphs.count == 3  # a decoding step stays
    graphs.done.clear()
    for sizes in (first, third, ONE, second):
        graphs.step(sizes)
    assert graphs.done == [("replay",), ("replay",), ("replay",), ("list", 1)]
