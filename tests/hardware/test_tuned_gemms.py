"""TunableOp's results in the tuning store: what is stored comes back, and other versions' stay beside it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roofline.common.errors import ConfigError
from roofline.hardware.tuning import gemms as tuned_gemms
from roofline.hardware.tuning import store as tunings
from roofline.hardware.tuning.gemms import chip_of, results_from, select_results, tunings_from
from roofline.hardware.tuning.tunableop import Results, Shape, TunableOpRow

AMD = {"PT_VERSION": "2.13.0", "ROCM_VERSION": "7.0", "GCN_ARCH_NAME": "gfx942:sramecc+:xnack-"}


def results(*rows, **validators):
    found = Results(AMD | validators)
    for row in rows:
        found.add(row)
    return found


def row(n=16, solution="Gemm_Rocblas_1", ms=0.5, rest=""):
    return TunableOpRow("GemmTunableOp_BFloat16_TN", Shape("tn", 4096, n, 11008).with_strides, solution, ms, rest)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ROOFLINE_HOME", str(tmp_path))


@given(st.lists(st.builds(row, st.integers(1, 99), st.sampled_from("abc"), st.none() | st.floats(0, 9)), max_size=6))
def test_what_is_kept_comes_back(rows):
    found = results(*rows)
    assert results_from(tunings_from(found, "gfx942", "a file")) == ([found] if rows else [])


def test_other_versions_have_a_place_of_their_own():
    old, new = results(row(ms=0.5, rest="BLAS_PARAMS: x")), results(row(ms=0.9), PT_VERSION="2.14.0")
    for found in (old, new):
        tunings.save(tunings_from(found, "gfx942", "a file"))
    stored = tuned_gemms.load("gfx942:sramecc+")
    assert {r.validators["PT_VERSION"]: r for r in results_from(stored)} == {"2.13.0": old, "2.14.0": new}
    assert select_results(results_from(stored), {"PT_VERSION": "2.14.0"}) == new
    with pytest.raises(ConfigError, match=r"2 sets .* PT_VERSION is 2\.1\d\.0 and 2\.1\d\.0; name one"):
        select_results(results_from(stored), {})
    with pytest.raises(ConfigError, match=r"nothing is stored with PT_VERSION=1"):
        select_results(results_from(stored), {"PT_VERSION": "1"})


def test_records_say_where_they_are_from():
    (record,) = tunings_from(results(row()), "gfx942", "tuned.csv").records.values()
    assert (record.regime, record.variant, record.default) == ("16 rows", "Gemm_Rocblas_1", "Default")
    assert "tuned.csv" in record.reason
    assert record.setting.build == "torch 2.13.0"


def test_what_others_stored_is_left_alone():
    store = tunings_from(results(row()), "gfx942", "a file")
    (record,) = store.records.values()
    tile = replace(record, kind="linear_quant", figures={"ratio": 0.9})
    store.records[tile.key] = tile
    assert len(results_from(store)) == 1
    damaged = replace(record, shape="tn_4")
    store.records[damaged.key] = damaged
    with pytest.raises(ConfigError, match="damaged"):
        results_from(store)


def test_the_chip_is_the_files_or_the_one_given():
    assert chip_of(results()) == "gfx942"
    assert chip_of(results(), "gfx942") == "gfx942"
    with pytest.raises(ConfigError, match="of gfx942, not of gfx90a"):
        chip_of(results(), "gfx90a")
    unnamed = Results({"PT_VERSION": "2.13.0"})
    assert chip_of(unnamed, "sm_90a") == "sm_90"
    with pytest.raises(ConfigError, match="say --chip"):
        chip_of(unnamed)
