"""The gradient of a global batch: whatever the microbatches, the parts and the memory, weighted by tokens."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import CapacityError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.train.config.schema import ClippingSection, InitSection  # noqa: E402
from roofline.train.data.loader import Rows  # noqa: E402
from roofline.train.data.order import share  # noqa: E402
from roofline.train.data.row_arrays import RowArrays  # noqa: E402
from roofline.train.memory import exhausted  # noqa: E402
from roofline.train.memory.exhausted import is_out_of_memory  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import IGNORED, Model  # noqa: E402
from roofline.train.parallel.elastic import TreeSum  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run import gradients as module  # noqa: E402
from roofline.train.run.clip import clip  # noqa: E402
from roofline.train.run.gradients import GROWTH, LARGEST_SCALE, Gradients, Scaler, targets  # noqa: E402

VOCAB, LENGTH, ROWS = 96, 12, 10
SHAPE = presets.preset("mpt-125m") | {
    **{"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": VOCAB},
    **{"max_position": LENGTH},
}


@pytest.fixture
def model() -> Any:
    made = Model(SHAPE, "cpu")
    initialize(made, 3, InitSection(name="baseline_", init_std=0.3))
    return made


def batch(parts: int = 1, documents: bool = False, rows: int = ROWS) -> Rows:
    random = np.random.default_rng(1)
    tokens = random.integers(0, VOCAB, (rows, LENGTH))
    # Row i has i cuts: each takes a token out of those that count.
    cut = np.array([np.cumsum(np.arange(LENGTH) <= i) for i in range(rows)]) if documents else None
    every = np.arange(rows)
    own = [share(every, index, parts) for index in range(parts)]
    return Rows(0, every, tuple(RowArrays(tokens[i], None if cut is None else cut[i]) for i in own))


def gradients(model: Any, size: int | None, precision: str = "fp32", tree: bool = False) -> Gradients:
    return Gradients(model, World(), precision, size, tree=tree)


def taken(model: Any) -> dict[str, Any]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def expected(model: Any, documents: bool) -> tuple[dict[str, Any], float, int]:
    """Gradients of the mean over all tokens that count, from all logits at once; the losses' sum; how many count."""
    tokens, cut, _ = batch(documents=documents).parts[0]
    wanted = np.full_like(tokens, IGNORED)
    for row, at in np.ndindex(len(tokens), LENGTH - 1):
        if cut is None or cut[row, at] == cut[row, at + 1]:
            wanted[row, at] = tokens[row, at + 1]
    logits = model(torch.from_numpy(tokens), documents=None if cut is None else torch.from_numpy(cut))
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(wanted).flatten(), reduction="sum"
    )
    count = int((wanted != IGNORED).sum())
    (losses / count).backward()
    return taken(model), losses.item(), count


def agree(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        assert grad.abs().max() > 0, name
        torch.testing.assert_close(found[name], grad, rtol=0, atol=tolerance * float(grad.abs().max()), msg=name)


@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
@pytest.mark.parametrize("size", [1, 3, 4, ROWS, 50, None])
def test_the_gradient_does_not_depend_on_the_microbatch(model: Any, size: int | None, documents: bool) -> None:
    wanted, losses, count = expected(model, documents)
    computed = gradients(model, size)
    found, tokens = computed.backward(batch(documents=documents))
    assert tokens == count == (ROWS * (LENGTH - 1) - (45 if documents else 0))
    assert found == pytest.approx(losses, rel=1e-6)
    agree(taken(model), wanted)
    assert computed.size == (size or ROWS)


@pytest.mark.parametrize("tree", [False, True], ids=["plain", "tree"])
@pytest.mark.parametrize("parts", [2, 4, 16])
@pytest.mark.parametrize("size", [1, 3, None])
def test_nor_on_the_parts_of_the_batch(model: Any, size: int | None, parts: int, tree: bool) -> None:
    """16 parts of 10 rows: some have none."""
    wanted, losses, _ = expected(model, documents=True)
    found, _ = gradients(model, size, tree=tree).backward(batch(parts, documents=True))
    assert found == pytest.approx(losses, rel=1e-6)
    agree(taken(model), wanted)


def test_a_tree_adds_the_gradients_of_the_parts_in_pairs(model: Any) -> None:
    """Bit for bit; without a tree they are added one after the other, which gives other bits."""
    parts = batch(4).parts
    alone = []
    for tokens, *_ in parts:
        gradients(model, ROWS)._parts(Rows(0, np.arange(ROWS), (RowArrays(tokens),)), 1, ROWS)
        alone.append(taken(model))
    for tree in (True, False):
        computed = gradients(model, ROWS, tree=tree)
        computed._parts(Rows(0, np.arange(ROWS), parts), 1, ROWS)
        sums = taken(model)
        in_pairs = {n: (alone[0][n] + alone[1][n]) + (alone[2][n] + alone[3][n]) for n in sums}
        in_turn = {n: ((alone[0][n] + alone[1][n]) + alone[2][n]) + alone[3][n] for n in sums}
        assert all(torch.equal(grad, (in_pairs if tree else in_turn)[name]) for name, grad in sums.items())
    assert any(not torch.equal(in_pairs[name], in_turn[name]) for name in in_pairs)


def test_memory_of_a_device_is_freed_before_a_smaller_microbatch(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    monkeypatch.setattr(module, "return_freed_memory", lambda: freed.append("host"))
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: freed.append("device"))
    for device in ("cpu", "cuda"):
        computed = Gradients(model, World(device=torch.device(device)), "fp32", None)
        computed.size = 4
        computed._halve()
        assert computed.size == 2
    assert freed == ["host", "device"]


def test_a_batch_where_nothing_counts_has_no_gradient(model: Any) -> None:
    every = np.arange(2)
    alone = np.broadcast_to(np.arange(LENGTH), (2, LENGTH))
    loss, tokens = gradients(model, None).backward(
        Rows(0, every, (RowArrays(np.ones((2, LENGTH), np.int64), alone.copy()),))
    )
    assert (loss, tokens) == (0.0, 0)
    assert all(not grad.any() for grad in taken(model).values())


def test_targets() -> None:
    tokens = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert targets(tokens, None).tolist() == [[2, 3, 4, IGNORED], [6, 7, 8, IGNORED]]
    documents = np.array([[0, 0, 1, 1], [0, 1, 2, 3]])
    assert targets(tokens, documents).tolist() == [[2, IGNORED, 4, IGNORED], [IGNORED] * 4]
    assert tokens.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_held_out_rows_are_weighted_by_tokens(model: Any) -> None:
    _, losses, count = expected(model, documents=True)
    computed = gradients(model, 1)
    with torch.no_grad():
        found = [computed.held_out(RowArrays(*part)) for part in batch(3, documents=True).parts]
        none = computed.held_out(RowArrays(np.empty((0, LENGTH), np.int64)))
    assert sum(loss for loss, _ in found) == pytest.approx(losses, rel=1e-6)
    assert sum(tokens for _, tokens in found) == count
    assert none == (0.0, 0)


ERRORS: dict[str, Callable[[], BaseException]] = {
    "torch": lambda: torch.OutOfMemoryError("Allocation on device"),
    "cuda": lambda: RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    "hip": lambda: RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 64 GiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 80000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": lambda: MemoryError(),
}


class Limited:
    """A memory that holds `rows` rows at a time; further ones end in `error`, in the forward or the backward pass."""

    def __init__(
        self, computed: Gradients, rows: int, error: Callable[[], BaseException], backward: bool = False
    ) -> None:
        self.plain, self.rows, self.error, self.backward = computed.loss, rows, error, backward
        self.asked: list[int] = []
        computed.loss = self  # type: ignore[method-assign]

    def __call__(self, tokens: np.ndarray, documents: np.ndarray | None, *_: object) -> Any:
        self.asked.append(len(tokens))
        if len(tokens) <= self.rows:
            return self.plain(tokens, documents)
        if self.backward:
            loss = self.plain(tokens, documents)
            loss.register_hook(self.fail)
            return loss
        raise self.error()

    def fail(self, grad: Any) -> None:
        raise self.error()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", ERRORS)
def test_auto_halves_until_a_step_fits(model: Any, kind: str, backward: bool) -> None:
    wanted, losses, _ = expected(model, documents=True)
    computed = gradients(model, None)
    memory = Limited(computed, 2, ERRORS[kind], backward)
    found, _ = computed.backward(batch(documents=True))
    assert memory.asked == [10, 5, 3, 2, 2, 2, 2, 2]
    assert (computed.size, computed.halved) == (2, 3)
    assert found == pytest.approx(losses, rel=1e-6)
    agree(taken(model), wanted)
    memory.asked.clear()
    computed.backward(batch(documents=True))
    assert memory.asked == [2] * 5, "the next step begins with what fitted"
    agree(taken(model), wanted)


def test_memory_that_ends_in_a_later_microbatch_leaves_nothing_of_the_earlier_ones(model: Any) -> None:
    wanted, losses, _ = expected(model, documents=False)
    computed = gradients(model, None)
    computed.size = 4
    plain, calls = computed.loss, [0]

    def loss(tokens: np.ndarray, documents: np.ndarray | None, *_: object) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise ERRORS["hip"]()
        return plain(tokens, documents)

    computed.loss = loss  # type: ignore[method-assign]
    found, _ = computed.backward(batch())
    assert (computed.size, calls) == (2, [8])
    assert found == pytest.approx(losses, rel=1e-6)
    agree(taken(model), wanted)


@pytest.mark.parametrize("tree", [False, True], ids=["plain", "tree"])
def test_parts_are_begun_again_together(model: Any, tree: bool) -> None:
    wanted, _, _ = expected(model, documents=False)
    computed = gradients(model, None, tree=tree)
    memory = Limited(computed, 1, ERRORS["torch"])
    computed.backward(batch(4))
    assert computed.size == 1
    assert memory.asked[-10:] == [1] * 10
    agree(taken(model), wanted)


def test_what_a_failed_attempt_held_is_freed_before_the_next(model: Any) -> None:
    """Else the second attempt finds the memory full of the first one's activations."""
    computed = gradients(model, None)
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []
    plain = computed.loss

    def loss(tokens: np.ndarray, documents: np.ndarray | None, *_: object) -> Any:
        alive.append(sum(ref() is not None for ref in held))
        activations = torch.empty(1000)
        held.append(weakref.ref(activations))
        if len(tokens) > 3:
            raise torch.OutOfMemoryError(f"no room beside {activations.shape}")
        return plain(tokens, documents)

    computed.loss = loss  # type: ignore[method-assign]
    gc.collect()
    gc.disable()
    try:
        computed.backward(batch())
    finally:
        gc.enable()
    assert alive == [0] * len(alive)
    assert computed.size == 3


def test_not_even_one_row(model: Any) -> None:
    computed = gradients(model, None)
    memory = Limited(computed, 0, ERRORS["hip"])
    with pytest.raises(CapacityError, match=r"a microbatch of one row.*HIP out of memory") as caught:
        computed.backward(batch())
    assert "max_seq_len" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert memory.asked == [10, 5, 3, 2, 1]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyError("x")],
    ids=repr,
)
def test_other_errors_are_not_swallowed(model: Any, error: Exception) -> None:
    computed = gradients(model, None)
    memory = Limited(computed, 0, lambda: error)
    with pytest.raises(type(error)) as caught:
        computed.backward(batch())
    assert caught.value is error
    assert memory.asked == [10]


def test_a_size_that_was_asked_for_is_not_changed(model: Any) -> None:
    computed = gradients(model, 5)
    memory = Limited(computed, 4, ERRORS["torch"])
    with pytest.raises(torch.OutOfMemoryError):
        computed.backward(batch())
    assert memory.asked == [5]
    assert (computed.size, computed.halved) == (5, 0)


def test_what_counts_as_memory_that_ended() -> None:
    for make in ERRORS.values():
        assert is_out_of_memory(make())
    for error in (RuntimeError("CUDA error: invalid device ordinal"), ValueError("out of memory"), OSError("memory")):
        assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    "text",
    [
        "could not create a primitive",  # oneDNN
        "could not create a memory object",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
        "std::bad_alloc",
        "can't start new thread",
    ],
)
def test_what_libraries_say_when_memory_ends(model: Any, text: str) -> None:
    computed = gradients(model, None)
    memory = Limited(computed, 3, lambda: RuntimeError(text))
    computed.backward(batch())
    assert memory.asked[:3] == [10, 5, 3]
    assert computed.size == 3
    assert not is_out_of_memory(RuntimeError("could not create a primitive descriptor for the matmul primitive"))


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_switched_off_onednn_is_memory_that_ended(model: Any, in_backward: bool) -> None:
    """torch falls back to its own products of 16 bits without an error, for good."""
    computed = gradients(model, None)
    plain, rows = model.compute, []

    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            torch.backends.mkldnn.set_flags(False)
            return grads[0]

    def compute(shape: tuple[int, int], x: Any, *rest: Any) -> Any:
        rows.append(shape[0])
        if shape[0] > 3 and in_backward:
            x = Off.apply(x)
        elif shape[0] > 3:
            torch.backends.mkldnn.set_flags(False)
        return plain(shape, x, *rest)

    model.compute = compute
    computed.backward(batch())
    assert torch.backends.mkldnn.enabled
    assert computed.size == 3
    layers = len(model.blocks)
    assert rows.count(10) == (layers if in_backward else 1), "the next block notices"


def test_an_error_of_memory_has_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exhausted, "data_bytes", lambda: 700)
    monkeypatch.setattr(exhausted, "_host_memory", lambda: 1000)
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."
    error = exhausted.out_of_memory("training", text)
    assert (error.needed, error.available, error.unit) == (1100, 1000, "bytes")
    assert exhausted.out_of_memory("training", text, 5000).needed == 5000


def test_a_scaler_halves_and_doubles() -> None:
    scaler = Scaler()
    assert scaler.scale == 2.0**16
    scaler.settle(False)
    assert (scaler.scale, scaler.good) == (2.0**15, 0)
    for _ in range(GROWTH - 1):
        scaler.settle(True)
    assert scaler.scale == 2.0**15
    scaler.settle(True)
    assert scaler.scale == 2.0**16
    scaler.settle(True)
    scaler.settle(False)
    assert (scaler.scale, scaler.good) == (2.0**15, 0)
    scaler.scale, scaler.good = LARGEST_SCALE, GROWTH - 1
    scaler.settle(True)
    assert scaler.scale == LARGEST_SCALE
    scaler.scale = 1.0
    scaler.settle(False)
    assert scaler.scale == 1.0


@pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16"])
def test_16_bit_gradients_are_near_those_of_32(model: Any, precision: str) -> None:
    wanted, losses, _ = expected(model, documents=True)
    computed = gradients(model, 3, precision)
    found, _ = computed.backward(batch(documents=True))
    scale = computed.scaler.scale if computed.scaler else 1.0
    assert (scale > 1) == (precision == "amp_fp16")
    assert found == pytest.approx(losses, rel=2e-2)
    grads = {name: grad / scale for name, grad in taken(model).items()}
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    agree(grads, wanted, 5e-2)


def test_loss_scaling_keeps_small_gradients_from_vanishing(model: Any) -> None:
    """Losses of 2^-20 of their size: half of fp16's gradients of blocks are zero without a scale."""
    zeros = []
    for scale in (2.0**16, 1.0):
        computed = gradients(model, None, "amp_fp16")
        assert computed.scaler is not None
        computed.scaler.scale = scale * 2.0**-20
        computed.backward(batch())
        zeros.append(sum(int((grad == 0).sum()) for name, grad in taken(model).items() if "blocks" in name))
    assert zeros[0] < zeros[1]


@pytest.fixture
def grads(model: Any) -> tuple[Any, list[Any]]:
    gradients(model, None).backward(batch())
    return model, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("threshold", [0.01, 1e9])
def test_clipping_by_norm_is_torchs(grads: Any, threshold: float, scale: float, exact: bool) -> None:
    model, plain = grads
    for parameter in model.parameters():
        parameter.grad *= scale
    norm = clip(model, World(), ClippingSection(clipping_threshold=threshold), scale, exact)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        parameter.grad = grad
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
    assert norm == pytest.approx(float(total), rel=1e-5)
    for grad, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-5, atol=1e-12)


def test_what_is_added_to_a_norm_before_dividing_is_torchs(grads: Any) -> None:
    """Of gradients as small as the 1e-6 that torch adds, it is a large part."""
    model, plain = grads
    total = float(torch.nn.utils.get_total_norm(plain))
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        parameter.grad = grad * (2e-6 / total)
    clip(model, World(), ClippingSection(clipping_threshold=1e-6), 1.0, False)
    clipped = [parameter.grad.clone() for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        parameter.grad = grad * (2e-6 / total)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-6)
    for grad, parameter in zip(clipped, model.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=0)


def test_processes_with_fewer_rows_gather_as_many_squares(grads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather takes equally many values from each: the process with fewer rows fills up with zeros."""
    model, plain = grads
    rows = sum(len(grad) for grad in plain)
    sent: list[int] = []

    def gather(self: World, values: Any) -> list[Any]:
        sent.append(len(values))
        return [values, values]

    monkeypatch.setattr(World, "most", lambda self, values: [rows + 7])
    monkeypatch.setattr(World, "gather", gather)
    norm = clip(model, World(), None, 1.0, True)
    assert sent == [rows + 7]
    assert norm == pytest.approx(2**0.5 * float(torch.nn.utils.get_total_norm(plain)), rel=1e-6)


def test_clipping_by_value(grads: Any) -> None:
    model, plain = grads
    for parameter in model.parameters():
        parameter.grad *= 4
    norm = clip(model, World(), ClippingSection(clipping_type="value", clipping_threshold=1e-3), 4.0, False)
    assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(plain)), rel=1e-5)
    assert any((grad.abs() > 1e-3).any() for grad in plain)
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_are_left_alone(grads: Any, bad: float) -> None:
    model, plain = grads
    first = next(model.parameters())
    first.grad.flatten()[0] = bad
    for exact in (False, True):
        norm = clip(model, World(), ClippingSection(), 2.0, exact)
        assert not np.isfinite(norm)
    for parameter, grad in list(zip(model.parameters(), plain, strict=True))[1:]:
        assert torch.equal(parameter.grad, grad)


def test_sums_in_a_tree_are_those_of_pairs() -> None:
    values = [torch.tensor([v]) for v in (1e8, 1.0, -1e8, 1.0, 3.0, 1e-8, 2.0, 5.0)]
    tree = TreeSum()
    for value in values:
        tree.push([value, None])
    a, b, c, d, e, f, g, h = values
    assert torch.equal(tree.total()[0], ((a + b) + (c + d)) + ((e + f) + (g + h)))
    assert tree.total()[1] is None
    some = TreeSum()
    some.push([None])
    some.push([values[1]])
    assert torch.equal(some.total()[0], values[1])


def test_an_empty_share_keeps_the_accelerators_cache(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """On a CPU there is no cache to empty: the halving does not ask for one."""
    monkeypatch.setattr(module.torch.accelerator, "empty_cache", lambda: pytest.fail("there is none"))
    computed = gradients(model, None)
    Limited(computed, 5, ERRORS["cpu"])
    computed.backward(batch())
    assert computed.size == 5


def test_a_step_that_was_begun_again_is_told_once(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """With the last size that did not fit, and the rank that had too little memory."""
    computed = gradients(model, None)
    Limited(computed, 2, ERRORS["hip"])
    computed.backward(batch())
    computed.backward(batch())
    (said,) = caplog.messages
    assert said.startswith("a microbatch of 3 rows needs ")
    assert said.endswith("are available: microbatches have 2 rows from now on")
    of_ranks = Gradients(model, World(rank=1, size=2, grouped=True), "fp32", None)
    of_ranks.size = 1
    assert of_ranks._exhausted("HIP out of memory").what == "a microbatch of one row on rank 1"
