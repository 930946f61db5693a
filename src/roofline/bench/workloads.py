"""What engines are timed on: fixed shapes over pseudo-random ids, the same for every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WARM_UP = 32
MODULUS = 2**31


@dataclass(frozen=True)
class BatchWorkload:
    """`requests` at once, each with a prompt of `prompt` tokens and an answer of `answer`.

    The time of a decode counts from the first token of the answer on. name: the key of its rate in a record.
    """

    name: str
    kind: Literal["prefill", "decode", "serve"]
    requests: int
    prompt: int
    answer: int

    @property
    def tokens(self) -> int:
        """Tokens that its rate counts: prompt tokens of prefill, generated tokens of the others."""
        return self.prompt if self.kind == "prefill" else self.requests * self.answer

    @property
    def tokens_held(self) -> int:
        """Tokens in the cache halfway through: with the weights, what its steps read again and again."""
        return self.prompt // 2 if self.kind == "prefill" else self.requests * (self.prompt + self.answer // 2)


_SERVED = ((1, 128, 64), (8, 128, 64), (64, 128, 64), (32, 700, 40))
_ALL = (
    *(BatchWorkload(f"prefill_{n}_tok_s", "prefill", 1, n, 1) for n in (128, 512, 2000)),
    *(BatchWorkload(f"decode_ctx{n}_tok_s", "decode", 1, n, 64) for n in (8, 1024)),
    *(
        BatchWorkload(f"serve_{n}x{prompt}+{answer}_out_tok_s", "serve", n, prompt, answer)
        for n, prompt, answer in _SERVED
    ),
)
WORKLOADS = {workload.name: workload for workload in _ALL}  # in the order they run


def token_ids(count: int, seed: int = 0, vocab: int = 30000) -> list[int]:
    """`count` ids in [5, vocab), from a linear congruential generator, so that any program can make the same."""
    ids: list[int] = []
    state = seed * 7919 + 12345
    while len(ids) < count:
        state = (state * 1103515245 + 12345) % MODULUS
        ids.append(5 + state % (vocab - 5))
    return ids


def chosen(rows: Sequence[str] | None, serve: bool) -> list[str]:
    """The rows to run: those whose key contains one of `rows` (None: all), without the serve rows unless `serve`."""
    names = [name for name, workload in WORKLOADS.items() if serve or workload.kind != "serve"]
    return [name for name in names if rows is None or any(part in name for part in rows)]
