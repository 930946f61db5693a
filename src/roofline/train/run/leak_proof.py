"""Checks at the start of a run that no document of a packed row sees another, with the attention that the run uses.

A short row of three documents is computed twice, with other tokens in the middle one. Nothing may change for the two
around it: neither their logits nor the gradients of what enters their first layer. Nor may their losses have a gradient
in the middle document. A pass without boundaries shows how large the change of a leak would be.
"""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from roofline.common.errors import RooflineError
from roofline.common.json_types import JsonObject
from roofline.train.model.modules import IGNORED
from roofline.train.parallel.processes import forget_step, fsdp, reshard

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

LENGTH = 24  # of the row, unless the model is compiled for rows of another length
ROUNDING = 0.05  # of a leak's change: the products of experts depend on how many rows a batch gives to each


def prove(run: "Run") -> JsonObject:
    """The largest changes outside of the document that was changed, and the seconds that it took.

    All ranks take part, with the same row. Raises RooflineError where something leaks.
    """
    started = time.perf_counter()
    tokens, other, documents = _rows(run)
    middle = documents[0] == 1
    compiled = run.config.compile_config is not None and run.config.device_train_microbatch_size != "auto"
    eager = run.config.compile_config is not None and not compiled
    with torch.compiler.set_stance("force_eager") if eager else nullcontext():
        logits, gradients = _computed(run, tokens, documents)
        other_logits, other_gradients = _computed(run, other, documents)
        with torch.no_grad(), run.gradients.autocast():
            joined = run.model(tokens).float()
    if run.world.grouped:  # what is before the first layer got no gradient, for which the sharding waits
        forget_step(run.model)
    run.model.zero_grad(set_to_none=True)
    reshard(run.model, run.world)
    control = float((joined - logits)[:, documents[0] == 2].abs().max())
    changes = {
        "logits": float((logits - other_logits)[:, ~middle].abs().max()),
        "gradients": float((gradients - other_gradients)[:, ~middle].abs().max()),
        "into_others": float(gradients[:, middle].abs().max()),
    }
    limits = dict.fromkeys(changes, 0.0)
    if run.shape.get("experts"):
        limits |= {"logits": ROUNDING * control, "gradients": ROUNDING * float(gradients.abs().max())}
    leaks = [name for name, change in changes.items() if not change <= limits[name]]
    if leaks:
        what = ", ".join(f"{name} by {changes[name]:.3g}" for name in leaks)
        raise RooflineError(
            f"documents of a packed row see each other: other tokens in one change what is around it ({what}; without "
            f"boundaries the logits change by {control:.3g}). Nothing was trained: train without packing (--no-pack), "
            "and report it with this model's name"
        )
    return {**changes, "without_boundaries": control, "seconds": round(time.perf_counter() - started, 3)}


def _rows(run: "Run") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, tokens with another middle document, and the documents; int64 [rows, length]."""
    config, device = run.config, run.world.device
    compiled = config.compile_config is not None and config.device_train_microbatch_size != "auto"
    length = config.max_seq_len if compiled else min(config.max_seq_len, LENGTH)
    count = (run.gradients.size or 1) if compiled else 1
    vocab, random = run.shape["vocab"], torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (count, length), generator=random)
    at = torch.arange(length)
    documents = ((at >= length // 3).long() + (at >= length * 2 // 3)).expand(count, length).contiguous()
    shift = torch.randint(1, vocab, (count, length), generator=random)
    other = torch.where(documents == 1, (tokens + shift) % vocab, tokens)
    return tokens.to(device), other.to(device), documents.to(device)


def _computed(run: "Run", tokens: torch.Tensor, documents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits [rows, length, vocab], and the gradients of what enters the first layer [rows, length, width] from
    the losses of all documents but the middle one."""
    model = run.model
    entered: list[torch.Tensor] = []

    def enter(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        entered.append(args[0].detach().requires_grad_())  # below a frozen model nothing else asks for a gradient
        return entered[-1], *args[1:]

    goals = tokens.roll(-1, 1)
    goals[:, -1] = IGNORED
    goals[:, :-1][(documents[:, :-1] != documents[:, 1:]) | (documents[:, :-1] == 1)] = IGNORED
    handle = model.blocks[0].register_forward_pre_hook(enter)
    if run.world.grouped:
        fsdp(model).set_requires_gradient_sync(True)
    try:
        with run.gradients.autocast():
            logits = model(tokens, documents=documents)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), goals.flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
    finally:
        handle.remove()
    gradient = entered[0].grad
    assert gradient is not None
    return logits.detach().float(), gradient.float().view(*tokens.shape, -1)
