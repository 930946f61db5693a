"""A contestant of benchmarks.finetune: reads how many steps to take, takes them, says how long each was."""

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.finetune import PACKED, PEFT, Task, trained
from benchmarks.train_worker import told


def forget_peak() -> None:
    """Loading a model and the first steps do not count."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of memory that the process had at most, without pages of files."""
    status = Path("/proc/self/status").read_text()
    high, files = (int(status.split(f"{name}:")[1].split()[0]) * 1024 for name in ("VmHWM", "RssFile"))
    return high - files


class Turn:
    """What is said of a turn, whose steps are added one by one."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = {"seconds": [], "losses": [], "real": [], "computed": []}
        self.number = 0

    def step(self, **figures: float) -> None:
        for name, value in figures.items():
            self.of[name].append(value)

    def say(self) -> None:
        print("@" + json.dumps({**self.of, "peak": peak()}), flush=True)
        for values in self.of.values():
            values.clear()
        if self.number == 0:
            forget_peak()
        self.number += 1


def roofline(task: Task, folder: Path, packed: bool) -> None:
    """Our loop, as `roofline finetune` runs it."""
    from roofline.train.config.read import parse_config
    from roofline.train.parallel.processes import World
    from roofline.train.run.loop import Run

    rows, batch = ("packed", task.packed) if packed else ("padded", task.batch)
    config = parse_config(
        {
            "run_name": "bench",
            "run_folder": str(folder / f"run-{rows}"),
            "max_seq_len": task.length,
            "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": str(folder / "model")},
            "adapter": {"rank": task.rank, "alpha": task.alpha, "base": "bf16"},
            "train_loader": {"name": "finetuning", "dataset": {"local": str(folder / rows), "shuffle": False}},
            "optimizer": {"name": "adamw", "lr": task.lr, "betas": [0.9, 0.999], "weight_decay": 0.0},
            "algorithms": {"gradient_clipping": {"clipping_threshold": 1.0}},
            "max_duration": "100ep",
            "global_train_batch_size": batch,
            "device_train_microbatch_size": batch,
            "precision": "amp_bf16",
            "probes": False,
        }
    )
    run = Run(config, World())
    run.begin()
    if not packed:  # what peft begins with
        run.recurring[-1].record()
        shutil.copytree(run.folder / "adapter", folder / "adapter")
    turn = Turn()
    for steps in told():
        for _ in range(steps):
            begin = time.perf_counter()
            loss = run.step()
            seconds, counted = time.perf_counter() - begin, run.gradients.counted
            turn.step(seconds=seconds, losses=loss, real=counted.real, computed=counted.computed)
        turn.say()
    run.close()


def peft(task: Task, folder: Path) -> None:
    """transformers' Trainer on peft's model, its turns inside a callback."""
    import transformers
    from peft import PeftModel

    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16)
    base.config.use_cache = False
    model = PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    data = [{"input_ids": ids, "labels": np.where(trained(ids), ids, -100)} for ids in samples(folder)]
    turns, turn = told(), Turn()
    counts: list[tuple[int, int]] = []

    def collate(batch: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
        width = max(len(each["input_ids"]) for each in batch)
        counts.append((sum(len(each["input_ids"]) for each in batch), width * len(batch)))
        filled = {name: np.full((len(batch), width), value) for name, value in (("input_ids", 0), ("labels", -100))}
        mask = np.zeros((len(batch), width), np.int64)
        for row, each in enumerate(batch):
            mask[row, : len(each["input_ids"])] = 1
            for name, array in filled.items():
                array[row, : len(each[name])] = each[name]
        return {name: torch.from_numpy(array) for name, array in {**filled, "attention_mask": mask}.items()}

    class Turns(transformers.TrainerCallback):
        left, begin, seconds, steps = 0, 0.0, 0.0, 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.left:
                self.left = next(turns, -1)
                if self.left < 0:
                    control.should_training_stop = True
                self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            self.seconds, self.begin, self.left = now - self.begin, now, self.left - 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not logs or "loss" not in logs:
                return
            real, computed = counts[self.steps]
            self.steps += 1
            turn.step(seconds=self.seconds, losses=float(logs["loss"]), real=real, computed=computed)
            if not self.left:
                turn.say()

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"trainer-{os.getpid()}"),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=task.batch,
        learning_rate=task.lr,
        adam_beta2=0.999,
        weight_decay=0.0,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        num_train_epochs=100,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        remove_unused_columns=False,
        seed=1,
    )
    transformers.Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Turns()]
    ).train()


def samples(folder: Path) -> list[np.ndarray]:
    """As `benchmarks.finetune.prepare` wrote them, in order."""
    with np.load(folder / "samples.npz") as arrays:
        return [arrays[f"arr_{number}"].astype(np.int64) for number in range(len(arrays.files))]


def main() -> None:
    """NAME TASK FOLDER."""
    name, text, folder = sys.argv[1:]
    task = Task(**json.loads(text))
    torch.set_num_threads(task.threads)
    if name == PEFT:
        peft(task, Path(folder))
    else:
        roofline(task, Path(folder), packed=name == PACKED)


if __name__ == "__main__":
    main()
