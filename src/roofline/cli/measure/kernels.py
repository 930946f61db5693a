"""roofline kernels: what GPU kernels are like on a chip that need not be here; their binaries, made ahead of time."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from roofline.backends.options import LoadOptions
from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.options import Options, option, same_option
from roofline.common.units import human_seconds

if TYPE_CHECKING:
    from roofline.backends.gpu.ahead.check import Proof
    from roofline.hardware.chips.chips import Chip

COLUMNS = ("kernel", "case", "tile", "registers", "spills", "local bytes", "waves", "matrix instructions", "gates")
RUN_OPTIONS = ("weights", "exact", "kv_cache_dtype", "activations")  # of `KernelOptions`: how the model is run


@dataclass(frozen=True)
class KernelOptions(Options):
    """Which kernels are compiled, for which chips, for which model."""

    chip: str | None = option(None, "Show the kernels on these: gfx942,sm_90.")
    build: str | None = option(None, "Compile for these into the kernel cache: a start then compiles no kernel.")
    model: str | None = option(None, "With --build: all that this model's steps launch, whatever its shapes.")
    weights: str | None = same_option(LoadOptions, "weights")
    exact: bool = option(False, "With --model: as `serve --exact` runs it.")
    kv_cache_dtype: str = same_option(LoadOptions, "kv_cache_dtype")
    activations: Literal["auto", "fp8"] = same_option(LoadOptions, "activations", backends=())
    kernel: str | None = option(None, "Only this one.")
    jobs: int | None = option(None, "Compilers at a time. Default: the usable cores.", minimum=1, unit="compilers")


def command(options: KernelOptions, as_json: AsJson = False) -> int:
    """Compile every kernel with the tile chosen for a chip, and check registers, spills, memory, matrix instructions.

    No GPU is needed. Exit status 1 where a gate is not passed.
    """
    from roofline.hardware.chips import chips

    chip, build, kernel, jobs = options.chip, options.build, options.kernel, options.jobs
    if (chip is None) == (build is None):
        names = ", ".join(chips.chips())
        raise ConfigError(f"Name chips with --chip (to look at) or with --build (to compile for). Known: {names}.")
    targets = _chips(chip or build or "")
    if options.model is not None:
        if build is None or kernel is not None or as_json:
            raise ConfigError("--model goes with --build, and without --kernel and --json")
        return _build_model(targets, options)
    if options.changes().keys() & {*RUN_OPTIONS}:
        names = "--weights, --exact, --kv-cache-dtype and --activations"
        raise ConfigError(f"{names} say how a model is run: name it with --model")
    if build is not None and not as_json:
        return _build(targets, kernel, jobs)
    from roofline.backends.gpu.ahead import check as static

    proofs = sorted(static.prove(targets, kernel=kernel, jobs=jobs), key=lambda proof: (proof.kernel, proof.case))
    if as_json:
        print_json([asdict(proof) for proof in proofs], indent=1)
    else:
        for target in targets:
            _show(target, [proof for proof in proofs if proof.chip == target.name])
    return _status(proofs)


def _chips(names: str) -> "list[Chip]":
    """Each of a list with commas, once. Raises UnsupportedError for one that kernels are not compiled for."""
    from roofline.hardware.chips import chips

    architectures = dict.fromkeys(chips.architecture(name) for name in names.split(","))
    for name in architectures:
        reason = chips.refused(name)
        if reason is not None:
            raise UnsupportedError(f"chip {name!r}", reason, tuple(chips.chips()))
    return [chips.get(name) for name in architectures]


def _build(targets: "list[Chip]", kernel: str | None, jobs: int | None) -> int:
    """One line a chip when it is complete, and everything that did not pass."""
    from roofline.backends.gpu.ahead import check as static
    from roofline.backends.gpu.ahead import kernel_cache

    proofs = []
    for chip in targets:
        mine = list(static.prove([chip], kernel=kernel, jobs=jobs))
        binaries = sum(proof.facts is not None for proof in mine)
        seconds = human_seconds(sum(proof.seconds for proof in mine))
        print(f"{chip.name}: {binaries} of {len(mine)} binaries, {seconds} of compiling", flush=True)
        proofs += mine
    print(f"they lie in {kernel_cache.folder()}")
    _violations(proofs)
    return _status(proofs)


def _build_model(targets: "list[Chip]", options: KernelOptions) -> int:
    from roofline import bundle
    from roofline.backends.gpu.ahead import kernel_cache

    assert options.model is not None
    load = LoadOptions.from_keywords({"backend": "gpu", **{name: getattr(options, name) for name in RUN_OPTIONS}})
    for compiled in bundle.compile_ahead(options.model, load, [chip.name for chip in targets]):
        print(f"{compiled.chip}: {compiled.binaries} binaries, {compiled.compiled} of them compiled now", flush=True)
    print(f"they lie in {kernel_cache.folder()}")
    return 0


def _show(chip: "Chip", proofs: "list[Proof]") -> None:

    table = plain_table(COLUMNS, map(_row, proofs), padding=(0, 2, 0, 0))
    version = proofs[0].triton if proofs else ""
    print(f"{chip.name}, compiled by Triton {version}; waves: resident on each SIMD of {chip.waves}, and their bound")
    print_table(console(), table)
    _violations(proofs)


def _row(proof: "Proof") -> list[str]:
    facts, reached = proof.facts, proof.occupancy
    gates = "ok" if not proof.violations else ", ".join(violation.gate for violation in proof.violations)
    if facts is None:
        return [proof.kernel, proof.case, proof.tile, "", "", "", "", "", gates]
    waves = f"{reached.waves:g} ({reached.bound})" if reached else "none"
    matrix = ", ".join(f"{count} {name}" for name, count in facts.matrix.items()) or "-"
    numbers = [str(number) for number in (facts.registers, facts.spills, facts.local_bytes)]
    return [proof.kernel, proof.case, proof.tile, *numbers, waves, matrix, gates]


def _violations(proofs: "list[Proof]") -> None:
    for proof in proofs:
        for violation in proof.violations:
            print(violation)


def _status(proofs: "list[Proof]") -> int:
    return int(any(proof.violations for proof in proofs))
