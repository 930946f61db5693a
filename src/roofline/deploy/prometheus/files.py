"""The files of a monitored fleet, with the addresses and limits of one fleet put in."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

from roofline.common.errors import ConfigError
from roofline.common.files import cause_of, write_atomically
from roofline.common.options import Options, option

FOLDER = Path(__file__).parent
NAMES = ("prometheus.yml", "roofline.recording.yml", "roofline.alerts.yml", "grafana-dashboard.json")
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([1-9][0-9]{0,4})")

_PROXY_JOB = """\
  - job_name: roofline-proxy
    static_configs:
      - targets: [{}]
"""


@dataclass(frozen=True)
class PrometheusOptions(Options):
    """What differs from fleet to fleet."""

    collector: list[str] | None = option(
        None, "HOST:PORT of `roofline collect`, as Prometheus reaches it. Default: 127.0.0.1:9081."
    )
    proxy: list[str] | None = option(
        None, "HOST:PORT of HAProxy's exporter for Prometheus, where requests are counted that reach no replica."
    )
    key_file: Path | None = option(
        None, "File with the key that the collector asks for, where Prometheus runs.", flags=("--key-file",)
    )
    first_token: float = option(
        2.0, "95 % of first tokens are to come within it.", minimum=0.001, maximum=3600, unit="seconds"
    )
    queue: int = option(16, "Answers that may wait for room without an alert.", minimum=0, unit="answers")
    errors: float = option(0.01, "Share of requests that may fail without an alert.", minimum=0, maximum=1)
    runbooks: str = option("docs/how-to/fleet-metrics.md", "Where alerts say what to do: the page, or its address.")

    def __post_init__(self) -> None:
        """Raise ConfigError for what no file of Prometheus can hold."""
        super().__post_init__()
        for name, addresses in (("collector", self.collector), ("proxy", self.proxy)):
            for address in addresses or ():
                if not _ADDRESS.fullmatch(address) or int(address.rpartition(":")[2]) > 65535:
                    raise ConfigError(f"{name}={address!r} cannot be used: write HOST:PORT, as 127.0.0.1:9081")
        if not re.fullmatch(r"[!-~]+", self.runbooks) or "#" in self.runbooks:
            raise ConfigError(
                f"runbooks={self.runbooks!r} cannot be used: give a path or an address without # or spaces"
            )


def monitoring_files(options: PrometheusOptions) -> dict[str, str]:
    """Return the text of each file by its name."""
    collectors = ", ".join(json.dumps(address) for address in options.collector or ["127.0.0.1:9081"])
    key = ""
    if options.key_file is not None:
        key = f"    authorization:\n      credentials_file: {json.dumps(str(options.key_file))}\n"
    values = {
        "collectors": collectors,
        "authorization": key,
        "proxies": _PROXY_JOB.format(", ".join(map(json.dumps, options.proxy))) if options.proxy else "",
        "first_token": f"{options.first_token:g}",
        "queue": str(options.queue),
        "errors": f"{options.errors:g}",
        "runbooks": options.runbooks,
    }
    return {name: _filled((FOLDER / name).read_text("utf-8"), values) for name in NAMES}


def write_monitoring_files(options: PrometheusOptions, folder: Path, replace: bool) -> list[Path]:
    """Write the files into a folder, and return where they are. Raises ConfigError, with nothing written, where one is
    there that says something else and `replace` is not set, and where the folder cannot be written."""
    texts = {folder / name: text for name, text in monitoring_files(options).items()}
    try:
        changed = [path for path, text in texts.items() if path.exists() and path.read_bytes() != text.encode()]
        if changed and not replace:
            raise ConfigError(f"{changed[0]} is there and says something else: --replace writes over it")
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_atomically(path, text)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or folder} cannot be written: {cause_of(error)}; name another folder"
        ) from error
    return list(texts)


def _filled(text: str, values: dict[str, str]) -> str:
    """A file's text with `@name@` replaced by the value of that name."""
    return re.sub(r"@(\w+)@", lambda mark: values[mark.group(1)], text)
