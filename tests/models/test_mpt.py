"""MPT with LLM Foundry's switches, each alone and together, against plain torch: logits and gradients."""

from pathlib import Path
from typing import Any

import pytest

from roofline.models.forward import forward
from roofline.models.registry import configure
from roofline.models.spec import check, expand
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.weights.config.hf import from_hf
from roofline.weights.names import to_hf
from tests.models.eager import ContiguousCache, eager_batch

torch = pytest.importorskip("torch", reason="parity runs both models in torch")

from tests.models.mpt_in_torch import logits as plain_logits  # noqa: E402

ROPE = {"alibi": False, "rope": True}
LINEAR = ROPE | {"rope_impl": "hf", "rope_hf_config": {"type": "linear", "factor": 4.0}, "rope_theta": 5e5}
GROUPED = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
GLU = {"ffn_type": "mptglu"}
SILU_GLU = GLU | {"ffn_hidden_size": 96, "ffn_act_fn": {"name": "silu"}}
CASES: dict[str, dict[str, Any]] = {
    "rope": {"attn_config": ROPE},
    "rope, linear": {"attn_config": LINEAR, "no_bias": False},
    "grouped queries": {"attn_config": {"alibi": True} | GROUPED},
    "one head of k and v": {"attn_config": {"alibi": True, "attn_type": "multiquery_attention"}},
    "gated": {"attn_config": {"alibi": True}, "ffn_config": GLU},
    "gated, with biases": {"attn_config": {"alibi": False}, "ffn_config": GLU, "no_bias": False},
    "gated by silu": {"attn_config": {"alibi": True}, "ffn_config": SILU_GLU},
    "silu": {"attn_config": {"alibi": True}, "ffn_config": {"ffn_act_fn": {"name": "silu"}}},
    "gelu by tanh": {
        "attn_config": {"alibi": True},
        "ffn_config": {"ffn_act_fn": {"name": "gelu", "approximate": "tanh"}},
    },
    "rms norms": {"attn_config": {"alibi": True}, "norm_type": "low_precision_rmsnorm"},
    "rms norms beside biases": {"attn_config": {"alibi": False}, "norm_type": "rmsnorm", "no_bias": False},
    "together": {"attn_config": ROPE | GROUPED, "ffn_config": SILU_GLU, "norm_type": "rmsnorm"},
    "together, with biases": {"attn_config": LINEAR | GROUPED, "ffn_config": GLU, "norm_type": "rmsnorm"}
    | {"no_bias": False, "tie_word_embeddings": False},
}
BASE = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 96, "max_seq_len": 64}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_are_those_of_plain_torch(name: str) -> None:
    foundry = BASE | CASES[name]
    family, cfg = configure(from_hf(Path("config.json"), foundry))
    table = [p for p in expand(family.spec(cfg), cfg.layers) if p.tied_to is None]
    random = torch.Generator().manual_seed(3)
    w = {p.name: torch.randn(p.shape, generator=random) * 0.15 + p.name.endswith("norm.weight") for p in table}
    check(table, {name: tuple(tensor.shape) for name, tensor in w.items()})
    theirs = {to_hf("mpt", n): t.clone().requires_grad_() for n, t in w.items()}
    mine = {n: t.requires_grad_() for n, t in w.items()}
    ids = torch.randint(0, cfg.vocab, (40,), generator=random)
    batch = Batch(BatchLimits(40, 1, 40, 64))
    batch.fill([Segment(ids.tolist(), 0, range(4))], range(40))
    got = forward(family, cfg, mine, eager_batch(batch, ContiguousCache(cfg.kv_heads), [0]))
    expected = plain_logits(theirs, ids, foundry)
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    got.square().mean().backward()
    expected.square().mean().backward()
    for n, parameter in mine.items():
        other = theirs[to_hf("mpt", n)].grad
        assert other is not None, n
        assert other.abs().max() > 0, n
        torch.testing.assert_close(parameter.grad, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_no_case_is_another_one() -> None:
    """A switch that changed nothing would pass beside a plain model that has it not either."""
    configs = [from_hf(Path("config.json"), BASE | case) for case in CASES.values()]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])
