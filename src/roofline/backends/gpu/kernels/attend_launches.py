"""How paged attention is cut into programs: tiles, blocks of queries, splits of keys; which launches cover a step."""

from dataclasses import dataclass, replace
from typing import Any

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.kernels.attend_kernels import SPLIT
from roofline.backends.gpu.partials import LARGEST_HEAD, PROGRAMS, check_row, workspace_limit
from roofline.backends.gpu.tiles import Tile
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips.chips import Chip

NAME, MERGE = "attend", "attend_merge"
ROWS = "attend_rows"  # over compressed rows
REGIMES = (("decode", 16), ("verify", 32))  # rows of a segment at most; with more it is "prefill"


@dataclass(frozen=True)
class Launch:
    """How steps are cut into programs; made by `prepare`.

    heads, kv_heads, head_dim, window, exact: of the layer; tile, merge_tile: of the two kernels; head_rows: rows of a
    block that hold one token; segments: the launch's own are [first_segment, segments); tokens: rows up to their last;
    max_query: queries of one of them; blocks: an upper bound, over all of them; splits: programs that share the keys of
    one block, 1: none, and no merge; turned: 0, or of compressed rows the columns before those of the value, which
    head_dim then counts.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int
    exact: bool
    tile: Tile
    merge_tile: Tile
    head_rows: int
    tokens: int
    first_segment: int
    segments: int
    max_query: int
    blocks: int
    splits: int
    turned: int = 0

    @property
    def queries(self) -> int:
        """Tokens of a block."""
        return self.tile.sizes["BLOCK_M"] // self.head_rows

    @property
    def head_blocks(self) -> int:
        """Programs that cover the heads of one token."""
        return self.kv_heads * -(-self.heads // self.kv_heads // self.head_rows)

    def constants(self) -> dict[str, object]:
        """Constants that both kernels have."""
        return {
            "GROUP": self.heads // self.kv_heads, "HEAD_ROWS": self.head_rows, "DIM": self.head_dim,
            "BLOCK_D": _padded(self.head_dim), "BLOCK_M": self.tile.sizes["BLOCK_M"],
            "SINGLE": self.max_query <= self.queries, "WINDOW": self.window, "EXACT": self.exact,
        }  # fmt: skip

    def attend_constants(
        self, *, capped: bool = False, alibi: bool = False, sinks: bool = False, wide: bool = False
    ) -> dict[str, object]:
        """All constants of the first kernel; with splits the second one knows of sinks."""
        partial = self.splits > 1
        kinds = {"PARTIAL": partial, "CAPPED": capped, "ALIBI": alibi, "SINKS": sinks and not partial, "WIDE": wide}
        return {**self.constants(), **self.tile.sizes, **kinds}

    def rows_constants(self, *, wide: bool = False) -> dict[str, object]:
        """All constants of the kernel over compressed rows."""
        turned = {"TURNED": self.turned, "BLOCK_T": _padded(self.turned), "PARTIAL": self.splits > 1, "WIDE": wide}
        constants = {**self.constants(), **self.tile.sizes, **turned}
        return {name: value for name, value in constants.items() if name != "WINDOW"}

    def merge_constants(self, sinks: bool = False) -> dict[str, object]:
        """All constants of the second kernel."""
        return {**self.constants(), **self.merge_tile.sizes, "SINKS": sinks}


def _padded(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def prepare(
    chip: Chip, *, tokens: int, segments: int, max_query: int, max_context: int, heads: int, kv_heads: int,
    head_dim: int, first_segment: int = 0, window: int = 0, exact: bool = False, element_bytes: int = 2,
    cache_bytes: int = 2, turned: int = 0, programs: int = PROGRAMS,
) -> Launch:  # fmt: skip
    """The launch of a step of these tokens and segments (padded ones included), with at most these queries and keys of
    one segment.

    first_segment: those before it, of one query each, are left to another launch. exact: a row's bits depend neither on
    its company nor on how its text was cut into steps. element_bytes: of q; cache_bytes: of k and v. programs: as many
    as keep the device busy; keys are split where there are not half as many, if `workspace_limit` allows. Nothing
    depends on what the step's fields hold, so that a launch can be captured in a graph.
    turned: over compressed rows, the columns before those of the value, which head_dim counts.
    Raises UnsupportedError for a head_dim above 256, of compressed rows for parts that are wider than the kernel has.
    """
    if turned:
        check_row(turned, head_dim)
    elif not 0 < head_dim <= LARGEST_HEAD:
        raise UnsupportedError(f"heads of {head_dim} dimensions", f"attention on GPUs has up to {LARGEST_HEAD}", ())
    rows = next_power_of_2(heads // kv_heads)
    regime = "exact" if exact else _regime(heads // kv_heads, max_query)
    facts = {"regime": regime, "dim": _padded(head_dim), "bytes": element_bytes, "cache": cache_bytes}
    tile, merge_tile = _tile(ROWS if turned else NAME, chip, exact, **facts), _tile(MERGE, chip, exact, **facts)
    launch = Launch(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=window, exact=exact, tile=tile, merge_tile=merge_tile,
        head_rows=min(rows, tile.sizes["BLOCK_M"]), tokens=tokens, first_segment=first_segment, segments=segments,
        max_query=max_query, blocks=segments - first_segment, splits=1, turned=turned,
    )  # fmt: skip
    if max_query > launch.queries:
        launch = replace(launch, blocks=(tokens - first_segment) // launch.queries + launch.blocks)
    split = replace(launch, splits=_splits(launch, max_context, programs))
    return split if workspace_floats(split) <= workspace_limit(head_dim, programs) else launch


def prepare_all(
    chip: Chip, *, tokens: int, segments: int, decodes: int, max_query: int, max_context: int, heads: int,
    kv_heads: int, **options: Any,
) -> tuple[Launch, ...]:  # fmt: skip
    """The launches that cover a step: one, or two where `decodes` leading segments of one query come before chunks of
    prompts. Everything else is as for `prepare`; in the exact order the bits are those of one launch.
    """
    options = {**options, "max_context": max_context, "heads": heads, "kv_heads": kv_heads}
    if not decodes or _regime(heads // kv_heads, max_query) != "prefill":
        return (prepare(chip, tokens=tokens, segments=segments, max_query=max_query, **options),)
    return (
        prepare(chip, tokens=decodes, segments=decodes, max_query=1, **options),
        prepare(chip, tokens=tokens, first_segment=decodes, segments=segments, max_query=max_query, **options),
    )


def _regime(group: int, max_query: int) -> str:
    rows = next_power_of_2(group) * max_query
    return next((name for name, limit in REGIMES if rows <= limit), "prefill")


def _tile(kernel: str, chip: Chip, exact: bool, **facts: object) -> Tile:
    tile = tiles.choose(kernel, chip, **facts)
    return replace(tile, options={**tile.options, "enable_fp_fusion": False}) if exact else tile


def _splits(launch: Launch, max_context: int, programs: int) -> int:
    """As many as there are programs to spare for, or in the exact order all that there can be."""
    first = launch.window + launch.max_query - 1 + SPLIT.value - 1  # keys from the first split that a window reaches
    there = cdiv(min(max_context, first) if launch.window else max_context, SPLIT.value)
    spare = min(there, programs // (launch.blocks * launch.head_blocks))
    return 1 if spare < 2 else there if launch.exact else spare


def workspace_floats(launch: Launch) -> int:
    """float32 elements that a launch needs as workspace; 0 without splits."""
    return state_start(launch) + 2 * launch.tokens * launch.heads * launch.splits if launch.splits > 1 else 0


def state_start(launch: Launch) -> int:
    """Where the states of splits lie in the workspace, behind their sums: at a multiple of 16 bytes, as a kernel is
    compiled anew for a pointer to anywhere else."""
    return -(-launch.tokens * launch.heads * launch.splits * launch.head_dim // 4) * 4
