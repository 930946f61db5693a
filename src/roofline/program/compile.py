"""The order of the passes: from a family to a Program a backend can run, verified after each step."""

from collections.abc import Callable, Iterator

from roofline.common import extensions
from roofline.common.errors import ConfigError, RooflineError, UnsupportedError
from roofline.models.config import ModelConfig
from roofline.models.family import Family
from roofline.models.mtp import GuessingLayer
from roofline.models.spec import expand
from roofline.program.ir import WHOLE, Program, Share
from roofline.program.passes.fuse import fuse
from roofline.program.passes.headless import headless
from roofline.program.passes.keep_hidden import keep_hidden, keep_rows
from roofline.program.passes.legalize import legalize
from roofline.program.passes.merge import merge
from roofline.program.passes.narrow import narrow
from roofline.program.passes.plan import plan
from roofline.program.passes.shard import shard
from roofline.program.passes.stage import stage
from roofline.program.target import Target
from roofline.program.trace import Tensors, trace
from roofline.program.verify import verify

STAGES = ("trace", "narrow", "legalize", "merge", "fuse", "plan")
SHARING = ("shard", "stage")  # before legalize, where several processes share the model
Pass = Callable[[Program], Program]
# Passes from outside the tree: name -> (the stage of ours it follows, the pass), in the order they were registered.
_REGISTERED: dict[str, tuple[str, Pass]] = {}


def register_pass(name: str, run: Pass, *, after: str = "trace") -> None:
    """Add a pass that runs for every model, after a stage of ours and what was added there before.

    It gives back the Program itself where it has nothing to do. Raises ConfigError when the name is taken or the stage
    is none of these: after "plan" every value has its place already.
    """
    if name in (*STAGES, *SHARING) or name in _REGISTERED:
        raise ConfigError(f"a pass named {name!r} is already registered")
    if after not in STAGES[:-1]:
        raise ConfigError(f"a pass cannot run after {after!r}; choose one of {', '.join(STAGES[:-1])}")
    _REGISTERED[name] = after, run


def stage_names() -> tuple[str, ...]:
    """The names of all passes, in the order they run, those of installed packages too."""
    extensions.load()
    extra = {stage: [name for name, (after, _) in _REGISTERED.items() if after == stage] for stage in STAGES}
    return tuple(name for stage in STAGES for name in (stage, *extra[stage]))


def stages(
    family: Family,
    cfg: ModelConfig,
    tensors: Tensors,
    target: Target,
    hidden: bool = False,
    share: Share = WHOLE,
    keeps_hidden: bool = False,
) -> Iterator[tuple[str, Program]]:
    """(pass name, the Program after it), in the order of `stage_names`.

    Args:
        hidden: the variant whose result is what the head would read (see passes.headless).
        keeps_hidden: its hidden rows are a result too (see passes.keep_hidden).
        share: which part of the model the Program is to be. Of one that several ranks or stages share there are passes
            "shard" and "stage" before legalize, so that what follows sees a Program like any other.

    Raises ConfigError naming a pass that fails.
    """
    program = verify(trace(family, cfg, tensors), tensors)
    if hidden:
        program = headless(program)
        used = {piece.tensor for recipe in program.weights.values() for piece in recipe.pieces}
        tensors = {name: info for name, info in tensors.items() if name in used}
        verify(program, tensors)
    if keeps_hidden:
        keep = keep_rows if isinstance(family, GuessingLayer) else keep_hidden
        program = verify(keep(program), tensors, before=program)
    yield "trace", program
    params = expand(family.spec(cfg), cfg.layers)
    ours: dict[str, Pass] = {
        "narrow": narrow,
        "shard": lambda p: shard(p, params, share.rank, share.ranks),
        "stage": lambda p: stage(p, share.stage, share.stages),
        "legalize": lambda p: legalize(p, target),
        "merge": merge,
        "fuse": lambda p: fuse(p, target.fusions),
        "plan": plan,
    }
    names = list(stage_names()[1:])
    sharing = [name for name, parts in zip(SHARING, (share.ranks, share.stages), strict=True) if parts > 1]
    at = names.index("legalize")
    for name in (*names[:at], *sharing, *names[at:]):
        if name in ours:
            program = verify(ours[name](program), tensors, before=program)
        else:
            program = _registered(name, program, tensors)
        yield name, program


def _registered(name: str, program: Program, tensors: Tensors) -> Program:
    try:
        return verify(_REGISTERED[name][1](program), tensors)
    except UnsupportedError as error:
        raise UnsupportedError(f"pass {name!r}: {error.what}", error.reason, error.alternatives) from error
    except Exception as error:  # whatever the code of others raises, its name belongs to it
        cause = str(error) if isinstance(error, RooflineError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"the pass {name!r} failed: {cause}") from error


def compile_program(
    family: Family,
    cfg: ModelConfig,
    tensors: Tensors,
    target: Target,
    hidden: bool = False,
    share: Share = WHOLE,
    keeps_hidden: bool = False,
) -> Program:
    """The planned Program of a model, of its variant `hidden`, of a share of it, or with `keeps_hidden`.

    Raises ConfigError: the tensors do not fit the configuration; CapacityError: the model has not so many parts.
    """
    *_, (_, program) = stages(family, cfg, tensors, target, hidden, share, keeps_hidden)
    return program
