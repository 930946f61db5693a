"""The cross entropy that needs one tensor of logits: torch's bits, and how many tensors of that size are alive."""

from contextlib import nullcontext
from typing import Any

import program_builders as builders
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.config.schema import InitSection  # noqa: E402
from roofline.train.memory.dry_run import Ledger  # noqa: E402
from roofline.train.model import cross_entropy as module  # noqa: E402
from roofline.train.model.chunked_loss import ChunkedLoss  # noqa: E402
from roofline.train.model.cross_entropy import IGNORED, cross_entropy  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402

BLOCK_ROWS = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 0)
    monkeypatch.setattr(module, "LEAST_ROWS", BLOCK_ROWS)


def torchs(logits: Any, targets: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def both(logits: Any, targets: Any, scale: float) -> list[tuple[Any, Any]]:
    """(loss, gradient of the logits), torch's and ours."""
    results = []
    for function in (torchs, cross_entropy):
        leaf = logits.clone().requires_grad_()
        loss = function(leaf, targets)
        (loss * scale).backward()
        results.append((loss.detach(), leaf.grad))
    return results


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("vocab", [1, 7, 96, 1003])
@pytest.mark.parametrize("count", [1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS, 131])
def test_loss_and_gradient_have_torch_s_bits(count: int, vocab: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(count * vocab)
    logits = (6 * torch.randn(count, vocab, generator=generator)).to(getattr(torch, dtype))
    targets = torch.randint(0, vocab, (count,), generator=generator)
    targets[torch.rand(count, generator=generator) < 0.2] = IGNORED
    for scale in (1.0, 1 / 3, 65536 / 777):
        theirs, ours = both(logits, targets, scale)
        assert torch.equal(theirs[0], ours[0])
        assert torch.equal(theirs[1], ours[1])


def test_ignored_rows_have_no_loss_and_no_gradient() -> None:
    logits = torch.randn(2 * BLOCK_ROWS, 9)
    for kept in ([], [0], [BLOCK_ROWS - 1, BLOCK_ROWS], [2 * BLOCK_ROWS - 1]):
        targets = torch.full((len(logits),), IGNORED)
        targets[kept] = 3
        theirs, ours = both(logits, targets, 1.0)
        assert torch.equal(theirs[0], ours[0])
        assert torch.equal(theirs[1], ours[1])
        assert sorted(ours[1].abs().sum(1).nonzero()[:, 0].tolist()) == kept
    with torch.no_grad():
        assert cross_entropy(logits, torch.full((len(logits),), IGNORED)) == 0


def test_large_and_infinite_logits_are_torch_s() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [88.0, 89.0, 90.0], [-torch.inf, 0.0, 1.0]])
    theirs, ours = both(logits, torch.tensor([1, 0, 2]), 1.0)
    assert torch.equal(theirs[0], ours[0])
    assert torch.equal(theirs[1], ours[1])


@pytest.mark.parametrize("target", [-1, 9])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(torch.randn(3, 9), torch.tensor([0, target, 2]))


def test_the_gradient_lies_where_the_logits_lay_and_is_taken_once() -> None:
    logits = torch.randn(20, 9, requires_grad=True)
    loss = cross_entropy(logits, torch.zeros(20, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert not gradient.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


CONFIG = builders.BASE | {"vocab": 1000, "layers": 1}
PRECISIONS = {"fp32": None, "amp_bf16": "bfloat16", "amp_fp16": "float16"}


def model_of(chunks: bool) -> Model:
    model = Model(CONFIG, "cpu")
    initialize(model, 3, InitSection(name="baseline_", init_std=0.2))
    model.chunk_logits = chunks
    return model


def loss_of(model: Model, precision: str, rows: int = 8) -> Any:
    ids = torch.randint(0, CONFIG["vocab"], (rows, 16), generator=torch.Generator().manual_seed(4))
    goals = ids.roll(-1, 1)
    goals[:, -1] = IGNORED
    name = PRECISIONS[precision]
    with torch.autocast("cpu", getattr(torch, name)) if name else nullcontext():
        return model(ids, goals)


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_s_loss_and_gradients_are_those_of_torch_s_function(
    precision: str, chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roofline.train.model.modules.chunk_rows", lambda vocab: 50)  # chunks of 50, 50 and 28 rows
    results = []
    for function in (cross_entropy, torchs):
        monkeypatch.setattr("roofline.train.model.modules.cross_entropy", function)
        model = model_of(chunks)
        loss = loss_of(model, precision)
        (loss * 0.37).backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))


class Large(Ledger):
    """Counts storages of at least `limit` bytes that are alive at once."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.alive = limit, 0

    def _count(self, tensor: Any) -> None:
        super()._count(tensor)
        self.alive = max(self.alive, sum(size >= self.limit for _, size in self._storages.values()))


@pytest.mark.parametrize("chunks", [True, False])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_tensor_of_logits_is_alive(precision: str, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, rows = 256, 32 if chunks else 16  # of 16 tokens each
    monkeypatch.setattr("roofline.train.model.modules.chunk_rows", lambda vocab: chunk)
    model, width = model_of(chunks), 4 if precision == "fp32" else 2
    # Weights and their gradients in float32 are smaller than logits in 16 bits.
    size = chunk * CONFIG["vocab"] * width
    with Large(size) as large:
        loss_of(model, precision, rows).backward()
    assert large.alive == 1
    with Large(size) as large, torch.no_grad():
        loss_of(model, precision, rows)
    assert large.alive == 1


def test_autocast_keeps_one_copy_of_the_head_for_all_chunks() -> None:
    """It keeps a copy of each tensor that it has not met, until the microbatch ends."""
    weight = torch.randn(64, 32, requires_grad=True)
    copy, copies = 64 * 32 * 2, 0

    class Copies(Ledger):
        def _count(self, tensor: Any) -> None:
            super()._count(tensor)
            nonlocal copies
            copies = sum(size == copy for _, size in self._storages.values())

    def loss(targets: Any, x: Any, w: Any) -> Any:
        return torchs(torch.nn.functional.linear(x, w), targets)

    x, targets = torch.randn(24, 32, requires_grad=True), torch.zeros(24, dtype=torch.int64)
    with Copies(), torch.autocast("cpu", torch.bfloat16):
        ChunkedLoss.apply(loss, 4, True, x, targets, weight)
    assert copies == 1
