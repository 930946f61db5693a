"""roofline deploy: files that other programs start servers from, on standard output."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from roofline.backends.options import DEFAULT_MODEL
from roofline.cli.options import ModelArgument
from roofline.cli.parser import Argument
from roofline.common.options import Option, Options, option

ENVIRONMENT = Path("/etc/roofline/environment")
# Files that root alone need read: systemd hands the server copies.
CREDENTIALS = ("--config", "--api-keys", "--tls-certificate", "--tls-key", "--receipt-key")
# Options of a server whose address and key are another file's.
ADDRESS = ("host", "port", "uds", "api_key", "open_probes", "config")
OPTION_WORDS = "Options of `roofline serve`, behind --, such as -- --max-running 16."


@dataclass(frozen=True)
class UnitOptions(Options):
    """How a unit of systemd starts a server."""

    gpu: Literal["none", "nvidia", "amd"] = option("none", "The GPUs that the server may use.")
    program: Path | None = option(None, "Path of `roofline` on that machine. Default: this one.")
    environment: Path = option(ENVIRONMENT, "File of variables, ROOFLINE_API_KEY among them; it may be missing.")


def systemd(
    options: UnitOptions,
    model: ModelArgument = DEFAULT_MODEL,
    words: Annotated[list[str] | None, Argument(OPTION_WORDS)] = None,
) -> None:
    """Print a systemd unit for `roofline serve MODEL`: started when it answers, watched, and hardened.

    roofline deploy systemd smollm2-135m -- --port 8000 > /etc/systemd/system/roofline.service
    """
    import os
    import shutil
    import sys

    from roofline.cli.parser import Parser
    from roofline.cli.run import serve
    from roofline.common.errors import ConfigError
    from roofline.deploy.files.unit import ServiceUnit
    from roofline.server.options import ServeOptions

    further = list(words or ())
    credentials = {flag: _absolute_path(flag, path) for flag, path in _take_flags(further, CREDENTIALS).items()}
    served = Parser("serve", serve.command).parse([model, *further])["options"]  # what it does not take is refused here
    assert isinstance(served, ServeOptions), "its first parameter"
    if served.api_key is not None:
        remedy = f"write ROOFLINE_API_KEY=... into {options.environment}"
        raise ConfigError(f"--api-key would be in a file that everybody may read: {remedy}")
    if served.uds is None and served.port < 1024:
        raise ConfigError(
            f"--port {served.port}: a server without privileges has one above 1023; let a proxy have that"
        )
    program = options.program or Path(shutil.which("roofline") or Path(sys.executable).with_name("roofline"))
    path = Path(os.path.abspath(os.path.expanduser(model)))
    pairs = [pair.partition("=") for pair in (*(served.adapter or ()), *(served.extra_model or ()))]
    further_paths = [
        _absolute_path(name, place) for name, _, place in pairs if "/" in place and not place.startswith("hf:")
    ]
    unit = ServiceUnit(
        program=_absolute_path("--program", str(program)),
        words=(str(path) if path.exists() else model, *further),
        environment=options.environment,
        credentials=credentials,
        gpu=options.gpu,
        readable=(*([path] if path.exists() else []), *further_paths),
    )
    print(unit.text(), end="")


ChipKind = Annotated[
    Literal["cpu", "cuda", "rocm"], Option("What the image computes on: cuda for NVIDIA's GPUs, rocm for AMD's.")
]


def docker(chip: ChipKind = "cpu") -> None:
    """Print a Dockerfile of the server, to be built in a clone of the repository.

    roofline deploy docker --chip cuda > Dockerfile
    """
    from roofline.deploy.files.dockerfile import dockerfile

    print(dockerfile(chip), end="")


def compose(
    model: ModelArgument = DEFAULT_MODEL,
    words: Annotated[list[str] | None, Argument(OPTION_WORDS)] = None,
    chip: ChipKind = "cpu",
    replicas: Annotated[int, Option("Containers of the server.", minimum=1, maximum=64)] = 2,
    cores: Annotated[int | None, Option("Cores that each of them may use.", minimum=1, unit="cores")] = None,
    gigabytes: Annotated[int | None, Option("Memory that each of them may take.", minimum=1, unit="GB")] = None,
) -> None:
    """Print a compose file: replicas of the server's container behind HAProxy, on port 9080 of this machine.

    roofline deploy compose /models/tiny --replicas 4 -- --max-running 32 > compose.yaml
    """
    from roofline.deploy.files.compose import ComposeStack

    check_free_words(
        model, words or (), "the file says where containers listen, and takes the key from ROOFLINE_API_KEY"
    )
    stack = ComposeStack(chip=chip, words=(model, *(words or ())), replicas=replicas, cores=cores, gigabytes=gigabytes)
    print(stack.text(), end="")


def check_free_words(model: str, words: Sequence[str], reason: str, further: Collection[str] = ()) -> None:
    """Raise what `roofline serve` raises for these words, and ConfigError for an option that whoever starts it sets
    itself: one of ADDRESS or `further`."""
    from roofline.cli.parser import Parser
    from roofline.cli.run import serve
    from roofline.common.errors import ConfigError

    names = Parser("serve", serve.command).parse([model, *words])["named"]
    assert isinstance(names, frozenset), "its parameter of that name"
    if fixed := names & {*ADDRESS, *further}:
        raise ConfigError(f"--{min(fixed).replace('_', '-')}: {reason}")


def _take_flags(words: list[str], flags: Collection[str]) -> dict[str, str]:
    """Take flags with their values out of words."""
    values: dict[str, str] = {}
    for number in range(len(words) - 1, -1, -1):
        flag, equals, value = words[number].partition("=")
        if flag in flags and (equals or number + 1 < len(words)):
            values[flag] = value if equals else words.pop(number + 1)
            del words[number]
    return dict(reversed(values.items()))


def _absolute_path(name: str, path: str) -> Path:
    """A path that means the same from everywhere. Raises ConfigError."""
    from roofline.common.errors import ConfigError

    if not Path(path).is_absolute():
        raise ConfigError(f"{name} {path}: give the whole path, since the server runs in another folder")
    return Path(path)
