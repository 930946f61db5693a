"""Writes what the model says after a few prompts while it trains (LLM Foundry's generate_callback)."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from roofline.bundle import load_text_of
from roofline.common.errors import ConfigError
from roofline.train.config.duration import batches
from roofline.train.config.observers import WrittenSamplesSection
from roofline.train.parallel.processes import reshard

if TYPE_CHECKING:
    from roofline.train.run.loop import Run

TOP_K = 50  # of a draw without top_k, as in transformers


class RunSamples:
    """The samples of a run. All ranks compute them, as sharded weights demand, and take the tokens that rank 0 chooses.

    Each token takes a forward pass over the text so far: nothing is cached, so that any family and any sharding can do
    it. Draws follow from the seed and the step, and leave the run's own random numbers as they are.

    Attributes:
        every: steps between two.
        with_checkpoints: whether the checkpoint of a signal has one.

    Raises ConfigError if the tokenizer is not here, or if a prompt with its answer is longer than the model's context.
    """

    def __init__(self, run: "Run", section: WrittenSamplesSection) -> None:
        self.run, self.section, self.with_checkpoints = run, section, False
        self.every = batches("callbacks.generate_callback.interval", section.interval, run.units)
        assert run.config.tokenizer is not None
        name = run.config.tokenizer.name
        self._tokenizer = run.world.first(lambda: load_text_of(name)[0])
        self._prompts, self._ends = run.world.share(run.world.first(self._encoded)) or ([], [])

    def record(self) -> None:
        """Write a sample of each prompt into the log."""
        run, section, started = self.run, self.section, time.perf_counter()
        random = torch.Generator().manual_seed((run.config.seed * 1_000_003 + run.progress.step) % (1 << 63))
        size, answers = section.batch_size or len(self._prompts), []
        # Texts grow with each token, and every length would be compiled anew.
        eager = run.config.compile_config is not None
        run.model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager") if eager else nullcontext():
            for first in range(0, len(self._prompts), size):
                answers += self._answers(self._prompts[first : first + size], random)
        run.model.train()
        reshard(run.model, run.world)
        texts = [] if self._tokenizer is None else [self._tokenizer.decode(ids) for ids in answers]
        run.log.samples(
            run.progress.step, list(zip(section.prompts, texts, strict=False)), time.perf_counter() - started
        )

    def _encoded(self) -> tuple[list[list[int]], list[int]]:
        """The ids of the prompts, and those that end an answer."""
        assert self._tokenizer is not None
        prompts = []
        for text in self.section.prompts:
            ids = self._tokenizer.encode(text, add_special=True, parse_special=True)
            room = self.run.config.max_seq_len - self.section.max_new_tokens
            if not 0 < len(ids) <= room:
                raise ConfigError(
                    f"callbacks.generate_callback.prompts: {text[:40]!r} has {len(ids)} tokens; there is room for 1 to "
                    f"{max(0, room)}, which is max_seq_len less max_new_tokens"
                )
            prompts.append(ids)
        return prompts, list(self._tokenizer.eos_ids)

    def _answers(self, prompts: list[list[int]], random: torch.Generator) -> list[list[int]]:
        """The ids behind each prompt, without an end token."""
        answers: list[list[int]] = [[] for _ in prompts]
        open_rows = list(range(len(prompts)))
        for _ in range(self.section.max_new_tokens):
            logits = self._logits([prompts[row] + answers[row] for row in open_rows])
            ids = self.run.world.share(self._choose(logits, random))
            for row, token in zip(open_rows, ids, strict=True):
                answers[row].append(token)
            open_rows = [row for row in open_rows if answers[row][-1] not in self._ends]
            if not open_rows:
                break
        return [ids[:-1] if ids[-1] in self._ends else ids for ids in answers]

    def _logits(self, rows: list[list[int]]) -> torch.Tensor:
        """The logits behind the last token of each row, float32 [rows, vocab]."""
        longest, device = max(map(len, rows)), self.run.world.device
        # What is behind a text changes nothing before it, so rows are filled up on the right.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=device)
        places = torch.tensor([at * longest + len(row) - 1 for at, row in enumerate(rows)], device=device)
        with self.run.gradients.autocast():
            logits: torch.Tensor = self.run.model(ids, places=places)
        return logits.float().cpu()

    def _choose(self, logits: torch.Tensor, random: torch.Generator) -> list[int]:
        """The next token of each row."""
        section = self.section
        if not section.do_sample:
            return logits.argmax(-1).tolist()
        top_k = TOP_K if section.top_k is None else section.top_k
        scores, ids = (logits / (section.temperature or 1.0)).topk(min(top_k or logits.shape[1], logits.shape[1]))
        shares = scores.softmax(-1)
        shares[shares.cumsum(-1) - shares >= (section.top_p or 1.0)] = 0  # the likeliest always stays
        draws = torch.multinomial(shares, 1, generator=random)
        return ids.gather(1, draws)[:, 0].tolist()
