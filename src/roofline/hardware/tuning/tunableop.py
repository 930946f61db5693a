"""Reads and writes the files of PyTorch's TunableOp: the fastest BLAS kernel for each GEMM, with the versions measured.

A results file has validators first ("Validator,ROCM_VERSION,6.0.0"), then a row for each operation:

    GemmTunableOp_BFloat16_TN,tn_4096_16_11008_ld_11008_11008_4096,Gemm_Hipblaslt_52565,0.0653

operator with dtype and layout, shape, solution ("Default": what torch takes by itself), milliseconds. The file of
shapes yet to be tuned has the first two fields alone. Source: torch.cuda.tunable's documentation, and
ATen/cuda/tunable/GemmCommon.h for the spelling of shapes.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from roofline.common import log
from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, write_atomically

DEFAULT = "Default"
VALIDATOR = "Validator"
MANDATORY = "PT_VERSION"  # torch refuses a file without it
# Our names of formats -> torch's names of the same in an operator.
DTYPES = {"F32": "float", "F16": "Half", "BF16": "BFloat16"}

_SHAPE = re.compile(
    r"([ntcNTC])([ntcNTC])_(\d+)_(\d+)_(\d+)"  # transposed or not; m, n, k
    r"(?:_B_(\d+))?(?:_ld_(\d+)_(\d+)_(\d+))?(_rw_.+)?"
)


@dataclass(frozen=True)
class Shape:
    """The second field of a row, in BLAS's terms: C [m, n] = A [m, k] B [k, n], all by columns.

    x @ w.T with x [rows, width] and w [out, width] by rows is "tn" with m = out, n = rows, k = width: m and n are the
    other way round from what one expects. batch: of strided products; ld: leading dimensions of A, B and C, which older
    files leave out; rest: what scaled products have beside.
    """

    transposed: str
    m: int
    n: int
    k: int
    batch: int | None = None
    ld: tuple[int, int, int] | None = None
    rest: str = ""

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Either spelling, with and without leading dimensions. Raises ConfigError."""
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is no shape of TunableOp such as tn_4096_16_11008_ld_11008_11008_4096")
        a, b, m, n, k, batch, *ld, rest = match.groups()
        leading = None if ld[0] is None else (int(ld[0]), int(ld[1]), int(ld[2]))
        count = None if batch is None else int(batch)
        return cls(transposed=a + b, m=int(m), n=int(n), k=int(k), batch=count, ld=leading, rest=rest or "")

    def __str__(self) -> str:
        batch = "" if self.batch is None else f"_B_{self.batch}"
        ld = "" if self.ld is None else "_ld_" + "_".join(map(str, self.ld))
        return f"{self.transposed}_{self.m}_{self.n}_{self.k}{batch}{ld}{self.rest}"

    @property
    def with_strides(self) -> "Shape":
        """The shape with leading dimensions: where it has none, those of contiguous tensors."""
        if self.ld is not None:
            return self
        a = self.k if self.transposed[0] not in "nN" else self.m
        b = self.n if self.transposed[1] not in "nN" else self.k
        return replace(self, ld=(max(1, a), max(1, b), max(1, self.m)))

    @property
    def words(self) -> str:
        """As PyTorch has it: sizes of the product by rows."""
        batch = "" if self.batch is None else f"{self.batch} x "
        return f"{batch}[{self.n}, {self.k}] @ [{self.k}, {self.m}]"


@dataclass(frozen=True)
class TunableOpRow:
    """The fastest kernel of one operation.

    solution: a kernel's name in its library, or "Default"; ms: milliseconds, None where the file does not say; rest:
    further fields, kept as they are.
    """

    operator: str
    shape: Shape
    solution: str
    ms: float | None = None
    rest: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Equal for the two spellings of one shape."""
        return self.operator, str(self.shape.with_strides)

    def __str__(self) -> str:
        time = "" if self.ms is None else f",{self.ms!r}"
        return f"{self.operator},{self.shape},{self.solution}{time}" + (f",{self.rest}" if self.rest else "")


@dataclass
class Results:
    """A results file: what it was measured with (versions, architecture), and its rows by key."""

    validators: dict[str, str]
    rows: dict[tuple[str, str], TunableOpRow] = field(default_factory=dict)

    def add(self, row: TunableOpRow) -> bool:
        """Keep the row unless one of its key is as fast; whether it was kept."""
        old = self.rows.get(row.key)
        if old is not None and _ms(old) <= _ms(row):
            return False
        self.rows[row.key] = row
        return True


def _ms(row: TunableOpRow) -> float:
    return math.inf if row.ms is None else row.ms


def gemm(form: str, rows: int, out: int, width: int, bias: bool = False) -> tuple[str, Shape]:
    """Operator and shape that torch looks up for x [rows, width] @ w [out, width].T (+ bias), without gaps.

    Raises ConfigError for a format that torch's GEMM does not read.
    """
    if form not in DTYPES:
        raise ConfigError(f"TunableOp has no product of {form}; it has {', '.join(DTYPES)}")
    return f"Gemm{'AndBias' if bias else ''}TunableOp_{DTYPES[form]}_TN", Shape("tn", out, rows, width).with_strides


def untuned(shapes: Iterable[tuple[str, Shape]]) -> str:
    """The text of a file of shapes to be tuned, for torch.cuda.tunable.tune_gemm_in_file."""
    return "".join(f"{operator},{shape}\n" for operator, shape in dict.fromkeys(shapes))


def parse(text: str, name: str) -> Results:
    """The content of a results file; of rows with one key the first counts, as torch reads them.

    A last line without its end was cut off while it was written: it is left out, and a warning says so.

    Raises ConfigError naming file and line: it is no results file, or parts of it were measured with other versions.
    """
    results = Results({})
    *lines, cut = text.split("\n")
    if cut:
        log.get("hardware").warning("%s: the last line was cut off and is left out: %s", name, cut)
    for number, line in enumerate(lines, 1):
        line = line.removesuffix("\r")
        if line.startswith(f"{VALIDATOR},"):
            _validator(line, results.validators, f"{name}, line {number}")
        elif line:
            row = _row(line, f"{name}, line {number}")
            results.rows.setdefault(row.key, row)
    if MANDATORY not in results.validators:
        raise ConfigError(f"{name} has no line 'Validator,{MANDATORY},...': it is no results file of TunableOp")
    return results


def _validator(line: str, validators: dict[str, str], where: str) -> None:
    parts = line.split(",", 2)
    if len(parts) < 3:
        raise ConfigError(f"{where}: a validator needs a name and a value: {line!r}")
    key, value = parts[1:]
    if validators.setdefault(key, value) != value:
        raise ConfigError(f"{where}: {key} is {value} here and {validators[key]} above: these are two files in one")


def _row(line: str, where: str) -> TunableOpRow:
    operator, *rest = line.split(",", 4)
    if len(rest) < 2 or not operator or not rest[1]:
        raise ConfigError(f"{where}: a row is operator,shape,solution,milliseconds: {line!r}")
    try:
        shape = Shape.parse(rest[0])
        ms = float(rest[2]) if len(rest) > 2 else None
        if ms is not None and not (math.isfinite(ms) and ms >= 0):
            raise ValueError(f"{ms} milliseconds")
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
    return TunableOpRow(operator, shape, rest[1], ms, rest[3] if len(rest) > 3 else "")


def read(path: Path) -> Results:
    """A results file. Raises ConfigError as `parse`, or where it cannot be read."""
    try:
        return parse(path.read_text("utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error}") from error


def _read_if_there(path: Path) -> Results | None:
    """A results file, None where there is none or an empty one. Raises ConfigError as `read`."""
    return read(path) if path.exists() and path.stat().st_size else None


def to_text(results: Results) -> str:
    """A results file: validators, then rows. Raises ConfigError where a field would break the line."""
    _writable(results.validators, results.rows.values())
    lines = [f"{VALIDATOR},{key},{value}" for key, value in results.validators.items()]
    return "".join(f"{line}\n" for line in [*lines, *map(str, results.rows.values())])


def _writable(validators: Mapping[str, str], rows: Iterable[TunableOpRow]) -> None:
    if MANDATORY not in validators:
        raise ConfigError(f"results without {MANDATORY} would be refused by torch")
    fields = [*validators, *(part for row in rows for part in (row.operator, row.solution))]
    lines = [*validators.values(), *(row.rest for row in rows)]
    bad = [part for part in fields if not part or "," in part] + [p for p in (*fields, *lines) if set(p) & set("\r\n")]
    if bad:
        raise ConfigError(f"{bad[0]!r} cannot be a field of a TunableOp file")


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What two sets of validators differ in, in words; empty: figures of one hold for the other."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} is {ours.get(name, 'missing')} and {theirs.get(name, 'missing')}"
        for name in names
        if ours.get(name) != theirs.get(name)  # a value may be the word "missing"
    ]


def merge(parts: Iterable[Results]) -> Results:
    """Results of several devices or runs as one; of rows with one key the fastest counts.

    Raises ConfigError naming what differs where they were not measured with the same.
    """
    merged: Results | None = None
    for part in parts:
        if merged is None:
            merged = Results(dict(part.validators))
        different = differences(merged.validators, part.validators)
        if different:
            raise ConfigError(f"these results were measured with different things: {'; '.join(different)}")
        for row in part.rows.values():
            merged.add(row)
    if merged is None:
        raise ConfigError("there are no results to merge")
    return merged


def target_path(path: Path, validators: Mapping[str, str]) -> Path:
    """The file to write results with these validators to: `path`, or another name where `path` has other validators.

    Raises ConfigError where a file lies there that is no results file.
    """
    stored = _read_if_there(path)
    if stored is None or not differences(stored.validators, validators):
        return path
    key = hashlib.sha256(repr(sorted(validators.items())).encode()).hexdigest()[:8]
    other = path.with_name(f"{path.stem}-{key}{path.suffix}")
    stored = _read_if_there(other)
    different = differences(stored.validators, validators) if stored is not None else []
    if different:
        raise ConfigError(f"{other} holds results of something else: {'; '.join(different)}")
    return other


def write(results: Results, path: Path) -> Path:
    """Write results, merged with the file's if it has the same validators; results of other validators stay.

    Returns the file: `path`, or one beside it (see `target_path`). Raises ConfigError where it cannot be written.
    """
    target = target_path(path, results.validators)
    stored = _read_if_there(target)
    content = to_text(results if stored is None else merge([stored, results]))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, content)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {cause_of(error)}") from error
    return target


class Journal:
    """A results file that grows by a row at a time, each on disk before the next is measured.

    Attributes:
        path: the file: the one named, or one beside it where others' results lie there.
        results: what it holds; what is in it need not be measured again.
    """

    def __init__(self, path: Path, validators: Mapping[str, str]) -> None:
        self.path = target_path(path, validators)
        self.results = _read_if_there(self.path) or Results(dict(validators))
        write(self.results, self.path)  # whole: without the line that a run before was stopped in

    def add(self, row: TunableOpRow) -> bool:
        """Append a row and flush it, unless the file has one with its key; returns whether it was written."""
        if row.key in self.results.rows:
            return False  # torch would read the first of the two
        _writable(self.results.validators, [row])
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{row}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be written: {cause_of(error)}") from error
        self.results.rows[row.key] = row
        return True
