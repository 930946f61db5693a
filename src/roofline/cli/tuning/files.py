"""roofline tune export, import, and explain of a GPU: PyTorch TunableOp's files, and what the store has of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from roofline.cli.options import Weights
from roofline.cli.output import print_json
from roofline.cli.parser import Argument
from roofline.common.errors import ConfigError
from roofline.common.options import Option

if TYPE_CHECKING:
    from roofline.backends.gpu.tuning.gemm import ProductSplit
    from roofline.hardware.tuning.store import TuningRecord
    from roofline.hardware.tuning.tunableop import TunableOpRow
    from roofline.program.gemms import Gemm

Batches = Annotated[str, Option("Sequences that decode or are prefilled at once, with commas.")]
Prompt = Annotated[int, Option("Tokens of each prompt.", minimum=1)]
Chip = Annotated[str | None, Option("The GPU's architecture, such as gfx942.")]


def export(
    model: Annotated[str | None, Argument("With --untuned: a name, preset:NAME, or a path.")] = None,
    file: Annotated[Path | None, Option("Write the stored results into this file.", flags=("--tunableop",))] = None,
    untuned: Annotated[Path | None, Option("Write a model's products, yet to be tuned, into this file.")] = None,
    chip: Chip = None,
    only: Annotated[list[str] | None, Option("NAME=VALUE of the validators, where several sets are stored.")] = None,
    batch: Batches = "1,8,16",
    prompt: Prompt = 2048,
    weights: Weights = None,
) -> None:
    """Write files that torch reads: what is stored of a GPU, or a model's products for torch's offline tuner."""
    from roofline.hardware.tuning import gemms as tuned_gemms
    from roofline.hardware.tuning import tunableop

    if (file is None) == (untuned is None) or (untuned is None) != (model is None) or (file is None) != (chip is None):
        raise ConfigError("say either --tunableop FILE --chip CHIP, or MODEL --untuned FILE")
    if file is not None and chip is not None:
        validators = dict(_pair(text) for text in only or ())
        results = tuned_gemms.select_results(tuned_gemms.results_from(tuned_gemms.load(chip)), validators)
        print(f"{len(results.rows)} results: {tunableop.write(results, file)}")
    elif model is not None and untuned is not None:
        _export_untuned(products_of(model, weights, batch, prompt)[0], untuned)


def import_(
    files: Annotated[list[Path], Argument("Results files, of one device or of several of the same kind.")],
    chip: Chip = None,
) -> None:
    """Store TunableOp's results; of several for one product the fastest counts. Other versions' results stay."""
    from roofline.hardware.tuning import gemms as tuned_gemms
    from roofline.hardware.tuning import store as tunings
    from roofline.hardware.tuning import tunableop

    results = tunableop.merge(tunableop.read(path) for path in files)
    architecture = tuned_gemms.chip_of(results, chip)
    same = [r for r in tuned_gemms.results_from(tuned_gemms.load(architecture)) if r.validators == results.validators]
    merged = tunableop.merge([*same, results])
    place = tunings.save(tuned_gemms.tunings_from(merged, architecture, ", ".join(path.name for path in files)))
    print(f"{len(results.rows)} results of {architecture}, {len(merged.rows)} with those stored before: {place}")


def explain(chip: str | None, file: Path | None, as_json: bool) -> None:
    """What is stored of a GPU's products, or what a results file says: each result in words, by what it was measured
    with. Raises ConfigError unless it is one of the two."""
    from roofline.hardware.tuning import gemms as tuned_gemms
    from roofline.hardware.tuning import tunableop

    choices: list[TuningRecord] = []
    if file is None and chip is not None:
        stored = tuned_gemms.load(chip)
        stored_results = tuned_gemms.results_from(stored)
        choices = [record for record in stored.records.values() if not tuned_gemms.is_tunableop(record)]
    elif file is not None and chip is None:
        stored_results = [tunableop.read(file)]
    else:
        raise ConfigError("--chip shows the store, --tunableop a file: say one of them")
    if as_json:
        from dataclasses import asdict

        plain = [{"validators": r.validators, "rows": [str(row) for row in r.rows.values()]} for r in stored_results]
        print_json({"tunableop": plain, "choices": [asdict(record) for record in choices]}, indent=1)
        return
    if not stored_results and not choices:
        print(f"nothing is stored for {chip}: `roofline tune import FILE` or `roofline tune gemms MODEL` does it")
    for results in stored_results:
        print(", ".join(f"{name} {value}" for name, value in results.validators.items()))
        for row in results.rows.values():
            print(f"  {line(row)}")
        defaults = sum(row.solution == "Default" for row in results.rows.values())
        print(f"  {len(results.rows)} products, {defaults} of them with torch's default; sizes are by rows: x @ w.T")
    for run in dict.fromkeys(record.setting.run for record in choices):
        print(f"torch's product or ours: {run}")
        for record in choices:
            if record.setting.run == run:
                print(f"  {choice(record)}")


def line(row: "TunableOpRow") -> str:
    """A result of TunableOp in words."""
    dtype = row.operator.partition("TunableOp_")[2].rpartition("_")[0] or row.operator
    time = "" if row.ms is None else f", {row.ms:.4g} ms"
    return f"{row.shape.words} {dtype}: {row.solution}{time}"


def choice(record: "TuningRecord") -> str:
    """A choice between torch's product and ours in words."""
    return f"{record.kind} {record.shape}, {record.regime}: {record.variant}, {record.reason}"


def _export_untuned(products: "ProductSplit", path: Path) -> None:
    from roofline.backends.gpu.tuning.gemm import key
    from roofline.common.files import write_atomically
    from roofline.hardware.tuning import tunableop

    if path.exists():
        raise ConfigError(f"{path} is there already: name a new file")
    write_atomically(path, tunableop.untuned(key(gemm) for gemm in products.tunable))
    print(f"{len(products.tunable)} products: {path}")
    single = sum(gemm.rows == 1 for gemm in products.tunable)
    if single:
        print(f"{single} of them have one row: torch tunes those only while a model runs, or in `roofline tune gemms`")


def products_of(model: str, weights: str | None, batch: str, prompt: int) -> "tuple[ProductSplit, list[Gemm]]":
    """A model's products in the steps of a grid, as torch's model runs them and as our engine on GPUs does, which
    merges some; then those of our engine alone that are a product and nothing else.

    Raises ConfigError where BLAS has none of them.
    """
    from roofline.backends.gpu.tuning.gemm import split
    from roofline.bench.latency.options import numbers
    from roofline.cli.models.show import compile_stages
    from roofline.program.gemms import bucket_plan, gemms
    from roofline.program.target import GPU

    steps = bucket_plan(numbers(batch), prompt)
    programs = compile_stages(model, GPU, weights)[1]
    ours = programs["plan"]
    products = split(gemms(programs["trace"], steps) | gemms(ours, steps))
    if not products.tunable:
        formats = ", ".join(sorted({gemm.format for gemm in products.block_formats}))
        raise ConfigError(f"{model} has weights in {formats} alone, which no BLAS library multiplies: nothing to tune")
    if products.block_formats:
        print(f"{len(products.block_formats)} products are left out: our own kernels multiply weights in block formats")
    return products, list(gemms(ours, steps, fused_gates=False))


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--only {text!r} is not NAME=VALUE, such as PT_VERSION=2.13.0")
    return name, value
