"""The commands of the README and of the pages for learners work: every fenced bash block is run, line by line."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# In this order, in one folder, each line once. `-m slow` runs the longer pages.
SLOW_DOCUMENTS = (
    "docs/tutorials/first-answer.md",
    "docs/how-to/structured-output.md",
    "docs/tutorials/train.md",
    "docs/how-to/faster.md",
)
DOCUMENTS = ("README.md", *SLOW_DOCUMENTS)
README = (ROOT / "README.md").read_text()
LINES = [
    (line.strip(), document)
    for document in DOCUMENTS
    for block in re.findall(r"^```bash\n(.*?)^```", (ROOT / document).read_text(), re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
PAGES = dict(reversed(LINES))  # the first that has it
# Takes longest, and another command of its page does the same with less work.
SOAK_LINES = {"roofline bench engine smollm2-135m --speculate ngram --rows edit_greedy --json"}


def marks_of(line: str, page: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] * (page in SLOW_DOCUMENTS) + [pytest.mark.soak] * (line in SOAK_LINES)


COMMANDS = [
    pytest.param(line, id=f"{Path(page).stem}-{line}", marks=marks_of(line, page))
    for line, page in sorted(PAGES.items(), key=LINES.index)
]


def test_there_are_commands():
    lines = [str(command.values[0]) for command in COMMANDS]
    assert len(lines) >= 23, "commands that were documented, and run here, are no longer"
    assert any(line.startswith("roofline generate") for line in lines)
    assert set(lines) >= SOAK_LINES


def test_every_page_with_commands_to_run_is_listed():
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "```bash\n" in path.read_text()]
    assert {path.relative_to(ROOT).as_posix() for path in pages} <= set(DOCUMENTS)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.parametrize("line", COMMANDS)
def test_command(shell, line):
    result = shell(line)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() or " > " in line, "it says what it did, unless what it printed went to a file"
    if "--json" in line:
        assert json.loads(result.stdout)


def test_the_readme_fits_on_a_screen_or_two():
    assert len(README.splitlines()) <= 120


def test_make_commands_that_the_readme_names_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", README)) <= targets


@pytest.mark.slow
def test_the_first_question_is_the_same_everywhere_and_answered_sensibly(model):
    """Greedy and sampled as a command samples: what a newcomer sees first is no noise."""
    from roofline import LLM, SamplingParams
    from roofline.cli.run.prepare import TEMPERATURE, TOP_P

    (question,) = re.findall(r"^PROMPT \?= (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in DOCUMENTS[:2]:
        first = next(line for line in (ROOT / page).read_text().splitlines() if line.startswith("roofline generate"))
        assert f'"{question}"' in first, page
    sampled = [SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=seed, max_tokens=48) for seed in range(3)]
    with LLM(model) as llm:
        for params in (SamplingParams(temperature=0, max_tokens=48), *sampled):
            text = llm.chat([{"role": "user", "content": question}], params).text
            assert text.startswith(("Gravity is a fundamental concept in physics", "Gravity is a fundamental force")), (
                text
            )
