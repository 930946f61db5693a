"""Moves TunableOp's results into the tuning store of a GPU's architecture, and back.

A row becomes a Record: kind is the operator, shape is spelt as TunableOp spells it, regime is the product's number of
rows. The setting's run holds all validators, so results of other versions have other keys and stay.
"""

import json
from collections.abc import Iterable, Mapping

from roofline.common.errors import ConfigError
from roofline.common.units import now_utc
from roofline.hardware.chips import chips
from roofline.hardware.tuning import store as tunings
from roofline.hardware.tuning import tunableop
from roofline.hardware.tuning.store import Setting, TuningRecord, Tunings
from roofline.hardware.tuning.tunableop import Results, Shape, TunableOpRow

BACKEND = "gpu"
ARCHITECTURE = "GCN_ARCH_NAME"  # the validator that names AMD's; NVIDIA's files do not say
SOURCE = "TunableOp"


def chip_of(results: Results, chip: str | None = None) -> str:
    """The architecture that results were measured on. chip: its name, for files that do not say.

    Raises ConfigError where neither says it, or they differ.
    """
    name = results.validators.get(ARCHITECTURE, chip)
    if name is None:
        raise ConfigError(f"the results do not name their chip (no {ARCHITECTURE}): say --chip")
    architecture = chips.architecture(name)
    if chip is not None and chips.architecture(chip) != architecture:
        raise ConfigError(f"the results are of {architecture}, not of {chip}")
    return architecture


def tunings_from(results: Results, chip: str, source: str) -> Tunings:
    """Results as records to be merged into the store of `chip`. source: where they are from, for people to read."""
    run = json.dumps(results.validators, sort_keys=True)
    checked = results.validators
    setting = Setting(run, f"torch {checked.get(tunableop.MANDATORY, '')}", checked.get("ROCM_VERSION", ""))
    store = Tunings(BACKEND, chip, chip)
    for row in results.rows.values():
        figures = {"source": SOURCE, "rest": row.rest} | ({} if row.ms is None else {"ms": row.ms})
        record = TuningRecord(
            kind=row.operator,
            shape=str(row.shape),
            regime=f"{row.shape.n} rows",
            setting=setting,
            variant=row.solution,
            default=tunableop.DEFAULT,
            reason=f"fastest of {SOURCE}'s candidates, from {source}",
            figures=figures,
            measured=now_utc(),
        )
        store.records[record.key] = record
    return store


def is_tunableop(record: TuningRecord) -> bool:
    """Whether a record is one of these, and not another's."""
    return record.figures.get("source") == SOURCE


def results_from(store: Tunings) -> list[Results]:
    """The results in a chip's store, one for each set of validators, the latest measured last.

    Raises ConfigError where a record is no result of TunableOp although it says so.
    """
    by_validators: dict[str, Results] = {}
    for record in sorted(store.records.values(), key=lambda record: record.measured):
        if not is_tunableop(record):
            continue
        try:
            validators = json.loads(record.setting.run)
            ms = record.figures.get("ms")
            row = TunableOpRow(record.kind, Shape.parse(record.shape), record.variant, ms, record.figures["rest"])
        except (ValueError, KeyError, ConfigError) as error:
            raise ConfigError(f"the tuning store of {store.chip} is damaged at {record.kind}: {error}") from error
        by_validators.setdefault(record.setting.run, Results(validators)).add(row)
    return list(by_validators.values())


def select_results(stored: Iterable[Results], validators: Mapping[str, str]) -> Results:
    """The one among them whose validators have these values. Raises ConfigError for none and for several."""
    fitting = [r for r in stored if all(r.validators.get(name) == value for name, value in validators.items())]
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        condition = "".join(f" with {name}={value}" for name, value in validators.items())
        raise ConfigError(f"nothing is stored{condition}: `roofline tune import FILE` stores it")
    different = tunableop.differences(fitting[0].validators, fitting[1].validators)
    raise ConfigError(f"{len(fitting)} sets of results are stored, which differ: {'; '.join(different)}; name one")


def load(chip: str) -> Tunings:
    """The store of an architecture."""
    return tunings.load(BACKEND, chips.architecture(chip), chip)
