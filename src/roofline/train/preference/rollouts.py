"""Sampled answers in a run (GRPO): each batch of prompts becomes a batch of answers with rewards.

The answers of a step are sampled with the weights that the step begins with, which are written into the run's folder as
an adapter, or a model, and loaded by the engine. Seeds follow from the run's seed, the step and the prompt, so that a
run that goes on from a checkpoint samples what it would have sampled.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import numpy as np

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonObject
from roofline.train.checkpoint.outcome import TrainedFolder
from roofline.train.config.objectives import GrpoSection
from roofline.train.data.loader import Source
from roofline.train.data.row_arrays import PADDING, RowArrays
from roofline.train.memory.meter import anonymous_bytes
from roofline.train.preference.grpo import AnswerLoss, Apart, advantages
from roofline.train.preference.objective import Facts
from roofline.train.preference.rewards import Record, reward_of
from roofline.train.preference.sampler import MakeSampler, SampledAnswer, Sampler
from roofline.train.preference.scores import scored
from roofline.train.run_folder import ROLLOUTS, keep_lines

if TYPE_CHECKING:
    from roofline.train.data.loader import Rows
    from roofline.train.data.synthetic import Synthetic
    from roofline.train.run.loop import Run

POLICY = "policy"  # the folder, in the run's, of the weights that the next answers are sampled with


class Rollouts:
    """What a run of GRPO has beside others.

    Attributes:
        objective: for `Gradients`. updates: of the parameters in a step.
    """

    def __init__(self, run: "Run", section: GrpoSection, make_sampler: MakeSampler) -> None:
        self.run, self.section, self.objective = run, section, AnswerLoss(section)
        self.reward, self._make_sampler = reward_of(section.reward), make_sampler
        self.updates, self._figures = section.iterations, dict[str, float]()
        self._outcome = TrainedFolder(run, POLICY)
        self._sampler: Sampler | None = None
        self._file: IO[str] | None = None

    @property
    def sampler(self) -> Sampler:
        """The engine, once the run has begun."""
        assert self._sampler is not None
        return self._sampler

    @property
    def figures(self) -> dict[str, float]:
        """Of the last batch's answers. apart, apart_most: the mean and the largest difference, between training and
        engine, in the log-probability of a token."""
        apart = self.objective.apart
        return self._figures | {"apart": apart.total / max(1, apart.count), "apart_most": apart.most}

    def begin(self) -> JsonObject:
        """Start the engine; facts for the log."""
        path = self.run.folder / ROLLOUTS
        keep_lines(path, self.run.progress.step)
        self._file = path.open("a")
        before = anonymous_bytes()
        self._sampler = self._make_sampler()
        self.run.report.memory.add("engine", max(0, anonymous_bytes() - before))
        return {}

    def prepare(self, rows: "Rows") -> tuple["Rows", list[Facts]]:
        """The answers to a batch of prompts as rows, and what the objective has to know of them."""
        started, section = time.perf_counter(), self.section
        (part,) = rows.parts
        prompts = _real(part)
        room = self.run.config.max_seq_len - section.max_new_tokens
        if (longest := max(map(len, prompts))) > room:
            raise ConfigError(
                f"step {rows.step + 1}: a prompt has {longest} tokens; there is room for {room}, which is max_seq_len "
                "less grpo.max_new_tokens"
            )
        self._outcome.write()
        self.sampler.load(self._outcome.folder)
        seeds = [self.run.config.seed * 1_000_003 + rows.step * 65_537 + place for place in range(len(prompts))]
        groups = self.sampler.sample(prompts, section.group, section.max_new_tokens, section.temperature, seeds)
        sampled_in = time.perf_counter() - started
        rewards = self._rewards(self.run.source, rows.ids, groups)
        gains = advantages(section, rewards)
        self._note(rows.step + 1, prompts, groups, rewards)
        answers = [answer for group in groups for answer in group]
        arrays, facts = self._arrays([p for p in prompts for _ in range(section.group)], answers, gains.reshape(-1))
        if section.temperature != 1:  # the engine tells log-probabilities at temperature 1
            facts = {**facts, "old": self._scored(arrays)}
        self._figures = {
            "reward": float(rewards.mean()),
            "reward_deviation": float(rewards.std(1, ddof=1).mean()),
            "answer_tokens": float(np.mean([len(answer.ids) for answer in answers])),
            "ended": float(np.mean([answer.ended for answer in answers])),
            "sampling_seconds": sampled_in,
        }
        self.objective.apart, self.objective.fresh = Apart(), len(answers)
        return replace(rows, parts=(arrays,), each=section.group), [facts]

    def evaluate(self, label: str) -> tuple[float, int, dict[str, float]]:
        """Minus the mean reward of the likeliest answers to held-out prompts, how many these are, and figures."""
        run, config = self.run, self.run.config
        source, limit = run.held_out[label], config.eval_subset_num_batches
        count = len(source) if limit < 0 else min(len(source), limit * config.device_eval_batch_size)
        if not count:
            raise ConfigError(f"the eval_loader {label} holds no row")
        numbers = np.arange(count)
        prompts = _real(source.rows(numbers))
        self._outcome.write()
        self.sampler.load(self._outcome.folder)
        groups = self.sampler.sample(prompts, 1, self.section.max_new_tokens, 0.0, [0] * count)
        rewards = self._rewards(source, numbers, groups)
        return -float(rewards.mean()), count, {"reward": float(rewards.mean())}

    def close(self) -> None:
        """Stop the engine."""
        if self._sampler is not None:
            self._sampler.close()
        if self._file is not None:
            self._file.close()

    def _rewards(
        self, source: "Source | Synthetic", numbers: np.ndarray, groups: Sequence[Sequence[SampledAnswer]]
    ) -> np.ndarray:
        """float64 [prompts, answers]."""
        records = [self._record(source, int(number)) for number in numbers]
        return np.array(
            [
                [self.reward(answer.text, record) for answer in group]
                for record, group in zip(records, groups, strict=True)
            ]
        )

    def _record(self, source: "Source | Synthetic", number: int) -> Record:
        record = source.sample(number).get("record") if isinstance(source, Source) else None
        if not isinstance(record, dict):
            raise ConfigError(f"sample {number} of the data set lacks its record, which `roofline reinforce` writes")
        return record

    def _arrays(
        self, prompts: Sequence[list[int]], answers: Sequence[SampledAnswer], gains: np.ndarray
    ) -> tuple[RowArrays, Facts]:
        """Rows of a prompt and its answer each; gains: their advantages."""
        lengths = [len(prompt) + len(answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]
        order = np.argsort(lengths, kind="stable")  # so that rows of a microbatch have little padding
        prompts, answers, gains = [prompts[at] for at in order], [answers[at] for at in order], gains[order]
        longest = max(lengths)
        shape = (len(answers), longest)
        tokens, trained, old = np.zeros(shape, np.int64), np.zeros(shape, bool), np.zeros(shape, np.float32)
        documents = np.full(shape, PADDING)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            begin, end = len(prompt), len(prompt) + len(answer.ids)
            tokens[row, :end] = [*prompt, *answer.ids]
            documents[row, :end], trained[row, begin:end] = 0, True
            old[row, begin - 1 : end - 1] = answer.scores  # where the answer's tokens are targets
        facts = {"old": old, "advantage": gains.astype(np.float32)}
        if self.section.kl:
            rows = [[*prompt, *answer.ids] for prompt, answer in zip(prompts, answers, strict=True)]
            facts["reference"] = reference = np.zeros(shape, np.float32)
            for row, scores in enumerate(self.sampler.score(rows, [len(prompt) for prompt in prompts])):
                begin = len(prompts[row]) - 1
                reference[row, begin : begin + len(scores)] = scores
        return RowArrays(tokens, documents, trained), facts

    def _scored(self, arrays: RowArrays) -> np.ndarray:
        """The answers' log-probabilities as training has them before the step."""
        gradients = self.run.gradients
        size = gradients.size or 1
        parts = [arrays.rows(slice(start, start + size)) for start in range(0, len(arrays.tokens), size)]
        return np.concatenate([scored(gradients, part, self.section.temperature) for part in parts])

    def _note(
        self, step: int, prompts: Sequence[list[int]], groups: Sequence[Sequence[SampledAnswer]], rewards: np.ndarray
    ) -> None:
        """Write the answers down, for people."""
        assert self._file is not None
        for group, of_group in zip(groups, rewards.tolist(), strict=True):
            each = [{"text": answer.text, "reward": reward} for answer, reward in zip(group, of_group, strict=True)]
            self._file.write(json.dumps({"step": step, "answers": each}) + "\n")
        self._file.flush()


def _real(rows: RowArrays) -> list[list[int]]:
    """The ids of each row, without padding."""
    assert rows.documents is not None
    return [tokens[of != PADDING].tolist() for tokens, of in zip(rows.tokens, rows.documents, strict=True)]
