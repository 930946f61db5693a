"""Rules and alerts that `roofline deploy prometheus` writes, as promtool reads and runs them."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from roofline.deploy.collector.collector import MetricsCollector
from roofline.deploy.prometheus.files import NAMES, PrometheusOptions, monitoring_files, write_monitoring_files
from tests.command_line import call_roofline
from tests.deploy.collector.fake_replicas import full_page
from tests.deploy.collector.prometheus_process import PROMTOOL, needs_promtool

RUNBOOKS = "docs/how-to/fleet-metrics.md"
PAGE = Path(__file__).parents[3] / RUNBOOKS
FLEET = {"instance": "c:9081", "job": "roofline"}
REPLICA = {**FLEET, "replica": "r1"}
MODEL = {**FLEET, "model_name": "m"}
MODEL_REPLICA = {**MODEL, "replica": "r1"}


@dataclass(frozen=True, kw_only=True)
class AlertCase:
    """An alert with series for which it fires and others for which it does not, looked at after `minutes`.

    fires, silent: name and labels of each series -> its values every 15 s, as promtool writes them; labels, summary:
    of the alert that fires.
    """

    fires: dict[str, str]
    silent: dict[str, str]
    labels: dict[str, str]
    severity: str
    summary: str
    minutes: int = 12


def series(name: str, labels: dict[str, str], **more: str) -> str:
    """A series as promtool has it."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in {**labels, **more}.items()) + "}"


def first_tokens(slow: int) -> dict[str, str]:
    """A histogram in which `slow` of 20 more tokens every 15 s come between 1 and 5 s, the others within 1 s."""
    counts = {"1.0": 20 - slow, "5.0": 20, "+Inf": 20}
    return {
        series("vllm:time_to_first_token_seconds_bucket", MODEL, le=edge): f"0+{count}x60"
        for edge, count in counts.items()
    }


UP, WANTED = series("roofline_fleet_replicas", FLEET, state="up"), series("roofline_fleet_replicas_wanted", FLEET)
RESPONSES = {status: series("roofline:http_responses_total", FLEET, status=status) for status in ("2xx", "4xx", "5xx")}
PROXY = {
    status: series("haproxy_frontend_http_responses_total", {"job": "roofline-proxy", "proxy": "public"}, code=status)
    for status in ("2xx", "5xx")
}
# The same in the two evaluations before 12 minutes: promtool runs the alerts before or after what they are made of.
GROWING = "0 " + " ".join(f"{waiting} {waiting}" for waiting in range(21, 50))
FAILED, DONE = (
    series("roofline:request_failure_total", MODEL),
    series("vllm:request_success_total", MODEL, finished_reason="stop"),
)
CASES = {
    "RooflineCollectorDown": AlertCase(
        fires={series("up", FLEET): "1x4 0x60"},
        silent={series("up", FLEET): "1x45 0x60", series("up", REPLICA): "0x60"},
        labels=FLEET,
        severity="critical",
        summary="Nothing is known of the fleet behind c:9081, as its collector cannot be read.",
    ),
    "RooflineNoReplica": AlertCase(
        fires={UP: "2x4 0x60", WANTED: "2x60"},
        silent={UP: "0x60", WANTED: "0x60"},  # scaled to zero
        labels=FLEET,
        severity="critical",
        summary="No replica of the fleet behind c:9081 answers.",
    ),
    "RooflineReplicaDown": AlertCase(
        fires={series("up", REPLICA): "1x4 0x60"},
        silent={series("up", REPLICA): "1x45 0x60"},
        labels=REPLICA,
        severity="warning",
        summary="Replica r1 does not answer.",
    ),
    "RooflineFleetBelowWanted": AlertCase(
        fires={UP: "2x4 1x60", series("roofline_fleet_replicas", FLEET, state="down"): "1x60", WANTED: "2x60"},
        silent={UP: "2x40 1x60", series("roofline_fleet_replicas", FLEET, state="down"): "1x60", WANTED: "2x60"},
        labels=FLEET,
        severity="warning",
        summary="The fleet behind c:9081 has 1 replicas, which is less than it is to have.",
    ),
    "RooflineReplicaRestarts": AlertCase(
        fires={series("roofline_fleet_restarts_total", FLEET): "0x4 1x8 2x8 3x8 4x8 5x60"},
        silent={series("roofline_fleet_restarts_total", FLEET): "0x4 1x8 2x60"},
        labels=FLEET,
        severity="warning",
        summary="Replicas behind c:9081 began anew 5 times in 15 minutes.",
    ),
    "RooflineEngineRestarts": AlertCase(
        fires={series("replica:roofline:engine_restarts_total", MODEL_REPLICA): "0x20 1x60"},
        silent={series("replica:roofline:engine_restarts_total", MODEL_REPLICA): "3x60"},
        labels={"model_name": "m", "replica": "r1"},
        severity="warning",
        summary="The engine of replica r1 ended and was started again.",
    ),
    "RooflineGoldenCheckFailed": AlertCase(
        fires={series("replica:roofline:golden_within_thresholds", MODEL_REPLICA): "0x60"},
        silent={series("replica:roofline:golden_within_thresholds", MODEL_REPLICA): "1x60"},
        labels=MODEL_REPLICA,
        severity="critical",
        summary="Replica r1 does not compute what the file of m says.",
    ),
    "RooflineQueueGrowing": AlertCase(
        fires={series("vllm:num_requests_waiting", MODEL): GROWING},
        silent={series("vllm:num_requests_waiting", MODEL): "50-1x50 0x20"},  # long, and getting shorter
        labels={"model_name": "m"},
        severity="warning",
        summary="Answers of m wait, 44 now, and they become more.",
    ),
    "RooflineFirstTokenSlow": AlertCase(
        fires=first_tokens(slow=5),
        silent=first_tokens(slow=1),
        labels={"model_name": "m"},
        severity="warning",
        summary="One request in twenty for m waits 4.2 s or longer for its first token; 2 s are promised.",
    ),
    "RooflineCacheFull": AlertCase(
        fires={series("replica:vllm:kv_cache_usage_perc", MODEL_REPLICA): "0.99x60"},
        silent={series("replica:vllm:kv_cache_usage_perc", MODEL_REPLICA): "0.99x10 0.5x10 0.99x10 0.5x30"},
        labels=MODEL_REPLICA,
        severity="warning",
        summary="The key-value cache of replica r1 is 99% full.",
    ),
    "RooflineServerErrors": AlertCase(
        fires={RESPONSES["2xx"]: "0+97x60", RESPONSES["4xx"]: "0+1x60", RESPONSES["5xx"]: "0+2x60"},
        silent={RESPONSES["2xx"]: "0+100x60", RESPONSES["4xx"]: "0+50x60", RESPONSES["5xx"]: "0+0x60"},
        labels={"job": "roofline"},
        severity="critical",
        summary="2% of the requests are answered with a status of 500 or above.",
    ),
    "RooflineProxyErrors": AlertCase(
        fires={PROXY["2xx"]: "0+90x60", PROXY["5xx"]: "0+10x60"},
        silent={PROXY["2xx"]: "0+90x60", PROXY["5xx"]: "10x60"},
        labels={"job": "roofline-proxy", "proxy": "public"},
        severity="critical",
        summary="10% of the requests that come through public of HAProxy are answered with a status of 500 or above.",
    ),
    "RooflineAnswersFail": AlertCase(
        fires={FAILED: "0+4x60", DONE: "0+96x60"},
        silent={FAILED: "4x60", DONE: "0+96x60"},
        labels={"model_name": "m"},
        severity="critical",
        summary="4% of the answers of m end in an error.",
    ),
    "RooflineMetricsRefused": AlertCase(
        fires={series("roofline_fleet_refused_families", REPLICA): "2x60"},
        silent={series("roofline_fleet_refused_families", REPLICA): "0x20 2x60"},
        labels=REPLICA,
        severity="info",
        summary="2 families of replica r1 cannot be added to those of the fleet.",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("prometheus")
    write_monitoring_files(PrometheusOptions(), folder, replace=False)
    return folder


def promtool(folder: Path, *words: str) -> str:
    done = subprocess.run([str(PROMTOOL), *words], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def alerts(folder: Path) -> list[dict]:
    return yaml.safe_load((folder / "roofline.alerts.yml").read_text())["groups"][0]["rules"]


@needs_promtool
def test_promtool_takes_configuration_and_rules(written):
    assert "prometheus.yml is valid" in promtool(written, "check", "config", "prometheus.yml")
    for name in ("roofline.recording.yml", "roofline.alerts.yml"):
        assert "SUCCESS" in promtool(written, "check", "rules", "--lint=all", "--lint-fatal", name)


@needs_promtool
@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_and_does_not_fire(written, alert):
    case = CASES[alert]
    fired = {
        "exp_labels": {**case.labels, "severity": case.severity},
        "exp_annotations": {"summary": case.summary, "runbook": f"{RUNBOOKS}#{alert.lower()}"},
    }
    tests = [
        {
            "interval": "15s",
            "input_series": [{"series": name, "values": values} for name, values in given.items()],
            "alert_rule_test": [{"eval_time": f"{case.minutes}m", "alertname": alert, "exp_alerts": expected}],
        }
        for given, expected in ((case.fires, [fired]), (case.silent, []))
    ]
    rules = ["roofline.recording.yml", "roofline.alerts.yml"]
    file = written / f"{alert}.test.yml"
    file.write_text(yaml.safe_dump({"rule_files": rules, "evaluation_interval": "15s", "tests": tests}))
    assert "SUCCESS" in promtool(written, "test", "rules", file.name)


def test_every_alert_has_a_case_a_summary_a_severity_and_a_page(written):
    assert [rule["alert"] for rule in alerts(written)] == list(CASES)
    headings = {re.sub(r"\W", "", line).lower() for line in PAGE.read_text().splitlines() if line.startswith("#")}
    for rule in alerts(written):
        assert rule["labels"]["severity"] == CASES[rule["alert"]].severity
        assert rule["annotations"].keys() == {"summary", "runbook"}
        page, _, heading = rule["annotations"]["runbook"].partition("#")
        assert (page, heading) == (RUNBOOKS, rule["alert"].lower())
        assert heading in headings, f"{PAGE} does not say what to do"


def test_rules_ask_for_nothing_else_than_what_there_is(written):
    there = {re.split("[{ ]", line)[0] for line in full_page().decode().splitlines() if not line.startswith("#")}
    there |= {f"replica:{name}" for name in there}
    own = re.findall(r"^# TYPE (\S+)", MetricsCollector().exposition().decode(), re.MULTILINE)
    groups = [yaml.safe_load((written / name).read_text())["groups"] for name in NAMES[1:3]]
    rules = [rule for file in groups for group in file for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for rule in rules:
        names = re.findall(r"[a-z_]+(?:_[a-z]+|:\w+)+(?=[\[{\s)]|$)", re.sub(r"by \([^)]*\)", "", rule["expr"]))
        asked = {name for name in names if ":" in name or name.startswith("roofline_fleet") or name == "up"}
        assert asked or "up{" in rule["expr"] or "haproxy" in rule["expr"], rule
        if not any("haproxy" in name for name in names):  # the real HAProxy is asked in test_haproxy.py
            assert asked <= there | recorded | set(own), asked - there - recorded - set(own)
    used = " ".join(rule["expr"] for rule in rules if "alert" in rule)
    assert {"model:vllm_num_requests_waiting:sum", "job:roofline_http_5xx:share5m"} <= recorded & set(
        re.findall(r"[\w:]+", used)
    )


@needs_promtool
def test_options_are_in_the_files(tmp_path):
    words = ["--collector", "10.0.0.1:9081", "--collector", "[::1]:9082", "--key-file", "/etc/roofline/key"]
    words += [
        "--proxy",
        "127.0.0.1:8404",
        "--first-token",
        "0.5",
        "--queue",
        "3",
        "--errors",
        "0.05",
        "--runbooks",
        "https://wiki.example/roofline",
    ]
    result = call_roofline(["deploy", "prometheus", "--out", tmp_path, *words])
    assert result.exit_code in (None, 0), result.output
    job, proxy = yaml.safe_load((tmp_path / "prometheus.yml").read_text())["scrape_configs"]
    assert proxy == {"job_name": "roofline-proxy", "static_configs": [{"targets": ["127.0.0.1:8404"]}]}
    assert job["static_configs"] == [{"targets": ["10.0.0.1:9081", "[::1]:9082"]}]
    assert job["authorization"] == {"credentials_file": "/etc/roofline/key"}
    rules = {rule["alert"]: rule for rule in alerts(tmp_path)}
    assert rules["RooflineFirstTokenSlow"]["expr"].endswith("> 0.5")
    assert "0.5 s are promised" in rules["RooflineFirstTokenSlow"]["annotations"]["summary"]
    assert "> 3\n" in rules["RooflineQueueGrowing"]["expr"] or "> 3 " in rules["RooflineQueueGrowing"]["expr"]
    assert rules["RooflineServerErrors"]["expr"].endswith("> 0.05")
    assert rules["RooflineCacheFull"]["annotations"]["runbook"] == "https://wiki.example/roofline#rooflinecachefull"
    promtool(tmp_path, "check", "config", "--syntax-only", "prometheus.yml")
    assert not re.search(r"@\w+@", "".join(monitoring_files(PrometheusOptions()).values()))


def test_files_that_say_something_else_are_left_alone_unless_told(tmp_path):
    (tmp_path / "roofline.alerts.yml").write_text("mine")
    result = call_roofline(["deploy", "prometheus", "--out", tmp_path])
    assert "roofline.alerts.yml is there and says something else: --replace writes over it" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["roofline.alerts.yml"]
    assert call_roofline(["deploy", "prometheus", "--out", tmp_path, "--replace"]).exit_code in (None, 0)
    assert call_roofline(["deploy", "prometheus", "--out", tmp_path]).exit_code in (None, 0)  # the same again
    assert {path.name for path in tmp_path.iterdir()} == set(NAMES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--collector", "http://127.0.0.1:9081"], "write HOST:PORT"),
        (["--collector", "127.0.0.1:99999"], "write HOST:PORT"),
        (["--proxy", "127.0.0.1"], "--proxy '127.0.0.1' cannot be used"),
        (["--runbooks", "a b"], "without # or spaces"),
        (["--errors", "2"], "at most 1"),
    ],
)
def test_what_no_file_can_hold_is_refused(tmp_path, words, message):
    result = call_roofline(["deploy", "prometheus", "--out", tmp_path / "new", *words])
    assert result.exit_code not in (None, 0)
    assert message in result.output.replace("\n", " ")
    assert not (tmp_path / "new").exists()
