"""The part of the page of metrics about fleets, against what a collector shows and how it adds."""

import re
from pathlib import Path
from statistics import fmean

from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.collector.rules import GAUGE_RULES

PAGE = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text().partition("## Of a fleet")[2]
WORDS = {"the sum of": sum, "the mean of": fmean, "the least of": min, "the greatest of": max, "none of": None}


def test_the_page_lists_the_collectors_own_figures():
    text = MetricsCollector().exposition().decode()
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \| (\w+) \|$", PAGE, re.MULTILINE)
    assert {name: (meaning, kind) for name, meaning, kind in rows} == {
        name: (meaning, kinds[name]) for name, meaning in helps.items()
    }


def test_the_page_says_what_gauges_are_together():
    said = {
        name: rule
        for words, rule in WORDS.items()
        for line in re.findall(rf"^\* {words} (.*)$", PAGE, re.MULTILINE)
        for name in re.findall(r"`((?:vllm|roofline):\w+)`", line)
    }
    assert said == GAUGE_RULES
