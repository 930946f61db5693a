"""Every op's traits hold for its reference."""

import pytest

from roofline.ops import registry
from roofline.ops.rope_tables import RopeTable
from roofline.ops.traits import Trait
from tests.models.eager import ContiguousCache

torch = pytest.importorskip("torch", reason="ops' references are written in torch")

ROWS, WIDTH = 5, 64
OURS = [name for name in registry.names() if registry.get(name).reference.__module__.startswith("roofline.")]
ATTRIBUTES = {
    "scale": {"factor": 3.0},
    "scale_by_position": {"beta": 0.5, "context": 2},
    "soft_cap": {"cap": 2.0},
    "clamped_swiglu": {"limit": 2.0},
    "above_spread": {"z": 0.5},
    "cast": {"dtype": "bf16"},
    "split": {"start": 8, "stop": 40},
    "cut_heads": {"heads": 4, "start": 4, "stop": 20},
    "join_heads": {"heads": 4},
    "rope": {"table": RopeTable(16, 1e4), "heads": 4},
    "attend": {"layer": 0, "heads": 4, "scale": 0.25},
    "route": {"top": 3},
    "expert_linear": {"experts": 4},
    "expert_bias": {"experts": 4},
    "expert_scale": {"experts": 4},
    "expert_linear_silu_mul": {"experts": 4},
    "rms_norm": {"eps": 1e-5, "heads": 4},
    "norm_quantize": {"eps": 1e-5},
    "layer_norm": {"eps": 1e-5},
    "layer_norm_quantize": {"eps": 1e-5},
    "add_norm": {"eps": 1e-5},
    "qk_norm": {"eps": 1e-5},
    "all_reduce": {"ranks": 1},
    "all_gather": {"widths": (WIDTH,)},
}
WEIGHTS = {
    "embed": [(9, WIDTH)],
    "attend": [],
    "expert_bias": [(4 * 32,)],
    "expert_scale": [(4,)],
    "linear": [(32, WIDTH), (32,)],
    "linear_add": [(WIDTH, WIDTH)],
    "linear_silu_mul": [(64, WIDTH)],
    "expert_linear": [(4 * 32, WIDTH)],
    "expert_linear_silu_mul": [(4 * 32, WIDTH)],
    "rms_norm": [(WIDTH // 4,)],
    "qk_norm": [(WIDTH // 2,), (WIDTH // 4,)],
}


def of_trait(trait):
    return [name for name in OURS if trait in registry.get(name).traits]


def values_of(name):
    """Random values for an op's reference, one for each operand; small whole numbers, so that sums are exact."""
    generator = torch.Generator().manual_seed(7)
    gate = {"gate": torch.rand(ROWS, 1, generator=generator)} if name == "sigmoid_scale" else {}
    experts = {"expert_bias": [1, 3], "expert_scale": [1, 3] * 32}.get(name, [1, 3, 2])
    special = {
        "ids": torch.tensor([experts] * ROWS) if "expert_" in name else torch.arange(ROWS) % 9,
        "positions": torch.arange(ROWS),
        "rows": torch.tensor([4, 0]),
        "weights": torch.rand(ROWS, 4, generator=generator),
        **gate,
    }

    def rows():
        return torch.randint(-4, 5, (ROWS, WIDTH), generator=generator).float()

    return [special[value] if value in special else rows() for value in registry.get(name).values]


def compute(name, values, **changes):
    op = registry.get(name)
    generator = torch.Generator().manual_seed(3)
    vector = [(WIDTH,)] * min(1, len(op.weights))
    weights = [torch.randint(-3, 4, s, generator=generator).float() for s in WEIGHTS.get(name, vector)]
    named = dict(zip(op.values, values, strict=True)) | dict(zip(op.weights, weights, strict=False))
    result = op.reference(**named, **(ATTRIBUTES.get(name, {}) | changes))
    parts = result if isinstance(result, tuple) else (result,)
    return [t for part in parts for t in ((part.q, part.scale) if hasattr(part, "q") else (part,))]


@pytest.mark.parametrize("name", of_trait(Trait.ROW_WISE))
def test_row_wise_ops_give_a_row_alone_what_they_give_it_in_company(name):
    values = values_of(name)
    together = compute(name, values)
    for row in range(ROWS):
        alone = compute(name, [value[row : row + 1] for value in values])
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("name", of_trait(Trait.BY_COLUMN))
def test_columns_of_a_result_need_the_same_columns_alone(name):
    values, some = values_of(name), slice(16, 48)
    full = compute(name, values)
    parts = compute(name, [value[:, some] if value.ndim == 2 else value for value in values])
    assert all(torch.equal(a, b[:, some]) for a, b in zip(parts, full, strict=True))


@pytest.mark.parametrize("name", of_trait(Trait.BY_HEAD))
def test_heads_of_a_result_need_the_same_heads_alone(name):
    values, some = values_of(name), slice(16, 48)  # heads 1 and 2 of 4
    cache = ContiguousCache(2).step([(0, ROWS, 0)], ["s"])
    if name == "attend":
        k, v = torch.randn(2, ROWS, 2, 16)
        halves = ContiguousCache(1).step([(0, ROWS, 0)], ["s"])
        values, some = [values[0], cache.write(0, k, v)], slice(32, 64)  # heads 2 and 3 read the second kv head
        first = [values[0][:, some], halves.write(0, k[:, 1:], v[:, 1:])]
    else:
        first = [values[0][:, some], *values[1:]]
    assert torch.allclose(compute(name, first, heads=2)[0], compute(name, values)[0][:, some], atol=1e-6)


@pytest.mark.parametrize("name", of_trait(Trait.GATED))
def test_gate_and_up_may_lie_side_by_side(name):
    gate, up = values_of(name)
    together = compute(name, [torch.cat([gate, up], dim=1), None])
    assert all(torch.equal(a, b) for a, b in zip(compute(name, [gate, up]), together, strict=True))


@pytest.mark.parametrize("name", of_trait(Trait.VIEW))
def test_a_view_is_in_the_memory_of_its_value(name):
    values = values_of(name)
    (result,) = compute(name, values)
    assert result.untyped_storage().data_ptr() == values[0].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", of_trait(Trait.PRODUCT))
def test_a_product_is_priced_by_its_matrix(name):
    op = registry.get(name)
    assert op.weights[0] == "w"
    assert Trait.LONG_SUM in op.traits
    values = [value if i == 0 else torch.zeros_like(value) for i, value in enumerate(values_of(name))]
    zero = [torch.zeros_like(values[0]), *values[1:]]
    assert not torch.equal(compute(name, values)[0], compute(name, zero)[0])


def test_fused_ops_stand_for_ops_that_there_are():
    for name in OURS:
        assert all(part in OURS for part in registry.get(name).fuses)
