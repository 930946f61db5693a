"""Models as torch modules beside the families' own text, in float32."""

from typing import Any

import program_builders as builders
import pytest

torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import UnsupportedError  # noqa: E402
from roofline.models.forward import forward  # noqa: E402
from roofline.ops.batch import Batch, BatchLimits, Segment  # noqa: E402
from roofline.train.config.schema import InitSection  # noqa: E402
from roofline.train.model.chunked_loss import ChunkedLoss  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import IGNORED, Model  # noqa: E402
from roofline.train.model.tensor_parallel import TensorRanks  # noqa: E402
from tests.backends import shaped_models  # noqa: E402
from tests.models.eager import LastStates, caches_of, eager_batch  # noqa: E402

B = builders.BASE
MPT = B | {"family": "mpt", "kv_heads": 4, "ffn": 256, "max_position": 64}
SHARED_KEYS = shaped_models.SHARING | {"vocab": B["vocab"]}
# Layers that attend and keep state.
BESIDE = B | {"family": "falcon_h1", "recurrent": [True] * B["layers"], "inner": 64, "states": 8, "scan_heads": 4}
BESIDE |= {"scan_norm": "behind", "rope_style": "half"}
CONFIGS = {
    "llama": B,
    "llama_untied": B | {"tied": False},
    "mistral": B | {"sliding_window": 9},
    "qwen2": builders.QWEN2,
    "qwen3": builders.QWEN3,
    "ministral3": B | {"family": "ministral3", "query_beta": 0.4, "query_context": 6},
    "arcee": B | {"family": "arcee", "activation": "relu_squared"},
    "mixtral": B | {"family": "mixtral", "experts": 5, "experts_per_token": 2},
    "qwen2_moe": builders.QWEN2
    | {"family": "qwen_moe", "experts": 4, "experts_per_token": 3, "renormalise": False, "shared_ffn": 48},
    "qwen3_5": builders.HYBRID,
    "falcon_h1": BESIDE,
    "keys of others": SHARED_KEYS,
    "mpt_learned": MPT | {"positions": "learned", "bias": True},
    "mpt_alibi": MPT | {"positions": "alibi"},
    "mpt_rope": MPT | {"kv_heads": 2, "ffn": 128, "rms": True, "gated": True, "bias": True},
}


def made(config: dict[str, Any], seed: int = 1) -> Model:
    model = Model(config, "cpu")
    initialize(model, seed, InitSection(name="baseline_", init_std=0.3))
    with torch.no_grad():
        for _, _, parameter in model.canonical():  # biases and norms too, so that none hides behind zeros and ones
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def by_spec(model: Model) -> dict[str, Any]:
    return {param.name: parameter for _, param, parameter in model.canonical()}


def reference(model: Model, rows: list[list[int]]) -> Any:
    """Logits [all tokens, vocab], each row a sequence of the plain cache."""
    tokens = sum(map(len, rows))
    batch = Batch(BatchLimits(tokens, len(rows), tokens, 64))
    batch.fill([Segment(row, 0, range(8 * i, 8 * i + 8)) for i, row in enumerate(rows)], range(tokens))
    caches, state = caches_of(model.cfg), LastStates(dict(model.cfg.state_parts))
    return forward(model.family, model.cfg, by_spec(model), eager_batch(batch, caches, range(len(rows)), state))


def some_rows(count: int = 3, length: int = 20) -> Any:
    return torch.randint(0, B["vocab"], (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_loss_and_gradients_are_those_of_the_text(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("roofline.train.model.modules.chunk_rows", lambda vocab: 7)  # chunks of 7 rows, the last of 4
    model, ids = made(CONFIGS[name]), some_rows()
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED
    expected = reference(model, ids.tolist())
    loss = torch.nn.functional.cross_entropy(expected, targets.reshape(-1), ignore_index=IGNORED, reduction="sum")
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    torch.testing.assert_close(model(ids).reshape(expected.shape), expected, rtol=1e-4, atol=2e-5)
    found = model(ids, targets)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
    (found * 0.5).backward()
    assert wanted.keys() == {n for n, p in model.named_parameters() if p.grad is not None}
    for n, p in model.named_parameters():
        assert wanted[n].abs().max() > 0, n
        torch.testing.assert_close(2 * p.grad, wanted[n], rtol=1e-3, atol=1e-4 * float(wanted[n].abs().max()))
    with torch.no_grad():
        torch.testing.assert_close(model(ids, targets), loss.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_documents_do_not_see_each_other(name: str) -> None:
    model, ids = made(CONFIGS[name]), some_rows(2)
    documents = torch.tensor([[0] * 7 + [1] * 13, [0] * 20])
    other = ids.clone()
    other[0, :7] = (other[0, :7] + 1) % B["vocab"]
    with torch.no_grad():
        a, b = model(ids, documents=documents), model(other, documents=documents)
        assert torch.equal(a[0, 7:], b[0, 7:])
        assert not torch.equal(a[0, :7], b[0, :7])
        plain = model(ids)
        torch.testing.assert_close(a[1], plain[1])
        assert (model(other)[0, 7:] - plain[0, 7:]).abs().max() > 1e-3  # without them everything is seen


def test_chunks_of_16_bit_weights_are_added_in_float32() -> None:
    """In bf16 a sum of ones stops at 256."""
    weight = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)
    x = torch.ones(1024, 4, dtype=torch.bfloat16)

    def loss(targets: Any, rows: Any, w: Any) -> Any:
        return (rows * w).float().sum()

    found = ChunkedLoss.apply(loss, 1, True, x, torch.zeros(1024, dtype=torch.int64), weight)
    found.backward()
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [1024.0] * 4


def test_a_document_alone_has_the_logits_that_it_has_among_others() -> None:
    model, ids = made(builders.HYBRID), some_rows(2, 90)
    documents = torch.tensor([[0] * 3 + [1] * 70 + [2] * 17, [0] * 66 + [1] * 24])
    with torch.no_grad():
        packed = model(ids, documents=documents)
        for row, start, stop in ((0, 0, 3), (0, 3, 73), (0, 73, 90), (1, 0, 66), (1, 66, 90)):
            model.restarts = True
            alone = model(ids[row : row + 1, start:stop])[0]
            again = model(ids, documents=documents)[row, start:stop]
            torch.testing.assert_close(again, alone, rtol=1e-4, atol=2e-5)
        assert (packed[0, 3:73] - model(ids)[0, 3:73]).abs().max() > 1e-3


@pytest.mark.parametrize("config", [builders.HYBRID, shaped_models.BASE], ids=["qwen3_5", "sizes by layer"])
def test_layers_with_state_or_of_several_sizes_are_divided_among_no_ranks(config: Any) -> None:
    with pytest.raises(UnsupportedError, match=f"tensor_parallel=2 of a {config['family']} model"):
        Model(config, ranks=TensorRanks(0, 2))


@pytest.mark.parametrize("context", [None, "selective"])
@pytest.mark.parametrize("config", [B, builders.HYBRID, SHARED_KEYS], ids=["llama", "qwen3_5", "keys of others"])
def test_checkpointed_blocks_give_the_same_gradients(config: Any, context: Any) -> None:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    ids = some_rows()
    plain, again = made(config), made(config)
    kept = [torch.ops.aten.mm.default]
    again.checkpoint_activations((lambda: create_selective_checkpoint_contexts(kept)) if context else None)
    for model in (plain, again):
        model(ids, ids).backward()
    for (n, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        if context:  # attention is torch's then, whose result can be kept
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(a.grad, b.grad), n


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (B | {"layers": 3}, 1),
        pytest.param(CONFIGS["ministral3"] | {"layers": 3}, 1, marks=pytest.mark.slow),
        pytest.param(CONFIGS["arcee"] | {"layers": 3}, 1, marks=pytest.mark.slow),
        (builders.HYBRID, 2),
    ],
    ids=["llama", "ministral3", "arcee", "qwen3_5"],
)
def test_compiled_blocks_are_compiled_once_for_each_kind_and_agree(config: Any, kinds: int) -> None:
    from torch._dynamo.testing import CompileCounter

    ids = some_rows()
    plain, compiled = made(config), made(config)
    torch._dynamo.reset()  # what other cases compiled counts against its limit of compilations
    counter = CompileCounter()
    compiled.compile(backend=counter)
    for model in (plain, compiled):
        model(ids, ids).backward()
    assert counter.frame_count == kinds + 1  # one for all blocks of a kind, one for the head
    for (n, a), b in zip(plain.named_parameters(), compiled.named_parameters(), strict=True):
        assert n == b[0]
        torch.testing.assert_close(a.grad, b[1].grad)


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mpt"])
def test_parameters_have_the_names_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the names are its")
    if kind == "Mpt":
        config = transformers.MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=96, no_bias=True)
        ours: dict[str, Any] = CONFIGS["mpt_alibi"]
    else:
        ours = CONFIGS[kind.lower()]
        config = getattr(transformers, f"{kind}Config")(
            **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"head_dim": 16, "intermediate_size": 128, "vocab_size": 96, "tie_word_embeddings": ours["tied"]},
        )
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    shapes = {n: p.shape for n, p in theirs.named_parameters()}
    assert {n: p.shape for n, p in Model(ours).named_parameters()} == shapes


def test_the_start_is_a_function_of_seed_and_name() -> None:
    a, b, other = (Model(CONFIGS["mpt_learned"], "cpu") for _ in range(3))
    for model, seed in ((a, 5), (b, 5), (other, 6)):
        initialize(model, seed, InitSection(name="kaiming_normal_"))
    for (n, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), n
    weight = dict(a.named_parameters())["transformer.blocks.0.ffn.up_proj.weight"]
    assert not torch.equal(weight, dict(other.named_parameters())["transformer.blocks.0.ffn.up_proj.weight"])
    assert weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.05)
    down = dict(a.named_parameters())["transformer.blocks.0.ffn.down_proj.weight"]
    assert down.std().item() == pytest.approx((2 / 256 / 4) ** 0.5, rel=0.05)
