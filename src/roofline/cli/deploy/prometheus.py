"""roofline deploy prometheus: files with which Prometheus and Grafana watch a fleet."""

from pathlib import Path
from typing import Annotated

from roofline.common.options import Option
from roofline.deploy.prometheus.files import PrometheusOptions


def command(
    options: PrometheusOptions,
    out: Annotated[Path, Option("Folder that they are written into.", flags=("--out", "-o"))],
    replace: Annotated[bool, Option("Write over files there that say something else.")] = False,
) -> None:
    """Write what Prometheus needs to watch a fleet: what to scrape, recording rules, alerts, and a Grafana dashboard.

    They are about the metrics of `roofline collect`. `prometheus --config.file=FOLDER/prometheus.yml` runs with them.
    """
    from roofline.deploy.prometheus.files import write_monitoring_files

    for path in write_monitoring_files(options, out, replace):
        print(f"written: {path}")
