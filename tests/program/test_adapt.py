"""Where adapters of a step's rows go, what is written out again for them, and what is refused."""

from dataclasses import replace

import program_builders as builders
import pytest

from roofline.common.errors import UnsupportedError
from roofline.program.compile import compile_program
from roofline.program.ir import Program, Share, Type
from roofline.program.passes.adapt import Site, adapt, sites
from roofline.program.target import CPU, GPU, Target
from roofline.program.text import print_instr

# The first layer on the CPU: norm and quantization, product and sum, product and activation are instructions again.
LLAMA = """\
x1.q8.rows: f32[tokens, 64] = rms_norm(x0; layers.0.attn_norm.weight; eps=1e-05, order='lanes16')
x1.q8: q8g32[tokens, 64] = quantize_rows(x1.q8.rows; ; group=32)
x2+x3+x4: f32[tokens, 128] = linear(x1.q8; layers.0.attn.q+k+v.weight; order='q8g32')
x2+x3+x4.ranks: f32[tokens, 12] = adapter_down(x1.q8.rows, adapters; ; group=0, ranks=12, order='lanes16')
x2+x3+x4.adapted: f32[tokens, 128] = adapter_up(x2+x3+x4.ranks, x2+x3+x4, adapters; ; group=0, order='ranks')
x5: f32[tokens, 64], kv0.1: cache[2, 16] = rope_kv_write(x2+x3+x4.adapted, positions, kv0.0; ; table='rope0', heads=4, \
layer=0, kv_dtype='bf16')
x7: f32[tokens, 64] = attend(x5, kv0.1; ; layer=0, heads=4, scale=0.25, kv_dtype='bf16', q_dtype='bf16', \
p_dtype='bf16', order='pages64')
x7.q8: q8g32[tokens, 64] = quantize_rows(x7; ; group=32)
x9.product: f32[tokens, 64] = linear(x7.q8; layers.0.attn.o.weight; order='q8g32')
x9.product.ranks: f32[tokens, 4] = adapter_down(x7, adapters; ; group=1, ranks=4, order='lanes16')
x9.product.adapted: f32[tokens, 64] = adapter_up(x9.product.ranks, x9.product, adapters; ; group=1, order='ranks')
x9: f32[tokens, 64] = add(x0, x9.product.adapted)
x10.q8.rows: f32[tokens, 64] = rms_norm(x9; layers.0.mlp_norm.weight; eps=1e-05, order='lanes16')
x10.q8: q8g32[tokens, 64] = quantize_rows(x10.q8.rows; ; group=32)
x13.product: f32[tokens, 256] = linear(x10.q8; layers.0.mlp.gate+up.weight; order='q8g32')
x13.product.ranks: f32[tokens, 8] = adapter_down(x10.q8.rows, adapters; ; group=2, ranks=8, order='lanes16')
x13.product.adapted: f32[tokens, 256] = adapter_up(x13.product.ranks, x13.product, adapters; ; group=2, order='ranks')
x13: f32[tokens, 128] = silu_mul(x13.product.adapted; ; order='exp2')
x13.q8: q8g32[tokens, 128] = quantize_rows(x13; ; group=32)"""
# On a GPU, whose rows are bfloat16: the activation of a product in float32 rounds, as the fused instruction did.
LLAMA_GPU = """\
x13.product: f32[tokens, 256] = linear(x10; layers.0.mlp.gate+up.weight; order='any')
x13.product.ranks: bf16[tokens, 8] = adapter_down(x10, adapters; ; group=2, ranks=8, out='bf16')
x13.product.adapted: f32[tokens, 256] = adapter_up(x13.product.ranks, x13.product, adapters; ; group=2)
x13: bf16[tokens, 128] = silu_mul(x13.product.adapted; ; out='bf16')
x14: bf16[tokens, 64] = linear(x13; layers.0.mlp.down.weight; out='bf16', order='any')
x14.ranks: bf16[tokens, 4] = adapter_down(x13, adapters; ; group=3, ranks=4, out='bf16')
x14.adapted: bf16[tokens, 64] = adapter_up(x14.ranks, x14, adapters; ; group=3, out='bf16')"""


def compiled(form: str, target: Target) -> Program:
    model = builders.build(builders.BASE, form)
    return compile_program(model.family, model.cfg, model.tensors, target)


@pytest.mark.parametrize(("form", "target", "first", "lines"), [("Q4_1", CPU, 1, LLAMA), ("BF16", GPU, 11, LLAMA_GPU)])
def test_each_matrix_of_a_layer_is_followed_by_its_adapters(form: str, target: Target, first: int, lines: str) -> None:
    adapted = adapt(compiled(form, target), 4)
    want = lines.splitlines()
    assert [print_instr(instr) for instr in adapted.body[first : first + len(want)]] == want
    assert [instr.op for instr in adapted.body[-2:]] == (
        ["norm_quantize", "linear"] if target is CPU else ["add_norm", "linear"]
    )
    assert [(value.name, value.type) for value in adapted.inputs][-1] == ("adapters", Type("i32", "tokens"))
    assert adapted.plan is not None


def test_sites_say_which_columns_of_which_group_a_matrix_has() -> None:
    of_first = {
        "attn.q": Site(0, 0, 0, 64, 64), "attn.k": Site(0, 1, 64, 32, 64), "attn.v": Site(0, 2, 96, 32, 64),
        "attn.o": Site(1, 0, 0, 64, 64),
        "mlp.gate": Site(2, 0, 0, 128, 64), "mlp.up": Site(2, 1, 128, 128, 64), "mlp.down": Site(3, 0, 0, 64, 128),
    }  # fmt: skip
    assert sites(adapt(compiled("Q4_1", CPU), 4)) == {
        f"layers.{layer}.{part}.weight": replace(site, group=site.group + 4 * layer)
        for layer in range(2)
        for part, site in of_first.items()
    }


def test_parts_of_a_model_are_not_adapted() -> None:
    program = compiled("Q4_1", CPU)
    with pytest.raises(UnsupportedError, match="adapters on several ranks"):
        adapt(replace(program, share=Share(0, 2)), 4)
