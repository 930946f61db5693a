"""from_model: a Hugging Face model in memory, run by our engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from roofline.backends import table
from roofline.backends.backend import CopiesWeights
from roofline.backends.base import Retraceable
from roofline.backends.options import LoadOptions
from roofline.bundle import LoadedModel, load
from roofline.common.errors import ConfigError, UnsupportedError
from roofline.common.options import split_keywords
from roofline.engine.answers import LocalAnswers
from roofline.engine.config import EngineConfig
from roofline.engine.llm import LLM, Output, Prompt
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams, invalid
from roofline.ops.batch import PAGE_TOKENS, BatchLimits
from roofline.program.ir import Program
from roofline.program.passes.headless import headless
from roofline.program.passes.plan import plan
from roofline.torch.checkpoint import PretrainedModel, PretrainedTokenizer, checkpoint_of, name_of, text_of, with_copies
from roofline.torch.encodings import Encoding, IdRows, encoding_rows, id_rows, is_encoding, prompts_of
from roofline.torch.per_token import CHUNK, PerToken

SPARE_TOKENS = 4096  # of a sequence whose logits and hidden states a GPU is left room for


def from_model(
    model: PretrainedModel, tokenizer: PretrainedTokenizer = None, *, backend: str = "cpu", **options: Any
) -> "TorchModel":
    """Take a causal language model of transformers as it is: its tensors in their own dtype, without a file.

    The weights are those of now, whatever becomes of the model: after training, call this again.

    Args:
        model: LlamaForCausalLM, or Mistral's, Qwen2's, Qwen3's, MPT's; or one that reads pictures too, such as
            Gemma3ForConditionalGeneration, of which the language model is run.
        tokenizer: transformers' tokenizer for it, for prompts that are strings; None: ids alone.
        backend: "cpu"; "gpu", which rounds weights in float32 to bfloat16; or "reference", slow, with
            arithmetic="plain" in float32 throughout.
        options: of the engine (see `EngineConfig`) and of loading (see `roofline.bundle.load`).

    Raises:
        ConfigError, UnsupportedError, CapacityError: with cause and remedy.
    """
    load_options, config = split_keywords(
        {"backend": backend, **options}, LoadOptions, EngineConfig, owner="from_model"
    )
    if config.speculate == "draft":
        raise ConfigError('speculate="draft" needs a second model: use roofline.LLM, or speculate="ngram"')
    if load_options.weights is not None:
        raise ConfigError(f"weights={load_options.weights!r}: the model has its own")
    checkpoint = checkpoint_of(model)
    chosen = table.get(backend)
    # Adapters with lengths of rows (DoRA) have these computed from the checkpoint when they are loaded.
    if load_options.max_adapters or not (isinstance(chosen, CopiesWeights) and chosen.copies_weights):
        checkpoint = with_copies(checkpoint)
    ends = _ends(model)
    words = text_of(tokenizer, ends) if tokenizer is not None else (None, None)
    traces = None
    if backend == "gpu":  # room beside the engine's, for logits and hidden states
        longest = min(load_options.max_model_len or SPARE_TOKENS, SPARE_TOKENS)
        traces = BatchLimits(CHUNK, 1, CHUNK, -(-longest // PAGE_TOKENS))
    loaded = load(checkpoint, text=False, traces=traces, **config.prepare_load(load_options).changes())
    loaded = replace(loaded, name=name_of(model), tokenizer=words[0], chat_template=words[1])
    return TorchModel(loaded, config, ends)


def _ends(model: PretrainedModel) -> tuple[int, ...]:
    """The ids that end an answer, as the model itself says."""
    for config in (getattr(model, "generation_config", None), model.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    return ()


class TorchModel:
    """A model from memory on one of our backends. Not thread-safe.

    Attributes:
        loaded: the model as `roofline.bundle.load` gives it.
        llm: `roofline.LLM` over it (chat, stream); None without a tokenizer.
        engine: ids -> ids, step by step.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, eos_ids: tuple[int, ...]) -> None:
        self.loaded, self.eos_ids = loaded, eos_ids
        self.llm = LLM(loaded, **vars(config)) if loaded.tokenizer is not None else None
        self.engine = self.llm.engine if self.llm is not None else LocalEngine(loaded.executable, config)
        self.engine.media_ids = loaded.media_ids
        self._answers = self.llm.answers if self.llm is not None else LocalAnswers(self.engine, None, eos_ids)
        executable = loaded.executable
        if not isinstance(executable, Retraceable):
            raise UnsupportedError(
                "logits of every position", "this backend runs one trace of a model", ("backend=cpu",)
            )
        self._executable: Retraceable = executable
        self._logits = self._per_token(lambda: self._executable.program)
        self._hidden = self._per_token(lambda: plan(headless(self._executable.program)))

    def logits(self, input_ids: Tensor) -> Tensor:
        """Logits of every position, in the arithmetic the engine serves with.

        Args:
            input_ids: integers [tokens] or [batch, tokens], without padding.

        Returns:
            float32 [tokens, vocab] or [batch, tokens, vocab] on the ids' device, without gradients.

        Raises:
            UnsupportedError: of an encoder model.
            RequestError: ids that are none, or of another shape.
            CapacityError: a sequence longer than max_model_len.
            RooflineError: the model is closed.
        """
        self._answers.check_open()
        if self.loaded.config.encoder:
            raise UnsupportedError("logits of an encoder model", "it gives vectors alone", ("hidden_states",))
        return self._logits(input_ids)

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        """Return what the head reads, the final norm's result, at every position: float32 [tokens, width] or
        [batch, tokens, width]; else as `logits`."""
        self._answers.check_open()
        return self._hidden(input_ids)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | Tensor | Encoding,
        params: SamplingParams | None = None,
        **options: object,
    ) -> list[Output]:
        """Complete prompts as `roofline.LLM.generate` does, and what a tokenizer of transformers returns for texts,
        without the padding that its attention_mask names. options: none, those of transformers are refused with what
        to give. Raises ConfigError without a tokenizer; else as there."""
        _refuse(options, "generate")
        if self.llm is None:
            raise ConfigError("an answer's text needs a tokenizer: from_model(model, tokenizer), or use generate_ids")
        listed: Any = prompts_of(prompts)
        return self.llm.generate(listed, params)

    def generate_ids(
        self,
        input_ids: IdRows | Encoding,
        params: SamplingParams | None = None,
        *,
        attention_mask: IdRows | None = None,
        **options: object,
    ) -> list[Tensor]:
        """The new ids after each prompt, int64 [tokens] each (with n > 1 a prompt's answers in order).

        Args:
            input_ids: integers [tokens] or [batch, tokens], a list of them or of rows, or what a tokenizer returned.
            attention_mask: of the same shape, 0 where there is padding, which is left out; None: there is none.
            options: none; those of transformers are refused with what to give.

        Raises:
            TypeError: an option, which SamplingParams has if anything does.
            RequestError, CapacityError: a prompt that cannot be computed; none is then.
            RooflineError: the engine failed on an answer.
        """
        _refuse(options, "generate_ids")
        params = params or SamplingParams()
        if is_encoding(input_ids):
            if attention_mask is not None:
                raise invalid("attention_mask", "give the tokenizer's encoding, which has one, or ids beside a mask")
            prompts = encoding_rows(input_ids)
        else:
            prompts = id_rows(input_ids, attention_mask)
        answers = self._answers.run(prompts, [params] * len(prompts), at_start=False)
        return [torch.tensor(answer.ids, dtype=torch.int64) for group in answers for answer in group]

    def close(self) -> None:
        """Free memory and threads."""
        self._logits.close()
        self._hidden.close()
        self._answers.close()

    def __enter__(self) -> "TorchModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _per_token(self, program: "Callable[[], Program]") -> PerToken:
        served = self.loaded.executable
        return PerToken(
            lambda limits, pages: self._executable.variant(
                program(), replace(limits, state_slots=min(1, served.limits.state_slots)), pages
            ),
            served.vocab_size,
            served.max_context,
        )


def _refuse(options: Mapping[str, object], owner: str) -> None:
    """Raise TypeError for an option, with the field of SamplingParams that is to be given."""
    for name in options:
        if name in SamplingParams.__dataclass_fields__:
            raise TypeError(f"{owner} has no option {name!r}: give SamplingParams({name}=...)")
        SamplingParams.from_keywords({name: None}, f"{owner}, as SamplingParams,")
