"""The keys of callbacks and loggers: their defaults, and the least values that they take."""

from typing import Any

import pytest

from roofline.train.config.observers import (
    CallbacksSection,
    EarlyStopperSection,
    HfFoldersSection,
    LossSpikeSection,
    MlflowLogger,
    TensorboardLogger,
    WrittenSamplesSection,
)


def test_what_watches_a_run_has_its_defaults() -> None:
    spikes, stopper = LossSpikeSection(), EarlyStopperSection(monitor="LanguageCrossEntropy", dataloader_label="eval/x")
    assert spikes.model_dump() == {
        "log_only": True, "patience": 4, "outlier_multiplier": 2, "window_size": 100, "loss_cap": None,
    }  # fmt: skip
    assert (stopper.label, stopper.comp, stopper.min_delta, stopper.patience) == ("x", "less", 0.0, "1ep")
    samples = WrittenSamplesSection(prompts=("a",), interval="1ba")
    assert (samples.batch_size, samples.max_new_tokens, samples.do_sample) == (None, 20, False)
    folders = HfFoldersSection(save_folder="a", save_interval="1ba")
    assert (folders.huggingface_folder_name, folders.precision, folders.overwrite) == ("ba{batch}", "float32", True)
    assert CallbacksSection().speed_monitor.model_dump() == {
        "window_size": 10, "warmup": 2, "gpu_flops_available": None,
    }  # fmt: skip
    assert TensorboardLogger().flush_interval == 120
    assert MlflowLogger().flush_interval == 10


@pytest.mark.parametrize(
    ("section", "least", "refused"),
    [
        (LossSpikeSection, {"patience": 0, "window_size": 1, "loss_cap": 1e-9, "outlier_multiplier": 1.001}, 1),
        (CallbacksSection.Speed, {"window_size": 1, "warmup": 0, "gpu_flops_available": 1e-9}, 1),
        (TensorboardLogger, {"flush_interval": 1}, 1),
        (MlflowLogger, {"flush_interval": 0}, 1),
    ],
)
def test_the_least_values_of_what_watches_a_run(section: Any, least: dict[str, float], refused: float) -> None:
    """Each is taken, and no lower one."""
    section(**least)
    for name, value in least.items():
        beyond = 0 if value == 1e-9 else 1 if value == 1.001 else value - refused
        with pytest.raises(ValueError, match=name):
            section(**least | {name: beyond})


def test_the_limits_of_samples_and_early_stops() -> None:
    common = {"prompts": ("a",), "interval": "1ba", "do_sample": True}
    WrittenSamplesSection(**common, batch_size=1, max_new_tokens=1, temperature=1e-9, top_k=0, top_p=1)
    for bad in ({"batch_size": 0}, {"max_new_tokens": 0}, {"temperature": 0}, {"top_k": -1}, {"top_p": 0},
                {"top_p": 1.001}, {"prompts": ()}):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(bad))):
            WrittenSamplesSection(**common | bad)
    early = {"monitor": "LanguageCrossEntropy", "dataloader_label": "eval"}
    EarlyStopperSection(**early, min_delta=0)
    with pytest.raises(ValueError, match="min_delta"):
        EarlyStopperSection(**early, min_delta=-1e-9)
