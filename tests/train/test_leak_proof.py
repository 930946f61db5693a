"""Runs begin with a proof that documents of a packed row do not see each other; runs in which they do end there."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import RooflineError  # noqa: E402
from roofline.models import presets  # noqa: E402
from roofline.ops import rows as ops_rows  # noqa: E402
from roofline.train.model import modules  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from roofline.train.run_folder import read_lines  # noqa: E402
from tests.train.small import VOCAB, config, write_rows  # noqa: E402

SMALL = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 4, "head_dim": 8, "ffn": 64, "vocab": VOCAB}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), 40, documents=True)


def run(data: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    apart = {"model__attn_config": {"attn_uses_sequence_id": True}}
    train(config(data, folder, max_duration="1ba", **apart | changes))
    return read_lines(folder / "log.jsonl")


@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
def test_nothing_changes_for_other_documents(data: Path, tmp_path: Path, precision: str) -> None:
    proof = run(data, tmp_path, precision=precision)[0]["about"]["leak_proof"]
    assert (proof["logits"], proof["gradients"], proof["into_others"]) == (0.0, 0.0, 0.0)
    assert proof["without_boundaries"] > 1e-3, "a leak would be seen"


def test_experts_differ_by_rounding_at_most(data: Path, tmp_path: Path) -> None:
    shape = {**SMALL, "experts": 4, "experts_per_token": 2, "expert_ffn": 32}
    names = {name for name in presets.preset("mixtral-8x7b") if name in shape}
    overrides = {name: shape[name] for name in names}
    model = {"name": "mixtral-8x7b", "config_overrides": overrides, "attn_config": {"attn_uses_sequence_id": True}}
    proof = run(data, tmp_path, model=model)[0]["about"]["leak_proof"]
    assert proof["logits"] <= 0.05 * proof["without_boundaries"]


def test_rows_of_one_document_need_none(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", 40)
    train(config(rows, tmp_path / "run", max_duration="1ba"))
    assert read_lines(tmp_path / "run/log.jsonl")[0]["about"]["leak_proof"] is None


@pytest.mark.parametrize("where", ["everything", "one head"])
def test_a_leak_ends_the_run_before_its_first_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    plain = ops_rows.score_bias

    def leaky(length: int, device: Any, documents: Any = None, *rest: Any) -> Any:
        bias = plain(length, device, documents, *rest)
        if where == "everything" or documents is None:
            return plain(length, device, None, *rest)
        bias = bias.repeat(1, 4, 1, 1)
        bias[:, 3, -1, length // 2] = 0.0  # the last token sees one of another document, in the last of four heads
        return bias

    monkeypatch.setattr(modules, "score_bias", leaky)
    with pytest.raises(RooflineError, match="documents of a packed row see each other"):
        run(data, tmp_path)
    assert not (tmp_path / "log.jsonl").exists()


def test_a_leak_of_gradients_alone_ends_the_run_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = modules.attend

    def leaky(q: Any, k: Any, v: Any, bias: Any, scale: float) -> Any:
        everything = v.mean()
        return plain(q, k, v, bias, scale) + (everything - everything.detach())

    monkeypatch.setattr(modules, "attend", leaky)
    with pytest.raises(RooflineError, match="into_others by"):
        run(data, tmp_path)
