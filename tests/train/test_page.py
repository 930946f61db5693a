"""run.html: the curves and tables of a run in one file that asks for nothing else."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.train.report import answers, machine, page, summary  # noqa: E402
from roofline.train.report.answers import HeldOutAnswer, HeldOutAnswers  # noqa: E402
from roofline.train.run.loop import train  # noqa: E402
from tests.browser import Browser  # noqa: E402
from tests.train.small import config, write_rows  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAME = 'a <b> & "c" </script> run'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with evaluations that was stopped once."""
    torch.set_num_threads(1)
    base = tmp_path_factory.mktemp("page")
    data = write_rows(base / "data", 50)
    common: dict[str, Any] = {"save_interval": "4ba", "autoresume": True, "max_duration": "12ba", "run_name": NAME}
    common |= {"eval_loader": {"dataset": {"local": str(data)}}, "eval_interval": "3ba", "eval_first": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "measured_roof", lambda *_: {"flops": 1e12, "measured": "matmul 2048^3 in float32"})
        train(config(data, base / "run", **common, stop_after="8ba"))
        train(config(data, base / "run", **common))
    return base / "run"


def embedded(text: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]


def test_it_has_the_numbers_of_the_log(folder: Path) -> None:
    found = embedded((folder / page.PAGE).read_text())
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for name in ("loss", "lr", "grad_norm", "tokens_per_s", "eval_loss"):
        expected = [[line["step"], pytest.approx(line[name], rel=1e-5)] for line in lines if name in line]
        assert found["series"][name] == expected, name
    assert [step for step, _ in found["series"]["loss"]] == list(range(1, 13))
    assert [step for step, _ in found["series"]["eval_loss"]] == [0, 3, 6, 8, 8, 9, 12]  # two where it was stopped
    assert found["taken"] == [8]


def test_it_asks_for_nothing_else_and_quotes_what_is_not_ours(folder: Path) -> None:
    text = (folder / page.PAGE).read_text()
    assert not re.search(
        r"https?://|//[a-z]+\.|\bsrc=|\bhref=|@import|url\(|fetch\(|XMLHttp|\$(title|data|tables)", text
    )
    assert text.count("<script") == text.count("</script>") == 2
    assert "a &lt;b&gt; &amp;" in text
    assert NAME not in text


def test_its_tables_are_the_card_and_the_configuration(folder: Path) -> None:
    text = (folder / page.PAGE).read_text()
    card = json.loads((folder / "card.json").read_text())
    for value in ("no MFU: a CPU&#x27;s peak is not guessed", "matmul 2048^3 in float32", torch.__version__):
        assert value in text
    assert f"{card['flops']['matmul']['model_flops_per_token']:.4g}" in text
    assert "<th>optimizer.lr</th><td>0.003</td>" in text
    assert "finished" in text


def test_long_curves_are_thinned_to_means() -> None:
    points = [[float(i), float(i % 2)] for i in range(1, 10 * page.POINTS + 1)]
    thin = page._means(points)
    assert len(thin) == page.POINTS
    assert thin[0] == [10.0, 0.5]
    assert thin[-1][0] == points[-1][0]
    assert page._means(points[:3]) == points[:3]
    assert page._means([]) == []
    assert len(page._means(points[: page.POINTS + 1])) == (page.POINTS + 2) // 2, "pairs, as soon as there is one more"


def test_a_log_with_holes(folder: Path) -> None:
    """A loss that was not finite is null; the line that is being written is not whole."""
    card, made = (json.loads((folder / name).read_text()) for name in ("card.json", "config.json"))
    lines: list[dict[str, Any]] = [{"step": 1, "loss": None, "lr": 0.1}, {"step": 2, "loss": 2.0, "lr": 0.1}]
    found = embedded(page.page(lines, card, made))
    assert found["series"]["loss"] == [[2, 2.0]]
    assert embedded(page.page([], card, made))["series"]["loss"] == []


BOTH = HeldOutAnswers(
    before="smollm2-135m",
    after='tuned/"1"&',
    command="roofline serve smollm2-135m --adapter tuned=runs/tuned/adapter",
    address="http://127.0.0.1:8000",
    rows=(
        HeldOutAnswer("Which <b>?", "yes", "I am no <i>oracle</i>.", " yes\n"),
        HeldOutAnswer("And this?", "no", "no", "no"),
        HeldOutAnswer("Later?", "never", None, None),
    ),
)


def test_answers_stand_side_by_side_with_a_link_to_each_model(folder: Path) -> None:
    card, made = (json.loads((folder / name).read_text()) for name in ("card.json", "config.json"))
    text = page.page([], card, made, BOTH)
    assert re.findall(r'href="([^"]*)"', text) == [
        f"{BOTH.address}/?model=smollm2-135m",
        f"{BOTH.address}/?model=tuned%2F%221%22%26",
    ]
    assert "Chat with tuned/&quot;1&quot;&amp;<" in text
    assert f"<pre>{BOTH.command}</pre>" in text
    assert "<i>oracle" not in text
    rows = re.findall(r"<tr><td><div>(.*?)</div></td><td class=\"(\w+)\">.*?<td class=\"(\w+)\">", text, re.S)
    assert rows == [("Which &lt;b&gt;?", "other", "exact"), ("And this?", "exact", "exact")]
    assert "<span>exact before</span><b>1 of 2</b>" in text
    assert "<span>exact after</span><b>2 of 2</b>" in text
    assert card["done"]
    assert embedded(text)["live"] is False
    asked = page.page([], card, made, replace(BOTH, system="Be <brief> & kind."))
    assert f'href="{BOTH.address}/?model=smollm2-135m&amp;system=Be%20%3Cbrief%3E%20%26%20kind."' in asked
    lines: list[Any] = [{"step": step, "eval_loss": -reward, "reward": reward} for step, reward in ((0, 0.25), (4, 1))]
    rewarded = page.page(lines, card, made | {"grpo": {"reward": "reward.py:short"}}, BOTH)
    assert "<span>reward before</span><b>0.250</b>" in rewarded
    assert "<span>reward after</span><b>1.000</b>" in rewarded
    assert "exact before" not in rewarded
    assert '<td class="exact">' not in rewarded
    begun = replace(BOTH, rows=tuple(replace(row, after=None) for row in BOTH.rows))
    assert embedded(page.page([], card, made, begun))["live"] is True, "the answers after the run are still to come"


def test_answers_are_read_from_the_folder(folder: Path, tmp_path: Path) -> None:
    assert answers.read_answers(tmp_path) is None
    answers.write_answers(BOTH, tmp_path)
    assert answers.read_answers(tmp_path) == BOTH
    for name in ("card.json", "config.json", "log.jsonl"):
        shutil.copy(folder / name, tmp_path)
    page.write(tmp_path)
    assert "Chat with smollm2-135m" in (tmp_path / page.PAGE).read_text()
    (tmp_path / answers.ANSWERS).write_text("{}")
    with pytest.raises(ConfigError, match=r"answers\.json is no file of answers: remove it"):
        answers.read_answers(tmp_path)


def test_it_is_written_while_the_run_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between evaluations and checkpoints too, for whoever watches; it then has a bar, and reads itself again."""
    monkeypatch.setattr(machine, "measured_roof", lambda *_: {"flops": 1e12, "measured": "matmul 2048^3 in float32"})
    monkeypatch.setattr(summary, "LIVE_SECONDS", 0.0)
    monkeypatch.setattr(summary, "PAGE_SHARE", 1e9)
    seen: list[str] = []

    def watch(line: dict[str, Any]) -> None:
        path = tmp_path / "run" / page.PAGE
        if "loss" in line and path.exists():
            seen.append(path.read_text())

    train(config(write_rows(tmp_path / "data", 50), tmp_path / "run", max_duration="4ba"), watch)
    assert len(seen) == 3, "one behind each step but the last"
    assert '<progress max="4" value="3">' in seen[-1]
    assert embedded(seen[-1])["live"] is True
    text = (tmp_path / "run" / page.PAGE).read_text()
    assert "<progress max" not in text
    assert embedded(text)["live"] is False


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1200, 420])
def test_a_browser_draws_it(folder: Path, width: int, tmp_path: Path) -> None:
    """Four charts whose lines lie inside them, nothing wider than the window, a value where the pointer is."""
    look = """<script>
    new ResizeObserver(() => {}).observe(document.body);
    setTimeout(() => {
      const svgs = [...document.querySelectorAll("svg")], box = svgs[0].getBoundingClientRect();
      const before = document.querySelector(".read").textContent;
      svgs[0].dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 60, clientY: box.top + 50}));
      const inside = svgs.every(svg => [...svg.querySelectorAll("path")].every(path => {
        const b = path.getBBox();
        return b.x >= 0 && b.y >= 0 && b.x + b.width <= svg.clientWidth && b.y + b.height <= 240; }));
      const found = {charts: svgs.length, paths: document.querySelectorAll("svg path").length, inside, before,
        hover: document.querySelector(".read").textContent, wide: document.documentElement.scrollWidth,
        window: innerWidth};
      document.title = JSON.stringify(found);
    }, 500);
    </script>"""
    copy = tmp_path / "run.html"
    copy.write_text((folder / page.PAGE).read_text() + look)
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *options, copy.as_uri()], capture_output=True, text=True, timeout=120)
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", done.stdout)[1])  # type: ignore[index]
    assert (found["charts"], found["paths"], found["inside"]) == (4, 5, True)
    assert found["wide"] <= found["window"]
    assert found["before"].startswith("step 12 · train ")
    assert found["hover"].startswith("step 0 · held-out ")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
def test_a_browser_reads_the_page_of_a_live_run_again(folder: Path, tmp_path: Path) -> None:
    card, made = (json.loads((folder / name).read_text()) for name in ("card.json", "config.json"))
    card |= {"done": False, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    copy = tmp_path / "run.html"
    copy.write_text(page.page([], card, made, BOTH))
    browser = Browser(tmp_path / "profile")
    try:
        shown = browser.open(copy.as_uri())
        shown.wait("document.querySelectorAll('.answers tbody tr').length === 2")
        copy.write_text(page.page([], card | {"run": "second", "done": True}, made))
        shown.wait("document.title === 'second'")  # after five seconds
        assert shown.problems == []
    finally:
        browser.close()
