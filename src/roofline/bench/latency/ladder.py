"""The ladder: techniques that make a model faster, each of which can be run alone or with others, and what each is for.

Source of the rungs: the optimisations that Jung 2024 ("Large language model inference optimizations on AMD GPUs", ROCm
blogs) compares for Llama 2 on an MI210; static cache and graphs are what that text leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from roofline.bench.peers.available import Here
from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping, JsonObject
from roofline.common.names import unknown

EAGER = "eager"
TORCH_FAMILIES = ("llama", "mistral", "qwen", "qwen2", "qwen3")  # whose attention transformers lets one choose


@dataclass(frozen=True)
class Technique:
    """phase: which it helps; why: one or two sentences; ours: it belongs to our engine, not to torch's model; needs:
    what it brings along; excludes: what it cannot be combined with."""

    phase: str
    why: str
    ours: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()


TECHNIQUES = {
    EAGER: Technique(
        "neither phase",
        "transformers' model under torch, operator by operator: what the others are compared with. Attention writes "
        "its whole matrix of scores to memory.",
    ),
    "compile": Technique(
        "prefill",
        "torch.compile fuses what lies between the products, so prompts move fewer bytes. Decoding gains little: the "
        "cache grows at every step, so shapes stay unknown.",
    ),
    "static": Technique(
        "decode",
        "A cache of fixed size gives every decoding step the same shapes, so the whole step is compiled at once and, "
        "on a GPU, replayed as a graph. Attention then reads the unused part of the cache too.",
        needs=("compile",),
    ),
    "sdpa": Technique(
        "prefill",
        "torch's memory-efficient attention computes scores in tiles and never writes them out, which counts for long"
        " prompts and large batches. A decoding step has one query, so there is little to save.",
        excludes=("xformers", "flash"),
    ),
    "xformers": Technique(
        "prefill",
        "The same idea as sdpa, from the library that it was first published in.",
        excludes=("sdpa", "flash"),
    ),
    "flash": Technique(
        "prefill",
        "FlashAttention keeps tiles of scores in the fastest memory and spreads long prompts over the whole chip. It "
        "does not help decoding, whose query is one token long.",
        excludes=("sdpa", "xformers"),
    ),
    "tuned": Technique(
        "both phases",
        "Each product runs with the kernel that was fastest for its very shape. The tall and thin products of "
        "decoding gain most.",
    ),
    "paged": Technique(
        "decode",
        "Our engine: keys and values lie in pages, so memory is taken as sequences grow and attention reads only what"
        " is there. Its kernels fuse what surrounds the products; a prompt gains from those alone.",
        ours=True,
        excludes=("compile", "static", "sdpa", "xformers", "flash"),
    ),
    "graphs": Technique(
        "decode",
        "Our engine's decoding steps are captured once per batch size and replayed, so the host no longer launches "
        "each kernel. Prompts are long enough to hide their launches.",
        ours=True,
        needs=("paged",),
    ),
}
LADDER = tuple(TECHNIQUES)


@dataclass(frozen=True)
class Rung:
    """One or more techniques together. name: as it was asked for; techniques: with what they need, without "eager"."""

    name: str
    techniques: frozenset[str]

    @property
    def ours(self) -> bool:
        """Whether our engine runs it, and not torch's model."""
        return any(TECHNIQUES[name].ours for name in self.techniques)


def rungs(text: str | None = None) -> list[Rung]:
    """The rungs of "eager,compile,paged+tuned"; None: each technique alone, all of them.

    Raises ConfigError for an unknown technique, for techniques that exclude each other, and for a rung named twice.
    """
    names = LADDER if text is None else tuple(part.strip() for part in text.split(",") if part.strip())
    ladder = [_rung(name) for name in names]
    if not ladder:
        raise ConfigError(f"there are no rungs in {text!r}; they are: {', '.join(LADDER)}, or several joined by +")
    for rung in ladder:
        same = [other.name for other in ladder if other.techniques == rung.techniques]
        if len(same) > 1:
            raise ConfigError(f"{' and '.join(same)} are the same rung: name it once")
    return ladder


def _rung(name: str) -> Rung:
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in TECHNIQUES:
            raise ConfigError(unknown("rung", part, LADDER))
    techniques = {*parts, *(needed for part in parts for needed in TECHNIQUES[part].needs)} - {EAGER}
    for one in sorted(techniques):
        clash = sorted(techniques & {*TECHNIQUES[one].excludes})
        if clash:
            raise ConfigError(f"rung {name!r}: {one} cannot be combined with {clash[0]}")
    return Rung("+".join(parts), frozenset(techniques))


def explained(rung: Rung, why_missing: str = "") -> JsonObject:
    """What a rung is for, as plain data, and why it does not run where it does not."""
    parts = [TECHNIQUES[name] for name in rung.name.split("+")]
    about = {"phases": [part.phase for part in parts], "why": " ".join(part.why for part in parts)}
    return about | ({"missing": why_missing} if why_missing else {})


def missing(rung: Rung, here: Here, config: JsonMapping, backends: Sequence[str], native: bool) -> str:
    """Why a rung cannot run in this process, empty where it can.

    Args:
        here: what torch and its neighbours are here. config: the model's, canonical.
        backends: of `bundle.load`. native: whether the C++ core is built.
    """
    checks = _of_ours(rung, here, backends, native) if rung.ours else _of_torch(rung, here, config)
    return next((reason for applies, reason in checks if applies), "")


def _of_ours(rung: Rung, here: Here, backends: Sequence[str], native: bool) -> list[tuple[bool, str]]:
    """(whether it applies, reason) of all that can keep our engine from running a rung."""
    cpu = here.device == "cpu"
    captured = "a CPU has no kernel launches to capture: a step of ours is one call already"
    return [
        (cpu and "graphs" in rung.techniques, captured),
        (not cpu and "gpu" not in backends, "our engine has no gpu backend in this build"),
        (cpu and not native, "the C++ core is not built"),
    ]


def _beyond_transformers(config: JsonMapping) -> bool:
    """Whether an MPT has a switch that transformers' would ignore."""
    switched = any(config.get(name) for name in ("rms", "gated")) or config.get("activation", "gelu") != "gelu"
    return switched or config.get("positions") == "rope" or config.get("kv_heads") != config.get("heads")


def _of_torch(rung: Rung, here: Here, config: JsonMapping) -> list[tuple[bool, str]]:
    """The same of torch's model."""
    techniques, cpu, family = rung.techniques, here.device == "cpu", config["family"]
    own_attention = family not in TORCH_FAMILIES and bool(techniques & {"sdpa", "xformers", "flash"})
    compiler = "a C++ compiler (g++ or clang++)" if cpu else "the package triton"
    masked = "attention over a static cache needs a mask, which no flash kernel takes; static+sdpa runs"
    untuned = "TunableOp chooses between rocBLAS and hipBLASLt, which only AMD's GPUs have"
    untuned += ": on NVIDIA its one candidate is the default" if here.vendor == "nvidia" else ""
    return [
        *((not here.has(name), f"{name} is not installed: pip install {name}") for name in ("torch", "transformers")),
        (own_attention, f"transformers has one attention for {family} models, which cannot be chosen"),
        (config.get("positions") == "learned", f"transformers' {family} has no learned positions"),
        (family == "mpt" and _beyond_transformers(config), "transformers' mpt has only ALiBi, one MLP and layer norms"),
        ("compile" in techniques and not here.compiler, f"torch.compile needs {compiler}"),
        ("sdpa" in techniques and cpu, "torch has no memory-efficient kernel for CPUs; flash runs there"),
        ("xformers" in techniques and cpu, "xformers has kernels for GPUs alone"),
        ("xformers" in techniques and not here.has("xformers"), "xformers is not installed"),
        ({"static", "flash"} <= techniques and not cpu, masked),
        ("tuned" in techniques and here.vendor != "amd", untuned),
    ]
