"""Queries that are multiplied by position on the cpu backend: where nothing turns them, alone, and beyond the image."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("roofline._native", reason="the C++ core is not built")
torch = pytest.importorskip("torch", reason="the reference runs on torch")
sys.path.insert(0, str(Path(__file__).parent))

from oracle import oracle_logits  # noqa: E402

from roofline import ops  # noqa: E402
from roofline.backends.capacity import Capacity  # noqa: E402
from roofline.backends.cpu.executable import CpuExecutable  # noqa: E402
from roofline.common.errors import ConfigError, UnsupportedError  # noqa: E402
from roofline.models import llama  # noqa: E402
from roofline.models.config import ModelConfig  # noqa: E402
from roofline.models.spec import expand  # noqa: E402
from roofline.ops.batch import BatchLimits, Segment  # noqa: E402
from roofline.ops.position_factors import PositionFactors  # noqa: E402
from roofline.ops.rope_tables import RopeTable  # noqa: E402
from roofline.program import target  # noqa: E402
from roofline.program.compile import compile_program  # noqa: E402
from tests.backends.cpu_models import LLAMA, packed  # noqa: E402

FACTORS = PositionFactors(0.5, 10, 1)
ISAS = native.isas()


@dataclass(frozen=True)
class ScaledConfig(ModelConfig):
    """As Llama 4 has it: what is not turned is multiplied, one position early. other: of the second layer."""

    other: PositionFactors = FACTORS

    def rope_of(self, layer: int) -> RopeTable | None:
        return None if layer else self.rope

    def query_factors(self, layer: int) -> PositionFactors | None:
        return self.other if layer else None


def _head(cfg: ModelConfig, w: Any, x: Any, batch: Any) -> Any:
    """Llama's, on rows that are multiplied once more, by an instruction of its own; it stays over all tokens."""
    x = ops.scale_by_position(x, batch.positions, FACTORS.beta, FACTORS.context, FACTORS.offset)
    return llama.head(cfg, w, x, batch)


FAMILY: Any = SimpleNamespace(
    check=llama.check, spec=llama.spec, embed=llama.embed, block=llama.block, head=_head, __name__="scaled"
)
CFG = ScaledConfig(**{**LLAMA, "layers": 2, "ffn": 128})
IDS = np.random.default_rng(1).integers(0, CFG.vocab, 50).tolist()


class Weights:
    """Random ones, in float32."""

    def __init__(self) -> None:
        table = [p for p in expand(llama.spec(CFG), CFG.layers) if p.tied_to is None]
        generator = np.random.default_rng(0)
        self.raw = {p.name: generator.normal(0, 0.1, p.shape).astype(np.float32) + (len(p.shape) == 1) for p in table}
        self.tensors: Mapping[str, Any] = {n: SimpleNamespace(format="F32", shape=v.shape) for n, v in self.raw.items()}

    def read(self, name: str) -> np.ndarray:
        return self.raw[name].astype(np.float32).view(np.uint8).reshape(-1)


def executable(isa: str, threads: int) -> CpuExecutable:
    source: Any = Weights()
    program = compile_program(FAMILY, CFG, source.tensors, target.CPU)
    names = [instr.op for instr in program.body]
    assert (names.count("rope_kv_write"), names.count("qkv_write"), names.count("scale_by_position")) == (1, 1, 1)
    capacity = Capacity(BatchLimits(tokens=64, segments=4, rows=64, pages=16), 64, 16)
    return packed(program, source, capacity, isa=isa, threads=threads)


def computed(model: CpuExecutable, chunk: int) -> np.ndarray:
    parts = []
    for at in range(0, len(IDS), chunk):
        ids = IDS[at : at + chunk]
        model.batch.fill([Segment(ids, at, range(4))], range(len(ids)))
        model.forward()
        parts.append(model.logits().copy())
    return np.concatenate(parts)


def test_queries_that_nothing_turns_and_other_rows_are_multiplied() -> None:
    want = oracle_logits(FAMILY, CFG, Weights(), IDS)  # type: ignore[arg-type]
    first = computed(executable(ISAS[0], 1), chunk=50)
    assert np.abs(first - want).mean() < 0.01 * want.std()  # attention rounds to 16 bits
    plain = oracle_logits(FAMILY, replace(CFG, other=PositionFactors(0.5, 1000)), Weights(), IDS)  # type: ignore[arg-type]
    assert np.abs(plain - want)[10:].mean() > 0.05 * want.std()
    for isa, threads, chunk in ((ISAS[0], 2, 1), (ISAS[-1], 1, 7), (ISAS[-1], 2, 50)):
        assert computed(executable(isa, threads), chunk).tobytes() == first.tobytes(), (isa, threads, chunk)


def test_two_tables_of_factors_are_refused() -> None:
    source: Any = Weights()
    cfg = replace(CFG, other=PositionFactors(0.5, 12))
    program = compile_program(FAMILY, cfg, source.tensors, target.CPU)
    capacity = Capacity(BatchLimits(tokens=64, segments=4, rows=64, pages=16), 64, 16)
    with pytest.raises(UnsupportedError, match="layers with different factors by position"):
        packed(program, source, capacity, isa=ISAS[0], threads=1)


@pytest.mark.parametrize("operation", ["scale_by_position", "rope_write_scaled"])
@pytest.mark.parametrize("place", [-1, 1 << 45])
def test_a_place_of_factors_outside_the_image_is_refused(operation: str, place: int) -> None:
    lowered = executable(ISAS[0], 1)._model.lowered
    fields = [name for name, kind in native.record_fields() for _ in range(4 if "(" in kind else 1)]
    at, numbers = 0, lowered.code.copy()
    while native.operations()[numbers[at]] != operation:
        at += len(fields) + int(numbers[at + fields.index("pieces")]) * len(native.piece_fields())
    numbers[at + fields.index("weight")] = place
    with pytest.raises(ConfigError, match=rf"\({operation}\).*weight is a place outside weights.bin"):
        _ = replace(lowered, code=numbers).checked
