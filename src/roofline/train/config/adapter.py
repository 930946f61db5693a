"""The section `adapter`: what of a model is trained, and how the rest of it is kept."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from roofline.train.config.section import Section

MOST_RANK = 512  # what `weights.adapters` reads
Base = Literal["bf16", "f32", "stored", "nf4", "q8_0", "q4_1"]


class AdapterSection(Section):
    """What is trained of a model whose files `model` names.

    method: "lora" trains two small matrices beside each of the model's, x -> W x + scale * B (A x) (Hu et al. 2021);
        "dora" also the length of each row of W + scale * B A (Liu et al. 2024); "full" all parameters.
    rank, alpha: scale is alpha / rank, or with rslora alpha / sqrt(rank) (Kalajdzievski 2023).
    targets: "all-linear", all matrices of the layers but routers, or module names of Hugging Face such as q_proj. Each
        expert of a layer has matrices of its own.
    base: how the model's matrices are kept, which are not trained: in bf16 or f32; "stored": in the format of the
        file; or quantised when the run begins. Quantised ones are widened matrix by matrix whenever they are used.
    """

    method: Literal["lora", "dora", "full"] = "lora"
    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] = 16
    alpha: Annotated[float, Field(gt=0, lt=1e6)] = 32
    rslora: bool = False
    targets: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    base: Base = "bf16"

    @model_validator(mode="after")
    def _of_matrices(self) -> "AdapterSection":
        fields = {name: field.default for name, field in type(self).model_fields.items() if name != "method"}
        spare = [name for name, default in fields.items() if getattr(self, name) != default]
        if spare and self.method == "full":
            value = getattr(self, spare[0])
            raise ValueError(
                f"{spare[0]}={value} belongs to lora and dora: method=full trains all parameters as they are"
            )
        return self

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
