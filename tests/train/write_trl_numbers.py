"""Writes trl_numbers.json: what TRL computes of the log-probabilities in `objective_cases.py`, losses and slopes.

Needs TRL and what it imports (written with trl 1.16.0): `python tests/train/write_trl_numbers.py`. Models are stand-ins
that return the log-probabilities; everything behind them is TRL's own `_compute_loss`.
"""

import json
import sys
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.train.objective_cases import GRPO, PAIRS, RECORDS, RUN, answers, pairs, write_tiny


class _Alone:
    """The accelerator of one process."""

    num_processes, device = 1, torch.device("cpu")

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, **_: Any) -> Any:
        return x

    def autocast(self) -> Any:
        return nullcontext()


def _common() -> dict[str, Any]:
    return {
        "model": SimpleNamespace(training=True),
        "accelerator": _Alone(),
        "aux_loss_enabled": False,
        "_metrics": defaultdict(lambda: defaultdict(list)),
    }


def dpo(loss: str, beta: float, smoothing: float) -> dict[str, Any]:
    from trl.trainer import dpo_trainer

    dpo_trainer.is_peft_model = lambda model: False
    dpo_trainer.disable_gradient_checkpointing = lambda *_: nullcontext()
    given = pairs()
    # TRL has all chosen answers before all rejected ones, and a mask that has the first token, too.
    order = [0, 2, 4, 1, 3, 5]
    policy = given.policy[order].clone().requires_grad_()
    mask = torch.nn.functional.pad(given.counts[order].long(), (1, 0))
    shown = torch.zeros_like(given.policy)
    outputs = SimpleNamespace(log_probs=policy, entropy=shown, mean_logits=shown, is_top1=shown.bool())
    trainer = SimpleNamespace(
        **_common(),
        ref_model=lambda **_: SimpleNamespace(log_probs=given.reference[order]),
        ld_alpha=None,
        precompute_ref_logps=False,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        f_divergence_type="reverse_kl",
        loss_types=[loss],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"input_ids": torch.zeros_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    result = dpo_trainer.DPOTrainer._compute_loss(trainer, lambda **_: outputs, inputs, False)
    result.backward()
    slopes, figures = torch.empty_like(policy), trainer._metrics["train"]
    slopes[order] = policy.grad
    names = ("rewards/chosen", "rewards/rejected", "rewards/accuracies")
    return {"loss": result.item(), "slopes": slopes.tolist(), "figures": [figures[name][0] for name in names]}


def grpo(loss: str, high: float, kl: float) -> dict[str, Any]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    given = answers()
    scores, mask = given.scores.clone().requires_grad_(), given.counts.long()
    trainer = SimpleNamespace(
        **_common(),
        _get_per_token_logps_and_entropies=lambda *_, **__: (scores, torch.zeros_like(scores), None),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=kl,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        loss_type=loss,
        epsilon_low=0.2,
        epsilon_high=high,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=16,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
    )
    prompt = torch.zeros(len(mask), 2, dtype=torch.int64)
    inputs = {
        "prompt_ids": prompt,
        "prompt_mask": prompt + 1,
        "completion_ids": mask,
        "completion_mask": mask,
        "advantages": given.advantages,
        "old_per_token_logps": given.old,
        "ref_per_token_logps": given.reference,
        "num_items_in_batch": mask.sum(),
    }
    result = GRPOTrainer._compute_loss(trainer, None, inputs)
    result.backward()
    return {"loss": result.item(), "slopes": scores.grad.tolist()}


def dpo_run(folder: Path) -> list[dict[str, float]]:
    """Loss, rewards and gradient norm of each step of a run of TRL's trainer, all pairs in each."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    place = write_tiny(folder)
    tokenizer = AutoTokenizer.from_pretrained(place)
    tokenizer.pad_token = "<|endoftext|>"
    settings = DPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=len(RECORDS),
        max_steps=RUN["steps"],
        learning_rate=RUN["learning_rate"],
        lr_scheduler_type="constant",
        beta=RUN["beta"],
        logging_steps=1,
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=False,
    )
    model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    trainer = DPOTrainer(
        model=model, args=settings, train_dataset=Dataset.from_list(RECORDS), processing_class=tokenizer
    )
    trainer.train()
    names = {"loss": "loss", "rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected"}
    names |= {"grad_norm": "grad_norm"}
    steps = [line for line in trainer.state.log_history if "loss" in line]
    return [{ours: float(line[theirs]) for theirs, ours in names.items()} for line in steps]


if __name__ == "__main__":
    import trl

    numbers = {
        "trl": trl.__version__,
        "dpo": {" ".join(map(str, case)): dpo(*case) for case in PAIRS},
        "grpo": {" ".join(map(str, case)): grpo(*case) for case in GRPO},
        "run": dpo_run(Path(tempfile.mkdtemp())),
    }
    Path(__file__).with_name("trl_numbers.json").write_text(json.dumps(numbers) + "\n")
