"""The ladder: rungs and what they exclude, why one is missing, and the same tokens from every technique."""

import json

import pytest

from roofline.bench.latency import ladder, runners
from roofline.bench.latency.ladder import Rung, explained, missing, rungs
from roofline.bench.latency.runners import Most, Opened, Subject
from roofline.bench.peers.available import Here
from roofline.common.errors import ConfigError

LLAMA = {"family": "llama"}
ALL = {"torch": "2.13", "triton": "3.7", "transformers": "5", "xformers": "0.1"}
CPU = Here("cpu", "a CPU", versions=ALL)
AMD = Here("cuda", "AMD Instinct MI210", "amd", ALL)
NVIDIA = Here("cuda", "NVIDIA H200", "nvidia", ALL)


def why(name, here, config=LLAMA, backends=("cpu", "gpu"), native=True):
    (rung,) = rungs(name)
    return missing(rung, here, config, backends, native)


def test_the_whole_ladder_and_what_techniques_bring_along():
    assert [rung.name for rung in rungs()] == list(ladder.LADDER)
    assert ladder.LADDER[0] == "eager"
    assert rungs("eager")[0].techniques == frozenset()
    assert rungs("static") == [Rung("static", frozenset({"static", "compile"}))]
    assert rungs("graphs")[0].ours
    assert rungs("flash + tuned, paged+tuned")[1].techniques == {"paged", "tuned"}
    assert not rungs("flash+tuned")[0].ours


def test_every_technique_is_explained():
    for rung in rungs():
        said = explained(rung)
        assert said["phases"][0] in ("neither phase", "prefill", "decode", "both phases")
        assert 30 < len(said["why"]) < 240
        assert said["why"].endswith(".")
    both = explained(rungs("flash+tuned")[0], "no GPU")
    assert both["phases"] == ["prefill", "both phases"]
    assert both["missing"] == "no GPU"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("egaer", "did you mean 'eager'"),
        ("sdpa+flash", "cannot be combined"),
        ("flash+paged", "flash cannot be combined with paged|paged cannot be combined with flash"),
        ("graphs+static", "cannot be combined"),
        ("graphs,paged+graphs", "same rung"),
        ("eager,eager", "same rung"),
        (" , ", "there are no rungs"),
    ],
)
def test_what_cannot_be_a_ladder_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        rungs(text)


def test_what_runs_where():
    runs = {here.name: {rung.name for rung in rungs() if not why(rung.name, here)} for here in (CPU, AMD, NVIDIA)}
    assert runs["a CPU"] == {"eager", "compile", "static", "flash", "paged"}
    assert runs["AMD Instinct MI210"] == set(ladder.LADDER)
    assert runs["NVIDIA H200"] == set(ladder.LADDER) - {"tuned"}
    assert not why("static+flash", CPU)
    assert not why("paged+tuned", CPU)


@pytest.mark.parametrize(
    ("name", "here", "given", "said"),
    [
        ("eager", Here("cpu", "a CPU"), {}, "torch is not installed"),
        ("eager", Here("cpu", "a CPU", versions={"torch": "2"}), {}, "transformers is not installed"),
        ("compile", Here("cpu", "a CPU", versions=ALL, compiler=False), {}, r"C\+\+ compiler"),
        ("compile", Here("cuda", "a GPU", "amd", ALL, compiler=False), {}, "triton"),
        (
            "xformers",
            Here("cuda", "a GPU", "amd", {"torch": "2", "transformers": "5"}),
            {},
            "xformers is not installed",
        ),
        ("static+flash", AMD, {}, r"static\+sdpa runs"),
        ("flash", CPU, {"config": {"family": "mpt"}}, "mpt"),
        ("eager", CPU, {"config": {"family": "mpt", "positions": "learned"}}, "no learned positions"),
        ("eager", CPU, {"config": {"family": "mpt", "positions": "rope"}}, "has only ALiBi, one MLP and layer norms"),
        ("graphs", CPU, {}, "no kernel launches"),
        ("paged", CPU, {"native": False}, "not built"),
        ("paged", AMD, {"backends": ("cpu",)}, "no gpu backend"),
        ("tuned", NVIDIA, {}, "its one candidate is the default"),
    ],
)
def test_a_missing_rung_has_its_reason(name, here, given, said):
    import re

    assert re.search(said, why(name, here, **given))


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """The folder of a tiny Llama's config.json, with grouped heads."""
    from roofline.weights.to_hf import hf_config

    config = {
        "family": "llama", "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 128,
        "vocab": 96, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half",
        "max_position": 128, "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(hf_config(config)))
    return Subject(str(folder), config)


@pytest.fixture(scope="module")
def model(shape):
    """transformers' model of it in float32: bf16 ties would be broken differently by every kernel."""
    pytest.importorskip("transformers")
    from roofline.bench.peers.transformers_model import random_model
    from roofline.weights.to_hf import hf_config

    return random_model(hf_config(shape.config), "cpu", threads=1).float()


def tokens(model, *techniques):
    from roofline.bench.peers.transformers_model import TransformersRunner

    runner = TransformersRunner(model, frozenset(techniques))
    assert runner.prefill(2, 9) > 0
    assert runner.ids.shape == (2, 1)
    found = []
    for _ in range(2):  # a cache that is used again begins empty
        assert runner.decode(2, 5, 6) > 0
        found.append(runner.ids.tolist())
    runner.close()
    assert found[0] == found[1]
    return found[0]


def test_attention_kernels_give_the_same_tokens(model):
    plain = tokens(model)
    assert len(plain[0]) == 7
    assert len({tuple(row) for row in plain}) == 2  # prompts differ
    assert tokens(model, "flash") == plain
    assert tokens(model) == plain  # what a runner sets, the next one does not keep


def test_a_kernel_that_is_not_there_is_an_error_and_not_another_kernel(model):
    from roofline.bench.peers.transformers_model import TransformersRunner
    from roofline.common.errors import UnsupportedError

    with pytest.raises(UnsupportedError, match="transformers with sdpa"):
        TransformersRunner(model, frozenset({"sdpa"})).prefill(1, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "techniques",
    [
        *(pytest.param(each, marks=pytest.mark.soak) for each in (("compile",), ("compile", "static"))),
        ("compile", "static", "flash"),
    ],
)
def test_compiled_rungs_give_the_same_tokens(model, techniques):
    assert tokens(model, *techniques) == tokens(model)


def test_xformers_is_given_what_it_takes(model, monkeypatch):
    """Its library stands in for itself: shapes [batch, queries, heads, dim], a triangle or a bias."""
    import sys
    from types import ModuleType

    import torch

    class Triangle:
        pass

    def attention(query, key, value, attn_bias, scale):
        assert query.shape[2] == key.shape[2] == 4
        turned = [x.transpose(1, 2) for x in (query, key, value)]
        causal = isinstance(attn_bias, Triangle)
        mask = None if causal else attn_bias
        return torch.nn.functional.scaled_dot_product_attention(
            *turned, attn_mask=mask, is_causal=causal, scale=scale
        ).transpose(1, 2)

    module = ModuleType("xformers.ops")
    module.LowerTriangularMask, module.memory_efficient_attention = Triangle, attention
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", module)
    assert tokens(model, "xformers") == tokens(model)


def test_our_engine_runs_whole_batches(shape):
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    most = Most(batch=3, tokens=3 * 40, length=40, started=3)
    runner = runners.EngineRunner(shape, "cpu", most, tuned=False, threads=1)
    watched = runner._bench.watched
    assert runner.prefill(3, 20) > 0
    assert sum(work[1] for work in watched.works) == 60  # prompt tokens
    assert runner.decode(3, 1, 7) > 0
    assert [work[1] for work in watched.works] == [3] * 7
    assert runner.notes() == runner.loaded.notes
    assert runner.serves(tuned=False)
    assert not runner.serves(tuned=True)
    other = runners.EngineRunner(shape, "cpu", most, tuned=False, threads=1, shares_model_of=runner)
    assert other.loaded is runner.loaded
    other.close()
    assert runner.prefill(3, 20) > 0, "the other has closed nothing"
    with pytest.raises(ConfigError, match="more than the"):
        runner.decode(600, 20, 1)
    assert not runner._bench.engine.has_work, "what an error left is not timed with the next run"
    runner.close()


def test_rungs_open_or_are_missing_and_share_one_model(shape, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("roofline._native", reason="the C++ core is not built")
    from roofline.bench.peers.available import here

    most = Most(batch=2, tokens=2 * 16, length=16, started=2)
    opened = runners.open_rungs(rungs("eager,sdpa,flash,paged,paged+tuned"), shape, here("cpu"), most, 1)
    assert list(opened.runners) == ["eager", "flash", "paged"]
    assert opened.runners["eager"].model is opened.runners["flash"].model
    assert "for CPUs" in opened.missing["sdpa"]
    assert "never tuned" in opened.missing["paged+tuned"]
    assert "roofline tune" in opened.missing["paged+tuned"]
    opened.close()


@pytest.mark.parametrize(
    ("variants", "threads", "remedy"),
    [
        ("default (never tuned)", None, "roofline tune preset:p --weights random:3, then this again"),
        ("default (measured with avx2, 4 threads, this is avx2, 2 threads)", 2, "--weights random:3 --threads 2, then"),
        ("default (ROOFLINE_TUNED=off)", None, "without that variable"),
        ("default (tuned: no choice made this model faster)", None, ""),
    ],
)
def test_a_remedy_is_never_what_was_just_done(variants, threads, remedy):
    subject = runners.Subject("preset:p", {}, seed=3)
    error = runners._without_tuned(variants, subject, "cpu", threads)
    assert (f"Use instead: {remedy}" if remedy.startswith("roofline") else remedy) in str(error)
    assert bool(error.alternatives) == bool(remedy)
    if not remedy:
        assert "every default stayed" in error.reason


def test_the_reasons_are_those_of_loads(monkeypatch):
    from roofline.backends.cpu import select
    from roofline.hardware.tuning.location import NOTHING_WON, SWITCHED_OFF

    assert (select.NOTHING_WON, select.SWITCHED_OFF) == (NOTHING_WON, SWITCHED_OFF)
    monkeypatch.setenv("ROOFLINE_TUNED", "off")
    assert select.choose_variants(None).reason == SWITCHED_OFF


def test_closing_closes_all():
    class Closing:
        def close(self):
            closed.append(self)

    closed = []
    Opened({"one": Closing(), "two": Closing()}).close()
    assert len(closed) == 2
