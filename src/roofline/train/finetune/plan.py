"""The configuration of a fine-tuning run: what `roofline train` takes, made from options and prepared data."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.yaml_text import read_yaml
from roofline.train.config.flatten import flatten
from roofline.train.finetune.options import PRESETS, SCHEDULES, FinetuneOptions
from roofline.train.finetune.prepare import HELD_OUT, TRAIN, Data, Prepared, Rows
from roofline.train.run_folder import ANSWERS, LOG, read_lines
from roofline.weights.checkpoint import Checkpoint

FILE, DATA = "finetune.yaml", "data"  # in a run's folder: its configuration, its shards
EPOCHS, LR, LR_FULL = 3.0, 2e-4, 2e-5
ROWS, LEAST_STEPS = 16, 100  # of a step, and in a run, unless options say otherwise
EVALUATIONS, CHECKPOINTS = 10, 5  # in a run
_EVALUATED = 8  # rows at a time
QUANTISING = ("nf4", "q8_0", "q4_1")  # values of --base
PLAIN = ("F32", "F16", "BF16")


def data_of(place: Path, options: FinetuneOptions, longest: int) -> Data:
    """What of a file or folder is prepared. longest: the context of the model."""
    is_free = options.pack and options.batch is None and options.steps is None
    return Data(
        (place,),
        min(options.max_seq_len, longest),
        least_rows=math.ceil(LEAST_STEPS / epochs_of(options)) if is_free else 0,
        split=options.split,
        form=options.format,
        pack=options.pack,
        drop=options.drop_long,
        share=0.0 if options.eval else options.eval_share,
        seed=options.seed,
        evaluation=(options.eval,) if options.eval else (),
    )


def stand_in(length: int) -> Prepared:
    """In place of data that is not prepared yet, so that the options can be checked first."""
    return Prepared(
        key="",
        form="text",
        records=2,
        length=length,
        row_length=length,
        pack=True,
        longest=length,
        split=0,
        ended=0,
        cut=0,
        left_out=0,
        train=Rows(1, 1, 2, 1),
        held_out=Rows(1, 1, 2, 1),
    )


def epochs_of(options: FinetuneOptions) -> float:
    """Return how often each sample is seen, where no steps are named."""
    return EPOCHS if options.epochs is None else options.epochs


def batch_of(options: FinetuneOptions, prepared: Prepared) -> int:
    """Return the rows of a step: those of the option, else ROWS or as many fewer as LEAST_STEPS steps ask for."""
    if options.batch is not None:
        return options.batch
    return min(ROWS, max(1, int(epochs_of(options) * prepared.train.rows // LEAST_STEPS)))


def steps_of(options: FinetuneOptions, prepared: Prepared) -> int:
    """The steps of the run."""
    return options.steps or max(1, math.ceil(epochs_of(options) * prepared.train.rows / batch_of(options, prepared)))


def configuration(model: str, options: FinetuneOptions, prepared: Prepared, folder: Path, precision: str) -> JsonObject:
    """The configuration as a YAML file has it. precision: bf16, fp16 or fp32."""
    steps, is_full = steps_of(options, prepared), options.method == "full"
    lr = options.lr if options.lr is not None else LR_FULL if is_full else LR
    loader: JsonObject = {"name": "finetuning", "dataset": {"local": str(folder / DATA / TRAIN), "shuffle": True}}
    settings: JsonObject = {
        "run_name": folder.name,
        "run_folder": str(folder),
        "max_seq_len": prepared.row_length,
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": model},
        "adapter": _adapter(options),
        "tokenizer": {"name": model},
        "train_loader": loader,
        "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.999], "weight_decay": 0.0},
        "scheduler": {"name": SCHEDULES[options.schedule], "t_warmup": f"{round(0.03 * steps)}ba"},
        "algorithms": {"gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0}},
        "max_duration": f"{steps}ba",
        "global_train_batch_size": batch_of(options, prepared),
        "device_eval_batch_size": _EVALUATED,
        "precision": precision if precision == "fp32" else f"amp_{precision}",
        "seed": options.seed,
        "probes": False,
        "save_interval": f"{max(1, steps // CHECKPOINTS)}ba",
        "save_num_checkpoints_to_keep": 1,
        "autoresume": True,
    }
    if prepared.held_out is not None:
        held_out: JsonObject = {"name": "finetuning", "dataset": {"local": str(folder / DATA / HELD_OUT)}}
        settings |= {"eval_loader": held_out, "eval_interval": f"{max(1, steps // EVALUATIONS)}ba", "eval_first": True}
    return settings


def _adapter(options: FinetuneOptions) -> JsonObject:
    if options.method == "full":
        return {"method": "full"}
    targets: str | list[str] = options.targets
    if options.targets != "all-linear":
        targets = [name.strip() for name in options.targets.split(",") if name.strip()]
        if not targets:
            raise ConfigError("--targets names no matrix: all-linear stands for all, q_proj,v_proj for these two")
    return {
        "method": options.method,
        "rank": options.rank,
        "alpha": options.alpha,
        "rslora": options.rslora,
        "targets": targets,
        "base": options.base,
    }


def computes_on_cpu() -> bool:
    """Whether a run here has no accelerator."""
    import torch

    return not torch.accelerator.is_available()


def precision_of(options: FinetuneOptions, is_cpu: bool) -> tuple[str, list[str]]:
    """The precision to compute in, and what of the preset is otherwise than published."""
    notes = list(PRESETS[options.preset].notes) if options.preset else []
    if options.precision == "fp16" and is_cpu:
        source = f"preset {options.preset}" if options.preset else "--precision fp16"
        return "bf16", [*notes, f"{source} computes in fp16, which this CPU has no fast products of: bf16 instead"]
    return options.precision, notes


def notes_of_base(options: FinetuneOptions, checkpoint: Checkpoint) -> list[str]:
    """What of a base is not trained, as it is no part of a text model, and what happens to one that had been quantised
    before and is quantised again, for people."""
    notes = [] if checkpoint.other_parts is None else [f"trained is {checkpoint.other_parts}"]
    if options.method == "full" or options.base not in QUANTISING:
        return notes
    formats = {info.format for name, info in checkpoint.tensors.items() if name.startswith("layers.") if info.shape[1:]}
    lost = sorted(formats - {*PLAIN, options.base.upper()})
    if not lost:
        return notes
    stored = f"{checkpoint.path.name} has its matrices in {' and '.join(lost)}"
    return [*notes, f"{stored}, which --base {options.base} rounds a second time; --base stored keeps them as they are"]


def write(settings: JsonMapping, folder: Path) -> Path:
    """Write the configuration into the run's folder, also in place of one whose run never began, as its settings were
    refused. Raises ConfigError where one of another run is there."""
    import yaml

    path = folder / FILE
    if path.exists():
        earlier = _earlier(path)
        difference = _difference(earlier, settings) if earlier is not None else "it is damaged"
        if not difference:
            return path
        if has_begun(folder):
            raise ConfigError(
                f"{path} is of a run with other settings ({difference}): repeat that run's command to go on with it, "
                "or name another folder with --out"
            )
        (folder / ANSWERS).unlink(missing_ok=True)  # of a model that may be another one
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(json.loads(json.dumps(settings)), sort_keys=False, allow_unicode=True))
    return path


def _earlier(path: Path) -> JsonMapping | None:
    """The settings in a file that an earlier run wrote; None if it was changed into something else."""
    import yaml

    try:
        read = read_yaml(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return read.value if isinstance(read.value, dict) and not read.repeated else None


def has_begun(folder: Path) -> bool:
    """Whether a run has trained a step in a folder, which this process reserved; what is there otherwise was prepared
    for settings that were refused."""
    if any(folder.glob("checkpoints/*")):
        return True
    log = folder / LOG
    return log.exists() and any("loss" in line for line in read_lines(log))


def _difference(earlier: Mapping[str, object], settings: JsonMapping) -> str:
    """The first key whose value differs."""
    a, b = dict(flatten(earlier)), dict(flatten(json.loads(json.dumps(settings))))
    key = next((key for key in [*b, *a] if a.get(key) != b.get(key)), None)
    return "" if key is None else f"{key} is {a.get(key)} there and {b.get(key)} here"
