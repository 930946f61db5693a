"""What PEFT's adapter_config.json (0.21.2) says of a LoRA adapter: the rank and the scale of each of its matrices."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from roofline.common.errors import UnsupportedError
from roofline.common.fields import describe, refuse, shorten
from roofline.common.json_types import JsonObject
from roofline.weights.adapter_patterns import NAME, ModulePatterns

CONFIG = "adapter_config.json"
MAX_RANK = 512
# Said of the training, or of where the files come from. fan_in_fan_out: how the model's own matrix lies in memory,
# which A and B do not follow.
_SAYS_NOTHING = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "lora_dropout"),
        *("layers_pattern", "megatron_core", "eva_config"),
        *("qalora_group_size", "runtime_config", "task_type", "ensure_weight_tying", "fan_in_fan_out"),
    )
)
_HONOURED = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias", "init_lora_weights"),
    *("rank_pattern", "alpha_pattern", "target_parameters"),
    *("target_modules", "exclude_modules", "layers_to_transform"),
)
# Beginnings that leave the model's own weights as they are; others are differences from a model that was changed.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_TASKS = (None, "CAUSAL_LM")


@dataclass(frozen=True)
class LoraSettings:
    """rank, alpha: of all matrices but those whose modules a pattern names by the end of their names; rslora: the scale
    is alpha / sqrt(rank); dora: each matrix has a magnitude; parameters: names of parameters that are adapted without
    being a module's matrix, such as those of all experts of a layer.

    targets, excluded: names of modules, or ends of them, that are adapted and that are not; layers: numbers of those
    that are; None: as the tensors say, as where there is a regular expression.
    """

    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    rank_pattern: ModulePatterns[int] = field(default_factory=lambda: ModulePatterns[int]({}))
    alpha_pattern: ModulePatterns[float] = field(default_factory=lambda: ModulePatterns[float]({}))
    parameters: tuple[str, ...] = ()
    targets: frozenset[str] | None = None
    excluded: frozenset[str] | None = None
    layers: frozenset[int] | None = None

    def key_of(self, module: str) -> str:
        """Return what patterns call a module: by its weight, where that is adapted as a parameter."""
        return f"{module}.weight" if self._is_parameter(_ends(module)) else module

    def _is_parameter(self, names: Collection[str]) -> bool:
        return any(f"{name}.weight" in self.parameters for name in names)

    def leaves_out(self, module: str) -> str:
        """The key for which PEFT does not adapt a module, so that it reads none of its tensors; "": it does."""
        names = _ends(module)
        if self.excluded is not None and names & self.excluded:
            return "exclude_modules"
        if self.targets is None or self._is_parameter(names):
            return ""
        if not names & self.targets:
            return "target_modules"
        number = next((int(part) for part in module.split(".") if part.isdigit()), None)
        is_out = self.layers is not None and module not in self.targets and number not in self.layers
        return "layers_to_transform" if is_out else ""

    def check_patterns(self, path: Path, modules: Collection[str]) -> None:
        """Raise ConfigError where a key of a pattern fits none of the modules that are adapted; path: what it names."""
        for name, pattern in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            if keys := pattern.without_module(modules):
                reason = f"{shorten(keys[0])!r} fits none of the modules that are adapted, such as"
                refuse(path, name, f"{reason} {shorten(min(modules))}: name one of them, or take it out")

    def rank_of(self, module: str) -> int:
        """The rank of a module's matrices; module: its full name in the model."""
        return self.rank_pattern.value_of(module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor that the product of an adapter's matrices is multiplied by."""
        alpha, rank = self.alpha_pattern.value_of(module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def _ends(module: str) -> set[str]:
    """The name of a module and all ends of it, from its last part on."""
    parts = module.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def read_settings(path: Path, config: JsonObject) -> LoraSettings:
    """path: what errors name. Raises ConfigError and UnsupportedError, which name the field."""
    _check_honoured(path, config)
    rslora, dora = config.get("use_rslora", False), config.get("use_dora", False)
    for name, value in (("use_rslora", rslora), ("use_dora", dora)):
        if not isinstance(value, bool):
            refuse(path, name, f"is {describe(value)}, not true or false")
    ranks, alphas = (_pattern(path, config, name) for name in ("rank_pattern", "alpha_pattern"))
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(parameter, str) for parameter in parameters):
        refuse(path, "target_parameters", f"is {describe(parameters)}, not a list of names")
    layers = config.get("layers_to_transform")
    numbers = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(isinstance(number, int) for number in numbers):
        refuse(path, "layers_to_transform", f"is {describe(layers)}, not numbers of layers")
    return LoraSettings(
        rank=_rank(path, "r", config.get("r")),
        alpha=_alpha(path, "lora_alpha", config.get("lora_alpha")),
        rslora=rslora,
        dora=dora,
        rank_pattern=ModulePatterns({key: _rank(path, f"rank_pattern {shorten(key)!r}", ranks[key]) for key in ranks}),
        alpha_pattern=ModulePatterns(
            {key: _alpha(path, f"alpha_pattern {shorten(key)!r}", alphas[key]) for key in alphas}
        ),
        parameters=tuple(parameters),
        targets=_modules(config, "target_modules"),
        excluded=_modules(config, "exclude_modules"),
        layers=frozenset(numbers) or None,
    )


def _modules(config: JsonObject, key: str) -> frozenset[str] | None:
    """The names that a key lists; None where it is absent, or a regular expression."""
    names = config.get(key)
    return frozenset(str(name) for name in names) if isinstance(names, list) and names else None


def _check_honoured(path: Path, config: JsonObject) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type {describe(kind)}", "only LoRA adapters are served", ("LORA",))
    for name, value in config.items():
        if name not in _HONOURED and name not in _SAYS_NOTHING and value not in (None, False, "", [], {}):
            reason = f"{describe(value)} would change what the adapter computes, and it is not computed here"
            raise UnsupportedError(f"{path}: {shorten(name)}", reason)
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias {describe(config['bias'])}", "biases are not adapted", ("none",))
    if (init := config.get("init_lora_weights", True)) not in _INITS:
        reason = "its matrices are differences from a model whose weights it changed"
        raise UnsupportedError(f"{path}: init_lora_weights {describe(init)}", reason, ("convert it with PEFT",))
    if (task := config.get("task_type")) not in _TASKS:
        raise UnsupportedError(f"{path}: task_type {describe(task)}", "models here generate text", ("CAUSAL_LM",))


def _pattern(path: Path, config: JsonObject, name: str) -> JsonObject:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        refuse(path, name, f"is {describe(pattern)}, not an object")
    for module in pattern:
        if not NAME.fullmatch(module):
            reason = f"{shorten(module)!r} is a regular expression; names of modules, or ends of them, are read"
            raise UnsupportedError(f"{path}: {name}", reason, ("a name such as q_proj or layers.3.self_attn.q_proj",))
    return pattern


def _rank(path: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_RANK:
        refuse(path, name, f"is {describe(value)}, not a whole number from 1 to {MAX_RANK}")
    return value


def _alpha(path: Path, name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < abs(value) < 1e6:
        refuse(path, name, f"is {describe(value)}, not a number other than 0 below a million")
    return float(value)
