"""What tensors of a family are called in files: its table of names, and the search in it both ways."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from roofline.weights.files.mapped import JsonObject
from roofline.weights.quantised.method import TensorSource

_INDEX = r"(0|[1-9][0-9]{0,5})"  # no leading zeros: two spellings of one layer would be two names for one parameter
_GGUF = re.compile(rf"blk\.{_INDEX}\.([\w.]+)\.(weight|bias)")
_LAYER = re.compile(r"layers\.\d+\.")
_OURS = re.compile(rf"layers\.{_INDEX}\.([\w.]+)\.(weight|bias)")

# Ours in a layer -> GGUF's, Hugging Face's: what most families share.
NORMS = {"attn_norm": ("attn_norm", "input_layernorm"), "mlp_norm": ("ffn_norm", "post_attention_layernorm")}
ATTENTION = {
    "attn.q": ("attn_q", "self_attn.q_proj"),
    "attn.k": ("attn_k", "self_attn.k_proj"),
    "attn.v": ("attn_v", "self_attn.v_proj"),
    "attn.o": ("attn_output", "self_attn.o_proj"),
}
QK_NORMS = {"attn.q_norm": ("attn_q_norm", "self_attn.q_norm"), "attn.k_norm": ("attn_k_norm", "self_attn.k_norm")}
POST_NORMS = {
    "attn_post_norm": ("post_attention_norm", "post_attention_layernorm"),
    "mlp_post_norm": ("post_ffw_norm", "post_feedforward_layernorm"),
}
MLP = {
    "mlp.gate": ("ffn_gate", "mlp.gate_proj"),
    "mlp.up": ("ffn_up", "mlp.up_proj"),
    "mlp.down": ("ffn_down", "mlp.down_proj"),
}
# Of a layer that guesses further tokens (`models.mtp`), beside those of its block.
GUESSING = {
    "mtp.fc": ("nextn.eh_proj", "eh_proj"),
    "mtp.embed_norm": ("nextn.enorm", "enorm"),
    "mtp.hidden_norm": ("nextn.hnorm", "hnorm"),
    "mtp.final_norm": ("nextn.shared_head_norm", "shared_head.norm"),
}
# What files call these outside of layers that have such layers by themselves -> within the layer.
_GUESSING_TOP = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head.norm",
}
TOP = {
    "embed": ("token_embd", "model.embed_tokens"),
    "final_norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}


EXPERT = "{expert}"
_NUMBERED = re.compile(rf"\.experts\.{_INDEX}\.")


def without_expert(part: str) -> tuple[str, str]:
    """A name of ours with EXPERT in place of an expert's number, and the number; "" where there is none."""
    match = _NUMBERED.search(part)
    return (part, "") if match is None else (_NUMBERED.sub(f".experts.{EXPERT}.", part, 1), match[1])


# The rows of parameters of ours that lie in one tensor of a file, in its order.
JoinedRows = Sequence[tuple[str, range]]


def layer_part(name: str) -> tuple[str, str]:
    """``"layers.3.linear.qkv.weight"`` -> ``"layers.3."`` and ``"linear.qkv"``."""
    match = _LAYER.match(name)
    return match[0] if match else "", _part(name)


def _part(name: str) -> str:
    """``"layers.3.attn.qkv.weight"`` -> ``"attn.qkv"``."""
    return _LAYER.sub("", name, 1).rpartition(".")[0]


@dataclass(frozen=True)
class TensorPlace:
    """Where Hugging Face's files have a parameter: in the tensor `name`, as part `at` of `of` whose outputs lie in turn
    in it, by columns, expert after expert; of = 0: it is that tensor. in_turn: False where the parts of an expert lie
    one below the other instead, by rows."""

    name: str
    at: int = 0
    of: int = 0
    in_turn: bool = True


@dataclass(frozen=True)
class TensorNames:
    """Names without ``.weight`` and ``.bias``: ours -> (GGUF's, Hugging Face's), "" where such files have it not.

    layer: in a layer, `{expert}` standing for the number of each expert; top: outside of layers; hf_layers: what stands
    before a layer's number at Hugging Face; hf_prefix: what some files leave out at the beginning of a name, as those
    of a model without its head do, or have twice, as those of a module around a model; hf_also:
    further names outside of layers -> the one in `top`; hf_before: what some files have before all names; hf_unread: a
    pattern of the tensors that such files may have and the model does not read; hf_further: the module by which layers
    behind the last of the model are known to guess further tokens, which are not read; "": there are none; bare:
    parameters of a layer, with .weight or .bias, whose tensors have names without that -> those names.

    Where Hugging Face's tensors hold other values than our parameters, or in another order: norms_less: what
    weights of norms lack to ours, but for those in norms_alike; parted: matrices that have a dimension of 1 between
    rows and columns; one_row: vectors that are the row of a matrix; transposed: matrices that are [inputs,
    outputs]; by_head: whose rows are q, k and v of one head after the other, ours those of q, then k, then v of all
    heads; hf_apart: takes apart the tensors that hold several of ours, in files of that path; None: there are none;
    joined: of a configuration, the tensors in which rows of several of ours lie in turn, which have names in
    `layer`, too; hf_placed: the inverse, of a configuration and what `to_hf` calls a parameter, where
    files are written so; stacked:
    tensors of all experts of a layer, [experts, rows, columns], ours one below the other.

    Of adapters: modules_before: what modules of transformers' model have in place of the beginning of the files' names,
    as (files', modules'); experts_module: what that model calls the module of a layer's experts; unadapted: matrices of
    layers that PEFT refuses adapters of, or passes by, though they are linear layers; as_parameters: last parts of
    names of linear layers whose weights adapters name as parameters, as PEFT would take the modules for others;
    modules_apart: transformers' model has a module for each of the matrices that are `joined` in files; neighbours:
    rope turns two dimensions beside each other in Hugging Face's files too, so that no converter moves rows of q and k.

    spare: whether files of either kind may have a parameter, of a configuration and by our name, that the model does
    not read.

    hf_guessing: what stands before the names of a layer that guesses further tokens (rows GUESSING of `layer`), where
    Hugging Face's files do not count it on behind the model's layers; hf_guessing_key: what config.json says of it.

    Where GGUF's do: gguf_negated: those that hold -exp of ours; gguf_joined: the tensors in `joined` that such files
    have, too; gguf_stacked: those of them with a dimension more, of the parameters; gguf_tiles: value heads that share
    a key head lie apart in them (`Config.tiled`); gguf_shapes: of a configuration, the shapes that they give vectors
    of ours; gguf_factors: what the rows of parameters of ours are multiplied by in them, in stretches of rows, and
    gguf_config: the configuration without these numbers.
    """

    layer: Mapping[str, tuple[str, str]]
    top: Mapping[str, tuple[str, str]] = field(default_factory=lambda: TOP)
    hf_layers: str = "model.layers"
    hf_prefix: str = "model."
    hf_also: Mapping[str, str] = field(default_factory=dict)
    hf_before: tuple[str, ...] = ()
    hf_unread: str = ""
    hf_further: str = ""
    bare: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    norms_less: float = 0.0
    norms_alike: Collection[str] = ()
    parted: Collection[str] = ()
    one_row: Collection[str] = ()
    transposed: Collection[str] = ()
    by_head: Collection[str] = ()
    hf_apart: Callable[[Path, TensorSource], TensorSource] | None = None
    joined: Callable[[dict[str, Any]], Mapping[str, JoinedRows]] = lambda config: {}
    hf_placed: Callable[[JsonObject, str], TensorPlace | None] = lambda config, name: None
    hf_guessing: str = ""
    hf_guessing_key: str = ""
    stacked: Collection[str] = ()
    modules_before: tuple[str, str] = ("", "")
    experts_module: str = "mlp.experts"
    unadapted: Collection[str] = ()
    as_parameters: Collection[str] = ()
    modules_apart: bool = False
    neighbours: bool = False
    spare: Callable[[JsonObject, str], bool] = lambda config, name: False
    gguf_negated: Collection[str] = ()
    gguf_joined: Collection[str] = ()
    gguf_stacked: Collection[str] = ()
    gguf_tiles: bool = False
    gguf_shapes: Callable[[dict[str, Any]], Mapping[str, tuple[int, ...]]] = lambda config: {}
    gguf_factors: Callable[[dict[str, Any]], Mapping[str, Sequence[tuple[int, float]]]] = lambda config: {}
    gguf_config: Callable[[dict[str, Any]], dict[str, Any]] = lambda config: config

    def from_gguf(self, name: str) -> str | None:
        """``"blk.3.attn_q.weight"`` -> ``"layers.3.attn.q.weight"``; None for a name that is not in the table."""
        return self._canonical(name, _GGUF, 0)

    def from_hf(self, name: str) -> str | None:
        """``"model.layers.3.self_attn.q_proj.weight"`` -> ``"layers.3.attn.q.weight"``; None for an unknown name."""
        name = name.removeprefix(next(filter(name.startswith, self.hf_before), ""))
        stem, _, kind = name.rpartition(".")
        name = f"{self.hf_also[stem]}.{kind}" if stem in self.hf_also else name
        candidates = (self._canonical(spelling, self._hf, 1) for spelling in self._spellings(name))
        return next((ours for ours in candidates if ours is not None), None)

    @property
    def has_guessing(self) -> bool:
        """Whether files of the family may have a layer that guesses."""
        return GUESSING.keys() <= self.layer.keys()

    def counted_on(self, name: str, layers: int) -> str | None:
        """What a tensor of a layer that guesses would be called if it were counted on behind the model's: "mtp.norm"
        of a model of 24 layers "model.layers.24.shared_head.norm"; None for other tensors."""
        if not self.has_guessing:
            return None
        if not self.hf_guessing:
            match = re.match(rf"{re.escape(self.hf_layers)}\.{_INDEX}\.", name)
            return name if match is not None and int(match[1]) >= layers else None
        name = name.removeprefix(self.hf_prefix)
        if not name.startswith(f"{self.hf_guessing}."):
            return None
        part = name.removeprefix(f"{self.hf_guessing}.")
        match = re.fullmatch(rf"layers\.{_INDEX}\.(.+)", part)
        if match is not None:
            return f"{self.hf_layers}.{layers + int(match[1])}.{match[2]}"
        stem, _, kind = part.rpartition(".")
        return f"{self.hf_layers}.{layers}.{_GUESSING_TOP[stem]}.{kind}" if stem in _GUESSING_TOP else None

    def by_itself(self, name: str, layers: int) -> str:
        """The inverse of `counted_on`."""
        match = re.match(rf"{re.escape(self.hf_layers)}\.{_INDEX}\.", name)
        if match is None or int(match[1]) < layers or not self.hf_guessing:
            return name
        stem, _, kind = name.removeprefix(match[0]).rpartition(".")
        top = next((ours for ours, theirs in _GUESSING_TOP.items() if theirs == stem), None)
        if top is not None:
            return f"{self.hf_guessing}.{top}.{kind}"
        return f"{self.hf_guessing}.layers.{int(match[1]) - layers}.{name.removeprefix(match[0])}"

    def reads_hf(self, name: str) -> bool:
        """Whether a tensor of Hugging Face's files is not among those that the model does not read."""
        return not (self.hf_unread and re.fullmatch(self.hf_unread, name))

    def is_inside(self, name: str) -> bool:
        """Whether a tensor of Hugging Face's files is one of a layer, or of a module in `top`, whatever it is there."""
        name = name.removeprefix(next(filter(name.startswith, self.hf_before), ""))
        modules = (self.hf_layers, *self._ours[1][1], *self.hf_also)
        return any(spelling.startswith(f"{module}.") for spelling in self._spellings(name) for module in modules)

    def is_transposed(self, name: str) -> bool:
        """Whether files of Hugging Face have a parameter of ours by columns."""
        return name.endswith(".weight") and _part(name) in self.transposed

    def is_parted(self, name: str) -> bool:
        """Whether files of Hugging Face have a parameter of ours with a dimension of 1 between rows and columns."""
        return name.endswith(".weight") and _part(name) in self.parted

    def is_row(self, name: str) -> bool:
        """Whether files of Hugging Face have a vector of ours as the one row of a matrix."""
        return _part(name) in self.one_row

    def further_layers(self, names: Iterable[str], layers: int) -> tuple[str, ...]:
        """What stands in Hugging Face's files before names of the layers that guess further tokens. layers: of the
        model."""
        pattern = re.compile(rf"{re.escape(self.hf_layers)}\.{_INDEX}\.{re.escape(self.hf_further)}\..+")
        numbers = {int(match[1]) for match in map(pattern.fullmatch, names) if match is not None}
        return tuple(f"{self.hf_layers}.{number}." for number in sorted(numbers) if number >= layers)

    def has_hf(self, part: str) -> bool:
        """Whether files of Hugging Face have a tensor for a part of ours."""
        theirs = self.bare.get(f"{part}.weight") or self.layer.get(part) or self.top.get(part, ("", ""))
        return bool(theirs[1])

    def is_stacked(self, name: str) -> bool:
        """Whether files of Hugging Face have the experts of a parameter of ours in a dimension of their own."""
        return name.endswith(".weight") and _part(name) in self.stacked

    def lacks(self, name: str) -> float:
        """What the values of a parameter lack to ours in files of Hugging Face."""
        return self.norms_less if name.endswith("norm.weight") and _part(name) not in self.norms_alike else 0.0

    def is_by_head(self, name: str) -> bool:
        """Whether files of Hugging Face have its rows, q, k and v, head by head."""
        return _part(name) in self.by_head

    def to_gguf(self, name: str) -> str | None:
        """The inverse of `from_gguf`; None for a parameter that is not in the table."""
        return self._theirs(name, 0, "blk")

    def to_hf(self, name: str) -> str | None:
        """The inverse of `from_hf`; None for a parameter that is not in the table."""
        return self._theirs(name, 1, self.hf_layers)

    def module_of(self, name: str) -> str:
        """What transformers' model calls a module that files have as `name`."""
        theirs, before = self.modules_before
        return before + name.removeprefix(theirs) if theirs and name.startswith(theirs) else name

    def _spellings(self, name: str) -> list[str]:
        """A name, and what it would be with the first part that files may leave out, and without one too many."""
        return list(dict.fromkeys((name, self.hf_prefix + name, name.removeprefix(self.hf_prefix))))

    def _theirs(self, name: str, at: int, layers: str) -> str | None:
        match = _OURS.fullmatch(name)
        if match:
            index, part, kind = match.groups()
            if f"{part}.{kind}" in self.bare:
                return f"{layers}.{index}.{self.bare[f'{part}.{kind}'][at]}"
            part, expert = without_expert(part)
            theirs, before = self.layer.get(part, ("", ""))[at], f"{layers}.{index}."
            theirs = theirs.replace(EXPERT, expert)
        else:
            part, _, kind = name.rpartition(".")
            theirs, before = self.top.get(part, ("", ""))[at], ""
        return f"{before}{theirs}.{kind}" if theirs else None

    @cached_property
    def _hf(self) -> re.Pattern[str]:
        return re.compile(rf"{re.escape(self.hf_layers)}\.{_INDEX}\.([\w.]+)\.(weight|bias)")

    @cached_property
    def _ours(self) -> tuple[tuple[dict[str, str], dict[str, str]], ...]:
        """Theirs -> ours, in layers and outside, of GGUF files and of Hugging Face's."""
        return tuple(
            (
                {theirs[at]: ours for ours, theirs in self.layer.items() if theirs[at]},
                {theirs[at]: ours for ours, theirs in self.top.items() if theirs[at]},
            )
            for at in range(2)
        )

    def _canonical(self, name: str, pattern: re.Pattern[str], at: int) -> str | None:
        layer, top = self._ours[at]
        before = "blk" if at == 0 else self.hf_layers
        for ours, theirs in self.bare.items():
            place = re.fullmatch(rf"{re.escape(before)}\.{_INDEX}\.{re.escape(theirs[at])}", name)
            if place:
                return f"layers.{place[1]}.{ours}"
        match = pattern.fullmatch(name)
        if match:
            index, part, kind = match.groups()
            part, expert = without_expert(part)
            return f"layers.{index}.{layer[part].replace(EXPERT, expert)}.{kind}" if part in layer else None
        stem, _, kind = name.rpartition(".")
        return f"{top[stem]}.{kind}" if stem in top and kind in ("weight", "bias") else None
