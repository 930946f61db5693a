"""The cases of benchmarks/gpu.py on tiny shapes in Triton's interpreter: what it says of a kernel can be believed."""

import pytest

torch = pytest.importorskip("torch")


def bench():
    from benchmarks.gpu_kernels import TINY, Bench
    from roofline.hardware import chips

    return Bench(chips.get("sm_90"), "cpu", TINY)


@pytest.mark.slow
def test_every_case_is_within_its_tolerance():
    from benchmarks.gpu_kernels import error

    torch.manual_seed(0)
    seen = []
    for make in bench().cases():
        case = make()
        found = error(case)
        assert found <= case.tolerance, f"{case.name}: {found}"
        assert case.flops > 0, case.name
        assert case.nbytes > 0, case.name
        seen.append(case.name)
    assert len(seen) == len(set(seen)), "a case twice"
    assert len(seen) > 50


def test_what_is_left_unwritten_is_an_error():
    from dataclasses import replace

    from benchmarks.gpu_kernels import error

    case = bench().norm(3)
    lazy = replace(case, run=lambda: None)
    assert not error(lazy) <= lazy.tolerance
