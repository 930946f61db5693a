"""Every kernel of every instruction set against the portable one, byte for byte, on this architecture and on aarch64.

The program in tests/backends/native compares the instruction sets of the chip it runs on, and prints a digest a case:
these must be the same on every architecture. aarch64 is cross-compiled and runs under an emulator.
"""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import native_check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def run(program: Path, *words: str, emulate: str | None = None) -> subprocess.CompletedProcess[str]:
    """`emulate`: the name of an aarch64 chip to run on."""
    command = [EMULATOR, "-cpu", emulate] if emulate else []
    return subprocess.run([*command, str(program), *words], capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def here() -> Path:
    """The program for this machine."""
    compiler = native_check.host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    return native_check.build(compiler, platform.machine())


def cross_built(*options: str) -> Path:
    """The program for aarch64."""
    for tool, package in ((CROSS, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user")):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (Debian package {package})")
    return native_check.build(CROSS, "aarch64", ["-static", *options])


@pytest.fixture(scope="module")
def there() -> Path:
    """The program for aarch64, as it is installed."""
    return cross_built()


@pytest.fixture(scope="module")
def digests(here: Path) -> str:
    """A line a case, from the instruction sets of this chip, which agree."""
    done = run(here)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 500
    assert len(set(lines)) == len(lines)
    return done.stdout


def test_kernels_of_this_chip_equal_the_portable_ones(digests: str) -> None:
    for kind in (
        "quantise",
        "rms_norm",
        "rms_norm without a weight",
        "like_norm",
        "above_spread",
        "layer_norm",
        "silu",
        "gelu",
        "gelu tanh",
        "relu",
        "relu squared",
        "add",
        "gated by silu",
        "gated by gelu",
        "rope",
        "to_bf16",
        "to_int8",
        "exp2",
        "linear",
        "embed",
        "attend",
        "sample",
        "causal_conv",
        "delta_rule",
        "selective_scan",
        "mul",
        "sigmoid_mul",
        "steps",
    ):
        assert any(line.startswith(kind) for line in digests.splitlines()), kind


BRIEF = ("steps window 40 interleaved int8 ", "steps mpt window 40 int8 ")


def brief(digests: str) -> str:
    """The lines of `check_main brief`."""
    lines = digests.splitlines(keepends=True)
    assert all(sum(line.startswith(name) for line in lines) == 1 for name in BRIEF)
    return "".join(line for line in lines if line.startswith(BRIEF) or not line.startswith("steps"))


def test_neon_equals_portable_and_this_architecture_in_short(digests: str) -> None:
    """Every kernel and a whole program of each model; what takes most of a build is to optimise it."""
    done = run(cross_built("-O1"), "brief", emulate="max")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "instruction sets: portable neon\n"
    assert done.stdout == brief(digests)


@pytest.mark.soak
def test_neon_equals_portable_and_both_equal_this_architecture(there: Path, digests: str) -> None:
    done = run(there, emulate="max")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "instruction sets: portable neon\n"
    assert done.stdout == digests


@pytest.mark.soak
def test_a_chip_without_dot_products_runs_the_portable_kernels(there: Path, digests: str) -> None:
    done = run(there, "steps", emulate="cortex-a72")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "instruction sets: portable\n"
    assert done.stdout == "".join(line for line in digests.splitlines(keepends=True) if line.startswith("steps"))


def test_a_wrong_bit_is_noticed(here: Path) -> None:
    done = run(here, "plant")
    best = done.stderr.splitlines()[0].split()[3:]
    if not best:
        pytest.skip("this chip has no instruction set beside portable")
    assert done.returncode == 1
    wrong = [line for line in done.stderr.splitlines() if line.startswith("DIFFERENT")]
    assert any(f"rms_norm 576 x 1.000000 {best[0]}" in line for line in wrong)
    assert all("rms_norm" in line or "steps" in line for line in wrong)


@pytest.mark.soak
def test_a_wrong_bit_is_noticed_on_aarch64(there: Path) -> None:
    done = run(there, "plant", "steps", emulate="max")
    assert done.returncode == 1
    assert "DIFFERENT: steps window 0 neon" in done.stderr


@pytest.mark.parametrize("words", [("steps", "brief"), pytest.param(("steps",), marks=pytest.mark.soak)])
def test_threads_meet_without_a_race(digests: str, words: tuple[str, ...]) -> None:
    """What x86 forgives shows where memory is weakly ordered, and the sanitiser sees it on any chip."""
    compiler = native_check.host_compiler()
    assert compiler is not None
    sanitise = ["-fsanitize=thread", "-O1", "-g0"]
    trial = subprocess.run([compiler, *sanitise, "-x", "c++", "-", "-o", "/dev/null"], input="int main() {}", text=True)
    if trial.returncode != 0:
        pytest.skip(f"{compiler} cannot link the thread sanitiser")
    done = run(native_check.build(compiler, platform.machine(), sanitise, only_portable=True), *words)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the thread sanitiser does not run on this kernel's memory layout")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    expected = brief(digests) if "brief" in words else digests
    assert done.stdout == "".join(line for line in expected.splitlines(keepends=True) if line.startswith("steps"))
