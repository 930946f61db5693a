"""The sections of what a run may minimise instead of the cross entropy."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from roofline.train.config.section import Section


class DpoSection(Section):
    """Direct preference optimisation (Rafailov et al. 2023): rows hold pairs of answers, the better one first.

    loss: "sigmoid", with label_smoothing the conservative one; "hinge" (SLiC); "ipo" (Azar et al. 2023), of mean
        log-probabilities; "robust" (Chowdhury et al. 2024), which corrects for a share label_smoothing of wrong labels;
        "sigmoid_norm", of mean log-probabilities.
    beta: how strongly the model is held to the reference, which is the model as the run begins.
    """

    loss: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"] = "sigmoid"
    beta: Annotated[float, Field(gt=0)] = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0

    @model_validator(mode="after")
    def _smooths(self) -> "DpoSection":
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing={self.label_smoothing:g} is of the losses sigmoid and robust")
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("loss=robust needs label_smoothing, the share of wrong labels")
        return self


class GrpoSection(Section):
    """Group relative policy optimisation (Shao et al. 2024): rows hold prompts, whose answers are sampled and rewarded.

    group: answers sampled for each prompt. max_new_tokens: of an answer. temperature: of the draws, and of the
        probabilities that are trained.
    reward: "FILE.py:FUNCTION", or "exact_match" with the answers that the data set has.
    clip, clip_high: how far a token's probability may move from that of its sampling, as a ratio below and above 1.
    backend: of the engine that samples: "cpu", or "reference", slow, which computes in plain float32 as training does.
    kl: weight of the divergence from the model as the run begins.
    iterations: steps on the same answers.
    loss: the mean over all tokens ("dapo"), over each answer's mean ("grpo"), or tokens / (answers * max_new_tokens)
        ("dr_grpo"). scale: advantages are divided by the deviation of the group's rewards ("group"), or not ("none").
    """

    group: Annotated[int, Field(ge=2, le=128)] = 8
    max_new_tokens: Annotated[int, Field(ge=1)] = 128
    temperature: Annotated[float, Field(gt=0)] = 1.0
    reward: str
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_high: Annotated[float, Field(gt=0)] | None = None
    backend: Literal["cpu", "reference"] = "cpu"
    kl: Annotated[float, Field(ge=0)] = 0.0
    iterations: Annotated[int, Field(ge=1)] = 1
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    scale: Literal["group", "none"] = "group"

    @model_validator(mode="after")
    def _compares(self) -> "GrpoSection":
        if self.kl and self.temperature != 1:
            reason = "the reference is computed at 1"
            raise ValueError(f"kl={self.kl:g} needs temperature=1, not {self.temperature:g}: {reason}")
        return self
