"""What a configuration may say, and how it is refused."""

import program_builders as builders
import pytest

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.models import registry
from roofline.models.registry import configure
from roofline.models.spec import SPLITS, expand

B = builders.BASE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads=5 is not a multiple of kv_heads=2"),
        ({"layers": 0}, "layers=0"),
        ({"head_dim": 15}, "even"),
        ({"rope_style": "spiral"}, "spiral"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "missing.*low_freq_factor"),
        ({"family": "lama"}, "did you mean 'llama'"),
    ],
)
def test_bad_values_are_named(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(B | change)


def test_fields_are_exactly_those_known() -> None:
    with pytest.raises(ConfigError, match="'widht'; did you mean 'width'"):
        configure(B | {"widht": 3})
    with pytest.raises(ConfigError, match="missing ffn"):
        configure({k: v for k, v in B.items() if k != "ffn"})


@pytest.mark.parametrize(
    "change",
    [
        {"qk_norm": True},
        {"family": "qwen", "gated": True},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    ],
)
def test_what_no_family_has_is_unsupported(change: dict) -> None:
    with pytest.raises(UnsupportedError):
        configure(B | change)


def test_spec_names_every_parameter_once_with_a_known_split() -> None:
    for config in (B, builders.QWEN2, builders.QWEN3, builders.MISTRAL):
        family, cfg = configure(config)
        table = expand(family.spec(cfg), cfg.layers)
        names = [p.name for p in table]
        assert len(set(names)) == len(names)
        assert {p.split for p in table} <= set(SPLITS)
        assert sum(n.startswith("layers.1.") for n in names) == sum(n.startswith("layers.0.") for n in names) > 8


def test_families_register_from_outside_once() -> None:
    registry.register("test_models_mine", "roofline.models.llama")
    family, _ = configure(B | {"family": "test_models_mine"})
    assert family is registry.get("llama")
    with pytest.raises(ConfigError, match="already registered"):
        registry.register("test_models_mine", family)
