"""Where the results of tuning are kept. A start looks here before it reads any."""

from pathlib import Path

from roofline.common import env


def path(backend: str, chip: str) -> Path:
    """Where the tunings of a machine (`Machine.fingerprint`) are kept."""
    return env.home() / "tunings" / f"{backend}-{chip}.json"


def elsewhere(backend: str, chip: str) -> list[str]:
    """File names of the stores of other machines in the same folder."""
    folder = path(backend, chip).parent
    return sorted(p.name for p in folder.glob(f"{backend}-*.json") if p.name != f"{backend}-{chip}.json")
