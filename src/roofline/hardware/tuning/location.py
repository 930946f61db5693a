"""Where the results of tuning are kept. A start looks here before it reads any."""

from pathlib import Path

from roofline.common import env

# Why a load has default kernels although it was to have tuned ones, where tuning again would change nothing.
SWITCHED_OFF = "ROOFLINE_TUNED=off"
NOTHING_WON = "tuned: no choice made this model faster"


def path(backend: str, chip: str) -> Path:
    """Where the tunings of a machine (`Machine.fingerprint`) are kept."""
    return env.home() / "tunings" / f"{backend}-{chip}.json"


def elsewhere(backend: str, chip: str) -> list[str]:
    """File names of the stores of other machines in the same folder."""
    folder = path(backend, chip).parent
    return sorted(p.name for p in folder.glob(f"{backend}-*.json") if p.name != f"{backend}-{chip}.json")
