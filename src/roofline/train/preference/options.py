"""The options of runs with a preference method, and the configuration that is made of them."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.common.options import Options, option, same_option
from roofline.train.finetune.options import BATCH, RATE, TOPIC_RUN, FinetuneOptions
from roofline.train.preference.pair_files import CHAT

if TYPE_CHECKING:
    from roofline.train.finetune.prepare import Prepared

TOPIC_PAIRS, TOPIC_ANSWERS = "Preference", "Answers and rewards"
LR, LR_FULL = 5e-5, 1e-6
SMALLEST = 1e-6  # of what has to be above 0


@dataclass(frozen=True)
class CommonOptions(Options):
    """What both methods have, as `roofline finetune` has it."""

    format: str | None = option(
        None, f"{CHAT}: a prompt that is a string is a user's message; without it, text.", choices=(CHAT,), topic="Data"
    )
    split: str | None = same_option(FinetuneOptions, "split")
    show: int = same_option(FinetuneOptions, "show")
    eval_share: float = same_option(FinetuneOptions, "eval_share")
    max_seq_len: int = same_option(FinetuneOptions, "max_seq_len")
    method: str = same_option(FinetuneOptions, "method")
    rank: int = same_option(FinetuneOptions, "rank")
    alpha: float = same_option(FinetuneOptions, "alpha")
    rslora: bool = same_option(FinetuneOptions, "rslora")
    targets: str = same_option(FinetuneOptions, "targets")
    base: str = same_option(FinetuneOptions, "base")
    out: Path | None = same_option(FinetuneOptions, "out")
    epochs: float | None = option(None, "Times that each sample is seen. Default: 1.", topic=TOPIC_RUN)
    steps: int | None = same_option(FinetuneOptions, "steps")
    lr: float | None = option(
        None,
        f"Learning rate. Default: {LR:g}, or {LR_FULL:g} with --method full.",
        minimum=1e-12,
        topic=TOPIC_RUN,
        key=RATE,
    )
    schedule: str = same_option(FinetuneOptions, "schedule")
    precision: str = same_option(FinetuneOptions, "precision")
    seed: int = same_option(FinetuneOptions, "seed")
    ask: int = same_option(FinetuneOptions, "ask")
    serve: bool = same_option(FinetuneOptions, "serve")
    port: int = same_option(FinetuneOptions, "port")

    def as_finetune(self, batch: int, pack: bool) -> FinetuneOptions:
        """The options that `roofline finetune` has under the same names."""
        taken_fields = {field.name for field in fields(FinetuneOptions)} - {"format"}
        values = {name: getattr(self, name) for name in taken_fields if hasattr(self, name)}
        lr = self.lr if self.lr is not None else LR_FULL if self.method == "full" else LR
        epochs = 1.0 if self.epochs is None and self.steps is None else self.epochs
        return FinetuneOptions(**values | {"lr": lr, "epochs": epochs, "batch": batch, "pack": pack})


@dataclass(frozen=True)
class PreferOptions(CommonOptions):
    """Options of DPO."""

    batch: int = option(8, "Rows of a step; a row has as many pairs as fit.", minimum=1, topic=TOPIC_RUN, key=BATCH)
    pack: bool = option(True, "Put several pairs into a row, none of which sees another.", topic="Data")
    loss: str = option(
        "sigmoid",
        "The loss of a pair.",
        choices=("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"),
        topic=TOPIC_PAIRS,
        key="dpo.loss",
    )
    beta: float = option(
        0.1, "How strongly the model is held to what it was.", minimum=SMALLEST, topic=TOPIC_PAIRS, key="dpo.beta"
    )
    label_smoothing: float = option(
        0.0,
        "Part of the pairs that may be the wrong way round, of the losses sigmoid and robust.",
        topic=TOPIC_PAIRS,
        key="dpo.label_smoothing",
    )

    def objective(self) -> JsonObject:
        """The section `dpo`."""
        return {"loss": self.loss, "beta": self.beta, "label_smoothing": self.label_smoothing}


@dataclass(frozen=True)
class ReinforceOptions(CommonOptions):
    """Options of GRPO."""

    batch: int = option(8, "Prompts of a step.", minimum=1, topic=TOPIC_RUN, key=BATCH)
    reward: str = option(
        "exact_match",
        "FILE.py:FUNCTION, which gives a number for an answer and the prompt's record; exact_match: 1 for the record's "
        "answer.",
        topic=TOPIC_ANSWERS,
        key="grpo.reward",
    )
    group: int = option(
        8, "Answers sampled to each prompt.", minimum=2, maximum=128, topic=TOPIC_ANSWERS, key="grpo.group"
    )
    max_new_tokens: int = option(
        128, "Longest answer.", minimum=1, unit="tokens", topic=TOPIC_ANSWERS, key="grpo.max_new_tokens"
    )
    temperature: float = option(
        1.0, "Of the draws, and of what is trained.", minimum=SMALLEST, topic=TOPIC_ANSWERS, key="grpo.temperature"
    )
    clip: float = option(
        0.2, "How far the ratio of a token's probabilities counts.", topic=TOPIC_ANSWERS, key="grpo.clip"
    )
    kl: float = option(
        0.0, "Weight of the divergence from the model as it was.", minimum=0, topic=TOPIC_ANSWERS, key="grpo.kl"
    )
    iterations: int = option(1, "Updates on the same answers.", minimum=1, topic=TOPIC_ANSWERS, key="grpo.iterations")
    loss: str = option(
        "dapo",
        "What the loss is the mean over.",
        choices=("dapo", "grpo", "dr_grpo"),
        topic=TOPIC_ANSWERS,
        key="grpo.loss",
    )
    backend: str = option(
        "cpu",
        "What samples; reference, slowly, computes as training does.",
        choices=("cpu", "reference"),
        topic=TOPIC_ANSWERS,
        key="grpo.backend",
    )

    def objective(self) -> JsonObject:
        """The section `grpo`."""
        names = ("group", "max_new_tokens", "temperature", "clip", "kl", "iterations", "loss", "backend")
        file, colon, function = self.reward.rpartition(":")
        reward = f"{Path(file).resolve()}:{function}" if colon else self.reward
        return {"reward": reward} | {name: getattr(self, name) for name in names}


def configuration(
    model: str, options: PreferOptions | ReinforceOptions, prepared: "Prepared", folder: Path, precision: str
) -> JsonObject:
    """The configuration of the run as a YAML file has it."""
    from roofline.train.finetune import plan  # which needs numpy: commands declare their options without it

    common = options.as_finetune(options.batch, prepared.pack)
    settings = plan.configuration(model, common, prepared, folder, precision)
    name = "dpo" if isinstance(options, PreferOptions) else "grpo"
    return settings | {name: options.objective()}


def check_room(options: ReinforceOptions) -> None:
    """Raise ConfigError where answers leave no room for prompts."""
    if options.max_new_tokens > options.max_seq_len - 2:
        raise ConfigError(
            f"--max-new-tokens {options.max_new_tokens} leaves no room for a prompt in --max-seq-len "
            f"{options.max_seq_len}: raise that one, or lower this one"
        )
