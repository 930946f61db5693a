"""Bodies of the OpenAI routes -> requests that will be answered. What becomes of fields that clients send along:

user, safety_identifier    honoured: the log names the request by them
name                       of a message: given to the chat template
store, metadata, service_tier, ...
                           taken at values that ask for nothing (schema.NEUTRAL_*), refused by name at others
anything unknown           refused by name
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from roofline.common.errors import RequestError
from roofline.engine.beams import BeamSearchParams, refuse_sampling
from roofline.engine.keywords import CONSTRAINT_NAMES
from roofline.engine.params import SamplingParams, check_logits
from roofline.engine.process.messages import Ready
from roofline.server.body import count_within, fields_of, invalid, refuse_unsupported, renamed, typed, within
from roofline.server.context import Context
from roofline.server.conversation import effort_variables, prompt_of
from roofline.server.forms import response_format
from roofline.server.generation import Generation, check_model, check_prompts, sampling_params
from roofline.server.keys import PRIORITIES
from roofline.server.limits import Limits
from roofline.server.receipts import with_receipt
from roofline.server.routes.openai.messages import conversation_of
from roofline.server.routes.openai.schema import (
    INSTEAD,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    NEUTRAL_MESSAGE,
    UNREADABLE,
    ChatBody,
    CompletionBody,
    Sampling,
    StreamOptions,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default on this route
SAMPLING_NAMES = Sampling.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()


def chat(raw: bytes, context: Context) -> Generation:
    """A body of /v1/chat/completions."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL_CHAT, INSTEAD)
    refuse_in_messages(fields)
    body = typed(ChatBody, fields)
    count_within("messages", len(body.messages), 1, context.limits.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    within("top_logprobs", body.top_logprobs, 0, context.limits.logprobs)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of the two")
    longest = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    loaded = _loaded(body, context)
    with renamed({"max_tokens": longest}):
        params = _params(body, context, getattr(body, longest), (body.top_logprobs or 0) if body.logprobs else None)
    room = None if body.truncate_prompt_tokens else loaded.max_model_len
    conversation = conversation_of(body, context.limits)
    effort = effort_variables("reasoning_effort", body.reasoning_effort, context.text)
    conversation = replace(conversation, variables={**effort, **conversation.variables})
    if params.constraint is not None and conversation.tools and conversation.tool_choice != "none":
        raise invalid(
            _form_field(body),
            "an answer with a form calls no tools; give tool_choice none, or leave one of the two out",
        )
    with renamed({"constraint": _form_field(body)}):
        prompt = prompt_of(conversation, context.text, room, params.constraint)
    if prompt.constraint is not None:
        params = replace(params, constraint=prompt.constraint)
    with renamed({"max_tokens": longest}):
        generation = _generation(body, [prompt.ids], params, loaded, context)
        beams = _beams(body, params, context, "n")
    shown, at_start = generation.shown | prompt.shown, not body.continue_final_message
    return replace(generation, parser=prompt.parser, shown=shown, at_start=at_start, beams=beams)


def completion(raw: bytes, context: Context) -> Generation:
    """A body of /v1/completions."""
    fields = fields_of(raw, context.limits)
    refuse_unsupported(fields, NEUTRAL_COMPLETION, INSTEAD)
    body = typed(CompletionBody, fields)
    within("logprobs", body.logprobs, 0, context.limits.logprobs)
    loaded = _loaded(body, context)
    most = max(COMPLETION_MAX_TOKENS, body.min_tokens or 0) if body.max_tokens is None else body.max_tokens
    params = _params(body, context, most, body.logprobs, least_answer=0)
    if most == 0 and body.receipt:
        raise invalid("receipt", "an answer of no tokens has none")
    best = _best(body, params, context.limits)
    if best is not None and body.best_of is not None:  # which of them are best is told by their log-probabilities
        params = replace(params, n=body.best_of, logprobs=params.logprobs or 0)
    echoes_logprobs = bool(body.echo) and body.logprobs is not None
    if echoes_logprobs:
        params = replace(params, prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0))
        if body.truncate_prompt_tokens:
            raise invalid("truncate_prompt_tokens", "cannot be combined with echo and logprobs, which tell the prompt")
    many = _prompts(body.prompt)
    count_within("prompt", len(many), 1, context.limits.prompts)
    beams = _beams(body, params, context, "n" if body.best_of is None else "best_of")
    within("n", len(many) * (params.n if beams is None else beams.beam_width), 1, context.limits.choices)
    room = None if body.truncate_prompt_tokens else loaded.max_model_len
    if body.parse_special and not any(isinstance(prompt, str) for prompt in many):
        raise invalid("parse_special", "is for prompts that are texts")
    ways = {"add_special": body.add_special_tokens is not False, "parse_special": bool(body.parse_special)}
    prompts = [context.text.encode(prompt, room, **ways) if isinstance(prompt, str) else prompt for prompt in many]
    if body.max_tokens is None:  # nobody asked for so many: a prompt that leaves room for fewer has those
        params = replace(params, max_tokens=_default_length(body, prompts, loaded))
        beams = beams and replace(beams, max_tokens=params.max_tokens)
    generation = _generation(body, prompts, params, loaded, context)
    told = _echo(many, prompts, generation.prompts, context) if body.echo else ()
    hides = body.logprobs is None
    return replace(generation, best=best, beams=beams, hides_logprobs=hides, echo=told, echoes_logprobs=echoes_logprobs)


def _default_length(body: CompletionBody, prompts: Sequence[Sequence[int]], loaded: Ready) -> int:
    """Tokens of the longest answer where the request does not say: OpenAI's, or what fits behind the longest prompt."""
    longest = max(map(len, prompts))
    if body.truncate_prompt_tokens:
        longest = min(longest, body.truncate_prompt_tokens)
    return max(1, body.min_tokens or 0, min(COMPLETION_MAX_TOKENS, loaded.max_model_len - longest))


def _echo(
    many: Sequence[str | Sequence[int]],
    prompts: Sequence[Sequence[int]],
    ends: Sequence[Sequence[int]],
    context: Context,
) -> tuple[str, ...]:
    """The text of each prompt as the model sees it: of one that is cut, what is left of it.

    many: the prompts as the body has them; prompts: their ids; ends: what is left of those.
    """
    return tuple(
        text if isinstance(text, str) and len(end) == len(ids) else context.text.decode(end)
        for text, ids, end in zip(many, prompts, ends, strict=True)
    )


def _best(body: CompletionBody, params: SamplingParams, limits: Limits) -> int | None:
    """How many of `best_of` answers are told; None: all that are computed."""
    within("best_of", body.best_of, 1, limits.n)
    if body.best_of is None or body.best_of == params.n:
        return None
    if body.best_of < params.n:
        raise invalid("best_of", f"{body.best_of} is less than n, {params.n}")
    if body.use_beam_search:
        return None
    if body.stream:
        raise invalid("best_of", "cannot be streamed: the best answer is known when all are complete")
    return params.n


def _beams(body: Sampling, params: SamplingParams, context: Context, width: str) -> BeamSearchParams | None:
    """The beam search that a body asks for. width: its field that says how many beams."""
    if not body.use_beam_search:
        for field, plain in (("length_penalty", 1), ("early_stopping", False)):
            if getattr(body, field) not in (None, plain):
                raise invalid(field, "needs use_beam_search to be true")
        return None
    if body.stream:
        raise invalid("use_beam_search", "cannot be streamed: the answers are known when the search is complete")
    if body.receipt:
        raise invalid("receipt", "an answer of a beam search has none")
    with renamed({"constraint": _form_field(body), "beam_width": width}):
        refuse_sampling(params)
        beams = BeamSearchParams(
            beam_width=getattr(body, width) or 1,
            n=params.n,
            max_tokens=params.max_tokens,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=body.early_stopping or False,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            logprobs=params.logprobs,
        )
        beams.ends(context.text.eos_ids)
        check_logits(replace(params, logprobs=0), context.generating().gives_logits)
    return beams


def _loaded(body: Sampling, context: Context) -> Ready:
    check_model(body.model, context)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream to be true")
    if body.return_progress and not body.stream:
        raise invalid("return_progress", "needs stream to be true")
    for field in ("user", "safety_identifier", "cache_salt"):
        if len(getattr(body, field) or "") > context.limits.user_characters:
            raise invalid(field, f"may have at most {context.limits.user_characters} characters")
    within("prompt_logprobs", body.prompt_logprobs, 0, context.limits.logprobs)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "cannot be streamed; a stream with echo and logprobs tells them")
    within("priority", body.priority, -PRIORITIES, PRIORITIES)
    return context.generating()


def _params(
    body: Sampling, context: Context, most: int | None, logprobs: int | None, least_answer: int = 1
) -> SamplingParams:
    form = response_format(body.response_format)
    other = next((name for name in CONSTRAINT_NAMES if getattr(body, name, None)), None)
    if form is not None and other is not None:
        raise invalid(other, "an answer has one form; response_format gives another")
    values = {name: getattr(body, name) for name in SAMPLING_NAMES}
    values |= {"max_tokens": most, "logprobs": logprobs, "constraint": form}
    values["prompt_progress"] = bool(body.return_progress)
    with renamed({"constraint": "response_format"}):
        return sampling_params(values, context.limits, least_answer)


def _form_field(body: Sampling) -> str:
    """The field that gives the answer's form."""
    names = ("response_format", *CONSTRAINT_NAMES)
    return next((name for name in names if getattr(body, name, None)), "tools")


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    return prompt


def refuse_in_messages(fields: Mapping[str, object]) -> None:
    """Take out fields of messages at values that ask for nothing. Raises RequestError for other values, and for parts
    that no model served here reads."""
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse_unsupported(message, NEUTRAL_MESSAGE, INSTEAD, f"messages.{i}.")
            content = message.get("content")
            for j, part in enumerate(content if isinstance(content, list) else ()):
                kind, field = part.get("type") if isinstance(part, dict) else None, f"messages.{i}.content.{j}.type"
                if isinstance(kind, str) and kind in UNREADABLE:
                    problem = f"{field}: the model reads text, and no parts of type {kind}."
                    raise RequestError(400, "unsupported_parameter", problem, param=field)


def _generation(
    body: Sampling, prompts: Sequence[Sequence[int]], params: SamplingParams, loaded: Ready, context: Context
) -> Generation:
    within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, 1 << 31)
    cut = [prompt[-body.truncate_prompt_tokens :] if body.truncate_prompt_tokens else prompt for prompt in prompts]
    cut_tokens = sum(map(len, prompts)) - sum(map(len, cut))
    if params.prompt_logprobs is not None:
        entries, most = sum(map(len, cut)) * (1 + params.prompt_logprobs), context.limits.prompt_logprobs
        if entries > most:
            what = f"{entries:,} log-probabilities of prompts, their tokens times alternatives and one"
            field = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
            raise invalid(field, f"{what}, are more than {most:,}; ask for fewer alternatives or send shorter prompts")
    prompts, options = cut, body.stream_options or StreamOptions()
    is_chat = isinstance(body, ChatBody)
    least = "min_tokens" if (body.min_tokens or 0) > 1 else ""
    longest = "max_tokens" if is_chat or body.max_tokens is not None else least
    check_prompts("messages" if is_chat else "prompt", prompts, params, loaded, longest)
    generation = Generation(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        params=params,
        model=check_model(body.model, context),
        fingerprint=context.adapters.fingerprint(loaded.fingerprint, body.model),
        adapter=context.adapters.named(body.model),
        stream=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        usage="none" if not options.include_usage else "every" if options.continuous_usage_stats else "last",
        shown=context.text.special_ids() if body.skip_special_tokens is False else frozenset(),
        include_stop=bool(body.include_stop_str_in_output),
        prompt_logprobs=body.prompt_logprobs,
        with_ids=bool(body.return_token_ids),
        cut_tokens=cut_tokens,
        form_field=_form_field(body),
        user=body.safety_identifier if body.safety_identifier is not None else body.user,
    )
    return with_receipt(generation, body.receipt or False, loaded)
