"""Encoders beside transformers, from their config.json to hidden rows."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity runs both models in torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers' models")
pytest.importorskip("roofline._native", reason="the C++ core is not built")

from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.models.registry import configure  # noqa: E402
from roofline.models.spec import expand  # noqa: E402
from roofline.torch.checkpoint import checkpoint_of  # noqa: E402
from roofline.train.model.modules import Model  # noqa: E402
from roofline.weights.checkpoint import open_checkpoint  # noqa: E402
from roofline.weights.config.hf import from_hf  # noqa: E402
from roofline.weights.to_hf import hf_config, write_folder  # noqa: E402
from tests.models.parity_cases import ENCODERS, encoder_of, measure_encoder  # noqa: E402

BERT = ENCODERS["bert"].config


@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_rows_are_those_of_transformers(name: str) -> None:
    eager, cpu = measure_encoder(ENCODERS[name].config)
    assert eager < 1e-5
    assert cpu < 0.02  # q, k, v and weights are rounded to 16 bits for attention


@pytest.mark.parametrize("name", ENCODERS)
def test_a_configuration_is_read_back_as_it_was(name: str) -> None:
    config = dict(ENCODERS[name].config)
    assert configure(from_hf(Path("config.json"), hf_config(config)))[1] == configure(config)[1]


def test_xlm_roberta_is_roberta() -> None:
    config = ENCODERS["roberta"].config
    model = encoder_of(config, "xlm-roberta")
    assert model.config.model_type == "xlm-roberta"
    assert configure(checkpoint_of(model).config)[1] == configure(config)[1]


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining", "RobertaForMaskedLM"])
def test_what_stands_behind_the_hidden_rows_is_not_read(kind: str, tmp_path: Path) -> None:
    """Files of models with heads have the encoder's tensors behind a prefix, and those of the head."""
    config = ENCODERS["roberta" if "Roberta" in kind else "bert"].config
    encoder = encoder_of(config)
    model = getattr(transformers, kind)(encoder.config)
    body = model.roberta if "Roberta" in kind else model.bert
    body.load_state_dict(
        {name: value for name, value in encoder.state_dict().items() if "pooler" not in name}, strict=False
    )
    model.save_pretrained(tmp_path)
    ours, theirs = open_checkpoint(tmp_path), checkpoint_of(encoder)
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        np.testing.assert_array_equal(ours.dequantize(name), theirs.dequantize(name))


def test_a_head_that_classifies_is_refused(tmp_path: Path) -> None:
    transformers.BertForSequenceClassification(encoder_of(BERT).config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"tensor 'classifier\.(weight|bias)': no model of ours has it"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("add_cross_attention", True),
        ("hidden_act", "gelu_10"),
    ],
)
def test_what_changes_the_mathematics_is_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"config.json: {field} = {value}"):
        from_hf(Path("config.json"), hf_config(dict(BERT)) | {field: value})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("pad_token_id", -5, "pad_token_id"),
        ("max_position_embeddings", 2, "max_position_embeddings"),
        ("num_attention_heads", 3, "num_attention_heads"),
        ("type_vocab_size", 0, "token_types=0"),
    ],
)
def test_bad_values_are_named(field: str, value: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(from_hf(Path("config.json"), hf_config(dict(ENCODERS["roberta"].config)) | {field: value}))


@pytest.mark.parametrize(
    "change", [{"positions": "rope"}, {"bias": False}, {"tied": False}, {"kv_heads": 2}, {"sliding_window": 9}]
)
def test_what_the_family_does_not_have_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="in a bert model"):
        configure(dict(BERT) | change)


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_what_is_written_is_read_by_transformers(name: str, tmp_path: Path) -> None:
    encoder = encoder_of(ENCODERS[name].config)
    source = checkpoint_of(encoder)
    family, cfg = configure(source.config)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    rows = [(param.name, param.shape, source.parameter(param).tobytes()) for param in table]
    write_folder(tmp_path / "out", source.config, rows, "F32")
    again = transformers.AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    ids = torch.arange(3, 33)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).last_hidden_state, encoder(ids).last_hidden_state)


def test_training_is_refused() -> None:
    model = Model(dict(BERT), "cpu")
    with pytest.raises(UnsupportedError, match="training of an encoder"):
        model(torch.zeros(1, 8, dtype=torch.long))
