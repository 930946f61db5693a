"""Programs of ranks and stages: their goldens, that together they are the model, and what cannot be divided."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import program_builders as builders
import pytest

from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.models.spec import expand
from roofline.ops import collectives, formats, registry
from roofline.ops.cost import Affine
from roofline.ops.symbol import Type
from roofline.program.compile import compile_program, register_pass, stages
from roofline.program.ir import Columns, Instr, Program, Recipe, Share, Value, WeightPiece
from roofline.program.passes.price import price
from roofline.program.passes.shard import shard
from roofline.program.passes.stage import stage
from roofline.program.target import CPU
from roofline.program.text import parse_program, print_program
from roofline.program.verify import verify

GOLDEN = Path(__file__).parent / "golden"
# 16 heads on 2 kv heads, 6 blocks of 256 columns in the mlp: 4 ranks copy kv heads and have 2, 2, 1, 1 blocks.
UNEVEN = builders.WIDE | {"layers": 1, "heads": 16, "ffn": 1536}
SCANS = builders.BASE | {"heads": 0, "kv_heads": 0, "head_dim": 0, "ffn": 0, "positions": "none"}
SCANS |= {"layers": 1, "recurrent": [True], "inner": 128, "states": 16, "taps": 4}
MAMBA2 = SCANS | {"family": "mamba2", "scan_heads": 8}
MODELS = {
    "llama": lambda: builders.build(builders.BASE | {"head_dim": 32}, embed="Q8_0"),
    "uneven": lambda: builders.build(UNEVEN, "Q4_K"),
    "mpt": lambda: builders.build(builders.MPT, positions="F16"),
    "alibi": lambda: builders.build(builders.MPT_ALIBI, "BF16"),
    "qwen3": lambda: builders.build(builders.QWEN3, "BF16"),
    "hybrid": lambda: builders.build(builders.HYBRID | {"value_dim": 16}, "Q8_0"),
    "mamba": lambda: builders.build(SCANS | {"family": "mamba", "rank": 32}, "Q8_0"),
    "mamba2": lambda: builders.build(MAMBA2, "Q8_0"),
    "mamba2 groups": lambda: builders.build(MAMBA2 | {"groups": 4}, "Q8_0"),
}
GOLDENS = {
    "llama_rank1of2": ("llama", Share(1, 2), ("shard", "fuse")),
    "uneven_rank3of4": ("uneven", Share(3, 4), ("shard",)),
    "mpt_rank0of2": ("mpt", Share(0, 2), ("shard", "fuse")),
    "alibi_rank1of3": ("alibi", Share(1, 3), ("shard",)),
    "llama_stage1of2": ("llama", Share(0, 1, 1, 2), ("stage", "plan")),
    "hybrid_rank1of2": ("hybrid", Share(1, 2), ("shard", "fuse")),
    "hybrid_rank0of2_stage1of2": ("hybrid", Share(0, 2, 1, 2), ("stage",)),
    "qwen3_rank1of2_stage0of2": ("qwen3", Share(1, 2, 0, 2), ("stage",)),
    "mamba_rank1of2": ("mamba", Share(1, 2), ("shard",)),
    "mamba2_rank1of2": ("mamba2", Share(1, 2), ("shard", "fuse")),
    "mamba2_groups_rank2of3": ("mamba2 groups", Share(2, 3), ("shard",)),
}


def programs(name: str, share: Share) -> dict[str, Program]:
    model = MODELS[name]()
    return dict(stages(model.family, model.cfg, model.tensors, CPU, share=share))


def golden_texts() -> dict[str, str]:
    """File name -> what it must hold."""
    texts = {}
    for name, (model, share, shown) in GOLDENS.items():
        found = programs(model, share)
        texts |= {f"{name}.{after}.txt": print_program(found[after]) for after in shown}
    return texts


def test_goldens() -> None:
    for name, text in golden_texts().items():
        path = GOLDEN / name
        assert path.exists(), f"write {name} with `python tests/program/write_goldens.py`"
        assert text == path.read_text(), f"{name}: `python tests/program/write_goldens.py` shows"
        assert print_program(parse_program(text)) == text


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("llama", 2), ("uneven", 4), ("mpt", 2), ("alibi", 3), ("qwen3", 3), ("hybrid", 2), ("mamba", 2), ("mamba", 3)],
)
def test_ranks_have_every_weight_once_but_for_what_they_share(name: str, ranks: int) -> None:
    model = MODELS[name]()
    parts = [compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(r, ranks)) for r in range(ranks)]
    held: Counter[str] = Counter()
    for part in parts:
        for recipe in part.weights.values():
            for piece in recipe.pieces:
                held[piece.tensor] += (piece.stop - piece.start) * recipe.columns
    for param in expand(model.family.spec(model.cfg), model.cfg.layers):
        if param.tied_to is not None:
            continue
        size = param.shape[0] * (param.shape[1] if len(param.shape) == 2 else 1)
        kv_copies = ranks / model.cfg.kv_heads if ".attn.k." in param.name or ".attn.v." in param.name else 1
        copies = {"replicate": ranks, "shared": ranks}.get(param.split, max(1, kv_copies))
        if param.split == "replicate" and param.name.endswith(("o.bias", "down.bias")):
            copies = 1  # rank 0 adds it
        assert held[param.name] == copies * size, param.name


def pieces_of(recipe: Recipe, rank: int, split: str) -> list[tuple[str, int, int, Columns | None]]:
    """What one of two ranks has of a matrix of the first layer: (tensor, first row, last, columns)."""
    model, program = MODELS["llama"](), programs("llama", Share())["narrow"]
    name = f"layers.0.mlp.{'up' if split == 'rows' else 'down'}.weight"
    assert program.weights[name].shape == recipe.shape
    params = expand(model.family.spec(model.cfg), model.cfg.layers)
    part = shard(replace(program, weights={**program.weights, name: recipe}), params, rank, 2).weights[name]
    assert part.shape == (64, 64)
    return [(piece.tensor, piece.start, piece.stop, piece.columns) for piece in part.pieces]


def test_rows_of_pieces_that_begin_within_their_tensors() -> None:
    """128 rows are rows 7 to 47 of one tensor and 5 to 93 of another: the ranks' 64 lie on both sides of the seam."""
    recipe = Recipe((128, 64), (WeightPiece("a", 7, 47, "Q4_1"), WeightPiece("b", 5, 93, "Q4_1")))
    assert pieces_of(recipe, 0, "rows") == [("a", 7, 47, None), ("b", 5, 29, None)]
    assert pieces_of(recipe, 1, "rows") == [("b", 29, 93, None)]
    # A seam where the ranks part: no piece is empty.
    recipe = Recipe((128, 64), (WeightPiece("a", 7, 71, "Q4_1"), WeightPiece("b", 5, 69, "Q4_1")))
    assert pieces_of(recipe, 0, "rows") == [("a", 7, 71, None)]
    assert pieces_of(recipe, 1, "rows") == [("b", 5, 69, None)]


def test_columns_of_pieces_that_begin_within_their_tensors() -> None:
    """128 columns are columns 64 to 192 of one tensor's 256, and all of another's."""
    pieces = (WeightPiece("a", 3, 35, "Q4_1", Columns(64, 192, 256)), WeightPiece("b", 0, 32, "Q4_1"))
    for rank in (0, 1):
        a, b = Columns(64 + 64 * rank, 128 + 64 * rank, 256), Columns(64 * rank, 64 + 64 * rank, 128)
        assert pieces_of(Recipe((64, 128), pieces), rank, "columns") == [("a", 3, 35, a), ("b", 0, 32, b)]


@pytest.mark.parametrize("form", ["F32", "Q4_1", "Q8_0"])
def test_bytes_of_a_piece_are_those_of_its_blocks(form: str) -> None:
    kind, width = formats.get(form), 128
    blocks = width // kind.block
    raw = np.arange(6 * blocks * kind.block_bytes).astype(np.uint8)
    rows = [
        [raw[(row * blocks + at) * kind.block_bytes :][: kind.block_bytes] for at in range(blocks)] for row in range(6)
    ]
    piece = WeightPiece("a", 1, 5, form)
    assert piece.bytes_of(raw, width).tolist() == np.concatenate([b for row in rows[1:5] for b in row]).tolist()
    first, last = 32 // kind.block, 96 // kind.block
    cut = replace(piece, columns=Columns(32, 96, width))
    assert cut.bytes_of(raw, 64).tolist() == np.concatenate([b for row in rows[1:5] for b in row[first:last]]).tolist()


def test_every_pass_finds_in_a_part_what_it_finds_in_the_whole() -> None:
    whole = Counter(i.op for i in programs("llama", Share())["fuse"].body)
    part = Counter(i.op for i in programs("llama", Share(1, 2))["fuse"].body)
    # After a row split comes the sum, so the residual is added by itself.
    moved = Counter({"all_reduce": 5, "all_gather": 1, "add": 4, "linear": 4})
    assert part == whole + moved - Counter({"linear_add": 4})
    head = next(i for i in programs("llama", Share(1, 2))["plan"].body[::-1] if i.op == "linear")
    assert head.attr("order") == "q15g32"


@pytest.mark.parametrize("share", [Share(), Share(1, 2), Share(0, 2, 1, 2)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{"family": "gemma", "query_scalar": 16.0, "logit_cap": 30.0}, {"family": "granite", "logits_scaling": 2}],
)
def test_the_head_behind_a_cap_or_a_scale_reads_the_rows_of_the_head(changes: dict[str, object], share: Share) -> None:
    model = builders.build(builders.BASE | changes, "Q8_0")
    program = compile_program(model.family, model.cfg, model.tensors, CPU, share=share)
    *others, head = (i.attrs["order"] for i in program.body if i.op.startswith("linear"))
    assert head == "q15g32"
    assert set(others) == {"q8g32"}
    assert program.body[-1].op in ("soft_cap", "scale")


def test_sums_are_in_rank_order_unless_speed_is_asked_for() -> None:
    model = MODELS["llama"]()
    for target, order in ((CPU, collectives.RANK_ORDER), (replace(CPU, orders={**CPU.orders, "all_reduce": ""}), "")):
        program = compile_program(model.family, model.cfg, model.tensors, target, share=Share(0, 2))
        assert {i.attr("order") for i in program.body if i.op == "all_reduce"} == {order}


def test_link_bytes_are_priced() -> None:
    x, op = Type("f32", "tokens", (64,)), registry.get("all_reduce")
    assert op.price(op.call([x], [], {"ranks": 4})).link_bytes == Affine(tokens=2 * 3 * 64 * 4 // 4)
    assert op.price(op.call([x], [], {"ranks": 4, "order": "rank"})).link_bytes == Affine(tokens=3 * 64 * 4)
    assert op.price(op.call([x], [], {"ranks": 1})).link_bytes == Affine()
    gather = registry.get("all_gather")
    assert gather.price(gather.call([x], [], {"widths": (64, 32)})).link_bytes == Affine(tokens=32 * 4)
    whole, part = price(programs("llama", Share())["plan"]), price(programs("llama", Share(0, 2))["plan"])
    assert whole.total.link_bytes == Affine()
    # Embedding, o of two layers and the first down over tokens; the last layer's two over wanted rows, half the logits.
    assert part.total.link_bytes == Affine(tokens=3 * 64 * 4, rows=2 * 64 * 4 + 48 * 4)
    assert part.total.weight_bytes.const < 0.6 * whole.total.weight_bytes.const


def test_operands_that_do_not_fit_are_refused() -> None:
    reduce, gather = registry.get("all_reduce"), registry.get("all_gather")
    with pytest.raises(ConfigError, match="all_reduce of i32 among 2"):
        reduce.types(reduce.call([Type("i32", "tokens", (4,))], [], {"ranks": 2}))
    with pytest.raises(ConfigError, match="width 5 among parts"):
        gather.types(gather.call([Type("f32", "rows", (5,))], [], {"widths": (4, 6)}))


def test_one_rank_and_one_stage_change_nothing() -> None:
    model, program = MODELS["llama"](), programs("llama", Share())["narrow"]
    assert shard(program, model.family.spec(model.cfg), 0, 1) is program
    assert stage(program, 0, 1) is program
    assert "shard" not in programs("llama", Share())


def test_stages_together_are_the_whole() -> None:
    whole = programs("llama", Share())["narrow"]
    parts = [programs("llama", Share(0, 1, number, 2))["stage"] for number in range(2)]
    assert [i.op for part in parts for i in part.body] == [i.op for i in whole.body]
    assert [p.kv_groups["kv0"].layers for p in parts] == [1, 1]
    assert all(p.inputs[-1 if p.share.stage == 0 else -2].name == "kv0.0" for p in parts)
    assert parts[0].outputs == ("x15", "kv0.1")
    assert parts[1].inputs[-1] == Value("x15", Type("f32", "tokens", (64,)))
    assert parts[1].outputs == ("x33", "kv0.1")
    assert [part.carried for part in parts] == [(), parts[1].inputs[-1:]]
    assert {i.attr("layer") for i in parts[1].body if i.op == "attend"} == {0}
    assert "ids" not in {v.name for v in parts[1].inputs}
    assert set(parts[0].weights) & set(parts[1].weights) == {"embed.weight"}  # tied: the first looks up, the last reads


def test_uneven_stages() -> None:
    model = builders.build(builders.BASE | {"layers": 5})
    program = compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(0, 1, 0, 3))
    assert program.kv_groups["kv0"].layers == 2


def test_more_parts_than_there_are_is_a_capacity_error() -> None:
    model = builders.build(builders.BASE | {"heads": 2}, "BF16")
    with pytest.raises(CapacityError, match=r"tensor_parallel=4 needs 4 parts of 1 query heads.*Lower it to at most 2"):
        compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(0, 4))
    model = builders.build(builders.MPT | {"heads": 8, "kv_heads": 8, "ffn": 128}, "BF16")
    with pytest.raises(CapacityError, match=r"units of 32 columns in layers\.\d\.mlp\.down\.weight, 4 are available"):
        compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(0, 5))
    with pytest.raises(CapacityError, match="pipeline_parallel=3 needs 3 layers, 2 are available"):
        programs("llama", Share(0, 1, 0, 3))


def changed(op: str, **changes: object) -> Program:
    """The traced llama with the first instruction of an op changed."""
    program = programs("llama", Share())["narrow"]
    at = next(number for number, instr in enumerate(program.body) if instr.op == op)
    body = list(program.body)
    body[at] = replace(body[at], **changes)
    return replace(program, body=tuple(body))


def test_what_cannot_be_computed_part_by_part_is_refused_by_name() -> None:
    model = MODELS["llama"]()
    params = expand(model.family.spec(model.cfg), model.cfg.layers)
    program = programs("llama", Share())["narrow"]
    types = program.types()
    down = next(i for i in program.body if "layers.0.mlp.down.weight" in i.weights)
    # A norm over all columns of the mlp would need those of the other ranks.
    normed = Value("normed", types[down.inputs[0]])
    norm = Instr("rms_norm", down.inputs, ("layers.0.mlp_norm.weight",), {"eps": 1e-5}, (normed,))
    body = [j for i in program.body for j in ((norm, replace(i, inputs=("normed",))) if i is down else (i,))]
    with pytest.raises(UnsupportedError, match="rms_norm under tensor_parallel"):
        shard(replace(program, body=tuple(body)), params, 0, 2)
    # Columns of heads that no rank has whole.
    cut = Instr("cut_heads", down.inputs, (), {"heads": 2, "start": 0, "stop": 64}, (normed,))
    body = [j for i in program.body for j in ((cut, replace(i, inputs=("normed",))) if i is down else (i,))]
    with pytest.raises(
        UnsupportedError, match="cut_heads under tensor_parallel is not supported: its result is cut inside a head"
    ):
        shard(replace(program, body=tuple(body)), params, 1, 3)
    # A column split whose result goes into the residual.
    wrong = [replace(p, split="column") if p.name == "layers.0.attn.o.weight" else p for p in params]
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn\.o\.weight, split by column.*wanted whole"):
        shard(program, wrong, 0, 2)
    wrong = [replace(p, split="row") if p.name == "layers.0.mlp.up.weight" else p for p in params]
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp\.up\.weight, split by row.*is cut"):
        shard(program, wrong, 0, 2)


def test_state_of_layers_that_ranks_have_whole_is_whole_on_each() -> None:
    model = MODELS["hybrid"]()
    params = expand(model.family.spec(model.cfg), model.cfg.layers)
    program = programs("hybrid", Share())["narrow"]
    whole = [replace(p, split="replicate") if ".linear." in p.name else p for p in params]
    part = shard(program, whole, 1, 2)
    assert part.state_groups == program.state_groups
    rules = [i for i in part.body if i.op in ("causal_conv", "delta_rule")]
    assert rules == [i for i in program.body if i.op in ("causal_conv", "delta_rule")]
    mixed = [replace(p, split="replicate") if p.name.startswith("layers.0.linear.") else p for p in params]
    with pytest.raises(
        UnsupportedError, match=r"qwen3_5 model under tensor_parallel .* different shares of their colum"
    ):
        shard(program, mixed, 1, 2)


def test_a_norm_over_channels_of_several_ranks_is_of_gathered_rows() -> None:
    """Where each rank has whole groups, nothing but what the matrix behind the norm gives is exchanged."""

    def exchanges(name: str, ranks: int) -> list[str]:
        return [i.op for i in programs(name, Share(1, ranks))["shard"].body if i.exchanges]

    assert exchanges("mamba2 groups", 2) == exchanges("mamba2 groups", 3) == ["all_reduce", "all_reduce", "all_gather"]
    assert exchanges("mamba2", 2) == ["all_reduce", "all_gather", "all_reduce", "all_gather"]
    assert exchanges("mamba", 2) == ["all_reduce"] * 4 + ["all_gather"]  # what steps are made of, and B and C, are sums
    # Ranks of which one alone has whole groups gather as the others do.
    three = builders.build(MAMBA2 | {"groups": 2}, "Q8_0")
    for rank in range(3):
        part = dict(stages(three.family, three.cfg, three.tensors, CPU, share=Share(rank, 3)))["shard"]
        gathered = next(i for i in part.body if i.op == "all_gather")
        assert gathered.attr("widths") == (32, 32, 64)


def test_views_of_rows_that_are_taken_count_all_columns_of_the_rank() -> None:
    """The gate behind a convolution is a view of rows that other views want whole: they are taken from all of it."""
    config = builders.BASE | {"family": "lfm2", "qk_norm": True, "recurrent": [False, True]}
    model = builders.build(config, "F32")
    whole, part = (
        dict(stages(model.family, model.cfg, model.tensors, CPU, share=share))["shard" if share.ranks > 1 else "narrow"]
        for share in (Share(), Share(1, 2))
    )
    for program, width in ((whole, 64), (part, 32)):
        views = [i for i in program.body if i.op == "split"]
        assert sorted((i.attr("start"), i.attr("stop")) for i in views) == [
            (at * width, (at + 1) * width) for at in range(3)
        ]
    # What is no view would have columns of the gate alone, and of its value all three.
    narrowed = next(i for i in whole.body if i.op == "split" and whole.types()[i.inputs[0]].leading == "rows")
    scaled = Value("scaled", whole.types()[narrowed.inputs[0]])
    taken = Instr("scale", narrowed.inputs, (), {"factor": 2.0}, (scaled,))
    column = Instr("cut_heads", ("scaled",), (), {**narrowed.attrs, "heads": 1}, narrowed.outputs)
    body = [j for i in whole.body for j in ((taken, column) if i is narrowed else (i,))]
    params = expand(model.family.spec(model.cfg), model.cfg.layers)
    with pytest.raises(UnsupportedError, match=r"take_rows under tensor_parallel .* others want more columns of"):
        shard(replace(whole, body=tuple(body)), params, 1, 2)


def test_two_values_across_a_cut_travel_as_one() -> None:
    program = programs("llama", Share())["narrow"]
    last = program.body[-1]
    first = next(i for i in program.body if i.op == "embed").output
    both = (*program.body[:-2], replace(program.body[-2], op="add", inputs=("x30", "x0.rows"), weights=(), attrs={}))
    take = Instr("take_rows", (first.name, "logit_rows"), (), {}, (Value("x0.rows", last.output.type),))
    changed = replace(program, body=(*both[:-1], take, both[-1], last))
    before, behind = stage(changed, 0, 2), stage(changed, 1, 2)
    assert before.body[-1] == Instr("join_heads", ("x0", "x15"), (), {"heads": 1}, before.body[-1].outputs)
    assert before.outputs[0] == behind.carried[0].name == "x0+x15"
    width = first.type.width
    edges = [(i.output.name, i.attr("start"), i.attr("stop")) for i in behind.body[:2]]
    assert edges == [("x0", 0, width), ("x15", width, 2 * width)]
    rows = replace(first.type, dtype="i32")
    odd = [replace(i, outputs=(Value("x0", rows),)) if i.output == first else i for i in changed.body]
    with pytest.raises(UnsupportedError, match="values cross a cut between layers that are no rows of tokens"):
        stage(replace(changed, body=tuple(odd)), 0, 2)


def test_a_pass_from_outside_sees_the_whole_before_and_the_part_after(monkeypatch: pytest.MonkeyPatch) -> None:
    from roofline.program import compile as passes

    monkeypatch.setattr(passes, "_REGISTERED", {})
    seen = {}
    for name in ("narrow", "legalize"):
        register_pass(f"after {name}", lambda p, n=name: seen.setdefault(n, p), after=name)  # type: ignore[misc]
    programs("llama", Share(1, 2))
    assert [seen[n].share.ranks for n in ("narrow", "legalize")] == [1, 2]
    with pytest.raises(ConfigError, match="'shard' is already"):
        register_pass("shard", lambda p: p)


def test_the_verifier_knows_columns() -> None:
    model = MODELS["llama"]()
    good = compile_program(model.family, model.cfg, model.tensors, CPU, share=Share(1, 2))
    name = "layers.0.mlp.down.weight"
    recipe = good.weights[name]
    (piece,) = recipe.pieces
    assert piece.columns is not None

    def changed(**edges: int) -> Program:
        pieces = (replace(piece, columns=replace(piece.columns, **edges)),)
        return replace(good, weights={**good.weights, name: replace(recipe, pieces=pieces)})

    with pytest.raises(ConfigError, match=r"48:112 of 128 are cut inside a block of Q4_1, which is 32"):
        verify(changed(start=48, stop=112), model.tensors)
    with pytest.raises(ConfigError, match=r"32:128 of 128 cannot be columns"):
        verify(changed(start=32), model.tensors)
    with pytest.raises(ConfigError, match=r"no such part of the file tensor layers\.0\.mlp\.down\.weight \[64, 128\]"):
        verify(changed(of=256), model.tensors)
    with pytest.raises(ConfigError, match=r"not used exactly once"):
        verify(replace(good, share=Share()), model.tensors)
    other = "layers.1.mlp.down.weight"
    stolen = {**good.weights, other: replace(good.weights[other], pieces=(piece,))}
    with pytest.raises(ConfigError, match=r"mlp\.down\.weight are used twice: \[0:64\]\[64:128\], \[0:64\]\[64:128\]"):
        verify(replace(good, weights=stolen), model.tensors)
    beside = replace(piece, columns=replace(piece.columns, start=0, stop=64))
    verify(replace(good, weights={**stolen, other: replace(recipe, pieces=(beside,))}), model.tensors)
