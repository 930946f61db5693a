"""qk_norm: what makes it of two norms, and each condition that keeps them apart."""

from collections.abc import Sequence

import program_builders as builders
import pytest

from roofline.program.compile import stages
from roofline.program.passes.fuse_norms import fuse_norms
from roofline.program.target import CPU
from roofline.program.text import parse_program, print_instr, print_program

MODEL = builders.build(builders.BASE | {"family": "olmo2"})
MERGED = print_program(dict(stages(MODEL.family, MODEL.cfg, MODEL.tensors, CPU))["merge"])
OUTPUT = "output kv0.2\n"
K_NORM = "x4: f32[tokens, 32] = rms_norm(x3; layers.0.attn.k_norm.weight; eps=1e-05, order='lanes16')\n"
NORMED = """\
x1+x3+x5.normed: f32[tokens, 128] = qk_norm(x1+x3+x5; layers.0.attn.q_norm.weight, layers.0.attn.k_norm.weight; \
eps=1e-05, order='lanes16')
x1: f32[tokens, 64] = split(x1+x3+x5.normed; ; start=0, stop=64)
x3: f32[tokens, 32] = split(x1+x3+x5.normed; ; start=64, stop=96)
x5: f32[tokens, 32] = split(x1+x3+x5.normed; ; start=96, stop=128)
x2: f32[tokens, 64] = split(x1+x3+x5.normed; ; start=0, stop=64)
x4: f32[tokens, 32] = split(x1+x3+x5.normed; ; start=64, stop=96)
x6: f32[tokens, 64] = rope(x2, positions; ; table='rope0', heads=4)"""
APART: dict[str, Sequence[tuple[str, str]]] = {
    "another eps": [("k_norm.weight; eps=1e-05", "k_norm.weight; eps=1e-06")],
    "q before its norm is read elsewhere": [(OUTPUT, OUTPUT + "output x1\n")],
    "k before its norm is read elsewhere": [(OUTPUT, OUTPUT + "output x3\n")],
    "a gap before k": [("start=64, stop=96", "start=65, stop=96")],
    "q does not begin the row": [("start=0, stop=64", "start=8, stop=64")],
    "v is wider than k": [("x1+x3+x5: f32[tokens, 128]", "x1+x3+x5: f32[tokens, 160]")],
    "k of another value": [("= split(x1+x3+x5; ; start=64, stop=96)", "= split(x0; ; start=64, stop=96)")],
    "no norm of k": [(K_NORM, "x4: f32[tokens, 32] = cast(x3; ; dtype='f32')\n")],
    "a norm of v": [
        (K_NORM, K_NORM + K_NORM.replace("x4", "normed_v").replace("x3", "x5")),
        ("kv_write(kv0.0, x7, x5;", "kv_write(kv0.0, x7, normed_v;"),
    ],
    "norms of heads": [
        (f"weight layers.0.attn.{part}_norm.weight: f32[{size}]", f"weight layers.0.attn.{part}_norm.weight: f32[16]")
        for part, size in (("q", 64), ("k", 32))
    ],
}


def edited(*edits: tuple[str, str]) -> list[str]:
    """The body after the pass; each edit is of the first layer, which stands first."""
    text = MERGED
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new, 1)
    return [print_instr(instr) for instr in fuse_norms(parse_program(text)).body]


def test_norms_of_q_and_k_stand_before_their_split() -> None:
    body = edited()
    assert sum("qk_norm(" in line for line in body) == 2
    at = next(at for at, line in enumerate(body) if "qk_norm(" in line)
    assert body[at : at + 7] == NORMED.splitlines()


@pytest.mark.parametrize("case", APART)
def test_norms_that_are_no_such_pair_stay_as_they_are(case: str) -> None:
    assert sum("qk_norm(" in line for line in edited(*APART[case])) == 1


def test_a_program_without_such_norms_is_given_back() -> None:
    model = builders.build(builders.QWEN3)
    merged = dict(stages(model.family, model.cfg, model.tensors, CPU))["merge"]
    assert fuse_norms(merged) is merged
