"""Our engine as what samples the answers of a training run (`train.preference.sampler.Sampler`)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roofline.bundle import load, load_text_of
from roofline.common.errors import ConfigError
from roofline.engine.llm import LLM
from roofline.engine.params import SamplingParams
from roofline.ops.batch import PAGE_TOKENS
from roofline.train.preference.sampler import MakeSampler, SampledAnswer
from roofline.weights.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from roofline.train.config.schema import TrainConfig


_CACHE = 1 << 14  # most tokens of answers that are computed at a time


class EngineSampler:
    """An engine in this process. With an adapter it has the base alone in memory, and takes each step's adapter beside
    it; where all parameters are trained, it loads each step's model anew."""

    def __init__(self, config: "TrainConfig") -> None:
        assert config.adapter is not None
        assert config.grpo is not None
        base = config.model.pretrained_model_name_or_path
        assert base is not None
        self._adapts, rank = config.adapter.method != "full", config.adapter.rank
        self._text = load_text_of(base)
        tokens = min(_CACHE, config.global_train_batch_size * config.grpo.group * config.max_seq_len)
        self._options: dict[str, Any] = {
            **{"max_model_len": config.max_seq_len, "verify": False},
            "cache_tokens": max(tokens, config.max_seq_len + PAGE_TOKENS),
        }
        if config.grpo.backend == "reference":
            self._options |= {"backend": "reference", "arithmetic": "plain"}
        adapters: dict[str, Any] = {"max_adapters": 2, "max_adapter_rank": rank} if self._adapts else {}
        self._base: LLM | None = None
        if self._adapts or config.grpo.kl:
            self._base = LLM(base, **self._options, **adapters)
        self._model: LLM | None = self._base
        self._adapter: str | None = None

    def load(self, folder: Path) -> None:
        """Sample from now on with the adapter, or the model, in a folder."""
        if self._adapts:
            assert self._base is not None
            before, self._adapter = self._adapter, self._base.load_adapter(folder)
            if before is not None and before != self._adapter:
                self._base.unload_adapter(before)
            return
        if self._model is not None and self._model is not self._base:
            self._model.close()
        # A checkpoint in memory is not compiled into the cache of bundles, where each step would leave a model.
        model = load(open_checkpoint(folder), text=False, **self._options)
        self._model = LLM(replace(model, tokenizer=self._text[0], chat_template=self._text[1]))

    def sample(
        self, prompts: Sequence[Sequence[int]], count: int, most: int, temperature: float, seeds: Sequence[int]
    ) -> list[list[SampledAnswer]]:
        """`count` answers to each prompt."""
        assert self._model is not None
        params = [
            SamplingParams(n=count, max_tokens=most, temperature=temperature, seed=seed, logprobs=0) for seed in seeds
        ]
        outputs = self._model.generate(
            [list(prompt) for prompt in prompts], params, adapter=self._adapter, use_tqdm=False
        )
        return [
            [
                SampledAnswer(
                    answer.text,
                    answer.ids,
                    [token.logprob for token in answer.logprobs or ()],
                    answer.finish_reason == "stop",
                )
                for answer in output.answers
            ]
            for output in outputs
        ]

    def score(self, rows: Sequence[Sequence[int]], behind: Sequence[int]) -> list[list[float]]:
        """By the base: the log-probability of each id of a row behind the first so many."""
        assert self._base is not None
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        outputs = self._base.generate([list(row) for row in rows], params, use_tqdm=False)
        scores = []
        for output, first in zip(outputs, behind, strict=True):
            of_prompt = (output.answers[0].prompt_logprobs or [])[first:]
            scores.append([token.logprob for token in of_prompt if token is not None])
        return scores

    def close(self) -> None:
        """Stop the engines."""
        for each in {id(llm): llm for llm in (self._base, self._model) if llm is not None}.values():
            each.close()


def sampler_of(config: "TrainConfig") -> MakeSampler | None:
    """Return the function that makes the engine of a run, if its configuration samples. Raises ConfigError for a model
    without files."""
    if config.grpo is None:
        return None
    if config.adapter is None or config.model.pretrained_model_name_or_path is None:
        raise ConfigError("grpo samples from a model's files: set model.name=hf_causal_lm and name them")
    return lambda: EngineSampler(config)
