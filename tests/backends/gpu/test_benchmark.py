"""The cases of benchmarks/gpu.py on tiny shapes in Triton's interpreter: what it says of a kernel can be believed."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")


def bench(chip="sm_90", **sizes):
    from benchmarks.gpu_kernels import TINY, Bench
    from roofline.hardware.chips import chips

    return Bench(chips.get(chip), "cpu", replace(TINY, **sizes), seed=0)


def last_of_each(chip="sm_90"):
    """A case's maker of each kind."""
    return {make.func.__name__: make for make in bench(chip).cases()}


def check(makers):
    """Names of the cases, which are within their tolerances."""
    from benchmarks.gpu_kernels import errors

    seen = []
    for make in makers:
        case = make()
        for each, found in zip(case.results, errors(case).values(), strict=True):
            assert found <= each.tolerance, f"{case.name}, {each.name}: {found}"
        assert case.flops + case.nbytes > 0, case.name
        assert case.roof == ("fp8" if "E4M3 x e4m3" in case.name else "bf16")
        seen.append(case.name)
    assert len(seen) == len(set(seen)), "a case twice"
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_90", pytest.param("gfx942", marks=pytest.mark.soak)])
def test_every_case_is_within_its_tolerance(chip):
    assert len(check(bench(chip).cases())) > 130


@pytest.mark.slow
def test_one_case_of_each_kind_is_within_its_tolerance():
    assert len(check(last_of_each().values())) > 20


def planted(case, spoil):
    """The case whose runs end with `spoil` of all its results."""

    def run():
        made = case.run()
        results = made if made is not None else [each.out for each in case.results]
        spoil(*results)
        return made

    return replace(case, run=run)


def overall(case):
    """||out - want|| / ||want|| of the first result, all that was once looked at."""
    case.run()
    (want, *_), out = case.want(), case.results[0].out
    return float((out.double() - want).norm() / want.norm())


def test_one_wrong_column_is_an_error():
    from benchmarks.gpu_kernels import error

    def spoil(out):
        out[:, out.float().norm(dim=0).median(dim=0).indices] = 0

    torch.manual_seed(0)
    case = bench(ffn=32_000).gate(3)
    assert error(case) <= case.tolerance
    wrong = planted(case, spoil)
    assert overall(wrong) < wrong.tolerance
    assert error(wrong) > 5 * wrong.tolerance


def test_one_wrong_row_is_an_error():
    from benchmarks.gpu_kernels_case import Case, error, result

    def spoil(out):
        out[20_000] = 0

    torch.manual_seed(0)
    want, out = torch.randn(32_000, 16).double(), torch.empty(32_000, 16).bfloat16()
    case = Case("a copy", lambda: [out.copy_(want)], lambda: (want,), (result(out),), 0, 0)
    assert error(case) <= case.tolerance
    wrong = planted(case, spoil)
    assert overall(wrong) < wrong.tolerance
    assert error(wrong) > 5 * wrong.tolerance


def test_a_wrong_sum_beside_a_right_norm_is_an_error():
    from benchmarks.gpu_kernels import error, errors

    def spoil(out, total):
        total[2, 7] += 0.001

    wrong = planted(bench().norm(3, 256), spoil)
    assert errors(wrong)["out"] <= wrong.tolerance
    assert error(wrong) > wrong.tolerance


@pytest.mark.parametrize("kind", ["norm", "rope", "slots", "rounded", "routed", "scored", "logprobs"])
def test_every_result_is_compared(kind):
    """Values that lie one place too far."""
    from benchmarks.gpu_kernels import error

    case = bench().norm(3, 256) if kind == "norm" else last_of_each()[kind]()
    assert error(case) <= case.tolerance
    for which in range(len(case.results)):

        def spoil(*results, which=which):
            bits = results[which].view(torch.uint8) if results[which].element_size() == 1 else results[which]
            bits.copy_(bits.roll(1, -1))

        wrong = planted(case, spoil)
        assert not error(wrong) <= wrong.tolerance, case.results[which].name


def test_what_is_left_unwritten_is_an_error():
    from benchmarks.gpu_kernels import error

    case = bench().norm(3, 256)
    assert error(case) <= case.tolerance
    lazy = replace(case, run=lambda: None)
    assert not error(lazy) <= lazy.tolerance
    fresh = bench().scored(3)
    lazy = replace(fresh, run=lambda: [torch.empty(3, 300)])
    assert not error(lazy) <= lazy.tolerance
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", ["chosen", "scored", "logprobs"])
def test_runs_copy_nothing_to_or_from_the_host(kind, monkeypatch):
    from roofline.backends.gpu.kernels import sample, settings

    case = last_of_each()[kind]()
    for module, name in ((settings, "to_device"), (sample, "to_host")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("a copy"))
    case.run()


def test_inputs_are_fresh_and_those_of_a_seed_can_be_made_again():
    from benchmarks.gpu_kernels import TINY, Bench
    from roofline.hardware.chips import chips

    def first(**seed):
        made = Bench(chips.get("sm_90"), "cpu", TINY, **seed)
        (want, _) = next(made.cases())().want()
        return made.seed, want

    seed, want = first()
    assert not torch.equal(first()[1], want)
    assert torch.equal(first(seed=seed)[1], want)


def test_a_matrix_is_kept_until_another_is_wanted():
    from benchmarks.gpu_kernels import error

    made = bench()
    first = made.matrix("Q4_0", 300, 256)
    assert made.matrix("Q4_0", 300, 256) is first
    assert made.matrix("Q4_0", 256, 256) is not first
    assert made.matrix("Q4_0", 300, 256) is not first
    assert len(made.kept) == 1
    case = made.widened("Q4_0", 5)
    assert error(case) <= case.tolerance
