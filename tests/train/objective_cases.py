"""Log-probabilities that TRL's losses and ours are computed of, and the settings of the losses."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.train import sft

PAIRS = [  # loss, beta, label_smoothing
    ("sigmoid", 0.1, 0.0),
    ("sigmoid", 0.5, 0.0),
    ("hinge", 0.3, 0.0),
    ("ipo", 0.2, 0.0),
    ("robust", 0.3, 0.1),
    ("sigmoid_norm", 2.0, 0.0),
]
GRPO = [("dapo", 0.2, 0.0), ("grpo", 0.2, 0.05), ("dr_grpo", 0.28, 0.1), ("dapo", 0.28, 0.04)]  # loss, clip_high, kl


@dataclass(frozen=True)
class Pairs:
    """Three pairs, chosen and rejected in turn: log-probabilities float64 [6, 7], and which of them count."""

    policy: Any
    reference: Any
    counts: Any


@dataclass(frozen=True)
class Answers:
    """Three answers to each of two prompts, float64 [6, 5], and what TRL makes of rewards, float64 [6]."""

    scores: Any
    old: Any
    reference: Any
    counts: Any
    rewards: Any
    advantages: Any


def _counts(lengths: list[int], start: int, width: int) -> Any:
    places = torch.arange(width)
    return (places >= start) & (places < start + torch.tensor(lengths)[:, None])


def _random(shape: tuple[int, int], seed: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def pairs() -> Pairs:
    counts = _counts([3, 4, 5, 2, 1, 5], 1, 7)
    return Pairs(-3 * _random((6, 7), 1) * counts, -3 * _random((6, 7), 2) * counts, counts)


def answers() -> Answers:
    counts, scores = _counts([5, 3, 1, 2, 4, 5], 0, 5), -3 * _random((6, 5), 3)
    old, reference = scores + 0.8 * _random((6, 5), 4) - 0.4, scores + _random((6, 5), 5) - 0.5
    rewards = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.25, 3.0]], dtype=torch.float64)
    deviation = rewards.std(1, keepdim=True) + 1e-4
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / deviation).reshape(-1)
    return Answers(scores, old, reference, counts, rewards, advantages)


# A whole run: pairs of a chat template that writes nothing behind an answer's end, all of them in each step.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RUN = {"learning_rate": 1e-2, "beta": 0.5, "steps": 4}
RECORDS = [
    {
        "prompt": [{"role": "user", "content": f"What is {word}?"}],
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no no"}],
    }
    for word in ("one", "two", "three", "four")
]


def write_tiny(folder: Path) -> Path:
    """The model of that run."""
    model = sft.write_model(folder / "tiny")
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
