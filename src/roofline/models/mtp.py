"""Multi-token prediction: a layer behind a model's last one that guesses the token after the next.

Its rows begin with those of the model it guesses for: h' = block(W [norm(embed(next id)); norm(h)]), where h is the row
that the model's head reads. It has a last norm of its own, and shares embedding and head. Here it is a model of one
layer, whose Program has hidden rows as an input; a family that has such layers says so with a function `guessing`.

Sources: DeepSeek-AI 2024 (DeepSeek-V3), and transformers' `MtpLayer`, whose rows behind the norm go in again.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from roofline import ops
from roofline.models.config import ModelConfig
from roofline.models.family import Family, ForwardBatch
from roofline.models.spec import Param, Weights, expand
from roofline.ops.symbol import Value

# The parameters that such a layer has beside those of its block, behind "layers.N.".
JOIN, EMBED_NORM, HIDDEN_NORM, LAST_NORM = "mtp.fc", "mtp.embed_norm", "mtp.hidden_norm", "mtp.final_norm"


@runtime_checkable
class Guessing(Protocol):
    """A family whose models may have a layer that guesses."""

    def guessing(self, cfg: ModelConfig) -> ModelConfig:
        """The configuration of such a layer: that of the family's model of one layer, which the block of it is."""


@dataclass(frozen=True)
class GuessingLayer:
    """The family of such a layer. family: of its block, and of the model that it guesses for; number: of the layer,
    counted on behind the model's."""

    family: Family
    number: int

    def check(self, cfg: ModelConfig) -> None:
        """Raises UnsupportedError on what the family does not have."""
        self.family.check(cfg)

    def spec(self, cfg: ModelConfig) -> tuple[Param, ...]:
        """The parameters, in the order of use: embedding and head are those of the model."""
        before, width = f"layers.{self.number}.", cfg.width
        table = []
        for param in expand(self.family.spec(cfg), cfg.layers):
            if param.name == "final_norm.weight":
                table.append(replace(param, name=f"{before}{LAST_NORM}.weight"))
            elif param.name.startswith("layers."):
                table.append(replace(param, name=f"{before}{param.name.split('.', 2)[2]}", layers=None))
            else:
                table.append(param)
        first = next(at for at, param in enumerate(table) if param.name.startswith(before))
        table[first:first] = [
            Param(f"{before}{EMBED_NORM}.weight", (width,), "replicate"),
            Param(f"{before}{HIDDEN_NORM}.weight", (width,), "replicate"),
            Param(f"{before}{JOIN}.weight", (width, 2 * width), "replicate"),
        ]
        return tuple(table)

    def own_params(self, cfg: ModelConfig) -> tuple[Param, ...]:
        """The parameters that the model does not have."""
        return tuple(param for param in self.spec(cfg) if param.name.startswith(f"layers.{self.number}."))

    def embed(self, cfg: ModelConfig, w: Weights, batch: ForwardBatch) -> Value:
        """ids [tokens] and hidden rows [tokens, width] -> x [tokens, width]."""
        ours = w.layers[0].mtp
        e = ops.rms_norm(self.family.embed(cfg, w, batch), ours.embed_norm.weight, cfg.norm_eps)
        h = ops.rms_norm(batch.hidden, ours.hidden_norm.weight, cfg.norm_eps)
        return ops.linear(ops.join_heads(e, h, 1), ours.fc.weight)

    def block(self, cfg: ModelConfig, w: Weights, x: Value, layer: int, batch: ForwardBatch) -> Value:
        """The family's block on x [tokens, width]."""
        return self.family.block(cfg, w, x, layer, batch)

    def head(self, cfg: ModelConfig, w: Weights, x: Value, batch: ForwardBatch) -> Value:
        """The model's head behind the layer's own norm."""
        view = Weights()
        vars(view).update(vars(w))
        view.final_norm = w.layers[0].mtp.final_norm
        return self.family.head(cfg, view, x, batch)


def guessing_layer(family: Family, cfg: ModelConfig) -> tuple[GuessingLayer, ModelConfig] | None:
    """The first layer that guesses of a model, and its configuration; None for a family that has none."""
    if not isinstance(family, Guessing):
        return None
    return GuessingLayer(family, cfg.layers), family.guessing(cfg)
