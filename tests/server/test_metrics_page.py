"""The page of all families and the dashboard beside it, against what a server shows."""

import json
import re
from pathlib import Path

import pytest

from roofline.deploy.collector.collector import MetricsCollector
from roofline.server.metrics import Metrics

PAGES = Path(__file__).parents[2] / "docs/reference"
ROW = re.compile(r"^\| `([^`]+)` \| (\w+) \| (.*) \|$", re.MULTILINE)
STATS = {"cache": {"pages": 8, "page_bytes": 1024}, "share_of_roof": 0.5, "step_sizes": [0] * 14, "step_tokens": 0}
GOLDEN = {"status": "passed", "kl": 0.003, "top1_agreement": 1.0, "fallback": None}
REPLICA = {"ready": True, "running": 0, "waiting": 0, "outstanding_tokens": 0, "restarts": 0}


@pytest.fixture(scope="module")
def text() -> str:
    """/metrics of a server in which every family has a sample."""
    metrics = Metrics()
    metrics.bind("tiny")
    return metrics.exposition({**STATS, "golden": GOLDEN, "replicas": [{**STATS, **REPLICA}]}, up=True).decode()


def sample_names(text: str) -> set[str]:
    return {re.split("[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}


def test_the_page_lists_all_families_with_what_metrics_says_of_them(text):
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    shown = {name: (kinds[name], meaning) for name, meaning in helps.items() if not name.endswith("_created")}
    listed = {name: (kind, meaning) for name, kind, meaning in ROW.findall((PAGES / "metrics.md").read_text())}
    missing = [f"| `{name}` | {kind} | {meaning} |" for name, (kind, meaning) in sorted(shown.items())]
    assert listed == shown, "the rows are:\n" + "\n".join(missing)


def test_every_family_has_a_sample(text):
    names = sample_names(text)
    for name in re.findall(r"^# HELP (\S+)", text, re.MULTILINE):
        assert any(sample == name or sample == f"{name}_count" for sample in names), name


def test_the_dashboard_asks_for_nothing_else_than_what_there_is(text):
    panels = json.loads((PAGES / "grafana-dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 40
    fleet = set(re.findall(r"^# TYPE (\S+)", MetricsCollector().exposition().decode(), re.MULTILINE))
    names = sample_names(text) | fleet
    for query in queries:
        asked = re.findall(r"(?:vllm|roofline):\w+|roofline_fleet_\w+|\bup\b", query)
        assert asked, query
        assert set(asked) <= names, query
        assert query.count("(") == query.count(")"), query
    # And no family is forgotten.
    asked = {name for query in queries for name in re.findall(r"(?:vllm|roofline):\w+", query)}
    families = [name for name in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE) if not name.endswith("_created")]
    assert [name for name in families if not any(each.startswith(name) for each in asked)] == []


def test_panels_of_the_dashboard_do_not_lie_over_each_other():
    panels = json.loads((PAGES / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for each in (panel["gridPos"] for panel in panels)
        for x in range(each["x"], each["x"] + each["w"])
        for y in range(each["y"], each["y"] + each["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
