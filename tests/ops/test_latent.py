"""A product with the matrix of each head, and attention over keys whose last dimensions are the values."""

import pytest

from roofline import ops
from roofline.common.errors import ConfigError
from roofline.models.registry import config_of
from roofline.ops import registry
from roofline.ops.matmul import quantize_rows
from roofline.ops.symbol import Type, WeightType
from tests.models.eager import ContiguousCache
from tests.models.parity_cases import DEEPSEEK3

torch = pytest.importorskip("torch", reason="the references are written in torch")

CACHE = Type("cache", None, (1, 48))


def test_each_head_is_multiplied_with_its_own_matrix() -> None:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, 3 * 32, generator=generator), torch.randn(3 * 8, 32, generator=generator)
    alone = [x[:, h * 32 : (h + 1) * 32] @ w[h * 8 : (h + 1) * 8].T for h in range(3)]
    assert torch.allclose(ops.head_linear(x, w, 3), torch.cat(alone, dim=1), atol=1e-5)
    rows = quantize_rows(x)
    assert torch.allclose(ops.head_linear(rows, w, 3), ops.head_linear(rows.dequantize(), w, 3))


def test_what_heads_cannot_share_is_refused() -> None:
    op = registry.get("head_linear")
    weight = WeightType((24, 32), ("F32",), 24 * 32 * 4)
    assert op.results([Type("f32", "tokens", (96,))], [weight], {"heads": 3})[0].width == 24
    for width, heads in ((64, 3), (96, 5), (96, 2)):
        with pytest.raises(ConfigError, match="head_linear"):
            op.results([Type("f32", "tokens", (width,))], [weight], {"heads": heads})


def test_values_are_the_last_dimensions_of_keys() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(6, 4 * 48, generator=generator), torch.randn(6, 48, generator=generator)
    segments = ContiguousCache(1).step([(0, 6, 0)], ["s"])
    latent = ops.attend(q, ops.latent_write(segments, k, 0), 0, 4, 0.2, value_dim=32)
    full = ops.attend(q, ops.kv_write(segments, k, k, 0), 0, 4, 0.2)
    assert torch.allclose(latent, full.view(6, 4, 48)[..., 16:].reshape(6, -1), atol=1e-6)


def test_a_row_is_read_once_and_written_once() -> None:
    """Against 2 bytes for each of 48 dimensions of a row, and the products of 4 heads with 48 and 32 of them."""
    attend = registry.get("attend")
    attributes = {"layer": 0, "heads": 4, "scale": 1.0, "value_dim": 32, "kv_dtype": "bf16"}
    price = attend.price(attend.call([Type("f32", "tokens", (192,)), CACHE], [], attributes))
    assert price.kv_bytes.context == 96
    assert price.flops.pairs == 2 * 4 * (48 + 32)
    assert attend.results([Type("f32", "tokens", (192,)), CACHE], [], attributes)[0].width == 128
    write = registry.get("latent_write")
    cost = write.price(write.call([CACHE, Type("f32", "tokens", (48,))], [], {"layer": 0, "kv_dtype": "int8"}))
    assert cost.kv_bytes.tokens == 48 + 4
    with pytest.raises(ConfigError, match="values of 64 dimensions in keys of 48"):
        attend.results([Type("f32", "tokens", (192,)), CACHE], [], attributes | {"value_dim": 64})


def test_a_configuration_says_what_its_cache_holds() -> None:
    expanded, latent = config_of(DEEPSEEK3), config_of(DEEPSEEK3 | {"latent": True})
    assert expanded.kv_shapes == ((4, 32, 0),)
    assert latent.kv_shapes == ((1, 48, 32),)
