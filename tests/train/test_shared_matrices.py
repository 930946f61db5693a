"""Ranks that share matrices, of which the test plays the other one: it always has what this one has."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.models.spec import Param  # noqa: E402
from roofline.train.model import tensor_parallel  # noqa: E402
from roofline.train.model.tensor_parallel import (  # noqa: E402
    Column,
    ParameterPart,
    RowSplitWeight,
    TensorPieces,
    TensorRanks,
    family_form,
    pieces,
)
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.run import clip  # noqa: E402

GROUP: Any = object()
TWO = TensorRanks(0, 2, GROUP)


@pytest.fixture(autouse=True)
def other_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduced(tensor: torch.Tensor, op: str, group: object) -> torch.Tensor:
        assert (op, group) == ("sum", GROUP)
        return tensor * 2

    def reduce(tensor: torch.Tensor, group: object) -> None:
        assert group is GROUP
        tensor.mul_(2)

    monkeypatch.setattr(tensor_parallel.collectives, "all_reduce", reduced)
    monkeypatch.setattr(clip.dist, "all_reduce", reduce)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    ("split", "shape", "ranks", "kind"),
    [
        ("column", (4, 3), TensorRanks(), torch.Tensor),
        ("replicate", (4, 3), TWO, torch.Tensor),
        ("expert_column", (4, 3), TWO, torch.Tensor),
        ("expert_row", (4, 3), TWO, torch.Tensor),
        ("column", (4,), TWO, torch.Tensor),
        ("column", (4, 3), TWO, Column),
        ("row", (4, 3), TWO, RowSplitWeight),
    ],
)
def test_forms_of_a_blocks_parameters(split: Any, shape: tuple[int, ...], ranks: TensorRanks, kind: type) -> None:
    tensor = torch.zeros(shape)
    form = family_form(Param("w", shape, split), tensor, ranks)
    assert type(form) is kind
    if kind is torch.Tensor:
        assert form is tensor


def test_a_shared_parameter_has_the_gradients_of_all_ranks() -> None:
    (tensor,) = tensors((3,))
    form = family_form(Param("w", (3,), "shared"), tensor, TWO)
    assert isinstance(form, torch.Tensor)
    assert torch.equal(form, tensor)
    form.sum().backward()
    assert tensor.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_column_computes_its_outputs_and_sums_the_gradients_of_inputs(with_bias: bool) -> None:
    x, weight, bias = tensors((5, 3), (4, 3), (4,))
    out = Column(weight, TWO).linear(x, bias if with_bias else None)
    assert torch.allclose(out, x @ weight.T + (bias if with_bias else 0))
    out.sum().backward()
    assert torch.allclose(x.grad, 2 * weight.sum(0).expand(5, 3))
    assert torch.allclose(weight.grad, x.detach().sum(0).expand(4, 3))


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_row_sums_products_and_adds_the_bias_once(with_bias: bool) -> None:
    x, weight, bias = tensors((5, 3), (4, 3), (4,))
    out = RowSplitWeight(weight, TWO).linear(x, bias if with_bias else None)
    assert torch.allclose(out, 2 * (x @ weight.T) + (bias if with_bias else 0))
    out.sum().backward()
    assert torch.allclose(x.grad, weight.detach().sum(0).expand(5, 3)), "the sum's gradient is each rank's own"
    assert torch.allclose(weight.grad, x.detach().sum(0).expand(4, 3))
    if with_bias:
        assert bias.grad.tolist() == [5.0] * 4


@pytest.mark.parametrize("name", ["heads", "kv_heads", "ffn"])
def test_a_share_of_a_block(name: str) -> None:
    from roofline.models import presets
    from roofline.models.registry import configure

    shape = presets.preset("smollm2-135m") | {"heads": 8, "kv_heads": 4, "ffn": 64}
    _, cfg = configure(shape)
    half = tensor_parallel.local_config(cfg, TWO)
    assert (half.heads, half.kv_heads, half.ffn) == (4, 2, 32)
    three = TensorRanks(0, 3, GROUP)
    others = {"heads": 12, "kv_heads": 6, "ffn": 66} | {name: {"heads": 8, "kv_heads": 4, "ffn": 64}[name]}
    _, odd = configure(shape | others | ({"heads": 8, "kv_heads": 1} if name == "heads" else {}))
    with pytest.raises(ConfigError, match=f"tensor_parallel=3 does not divide {name}="):
        tensor_parallel.local_config(odd, three)


def test_pieces_of_what_is_nothing_and_of_a_number() -> None:
    assert pieces(torch.zeros(0, 3), ParameterPart((0, 3))) == []
    ((at, view),) = pieces(torch.tensor(7.0), ParameterPart(()))
    assert (at, float(view)) == ((), 7.0)
    whole = TensorPieces.of(torch.zeros(2, 3))
    assert (whole.shape, whole.copy, whole.copies, whole.chunks[0][0]) == ((2, 3), 0, 1, (0, 0))


@pytest.mark.parametrize(("group", "norm"), [(GROUP, (4 + 2 * 9) ** 0.5), (None, 13**0.5)])
def test_the_norm_counts_divided_matrices_of_all_ranks(group: Any, norm: float) -> None:
    """Of two parameters with gradients of length 2 and 3, the second one divided; a third has none."""
    ranks = TensorRanks(0, 2, group)
    params = [Param("a", (4,), "replicate"), Param("b", (18,), "column"), Param("c", (2,), "replicate")]
    held = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 9, 2)]
    held[0].grad, held[1].grad = torch.ones(4), torch.ones(9)
    model: Any = SimpleNamespace(
        canonical=lambda: [(None, param, each) for param, each in zip(params, held, strict=True)], ranks=ranks
    )
    assert clip._norm(model, World(tensor=ranks)) == pytest.approx(norm)


def test_each_rank_has_the_bias_of_its_heads() -> None:
    """With alibi each head has a bias of its own."""
    from roofline.models import presets
    from roofline.train.model.modules import Model

    shape = presets.preset("mpt-125m") | {"width": 32, "heads": 4, "kv_heads": 4, "head_dim": 8, "layers": 1, "ffn": 64}
    shape |= {"vocab": 64, "positions": "alibi", "max_position": 8}

    def bias(rank: int, size: int) -> Any:
        model = Model(shape, "meta", ranks=TensorRanks(rank, size, GROUP if size > 1 else None))
        return model.shared(1, 6, torch.device("cpu"), None)[3]

    alone, parts = bias(0, 1), [bias(rank, 2) for rank in range(2)]
    assert alone.shape[1] == 4
    assert torch.equal(torch.cat(parts, 1), alone)
    assert not torch.equal(parts[0], parts[1])
