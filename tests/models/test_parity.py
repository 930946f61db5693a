"""Every family against transformers on small random configurations, in float32."""

from typing import Any

import program_builders as builders
import pytest

from roofline.models.forward import forward
from roofline.models.registry import configure
from roofline.models.spec import check, expand
from roofline.ops.batch import Batch, BatchLimits, Segment
from roofline.weights.names import from_hf
from tests.models.eager import ContiguousCache, eager_batch

torch = pytest.importorskip("torch", reason="parity runs both models in torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers' models")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
B = builders.BASE
MPT = {"family": "mpt", "kv_heads": 4, "ffn": 256, "positions": "alibi", "tied": True}
MIXTURE = {"experts": 6, "experts_per_token": 2}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "llama2": (B | {"kv_heads": 4, "tied": False}, "Llama"),
    "llama3": (B | {"rope_scaling": LLAMA3, "rope_theta": 5e5, "tied": False}, "Llama"),
    "llama_linear": (B | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "Llama"),
    "llama_bias_free_head_dim": (B | {"head_dim": 32}, "Llama"),
    "smollm2": (B | {"width": 72, "heads": 9, "kv_heads": 3, "head_dim": 8, "rope_theta": 1e5}, "Llama"),
    "mistral_window": (B | {"sliding_window": 9, "tied": False}, "Mistral"),
    "qwen2": (B | {"family": "qwen", "attention_bias": True, "tied": False}, "Qwen2"),
    "qwen2.5_tied": (B | {"family": "qwen", "attention_bias": True, "norm_eps": 1e-6}, "Qwen2"),
    "qwen2.5_yarn": (B | {"family": "qwen", "attention_bias": True, "rope_scaling": YARN}, "Qwen2"),
    "qwen3": (B | {"family": "qwen", "qk_norm": True, "head_dim": 32}, "Qwen3"),
    "mixtral": (B | MIXTURE | {"family": "mixtral", "tied": False}, "Mixtral"),
    "qwen2_moe": (
        B | MIXTURE | {"family": "qwen_moe", "attention_bias": True, "renormalise": False, "shared_ffn": 80},
        "Qwen2Moe",
    ),
    "qwen3_moe": (B | MIXTURE | {"family": "qwen_moe", "qk_norm": True, "head_dim": 32}, "Qwen3Moe"),
    "mpt_released": (B | MPT, "Mpt"),
    "mpt_six_heads": (B | MPT | {"width": 48, "heads": 6, "kv_heads": 6, "head_dim": 8, "ffn": 192}, "Mpt"),
}


def theirs(config: dict[str, Any], kind: str) -> Any:
    """transformers' model with random weights; norms and biases too, so that none hides behind ones and zeros."""
    if kind == "Mpt":
        return _random(transformers.MptForCausalLM(_mpt_config(config)))
    rope = {"rope_theta": config["rope_theta"], **(config["rope_scaling"] or {"rope_type": "default"})}
    fields: dict[str, Any] = {
        "hidden_size": config["width"],
        "num_hidden_layers": config["layers"],
        "num_attention_heads": config["heads"],
        "num_key_value_heads": config["kv_heads"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["ffn"],
        "vocab_size": config["vocab"],
        "rms_norm_eps": config["norm_eps"],
        "max_position_embeddings": config["max_position"],
        "tie_word_embeddings": config["tied"],
        "rope_parameters": rope,
        "rope_theta": config["rope_theta"],
    }
    if config["rope_scaling"]:
        fields["rope_scaling"] = config["rope_scaling"]
    if "experts" in config:
        fields |= {"num_local_experts": config["experts"], "num_experts": config["experts"]}
        fields |= {"num_experts_per_tok": config["experts_per_token"], "moe_intermediate_size": config["ffn"]}
        fields |= {"norm_topk_prob": config.get("renormalise", True)}
        fields |= {"shared_expert_intermediate_size": config.get("shared_ffn", 0)}
    if kind == "Mistral":
        fields["sliding_window"] = config["sliding_window"]
    built = getattr(transformers, f"{kind}Config")(**fields, attn_implementation="eager")
    return _random(getattr(transformers, f"{kind}ForCausalLM")(built))


def _mpt_config(config: dict[str, Any]) -> Any:
    return transformers.MptConfig(
        d_model=config["width"],
        n_heads=config["heads"],
        n_layers=config["layers"],
        expansion_ratio=config["ffn"] // config["width"],
        max_seq_len=config["max_position"],
        vocab_size=config["vocab"],
        layer_norm_epsilon=config["norm_eps"],
        no_bias=True,
        attn_config={"alibi": True},
        tie_word_embeddings=config["tied"],
    )


def _random(model: Any) -> Any:
    torch.manual_seed(0)
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.1 + ("norm" in name))
    return model


def _with_matrices_apart(tensors: dict[str, Any], family: str) -> dict[str, Any]:
    """transformers' tensors under the names of files, its experts' gates and ups, which it has as [experts, 2 * ffn, width], by themselves and
    one below the other, as ours are; names as our modules for training have them."""
    apart = {}
    for name, value in tensors.items():
        within, experts, part = name.rpartition(".mlp.experts.")
        if part == "gate_up_proj":
            gate, up = value.chunk(2, dim=1)
            apart[f"{within}{experts}gate_proj.weight"] = gate.flatten(0, 1)
            apart[f"{within}{experts}up_proj.weight"] = up.flatten(0, 1)
        elif part == "down_proj":
            apart[f"{within}{experts}down_proj.weight"] = value.flatten(0, 1)
        else:
            apart[name.replace(".mlp.gate.", ".block_sparse_moe.gate.") if family == "mixtral" else name] = value
    return apart


def ours(config: dict[str, Any], model: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Family, configuration and their parameters under our names."""
    family, cfg = configure(config)
    parameters = {}
    for name, value in _with_matrices_apart(model.state_dict(), config["family"]).items():
        mine = from_hf(config["family"], name)
        assert mine is not None, name
        if not (config["tied"] and mine == "head.weight"):
            parameters[mine] = value
    check(expand(family.spec(cfg), cfg.layers), {name: tuple(p.shape) for name, p in parameters.items()})
    return family, cfg, parameters


def batch_of(segments: list[Segment], cache: ContiguousCache, sequences: list[int]) -> Any:
    tokens = sum(len(s.ids) for s in segments)
    batch = Batch(BatchLimits(tokens, len(segments), tokens, 64))
    batch.fill(segments, range(tokens))
    return eager_batch(batch, cache, sequences)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str) -> None:
    config, kind = CASES[name]
    model = theirs(config, kind)
    family, cfg, parameters = ours(config, model)
    ids = torch.randint(0, config["vocab"], (90,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
        batch = batch_of([Segment(ids.tolist(), 0, range(6))], ContiguousCache(cfg.kv_heads), [0])
        logits = forward(family, cfg, parameters, batch)
    assert expected.std() > 0.1
    assert (logits - expected).abs().max() < 1e-4


def test_chunks_and_neighbours_give_the_same_logits() -> None:
    config, kind = CASES["mistral_window"]
    family, cfg, parameters = ours(config, theirs(config, kind))
    ids = list(range(30))
    with torch.no_grad():
        whole = forward(family, cfg, parameters, batch_of([Segment(ids, 0, [0, 1])], ContiguousCache(2), [0]))
        first = batch_of([Segment(ids[:11], 0, [0]), Segment([5, 6], 0, [1])], ContiguousCache(2), [7, 8])
        a = forward(family, cfg, parameters, first)[:11]
        second = batch_of([Segment([9], 2, [1]), Segment(ids[11:], 11, [0, 2])], first.cache, [8, 7])
        b = forward(family, cfg, parameters, second)[1:]
    assert (torch.cat([a, b]) - whole).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama2", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_gradients_reach_every_parameter_and_equal_transformers(name: str) -> None:
    config, kind = CASES[name]
    model = theirs(config, kind)
    family, cfg, parameters = ours(config, model)
    parameters = {k: v.clone().requires_grad_() for k, v in parameters.items()}
    ids = torch.arange(20)
    forward(
        family, cfg, parameters, batch_of([Segment(ids.tolist(), 0, range(2))], ContiguousCache(cfg.kv_heads), [0])
    ).square().mean().backward()
    model(ids[None]).logits.square().mean().backward()
    theirs_by_name = _with_matrices_apart({name: p.grad for name, p in model.named_parameters()}, cfg.family)
    for hf_name, gradient in theirs_by_name.items():
        mine = parameters[from_hf(cfg.family, hf_name)].grad
        assert mine is not None, hf_name
        assert mine.abs().max() > 0, hf_name
        assert (mine - gradient).abs().max() < 1e-4, hf_name


def test_call_block_wraps_every_layer_and_may_run_it_twice() -> None:
    config, kind = CASES["llama2"]
    family, cfg, parameters = ours(config, theirs(config, kind))
    seen = []

    def twice(block: Any, cfg: Any, w: Any, x: Any, layer: int, batch: Any) -> Any:
        seen.append(layer)
        before = batch.cache
        block(cfg, w, x, layer, batch)
        batch.cache = before  # caches are values: the first run left nothing behind
        return block(cfg, w, x, layer, batch)

    segment = [Segment([1, 2, 3], 0, [0])]
    with torch.no_grad():
        plain = forward(family, cfg, parameters, batch_of(segment, ContiguousCache(4), [0]))
        wrapped = forward(family, cfg, parameters, batch_of(segment, ContiguousCache(4), [0]), twice)
    assert seen == [0, 1]
    assert torch.equal(plain, wrapped)


def test_mpt_with_learned_positions_and_biases_equals_torch_encoder_layers() -> None:
    config = B | MPT | {"positions": "learned", "bias": True, "max_position": 32}
    family, cfg = configure(config)
    table = expand(family.spec(cfg), cfg.layers)
    torch.manual_seed(3)
    w = {p.name: torch.randn(p.shape) * 0.1 + ("norm.weight" in p.name) for p in table if p.tied_to is None}
    ids = torch.randint(0, cfg.vocab, (17,))
    x = (w["embed.weight"][ids] + w["positions.weight"][:17])[None]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(17)
    for i in range(cfg.layers):
        layer = torch.nn.TransformerEncoderLayer(
            cfg.width, cfg.heads, cfg.ffn, 0.0, "gelu", cfg.norm_eps, batch_first=True, norm_first=True
        ).eval()
        theirs = {"norm1": "attn_norm", "norm2": "mlp_norm", "self_attn.out_proj": "attn.o"}
        theirs |= {"linear1": "mlp.up", "linear2": "mlp.down"}
        state = {
            f"{t}.{kind}": w[f"layers.{i}.{mine}.{kind}"] for t, mine in theirs.items() for kind in ("weight", "bias")
        }
        state |= {f"self_attn.in_proj_{kind}": w[f"layers.{i}.attn.qkv.{kind}"] for kind in ("weight", "bias")}
        layer.load_state_dict(state)
        with torch.no_grad():
            x = layer(x, src_mask=mask)
    x = torch.nn.functional.layer_norm(x[0], (cfg.width,), w["final_norm.weight"], w["final_norm.bias"], cfg.norm_eps)
    batch = batch_of([Segment(ids.tolist(), 0, range(17))], ContiguousCache(cfg.kv_heads), [0])
    got = forward(family, cfg, w, batch)
    torch.testing.assert_close(got[-1], x[-1] @ w["embed.weight"].T, rtol=1e-4, atol=1e-4)
