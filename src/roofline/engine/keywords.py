"""Keywords of `LLM` and `SamplingParams` as other engines call them: some are taken, the others named with ours."""

import json
from collections.abc import Callable, Container, Mapping, Sequence

from roofline.common.errors import RequestError
from roofline.engine.constraint import Constraint

# vLLM's and llama.cpp's name -> ours, where any value means the same.
_SAME = {
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "max_batch_tokens",
    "enable_prefix_caching": "prefix_cache",
    "max_loras": "max_adapters",
    "max_lora_rank": "max_adapter_rank",
    "n_ctx": "max_model_len",
    "n_threads": "threads",
}
# Name -> (values that ask for nothing here, what to do instead of another).
_OTHER: dict[str, tuple[tuple[object, ...], str]] = {
    "dtype": (("auto",), "the file says what its weights are in, and the backend what it computes in"),
    "torch_dtype": (("auto", None), "the file says what its weights are in, and the backend what it computes in"),
    "device_map": ((None,), "backend='gpu' computes on a GPU, device=... says on which, tensor_parallel=N on how many"),
    "load_in_8bit": ((False,), "the file says what its weights are in; give a GGUF file of 8-bit weights"),
    "load_in_4bit": ((False,), "the file says what its weights are in; give a GGUF file of 4-bit weights"),
    "quantization": ((None,), "the file says what its weights are in"),
    "load_format": (("auto",), "the file says what it is"),
    "gpu_memory_utilization": ((), "cache_tokens=N is the size of the cache"),
    "kv_cache_memory_bytes": ((None,), "cache_tokens=N is the size of the cache"),
    "swap_space": ((0,), "a sequence that loses its pages is computed again"),
    "cpu_offload_gb": ((0,), "offload=N leaves that many layers in the host's memory"),
    "n_gpu_layers": ((), "offload=N leaves that many layers in the host's memory"),
    "enforce_eager": ((False,), "graphs=False captures none"),
    "seed": ((None,), "give SamplingParams(seed=N)"),
    "tokenizer": ((None,), "the tokenizer is the one in the model's file or folder"),
    "tokenizer_mode": (("auto",), "there is one tokenizer for a model"),
    "trust_remote_code": ((False,), "no code of a model's repository is run"),
    "revision": ((None,), "hf:ORG/REPO is its main revision; give a folder for another"),
    "download_dir": ((None,), "set ROOFLINE_HOME"),
    "task": (("auto", "generate", "embed", "score"), "an LLM generates, embeds and scores"),
    "runner": (("auto", "generate", "pooling"), "an LLM generates, embeds and scores"),
    "block_size": ((None, 16), "a page has 16 tokens"),
    "chat_template": ((None,), "the template is the model's own; LLM.chat takes another"),
    "compilation_config": ((None,), "graphs=False captures no graphs, and nothing else is compiled at the start"),
    "data_parallel_size": ((1,), "`roofline serve --data-parallel N` has replicas"),
    "disable_custom_all_reduce": ((False,), "the exchange among ranks is chosen by what was measured"),
    "disable_log_stats": ((False, True), "nothing is logged of steps; LLM.stats has the counters"),
    "distributed_executor_backend": ((None, "mp"), "ranks are processes of this machine"),
    "enable_chunked_prefill": ((None, True), "long prompts are always computed in chunks, of max_batch_tokens at most"),
    "generation_config": (("vllm",), "recommended sampling of a model's files is not applied"),
    "guided_decoding_backend": (("auto", "guidance"), "llguidance holds answers to a form"),
    "hf_overrides": ((None, {}), "the configuration is the model's own"),
    "hf_token": ((None,), "set HF_TOKEN"),
    "long_prefill_token_threshold": ((0,), "long_prompt_tokens=N is what prompts of many steps have of each step"),
    "max_logprobs": ((20,), "a token has 20 alternatives at most"),
    "num_gpu_blocks_override": ((None,), "cache_tokens=N is the size of the cache"),
    "scheduling_policy": (("fcfs", "priority"), "requests are begun by priority, and of equal ones in order"),
    "skip_tokenizer_init": ((False,), "an LLM needs its tokenizer; LocalEngine works on ids alone"),
    "async_scheduling": (
        (None, True),
        "leave it out: where the backend queues its work, the next step is launched before the last is done",
    ),
    "convert": (("auto", "none", "embed"), "an LLM generates, embeds and scores"),
    "enable_lora_bias": ((False,), "an adapter with biases is refused"),
    "fully_sharded_loras": ((False,), "adapters are computed on one rank"),
    "limit_mm_per_prompt": ((None, {}, {"image": 0}, {"image": 0, "video": 0}), "models read text alone"),
    "lora_dtype": ((None, "auto"), "matrices of adapters are kept as float32"),
    "max_cpu_loras": ((None,), "max_adapters=N counts all adapters that are loaded"),
    "override_generation_config": ((None, {}), "each request gives its sampling"),
    "structured_outputs_config": (
        (None, {}, {"backend": "auto"}, {"backend": "guidance"}),
        "llguidance holds answers to a form",
    ),
    "speculative_config": ((None,), "give speculate='ngram' or 'mtp', or speculate='draft' with draft=MODEL"),
    "tokenizer_revision": ((None,), "the tokenizer is the one in the model's file or folder"),
}
# Flags of `vllm serve`, beside the names above -> ours, where any value means the same.
_SAME_SERVING = {
    "data_parallel_size": "data_parallel",
    "ssl_keyfile": "tls_key",
    "ssl_certfile": "tls_certificate",
    "enforce_eager": "no_graphs",
    "disable_uvicorn_access_log": "no_access_log",
}
_SHORT = {"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size", "-dp": "data_parallel_size"}
# Of options that have vLLM's name: its words for values -> ours.
_WORDS = {
    "kv_cache_dtype": {"bfloat16": "bf16", "float16": "f16", "fp8_e4m3": "fp8"},
    "tool_call_parser": {
        **{"llama3_json": "llama3", "llama4_json": "llama3", "llama4_pythonic": "pythonic"},
        **{"qwen3_coder": "xml", "qwen3_xml": "xml", "mimo": "xml", "step3p5": "xml"},
        **{"seed_oss": "seed_xml", "glm45": "glm", "glm47": "glm", "gemma4": "gemma", "minimax_m2": "minimax"},
        **{
            "kimi_k2": "kimi",
            "openai": "harmony",
            "deepseek_v32": "dsml",
            "deepseek_v4": "dsml_v4",
        },
    },
    "reasoning_parser": {"deepseek_r1": "think", "qwen3": "think", "glm45": "think", "minimax_m2": "think"},
}
# As `_OTHER`, of flags that only servers have. A flag whose values are true and false is a switch.
_OTHER_SERVING: dict[str, tuple[tuple[object, ...], str]] = {
    "allowed_origins": (([],), "--allow-origin https://chat.example.org allows one, and may be repeated"),
    "api_server_count": ((1,), "one process speaks HTTP; --data-parallel has more engines behind it"),
    "chat_template": (
        (None,),
        "the template is the model's own; /v1/completions takes a rendered prompt, with parse_special",
    ),
    "chat_template_content_format": (("auto", "string"), "parts of a message are joined to one text"),
    "disable_fastapi_docs": ((False, True), "there is no such page; /openapi.json has the routes"),
    "disable_frontend_multiprocessing": ((False,), "the engine is always a process of its own"),
    "disable_log_requests": ((False, True), "no line of the log has text of prompts"),
    "enable_auto_tool_choice": ((True,), "tools are called where the request has them; tool_choice none ends that"),
    "enable_log_requests": ((False,), "no line of the log has text of prompts; --access-log has a line a request"),
    "enable_prompt_tokens_details": ((True, False), "the usage always has them"),
    "max_log_len": ((None,), "no line of the log has text of prompts"),
    "root_path": (("",), "let the proxy take its path off requests"),
    "seed": ((None,), "each request gives its seed, or gets a fresh one"),
    "ssl_ca_certs": ((None,), "clients are known by keys, not by certificates"),
    "ssl_cert_reqs": ((0,), "clients are known by keys, not by certificates"),
    "uvicorn_log_level": (("info",), "set ROOFLINE_LOG"),
}


_NO_BEAMS = "give LLM.beam_search a BeamSearchParams; SamplingParams(temperature=0) takes the most likely token"
_NO_SPECIAL = "leave it out: special tokens are never in an answer's text, its ids have them"
# What a `SamplingParams` elsewhere has and ours has not -> what to do instead.
SAMPLING = {
    "max_new_tokens": "give max_tokens=N",
    "do_sample": "temperature=0 takes the most likely token, a higher one samples",
    "best_of": "give n=N, and choose among the answers",
    "use_beam_search": _NO_BEAMS,
    "num_beams": _NO_BEAMS,
    "beam_width": _NO_BEAMS,
    "length_penalty": _NO_BEAMS,
    "early_stopping": _NO_BEAMS,
    "response_format": "give constraint=Constraint.of_json_schema(schema), or Constraint.of_json()",
    "skip_special_tokens": _NO_SPECIAL,
    "spaces_between_special_tokens": _NO_SPECIAL,
    "include_stop_str_in_output": "a stop string is never part of an answer",
    "detokenize": "leave it out: an answer has its text and its ids",
    "logits_processors": "logit_bias={id: value} changes the logits of single ids",
    "bad_words": "logit_bias={id: -100} keeps a token out of the answer",
    "allowed_token_ids": "logit_bias={id: value} changes the logits of single ids",
    "truncate_prompt_tokens": "a prompt is never cut; shorten it before",
    "eos_token_id": "give stop_token_ids=[id]",
    "flat_logprobs": "leave it out: log-probabilities come as TokenLogprob",
    "output_kind": "LLM.stream gives an answer in pieces",
    "extra_args": "there is no plugin that would read them",
    "skip_reading_prefix_cache": "prefix_cache=False of the LLM reads none",
}
# What `LLM.chat` elsewhere takes, and no template reads -> what to do instead.
CHAT = {
    "chat_template_kwargs": "give each variable of the template as a keyword of its own",
    "continue_final_message": "an answer is a message of its own; give generate a text to go on from",
}
# vLLM's names of `constraint`, of which the first two hold the others' fields.
CONSTRAINT_NAMES = (
    *("structured_outputs", "guided_decoding"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)


def ours(options: Mapping[str, object]) -> dict[str, object]:
    """Keywords under our names. Raises TypeError for another engine's that cannot be honoured, naming what can."""
    result: dict[str, object] = {}
    for name, value in options.items():
        if name in _OTHER:
            neutral, instead = _OTHER[name]
            if not any(type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral):
                raise TypeError(f"LLM has no option {name!r}: {instead}")
            continue
        if name == "enable_lora":
            if not isinstance(value, bool):
                raise TypeError(f"enable_lora={value!r} is neither True nor False; max_adapters=N has N adapters")
            continue
        target = _SAME.get(name, name)
        if target in result:
            other = name if name != target else next(option for option in options if _SAME.get(option) == target)
            raise TypeError(
                f"LLM has one option {target!r} of which {other!r} is another name: leave one of the two out"
            )
        result[target] = value
    if options.get("enable_lora"):
        result.setdefault("max_adapters", 1)  # vLLM's default of max_loras
    return result


def own_words(words: Sequence[str], flags: Container[str]) -> list[str]:
    """The words of a call of `roofline serve`, with vLLM's flags as ours and without those that ask for nothing.

    flags: ours. Raises ValueError for a flag of vLLM's that cannot be honoured, with what can.
    """
    result: list[str] = []
    remaining = _with_adapters(words)
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            return [*result, word, *remaining]
        flag, equals, text = word.partition("=")
        name = _SHORT.get(flag) or (flag[2:].replace("-", "_") if flag.startswith("--") else "")
        negated = name.startswith("no_")
        plain = name.removeprefix("no_")
        target = _SAME_SERVING.get(plain) or _SAME.get(plain)
        foreign = _OTHER_SERVING.get(plain) or _OTHER.get(plain)
        if name == "model":  # vLLM's older way to name it
            result += [text] if equals else remaining[:1]
            remaining = remaining if equals else remaining[1:]
        elif name in _WORDS and (equals or remaining):
            text = text if equals else remaining.pop(0)
            result.append(f"{flag}={_WORDS[name].get(text, text)}")
        elif flag in flags or not (target or foreign):
            result.append(word)
        elif target:
            ours = "--" + target.replace("_", "-")
            if negated:
                ours = "--" + ours.removeprefix("--no-") if ours.startswith("--no-") else f"--no-{ours[2:]}"
            result.append(ours + equals + text)
        else:
            assert foreign is not None, "one of the two tables has it"
            _check_neutral(flag, foreign, not negated if _is_switch(foreign) else _value(equals, text, remaining))
    return result


def _with_adapters(words: Sequence[str]) -> list[str]:
    """The words with vLLM's --enable-lora and --lora-modules as ours. Raises ValueError for what names no adapter."""
    end = words.index("--") if "--" in words else len(words)
    rest, result, enabled = list(words[:end]), list[str](), False
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        name = flag.replace("_", "-")
        if name in ("--enable-lora", "--no-enable-lora") and not equals:
            enabled = name == "--enable-lora"
        elif name == "--lora-modules":
            modules = [text] if equals else []
            while rest and rest[0][:1] != "-" and ("=" in rest[0] or rest[0][:1] == "{"):
                modules.append(rest.pop(0))
            if not modules:
                raise ValueError(f"{flag} needs a value: give NAME=PATH, or --adapter NAME=PATH")
            result += [f"--adapter={_module(flag, module)}" for module in modules]
        else:
            result.append(word)
    names = {word.partition("=")[0].replace("_", "-") for word in result}
    if enabled and not names & {"--adapter", "--max-adapters", "--max-loras"}:
        result.append("--max-adapters=1")  # vLLM's default of --max-loras
    return [*result, *words[end:]]


def _module(flag: str, module: str) -> str:
    """NAME=PATH of an adapter that may be written as vLLM's JSON object."""
    if not module.startswith("{"):
        return module
    try:
        fields = json.loads(module)
    except ValueError:
        fields = {}
    name, path = fields.pop("name", None), fields.pop("path", None)
    if not isinstance(name, str) or not isinstance(path, str) or any(value is not None for value in fields.values()):
        raise ValueError(f"{flag}: give NAME=PATH, or an object of name and path and nothing else")
    return f"{name}={path}"


def _is_switch(foreign: tuple[tuple[object, ...], str]) -> bool:
    values = [value for value in foreign[0] if value is not None]
    return bool(values) and all(isinstance(value, bool) for value in values)


def _value(equals: str, text: str, rest: list[str]) -> object:
    """The value of a flag: what stands behind its =, or the next word, as JSON where it is some."""
    if not equals:
        text = rest.pop(0) if rest else ""
    try:
        return json.loads({"None": "null"}.get(text, text))
    except ValueError:
        return text


def _check_neutral(flag: str, foreign: tuple[tuple[object, ...], str], value: object) -> None:
    neutral, instead = foreign
    if not any(type(value) is type(neutral_value) and value == neutral_value for neutral_value in neutral):
        raise ValueError(f"there is no option {flag}: {instead}")


def constraint_of(constraint: Constraint | None, names: Mapping[str, object]) -> Constraint | None:
    """The one form that a request asks for, by ours or by one of vLLM's names. Raises RequestError for more than one.

    `structured_outputs` and `guided_decoding` are mappings or objects with `json`, `regex`, `choice`, `grammar` and
    `json_object`; their further fields are refused unless they ask for nothing.
    """
    forms = [] if constraint is None else [("constraint", constraint)]
    if constraint is not None and not isinstance(constraint, Constraint):
        raise _refused(
            "constraint", f"{type(constraint).__name__} is no Constraint; Constraint.of_json_schema makes one"
        )
    for name, value in names.items():
        if value is None:
            continue
        if name.startswith("guided_") and name != "guided_decoding":
            forms.append((name, _form(name, name.removeprefix("guided_"), value)))
        else:
            fields = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
            if fields is None:
                raise _refused(name, "is neither a mapping nor an object with fields")
            forms += [
                (name, _form(name, field, constraint))
                for field, constraint in fields.items()
                if constraint not in (None, False)
            ]
    if len(forms) > 1:
        raise _refused(forms[1][0], f"an answer has one form; {forms[0][0]} gives another")
    return forms[0][1] if forms else None


def _form(name: str, field: str, value: object) -> Constraint:
    makers: dict[str, Callable[..., Constraint]] = {
        "json": Constraint.of_json_schema,
        "regex": Constraint.of_regex,
        "choice": Constraint.of_choice,
        "grammar": Constraint.of_lark,
        "json_object": lambda _: Constraint.of_json(),
    }
    if field not in makers:
        raise _refused(name, f"{field} is not supported; {', '.join(makers)} are")
    if hasattr(value, "model_json_schema"):  # a class of pydantic's, which vLLM takes too
        value = value.model_json_schema()
    try:
        return makers[field](value)
    except RequestError as error:
        raise _refused(name, error.message.partition(": ")[2]) from None


def _refused(name: str, problem: str) -> RequestError:
    return RequestError(400, "invalid_value", f"{name}: {problem}", param=name)
