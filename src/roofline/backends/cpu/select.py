"""Which instruction set, how many threads, which kernel variants: chosen once at load, each with its reason."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from roofline.common import env, log
from roofline.common.errors import CapacityError, ConfigError, UnsupportedError
from roofline.common.units import counted
from roofline.hardware.tuning.location import NOTHING_WON, SWITCHED_OFF

if TYPE_CHECKING:
    from roofline.backends.cpu.executable import CpuExecutable
    from roofline.hardware.tuning.store import Setting, Tunings, TuningVerdict

V = TypeVar("V")
DEFAULT = "default"  # the variant that the core has by itself
REGIMES = ("1 row", "2-32 rows", "33+ rows")  # regime_of in native/variant.h


@dataclass(frozen=True)
class ReasonedChoice(Generic[V]):
    """A value that was chosen, and why."""

    value: V
    reason: str


def choose_isa(preferred: str | None = None) -> ReasonedChoice[str]:
    """The best instruction set of this chip, or a lower one on demand (argument, then ROOFLINE_ISA).

    Raises UnsupportedError where the one demanded is not available.
    """
    from roofline import _native

    available = _native.isas()
    requested = preferred or env.read("ROOFLINE_ISA")
    if requested is None:
        return ReasonedChoice(available[0], f"best of {', '.join(available)}")
    if requested not in available:
        raise UnsupportedError(f"instruction set {requested!r}", "this chip or this build does not have it", available)
    return ReasonedChoice(requested, "asked for" if preferred else "ROOFLINE_ISA")


LEAST_MOST_THREADS, MOST_A_CORE = 64, 4  # threads that may be asked for on any machine, and for each of its cores


def choose_threads(preferred: int | None = None) -> ReasonedChoice[int]:
    """Usable cores: the smaller of the affinity mask and the whole cores of the cgroup's quota; or what is asked.

    Raises ConfigError for so many threads that they would only wait for each other.
    """
    requested = preferred or env.threads()
    if requested is not None:
        max_threads = max(LEAST_MOST_THREADS, MOST_A_CORE * (os.cpu_count() or 1))
        if requested > max_threads:
            option = "threads" if preferred else "ROOFLINE_THREADS"
            raise ConfigError(
                f"{option}={requested}: this machine has {os.cpu_count()} cores, on which as many threads would wait "
                f"for each other; give at most {max_threads}"
            )
        return ReasonedChoice(requested, "asked for" if preferred else "ROOFLINE_THREADS")
    from roofline.hardware.detect import cores_allowed, cpu_quota, usable_cores

    allowed, quota = cores_allowed(), cpu_quota()
    by_mask = quota is None or quota >= allowed
    reason = "cores in the affinity mask" if by_mask else f"cgroup quota of {quota:.1f} cores"
    return ReasonedChoice(usable_cores(allowed, quota), reason)


def threads_of_rank(threads: int | None, ranks: int) -> int:
    """An equal part of the threads that all ranks have together: those that were asked for, or the usable cores.

    Where nobody asked for a number, up to MOST_A_CORE ranks have a thread each on a core that they share. Raises
    CapacityError for more ranks.
    """
    total = choose_threads(threads).value
    if ranks <= total:
        return total // ranks
    most = total if threads or env.threads() else total * MOST_A_CORE
    if ranks > most:
        remedy = f"Lower tensor_parallel or pipeline_parallel to {most} ranks in all, or raise threads."
        raise CapacityError(f"a model on {ranks} ranks", ranks, total, "threads", remedy)
    return 1


def check_threads_of_ranks(threads: int | None, ranks: int) -> None:
    """Warn where ranks share a core, which is slow. Raises CapacityError, as `threads_of_rank`."""
    threads_of_rank(threads, ranks)
    total = choose_threads(threads).value
    if ranks > total:
        cores = counted(total, "core")
        log.get("backends").warning(
            "%d ranks share %s, so each waits for the others: fewer ranks, or more cores, are faster", ranks, cores
        )


def setting_of(isa: str, threads: int) -> "Setting":
    """What tuning figures depend on beside the machine."""
    from roofline import _native
    from roofline.hardware.tuning.store import Setting

    return Setting(f"{isa}, {threads} threads", _native.build_id(), _native.compiler())


def choose_variants(executable: "CpuExecutable") -> ReasonedChoice[str]:
    """Sets the variants that `roofline tune` stored for this very program, machine and build; defaults otherwise."""
    from roofline.hardware import detect
    from roofline.hardware.tuning import location

    if env.read("ROOFLINE_TUNED") == "off":
        return ReasonedChoice("default", SWITCHED_OFF)
    chip = detect.detect().fingerprint
    if not location.path("cpu", chip).exists():
        elsewhere = location.elsewhere("cpu", chip)
        return ReasonedChoice("default", "tuned only on other machines" if elsewhere else "never tuned")
    from roofline.hardware.tuning import store as tunings

    return _resolve(executable, tunings.load("cpu", chip))


def _resolve(executable: "CpuExecutable", stored: "Tunings") -> ReasonedChoice[str]:
    verdicts = [v for v in stored.verdicts.values() if v.program == executable.program_hash]
    if not verdicts:
        return ReasonedChoice("default", "this model was never tuned here")
    from roofline.hardware.tuning.store import tell_outdated

    setting = setting_of(executable.isa, executable.threads)
    winning = [v for v in verdicts if v.kept and v.setting.run == setting.run]
    tell_outdated((v.setting for v in winning), setting, f"roofline tune {verdicts[0].model}")
    usable = [v for v in verdicts if not v.setting.differs(setting)]
    if not usable:
        return ReasonedChoice("default", verdicts[0].setting.differs(setting))
    winners = [v for v in usable if v.kept]
    try:
        count = sum(_apply(executable, verdict) for verdict in winners)
    except ValueError as error:
        for verdict in winners:
            _forget(executable, verdict)
        log.get("backends").warning("the tuning store names what cannot be run, so it is ignored: %s", error)
        return ReasonedChoice("default", "the tuning store names a variant that is not there")
    if not winners:
        return ReasonedChoice("default", NOTHING_WON)
    gains = ", ".join(f"{v.regime} {1 - v.figures['ratio']:.1%}" for v in winners if "ratio" in v.figures)
    return ReasonedChoice(f"{count} tuned", f"measured gain: {gains}" if gains else "tuned")


def _apply(executable: "CpuExecutable", verdict: "TuningVerdict") -> int:
    """Sets a verdict's choices; how many. Raises ValueError on an op, regime or variant that is not there."""
    for choice in verdict.choices:
        executable.choose(choice.ops, REGIMES.index(verdict.regime), choice.variant)
    return len(verdict.choices)


def _forget(executable: "CpuExecutable", verdict: "TuningVerdict") -> None:
    for choice in verdict.choices:
        for op in choice.ops:
            try:
                executable.choose([op], REGIMES.index(verdict.regime), DEFAULT)
            except ValueError:
                continue  # what could not be set needs no resetting


def describe() -> dict[str, object]:
    """What the backend would run with here, for `doctor`: isa and threads with the reason of each choice, instruction
    sets available, formats, orders, the core's identity.

    Raises UnsupportedError where ROOFLINE_ISA names an instruction set this chip lacks.
    """
    from roofline import _native
    from roofline.program.target import CPU

    isa, threads = choose_isa(), choose_threads()
    orders = {
        "linear (quantised weights)": CPU.quantised_order,
        "linear (logits)": CPU.logits_order,
        "linear (float weights)": CPU.float_order,
        **CPU.orders,
    }
    return {
        "isa": {"value": isa.value, "reason": isa.reason, "available": _native.isas()},
        "threads": {"value": threads.value, "reason": threads.reason},
        "formats": _native.format_names(),
        "orders": orders,
        "kv": CPU.attend_dtypes["kv_dtype"],
        "core": f"{_native.build_id()} ({_native.compiler()})",
        "tuned": _tuned(isa.value, threads.value),
    }


def _tuned(isa: str, threads: int) -> str:
    """What the tuning store has for this machine, in a line."""
    from roofline.hardware import detect
    from roofline.hardware.tuning import store as tunings

    chip = detect.detect().fingerprint
    stored = tunings.load("cpu", chip)
    if not stored.records:
        return "nothing yet: roofline tune MODEL"
    setting = setting_of(isa, threads)
    usable = [r for r in stored.records.values() if r.setting == setting]
    models = {v.model for v in stored.verdicts.values() if v.kept and v.setting == setting}
    text = f"{len(usable)} shapes, used by {', '.join(sorted(models)) or 'no model'}; in {tunings.path('cpu', chip)}"
    stale = len(stored.records) - len(usable)
    return f"{text}; {stale} of other builds or settings are ignored" if stale else text
