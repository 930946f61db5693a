"""The limits that each compiled kernel keeps on each chip: the table kernel_limits.txt, and what breaks it.

A section is a kernel, a row one of its cases, a column a chip. A cell holds the waves that must be resident on each
SIMD (warps on each quarter of a multiprocessor), which registers and local memory decide: a register more changes
nothing until it passes a step. "m" after the number: the chip's largest matrix instruction (the first of `matrix` in
chips.toml) is in the assembly. "*": of its kernel and tile the case that holds most registers, which is compiled in
every test run of its chip. What else a kernel must be like, spills above all, is in gates.toml and is the same for
every version of Triton.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

TABLE = Path(__file__).with_suffix(".txt")
WRITE = "`python tests/backends/gpu/write_kernel_limits.py CHIP` writes the limits anew: look at the difference"


@dataclass(frozen=True)
class Limit:
    """waves: at least so many; matrix: whether the largest matrix instruction must be there; heaviest: see above."""

    waves: float
    matrix: bool
    heaviest: bool

    def __str__(self):
        return f"{self.waves:g}{'m' * self.matrix}{'*' * self.heaviest}"

    @classmethod
    def parse(cls, cell):
        """The limit of a cell of the table."""
        return cls(float(cell.rstrip("m*")), "m" in cell, "*" in cell)


def read(table=TABLE):
    """{chip: {(kernel, case): Limit}}."""
    head, *lines = table.read_text("utf-8").splitlines()
    names = head.split()
    limits = {name: {} for name in names}
    kernel = ""
    for line in lines:
        if not line.startswith(" "):
            kernel = line
            continue
        case, cells = line.split("|")
        for name, cell in zip(names, cells.split(), strict=True):
            if cell != "-":
                limits[name][kernel, case.strip()] = Limit.parse(cell)
    return limits


def write(limits, table=TABLE):
    """A section a kernel, a line a case, a column a chip, all in order."""
    keys = sorted({key for cases in limits.values() for key in cases})
    lines = [" ".join(limits)]
    for kernel, group in groupby(keys, key=lambda key: key[0]):
        group = list(group)
        width = max(len(case) for _, case in group)
        lines.append(kernel)
        for key in group:
            cells = (f"{cases.get(key, '-')!s:>{len(name)}}" for name, cases in limits.items())
            lines.append(f" {key[1]:{width}} | {' '.join(cells)}")
    table.write_text("\n".join(lines) + "\n", encoding="utf-8")


def has_matrix(facts, chip):
    """Whether the chip's largest matrix instruction is in a binary."""
    return any(name.startswith(chip.matrix.split("|")[0]) for name in facts.matrix)


def limits_of(proofs, chip):
    """The limits that these proofs of one chip keep: {(kernel, case): Limit}."""
    heaviest = {}
    for proof in proofs:
        weight = proof.facts.spills, proof.facts.registers, proof.case
        heaviest[proof.kernel, proof.tile] = max(heaviest.get((proof.kernel, proof.tile), weight), weight)
    return {
        (proof.kernel, proof.case): Limit(
            proof.occupancy.waves, has_matrix(proof.facts, chip), heaviest[proof.kernel, proof.tile][2] == proof.case
        )
        for proof in proofs
    }


def broken(limits, proofs, chip):
    """What is not within the limits {(kernel, case): Limit} of a chip, in words; empty where all is well."""
    compiled = {(proof.kernel, proof.case): proof for proof in proofs if proof.facts}
    found = [f"{kernel} [{case}] has no limits" for kernel, case in compiled.keys() - limits.keys()]
    found += [f"{kernel} [{case}] has limits but was not compiled" for kernel, case in limits.keys() - compiled.keys()]
    for key in compiled.keys() & limits.keys():
        proof, limit = compiled[key], limits[key]
        waves = proof.occupancy.waves if proof.occupancy else 0
        if waves < limit.waves:
            figures = f"{proof.facts.registers} registers, {proof.facts.local_bytes:,} bytes of local memory"
            found.append(f"{key[0]} [{key[1]}]: {waves:g} waves on each SIMD, at least {limit.waves:g} ({figures})")
        if limit.matrix and not has_matrix(proof.facts, chip):
            found.append(f"{key[0]} [{key[1]}]: no {chip.matrix.split('|')[0]} in the assembly")
    return sorted(found)
