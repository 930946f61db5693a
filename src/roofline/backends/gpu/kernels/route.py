"""Which experts a token goes to, their biases, and what they made of it put together. Source: Shazeer et al. 2017."""

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from roofline.backends.gpu import tiles
from roofline.backends.gpu.integers import cdiv, next_power_of_2
from roofline.backends.gpu.signatures import Compilation, pointers
from roofline.hardware.chips.chips import Chip

NAME = "route"


@triton.jit(do_not_specialize=["experts", "logits_stride"])
def _route(
    logits, weights, ids, experts, logits_stride,
    TOP: tl.constexpr, RENORMALISE: tl.constexpr, TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, rank = tl.arange(0, BLOCK), tl.arange(0, TOP_BLOCK)
    remaining = expert < experts
    x = tl.load(logits + token * logits_stride + expert, mask=remaining, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - peak), axis=0)  # NaN where a logit is
    x = tl.where(x == x, x, 0.0)  # so that a broken token has experts all the same
    chosen, weight = tl.zeros((TOP_BLOCK,), tl.int32), tl.zeros((TOP_BLOCK,), tl.float32)
    shared = total
    for place in tl.static_range(TOP):
        top = tl.max(tl.where(remaining, x, float("-inf")), axis=0)
        id = tl.min(tl.where(remaining & (x == top), expert, BLOCK), axis=0)  # ties to the lowest
        remaining = remaining & (expert != id)
        share = tl.exp(top - peak)
        if RENORMALISE:
            shared = share if place == 0 else shared + share
        chosen, weight = tl.where(rank == place, id, chosen), tl.where(rank == place, share, weight)
    weight = tl.where(total == total, weight / shared, total)
    tl.store(weights + token * TOP + rank, weight, mask=rank < TOP)
    tl.store(ids + token * TOP + rank, chosen, mask=rank < TOP)


@triton.jit(do_not_specialize=["experts", "logits_stride"])
def _route_scores(
    logits, bias, weights, ids, experts, logits_stride, scale,
    TOP: tl.constexpr, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, BY_BEST: tl.constexpr, TOP_BLOCK: tl.constexpr, GROUP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert, rank, group = tl.arange(0, BLOCK), tl.arange(0, TOP_BLOCK), tl.arange(0, GROUP_BLOCK)
    remaining = expert < experts
    x = tl.load(logits + token * logits_stride + expert, mask=remaining, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, axis=0)
    total = tl.sum(tl.exp(x - peak), axis=0)  # NaN where a logit is
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-x))
    else:
        score = tl.exp(x - peak) / total
    score = tl.where(score == score, score, 0.0)  # so that a broken token has experts all the same
    biased = score
    if BIAS:
        biased = score + tl.load(bias + expert, mask=remaining, other=0.0)
    if GROUPS > 1:
        mine = expert // (experts // GROUPS)
        of_group = tl.full((GROUP_BLOCK,), float("-inf"), tl.float32)
        for number in tl.static_range(GROUPS):
            part = tl.where(remaining & (mine == number), biased, float("-inf"))
            best = tl.max(part, axis=0)
            if not BY_BEST:
                first = tl.min(tl.where(part == best, expert, BLOCK), axis=0)
                best += tl.max(tl.where(expert == first, float("-inf"), part), axis=0)
            of_group = tl.where(group == number, best, of_group)
        kept, left = expert < 0, group < GROUPS
        for _ in tl.static_range(KEPT):
            best = tl.max(tl.where(left, of_group, float("-inf")), axis=0)
            number = tl.min(tl.where(left & (of_group == best), group, GROUP_BLOCK), axis=0)  # ties to the lowest
            left = left & (group != number)
            kept = kept | (mine == number)
        remaining = remaining & kept
    chosen, weight = tl.zeros((TOP_BLOCK,), tl.int32), tl.zeros((TOP_BLOCK,), tl.float32)
    shared = 0.0
    for place in tl.static_range(TOP):
        top = tl.max(tl.where(remaining, biased, float("-inf")), axis=0)
        id = tl.min(tl.where(remaining & (biased == top), expert, BLOCK), axis=0)
        remaining = remaining & (expert != id)
        share = tl.sum(tl.where(expert == id, score, 0.0), axis=0)
        shared += share
        chosen, weight = tl.where(rank == place, id, chosen), tl.where(rank == place, share, weight)
    if RENORMALISE:
        weight = weight / (shared + 1e-20)
    weight = tl.where(total == total, weight * scale, total)
    tl.store(weights + token * TOP + rank, weight, mask=rank < TOP)
    tl.store(ids + token * TOP + rank, chosen, mask=rank < TOP)


@triton.jit(do_not_specialize=["weights_stride"])
def _combine(
    x, weights, out, width, x_stride, weights_stride, out_stride, TOP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(TOP):
        value = tl.load(x + (token * TOP + rank) * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + token * weights_stride + rank).to(tl.float32) * value
    tl.store(out + token * out_stride + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["experts"])
def _expert_bias(x, ids, bias, out, experts, width, x_stride, out_stride, BLOCK: tl.constexpr):
    slot = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    expert = tl.load(ids + slot).to(tl.int64)
    valid = (expert >= 0) & (expert < experts)
    value = tl.load(x + slot * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(bias + expert * width + column, mask=inside & valid, other=float("nan"))
    tl.store(out + slot * out_stride + column, value.to(out.dtype.element_ty), mask=inside)


def route(chip: Chip, logits: Tensor, *, renormalise: bool, weights: Tensor, ids: Tensor) -> None:
    """weights float32 and ids int32 [tokens, top]: the largest logits of a token, falling, ties to the lowest expert.

    logits [tokens, experts], any float dtype, rows may lie apart. Weights are the softmax over all experts, or, with
    renormalise, over the chosen ones (Mixtral). A token whose logits hold a NaN gets weights of NaN.
    """
    (tokens, experts), top = logits.shape, ids.shape[1]
    assert top <= experts, f"{top} of {experts} experts"
    tile = tiles.choose(NAME, chip)
    _route[(tokens,)](
        logits, weights, ids, experts, logits.stride(0), TOP=top, RENORMALISE=renormalise,
        TOP_BLOCK=next_power_of_2(top), BLOCK=next_power_of_2(experts), **tile.compiler(),
    )  # fmt: skip


@dataclass(frozen=True)
class RouterScores:
    """How experts are chosen by scores; see ops.experts.route, whose attributes these are."""

    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    by_best: bool = False
    scale: float = 1.0


def route_scores(
    chip: Chip,
    logits: Tensor,
    bias: "Tensor | None",
    scores: RouterScores,
    *,
    renormalise: bool,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """As `route`, of experts that are chosen by scores, a bias float32 [experts] and within groups.

    A token whose logits hold a NaN gets weights of NaN.
    """
    (tokens, experts), top = logits.shape, ids.shape[1]
    assert top <= experts // scores.groups * scores.kept_groups, f"{top} of {experts} experts"
    tile = tiles.choose(NAME, chip)
    read = logits if bias is None else bias  # a pointer that nobody reads where there is no bias
    _route_scores[(tokens,)](
        logits, read, weights, ids, experts, logits.stride(0), float(scores.scale), TOP=top, RENORMALISE=renormalise,
        SIGMOID=scores.sigmoid, BIAS=bias is not None, GROUPS=scores.groups, KEPT=scores.kept_groups,
        BY_BEST=scores.by_best, TOP_BLOCK=next_power_of_2(top), GROUP_BLOCK=next_power_of_2(scores.groups),
        BLOCK=next_power_of_2(experts), **tile.compiler(),
    )  # fmt: skip


def expert_bias(chip: Chip, x: Tensor, ids: Tensor, bias: Tensor, *, out: Tensor) -> None:
    """out[slot] = x[slot] + bias[ids[slot]], added in float32 and rounded once.

    x, out [slots, width], any float dtypes, rows may lie apart, out may be x; ids int32 of slots elements; bias float32
    [experts, width]. A number outside the experts gives a row of NaN.
    """
    experts, width = bias.shape
    tile = tiles.choose("expert_bias", chip)
    _expert_bias[(ids.numel(), cdiv(width, tile.sizes["BLOCK"]))](
        x, ids, bias, out, experts, width, x.stride(0), out.stride(0), **tile.launch()
    )


def combine(chip: Chip, x: Tensor, weights: Tensor, *, out: Tensor) -> None:
    """out[token] = the sum over ranks, ascending, of weights[token, rank] * x[token * top + rank], in float32.

    x [tokens * top, width], out [tokens, width], weights [tokens, top], any float dtypes, rows may lie apart.
    """
    tokens, top = weights.shape
    assert weights.stride(1) == 1, "a row lies apart"
    tile = tiles.choose("combine", chip)
    _combine[(tokens, cdiv(out.shape[1], tile.sizes["BLOCK"]))](
        x, weights, out, out.shape[1], x.stride(0), weights.stride(0), out.stride(0), TOP=top, **tile.launch()
    )


def cost(tokens: int, experts: int, top: int) -> tuple[int, int]:
    """(FLOPs, bytes) of routing on float32 logits."""
    return tokens * experts * (4 + 2 * top), tokens * (4 * experts + 8 * top)


def combine_cost(tokens: int, top: int, width: int, in_bytes: int = 2, out_bytes: int = 2) -> tuple[int, int]:
    """(FLOPs, bytes) of one combination."""
    return 2 * tokens * top * width, tokens * (width * (top * in_bytes + out_bytes) + 4 * top)


def compilations(chip: Chip) -> Iterator[Compilation]:
    """8 experts of which 2, 128 of which 8, and their combinations; 256 in 8 groups; biases of 16-bit products."""
    routing, combining = tiles.choose(NAME, chip), tiles.choose("combine", chip)
    for experts, top, renormalise in ((8, 2, True), (128, 8, True), (60, 4, False)):
        blocks = {"TOP_BLOCK": next_power_of_2(top), "BLOCK": next_power_of_2(experts)}
        constants = {"TOP": top, "RENORMALISE": renormalise, **blocks}
        types = pointers(logits="f32", weights="f32", ids="i32")
        yield Compilation(
            kernel=NAME,
            case=f"experts={experts} top={top}",
            function=_route,
            signature=types,
            constants=constants,
            tile=routing,
        )
        types, aligned = pointers(x="bf16", weights="f32", out="bf16"), ("width", "x_stride", "out_stride")
        yield Compilation(
            kernel="combine",
            case=f"top={top}",
            function=_combine,
            signature=types,
            constants={"TOP": top},
            tile=combining,
            aligned=aligned,
        )
    for experts, top, groups, kept in ((256, 8, 8, 4), (128, 8, 1, 1)):
        sizes = {"TOP": top, "GROUPS": groups, "KEPT": kept, "TOP_BLOCK": next_power_of_2(top)}
        forms = {"RENORMALISE": True, "SIGMOID": True, "BIAS": True, "BY_BEST": False}
        yield Compilation(
            kernel=NAME,
            case=f"sigmoid experts={experts} top={top} groups={groups}",
            function=_route_scores,
            signature=pointers(logits="f32", bias="f32", weights="f32", ids="i32") | {"scale": "fp32"},
            constants=sizes | forms | {"GROUP_BLOCK": next_power_of_2(groups), "BLOCK": next_power_of_2(experts)},
            tile=routing,
        )
    biases = tiles.choose("expert_bias", chip)
    types, aligned = pointers(x="bf16", ids="i32", bias="f32", out="bf16"), ("width", "x_stride", "out_stride")
    yield Compilation(
        kernel="expert_bias",
        case="bf16",
        function=_expert_bias,
        signature=types,
        constants={},
        tile=biases,
        aligned=aligned,
    )
