"""roofline bench links: how the devices of this host are linked, and which of them tensor parallelism is fastest on."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.cli.options import AsJson
from roofline.cli.output import console, plain_table, print_json, print_table
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.files import cause_of
from roofline.common.json_types import JsonObject
from roofline.common.options import Options, option
from roofline.common.units import human_bytes, human_seconds, parse_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from roofline.hardware.links.topology import Links


@dataclass(frozen=True)
class LinkOptions(Options):
    """What `bench links` ranks and measures."""

    tensor_parallel: int = option(
        2, "Devices that a model is to be shared by.", flags=("--tensor-parallel", "-n"), minimum=2, unit="devices"
    )
    devices: str | None = option(None, "Among which: amd:0,1,4,6, MI250, nvidia, ... Default: all that torch can use.")
    sizes: str = option("16KiB,32MiB", "Of all-reduces, with commas. Default: one row and 2048 rows of 8192.")
    candidates: int = option(8, "Sets to measure, the best by the model at each size.", minimum=1, unit="sets")
    repeats: int = option(5, "Of each measurement; the median counts.", minimum=1, unit="repeats")
    topology: Path | None = option(
        None, "Only rank by a file: JSON of an earlier run, or the table of rocm-smi --shownodesbw."
    )
    dies: int = option(1, "Devices in a package, for such a table: 2 for MI250.", minimum=1, maximum=2, unit="devices")
    cpu_processes: int | None = option(
        None, "Measure between CPU processes instead, through gloo.", minimum=2, unit="processes"
    )


def command(options: LinkOptions, as_json: AsJson = False) -> None:
    """Rank sets of devices by a modelled all-reduce over their links, and measure the first of them."""
    from roofline.bench.links import bench_links

    numbers = None
    if options.topology is not None:
        links = _from_file(options.topology, options.dies)
    elif options.cpu_processes is not None:
        from roofline.hardware.links.topology import links_from_pairs

        links = links_from_pairs([f"cpu:{number}" for number in range(options.cpu_processes)], [])
    else:
        links, numbers = _here(options.devices)
    record = bench_links(
        links,
        options.tensor_parallel,
        sizes=[parse_bytes("--sizes", size) for size in options.sizes.split(",")],
        candidates=options.candidates,
        measured=options.topology is None,
        devices=numbers,
        repeats=options.repeats,
    )
    print_json(record) if as_json else _show(record)


def _from_file(path: Path, dies: int) -> "Links":
    from roofline.hardware.links.topology import parse

    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"--topology {path} cannot be read: {cause_of(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--topology {path} is no text: {error}") from error
    return parse(text, dies)


def _here(names: str | None) -> "tuple[Links, list[int]]":
    """The links of this host's devices, and torch's number of each."""
    from roofline.backends.gpu import devices
    from roofline.hardware.gpus import inventory as gpus
    from roofline.hardware.links import detect as links_detect

    chosen = devices.choose(names)
    if len({device.vendor for device in chosen}) > 1:
        raise UnsupportedError("a set of several vendors' devices", "no library joins them", ("--devices amd",))
    if len(chosen) < 2:
        instead = ("--cpu-processes 2", "--topology FILE")
        raise UnsupportedError("bench links", f"two devices are needed, torch can use {len(chosen)} of these", instead)
    links = links_detect.detect(chosen, amdsmi=gpus.import_or_none("amdsmi"), pynvml=gpus.import_or_none("pynvml"))
    return links, [device.torch for device in chosen if device.torch is not None]


def _show(record: JsonObject) -> None:

    out = console()
    if record["topology"]["links"]:
        print_table(out, _matrix(record["topology"]))
    for at, (size, members) in enumerate(record["best"].items()):
        out.print(f"all-reduce of {human_bytes(int(size))}", style="bold")
        print_table(out, _ranking(record["sets"], at))
        how = f"measured with {record['library']}" if record["library"] else "by the model alone"
        out.print(f"best {how}: {', '.join(members)}\n")


def _matrix(topology: JsonObject) -> "Table":
    names = topology["devices"]
    rates = {tuple(sorted(link["between"])): f"{link['gb_s']:.0f}" for link in topology["links"]}
    kinds = sorted({link["kind"] for link in topology["links"]})
    rows = []
    for a, name in enumerate(names):
        cells = ["." if a == b else rates.get((min(a, b), max(a, b)), "-") for b in range(len(names))]
        rows.append([name, names[topology["packages"][a]], *cells])
    return plain_table([f"GB/s one way ({', '.join(kinds)})", "package", *names], rows)


def _ranking(sets: list[JsonObject], at: int) -> "Table":
    """The sets at one size, the best first."""
    key = "measured_s" if "measured_s" in sets[0]["sizes"][at] else "modelled_s"
    rows = []
    for row in sorted(sets, key=lambda row: row["sizes"][at][key]):
        size = row["sizes"][at]
        model, measured = ("-", "-", "-"), ("-", "-")
        if "modelled_s" in size:
            pairs = " ".join("-".join(pair) for pair in size["used"])
            model = human_seconds(size["modelled_s"]), f"{size['way']}, {size['slowest_gb_s']:.0f} GB/s", pairs
        if "measured_s" in size:
            measured = human_seconds(size["measured_s"]), f"{size['bus_gb_s']:.2f}"
        rows.append([" ".join("+".join(package) for package in row["packages"]), *model, *measured])
    headings = ("devices (+: one package)", "modelled", "way", "links used", "measured", "bus GB/s")
    return plain_table(headings, rows)
