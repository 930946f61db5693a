"""A contestant of benchmarks.train: reads how many steps to take, takes them, says how long each was."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.train import Task


def peak() -> int:
    """Bytes of memory that the process had at most."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def told() -> Iterator[int]:
    """Steps of each turn."""
    print("@" + json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        yield int(line)


def say(seconds: list[float], losses: list[float]) -> None:
    print("@" + json.dumps({"seconds": seconds, "losses": losses, "peak": peak()}), flush=True)


def roofline(task: Task, folder: Path, compiled: bool) -> None:
    """Our loop, as `roofline train` runs it."""
    from roofline.train.config.read import parse_config
    from roofline.train.parallel.processes import World
    from roofline.train.run.loop import Run

    config = parse_config(
        {
            "run_name": "bench",
            "run_folder": str(folder / f"run-{os.getpid()}"),
            "max_seq_len": task.length,
            "model": {"name": "llama-2-7b", "config_overrides": shape(task)},
            "train_loader": {"dataset": {"local": str(folder / "shards"), "shuffle": False}},
            "optimizer": {"name": "adamw", "lr": task.lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "algorithms": {"gradient_clipping": {"clipping_threshold": 1.0}},
            "max_duration": "1ep",
            "global_train_batch_size": task.batch,
            "device_train_microbatch_size": task.batch,
            "precision": "amp_bf16",
            **({"compile_config": {}} if compiled else {}),
        }
    )
    run = Run(config, World())
    run.begin()
    for steps in told():
        seconds, losses = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            losses.append(run.step())
            seconds.append(time.perf_counter() - begin)
        say(seconds, losses)
    run.close()


def shape(task: Task) -> dict[str, Any]:
    return {
        **{"width": task.width, "layers": task.layers, "heads": task.heads, "kv_heads": task.kv_heads},
        **{"head_dim": task.width // task.heads, "ffn": task.ffn, "vocab": task.vocab, "max_position": task.length},
    }


def trainer(task: Task, folder: Path, compiled: bool) -> None:
    """transformers' Trainer, its turns inside a callback."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=task.width,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        num_key_value_heads=task.kv_heads,
        intermediate_size=task.ffn,
        vocab_size=task.vocab,
        max_position_embeddings=task.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    table = np.load(folder / "rows.npy")
    turns = told()

    class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return len(table)

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            row = torch.from_numpy(table[index])
            return {"input_ids": row, "labels": row}

    class Turns(transformers.TrainerCallback):
        left = 0
        begin = 0.0
        seconds: list[float]

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self.left:
                self.left, self.seconds = next(turns, -1), []
                if self.left < 0:
                    control.should_training_stop = True
            if not self.seconds:
                self.begin = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.begin)
            self.begin, self.left = now, self.left - 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if not self.left and logs and "loss" in logs:
                say(self.seconds, [float(logs["loss"])])

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / f"trainer-{os.getpid()}"),
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=task.batch,
        learning_rate=task.lr,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        num_train_epochs=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile=compiled,
        optim="adamw_torch_fused",
        train_sampling_strategy="sequential",
        dataloader_drop_last=True,
        seed=1,
    )
    transformers.Trainer(model=model, args=arguments, train_dataset=Data(), callbacks=[Turns()]).train()


class PlainBlock(nn.Module):
    """A Llama block as one writes it by hand."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.heads = task.heads
        self.norms = nn.ModuleList(nn.RMSNorm(task.width, eps=1e-5) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(task.width, task.width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(task.width, task.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(task.ffn, task.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        y = self.norms[0](x)
        q, k, v = (f(y).view(rows, length, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(rows, length, width))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Plain(nn.Module):
    """The whole model, with its loss."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.embed = nn.Embedding(task.vocab, task.width)
        self.blocks = nn.ModuleList(PlainBlock(task) for _ in range(task.layers))
        self.norm = nn.RMSNorm(task.width, eps=1e-5)
        self.head = nn.Linear(task.width, task.vocab, bias=False)
        dim = task.width // task.heads
        angles = torch.arange(task.length)[:, None] / 1e4 ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def plain(task: Task, folder: Path, compiled: bool) -> None:
    """The loop of a tutorial: autocast, backward, clip, fused AdamW."""
    torch.manual_seed(1)
    model = Plain(task)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            wide = 0.02 / math.sqrt(2 * task.layers) if name.endswith(("o.weight", "down.weight")) else 0.02
            nn.init.normal_(parameter, std=wide)
    optimizer = torch.optim.AdamW(model.parameters(), task.lr, (0.9, 0.95), weight_decay=0.1, fused=True)
    forward: Any = torch.compile(model) if compiled else model
    table = torch.from_numpy(np.load(folder / "rows.npy"))
    at = 0
    for steps in told():
        seconds, losses = [], []
        for _ in range(steps):
            begin = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16):
                loss = forward(table[at : at + task.batch])
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            at += task.batch
            seconds.append(time.perf_counter() - begin)
        say(seconds, losses)


def main() -> None:
    """NAME TASK FOLDER."""
    name, text, folder = sys.argv[1:]
    task = Task(**json.loads(text))
    torch.set_num_threads(task.threads)
    kind, _, how = name.partition(" ")
    compiled = how == "compiled" or name == "roofline"
    {"roofline": roofline, "trainer": trainer, "plain": plain}[kind](task, Path(folder), compiled)


if __name__ == "__main__":
    main()
