"""LLM: a model for Python programs. Strings or messages in, text out; the engine runs in this process."""

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from roofline.backends.options import LoadOptions
from roofline.common.options import declared, split_keywords
from roofline.engine import keywords
from roofline.engine.answers import Answer, AnswerBuilder, LocalAnswers, numbered
from roofline.engine.beams import BeamSearch, BeamSearchParams
from roofline.engine.checks import check_request, token_ids
from roofline.engine.config import EngineConfig
from roofline.engine.conversation import plain_messages
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams, invalid
from roofline.engine.pooling import Pooling, check_able, cosine, embedding, probability
from roofline.engine.progress import ProgressBar, bar_for
from roofline.engine.relevance import VARIABLES, check_instruction, pair_messages, yes_or_no
from roofline.engine.stats import EngineStats
from roofline.weights.vectors import KINDS

if TYPE_CHECKING:
    import numpy as np

    from roofline.bundle import LoadedModel
    from roofline.text.templates.template import ChatTemplate
    from roofline.text.tokenizers.tokenizer import Tokenizer

__all__ = ["LLM", "Answer", "BeamAnswer", "BeamSearchOutput", "Message", "Output", "Prompt"]
Message = Mapping[str, object]
Prompt = str | Sequence[int] | Mapping[str, object]  # a mapping: of "prompt" or "prompt_token_ids", as vLLM has it


@dataclass(frozen=True, kw_only=True)
class Output(Answer):
    """The first answer to a prompt; with it the prompt's ids, and all n answers."""

    prompt_ids: list[int]
    answers: list[Answer]


@dataclass(frozen=True, kw_only=True)
class BeamAnswer(Answer):
    """An answer of a beam search. score: the sum of its log-probabilities / length ** length_penalty."""

    score: float


@dataclass(frozen=True)
class BeamSearchOutput:
    """The answers that a beam search found to a prompt, the best first."""

    prompt_ids: list[int]
    answers: list[BeamAnswer]


def _prompt_list(prompts: "Prompt | Iterable[Prompt]") -> list[Prompt]:
    """The prompts as a list, of which a single one is the only element. Raises RequestError for what is no prompt."""
    if isinstance(prompts, str | bytes | bytearray | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]  # `encode` refuses what is no prompt
    plain = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    listed: list[Any] = [prompt.tolist() if hasattr(prompt, "tolist") else prompt for prompt in plain]
    return [listed] if listed and isinstance(listed[0], Integral) else listed


def _text_or_ids(prompt: Mapping[str, object]) -> object:
    """The text or the ids of a prompt that is written as a mapping. Raises RequestError where it has more."""
    fields = {name: value for name, value in prompt.items() if value is not None}
    ids = fields.pop("prompt_token_ids", None)
    text = fields.pop("prompt", None)  # beside ids, vLLM's own outputs have the text that they stand for
    if fields or (text is None and ids is None) or isinstance(text or ids, Mapping):
        names = ", ".join(map(repr, prompt)) or "nothing"
        problem = f"a mapping with {names}; give {{'prompt': TEXT}}, {{'prompt_token_ids': IDS}}, the text or the ids"
        raise invalid("prompt", problem)
    return text if ids is None else ids


class LLM:
    """A loaded model. Any number of threads may use it at a time: their requests are computed together.

    Args:
        model: a catalogue name, a path, "hf:ORG/REPO[:FILE]", or a model that `roofline.bundle.load` returned.
        draft: a smaller model of the same vocabulary, for speculate="draft"; loaded with the same options.
        options: settings of the engine (see `EngineConfig`) and of loading (see `roofline.bundle.load`). vLLM's names
            of the same things are taken too (tensor_parallel_size, max_num_seqs, ...).

    Raises:
        TypeError: a keyword that there is not, with the nearest, or what to give instead.
        ConfigError, UnsupportedError, CapacityError: with cause and remedy.
    """

    def __init__(
        self,
        model: "str | Path | LoadedModel" = "smollm2-135m",
        *,
        draft: "str | Path | LoadedModel | None" = None,
        **options: Any,
    ) -> None:
        if isinstance(model, Path):
            model = str(model)
        if isinstance(draft, Path):
            draft = str(draft)
        options = keywords.ours(options)
        load_options, config = split_keywords(options, LoadOptions, EngineConfig, owner="LLM")
        if config.long_prompt_tokens is None:  # who calls this waits for all of its answers
            config = replace(config, long_prompt_tokens=0)
        draft_options = load_options.for_draft().changes()
        load_options = config.prepare_load(load_options)
        if isinstance(model, str) and isinstance(draft, str):
            from roofline.bundle import load_with_draft

            model, draft = load_with_draft(model, load_options.changes(), draft, draft_options)
        else:
            from roofline.bundle import check_draft, load

            if isinstance(draft, str):
                draft = load(draft, **draft_options)
            if isinstance(model, str):
                model = load(model, load_options)
            elif only_loading := [name for name in options if name not in declared(EngineConfig)]:
                raise TypeError(f"a loaded model takes no option {', '.join(sorted(only_loading))}")
            if draft is not None:
                check_draft(model, draft)
        assert model.tokenizer is not None, "an LLM needs a model loaded with its text side"
        assert model.chat_template is not None, "an LLM needs a model loaded with its text side"
        self.model = model
        self.tokenizer: Tokenizer = model.tokenizer
        self.chat_template: ChatTemplate = model.chat_template
        draft_executable = draft.executable if draft is not None else None
        tokenizer = model.tokenizer
        self.engine = LocalEngine(model.executable, config, draft_executable, lambda: tokenizer)
        self.engine.pooling, self.engine.media_ids = model.pooling, model.media_ids
        self.answers = LocalAnswers(self.engine, self.tokenizer, self.tokenizer.eos_ids)

    @property
    def name(self) -> str:
        """The name the model was loaded by."""
        return self.model.name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        parse_special: bool = False,
        use_tqdm: bool = True,
    ) -> list[Output]:
        """Complete texts, all in one batch, each as it stands (no chat template).

        Args:
            prompts: one or several texts, lists or arrays of ids, or {"prompt": ...} or {"prompt_token_ids": ...}.
            params: for all prompts, or one each.
            adapter: what `load_adapter` returned, for all prompts; None: the model alone.
            parse_special: read special tokens inside strings as such.
            use_tqdm: show how many of several prompts are answered, where stderr is a terminal (the name is vLLM's).

        Returns:
            one Output a prompt, in order.

        Raises:
            RequestError, CapacityError: a prompt that cannot be computed; none is then.
            RooflineError: the engine failed on an answer.
        """
        listed = _prompt_list(prompts)
        if isinstance(params, Mapping):
            raise invalid("params", "a mapping is not SamplingParams; give SamplingParams(**params)")
        params_list = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(listed)
        if len(params_list) != len(listed):
            raise invalid("params", f"{len(params_list)} for {len(listed)} prompts")
        ids = [self.encode(prompt, parse_special) for prompt in listed]
        bar = bar_for(len(ids)) if use_tqdm else None
        return self._outputs(ids, params_list, at_start=False, bar=bar, adapter=adapter)

    def beam_search(
        self,
        prompts: "Prompt | Sequence[Prompt]",
        params: BeamSearchParams,
        *,
        adapter: str | None = None,
        parse_special: bool = False,
    ) -> list[BeamSearchOutput]:
        """The likeliest answers as a whole: all prompts in one batch, each as it stands (see `roofline.engine.beams`).

        adapter: as of `generate`. Returns one output a prompt, in order. Raises as `generate`.
        """
        ids = [self.encode(prompt, parse_special) for prompt in _prompt_list(prompts)]
        ends = params.ends(self.tokenizer.eos_ids)
        searches = []
        for number, prompt in enumerate(ids, 1):
            with numbered(number, len(ids)):
                room = SamplingParams(max_tokens=params.max_tokens)
                sizes = self.model.executable.vocab_size, self.engine.limits.max_model_len
                check_able(None, self.engine.gives_hidden, encoder=self.engine.encoder)
                longest = check_request(prompt, room, [], *sizes, media_ids=self.engine.media_ids)
                searches.append(BeamSearch(params, ends, longest))
        cached = [0] * len(ids)
        first = True
        while steps := [(at, beam) for at, search in enumerate(searches) if not search.done for beam in search.beams]:
            beginnings = [[*ids[at], *beam.ids] for at, beam in steps]
            each_params = [searches[at].step_params for at, _ in steps]
            answers = self.answers.run(beginnings, each_params, at_start=False, adapter=adapter or "")
            tops: dict[int, list[Sequence[tuple[int, float]]]] = {at: [] for at, _ in steps}
            for (at, _), (answer,) in zip(steps, answers, strict=True):
                assert answer.logprobs is not None, "a step asks for them"
                tops[at].append(answer.logprobs[0].top)
                if first:
                    cached[at] = answer.usage.cached_tokens
            for at, top in tops.items():
                searches[at].extend(top)
            first = False
        return [self._found(*parts) for parts in zip(ids, searches, cached, strict=True)]

    def _found(self, prompt: list[int], search: BeamSearch, cached: int) -> BeamSearchOutput:
        from roofline.text.streaming.stops import TextStream

        answers = []
        for event, beam in zip(search.events("", len(prompt), cached), search.finished, strict=False):
            builder = AnswerBuilder(TextStream(self.tokenizer, (), at_start=False), event.logprobs is not None)
            builder.push(event)
            answers.append(BeamAnswer(**vars(builder.result()), score=beam.score))
        return BeamSearchOutput(prompt, answers)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Output:
        """Answer a conversation. Raises as `generate`, and ConfigError for a chat_template that is no Jinja.

        Args:
            adapter: as of `generate`.
            messages: mappings with "role" and "content": a text, or a list of parts {"type": "text", "text": ...}.
            chat_template: Jinja to use instead of the model's own chat template.
            variables: further variables of the chat template.
        """
        check_able(None, self.engine.gives_hidden, encoder=self.engine.encoder)
        for name in keywords.CHAT.keys() & variables.keys():
            if variables[name]:
                raise invalid(name, keywords.CHAT[name])
        template = self.chat_template if chat_template is None else self.chat_template.with_source(chat_template)
        ids = template.encode_chat(self.tokenizer, plain_messages(messages), **variables)
        return self._outputs([ids], [params or SamplingParams()], at_start=True, adapter=adapter)[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> Generator[str, None, None]:
        """Answer a prompt (string or ids) or a conversation (messages) in pieces of text.

        The request is submitted at the first `next`. Leaving the iterator early aborts it. Several streams may be
        read in turn; each step advances all of them. Raises as `generate`, and RequestError for n > 1 and
        for prompt_logprobs.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise invalid("n", f"{params.n}: a stream has one answer")
        if params.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "a stream is text alone; generate and chat tell them")
        chat = not isinstance(prompt, str | Mapping) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if chat:
            ids = self.chat_template.encode_chat(self.tokenizer, plain_messages(prompt))
        else:
            ids = self.encode(prompt)  # type: ignore[arg-type]
        return self.answers.stream(ids, params, at_start=chat, adapter=adapter or "")

    async def astream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, *, adapter: str | None = None
    ) -> AsyncGenerator[str, None]:
        """`stream` for asyncio programs: steps are taken in threads, each for the requests of all tasks.

        Leaving the iterator, or cancelling its task, aborts the request after the step that is under way.
        """
        import asyncio

        pieces = self.stream(prompt, params, adapter=adapter)
        piece: asyncio.Future[str | None] | None = None
        try:
            while True:
                piece = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
                text = await asyncio.shield(piece)
                if text is None:
                    return
                yield text
        finally:
            if piece is not None and not piece.done():  # a generator cannot be closed while a thread runs it
                await asyncio.wait([piece])
            await asyncio.to_thread(pieces.close)

    def load_adapter(self, path: str | Path) -> str:
        """Load a LoRA adapter, a folder of PEFT's files or a GGUF file, while others may be computed; what `adapter=`
        takes. The model must have been loaded with `max_adapters`.

        Raises ConfigError, UnsupportedError, CapacityError.
        """
        return self.answers.load_adapter(str(path))

    def unload_adapter(self, adapter: str) -> None:
        """Forget an adapter once the answers that are computed with it have ended."""
        self.answers.unload_adapter(adapter)

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        pooling: Literal["last", "mean", "first"] | None = None,
        dimensions: int | None = None,
        use_tqdm: bool = True,
    ) -> "list[np.ndarray]":
        """Vectors of length 1 for texts, by the hidden states that the model's head reads.

        Args:
            texts: one or several strings or lists of ids.
            pooling: of the last token, of the first, or the mean over all tokens; None: what the model's files say, or
                else the mean of an encoder and the last of other models.
            dimensions: keep so many numbers, scaled to length 1 again; None: all.

        Returns:
            float32 [dimensions or width] for each text, in order.

        Raises:
            RequestError, CapacityError: a text that cannot be computed; none is then.
            UnsupportedError: the backend gives no hidden states.
        """
        import numpy as np

        pooling = self.engine.pooling if pooling is None else pooling
        if pooling not in KINDS:
            raise invalid("pooling", f"{pooling!r} is none of {', '.join(KINDS)}")
        ids = [self.encode(text) for text in _prompt_list(texts)]
        vectors = self.answers.vectors(ids, Pooling(pooling), bar_for(len(ids)) if use_tqdm else None)
        return [np.array(embedding(vector, dimensions), np.float32) for vector in vectors]

    def score(
        self, query: str, documents: str | Sequence[str], *, instruction: str | None = None, use_tqdm: bool = True
    ) -> list[float]:
        """How well documents answer a query, 0 to 1: the probability of "yes" against "no" as the model's answer to
        that question; of an encoder model the cosine between their vectors, -1 to 1 (see `engine/relevance.py`).
        Raises as `generate`.

        Args:
            documents: one or several texts.
            instruction: what to look for; default: passages that answer the query. An encoder takes none.
        """
        listed = [documents] if isinstance(documents, str) else list(documents)
        for text in (query, *listed):
            if not isinstance(text, str):
                raise invalid("query" if text is query else "documents", f"{type(text).__name__} is no text")
        bar = bar_for(len(listed)) if use_tqdm else None
        if self.engine.encoder:
            check_instruction(instruction)
            vectors = self.answers.vectors([*map(self.encode, (query, *listed))], Pooling(self.engine.pooling), bar)
            return [cosine(vectors[0], vector) for vector in vectors[1:]]
        ids = [
            self.chat_template.encode_chat(self.tokenizer, pair_messages(query, document, instruction), **VARIABLES)
            for document in listed
        ]
        pooling = yes_or_no(self.tokenizer)
        return [probability(vector) for vector in self.answers.vectors(ids, pooling, bar)]

    def encode(self, prompt: Prompt, parse_special: bool = False) -> list[int]:
        """The ids of a prompt as `generate` sees it: with the model's own beginning, if it has one."""
        plain = _text_or_ids(prompt) if isinstance(prompt, Mapping) else prompt
        if isinstance(plain, str):
            return self.tokenizer.encode(plain, add_special=True, parse_special=parse_special)
        if isinstance(plain, bytes | bytearray) or not isinstance(plain, Iterable):
            raise invalid("prompt", f"{type(plain).__name__} is neither a string nor a list of token ids")
        return token_ids("prompt", plain)

    def stats(self) -> EngineStats:
        """The engine's counters since it was loaded. Raises RooflineError once the model is closed."""
        self.answers.check_open()
        return self.engine.stats()

    def close(self) -> None:
        """Free memory and threads. What other threads still wait for ends with an error; a second call does nothing."""
        self.answers.close()

    def _outputs(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        at_start: bool,
        bar: ProgressBar | None = None,
        adapter: str | None = None,
    ) -> list[Output]:
        pairs = zip(prompts, self.answers.run(prompts, params, at_start, bar, adapter or ""), strict=True)
        return [Output(**vars(answers[0]), prompt_ids=ids, answers=answers) for ids, answers in pairs]

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
