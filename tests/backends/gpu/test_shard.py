"""Ranks of the gpu backend in Triton's interpreter, as threads that take turns, beside the reference's ranks."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.models import registry
from roofline.models.config import ModelConfig
from roofline.ops.batch import BatchLimits, Segment
from roofline.program import target
from roofline.program.compile import compile_program
from roofline.program.ir import Share
from roofline.weights.random_weights import random_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "program"))  # thread_ranks

from thread_ranks import Member, Threads

torch = pytest.importorskip("torch")
LLAMA = {
    "family": "llama", "width": 128, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 256, "vocab": 300,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "rope_style": "half", "max_position": 512,
    "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None,
}  # fmt: skip
MODELS = {
    "llama": (LLAMA, "BF16"),
    "two layers": ({**LLAMA, "layers": 2}, "BF16"),
    "qwen": ({**LLAMA, "family": "qwen", "attention_bias": True}, "Q4_1"),
    "compressed rows": (
        {**LLAMA, "family": "youtu", "kv_heads": 4, "head_dim": 24, "rotary_dim": 8, "kv_rank": 32, "value_dim": 16}
        | {"latent": True, "rope_style": "interleaved"},
        "BF16",
    ),
    "alibi": ({**LLAMA, "family": "mpt", "kv_heads": 4, "positions": "alibi", "bias": True}, "F16"),
}
LIMITS = BatchLimits(tokens=64, segments=4, rows=8, pages=64)
IDS = np.random.default_rng(0).integers(0, 300, 40).tolist()
CHUNKS = [
    ([Segment(IDS[:21], 0, [3, 7])], [20]),
    ([Segment(IDS[:9], 0, [2])], []),
    ([Segment(IDS[21:22], 21, [3, 7]), Segment(IDS[:17], 0, [1, 5])], [0, 17]),
]


def program(name, exact, share):
    config, form = MODELS[name]
    source = random_checkpoint(config, seed=3, form=form)
    cfg = registry.config_of(source.config)
    wanted = target.gpu("f16" if form == "F16" else "bf16", exact)
    return compile_program(registry.get(cfg.family), cfg, source.tensors, wanted, share=share), source


def executable(kind, name, exact, share, group):
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    made, source = program(name, exact, share)
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 128, "weights_hash": "7e57", "group": group}
    if kind == "reference":
        return ReferenceExecutable(made, source.read, **shape)
    return GpuExecutable(made, source.read, Runtime(chips.get("sm_90"), "cpu", exact), **shape)


def logits(kind, name, steps=CHUNKS, exact=False):
    """Of two ranks, all steps one after the other."""

    def work(member: Member):
        mine = executable(kind, name, exact, Share(member.rank, 2), member)
        found = []
        for segments, rows in steps:
            mine.batch.fill(segments, rows)
            mine.forward()
            found.append(np.array(mine.logits()))
        return np.concatenate(found)

    return Threads(2, in_turn=True).run(work)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("two layers", "qwen", "compressed rows")), "alibi"],
)
def test_ranks_equal_the_reference_s_ranks(name):
    """Up to where 16-bit rounding falls."""
    gpu, reference = logits("gpu", name), logits("reference", name)
    assert gpu[0].shape == (3, 300)
    assert np.array_equal(gpu[0], gpu[1])
    assert np.linalg.norm(gpu[0] - reference[0]) < 0.02 * np.linalg.norm(reference[0])


def test_exact_ranks_do_not_depend_on_company_or_chunks():
    whole = logits("gpu", "llama", [([Segment(IDS[:20], 0, [0, 1])], [19])], exact=True)
    pieces = [([Segment(IDS[:9], 0, [2, 3])], [8]), ([Segment(IDS[9:20], 9, [2, 3]), Segment(IDS[:5], 0, [4])], [10])]
    chunked = logits("gpu", "llama", pieces, exact=True)
    assert np.array_equal(whole[0][0], chunked[0][1])


def test_a_part_alone_is_refused():
    with pytest.raises(UnsupportedError, match="a Program for 2 ranks is not supported: there are 1 here"):
        executable("gpu", "llama", False, Share(0, 2), None)


def test_loading_makes_each_rank_s_part_with_the_fewest_pages_that_any_can_hold(monkeypatch):

    from roofline.backends import table
    from roofline.backends.backend import LoadRequest
    from roofline.backends.capacity import Capacity
    from roofline.backends.gpu import devices
    from roofline.backends.gpu.measure import roofs
    from roofline.backends.gpu.tuning import linear as linear_tuning
    from roofline.backends.options import LoadOptions
    from roofline.backends.parallel.executable import ParallelExecutable
    from roofline.backends.parallel.ranks import RankGrid
    from roofline.backends.sampling import SampleRows
    from roofline.hardware.gpus.device import Device

    def find(wanted, rank, ranks):
        room = (48 + 8 * rank) << 20
        device = Device("nvidia", rank, "H100", "sm_90", memory=room, torch=rank)
        return SimpleNamespace(device=device, chip=chips.get("sm_90"), free=room, number=rank, torch_name="cpu")

    monkeypatch.setattr(devices, "find", find)
    monkeypatch.setattr(linear_tuning, "stored_choices", lambda *_: ({}, "never tuned"))
    monkeypatch.setattr(roofs, "ensure_op_roofs", lambda *_: None)  # measuring a CPU as if it were a GPU takes minutes
    config, form = MODELS["llama"]
    source = random_checkpoint(config, seed=3, form=form)
    segments, rows = CHUNKS[0]

    def work(member: Member):
        grid = RankGrid(2)
        ranks = SimpleNamespace(
            **{name: getattr(member, name) for name in ("size", "sum", "gather", "rank")}, grid=grid,
            share=grid.share(member.rank), share_batch=lambda _: None, close=lambda: None,
            least=lambda n: min(int(x) for x in member.threads.exchange(member.rank, torch.tensor(n))),
        )  # fmt: skip
        options = LoadOptions(backend="gpu", max_model_len=128, tensor_parallel=2)
        request = LoadRequest(source, ModelConfig.of(config), options, Capacity(LIMITS, 128, 0))
        inner, _ = table.get("gpu").make_share(request, ranks)
        inner.batch.fill(segments, rows)
        if member.rank == 1:
            inner.run({})
            return inner.num_pages, None
        whole = ParallelExecutable(inner, ranks, vocab_size=300, watch=None)
        whole.forward()
        return inner.num_pages, (whole.logits(), whole.sample(SampleRows.greedy(1)).ids.tolist())

    (pages, found), (others, _) = Threads(2, in_turn=True).run(work)
    assert pages == others
    want = logits("gpu", "llama", CHUNKS[:1])[0]
    assert np.array_equal(found[0], want)
    assert found[1] == [int(want[0].argmax())]
