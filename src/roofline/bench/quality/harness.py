"""A model of ours for EleutherAI's lm-evaluation-harness, the package lm-eval: `harness_model(llm)`.

The package is imported when `harness_model` is called, and by nothing else. What it asks for is computed by
`HarnessAnswers`, which needs no more than an `LLM`.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from roofline.common.errors import ConfigError
from roofline.common.json_types import JsonMapping
from roofline.engine.params import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM

    from roofline.engine.events import TokenLogprob
    from roofline.engine.llm import LLM

_ANSWER_TOKENS = 256  # where a task says nothing
# Names of the same setting; where several are there, the first of these counts.
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_GENERATION = ("until", *_LENGTHS, "do_sample", "temperature", "top_p", "top_k")
_BATCH = 64  # requests that are handed to the engine at once


class HarnessAnswers:
    """What the harness asks of a model, by an LLM. llm: its prompts may have max_model_len - 1 tokens."""

    def __init__(self, llm: "LLM") -> None:
        self._llm = llm
        self._longest = llm.engine.limits.max_model_len - 1  # the engine generates one token after a prompt
        tokenizer = llm.tokenizer
        beginnings = ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + list(tokenizer.eos_ids)
        if not beginnings:
            raise ConfigError(f"{llm.name} has neither a token that begins texts nor one that ends them")
        self._begin = beginnings[0]  # what the first token of a text is predicted from

    def likelihoods(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[float, bool]]:
        """Of (context, continuation): the log-probability of the continuation, and whether each of its tokens is the
        most likely one. A prompt that is too long loses its beginning. Raises ConfigError for an empty continuation."""
        prompts, counts = [], []
        for context, continuation in pairs:
            before, after = self._split(context, continuation)
            if not after:
                raise ConfigError(f"the continuation {continuation!r} has no tokens")
            if len(after) >= self._longest:
                raise ConfigError(f"a continuation of {len(after):,} tokens has no room in {self._longest:,}")
            prompts.append([*before, *after][-self._longest :])
            counts.append(len(after))
        return [
            (sum(logprob.logprob for logprob in logprobs), all(logprob.top[0][0] == logprob.id for logprob in logprobs))
            for logprobs in self._logprobs(prompts, counts)
        ]

    def rolling(self, texts: Iterable[str]) -> list[float]:
        """The log-probability of each text, every token once, in windows that overlap by a token. The last window is as
        long as the others, as in the harness: its first tokens are context and are not scored again."""
        sums = []
        for text in texts:
            ids = [self._begin, *self._llm.tokenizer.encode(text, add_special=False)]
            starts = range(1, len(ids), self._longest - 1)  # of the tokens that a window scores
            ends = [min(start + self._longest - 1, len(ids)) for start in starts]
            prompts = [ids[max(0, end - self._longest) : end] for end in ends]
            logprobs = self._logprobs(prompts, [end - start for start, end in zip(starts, ends, strict=True)])
            sums.append(float(sum(logprob.logprob for window in logprobs for logprob in window)))
        return sums

    def continuations(self, requests: Sequence[tuple[str, JsonMapping]]) -> list[str]:
        """Of (context, settings): what the model says next, up to the first of the texts `until`. Raises ConfigError
        for settings that are not known here."""
        prompts, params = [], []
        for context, settings in requests:
            params.append(_sampling(settings))
            room = self._longest + 1 - (params[-1].max_tokens or 0)
            if room < 1:
                raise ConfigError(f"max_gen_toks={params[-1].max_tokens} leaves no room in {self._longest + 1} tokens")
            ids = self._encode(context)
            prompts.append((ids or [self._begin])[-room:])
        return [output.text for output in self._llm.generate(prompts, params, use_tqdm=False)] if prompts else []

    def _split(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, encoded as one text: what the continuation adds to those of the context. Spaces at the end of
        the context belong to the continuation, as its first token begins with them."""
        encode = self._llm.tokenizer.encode
        trailing = len(context) - len(context.rstrip())
        if trailing:
            context, continuation = context[:-trailing], context[-trailing:] + continuation
        if not context:
            return [self._begin], encode(continuation, add_special=False, parse_special=True)
        before, both = self._encode(context), self._encode(context + continuation)
        suffix = len(self._llm.tokenizer.vocabulary.suffix)
        before, both = before[: len(before) - suffix], both[: len(both) - suffix]
        return both[: len(before)] or [self._begin], both[len(before) :]

    def _encode(self, text: str) -> list[int]:
        """Ids of a text with the tokenizer's own around it; a beginning that a chat template wrote is not doubled."""
        ids = self._llm.tokenizer.encode(text, add_special=True, parse_special=True)
        prefix = list(self._llm.tokenizer.vocabulary.prefix)
        doubled = bool(prefix) and ids[len(prefix) : 2 * len(prefix)] == prefix
        return ids[len(prefix) :] if doubled else ids

    def _logprobs(self, prompts: Sequence[list[int]], counts: Sequence[int]) -> "list[list[TokenLogprob]]":
        """What the engine tells of the last tokens of each prompt."""
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
        logprobs = []
        for start in range(0, len(prompts), _BATCH):
            outputs = self._llm.generate(prompts[start : start + _BATCH], params, use_tqdm=False)
            for output, count in zip(outputs, counts[start : start + _BATCH], strict=True):
                assert output.prompt_logprobs is not None, "they were asked for"
                logprobs.append(
                    [prompt_logprob for prompt_logprob in output.prompt_logprobs[-count:] if prompt_logprob is not None]
                )
        return logprobs


def _sampling(settings: JsonMapping) -> SamplingParams:
    for name in settings:
        if name not in _GENERATION:
            raise ConfigError(f"the task's generation setting {name!r} is not known (known: {', '.join(_GENERATION)})")
    until = settings.get("until") or []
    sampled = settings.get("do_sample", settings.get("temperature", 0) > 0)
    values = {name: settings[name] for name in ("top_p", "top_k") if sampled and name in settings}
    return SamplingParams(
        max_tokens=next((settings[name] for name in _LENGTHS if name in settings), _ANSWER_TOKENS),
        temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
        stop=(until,) if isinstance(until, str) else tuple(until),
        **values,
    )


def harness_model(llm: "LLM") -> "LM":
    """The model as the harness knows them. Raises ImportError where lm-eval is not installed."""
    from lm_eval.api.model import LM

    answers = HarnessAnswers(llm)

    class RooflineLM(LM):  # type: ignore[misc]  # the package has no types
        """Passes on what it is asked."""

        def loglikelihood(self, requests: "list[Instance]") -> list[tuple[float, bool]]:
            return answers.likelihoods(request.args for request in requests)

        def loglikelihood_rolling(self, requests: "list[Instance]") -> list[float]:
            return answers.rolling(request.args[0] for request in requests)

        def generate_until(self, requests: "list[Instance]") -> list[str]:
            return answers.continuations([request.args for request in requests])

        @property
        def tokenizer_name(self) -> str:
            return llm.name.replace("/", "__")

        def chat_template(self, chat_template: bool | str = False) -> str:
            if isinstance(chat_template, str):
                raise ConfigError(f"{llm.name} has no chat templates by name: say apply_chat_template=True")
            return llm.chat_template.source if chat_template else ""

        def get_model_info(self) -> dict[str, str]:
            return {"model": llm.name, "model_fingerprint": llm.model.executable.fingerprint}

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            llm.chat_template.check_fits(llm.tokenizer)
            parts = llm.chat_template.render(chat_history, add_generation_prompt=add_generation_prompt)
            return "".join(part.text for part in parts)

    return RooflineLM()
