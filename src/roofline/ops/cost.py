"""What an op computes and moves: affine functions of the step, so that a price is known before anything runs."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Affine:
    """const + tokens*T + rows*R + context*C + pairs*P + experts*E + row_experts*F, all coefficients whole numbers.

    The step's symbols: tokens (query tokens), rows (tokens whose logits are wanted), context (keys read: the sum over
    segments of their context length), pairs (query-key pairs: the sum over query tokens of the keys each one sees),
    experts and row_experts (how many distinct experts of a layer the tokens, or the rows, are sent to: what is expected
    of them, so no whole number).
    """

    const: int = 0
    tokens: int = 0
    rows: int = 0
    context: int = 0
    pairs: int = 0
    experts: int = 0
    row_experts: int = 0

    def __add__(self, other: "Affine") -> "Affine":
        return Affine(
            const=self.const + other.const,
            tokens=self.tokens + other.tokens,
            rows=self.rows + other.rows,
            context=self.context + other.context,
            pairs=self.pairs + other.pairs,
            experts=self.experts + other.experts,
            row_experts=self.row_experts + other.row_experts,
        )

    def __mul__(self, factor: int) -> "Affine":
        return Affine(*(getattr(self, f.name) * factor for f in fields(self)))

    def at(
        self,
        *,
        tokens: int = 0,
        rows: int = 0,
        context: int = 0,
        pairs: int = 0,
        experts: float = 0.0,
        row_experts: float = 0.0,
    ) -> int:
        """The value for one step, rounded where experts are expected in parts."""
        affine = self.const + self.tokens * tokens + self.rows * rows + self.context * context + self.pairs * pairs
        return affine + round(self.experts * experts + self.row_experts * row_experts)

    def __str__(self) -> str:
        terms = [str(self.const)] if self.const else []
        terms += [f"{getattr(self, f.name)}*{f.name}" for f in fields(self)[1:] if getattr(self, f.name)]
        return " + ".join(terms) or "0"

    @classmethod
    def parse(cls, text: str) -> "Affine":
        """The inverse of str()."""
        amounts: dict[str, int] = {}
        for term in text.split("+"):
            number, _, symbol = term.strip().partition("*")
            amounts[symbol or "const"] = int(number)
        return cls(**amounts)

    @classmethod
    def per(cls, symbol: str | None, amount: int) -> "Affine":
        """`amount` for each unit of a symbol; None: a constant."""
        return cls(**{symbol or "const": amount})


@dataclass(frozen=True)
class InstructionCost:
    """The price of one instruction: operations (a multiply-add is 2) and bytes by what they are.

    link_bytes: what a rank receives from the others that share the model.
    """

    flops: Affine = Affine()
    weight_bytes: Affine = Affine()
    kv_bytes: Affine = Affine()
    act_bytes: Affine = Affine()
    link_bytes: Affine = Affine()

    def __add__(self, other: "InstructionCost") -> "InstructionCost":
        return InstructionCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))
