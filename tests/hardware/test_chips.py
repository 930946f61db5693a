"""The tables of chips and products, what is refused, and occupancy against what LLVM counted."""

import contextlib
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.hardware.chips import chips, products
from roofline.hardware.chips.occupancy import occupancy

WANTED = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201")
WANTED += ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def test_every_row_is_whole() -> None:
    assert tuple(chips.chips()) == WANTED
    for chip in chips.chips().values():
        assert chip.vendor == ("amd" if chip.name.startswith("gfx") else "nvidia")
        assert chip.lanes == (64 if chip.name.startswith("gfx9") else 32)
        assert chip.status in ("compiled", "interpreted", "run")
        assert chip.notes
        assert chip.fp8 in ("", "e4m3fn", "e4m3fnuz")
        assert chip.local_bytes + chip.local_overhead <= chip.local_total
        # A thread with all its registers fits, and all the waves fit with few.
        assert occupancy(chip, chip.registers, 1, chip.local_bytes).programs >= 1
        assert chip.register_file // chip.register_step >= chip.waves


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(UnsupportedError, match="gfx942"):
        chips.get("gfx9000")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gfx1030", "RDNA 1 and 2"),
        ("gfx1033", "RDNA 1 and 2"),
        ("gfx1010", "RDNA 1 and 2"),
        ("gfx906:sramecc+:xnack-", "Vega"),
        ("gfx900", "Vega"),
        ("gfx90c", "Vega"),
        ("gfx803", "older than Vega"),
        ("gfx940", "MI300"),
        ("sm_75", "before Ampere"),
        ("7.0", "before Ampere"),
        ("sm_61", "no tensor cores"),
        ("SM_52", "no tensor cores"),
        ("intel", "NVIDIA and AMD only"),
        ("apple m2", "Apple"),
    ],
)
def test_chips_that_triton_does_not_serve_are_refused_by_name(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason) as caught:
        chips.resolve(name)
    assert chips.architecture(name) in str(caught.value)
    assert "cpu backend" in str(caught.value)


def test_no_row_is_refused() -> None:
    assert not any(chips.refused(name) for name in chips.chips())


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("gfx1101", "gfx1100"),
        ("gfx1150", "gfx1100"),
        ("gfx1152", "gfx1151"),
        ("gfx1200", "gfx1201"),  # nothing of its family is lower
        ("gfx1250", "gfx1201"),
        ("gfx951", "gfx950"),
        ("sm_87", "sm_86"),
        ("sm_103a", "sm_100"),
        ("12.1", "sm_120"),
    ],
)
def test_a_chip_without_a_row_takes_its_relatives_with_a_warning(
    name: str, row: str, caplog: pytest.LogCaptureFixture
) -> None:
    chips.resolve.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert chips.resolve(name).name == row
        assert chips.resolve(name).name == row
    assert len(caplog.records) == 1
    assert chips.architecture(name) in caplog.text
    assert row in caplog.text


def test_known_chips_are_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert chips.resolve("gfx90a:sramecc+:xnack-").name == "gfx90a"
    assert chips.resolve("9.0").name == "sm_90"
    assert chips.resolve("sm_90a").name == "sm_90"
    assert not caplog.text


@pytest.mark.parametrize("name", ["gfx1300", "", "gfx", "tpu", "sm_", "sm_9", "gfx9"])
def test_no_family_no_default(name: str) -> None:
    with pytest.raises(UnsupportedError, match="known family"):
        chips.resolve(name)


@given(st.text(max_size=12))
@settings(deadline=None)
def test_any_name_is_resolved_or_refused(name: str) -> None:
    with contextlib.suppress(UnsupportedError):
        assert chips.resolve(name) in chips.chips().values()


# (chip, registers, waves on a SIMD) as "; Occupancy" in the assembly that Triton 3.7's LLVM made.
LLVM = [
    *(("gfx908", registers, waves) for registers, waves in ((17, 10), (32, 8), (33, 7), (39, 6), (52, 4), (83, 3))),
    *(("gfx90a", registers, waves) for registers, waves in ((22, 8), (57, 8), (83, 5), (119, 4))),
    *(("gfx942", registers, waves) for registers, waves in ((52, 8), (84, 5), (124, 4))),
    *(("gfx950", registers, waves) for registers, waves in ((61, 8), (96, 5), (140, 3))),
    *(("gfx1100", registers, waves) for registers, waves in ((43, 16), (95, 16), (114, 12), (167, 9), (256, 5))),
    *(("gfx1151", registers, waves) for registers, waves in ((78, 16), (114, 12), (167, 9), (256, 5))),
    *(("gfx1201", registers, waves) for registers, waves in ((96, 16), (144, 10), (218, 6))),
]


@pytest.mark.parametrize(("name", "registers", "waves"), LLVM)
def test_occupancy_is_llvms(name: str, registers: int, waves: int) -> None:
    found = occupancy(chips.get(name), registers, 4)
    assert (found.waves, found.programs) == (waves, waves)
    assert found.share == waves / chips.get(name).waves


@pytest.mark.parametrize(
    ("name", "registers", "warps", "local", "programs", "bound"),
    [
        # CUDA's occupancy calculator: 65,536 registers, 48 or 64 warps, 16, 24 or 32 blocks a multiprocessor.
        ("sm_80", 255, 4, 0, 2, "registers"),
        ("sm_80", 64, 4, 0, 8, "registers"),
        ("sm_80", 32, 4, 0, 16, "waves"),
        ("sm_80", 32, 1, 0, 32, "programs"),
        ("sm_86", 32, 4, 0, 12, "waves"),
        ("sm_86", 32, 1, 0, 16, "programs"),
        ("sm_90", 32, 4, 100 << 10, 2, "local memory"),
        ("sm_90", 168, 4, 227 << 10, 1, "local memory"),
        ("gfx942", 128, 4, 40 << 10, 1, "local memory"),
        ("gfx1100", 64, 4, 40 << 10, 3, "local memory"),
        ("gfx950", 128, 8, 40 << 10, 2, "registers"),
    ],
)
def test_what_bounds_occupancy(name: str, registers: int, warps: int, local: int, programs: int, bound: str) -> None:
    found = occupancy(chips.get(name), registers, warps, local)
    assert (found.programs, found.bound) == (programs, bound)


@pytest.mark.parametrize(
    ("name", "registers", "warps", "local"),
    [
        ("sm_90", 256, 4, 0),
        ("sm_90", 255, 16, 0),
        ("sm_86", 32, 4, 100 << 10),
        ("gfx942", 64, 4, 65537),
        ("gfx1100", 64, 4, 66000),
    ],
)
def test_a_program_that_does_not_fit(name: str, registers: int, warps: int, local: int) -> None:
    with pytest.raises(ConfigError, match=f"does not fit {name}"):
        occupancy(chips.get(name), registers, warps, local)


def test_products_name_chips_that_are_known_or_refused() -> None:
    names = [product.name for product in products.products()]
    assert len(set(names)) == len(names)
    for product in products.products():
        assert product.chip in chips.chips() or product.host or chips.refused(product.chip), product.name
        unified = ("MI300A", "Strix Halo", "Strix Halo 8050S", "Steam Deck", "Steam Deck OLED")
        assert product.unified == (product.name in unified or product.chip == "apple")
        assert product.dies == (2 if product.name in ("MI250", "MI250X") else 1)
        assert (product.memory is None) == (product.chip in ("x86-64", "aarch64"))
        assert product.bandwidth is not None
        assert (product.fp8 is None) or chips.get(product.chip).fp8
        # A matrix unit takes twice as many operands of half the width, or as many: Ampere and Ada of GeForce count
        # products of integers apart, at four times the rate of sums in f32.
        wide = product.bf16 or product.fp16
        for narrow, ratios in ((product.fp8, (2,)), (product.int8, (1, 2, 4)), (product.fp4, (4, 8))):
            if narrow is not None:
                assert wide is not None
                assert min(abs(narrow.value / wide.value / ratio - 1) for ratio in ratios) < 0.02, product.name
        assert product.int8 is not None or product.fp4 is None
        figures = [figure for figure in vars(product).values() if isinstance(figure, products.ProductFigure)]
        assert all(figure.value > 0 and len(figure.source) > 10 for figure in figures)


def test_products_of_the_seeds_are_there() -> None:
    """Figures that the seeds' tables print, as a check of ours."""
    told = {"MI210": (181.0, 64, 1638.4), "MI100": (184.6, 32, 1228.8), "MI250": (362.1, 128, 3276.8)}
    told |= {"RTX A6000": (154.8, 48, 768), "A100 40GB": (312, 40, 1555), "A100 80GB": (312, 80, 2039)}
    by_name = {product.name: product for product in products.products()}
    for name, (flops, memory, bandwidth) in told.items():
        product = by_name[name]
        found = [figure and figure.value for figure in (product.fp16, product.memory, product.bandwidth)]
        assert found == pytest.approx([flops * 1e12, memory << 30, bandwidth * 1e9])


# Channels of a socket, or bits of a package, and millions of transfers a second.
MEMORIES = {
    "EPYC 7763": (8 * 64, 3200),
    "EPYC 9654": (12 * 64, 4800),
    "EPYC 9755": (12 * 64, 6000),
    "Xeon Platinum 8380": (8 * 64, 3200),
    "Xeon Platinum 8480+": (8 * 64, 4800),
    "Xeon Platinum 8592+": (8 * 64, 5600),
    "Xeon 6980P": (12 * 64, 6400),
    "Graviton2": (8 * 64, 3200),
    "Graviton3": (8 * 64, 4800),
    "Graviton4": (12 * 64, 5600),
    "Apple M1": (128, 4266),
    "Apple M2": (128, 6400),
    "Apple M4": (128, 7500),
    "Apple M4 Pro": (256, 8533),
    "Apple M4 Max 16-core": (512, 8533),
    "Steam Deck OLED": (128, 6400),
    "RX 7900 XT": (320, 20000),
    "Radeon PRO W7900": (384, 18000),
    "RTX 3090": (384, 19500),
    "RTX 4080": (256, 22400),
    "RTX 5080": (256, 30000),
    "Strix Halo": (256, 8000),
    "Strix Halo 8050S": (256, 8000),
    "V100 SXM2 32GB": (4096, 1750),
    "V100S": (4096, 2214),
    "T4": (256, 10000),
    "L4": (192, 12500),
    "A10G": (384, 12500),
}


@pytest.mark.parametrize("name", MEMORIES)
def test_bandwidths_are_the_width_of_the_memory_times_its_rate(name: str) -> None:
    (bits, rate), bandwidth = MEMORIES[name], products.titled(name).bandwidth
    assert bandwidth is not None
    assert bandwidth.value == pytest.approx(bits / 8 * rate * 1e6, rel=0.03)


def test_chips_of_the_cpu_backend_are_not_compiled_for_as_gpus() -> None:
    hosts = [product for product in products.products() if product.host]
    assert len(hosts) == 27
    for product in hosts:
        assert product.chip not in chips.chips()
        roofs = products.sheet_roofs(product)
        assert roofs is not None
        assert roofs.bf16_flops == math.inf
    assert products.titled("m2 max").name == "Apple M2 Max"
    with pytest.raises(ConfigError, match="Apple M3 Max 14-core, Apple M3 Max 16-core"):
        products.titled("Apple M3 Max")
    assert products.find("Apple M3 Max") is None
    assert products.find("Apple M3 Max", 16) == products.titled("Apple M3 Max 16-core")


@pytest.mark.parametrize(
    ("name", "units", "product"),
    [
        ("AMD INSTINCT MI250 (MCM) OAM AC MBA", None, "MI250"),
        ("AMD Instinct MI250X/MI250", 110, "MI250X"),
        ("AMD Instinct MI250X/MI250", 104, "MI250"),
        ("AMD Instinct MI250X/MI250", None, None),  # could be either
        ("Radeon RX 7900 XTX", 48, "RX 7900 XTX"),
        ("AMD Radeon(TM) 8060S Graphics", 20, "Strix Halo"),
        ("AMD Radeon(TM) 8050S Graphics", 16, "Strix Halo 8050S"),
        ("AMD Instinct MI308X", 80, "MI308X"),
        ("Tesla V100-SXM2-16GB", 80, "V100 SXM2 16GB"),
        ("Tesla V100-PCIE-32GB", 80, "V100 PCIe 32GB"),
        ("Tesla V100S-PCIE-32GB", 80, "V100S"),
        ("NVIDIA A100-SXM4-80GB", None, "A100 80GB"),
        ("NVIDIA A100-SXM4-80GB", 14, None),  # a slice
        (" NVIDIA H200 ", 132, "H200"),
        ("NVIDIA TITAN X (Pascal)", 28, "TITAN X (Pascal)"),
        ("NVIDIA GeForce RTX 4070", None, None),
        ("", None, None),
    ],
)
def test_products_by_the_names_of_devices(name: str, units: int | None, product: str | None) -> None:
    found = products.find(name, units)
    assert (found and found.name) == product
