"""Peaks by the names that torch gives devices; nothing is guessed."""

import math

import pytest

from roofline.common.errors import ConfigError
from roofline.hardware.chips import products
from roofline.hardware.chips.products import peak


@pytest.mark.parametrize(
    ("name", "units", "flops"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 312e12),
        ("NVIDIA A100-SXM4-80GB", 108, 312e12),
        ("NVIDIA A100 80GB PCIe", 108, 312e12),
        ("NVIDIA A100-PCIE-40GB", 108, 312e12),
        ("NVIDIA H100 80GB HBM3", 132, 989e12),
        ("NVIDIA H100 PCIe", 114, 756e12),
        ("NVIDIA H100 NVL", 132, 835e12),
        ("NVIDIA H200", 132, 989e12),
        ("NVIDIA B200", 148, 2250e12),
        ("AMD Instinct MI250", 104, 181.05e12),
        ("AMD Instinct MI250X", 110, 191.5e12),
        ("AMD Instinct MI250X / MI250", 104, 181.05e12),
        ("AMD Instinct MI250X/MI250", 110, 191.5e12),
        ("AMD Instinct MI300X", 304, 1307.4e12),
        ("AMD Instinct MI300X VF", 304, 1307.4e12),
        ("AMD Instinct MI325X", 304, 1307.4e12),
        ("AMD Instinct MI355X", 256, 2516.6e12),
        ("AMD Instinct MI300A", 228, 980.6e12),
    ],
)
def test_known_devices(name: str, units: int, flops: float) -> None:
    found = peak(name, units)
    assert found is not None
    assert found.flops == flops
    assert "data sheet" in found.source
    assert peak(name, units, "fp16") == found
    assert peak(name, units, "fp32") is None


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("AMD EPYC 9B45", 2),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14),
        ("NVIDIA A10", 72),
        ("NVIDIA A100X", 108),
        ("NVIDIA GH200 480GB", 132),
        ("NVIDIA H200 NVL", 132),
        ("NVIDIA GB200", 152),
        ("AMD Instinct MI300X", 38),  # a chip split in eight
        ("AMD Instinct MI300A", 304),
        ("NVIDIA GeForce RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 3080", 68),
        ("NVIDIA GeForce RTX 4080 SUPER", 80),
        ("AMD Radeon 8060S Graphics", 20),  # no source gives its products
        ("", 0),
    ],
)
def test_no_other_chips_figure_is_taken(name: str, units: int) -> None:
    assert peak(name, units) is None


def test_a_package_of_two_devices() -> None:
    found = peak("AMD Instinct MI250", 104)
    assert found is not None
    assert (found.package, found.devices, found.devices * found.flops) == ("MI250", 2, 362.1e12)


def test_geforce_has_the_rate_of_products_with_fp32_accumulation() -> None:
    full, halved = peak("NVIDIA RTX A6000", 84), peak("NVIDIA GeForce RTX 3090 Ti", 84)
    assert full is not None
    assert halved is not None
    assert halved.flops == 80e12
    assert full.flops / halved.flops > 1.9


def test_mi100_multiplies_bf16_at_half_the_rate() -> None:
    found = [peak("AMD Instinct MI100", 120, precision) for precision in ("bf16", "fp16")]
    assert [one and one.flops for one in found] == [92.3e12, 184.6e12]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("MI300X", "MI300X"),
        ("amd instinct mi300x", "MI300X"),
        ("h100-sxm", "H100 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("rtx4090", "RTX 4090"),
        ("AMD Ryzen AI Max+ 395", "Strix Halo"),
        ("ryzen ai max 395", "Strix Halo"),
        ("Ryzen AI Max 385", "Strix Halo 8050S"),
        ("steam deck", "Steam Deck"),
    ],
)
def test_a_person_s_name_for_a_product_is_understood(name: str, title: str) -> None:
    assert products.titled(name).name == title


def test_a_name_of_several_products_is_refused_with_all_of_them() -> None:
    with pytest.raises(ConfigError, match="A100 40GB, A100 80GB, A100 PCIe 40GB, A100 PCIe 80GB"):
        products.titled("A100")
    with pytest.raises(ConfigError, match="no chip ''"):
        products.titled("")


def test_no_product_stands_in_for_another_one() -> None:
    with pytest.raises(ConfigError, match="no chip 'L40' in the table of products; did you mean 'L40S'"):
        products.titled("L40")


def test_a_die_has_its_part_of_the_package_s_roofs() -> None:
    roofs = products.sheet_roofs(products.titled("MI250"))
    assert roofs is not None
    assert (roofs.bf16_flops, roofs.read_bytes_per_s(1)) == (181.05e12, 1638.4e9)
    deck = products.sheet_roofs(products.titled("Steam Deck"))
    assert deck is not None
    assert (deck.bf16_flops, deck.bytes_per_s, len(deck.sources)) == (math.inf, 88e9, 1)
