"""roofline kernels: what GPU kernels are like on a chip that need not be here; their binaries, made ahead of time."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from roofline.cli.options import Activations, AsJson, KvCacheDtype, Option, Weights

if TYPE_CHECKING:
    from roofline.backends.gpu.ahead.check import Proof
    from roofline.hardware.chips.chips import Chip

COLUMNS = ("kernel", "case", "tile", "registers", "spills", "local bytes", "waves", "matrix instructions", "gates")


def command(
    chip: Annotated[str | None, Option("--chip", help="Show the kernels on these: gfx942,sm_90.")] = None,
    build: Annotated[
        str | None, Option("--build", help="Compile for these into the kernel cache: a start then compiles no kernel.")
    ] = None,
    model: Annotated[
        str | None, Option("--model", help="With --build: all that this model's steps launch, whatever its shapes.")
    ] = None,
    weights: Weights = None,
    exact: Annotated[bool, Option("--exact", help="With --model: as `serve --exact` runs it.")] = False,
    kv_cache_dtype: KvCacheDtype = "auto",
    activations: Activations = "auto",
    kernel: Annotated[str | None, Option("--kernel", help="Only this one.")] = None,
    jobs: Annotated[int | None, Option("--jobs", min=1, help="Compilers at a time. Default: the usable cores.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile every kernel with the tile chosen for a chip, and check registers, spills, memory, matrix instructions.

    No GPU is needed. Exit status 1 where a gate is not passed.
    """
    from roofline.common.errors import ConfigError
    from roofline.hardware.chips import chips

    if (chip is None) == (build is None):
        known = ", ".join(chips.chips())
        raise ConfigError(f"Name chips with --chip (to look at) or with --build (to compile for). Known: {known}.")
    wanted = _chips(chip or build or "")
    if model is not None:
        if build is None or kernel is not None or as_json:
            raise ConfigError("--model goes with --build, and without --kernel and --json")
        _build_model(wanted, model, weights=weights, exact=exact, kv_dtype=kv_cache_dtype, activations=activations)
        return
    if weights is not None or exact or (kv_cache_dtype, activations) != ("auto", "auto"):
        options = "--weights, --exact, --kv-cache-dtype and --activations"
        raise ConfigError(f"{options} say how a model is run: name it with --model")
    if build is not None and not as_json:
        _build(wanted, kernel, jobs)
        return
    from roofline.backends.gpu.ahead import check as static

    proofs = sorted(static.prove(wanted, kernel=kernel, jobs=jobs), key=lambda proof: (proof.kernel, proof.case))
    if as_json:
        import json

        print(json.dumps([asdict(proof) for proof in proofs], indent=1))
    else:
        for one in wanted:
            _show(one, [proof for proof in proofs if proof.chip == one.name])
    _exit(proofs)


def _chips(names: str) -> "list[Chip]":
    """Each of a list with commas, once. Raises UnsupportedError for one that kernels are not compiled for."""
    from roofline.common.errors import UnsupportedError
    from roofline.hardware.chips import chips

    wanted = dict.fromkeys(chips.architecture(name) for name in names.split(","))
    for name in wanted:
        reason = chips.refused(name)
        if reason is not None:
            raise UnsupportedError(f"chip {name!r}", reason, tuple(chips.chips()))
    return [chips.get(name) for name in wanted]


def _build(wanted: "list[Chip]", kernel: str | None, jobs: int | None) -> None:
    """One line a chip when it is complete, and everything that did not pass."""
    from roofline.backends.gpu.ahead import check as static
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.common.units import human_seconds

    proofs = []
    for chip in wanted:
        mine = list(static.prove([chip], kernel=kernel, jobs=jobs))
        made = sum(proof.facts is not None for proof in mine)
        seconds = human_seconds(sum(proof.seconds for proof in mine))
        print(f"{chip.name}: {made} of {len(mine)} binaries, {seconds} of compiling", flush=True)
        proofs += mine
    print(f"they lie in {kernel_cache.folder()}")
    _violations(proofs)
    _exit(proofs)


def _build_model(wanted: "list[Chip]", model: str, **how: Any) -> None:
    from roofline.backends.gpu.ahead import kernel_cache
    from roofline.bundle import compile_ahead as rehearsal

    for found in rehearsal.rehearse(model, wanted, **how):
        print(f"{found.chip}: {found.binaries} binaries, {found.compiled} of them compiled now", flush=True)
    print(f"they lie in {kernel_cache.folder()}")


def _show(chip: "Chip", proofs: "list[Proof]") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, box=None, padding=(0, 2, 0, 0))
    for proof in proofs:
        table.add_row(*_row(proof))
    version = proofs[0].triton if proofs else ""
    print(f"{chip.name}, compiled by Triton {version}; waves: resident on each SIMD of {chip.waves}, and their bound")
    Console(width=None if Console().is_terminal else 220).print(table)
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


def _exit(proofs: "list[Proof]") -> Any:
    if any(proof.violations for proof in proofs):
        raise typer.Exit(1)
