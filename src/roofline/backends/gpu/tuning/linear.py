"""Which kernel multiplies a 16-bit weight fastest at so many rows: the library's (with what TunableOp found for it), or
ours with one of several tiles. Contestants take turns, and what runs by itself stays unless it loses by more than the
noise."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from roofline.backends.cpu.tuning.contest import Contest, Rounds
from roofline.backends.cpu.tuning.variants import OpGroup
from roofline.backends.gpu.runtime import matmul as products
from roofline.backends.gpu.runtime.matmul import Choices
from roofline.backends.gpu.tiles import Tile
from roofline.backends.gpu.tuning import measured_tiles as tuned_tiles
from roofline.common import env, log
from roofline.common.errors import ConfigError
from roofline.hardware.chips.chips import Chip
from roofline.hardware.tuning import store as tunings
from roofline.hardware.tuning.location import SWITCHED_OFF
from roofline.hardware.tuning.store import Setting, TuningRecord, Tunings
from roofline.program.gemms import Gemm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BACKEND = "gpu"  # of the store
KINDS = {False: "linear", True: "linear with bias"}  # with a bias or not
TORCH = "torch"  # the library's product, as a contestant
FORMATS = {"BF16": "bfloat16", "F16": "float16"}
FEW = 64  # rows beyond which the libraries' products are what they are made for
LAUNCHES = 20  # of a sample, in one graph: as decode steps run, without the host's time
COLD_BYTES = 512 << 20  # of weights that launches go through in turn, so that none is read from a cache
TOLERANCE = 1e-2  # of the result's norm: beyond rounding to 16 bits, within which kernels differ


def worth(gemm: Gemm) -> bool:
    """Whether there is a choice: 16-bit weights, few rows."""
    return gemm.format in FORMATS and gemm.rows <= FEW


class Trial:
    """One product with random operands, ready to run with any contestant.

    Attributes:
        default: what runs where nothing was measured; candidates: the others, TORCH or the text of a tile that gave the
        right result; dropped: tiles that did not, and why.
    """

    def __init__(self, gemm: Gemm, chip: Chip, device: str = "cuda", cold_bytes: int = COLD_BYTES) -> None:
        import torch

        from roofline.backends.gpu.kernels.linear_float import FEW_ROWS

        self.gemm, self.chip, self.device = gemm, chip, torch.device(device)
        random = partial(torch.randn, dtype=getattr(torch, FORMATS[gemm.format]), device=self.device)
        self._x = random(gemm.rows, gemm.width)
        copies = max(1, cold_bytes // (2 * gemm.out * gemm.width))
        self._weights = [random(gemm.out, gemm.width) / gemm.width**0.5 for _ in range(copies)]
        self._bias = random(gemm.out) if gemm.bias else None
        self._out = self._x.new_empty(gemm.rows, gemm.out)
        self._turn, self._graphs = 0, dict[str, torch.cuda.CUDAGraph]()
        table = self._default_tile()
        self._tiles = {tuned_tiles.text(tile): tile for tile in tuned_tiles.near(table, chip, self._x.element_size())}
        self.dropped: dict[str, str] = {}
        admitted = [TORCH, *filter(self._admit, self._tiles)]
        ours = tuned_tiles.text(table)
        self.default = ours if gemm.rows <= FEW_ROWS and ours in admitted else TORCH
        self.candidates = [name for name in admitted if name != self.default]

    def run(self, contestant: str) -> None:
        """One launch, with the next of the weights."""
        self._turn = (self._turn + 1) % len(self._weights)
        self._launch(contestant, self._weights[self._turn])

    def seconds(self, contestant: str) -> float:
        """Seconds of a launch: of several in a graph, by the device's clock; of one where there is no GPU."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            self.run(contestant)
            return time.perf_counter() - start
        import torch

        if contestant not in self._graphs:
            self._graphs[contestant] = self._captured(contestant)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._graphs[contestant].replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / LAUNCHES

    def _captured(self, contestant: str) -> "torch.cuda.CUDAGraph":
        import torch

        self.run(contestant)  # compiles, and lets the library choose, outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                self.run(contestant)
        return graph

    def _default_tile(self) -> Tile:
        from roofline.backends.gpu.kernels.linear_float import table_tile

        return table_tile(self.chip, self.gemm.rows, self.gemm.out)

    def _launch(self, contestant: str, weight: "Tensor") -> None:
        from roofline.backends.gpu.kernels.linear_float import linear_float

        if contestant == TORCH:
            products.library_product(self._x, weight, self._bias, self._out)
        else:
            linear_float(self.chip, self._x, weight, self._bias, self._out, tile=self._tiles[contestant])

    def _admit(self, tile: str) -> bool:
        """Whether a tile compiles and gives what float64 gives."""
        weight = self._weights[0]
        want = self._x.double() @ weight.double().T
        if self._bias is not None:
            want += self._bias
        self._out.fill_(float("nan"))
        try:
            self._launch(tile, weight)
        except Exception as error:  # a tile that does not fit the chip: the compiler's errors have no common type
            self.dropped[tile] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            return False
        wrong = float((self._out.double() - want).norm() / want.norm())
        if not wrong <= TOLERANCE:  # what is not a number is wrong too
            self.dropped[tile] = f"wrong by {wrong:.1%} of the result"
        return tile not in self.dropped


def tune(trial: Trial, setting: Setting, seconds: Callable[[str], float] | None = None) -> TuningRecord:
    """Hold the contest. seconds: of a launch of a contestant; None: by the clock."""
    gemm, clock = trial.gemm, seconds or trial.seconds
    key = _key(gemm)
    contest = Contest(OpGroup("linear", key[1], (), ()), trial.default, trial.candidates, Rounds())
    while contest.outcome is None:
        contest.tell([clock(contest.entry())])
    outcome = contest.outcome
    figures = dict(outcome.figures) | ({"dropped": trial.dropped} if trial.dropped else {})
    now = datetime.now(UTC).isoformat(timespec="seconds")
    kind, shape, regime = key
    return TuningRecord(
        kind=kind,
        shape=shape,
        regime=regime,
        setting=setting,
        variant=outcome.variant,
        default=trial.default,
        reason=outcome.reason,
        figures=figures,
        measured=now,
    )


def chosen(store: Tunings, gemm: Gemm, setting: Setting) -> str | None:
    """What a store has for a product: TORCH or a tile's text; None where it was never measured with this setting."""
    record = store.records.get((*_key(gemm), setting.run))
    return None if record is None else record.variant


def stored_choices(chip: Chip, device: int, activations: str) -> tuple[Choices, str]:
    """(what was chosen for a device, why that is empty). device: its number in torch.cuda; activations: "bf16" or
    "f16", which weights share."""
    if env.read("ROOFLINE_TUNED") == "off":
        return {}, SWITCHED_OFF
    if not tunings.path(BACKEND, chip.name).exists():
        return {}, "never tuned"
    import torch

    name = torch.cuda.get_device_name(device)
    setting = tuned_tiles.setting(name)
    choices: dict[tuple[int, int, int, bool], Tile | None] = {}
    records = [r for r in tunings.load(BACKEND, chip.name).records.values() if r.kind in KINDS.values()]
    if all(record.setting.run != setting.run for record in records):
        ours = (r.setting for r in records if r.setting.run.startswith(f"{name}, "))
        tunings.tell_outdated(ours, setting, "roofline tune gemms MODEL")
    for record in records:
        if record.setting.run != setting.run:
            continue
        try:
            size, form = record.shape.split(" ")
            width, out = map(int, size.split("x"))
            rows = int(record.regime.removesuffix(" rows"))
            tile = None if record.variant == TORCH else tuned_tiles.parse(record.variant)
        except (ValueError, ConfigError) as error:
            log.get("backends").warning("a row of the tuning store of %s is left out: %s", chip.name, error)
            continue
        if form == activations.upper():
            choices[rows, out, width, record.kind == KINDS[True]] = tile
    return choices, "" if choices else "never tuned on this device with these kernels"


def _key(gemm: Gemm) -> tuple[str, str, str]:
    """Kind, shape and regime of a product, as its record has them."""
    return KINDS[gemm.bias], f"{gemm.width}x{gemm.out} {gemm.format}", f"{gemm.rows} rows"
