"""The core with the kernels of this chip, and libroofline, under the compiler's sanitisers: all checks of kernels, and
threads that submit, step, abort, decode and close."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "backends"))

import native_check

import roofline._native as native

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LIBRARY = sorted((native_check.ROOT / "native/library").glob("*.cpp"))
THREADS = [*LIBRARY, Path(__file__).with_name("library_threads.cpp")]
# Checks of each pointer for what AddressSanitizer or the hardware tells anyway multiply the time of compiling; so do
# checks of addresses that are no calls, and of the stack, whose arrays the bounds of UndefinedBehaviorSanitizer cover.
UNDEFINED = ["-fsanitize=undefined", "-fno-sanitize=null,alignment,object-size,pointer-overflow,vptr"]
ADDRESS = ["-O1", "-fsanitize=address", *UNDEFINED, "-fno-sanitize-recover=all"]
ADDRESS += ["--param", "asan-instrumentation-with-call-threshold=0", "--param", "asan-stack=0"]
COMMON = ["-g1", '-DROOFLINE_BUILD_ID="0"', '-DROOFLINE_COMPILER="0"']


def sanitised(options: list[str], variant: str, programs: dict[str, list[Path]]) -> dict[str, Path]:
    """The programs, or a skip where the compiler has no such sanitiser."""
    compiler = native_check.host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    trial = [compiler, *options, "-x", "c++", "-", "-o", "/dev/null"]
    if subprocess.run(trial, input="int main() {}", text=True, capture_output=True).returncode != 0:
        pytest.skip(f"{compiler} cannot link {options[0]}")
    return native_check.build_sanitised(compiler, [*options, *COMMON], variant, programs)


def reported(program: Path, *words: str | Path) -> str:
    """What a program prints. Fails with what the sanitiser reports."""
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=600)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitiser does not run on this kernel's memory layout")
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert "WARNING: " not in done.stderr
    return done.stdout


ISAS = [isa for isa in native.isas() if isa != "portable"]  # of this chip, the best first
# To compile the kernels with a sanitiser takes a minute of processor time for AVX-512 and a third for AVX2, all other
# files some ten seconds: each sanitiser has one instruction set outside of the soak.
SOAK = [pytest.param(isa, marks=pytest.mark.soak) for isa in ISAS]


@pytest.mark.parametrize("variant", [*ISAS[:1], *SOAK[1:]])
def test_no_kernel_leaves_its_memory(compiled_bundle: Path, variant: str) -> None:
    made = sanitised(ADDRESS, variant, {"checked": sorted(native_check.CHECK.glob("*.cpp")), "threads": THREADS})
    assert len(reported(made["checked"], "brief").splitlines()) > 400
    assert reported(made["threads"], compiled_bundle, variant) == "done\n"


@pytest.mark.parametrize("variant", [*ISAS[-1:], *SOAK[:-1]])
def test_threads_of_a_program_race_nowhere(compiled_bundle: Path, variant: str) -> None:
    made = sanitised(["-O0", "-fsanitize=thread"], variant, {"raced": THREADS})
    assert reported(made["raced"], compiled_bundle, variant) == "done\n"
