"""A case of gpu_kernels.py: what is run, how its results are held against float64's, what its inputs are made of.

Everything that a run writes is poisoned before: its results, what is named as scratch, and what its launcher allocates.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roofline.backends.gpu.kernels.float8 import FLAVOURS, Float8Weight
from roofline.backends.gpu.pack import pack
from roofline.hardware.chips.chips import Chip
from roofline.ops import formats

# Of ||out - want|| / ||want||. A rounding moves a value by at most 2^-8 in bf16, 2^-11 in f16, by a third of that in
# the mean, and a case has up to three in a row (gated products: gate, up, result): 4e-3 in bf16. Sums in float32 add
# 3e-7 in the interpreter; matrix units cut digits off instead of rounding, 1e-5 perhaps.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
# A row's and a column's may be so many times as large: they average over fewer values, a column over one where there
# is one row. The largest found in the interpreter with sums of 4096 is 9.7e-3, a value whose three roundings went one
# way (they can make 1.3e-2); of attention over 2048 keys, whose weights are rounded, 6e-3. Hopper adds up 8-bit
# products in 14 bits, about 5e-4 more. A wrong column has about 1, one that lacks 32 of 4096 summands 9e-2.
FEWER = 3
NAN = {torch.float8_e4m3fn: 0x7F, torch.float8_e4m3fnuz: 0x80}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POOL = 256  # different rows of a matrix
ONCE = 1e-6  # tolerance of one operation in float32


@dataclass(frozen=True)
class Shapes:
    """What is run: rows of decode and prefill, a model's sizes, contexts."""

    width: int = 4096
    ffn: int = 11008
    vocab: int = 32000
    heads: int = 32
    head_dim: int = 128
    few: tuple[int, ...] = (1, 16)
    some: int = 64
    many: int = 2048
    context: int = 2048
    sequences: tuple[int, ...] = (1, 8, 16, 64)


TINY = Shapes(256, 288, 300, 4, 32, (1, 3), 20, 40, 40, (1, 3))


@dataclass(frozen=True)
class Result:
    """out: what a run writes, None where it returns a new tensor; tolerance: 0 where all must be equal; start: what out
    holds before a run, if not poison."""

    name: str
    out: Tensor | None
    tolerance: float
    start: Tensor | None = None


def result(out: Tensor, name: str = "out", *, tolerance: float | None = None, start: Tensor | None = None) -> Result:
    """With the tolerance of its dtype; integers and 8-bit floats are equal or wrong."""
    return Result(name, out, TOLERANCE.get(out.dtype, 0.0) if tolerance is None else tolerance, start)


@dataclass(frozen=True)
class Case:
    """run: writes the results, or returns them all; want: float64 of the same shapes, or equal integers, NaN where a
    run writes nothing; flops, nbytes: the least that it takes; roof: which flops ("bf16", "fp8"); scratch: what a run
    may leave in any state."""

    name: str
    run: Callable[[], Any]
    want: Callable[[], tuple[Tensor, ...]]
    results: tuple[Result, ...]
    flops: int
    nbytes: int
    roof: str = "bf16"
    scratch: tuple[Tensor, ...] = ()

    @property
    def tolerance(self) -> float:
        """Of `error`: the first result's."""
        return self.results[0].tolerance


def poison(tensor: Tensor) -> None:
    """NaN in all of it, or the least integer."""
    if tensor.dtype in NAN:
        tensor.view(torch.uint8).fill_(NAN[tensor.dtype])
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


@contextmanager
def _memory_poisoned() -> Iterator[None]:
    """torch fills what it allocates with NaN and the largest integers."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def errors(case: Case) -> dict[str, float]:
    """The `distance` of each result of a fresh run; infinite where something was left unwritten."""
    for each in case.results:
        if each.start is not None and each.out is not None:
            each.out.copy_(each.start)
        elif each.out is not None:
            poison(each.out)
    for tensor in case.scratch:
        poison(tensor)
    with _memory_poisoned():
        made = case.run()
    got = made if made is not None else [each.out for each in case.results]
    found = {}
    for each, one, want in zip(case.results, got, case.want(), strict=True):
        assert one.shape == want.shape, f"{case.name}: {each.name} is {tuple(one.shape)}, not {tuple(want.shape)}"
        found[each.name] = distance(one, want) if each.tolerance else _different(one, want)
    return found


def error(case: Case) -> float:
    """The largest of its results' errors, each in proportion to its tolerance: no more than `case.tolerance` if all are
    within theirs."""
    worst = 0.0
    for each, found in zip(case.results, errors(case).values(), strict=True):
        share = found / each.tolerance if each.tolerance else found
        worst = max(worst, share * case.tolerance if case.tolerance or share <= 1 else float("inf"))
    return worst


def distance(got: Tensor, want: Tensor) -> float:
    """The largest of ||got - want|| / ||want|| of all, and, divided by `FEWER`, of a row and of a column, whose
    ||want|| is taken for no less than the root mean square of all rows, of all columns. Infinite where one of both is
    NaN."""
    return max(parts(got, want))


def parts(got: Tensor, want: Tensor) -> tuple[float, float, float]:
    """The three of `distance`: all, rows, columns."""
    got, want = (t.double().reshape(-1, t.shape[-1]) for t in (got, want))
    neither = got.isnan() & want.isnan()
    got, want = got.masked_fill(neither, 0.0), want.masked_fill(neither, 0.0)
    off, size = (got - want).square(), want.square()
    found = [off.sum() / size.sum()]
    for dim in (1, 0):
        each, of = off.sum(dim), size.sum(dim)
        found.append((each / torch.maximum(of, of.mean())).max() / FEWER**2)
    whole, rows, columns = (float("inf") if part != part else part for part in torch.stack(found).sqrt().tolist())
    return whole, rows, columns


def _different(got: Tensor, want: Tensor) -> float:
    """0 where all are equal, NaN like NaN; else infinite."""
    if got.dtype.is_floating_point:
        got, want = got.double(), want.double()
        equal = (got == want) | (got.isnan() & want.isnan())
    else:
        equal = got == want
    return 0.0 if bool(equal.all()) else float("inf")


@dataclass(frozen=True)
class Matrix:
    """A quantised matrix of `POOL` different rows in random order, so that a wrong one shows wherever it is.

    weight: Packed or Float8Weight; pool: the different rows' values, float64; pick: which row is which.
    """

    weight: Any
    pool: Tensor
    pick: Tensor

    def product(self, x: Tensor) -> Tensor:
        """x @ w.T in float64."""
        return (x.double() @ self.pool.T)[:, self.pick]

    def values(self, ids: Tensor | None = None) -> Tensor:
        """All rows, or the given ones, in float64."""
        return self.pool[self.pick if ids is None else self.pick[ids.long()]]


def silu_mul(both: Tensor) -> Tensor:
    """silu of the left half times the right."""
    gate, up = both.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def of(dtype: torch.dtype) -> str:
    """What is told of a dtype in a case's name: nothing of bf16."""
    return "" if dtype == BF16 else " f16" if dtype == F16 else " f32"


@dataclass(frozen=True)
class Maker:
    """What cases are made of, on a device. seed: of all that is random, a new one for each Maker; kept: the last
    quantised matrix, which takes longer to pack than to run."""

    chip: Chip
    device: str
    shapes: Shapes
    seed: int = field(default_factory=partial(secrets.randbits, 31))
    kept: dict[tuple[str, int, int], Matrix] = field(default_factory=dict, repr=False)

    def normal(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def rows(self, rows: int, width: int, dtype: torch.dtype = BF16) -> Tensor:
        """x of a product: with a matrix of unit values its results are about 1, where silu bends."""
        return (torch.randn(rows, width, device=self.device) * width**-0.5).to(dtype)

    def empty(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        poison(out)
        return out

    def below(self, high: int, *shape: int) -> Tensor:
        """int32, random."""
        return torch.randint(high, shape, dtype=torch.int32, device=self.device)

    def integers(self, values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.as_tensor(np.asarray(values)).to(self.device, dtype)

    def random(self) -> np.random.Generator:
        """numpy's, for what is made on the host; it follows torch's seed."""
        return np.random.default_rng(int(torch.randint(2**31, ())))

    def eight(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x as the chip's 8-bit floats, with a scale for each row: what `ops.matmul.round_rows` rounds to."""
        kind = FLAVOURS[self.chip.fp8]
        top, amax = torch.finfo(kind).max, x.float().abs().amax(dim=1)
        inverse = torch.full_like(amax, top) / amax
        return (x.float() * inverse[:, None]).clamp(-top, top).to(kind), amax / top

    def matrix(self, form: str, rows: int, columns: int) -> Matrix:
        """A random one in a format of files; the last one again where it is the same format and shape."""
        key = (form, rows, columns)
        if key not in self.kept:
            self.kept.clear()
            kind, pool = formats.get(form), min(rows, POOL)
            pick = torch.randint(pool, (rows,))
            values = torch.randn(pool, columns).numpy()
            raw = kind.quantize(values)
            held = torch.from_numpy(kind.dequantize(raw, values.shape)).double()
            raw = np.ascontiguousarray(raw.reshape(pool, -1)[pick.numpy()]).reshape(-1)
            weight: Any
            if form == "E4M3":
                weight = Float8Weight.of(raw, rows, self.device)
            else:
                weight = pack(raw, form, rows, columns).to(self.device)
            self.kept[key] = Matrix(weight, held.to(self.device), pick.to(self.device))
        return self.kept[key]
