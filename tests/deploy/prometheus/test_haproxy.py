"""The names that rules ask HAProxy for, against what the real HAProxy shows."""

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from roofline.deploy.prometheus.files import PrometheusOptions, monitoring_files

HAPROXY = shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
CONFIGURATION = """\
defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
frontend public
    bind 127.0.0.1:{port}
    default_backend replicas
backend replicas
frontend exporter
    bind 127.0.0.1:{exporter}
    http-request use-service prometheus-exporter if {{ path /metrics }}
"""


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (apt install haproxy)")
def test_haproxy_counts_requests_that_no_replica_had_under_the_names_of_the_rules(tmp_path: Path) -> None:
    port, exporter = free_ports()
    (tmp_path / "haproxy.cfg").write_text(CONFIGURATION.format(port=port, exporter=exporter))
    process = subprocess.Popen([str(HAPROXY), "-f", str(tmp_path / "haproxy.cfg")], stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(trust_env=False) as client:
            end = time.monotonic() + 30
            while True:
                try:
                    assert client.get(f"http://127.0.0.1:{port}/v1/models").status_code == 503
                    break
                except httpx.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.05)
            text = client.get(f"http://127.0.0.1:{exporter}/metrics").text
    finally:
        process.terminate()
        process.wait(20)
    rules = "".join(monitoring_files(PrometheusOptions()).values())
    (name,) = set(re.findall(r"\bhaproxy_frontend\w+", rules))
    assert re.search(rf'^{name}{{proxy="public",code="5xx"}} 1$', text, re.MULTILINE), text
    assert re.search(rf'^{name}{{proxy="public",code="2xx"}} 0$', text, re.MULTILINE), text
