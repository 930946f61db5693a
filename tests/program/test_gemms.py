"""The products of a Program are those of its linears, by bucket, without running anything."""

from program_builders import BASE, MPT, build

from roofline.models import presets
from roofline.models.registry import configure
from roofline.program.compile import stages
from roofline.program.gemms import Gemm, bucket_plan, gemms
from roofline.program.target import CPU
from roofline.program.trace import trace_shape


def programs(config, form="BF16"):
    model = build(config, default=form)
    return dict(stages(model.family, model.cfg, model.tensors, CPU))


def test_the_products_of_a_small_model():
    traced = programs(BASE)["trace"]
    assert gemms(traced, [(8, 2)]) == {
        Gemm(8, 64, 64, "BF16", False): 4,  # q and o of both layers
        Gemm(8, 32, 64, "BF16", False): 4,  # k and v
        Gemm(8, 128, 64, "BF16", False): 4,  # gate and up
        Gemm(8, 64, 128, "BF16", False): 2,
        Gemm(2, 96, 64, "BF16", False): 1,
    }


def test_merged_and_fused_programs_have_fewer_and_larger_ones():
    merged = programs(BASE)["plan"]
    found = gemms(merged, [(8, 2)])
    assert found[Gemm(8, 128, 64, "BF16", False)] == 2  # q, k and v of both layers
    assert {gemm.rows for gemm in found} == {8, 2}  # the last layer's rows are narrowed
    work = sum(gemm.out * gemm.width * times for gemm, times in found.items())
    assert work == sum(r.shape[0] * r.columns for r in merged.weights.values() if len(r.shape) == 2)


def test_buckets_add_up_and_equal_products_are_one():
    traced = programs(BASE)["trace"]
    plan = bucket_plan(batches=[1, 16], prompt=16)
    assert plan == [(1, 1), (16, 16), (16, 1), (256, 16)]
    found = gemms(traced, plan)
    assert found[Gemm(16, 64, 64, "BF16", False)] == 4  # decode of 16 and prefill of 16 share it
    assert sorted(gemm.rows for gemm in found if gemm.out == 96) == [1, 16]


def test_biases_and_block_formats_are_named():
    assert all(gemm.bias for gemm in gemms(programs(MPT)["trace"], [(4, 4)]) if gemm.out != 96)
    assert {gemm.format for gemm in gemms(programs(BASE, "Q4_1")["trace"], [(4, 4)])} == {"Q4_1"}


def test_a_large_shape_needs_no_weights():
    traced = trace_shape(*configure(presets.preset("llama-2-7b")))
    found = gemms(traced, [(16, 16)])
    assert Gemm(16, 4096, 11008, "BF16", False) in found
    assert sum(g.out * g.width * n for g, n in found.items()) == 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
