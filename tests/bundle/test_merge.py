"""roofline merge: what is written, what the certificate says of it, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roofline import LLM
from roofline.bench.quality.certificate import ANSWER_TOKENS, NO_SERVED
from roofline.bench.quality.survival import Sums, survivals, total
from roofline.bundle.merge import MergedForm, merged_form, write_merged
from roofline.bundle.rewrite import RewriteWork, write_gguf
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.engine.params import SamplingParams
from roofline.ops.adapters import AdapterMatrix
from roofline.weights.adapter_files import write_adapter
from roofline.weights.adapter_merge import merged
from roofline.weights.adapters import read_adapter
from roofline.weights.checkpoint import open_checkpoint
from tests.adapter_files import for_checkpoint
from tests.command_line import CommandResult, call_roofline

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def adapter_of(model: Path, folder: Path, size: float = 1.0, magnitudes: float = 0.0) -> Path:
    """A random adapter; size: of its changes; magnitudes: how much longer than before DoRA makes rows."""
    base = open_checkpoint(model)
    matrices = []
    for matrix in for_checkpoint(base.tensors):
        lengths = np.linalg.norm(base.dequantize(matrix.tensor), axis=1) * np.float32(magnitudes)
        values = {"b": matrix.b * np.float32(size), "magnitude": lengths if magnitudes else None}
        matrices.append(replace(matrix, **values))
    return write_adapter(folder, base.config, matrices)


def merge(model: Path, adapter: Path, output: Path, *words: object) -> CommandResult:
    return call_roofline(["merge", model, adapter, "-o", output, "--threads", 1, *words])


def certificate(model: Path, adapter: Path, output: Path, *words: object) -> dict[str, Any]:
    result = merge(model, adapter, output, *words, "--json")
    assert result.exit_code == 0, result.output
    place = output.with_suffix(".certificate.json") if output.suffix == ".gguf" else output / "merge_certificate.json"
    facts = json.loads(place.read_text())
    printed = json.loads(result.stdout)
    assert {key: printed[key] for key in facts} == facts
    return dict(facts)


def test_a_merged_model_answers_as_the_adapter(model: Path, tmp_path: Path) -> None:
    """In float32 nothing is lost, and the certificate says so; with the adapter served, the same ids come out."""
    adapter = adapter_of(model, tmp_path / "adapter")
    facts = certificate(model, adapter, tmp_path / "merged", "--to", "f32")
    answers, sums = facts["answers"], facts["all_matrices"]
    assert facts["tied_head"] is True
    assert facts["adapter_digest"]
    assert facts["written"] == str(tmp_path / "merged")
    assert sums["loss"] == 0
    assert sums["kept"] == sums["survival"] == 1.0
    assert sums["size"] > 0.1
    assert len(facts["matrices"]) == 14
    assert answers["reference"] == "adapter served"
    assert answers["largest"] < 0.02
    assert answers["same_top"] == 1.0
    assert answers["greedy"] == answers["prompts"] == 8
    assert answers["positions"] > 8 * (ANSWER_TOKENS - 1)
    prompt = list(range(40, 60))
    with LLM(str(tmp_path / "merged"), cache_tokens=256) as alone:
        (got,) = alone.generate(prompt, GREEDY)
    with LLM(str(model), cache_tokens=256, max_adapters=1) as llm:
        (wanted,) = llm.generate(prompt, GREEDY, adapter=llm.load_adapter(str(adapter)))
        (base,) = llm.generate(prompt, GREEDY)
    assert got.ids == wanted.ids != base.ids


def test_formats_and_orders_of_rows(model: Path, tmp_path: Path) -> None:
    """What bf16 loses follows from its 8 bits; a GGUF file has the rows of q and k in another order."""
    adapter = adapter_of(model, tmp_path / "adapter")
    for words, form, least, most in (
        (["folder", "--to", "bf16"], "BF16", 5e-4, 3e-3),
        (["half.gguf", "--to", "gguf:bf16"], "BF16", 5e-4, 3e-3),
        (["small.gguf", "--to", "q8"], "Q8_0", 2e-3, 2e-2),
    ):
        facts = certificate(model, adapter, tmp_path / words[0], *words[1:])
        assert {each["format"] for each in facts["matrices"]} == {form}
        assert least < facts["all_matrices"]["loss"] < most
        assert abs(facts["all_matrices"]["kept"] - 1) < 0.01
    adapted = open_checkpoint(tmp_path / "half.gguf")
    assert adapted.config["rope_style"] == "interleaved"


def test_an_adapter_that_rounding_takes_away_is_refused(model: Path, tmp_path: Path) -> None:
    """A small change of weights that lie on a coarse grid: nearly all of it is rounded off again."""
    write_gguf(open_checkpoint(model), tmp_path / "q4.gguf", "Q4_1", RewriteWork(threads=1))
    strong, weak = (adapter_of(model, tmp_path / str(size), size) for size in (2.0, 0.02))
    facts = certificate(tmp_path / "q4.gguf", strong, tmp_path / "strong.gguf")
    assert facts["all_matrices"]["kept"] > 0.9
    result = merge(tmp_path / "q4.gguf", weak, tmp_path / "weak.gguf")
    assert result.exit_code == 1
    assert "keep" in result.output
    assert "50% is the least" in result.output
    assert "--force" in result.output
    assert not list(tmp_path.glob("*weak*"))
    assert not list(tmp_path.glob(".*"))
    assert certificate(tmp_path / "q4.gguf", weak, tmp_path / "b.gguf", "--to", "bf16")["all_matrices"]["kept"] > 0.99
    forced = certificate(tmp_path / "q4.gguf", weak, tmp_path / "forced.gguf", "--force")
    assert forced["all_matrices"]["kept"] < 0.5
    kinds = {name: info.format for name, info in open_checkpoint(tmp_path / "forced.gguf").tensors.items()}
    assert kinds == {name: info.format for name, info in open_checkpoint(tmp_path / "q4.gguf").tensors.items()}


def test_the_noise_of_rounding_is_not_taken_for_the_adapter(model: Path, tmp_path: Path) -> None:
    """Where weights are quantised at the same time, what is left is the difference to the model alone, rounded too."""
    base = open_checkpoint(model)
    figures = {}
    for size in (1.0, 1e-6):
        whole = merged(base, [replace(each, scale=size) for each in for_checkpoint(base.tensors)])
        out = tmp_path / f"{size}.gguf"
        write_merged(whole, out, merged_form(base, out, "Q4_1"), RewriteWork(threads=1))
        figures[size] = total(survivals(whole, open_checkpoint(out)))
    assert figures[1e-6].loss > 0.02
    noise = (figures[1e-6].lost / figures[1e-6].change) ** 0.5
    assert figures[1e-6].survival < noise / 5, "most blocks are rounded alike; of W itself it would be the noise"
    assert abs(figures[1.0].projected_share - 1) < 0.05


def test_formats_that_stay(model: Path, tmp_path: Path) -> None:
    write_gguf(open_checkpoint(model), tmp_path / "q4.gguf", "Q4_K_M", RewriteWork(threads=1))
    adapter = adapter_of(model, tmp_path / "adapter", 2.0)
    merge(tmp_path / "q4.gguf", adapter, tmp_path / "merged.gguf")
    base, written = (open_checkpoint(tmp_path / name) for name in ("q4.gguf", "merged.gguf"))
    assert written.metadata["general.file_type"] == base.metadata["general.file_type"] == 15
    assert {n: i.format for n, i in written.tensors.items()} == {n: i.format for n, i in base.tensors.items()}
    result = merge(tmp_path / "q4.gguf", adapter, tmp_path / "again.gguf", "--to", "q8")
    assert "had been quantised before and were rounded a second time" in result.stdout
    whole = merged(base, read_adapter(adapter).matrices)
    form = MergedForm(True, dict.fromkeys(base.tensors, "IQ2_XXS"))
    with pytest.raises(UnsupportedError, match=r"writing layers.* in IQ2_XXS.*--to q4"):
        write_merged(whole, tmp_path / "low.gguf", form, RewriteWork(threads=1))


def test_rows_get_the_length_that_dora_says(model: Path, tmp_path: Path) -> None:
    adapter = adapter_of(model, tmp_path / "adapter", 1.0, 1.5)
    facts = certificate(model, adapter, tmp_path / "merged", "--to", "f32")
    assert facts["answers"]["reference"] == "adapter served"
    assert facts["answers"]["largest"] < 0.02
    before, after = (
        open_checkpoint(path).dequantize("layers.1.mlp.up.weight") for path in (model, tmp_path / "merged")
    )
    np.testing.assert_allclose(np.linalg.norm(after, axis=1), 1.5 * np.linalg.norm(before, axis=1), rtol=1e-5)


def test_dora_in_a_model_whose_rows_a_converter_permuted(model: Path, tmp_path: Path) -> None:
    """Magnitudes move with the rows: each is another one here."""
    write_gguf(open_checkpoint(model), tmp_path / "base.gguf", "F32", RewriteWork(threads=1))
    plain, paired = open_checkpoint(model), open_checkpoint(tmp_path / "base.gguf")
    matrices = [
        replace(matrix, magnitude=np.arange(1, matrix.b.shape[1] + 1, dtype=np.float32))
        for matrix in for_checkpoint(plain.tensors)
    ]
    first, second = merged(plain, matrices), merged(paired, matrices)
    for name in first.parts:
        got, wanted = second.values(name), first.values(name)
        moved = name.endswith(("attn.q.weight", "attn.k.weight"))
        if moved:
            heads = len(wanted) // plain.config["head_dim"]
            wanted = wanted.reshape(heads, 2, -1, wanted.shape[1]).swapaxes(1, 2).reshape(wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
        assert not moved or not np.allclose(got, first.values(name))


def test_probes_and_words_for_people(model: Path, tmp_path: Path) -> None:
    adapter = adapter_of(model, tmp_path / "adapter")
    (tmp_path / "probes.txt").write_text("one\n\n" + "two " * 200)
    result = merge(model, adapter, tmp_path / "merged", "--probes", tmp_path / "probes.txt")
    assert result.exit_code == 0, result.output
    for words in ("14 matrices changed by", "the head is the embedding", "of 2 prompts", "certificate: "):
        assert words in result.stdout


def test_what_cannot_be_merged(model: Path, tmp_path: Path) -> None:
    adapter = adapter_of(model, tmp_path / "adapter")
    write_gguf(open_checkpoint(model), tmp_path / "q4.gguf", "Q4_1", RewriteWork(threads=1))
    (tmp_path / "there").mkdir()
    (tmp_path / "there.certificate.json").write_text("")
    for words, problem in (
        ((model, adapter, tmp_path / "new.gguf"), "say --to bf16"),
        ((model, adapter, tmp_path / "new", "--to", "q4"), "does not end in .gguf"),
        ((model, adapter, tmp_path / "new", "--to", "gguf:bf16"), "does not end in .gguf"),
        ((model, adapter, tmp_path / "new", "--to", "q77"), "no format 'q77'"),
        ((tmp_path / "q4.gguf", adapter, tmp_path / "new"), "say --to bf16, or name a .gguf file"),
        ((model, adapter, tmp_path / "there"), "is there already"),
        ((model, adapter, tmp_path / "there.gguf", "--to", "bf16"), "is there already"),
        ((model, tmp_path / "nothing", tmp_path / "new"), "no such folder or file"),
        ((model, model, tmp_path / "new"), "adapter_config.json"),
        ((model, adapter, tmp_path / "new", "--probes", tmp_path / "nothing"), "nothing"),
    ):
        result = merge(*words)
        assert result.exit_code == 1, result.output
        assert problem in result.output
    assert {path.name for path in tmp_path.iterdir()} >= {"there"}
    assert not list(tmp_path.glob("new*"))
    assert not list(tmp_path.glob(".*"))


def test_sums() -> None:
    """Half of the change kept on average, and noise across it."""
    sums = Sums(weight=100.0, change=4.0, written=5.0, along=2.0, lost=5.0) + Sums()
    assert (sums.projected_share, sums.size) == (0.5, 0.2)
    assert sums.survival == pytest.approx(1.118, abs=1e-3)
    assert sums.loss == pytest.approx(0.2236, abs=1e-3)
    assert Sums().projected_share == Sums().survival == 1.0


def test_a_head_that_is_another_is_noticed(model: Path, tmp_path: Path) -> None:
    from roofline.bench.quality.survival import head_is_tied

    base = open_checkpoint(model)
    assert head_is_tied(base, base)
    other = replace(base, bytes_of=lambda name: base.bytes_of(name) + np.uint8(name == "embed.weight"))
    for changed in (other, replace(base, config={**base.config, "tied": False})):
        with pytest.raises(ConfigError, match="embedding and head"):
            head_is_tied(base, changed)


def test_experts_in_one_tensor_and_in_several(tmp_path: Path) -> None:
    """The mixture's folder has a tensor for each expert of a layer, the GGUF file one for all."""
    from moe_models import transformers_model

    pytest.importorskip("transformers")
    transformers_model("mixtral").save_pretrained(tmp_path / "folder")
    base = open_checkpoint(tmp_path / "folder")
    whole = merged(base, for_checkpoint(base.tensors))
    from bundle_models import tokenizer_json

    (tmp_path / "folder" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    write_gguf(whole.checkpoint, tmp_path / "merged.gguf", "F32", RewriteWork(threads=1))
    figures = total(survivals(whole, open_checkpoint(tmp_path / "merged.gguf")))
    assert figures.loss == 0
    assert figures.projected_share == 1.0
    write_adapter(tmp_path / "adapter", base.config, for_checkpoint(base.tensors))
    facts = certificate(tmp_path / "folder", tmp_path / "adapter", tmp_path / "again", "--to", "f32")
    assert facts["answers"]["reference"] == NO_SERVED
    assert facts["answers"]["largest"] == 0
    stacked = open_checkpoint(tmp_path / "merged.gguf")
    again = merged(stacked, for_checkpoint(stacked.tensors, experts=8))
    assert len(again.parts) == len([name for name in base.tensors if ".attn." in name and "norm" not in name]) + 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("magnitudes", [0.0, 1.5], ids=["lora", "dora"])
def test_transformers_computes_what_peft_merges(magnitudes: float, model: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="what is compared with: pip install --no-deps peft accelerate")
    adapter = adapter_of(model, tmp_path / "adapter", 1.0, magnitudes)
    certificate(model, adapter, tmp_path / "merged", "--to", "f32")
    read = transformers.AutoModelForCausalLM.from_pretrained
    theirs = peft.PeftModel.from_pretrained(read(model, dtype=torch.float32), adapter).merge_and_unload()
    ours = read(tmp_path / "merged", dtype=torch.float32)
    weights = theirs.state_dict()
    assert weights.keys() == ours.state_dict().keys()
    for name, values in ours.state_dict().items():
        torch.testing.assert_close(values, weights[name], rtol=1e-5, atol=1e-6)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4


def test_what_cannot_be_converted(model: Path, tmp_path: Path) -> None:
    adapter, other = adapter_of(model, tmp_path / "adapter"), tmp_path / "other"
    call_roofline(["convert", adapter, "-o", tmp_path / "a.gguf", "--base", model])
    narrow = AdapterMatrix("layers.0.attn.q.weight", np.ones((2, 32), np.float32), np.ones((2, 64), np.float32), 1.0)
    write_adapter(other, open_checkpoint(model).config, [narrow])
    for words, problem in (
        ([adapter, "-o", tmp_path / "new.gguf"], "say with --base which model it belongs to"),
        ([adapter, "-o", tmp_path / "new", "--base", model], "is a folder already"),
        ([tmp_path / "a.gguf", "-o", tmp_path / "new.gguf", "--base", model], "is a GGUF file already"),
        ([adapter, "-o", tmp_path / "new.gguf", "--base", model, "--dequantize"], "--dequantize is for models"),
        ([model, "-o", tmp_path / "new.gguf", "--base", model], "--base is for a LoRA adapter"),
        ([other, "-o", tmp_path / "new.gguf", "--base", model], "32 inputs and 64 outputs, the model's have 64 and 64"),
        ([adapter, "-o", tmp_path / "a.gguf", "--base", model], "is there already"),
    ):
        result = call_roofline(["convert", *words])
        assert result.exit_code == 1, result.output
        assert problem in result.output
    assert not list(tmp_path.glob("new*"))
    told = call_roofline(["convert", tmp_path / "a.gguf", "-o", tmp_path / "back", "--base", model, "--json"])
    assert json.loads(told.stdout).items() >= {"matrices": 14, "rank": 3}.items()
