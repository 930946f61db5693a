"""What compiled kernels were like when it was last looked at: golden/CHIP.json, one line a binary."""

import json
from dataclasses import asdict
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
WRITE = "`python tests/backends/gpu/write_golden.py CHIP` writes it anew: look at the difference"
# Figures that may drift by as much without anything being wrong; all others are compared exactly.
DRIFT = {"registers": 0.1, "accumulators": 0.1, "scalars": 0.1, "code_bytes": 0.25}


def read(chip):
    """{"triton": version, "kernels": {kernel: {case: figures}}}."""
    return json.loads((FOLDER / f"{chip}.json").read_text("utf-8"))


def write(chip, proofs, keep=False):
    """Keys in order and a line a binary, so that a change shows as a difference of lines.

    keep: other kernels' lines stay.
    """
    kernels = read(chip)["kernels"] if keep else {}
    for kernel in {proof.kernel for proof in proofs}:
        kernels[kernel] = {proof.case: figures(proof) for proof in proofs if proof.kernel == kernel}
    bodies = []
    for kernel, cases in sorted(kernels.items()):
        lines = [f"   {json.dumps(case)}: {json.dumps(facts)}" for case, facts in sorted(cases.items())]
        bodies.append(f'  "{kernel}": {{\n' + ",\n".join(lines) + "\n  }")
    text = f'{{\n "triton": "{proofs[0].triton}",\n "kernels": {{\n' + ",\n".join(bodies) + "\n }\n}\n"
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{chip}.json").write_text(text, encoding="utf-8")


def figures(proof):
    """A binary's facts; what is nought or empty is left out."""
    return {"tile": proof.tile, **{name: value for name, value in asdict(proof.facts).items() if value}}


def heaviest(chip):
    """Of the cases of each kernel and tile the one that spills most, and of those that holds most registers."""
    found = {}
    for kernel, cases in read(chip)["kernels"].items():
        for case, facts in cases.items():
            weight = facts.get("spills", 0), facts.get("registers", 0), case
            found[kernel, facts["tile"]] = max(found.get((kernel, facts["tile"]), weight), weight)
    return {(kernel, case) for (kernel, _), (_, _, case) in found.items()}


def differences(golden, proofs, cases=None):
    """What is not as the golden has it, in words; cases: of these (kernel, case) alone. Another version of Triton makes
    other binaries: then nothing."""
    if golden["triton"] != proofs[0].triton:
        return []
    now = {(proof.kernel, proof.case): figures(proof) for proof in proofs if proof.facts}
    then = {(kernel, case): old for kernel, olds in golden["kernels"].items() for case, old in olds.items()}
    then = {key: old for key, old in then.items() if cases is None or key in cases}
    found = [f"{kernel} [{case}] is not in the golden" for kernel, case in now.keys() - then.keys()]
    found += [f"{kernel} [{case}] is in the golden only" for kernel, case in then.keys() - now.keys()]
    for key in now.keys() & then.keys():
        for name in now[key].keys() | then[key].keys():
            old, new = then[key].get(name, 0), now[key].get(name, 0)
            if old != new and not (name in DRIFT and abs(new - old) <= max(8, DRIFT[name] * old)):
                found.append(f"{key[0]} [{key[1]}]: {name} was {old}, is {new}")
    return sorted(found)
