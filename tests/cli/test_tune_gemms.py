"""roofline tune gemms, export, import, and explain of TunableOp's results; torch's tuner is a stand-in."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

from roofline.backends.gpu.runtime import dense
from roofline.backends.gpu.tuning import gemm as gemm_tuning
from roofline.backends.gpu.tuning import linear as linear_tuning
from roofline.hardware.chips import chips
from roofline.hardware.tuning import tunableop
from roofline.hardware.tuning.tunableop import TunableOpRow
from roofline.program.gemms import Gemm
from tests.command_line import call_roofline

AMD = {"PT_VERSION": "2.13.0", "ROCM_VERSION": "7.0", "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-"}
GRID = ["--batch", "1,4", "--prompt", "8"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def call(*words, code=0):
        result = call_roofline(["tune", *words])
        assert result.exit_code == code, result.output
        return result.output

    return call


def file(path, *rows, **validators):
    found = tunableop.Results(AMD | validators)
    for n, solution, ms in rows:
        found.add(TunableOpRow(*tunableop.gemm("BF16", n, 64, 128), solution, ms))
    tunableop.write(found, path)
    return str(path)


def test_what_is_imported_is_explained_and_exported(run, tmp_path):
    one = file(tmp_path / "one.csv", (1, "Gemm_Rocblas_7", 0.5), (8, "Default", 0.2))
    two = file(tmp_path / "two.csv", (1, "Gemm_Hipblaslt_9", 0.3))
    assert "2 results of gfx942, 2 with those stored before" in run("import", one, two)
    assert "1 results of gfx942, 3 with" in run("import", file(tmp_path / "three.csv", (4, "Gemm_Rocblas_1", 1.0)))
    told = run("explain", "--chip", "gfx942")
    assert "PT_VERSION 2.13.0" in told
    assert "[1, 128] @ [128, 64] BFloat16: Gemm_Hipblaslt_9, 0.3 ms" in told
    assert "3 products, 1 of them with torch's default" in told
    assert "3 results" in run("export", "--chip", "gfx942", "--tunableop", "out.csv")
    assert len(tunableop.read(tmp_path / "out.csv").rows) == 3
    assert run("explain", "--tunableop", "out.csv") == told
    assert json.loads(run("explain", "--chip", "gfx942", "--json"))["tunableop"][0]["validators"] == AMD


def test_other_versions_are_not_mixed(run, tmp_path):
    one = file(tmp_path / "one.csv", (1, "Gemm_Rocblas_7", 0.5))
    other = file(tmp_path / "other.csv", (1, "Gemm_Rocblas_8", 0.1), PT_VERSION="2.14.0")
    assert "PT_VERSION is 2.13.0 and 2.14.0" in run("import", one, other, code=1)
    run("import", one)
    run("import", other)
    assert "name one" in run("export", "--chip", "gfx942", "--tunableop", "out.csv", code=1)
    run("export", "--chip", "gfx942", "--tunableop", "out.csv", "--only", "PT_VERSION=2.14.0")
    before = (tmp_path / "out.csv").read_bytes()
    told = run("export", "--chip", "gfx942", "--tunableop", "out.csv", "--only", "PT_VERSION=2.13.0")
    assert "out-" in told
    assert (tmp_path / "out.csv").read_bytes() == before


def test_a_models_products_for_torchs_offline_tuner(run, tmp_path):
    told = run("export", "preset:smollm2-135m", "--untuned", "shapes.csv", *GRID)
    lines = (tmp_path / "shapes.csv").read_text().splitlines()
    assert f"{len(lines)} products: shapes.csv" in told
    assert "GemmTunableOp_BFloat16_TN,tn_192_4_576_ld_576_576_192" in lines  # k and v of torch's model
    assert "GemmTunableOp_BFloat16_TN,tn_960_4_576_ld_576_576_960" in lines  # q, k and v of ours
    assert "GemmTunableOp_BFloat16_TN,tn_576_32_1536_ld_1536_1536_576" in lines
    single = sum(line.split(",")[1].split("_")[2] == "1" for line in lines)
    assert f"{single} of them have one row" in told
    assert "is there already" in run("export", "preset:smollm2-135m", "--untuned", "shapes.csv", *GRID, code=1)
    block = run("export", "preset:smollm2-135m", "--untuned", "b.csv", "--weights", "random:0:Q4_0", *GRID, code=1)
    assert "no BLAS library" in block


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["export"], "say either"),
        (["export", "preset:smollm2-135m", "--tunableop", "a.csv"], "say either"),
        (["export", "--chip", "gfx942", "--tunableop", "a.csv"], "nothing is stored"),
        (["export", "--chip", "gfx942", "--tunableop", "a.csv", "--only", "new"], "not NAME=VALUE"),
        (["import", "nothing.csv"], "cannot be read"),
        (["explain", "--chip", "gfx942", "--tunableop", "a.csv"], "say one of them"),
    ],
)
def test_what_cannot_be_done_is_refused(run, words, said):
    assert said in run(*words, code=1)


def test_nothing_stored_is_said(run):
    assert "nothing is stored for gfx942" in run("explain", "--chip", "gfx942")


class FakeTunable:
    """torch.cuda.tunable: finds the second kernel of each product that it is shown."""

    def __init__(self):
        self.found, self.on, self.named = {}, [], ""

    def get_validators(self):
        return tuple(AMD.items())

    def get_results(self):
        return tuple((*key, "Gemm_Rocblas_2", 0.25) for key in self.found)

    def set_filename(self, name):
        self.named = name

    def enable(self, on=True):
        self.on.append(on)

    def is_enabled(self):
        return bool(self.on) and self.on[-1]

    def tuning_enable(self, on=True):
        pass

    def read_file(self, name):
        self.read = name


class FakeTrial:
    """A product of which the second tile is faster than torch's."""

    default, candidates, dropped = "torch", ("BLOCK_M=16 warps=1 stages=1", "BLOCK_M=16 warps=2 stages=1"), {}

    def __init__(self, gemm, chip):
        self.gemm, self.count = gemm, 0

    def seconds(self, contestant):
        self.count += 1
        return (8e-6 if "warps=2" in contestant else 1e-5) * (1 + 0.001 * (self.count % 7))


@pytest.fixture
def gpu(monkeypatch):
    """gpu(chip): torch's only device."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a product")
    monkeypatch.setattr(linear_tuning, "Trial", FakeTrial)
    return lambda chip: monkeypatch.setattr(dense, "chip_of", lambda number: chips.get(chip))


@pytest.fixture
def tunable(monkeypatch, gpu):
    import torch

    gpu("gfx942")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    fake = FakeTunable()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "tunable", fake)
    monkeypatch.setitem(sys.modules, "torch.cuda.tunable", fake)
    monkeypatch.setattr(torch, "randn", lambda *sizes, dtype, device: SimpleNamespace(sizes=sizes, dtype=dtype))

    def linear(x, w, bias):
        operator, shape = tunableop.gemm("BF16", x.sizes[0], *w.sizes, bias=bias is not None)
        assert fake.on[-1] is True
        fake.found[operator, str(shape)] = None

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    return fake


def test_a_models_products_are_tuned_kept_and_stored(run, tmp_path, tunable):
    told = run("gemms", "preset:smollm2-135m", "--out", "tuned.csv", *GRID)
    found = tunableop.read(tmp_path / "tuned.csv")
    assert f"{len(found.rows)} products to tune: at least" in told.splitlines()[0]
    assert "; 0 left, about" in told
    assert f"{len(found.rows)} results of gfx942" in told
    assert {row.solution for row in found.rows.values()} == {"Gemm_Rocblas_2"}
    assert found.validators == AMD
    assert tunable.on == [True, False] * len(found.rows) + [True]
    assert tunable.read == "tuned.csv"  # before torch's product competes
    assert not tunable.named.startswith(str(tmp_path))
    assert f"0 products to tune; {len(found.rows)} are known" in run(
        "gemms", "preset:smollm2-135m", "--out", "tuned.csv", *GRID
    )


def test_torchs_product_and_ours_compete_on_nvidia_too(run, gpu):
    gpu("sm_90")
    assert "leave it out" in run("gemms", "preset:smollm2-135m", "--out", "tuned.csv", *GRID, code=1)
    told = run("gemms", "preset:smollm2-135m", *GRID).splitlines()
    count = int(told[0].split()[0])
    assert told[0].startswith(f"{count} contests between torch's product and ours; the first says")
    assert len(told) == count + 1
    assert "BLOCK_M=16 warps=2 stages=1, faster by 20" in told[1]
    assert told[-1].endswith("0 left, about 0 us")
    explained = run("explain", "--chip", "sm_90")
    assert "torch's product or ours: a product, kernels " in explained
    assert explained.count("warps=2") == count
    assert len(json.loads(run("explain", "--chip", "sm_90", "--json"))["choices"]) == count
    assert f"0 contests between torch's product and ours; {count} are known" in run(
        "gemms", "preset:smollm2-135m", *GRID
    )


def test_contests_end_with_the_budget(run, gpu, monkeypatch):
    import time

    gpu("sm_90")
    clock = iter(range(0, 10**6, 10))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    told = run("gemms", "preset:smollm2-135m", "--budget", "100", *GRID).splitlines()
    assert told[-1].endswith("are left: run the same command again to go on")
    assert 2 <= len(told) < 8


def test_a_budget_stops_and_the_next_run_goes_on(tmp_path, tunable, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(gemm_tuning.time, "perf_counter", lambda: next(clock))
    products = [Gemm(rows, 8, 16, "BF16", rows == 2) for rows in (1, 2, 3, 4)]
    done = list(gemm_tuning.GemmTuner(tmp_path / "a.csv", products).run(budget=55))
    assert [tuned.remaining for tuned in done] == [3, 2]
    assert done[1].row.operator == "GemmAndBiasTunableOp_BFloat16_TN"
    again = gemm_tuning.GemmTuner(tmp_path / "a.csv", products)
    assert again.measured == 2
    assert again.least_seconds == pytest.approx(0.06)
    assert len(list(again.run())) == 2


def test_a_product_that_torch_runs_otherwise_is_said(tmp_path, tunable, monkeypatch):
    monkeypatch.setattr(tunable, "get_results", lambda: ())
    tuner = gemm_tuning.GemmTuner(tmp_path / "a.csv", [Gemm(1, 8, 16, "BF16", False)])
    with pytest.raises(gemm_tuning.RooflineError, match="another operation"):
        list(tuner.run())


def test_without_a_gpu_nothing_is_tuned(run):
    assert "--untuned" in run("gemms", "preset:smollm2-135m", *GRID, code=1)


def test_a_load_follows_what_is_stored_for_these_versions(run, tmp_path, tunable, caplog):
    from roofline.backends.gpu.runtime import libraries

    chip = chips.get("gfx942")
    run("import", file(tmp_path / "other.csv", (1, "Gemm_Rocblas_7", 0.5), PT_VERSION="2.14.0"))
    assert libraries.follow_store(chip) == ""
    assert "what TunableOp has chosen is not used: PT_VERSION" in caplog.text
    assert tunable.on == []
    caplog.clear()
    run("import", file(tmp_path / "one.csv", (1, "Gemm_Rocblas_7", 0.5), (8, "Default", 0.2)))
    followed = libraries.follow_store(chip)
    assert re.fullmatch(r"2 products by TunableOp \([0-9a-f]{8}\)", followed)
    assert libraries.follow_store(chip) == followed
    assert tunable.on == [True, True]
    with libraries.switched(False):
        assert tunable.on[-1] is False
    assert tunable.on[-1] is True
    assert libraries.follow_store(chips.get("sm_90")) == ""
    assert not caplog.text
