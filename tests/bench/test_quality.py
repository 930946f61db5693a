"""Scores of texts, reports of what rounding cost, and the importance of columns, on small models."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bundle"))  # bundle_models

from bundle_models import write_model

from roofline.backends.options import LoadOptions
from roofline.bench.quality.calibrate import calibrate
from roofline.bench.quality.harness import HarnessAnswers
from roofline.bench.quality.report import report
from roofline.bench.quality.score import load_to_score, score, text_windows
from roofline.bench.quality.windows import windows_of
from roofline.bundle.rewrite import RewriteWork, write_gguf
from roofline.common.errors import ConfigError
from roofline.models.mixes import formats_of
from roofline.ops import formats
from roofline.weights.checkpoint import open_checkpoint
from roofline.weights.quantise.calibration import Folding, WeightCalibration
from roofline.weights.quantise.scaling import fit_scales
from tests.command_line import call_roofline
from tests.judges import judge, require

TEXT = "The quick brown fox jumps over the lazy dog. " * 12
PLAIN = LoadOptions(backend="reference", arithmetic="plain", threads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("quality") / "model")


@pytest.mark.parametrize("bos", [None, 7])
@pytest.mark.parametrize(("context", "stride"), [(10, 3), (10, 9), (50, 20), (2, 1)])
def test_windows_score_every_token_once(bos, context, stride):
    ids = list(range(100, 133))
    scored = []
    for window in windows_of(ids, context, min(stride, context - 1), bos):
        assert len(window.ids) <= context
        assert window.first >= 1
        scored += window.ids[window.first :]
    assert scored == (ids if bos is not None else ids[1:])


def test_windows_that_cannot_be():
    with pytest.raises(ConfigError, match="stride=11"):
        windows_of([1, 2, 3], 10, 11, None)
    with pytest.raises(ConfigError, match="too few"):
        windows_of([1], 10, 5, None)


def test_perplexity_is_that_of_transformers(model):
    transformers = pytest.importorskip("transformers")
    import torch

    loaded = load_to_score(str(model), PLAIN, 64)
    windows = text_windows(loaded.tokenizer, TEXT, 64, 16)
    (ours,) = score([loaded.executable], windows)
    read = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    nlls = []
    for window in windows:
        with torch.no_grad():
            logprobs = torch.log_softmax(read(torch.tensor([list(window.ids)])).logits[0], dim=-1)
        nlls += [-float(logprobs[at - 1, window.ids[at]]) for at in range(window.first, len(window.ids))]
    assert ours.tokens == len(nlls) == len(TEXT) - 1
    assert ours.nll == pytest.approx(np.mean(nlls), abs=1e-4)
    assert ours.perplexity == pytest.approx(math.exp(np.mean(nlls)), rel=1e-3)
    assert ours.kl is None


def test_a_rounded_model_is_further_away_the_fewer_bits_it_has(model, tmp_path):
    source = open_checkpoint(model)
    kl, worst = [], []
    for mix in ("Q8_0", "Q4_0"):
        write_gguf(source, tmp_path / f"{mix}.gguf", mix, RewriteWork(threads=1))
        found = report(source, open_checkpoint(tmp_path / f"{mix}.gguf"), TEXT, PLAIN, limit=100)
        assert found.source.tokens == found.rounded.tokens == 99
        kl.append(found.rounded.kl)
        worst.append(found.worst[0].error)
    assert 0 < kl[0] < 0.1 * kl[1]
    assert worst[0] < 0.02 < worst[1] < 0.2


def test_importance_is_the_mean_square_of_what_comes_in(model):
    importance = calibrate(open_checkpoint(model), TEXT, "importance", 1).importance
    assert importance["layers.1.mlp.down.weight"].shape == (96,)
    assert importance["embed.weight"].shape == (64,)  # as the head
    assert {name.split(".")[-2] for name in importance} == {*"qkvo", "gate", "up", "down", "embed"}
    for each in importance.values():
        assert each.min() > 0
        assert each.mean() == pytest.approx(1, abs=0.01)
    assert np.array_equal(importance["layers.0.attn.q.weight"], importance["layers.0.attn.v.weight"])


def test_products_of_columns_are_those_of_what_comes_in(model):
    """The mean of their diagonal scales them as importance is scaled; q, k and v share theirs."""
    measured = calibrate(open_checkpoint(model), TEXT, "gptq", 1)
    assert measured.products.keys() == measured.importance.keys()
    for name, products in measured.products.items():
        assert np.array_equal(products, products.T) or np.allclose(products, products.T, rtol=1e-5)
        squares = np.diagonal(products) / np.diagonal(products).mean()
        assert np.allclose(np.maximum(squares, 1e-3), measured.importance[name], rtol=1e-4)
    assert np.shares_memory(*(measured.products[f"layers.0.attn.{name}.weight"] for name in "qv"))


def test_the_command_rounds_with_gptq(model, tmp_path):
    """Each method writes weights of its own; the text that GPTQ was fitted to is predicted best with it."""
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["quantize", model, "--to", "Q4_0", "--report", tmp_path / "text.txt", "--threads", "1", "--json"]
    kl = {}
    for method in ("importance", "gptq"):
        more = ["--calibrate", tmp_path / "text.txt", "--method", method, "-o", tmp_path / f"{method}.gguf"]
        result = call_roofline([*words, *more])
        assert result.exit_code == 0, result.output
        kl[method] = json.loads(result.stdout)["report"]["rounded"]["kl"]
    assert 0 < kl["gptq"] < 0.9 * kl["importance"]
    refused = call_roofline([*words, "--method", "gptq", "-o", tmp_path / "no.gguf"])
    assert (refused.exit_code, "name one with --calibrate" in refused.stderr) == (1, True)
    assert not (tmp_path / "no.gguf").exists()


def test_norms_and_gated_products_can_be_scaled(model):
    foldings = calibrate(open_checkpoint(model), TEXT, "awq", 1).foldings
    first = "layers.0."
    assert [each for each in foldings if each.matrices[0].startswith(first)] == [
        Folding(tuple(f"{first}attn.{name}.weight" for name in "qkv"), (f"{first}attn_norm.weight",)),
        Folding((f"{first}mlp.gate.weight", f"{first}mlp.up.weight"), (f"{first}mlp_norm.weight",)),
        Folding((f"{first}mlp.down.weight",), (f"{first}mlp.up.weight",)),
    ]
    matrices = {name for each in foldings for name in each.matrices}
    assert "embed.weight" not in matrices, "it is the head too, and ids would have other rows"


def test_scaling_changes_nothing_but_the_rounding(model, tmp_path):
    """Written in float32 the scaled model computes what the source computes, though its weights are others."""
    source = open_checkpoint(model)
    measured = calibrate(source, TEXT, "awq", 1)
    kinds = formats_of("Q4_0", {name: info.shape for name, info in source.tensors.items()})
    measured = fit_scales(source, kinds, measured)
    write_gguf(source, tmp_path / "scaled.gguf", "F32", RewriteWork(threads=1, calibration=measured))
    scaled = open_checkpoint(tmp_path / "scaled.gguf")
    names = ["layers.1.mlp.up.weight", "layers.1.mlp_norm.weight", "layers.0.attn.q.weight"]
    for name in names:
        info = scaled.tensors[name]
        values = scaled.read(name).view(np.float32).reshape(info.shape)
        plain = formats.get(source.tensors[name].format).dequantize(source.read(name), info.shape)
        assert np.abs(values / plain - 1).max() > 0.02, "it is scaled"
    compared = report(source, scaled, TEXT, PLAIN, measured, limit=100)
    assert compared.rounded.kl < 1e-6
    assert max(each.error for each in compared.worst) < 1e-6, "scales are undone before tensors are compared"


def test_columns_that_count_most_are_scaled_up(model):
    """Of a matrix whose error lies in one column, that column is spared."""
    source = open_checkpoint(model)
    (folding,) = [
        each for each in calibrate(source, TEXT, "awq", 1).foldings if each.divided[0].endswith("0.mlp_norm.weight")
    ]
    squares = np.full(64, 1e-3, np.float32)
    squares[5] = 64 - squares[:-1].sum()
    calibration = WeightCalibration(dict.fromkeys(folding.matrices, squares), foldings=(folding,))
    scales = fit_scales(source, dict.fromkeys(source.tensors, "Q4_0"), calibration).scales
    gate, up = (scales[name] for name in folding.matrices)
    assert gate.columns.argmax() == 5
    assert gate.columns[5] > 3 * np.delete(gate.columns, 5).max()
    assert np.array_equal(gate.columns, up.columns)
    assert np.allclose(scales[folding.divided[0]].columns * gate.columns, 1)


def test_the_command_rounds_with_awq(model, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = ["quantize", model, "--to", "Q4_0", "--report", tmp_path / "text.txt", "--threads", "1", "--json"]
    words += ["--calibrate", tmp_path / "text.txt", "--method"]
    for method in ("importance", "awq"):
        result = call_roofline([*words, method, "-o", tmp_path / f"{method}.gguf"])
        assert result.exit_code == 0, result.output
        assert 0 < json.loads(result.stdout)["report"]["rounded"]["kl"] < 0.1
    assert (tmp_path / "awq.gguf").read_bytes() != (tmp_path / "importance.gguf").read_bytes()


def test_the_command_compares_formats_of_the_cache(model, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    words = [
        "eval",
        model,
        "--text",
        tmp_path / "text.txt",
        "--context",
        "48",
        "--stride",
        "24",
        "--backend",
        "reference",
    ]
    result = call_roofline([*words, "--kv-dtypes", "bf16,int8", "--limit", "80", "--json"])
    assert result.exit_code == 0, result.output
    kv = json.loads(result.stdout)["kv"]
    assert kv["bf16"]["tokens"] == 79
    assert kv["bf16"]["kl"] is None
    assert kv["bf16"]["tokens_per_second"] > 0
    assert 0 < kv["int8"]["kl"] < 0.01
    assert kv["int8"]["agreement"] > 0.9
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe")
    words[3] = tmp_path / "bad.txt"
    assert "is not UTF-8" in call_roofline(words).stderr
    (tmp_path / "bad.txt").write_text(" \n")
    assert "bad.txt: is empty" in call_roofline(words).stderr
    words[3] = tmp_path / "text.txt"
    for more, problem in {
        ("--kv-dtypes", "bf17"): "--kv-dtypes='bf17' cannot be used: choose one of auto, bf16, int8, fp8, f16",
        ("--kv-dtypes", "int8,int8"): "--kv-dtypes names int8 twice",
        ("--context", "9999"): "--context 9,999 is more than the model's 512 positions",
    }.items():
        refused = call_roofline([*words, *more])
        assert (refused.exit_code, problem in refused.stderr) == (1, True), refused.stderr


class TestHarness:
    """What lm-evaluation-harness asks of a model."""

    @pytest.fixture(scope="class")
    @staticmethod
    def llm(model):
        from roofline import LLM

        with LLM(
            str(model), backend="reference", arithmetic="plain", threads=1, max_model_len=40, cache_tokens=640
        ) as llm:
            yield llm

    def test_likelihoods_add_up_to_the_whole_text(self, llm):
        answers = HarnessAnswers(llm)
        pairs = [("a", "bc def"), ("a", "bc"), ("abc", " def"), ("abc ", "def"), ("", "abc def")]
        both, first, rest, moved, whole = (logprob for logprob, _ in answers.likelihoods(pairs))
        assert both == pytest.approx(first + rest, abs=1e-4)
        assert rest == moved  # the space belongs to the token behind it
        assert answers.rolling(["abc def"])[0] == pytest.approx(whole, abs=1e-4)
        assert answers.rolling([""]) == [0.0]

    def test_the_likeliest_continuation_is_greedy(self, llm):
        answers = HarnessAnswers(llm)
        said = answers.continuations([("abc", {"max_gen_toks": 1, "until": []})])[0]
        if said.isprintable() and len(said) == 1:
            assert answers.likelihoods([("abc", said)])[0][1]
        assert not all(greedy for _, greedy in answers.likelihoods([("abc", "q"), ("abc", "z")]))

    def test_a_text_longer_than_the_context_is_scored_in_windows(self, llm):
        assert HarnessAnswers(llm).rolling(["x" * 100])[0] < HarnessAnswers(llm).rolling(["x" * 30])[0] < 0

    def test_settings_that_are_not_known_are_refused(self, llm):
        with pytest.raises(ConfigError, match="'num_beams' is not known"):
            HarnessAnswers(llm).continuations([("abc", {"num_beams": 4})])
        with pytest.raises(ConfigError, match="no tokens"):
            HarnessAnswers(llm).likelihoods([("abc", "")])

    def test_the_length_has_the_names_that_tasks_use(self, llm):
        answers = HarnessAnswers(llm)
        for name in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"):
            assert len(answers.continuations([("abc", {name: 1})])[0]) <= 1

    def test_the_beginning_that_a_template_wrote_is_not_doubled(self, llm, monkeypatch):
        answers, tokenizer = HarnessAnswers(llm), llm.tokenizer
        bos = tokenizer.bos_id
        vocabulary = replace(tokenizer.vocabulary, prefix=(bos,))
        monkeypatch.setattr(tokenizer, "vocabulary", vocabulary)
        assert answers._encode("abc") == [bos, *tokenizer.encode("abc", add_special=False)]
        assert answers._encode("<s>abc") == answers._encode("abc")

    def test_tasks_of_the_harness(self, llm, model, tmp_path, monkeypatch):
        """One of choices, one of perplexity and one of answers: the figures of the harness's own model of transformers.

        For the tasks that ask for log-probabilities the model reads windows of 38 tokens, as ours does: 40, less the
        beginning and the token that the engine makes."""
        require("lm_eval")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        from roofline.bench.quality.harness import harness_model

        manager = TaskManager(include_defaults=False)
        ours = simple_evaluate(harness_model(llm), tasks=harness_tasks(tmp_path), task_manager=manager)
        assert ours["config"]["model"] == llm.name
        results = ours["results"]
        assert results["choices"]["acc,none"] in (0.0, 1.0)
        assert results["answers"]["exact_match,none"] in (0.0, 1.0)
        asked = {name: [each["resps"] for each in samples] for name, samples in ours["samples"].items()}
        huggingface = judge("lm_eval.models.huggingface")
        theirs = simple_evaluate(
            huggingface.HFLM(str(model), device="cpu", dtype="float32", max_length=38),
            tasks=harness_tasks(tmp_path),
            task_manager=manager,
        )
        for name, samples in theirs["samples"].items():
            for mine, sample in zip(asked[name], samples, strict=True):
                if name == "answers":
                    assert mine == sample["resps"]
                else:
                    flat = [np.ravel(each) for each in (mine, sample["resps"])]
                    assert [float(each) for each in flat[0]] == pytest.approx([float(e) for e in flat[1]], abs=1e-3)
        assert results["rolling"]["word_perplexity,none"] == pytest.approx(
            theirs["results"]["rolling"]["word_perplexity,none"], rel=1e-3
        )

    def test_chats_are_rendered_by_the_models_template(self, llm):
        require("lm_eval")
        from roofline.bench.quality.harness import harness_model

        judged = harness_model(llm)
        chat = [{"role": "user", "content": "hello"}]
        rendered = "".join(part.text for part in llm.chat_template.render(chat))
        assert judged.apply_chat_template(chat) == rendered
        assert judged.chat_template(True) == llm.chat_template.source
        assert judged.chat_template() == ""
        with pytest.raises(ConfigError, match="no chat templates by name"):
            judged.chat_template("tool_use")


def harness_tasks(folder: Path) -> list[dict[str, object]]:
    """Tasks over a file of three documents: choices, perplexity in several windows, answers."""
    lines = [
        {"question": "a" * (at + 1), "choices": ["b", "c"], "gold": 0, "text": "fox " * (8 * at + 4)} for at in range(3)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
    }
    choices = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
    }
    rolling = {
        "task": "rolling",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    }
    answers = {
        "task": "answers",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "b",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    return [data | task for task in (choices, rolling, answers)]
