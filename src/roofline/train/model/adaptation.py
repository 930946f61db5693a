"""Plans an adapter: which matrices of a model it changes, and how all parameters lie in memory meanwhile."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from roofline.common import log
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.json_types import JsonMapping
from roofline.models.registry import configure
from roofline.models.spec import Param, expand
from roofline.ops import formats
from roofline.ops.traits import Trait
from roofline.program.ir import Program
from roofline.program.trace import trace_shape
from roofline.train.config.adapter import AdapterSection
from roofline.train.config.schema import TrainConfig
from roofline.train.model.form import ParameterForm
from roofline.train.model.shapes import files
from roofline.weights.checkpoint import Checkpoint, open_checkpoint
from roofline.weights.families.shared.tensor_names import layer_part
from roofline.weights.families.table import files_of
from roofline.weights.joined_rows import holders_of, in_files
from roofline.weights.latent_form import latent_form
from roofline.weights.names import matrix_from_hf, to_hf

_WIDE = ("bf16", "f32")
_OUTER = "Q8_0"  # embedding and head of a quantised base: small errors there are errors of every token
_log = log.get("train")


def forms(config: TrainConfig, shape: JsonMapping) -> Mapping[str, ParameterForm]:
    """The form of each parameter by its canonical name; none if all parameters are trained.

    shape: the canonical configuration. Raises ConfigError for targets that the model does not have, UnsupportedError
    for those that an adapter cannot name.
    """
    section = config.adapter
    if section is None or section.method == "full":
        return {}
    family, cfg = configure(shape)
    table = [param for param in expand(family.spec(cfg), cfg.layers) if param.tied_to is None]
    program = trace_shape(family, cfg, "F32")
    stored = section.base == "stored"
    checkpoint = latent_form(open_checkpoint(files(config.model)), latent=False) if stored else None
    targets = _targets(section, table, program, shape)
    holders, begun = holders_of(dict(shape)), set[str]()
    planned = {}
    for param in table:
        opaque = len(param.shape) == 2 and all(_reads(program, param.name, Trait.SPLITS))
        form = ParameterForm(
            param.shape, _format(section, param, checkpoint) if opaque else "F32", opaque, param.experts
        )
        if param.name in targets:
            holder = in_files(param.name, holders)
            shared = (param.experts > 0 and ".up." in param.name) or holder in begun
            begun |= {holder} if holder != param.name else set()
            dora = section.method == "dora"
            form = replace(form, rank=section.rank, scale=section.scale, dora=dora, shared=shared)
        planned[param.name] = form
    return planned


def digest(checkpoint: Checkpoint) -> str:
    """A hash (hex) of the tensors of a model's files, whatever the files are called and however they divide them."""
    import xxhash

    hashed = xxhash.xxh3_128()
    for name, info in sorted(checkpoint.tensors.items()):
        hashed.update(f"{name} {info.format} {info.shape}\n".encode())
        hashed.update(np.ascontiguousarray(checkpoint.read(name)).data)
    return hashed.hexdigest()


def _targets(section: AdapterSection, table: list[Param], program: Program, shape: JsonMapping) -> set[str]:
    """The names of the matrices that are adapted. Those that Hugging Face's files have in one tensor with others, row
    by row, are adapted together, with one A; all of them leave out those that PEFT does not adapt."""
    family, names, holders = str(shape["family"]), files_of(str(shape["family"])).NAMES, holders_of(dict(shape))
    matrices = {
        param.name: to_hf(family, in_files(param.name, holders)).removesuffix(".weight")
        for param in table
        if len(param.shape) == 2 and param.name.startswith("layers.") and not _chooses(param)
        if all(_reads(program, param.name, Trait.PRODUCT, Trait.EXPERTS))
    }
    experts = {param.name for param in table if param.experts and param.name in matrices}
    of_holders = {part for rows in names.joined(dict(shape)).values() for part, _ in rows}
    has_form = _has_gates(table) and not any(layer_part(name)[1] in of_holders for name in experts)
    formless = set() if has_form else experts
    if section.targets == "all-linear":
        passed_by = {name for name in matrices if layer_part(name)[1] in names.unadapted}
        chosen = set(matrices) - formless - passed_by
    else:
        chosen = set()
        for target in section.targets:
            target_names = {name for name, theirs in matrices.items() if f".{theirs}".endswith(f".{target}")}
            if not target_names:
                choices = ", ".join(sorted({theirs.rpartition(".")[2] for theirs in matrices.values()}))
                raise ConfigError(f"adapter.targets: the model has no matrix {target!r}; it has {choices}")
            chosen |= target_names
    for name in sorted(chosen & formless):
        reason = "PEFT's files have no form for matrices of experts that lie as theirs do"
        raise UnsupportedError(f"an adapter of {matrices[name]} of a {family} model", reason, ["other targets"])
    by_weight = {name for name in chosen - experts if matrices[name].rpartition(".")[2] in names.as_parameters}
    if section.method == "dora" and by_weight:
        reason = "PEFT takes modules of that name for experts, and has no DoRA of these"
        alternatives = ["adapter.method=lora", "adapter.targets without them"]
        raise UnsupportedError(f"adapter.method=dora of {matrices[min(by_weight)]}", reason, alternatives)
    _check_experts(section, [param for param in table if param.name in chosen and param.experts])
    for name in sorted(chosen - experts):
        if matrix_from_hf(f"{matrices[name]}.weight") != in_files(name, holders):
            reason = "Hugging Face's files have its rows in another order, in which an adapter would lie too"
            raise UnsupportedError(f"an adapter of {matrices[name]} of a {family} model", reason, ["other targets"])
    return chosen


def _has_gates(table: list[Param]) -> bool:
    return any(param.experts and ".experts.gate." in param.name for param in table)


def _check_experts(section: AdapterSection, experts: list[Param]) -> None:
    """Raise an error for adapters of experts that PEFT's files have no form for."""
    if experts and section.method == "dora":
        alternatives = ["adapter.method=lora", "adapter.targets without them"]
        raise UnsupportedError("adapter.method=dora of experts", "PEFT has none", alternatives)
    parts = {name: {param.name for param in experts if f".{name}." in param.name} for name in ("gate", "up")}
    if len(parts["gate"]) != len(parts["up"]):
        reason = "gate and up of experts are one matrix in PEFT's files"
        raise ConfigError(f"adapter.targets: {reason}: name both gate_proj and up_proj")


def _chooses(param: Param) -> bool:
    """Whether a matrix says which experts a token goes to, or how much one of them counts."""
    return param.name.split(".")[-2] in ("router", "scale")


def _reads(program: Program, name: str, *traits: Trait) -> list[bool]:
    """Of each instruction that reads a weight, whether it has one of the traits."""
    return [instr.has(*traits) for instr in program.body if name in instr.weights]


def _format(section: AdapterSection, param: Param, checkpoint: Checkpoint | None) -> str:
    """The format that a matrix is kept in."""
    if checkpoint is not None:
        return _stored(checkpoint, param)
    if section.base in _WIDE:
        return section.base.upper()
    name = section.base.upper() if param.name.startswith("layers.") else _OUTER
    for candidate in dict.fromkeys((name, _OUTER)):
        if param.shape[1] % formats.get(candidate).block == 0:
            return candidate
    _log.warning("%s is kept in BF16: its rows of %d values are no multiple of a block", param.name, param.shape[1])
    return "BF16"


def _stored(checkpoint: Checkpoint, param: Param) -> str:
    """The format that the file has a matrix in."""
    if param.name in checkpoint.tensors:
        return checkpoint.tensors[param.name].format
    kinds = {checkpoint.tensors[param.expert(number)].format for number in range(param.experts)}
    if len(kinds) > 1:
        reason = f"the experts of {param.name} are in several formats: {', '.join(sorted(kinds))}"
        raise UnsupportedError("adapter.base=stored", reason, ["bf16", "q8_0"])
    return kinds.pop()
