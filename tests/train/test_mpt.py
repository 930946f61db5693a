"""Runs of MPT with LLM Foundry's switches: the keys of the file, steps, resuming, the export, and what serves it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.bundle import load  # noqa: E402
from roofline.common.errors import ConfigError, RooflineError  # noqa: E402
from roofline.ops.batch import Segment  # noqa: E402
from roofline.train.checkpoint.export import export  # noqa: E402
from roofline.train.checkpoint.state import WEIGHTS  # noqa: E402
from roofline.train.config.schema import InitSection  # noqa: E402
from roofline.train.model import shapes  # noqa: E402
from roofline.train.model.init import initialize  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.models.mpt_in_torch import logits as plain_logits  # noqa: E402
from tests.train.small import LENGTH, VOCAB, config, stored, write_rows  # noqa: E402

SHAPE = {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": VOCAB}
SWITCHES: dict[str, Any] = {
    "attn_config": {
        **{"attn_type": "grouped_query_attention", "kv_n_heads": 2, "rope": True, "rope_theta": 500000},
        **{"rope_impl": "hf", "rope_hf_config": {"type": "linear", "factor": 2.0}},
    },
    "ffn_config": {"ffn_type": "mptglu", "ffn_hidden_size": 96, "ffn_act_fn": {"name": "silu"}},
    "norm_type": "low_precision_rmsnorm",
    "no_bias": True,
}
MODEL = {"name": "mpt_causal_lm", **SHAPE, **SWITCHES, "init_config": {"name": "baseline_", "init_std": 0.1}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "train", 103)


def shape_of(**changes: Any) -> dict[str, Any]:
    here = Path("unused")
    read = config(here, here, model={"name": "mpt_causal_lm", **SHAPE, **changes})
    return shapes.model_config(read.model, read.max_seq_len)


def weights_of(run: Path) -> dict[str, Any]:
    """The last checkpoint's parameters under LLM Foundry's names."""
    tensors = stored(run / "checkpoints").items()
    return {n.removeprefix(WEIGHTS): torch.from_numpy(values) for n, values in tensors if n.startswith(WEIGHTS)}


def served(folder: Path, backend: str, ids: Any) -> Any:
    """The logits of a sequence, float32 [length, vocab]."""
    executable = load(str(folder), backend=backend, text=False, cache_tokens=128).executable
    executable.batch.fill([Segment(ids.tolist(), 0, range(1))], range(len(ids)))
    executable.forward()
    return torch.from_numpy(np.array(executable.logits()))


def test_the_keys_of_a_run_give_the_shape() -> None:
    found = shape_of(**SWITCHES)
    assert (found["positions"], found["rope_theta"], found["rope_scaling"]["factor"]) == ("rope", 5e5, 2.0)
    assert (found["kv_heads"], found["ffn"], found["gated"], found["activation"]) == (2, 96, True, "silu")
    assert (found["rms"], found["bias"]) == (True, False)
    assert shape_of(attn_config={"attn_type": "multiquery_attention"})["kv_heads"] == 1
    plain = shape_of()
    assert not {"rms", "gated", "activation"} & set(plain)  # as before there were any: older runs go on
    rope = {"rope": False, "rope_theta": 10000, "rope_hf_config": {"type": "no_scaling", "factor": 1.0}}
    assert shape_of(attn_config=rope) == plain  # a file that names all of LLM Foundry's defaults
    grouped = {"attn_config": {"attn_type": "grouped_query_attention", "kv_n_heads": 2}}
    assert shape_of(**grouped, config_overrides={"heads": 8})["kv_heads"] == 2
    assert shape_of(config_overrides={"heads": 8})["kv_heads"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_config": {"rope_theta": 500000}}, "model.attn_config.rope_theta is read with rope: true alone"),
        ({"attn_config": {"kv_n_heads": 2}}, "attn_config.kv_n_heads"),
        ({"attn_config": {"attn_type": "grouped_query_attention"}}, "attn_config.kv_n_heads: is missing"),
        ({"attn_config": {"rope": True, "alibi": True}}, "attn_config.alibi beside attn_config.rope"),
        ({"attn_config": {"rope": True, "rope_impl": "own"}}, "model.attn_config.rope_impl = own"),
        ({"attn_config": {"rope": True, "rope_dail_config": {"type": "xpos"}}}, "rope_dail_config.type = xpos"),
        (
            {"attn_config": {"rope": True, "rope_impl": "hf", "rope_hf_config": {"type": "dynamic", "factor": 2}}},
            "rope scaling 'dynamic'",
        ),
        ({"attn_config": {"qk_ln": True}}, "model.attn_config.qk_ln = True"),
        ({"attn_config": {"qk_gn": True}}, "model.attn_config.qk_gn = True"),
        ({"ffn_config": {"ffn_type": "mb_moe"}}, "model.ffn_config.ffn_type = mb_moe"),
        ({"ffn_config": {"ffn_act_fn": {"name": "relu6"}}}, "ffn_config.ffn_act_fn"),
        ({"norm_type": "rmsnrm"}, "model.norm_type = rmsnrm"),
    ],
)
def test_what_is_not_there_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RooflineError) as caught:
        shape_of(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["attn_config", "ffn_config", "norm_type"])
def test_a_named_shape_does_not_lose_them(key: str) -> None:
    read = config(Path("unused"), Path("unused"), model={"name": "smollm2-135m", key: SWITCHES[key]})
    with pytest.raises(ConfigError, match=f"model.{key} belongs to mpt_causal_lm"):
        shapes.model_config(read.model, LENGTH)


def test_gradients_are_those_of_plain_torch() -> None:
    model = Model(shape_of(**SWITCHES), "cpu")
    initialize(model, 3, InitSection(name="baseline_", init_std=0.2))
    theirs = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    ids = torch.randint(0, VOCAB, (3, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous()).backward()
    for row in ids:
        rows = plain_logits(theirs, row[:-1], {**SHAPE, **SWITCHES})
        torch.nn.functional.cross_entropy(rows, row[1:], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        wanted = theirs[name].grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()), msg=name)


def test_it_learns_goes_on_and_is_served_as_it_was_trained(data: Path, tmp_path: Path) -> None:
    run = {"model": MODEL, "optimizer__lr": 1e-2, "save_interval": "10ba"}
    lines: list[dict[str, Any]] = []
    train(config(data, tmp_path / "all", **run, max_duration="20ba"), lines.append)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1
    train(config(data, tmp_path / "two", **run, max_duration="20ba", stop_after="10ba"))
    train(config(data, tmp_path / "two", **run, max_duration="20ba", autoresume=True))
    weights, resumed = (weights_of(tmp_path / name) for name in ("all", "two"))
    assert len(weights) == 1 + 2 * 7 + 1
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)

    export(str(tmp_path / "all"), tmp_path / "out", "F32")
    found = open_checkpoint(tmp_path / "out")
    assert found.config == shape_of(**SWITCHES)
    ids = torch.arange(LENGTH) * 5 % VOCAB
    expected = plain_logits(weights, ids, {**SHAPE, **SWITCHES})
    for backend in ("reference", "cpu"):  # attention's operands are rounded to bf16
        assert (served(tmp_path / "out", backend, ids) - expected).abs().max() < 0.03 * expected.std(), backend


@pytest.mark.parametrize(
    "ffn", [{"ffn_type": "mptglu"}, {"ffn_act_fn": {"name": "silu"}}], ids=["gated by gelu", "silu"]
)
def test_other_activations_are_served(ffn: dict[str, Any], data: Path, tmp_path: Path) -> None:
    switches = SWITCHES | {"ffn_config": ffn}
    model = {**MODEL, **switches}
    train(config(data, tmp_path / "run", model=model, max_duration="1ba", save_interval="1ba"))
    export(str(tmp_path / "run"), tmp_path / "out", "F32")
    ids = torch.arange(LENGTH)
    expected = plain_logits(weights_of(tmp_path / "run"), ids, {**SHAPE, **switches})
    for backend in ("reference", "cpu"):
        assert (served(tmp_path / "out", backend, ids) - expected).abs().max() < 0.03 * expected.std(), backend
