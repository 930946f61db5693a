"""How often a model is right on tasks whose answers are known: LLM Foundry's in-context tasks, and held-out samples.

Of several choices the one with the highest mean log-probability of its tokens counts as the model's, as in LLM
Foundry; a continuation is right if greedy decoding gives it token for token; an answer in free text if it begins with a
right one, without regard to case, articles and punctuation; the answer of a chat if it is the sample's to the letter.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping
from roofline.train.data.record_files import records
from roofline.train.finetune.forms import read, recognise
from roofline.train.finetune.samples import Chat, Continuation, text

if TYPE_CHECKING:
    from roofline.engine.llm import LLM, Output

MOST_TOKENS = 64  # of an answer in free text
KINDS = ("choices", "continuations", "answers", "exact")


@dataclass(frozen=True)
class Task:
    """prompt: a text. answers: of `choices` all of them, else those that are right; gold: the place of the right one.
    messages, tools: of a chat, which has no prompt."""

    kind: str
    prompt: str
    answers: tuple[str, ...]
    gold: int = 0
    messages: tuple[Mapping[str, object], ...] = ()
    tools: tuple[Mapping[str, object], ...] = ()


@dataclass(frozen=True)
class Accuracy:
    """Of the tasks of a kind: how many there are, and how many were answered rightly."""

    tasks: int
    right: int

    @property
    def share(self) -> float:
        return self.right / self.tasks

    @property
    def error(self) -> float:
        """The standard error of the share."""
        return (self.share * (1 - self.share) / self.tasks) ** 0.5


def read_tasks(place: Path, split: str | None = None) -> list[Task]:
    """The tasks in a file or folder, of any form that `roofline finetune` reads. Raises ConfigError."""
    tasks = [_task(record, where) for where, record in records(place, split)]
    if not tasks:
        raise ConfigError(f"{place} holds no task")
    return tasks


def _task(record: JsonMapping | str, where: str) -> Task:
    form = recognise(record, where)
    sample = read(record, where, form)
    if isinstance(sample, Chat):
        last = sample.messages[sample.answers[-1]]
        before = sample.messages[: sample.answers[-1]]
        return Task("exact", "", (str(last["content"]),), messages=before, tools=sample.tools)
    if not isinstance(sample, Continuation) or isinstance(record, str):
        raise ConfigError(f"{where} is a plain text: `roofline eval --text` measures how well a model predicts it")
    choices, aliases = record.get("choices"), record.get("aliases")
    if isinstance(choices, list):
        answers = tuple(_joined(sample.prompt, str(choice)) for choice in choices)
        return Task("choices", sample.prompt, answers, record["gold"])
    if "answer" in record:
        right = [text(record, "answer", where), *(map(str, aliases) if isinstance(aliases, list) else ())]
        return Task("answers", sample.prompt, tuple(right))
    return Task("continuations", sample.prompt, (sample.completion,))


def _joined(prompt: str, answer: str) -> str:
    """The answer as it stands behind the prompt."""
    return answer if prompt[-1:].isspace() or answer[:1].isspace() else f" {answer}"


def evaluate(llm: "LLM", tasks: Sequence[Task], adapter: str | None = None) -> dict[str, Accuracy]:
    """The accuracy on each kind of task. adapter: what `load_adapter` returned. Raises as `LLM.generate`."""
    judges = {"choices": _choices, "continuations": _continuations, "answers": _answers, "exact": _exact}
    scores = {}
    for kind in KINDS:
        tasks_of_kind = [task for task in tasks if task.kind == kind]
        if tasks_of_kind:
            scores[kind] = Accuracy(len(tasks_of_kind), sum(judges[kind](llm, tasks_of_kind, adapter)))
    return scores


def _choices(llm: "LLM", tasks: Sequence[Task], adapter: str | None) -> list[bool]:
    from roofline.engine.params import SamplingParams

    pairs = [_ids(llm, task.prompt, choice) for task in tasks for choice in task.answers]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    outputs = iter(llm.generate([[*before, *behind] for before, behind in pairs], params, adapter=adapter))
    behinds, right = iter(pairs), []
    for task in tasks:
        means = [_mean(next(outputs), len(next(behinds)[1])) for _ in task.answers]
        right.append(means.index(max(means)) == task.gold)
    return right


def _mean(output: "Output", count: int) -> float:
    """The mean log-probability of the last tokens of a prompt."""
    logprobs = output.prompt_logprobs or []
    return sum(logprob.logprob for logprob in logprobs[-count:] if logprob is not None) / count


def _continuations(llm: "LLM", tasks: Sequence[Task], adapter: str | None) -> list[bool]:
    from roofline.engine.params import SamplingParams

    pairs = [_ids(llm, task.prompt, task.answers[0]) for task in tasks]
    params = [SamplingParams(temperature=0.0, max_tokens=len(behind)) for _, behind in pairs]
    outputs = llm.generate([before for before, _ in pairs], params, adapter=adapter)
    return [output.ids == behind for output, (_, behind) in zip(outputs, pairs, strict=True)]


def _answers(llm: "LLM", tasks: Sequence[Task], adapter: str | None) -> list[bool]:
    from roofline.engine.params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=MOST_TOKENS)
    outputs = llm.generate([llm.encode(task.prompt) for task in tasks], params, adapter=adapter)
    return [
        any(_normal(output.text).startswith(_normal(answer)) for answer in task.answers)
        for output, task in zip(outputs, tasks, strict=True)
    ]


def _exact(llm: "LLM", tasks: Sequence[Task], adapter: str | None) -> list[bool]:
    from roofline.engine.params import SamplingParams
    from roofline.text.replies.reply_format import reply_format
    from roofline.text.templates.tools import with_tools_as_text

    form = reply_format(llm.chat_template.source)
    prompts, params = [], []
    for task in tasks:
        messages = list(task.messages) if form.takes_tools else with_tools_as_text(task.messages, task.tools, form)
        tools = task.tools if form.takes_tools and task.tools else None
        prompts.append(llm.chat_template.encode_chat(llm.tokenizer, messages, tools=tools))
        length = len(llm.tokenizer.encode(task.answers[0], add_special=False))
        params.append(SamplingParams(temperature=0.0, max_tokens=length * 3 // 2 + 16))
    outputs = llm.generate(prompts, params, adapter=adapter)
    return [output.text.strip() == task.answers[0].strip() for output, task in zip(outputs, tasks, strict=True)]


def _ids(llm: "LLM", prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt, and those of the answer behind it."""
    ids, before = llm.encode(prompt + answer), llm.encode(prompt)
    same = next((at for at, (x, y) in enumerate(zip(ids, before, strict=False)) if x != y), min(len(ids), len(before)))
    return ids[:same], ids[same:]


def _normal(answer: str) -> str:
    """Lower case without articles, punctuation and repeated spaces."""
    plain = answer.lower().translate(str.maketrans(string.punctuation, " " * len(string.punctuation)))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
