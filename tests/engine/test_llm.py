"""LLM and ChatModule over the toy executable: text, stop strings, streams, Ctrl-C."""

import copy
import io
import json
import pickle
import re
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from engine_fakes import FakeTokenizer, check_pages, loaded_text

from roofline import LLM, BeamSearchParams, ChatModule, SamplingParams
from roofline.callback import StreamToStdout
from roofline.common.errors import CapacityError, RequestError, RooflineError
from roofline.engine.answers import deferred
from roofline.engine.config import EngineConfig
from roofline.engine.conversation import plain_messages
from roofline.engine.keywords import ours, own_words
from roofline.engine.local import LocalEngine

# Without the special id 49, a character of text is an id.
GREEDY = SamplingParams(temperature=0, max_tokens=40, seed=0, logit_bias={49: -100})
TOKENIZER = FakeTokenizer()


@pytest.fixture
def llm():
    model = loaded_text()
    model.executable.clock = SimpleNamespace(now=lambda: 0.0)  # two answers then differ in nothing but what they are
    return LLM(model)


def idle(llm):
    """Nothing is left over: no request, no page, no open answer."""
    while llm.engine.has_work:
        llm.engine.step()
    assert not llm.answers._open
    assert llm.stats().pages_used == llm.stats().running == llm.stats().waiting == 0
    check_pages(llm.engine.state.cache, [])
    return True


def test_text_and_ids_are_those_of_the_engine_in_the_order_of_the_prompts(llm):
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=5 + i) for i in range(6)]
    prompts = ["hello" * (i + 1) for i in range(6)]
    outputs = llm.generate(prompts, params)
    engine = LocalEngine(loaded_text().executable, EngineConfig(scheduler="naive", cache="naive"))
    for i, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        assert output.prompt_ids == TOKENIZER.encode(prompt, add_special=True)
        engine.submit(output.prompt_ids, params[i], eos_ids=(49,))
        ids = []
        while engine.has_work:
            ids += [token for event in engine.step() for token in event.ids]
        assert output.ids == ids
        assert output.text == TOKENIZER.decode(ids)
        assert output.usage.completion_tokens == len(ids)
        assert output.usage.seed == i
    assert idle(llm)


def test_one_prompt_of_either_kind_gives_a_list_of_one(llm):
    (text,) = llm.generate("abc", GREEDY)
    (ids,) = llm.generate([0, 0, 1, 2], GREEDY)
    assert text.answers == ids.answers
    assert [o.ids for o in llm.generate([[0, 0, 1, 2], "abc"], GREEDY)] == [text.ids] * 2
    assert llm.generate([], GREEDY) == []


def test_n_answers_and_logprobs(llm):
    (output,) = llm.generate("abc", SamplingParams(n=3, seed=1, max_tokens=8, logprobs=2, ignore_eos=True))
    assert len({tuple(answer.ids) for answer in output.answers}) == 3
    for answer in output.answers:
        assert [entry.id for entry in answer.logprobs] == answer.ids
    assert output.logprobs is output.answers[0].logprobs


def test_a_stop_id_counts_but_is_no_text(llm):
    plain = llm.generate("abc", GREEDY)[0]
    stop = plain.ids[6]
    output = llm.generate("abc", replace(GREEDY, stop_token_ids=(stop,)))[0]
    at = plain.ids.index(stop)
    assert output.ids == plain.ids[: at + 1]
    assert output.text == TOKENIZER.decode(plain.ids[:at])
    assert (output.finish_reason, output.answers[0].stop) == ("stop", stop)


def test_a_stop_string_ends_text_ids_and_bill_and_frees_the_engine(llm):
    plain = llm.generate("abc", GREEDY)[0]
    stop = plain.text[10:13]
    params = replace(GREEDY, stop=("never met", stop), logprobs=0)
    output = llm.generate("abc", params)[0]
    at = plain.text.index(stop)
    assert output.text == plain.text[:at]
    assert output.ids == plain.ids[: at + 3]
    assert len(output.logprobs) == at + 3
    assert (output.finish_reason, output.answers[0].stop) == ("stop", stop)
    assert output.usage.completion_tokens == at + 3
    assert output.usage.prompt_tokens == 4
    assert idle(llm)
    deltas = list(llm.stream("abc", params))
    assert "".join(deltas) == plain.text[:at], "nothing of the stop string leaks"
    assert idle(llm)


def test_a_stream_gives_the_same_text_piece_by_piece(llm):
    deltas = list(llm.stream("abc", GREEDY))
    assert len(deltas) > 10
    assert "".join(deltas) == llm.generate("abc", GREEDY)[0].text


def test_streams_can_be_read_in_turn_and_left_early(llm):
    expected = [llm.generate(p, GREEDY)[0].text for p in ("abc", "xyz")]
    streams = [llm.stream(p, GREEDY) for p in ("abc", "xyz")]
    texts = ["", ""]
    for _ in range(50):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == expected
    left = llm.stream("abc", GREEDY)
    next(left)
    assert llm.stats().pages_used > 0
    left.close()
    assert not llm.engine.has_work, "it was aborted, and its last event taken"
    assert idle(llm)


def test_what_cannot_be_computed_is_refused_before_anything_is(llm):
    with pytest.raises(CapacityError):
        llm.generate(["abc", "a" * 600], GREEDY)
    with pytest.raises(RequestError, match="2 for 1"):
        llm.generate("abc", [GREEDY, GREEDY])
    with pytest.raises(RequestError) as caught:
        llm.stream("abc", SamplingParams(n=2))
    assert caught.value.param == "n"
    assert llm.model.executable.forwards == 0
    assert idle(llm)


def test_chat_renders_the_template_and_passes_its_variables(llm):
    messages = [{"role": "user", "content": "hi"}]
    output = llm.chat(messages, GREEDY)
    assert output.prompt_ids == TOKENIZER.encode("UhiA", add_special=False)
    assert "".join(llm.stream(messages, GREEDY)) == output.text
    assert llm.chat(messages, GREEDY, end="B").prompt_ids == TOKENIZER.encode("UhiB", add_special=False)
    with pytest.raises(RequestError, match="chat_template_kwargs: give each variable of the template as a keyword"):
        llm.chat(messages, GREEDY, chat_template_kwargs={"end": "B"})
    assert llm.chat(messages, GREEDY, continue_final_message=False) == output


def test_an_error_of_the_engine_is_raised_and_the_next_call_works(llm):
    expected = llm.generate("abc", GREEDY)[0].text
    llm.model.executable.fail_at = {llm.model.executable.forwards + 3}
    with pytest.raises(RooflineError, match="told to fail"):
        llm.generate("abc", GREEDY)
    assert idle(llm)
    llm.model.executable.fail_at = {llm.model.executable.forwards + 3}
    with pytest.raises(RooflineError, match="told to fail"):
        list(llm.stream("abc", GREEDY))
    assert llm.generate("abc", GREEDY)[0].text == expected


def interrupt_at(llm, forward):
    def press(executable):
        if executable.forwards == forward:
            signal.raise_signal(signal.SIGINT)

    llm.model.executable.before_forward = press


def test_ctrl_c_aborts_cleanly_and_leaves_the_engine_usable(llm):
    expected = llm.generate(["abc", "xyz"], GREEDY)
    interrupt_at(llm, llm.model.executable.forwards + 5)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"], GREEDY)
    assert idle(llm)
    assert [o.answers[0].ids for o in llm.generate(["abc", "xyz"], GREEDY)] == [o.ids for o in expected]


def test_ctrl_c_is_held_back_within_a_step_and_goes_to_the_handler_that_was_there():
    seen = []
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append("handled"))
    try:
        with deferred():
            signal.raise_signal(signal.SIGINT)
            assert not seen
        assert seen == ["handled"]
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_ctrl_c_that_is_ignored_or_ends_the_process_is_not_held_back(handler):
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with deferred():
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_options_go_where_they_belong():
    llm = LLM(loaded_text(), prefix_cache=False, max_model_len=100)
    assert llm.engine.config.prefix_cache is False
    assert llm.engine.limits.max_model_len == 100
    with pytest.raises(TypeError, match="threads"):
        LLM(loaded_text(), threads=2)
    with LLM(loaded_text()) as llm:
        executable = llm.model.executable
    assert executable.closed


def test_the_chat_module_keeps_its_history_until_reset(llm):
    chat = ChatModule(llm)
    first = chat.generate("hi", GREEDY)
    second = chat.generate("more", GREEDY)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "more"},
    ]
    assert second == llm.chat(history, GREEDY).text
    interrupt_at(llm, llm.model.executable.forwards + 3)
    with pytest.raises(KeyboardInterrupt):
        chat.generate("again", GREEDY)
    assert chat.messages == [*history, {"role": "assistant", "content": second}]
    chat.reset_chat()
    assert chat.generate("hi", GREEDY) == first


def test_the_chat_module_benchmarks_a_fixed_length(llm):
    chat = ChatModule(llm)
    output = chat.benchmark_generate("Hi", generate_length=64)
    assert chat.messages == []
    figures = chat.figures()
    assert (figures.generated_tokens, figures.prefill_tokens, figures.decode_tokens) == (64, 3, 63)
    assert output == llm.generate("Hi", SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))[0].text
    chat.benchmark_generate("Hi", generate_length=8)
    assert chat.figures().decode_tokens == 7, "each run is measured by itself"
    assert re.fullmatch(r"prefill: \d+\.\d tok/s, decode: \d+\.\d tok/s", chat.stats())


def test_the_chat_module_answers_as_mlc_s_sample_calls_it(llm, capsys):
    """The sample of `mlc_chat.ChatModule` with its two names imported from here, and the calls that it gets."""
    cm = ChatModule(model=llm)
    output = cm.generate(prompt="hi", params=GREEDY, progress_callback=StreamToStdout(callback_interval=2))
    assert capsys.readouterr().out == f"{output}\n"
    assert output == llm.chat([{"role": "user", "content": "hi"}], GREEDY).text
    print(f"Statistics: {cm.stats()}\n")
    again = cm.generate("more", GREEDY, StreamToStdout())
    assert [message["content"] for message in cm.messages] == ["hi", output, "more", again]
    assert capsys.readouterr().out.endswith(f"\n{again}\n")

    calls = []

    class Calls:
        callback_interval = 3

        def __call__(self, message="", stopped=False):
            calls.append("end" if stopped else message)

    pieces = list(llm.stream([{"role": "user", "content": "hi"}], GREEDY))
    cm.reset_chat()
    assert cm.generate("hi", GREEDY, progress_callback=Calls()) == output
    told = sorted({*range(0, len(pieces), 3), len(pieces) - 1})
    assert calls == [*("".join(pieces[: last + 1]) for last in told), "end"], "the answer so far, as MLC tells it"
    with pytest.raises(RequestError, match="callback_interval is None"):
        cm.generate("hi", GREEDY, progress_callback=print)
    interrupt_at(llm, llm.model.executable.forwards + 3)
    with pytest.raises(KeyboardInterrupt):
        cm.generate("again", GREEDY, progress_callback=Calls())
    assert calls[-1] == "end", "the next answer begins anew"
    assert len(cm.messages) == 2


def test_verbose_figures_have_tokens_and_seconds(llm):
    chat = ChatModule(llm)
    chat.benchmark_generate("Hi", generate_length=8)
    lines = chat.stats(verbose=True).splitlines()
    assert [line.strip("- ") for line in lines[::4]] == ["prefill", "decode"]
    assert [line.partition(": ")[0] for line in lines[1:4]] == ["throughput", "total tokens", "total time"]
    assert (lines[2], lines[6]) == ("total tokens: 3 tok", "total tokens: 7 tok")


def test_parameters_as_people_of_other_engines_write_them():
    params = SamplingParams(
        top_k=-1, stop=None, temperature=np.float32(0.5), max_tokens=np.int64(3), seed=np.uint64(2**60), n=np.int8(2)
    )
    assert (params.top_k, params.stop, params.temperature, params.max_tokens) == (0, (), 0.5, 3)
    assert (params.seed, params.n) == (2**60, 2)
    assert {type(value) for value in (params.top_k, params.max_tokens, params.seed, params.n)} == {int}
    assert type(params.temperature) is float
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams(temperature=np.array([0.5, 0.6]))


def test_prompts_of_every_kind_that_is_one(llm):
    (wanted,) = llm.generate([0, 0, 1, 2], GREEDY)
    for prompts in (np.array([0, 0, 1, 2]), [np.array([0, 0, 1, 2])], ([0, 0, 1, 2],), iter([[0, 0, 1, 2]])):
        (output,) = llm.generate(prompts, GREEDY)
        assert output.ids == wanted.ids
    assert len(llm.generate(np.zeros((3, 4), int), GREEDY)) == 3
    for prompt in (b"abc", [b"abc"], bytearray(b"a"), None, 5, [1.5]):
        with pytest.raises(RequestError, match="is neither a string nor a list of token ids"):
            llm.generate(prompt, GREEDY)
    with pytest.raises(RequestError, match=r"give SamplingParams\(\*\*params\)"):
        llm.generate("abc", {"max_tokens": 2})
    assert idle(llm)


def test_prompts_may_be_mappings_as_vllm_has_them(llm):
    (text,), (ids,) = llm.generate("abc", GREEDY), llm.generate([0, 0, 1, 2], GREEDY)
    several = llm.generate([{"prompt": "abc"}, {"prompt_token_ids": [0, 0, 1, 2], "prompt": "told along"}], GREEDY)
    assert [each.ids for each in several] == [text.ids, ids.ids]
    (output,) = llm.generate({"prompt": "abc", "cache_salt": None}, GREEDY)
    assert output.ids == text.ids
    assert "".join(llm.stream({"prompt": "abc"}, GREEDY)) == text.text
    (output,) = llm.beam_search([{"prompt": "abc"}], BeamSearchParams(beam_width=2, max_tokens=2))
    assert output.prompt_ids == text.prompt_ids
    for wrong in ({}, {"text": "abc"}, {"prompt": "abc", "multi_modal_data": {"image": 1}}, {"prompt": {"prompt": ""}}):
        with pytest.raises(RequestError, match=r"prompt: a mapping with .*; give {'prompt': TEXT}"):
            llm.generate([wrong], GREEDY)
    with pytest.raises(RequestError, match="int is neither a string nor a list of token ids"):
        llm.generate({"prompt": 5}, GREEDY)
    assert idle(llm)


def test_an_error_in_a_batch_names_the_prompt(llm):
    with pytest.raises(RequestError, match=r"prompt 2 of 3: prompt: id 999 is not in the vocabulary") as refused:
        llm.generate(["abc", [999], "abc"], GREEDY)
    assert not llm.engine.has_work, "the prompt before it is aborted, before any step"
    assert refused.value.param == "prompt"
    with pytest.raises(CapacityError, match=r"prompt 3 of 3: A prompt of .* tokens"):
        llm.generate(["abc", "abc", [0] * 100_000], GREEDY)
    with pytest.raises(RequestError, match=r"^prompt: id 999"):
        llm.generate([999], GREEDY)
    assert idle(llm)


def test_contents_may_be_parts_of_text(llm):
    plain = [{"role": "user", "content": "abc"}]
    typed = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert plain_messages([{"role": "user", "content": parts}]) == [{"role": "user", "content": "ab\nc"}]
    assert llm.chat(typed, GREEDY) == llm.chat(plain, GREEDY)
    assert "".join(llm.stream(typed, GREEDY)) == llm.chat(plain, GREEDY).text
    image = [*plain, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    for wrong, message in (
        (image, r"messages\[1\]\.content: a part of type 'image_url' is not supported; give text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\.content: a part has no text"),
        ("hello", r"messages: str is no list of messages; give \[\{.*or a prompt to generate"),
        ([], "messages: the list is empty"),
        ([{"content": "x"}], r"messages\[0\]\.role is missing; choose one of assistant, "),
        ([{"role": "user"}], r"messages\[0\]\.content is missing"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content is the number 5; give text"),
        (
            [{"role": "user", "content": "x"}, {"role": "users", "content": "x"}],
            r"messages\[1\]\.role is the string 'users'",
        ),
        (["hello"], r"messages\[0\]: str has no role and content"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.chat(wrong, GREEDY)


def test_a_wrong_keyword_is_named_with_the_nearest_or_with_ours():
    for call, message in (
        (lambda: SamplingParams(temprature=1), "SamplingParams has no option 'temprature'; did you mean 'temperature'"),
        (lambda: EngineConfig(max_run=1), "EngineConfig has no option 'max_run'; did you mean 'max_running'"),
        (lambda: LLM("x", max_modellen=3), "LLM has no option 'max_modellen'; did you mean 'max_model_len'"),
        (lambda: LLM("x", gpu_memory_utilization=0.9), "'gpu_memory_utilization': cache_tokens=N is the size"),
        (lambda: LLM("x", seed=0), r"'seed': give SamplingParams\(seed=N\)"),
        (lambda: LLM("x", swap_space=False), "'swap_space'"),  # equal to 0, and not the same
        (lambda: LLM("x", n_ctx=8, max_model_len=8), "'max_model_len' of which 'n_ctx' is another name"),
        (lambda: LLM("x", max_running=5, max_num_seqs=4), "'max_running' of which 'max_num_seqs' is another name"),
        (lambda: LLM("x", max_num_seqs=4, max_running=5), "'max_running' of which 'max_num_seqs' is another name"),
        (lambda: LLM("x", torch_dtype="float16"), "'torch_dtype': the file says what its weights are in"),
        (lambda: LLM("x", device_map="auto"), "'device_map': backend='gpu' computes on a GPU"),
        (lambda: SamplingParams(best_of=3), "SamplingParams has no option 'best_of': give n=N"),
        (lambda: SamplingParams(response_format={}), "'response_format': give constraint=Constraint.of_json_schema"),
        (lambda: SamplingParams(use_beam_search=True), "'use_beam_search': give LLM.beam_search"),
        (lambda: SamplingParams(skip_special_tokens=True), "'skip_special_tokens': leave it out"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    params = SamplingParams(temperature=0.5)
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_names_of_other_engines_that_mean_the_same_are_taken():
    theirs = {"max_num_seqs": 2, "enable_prefix_caching": False, "dtype": "auto", "seed": None, "max_model_len": 32}
    with LLM(loaded_text(), **theirs) as llm:
        assert llm.engine.limits.sequences == 2
        assert llm.engine.limits.max_model_len == 32
        assert not llm.engine.config.prefix_cache


# Keywords of other engines -> the values that ask for nothing here, and some that do.
NEUTRAL = {
    "load_in_8bit": ([False], [True, 0]),
    "load_in_4bit": ([False], [True, None]),
    "enforce_eager": ([False], [True]),
    "data_parallel_size": ([1], [0, 2, True]),
    "disable_custom_all_reduce": ([False], [True]),
    "disable_log_stats": ([False, True], [None]),
    "skip_tokenizer_init": ([False], [True]),
    "trust_remote_code": ([False], [True]),
    "enable_lora_bias": ([False], [True]),
    "fully_sharded_loras": ([False], [True]),
    "enable_chunked_prefill": ([None, True], [False]),
    "async_scheduling": ([None, True], [False]),
    "swap_space": ([0], [1, 4]),
    "cpu_offload_gb": ([0], [1]),
    "block_size": ([None, 16], [15, 17, 32]),
    "max_logprobs": ([20], [19, 21]),
    "limit_mm_per_prompt": (
        [None, {}, {"image": 0}, {"image": 0, "video": 0}],
        [{"image": 1}, {"image": 1, "video": 0}, {"image": 0, "video": 1}],
    ),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_keywords_of_other_engines_are_taken_where_they_ask_for_nothing(name):
    nothing, something = NEUTRAL[name]
    for value in nothing:
        assert ours({name: value}) == {}
    for value in something:
        with pytest.raises(TypeError, match=f"LLM has no option '{name}': "):
            ours({name: value})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "m", "--port", "1"], ["m", "--port", "1"]),
        (["--model=m", "--port", "1"], ["m", "--port", "1"]),
        (["--model"], []),
        (["--dtype", "auto", "m"], ["m"]),
        (["--dtype=auto", "m"], ["m"]),
        (["--disable-log-requests", "--no-trust-remote-code", "m"], ["m"]),
        (["--tool-call-parser", "llama3_json", "m"], ["--tool-call-parser=llama3", "m"]),
        (["--tool-call-parser=llama3_json", "m"], ["--tool-call-parser=llama3", "m"]),
        (["--tool-call-parser", "qwen3_coder", "m"], ["--tool-call-parser=xml", "m"]),
        (["--tool-call-parser", "glm47", "m"], ["--tool-call-parser=glm", "m"]),
        (["--tool-call-parser=hermes"], ["--tool-call-parser=hermes"]),
        (["--tool-call-parser"], ["--tool-call-parser"]),
        (["--enforce-eager"], ["--no-graphs"]),
        (["--no-enforce-eager"], ["--graphs"]),
        (["--no-enable-prefix-caching"], ["--no-prefix-cache"]),
        (["--lora-modules", '{"name":"a","path":"x"}', "m"], ["--adapter=a=x", "m"]),
        (["--lora-modules", '{"name":"a","path":"x","base":null}'], ["--adapter=a=x"]),
        (["--lora-modules", "a=x", "-p", "b=y"], ["--adapter=a=x", "-p", "b=y"]),
        (["--lora-modules", "a=x", "--p=q", "m"], ["--adapter=a=x", "--p=q", "m"]),
        (["--lora-modules", "a=x", "-p=q"], ["--adapter=a=x", "-p=q"]),
    ],
)
def test_words_of_vllms_take_so_many_others_with_them(words, expected):
    assert own_words(words, {"--adapter", "--port", "--p"}) == expected


@pytest.mark.parametrize("words", [["--dtype", "half"], ["--trust-remote-code"], ["--no-enable-auto-tool-choice"]])
def test_flags_of_vllms_that_ask_for_something_else_are_refused(words):
    with pytest.raises(ValueError, match=f"there is no option {words[0]}: "):
        own_words(words, set())


@pytest.mark.parametrize(
    "module", [{"name": "a"}, {"path": "x"}, {"name": 1, "path": "x"}, {"name": "a", "path": 1}, {}]
)
def test_a_module_has_a_name_and_a_path(module):
    with pytest.raises(ValueError, match="give NAME=PATH, or an object of name and path and nothing else"):
        own_words([f"--lora-modules={json.dumps(module)}"], {"--adapter"})


def test_vllms_keywords_for_adapters_make_places_for_them():
    assert ours({"enable_lora": True}) == {"max_adapters": 1}
    assert ours({"max_loras": 4, "enable_lora": True, "max_lora_rank": 8}) == {"max_adapters": 4, "max_adapter_rank": 8}
    assert ours({"enable_lora": False}) == {}
    with pytest.raises(TypeError, match="enable_lora=1 is neither True nor False"):
        ours({"enable_lora": 1})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("m", "m"),
        ("m --enable-lora", "m --max-adapters=1"),
        ("m --enable-lora --no-enable-lora", "m"),
        ("m --enable-lora --max-loras 3", "m --max-adapters 3"),
        ("m --enable-lora --lora-modules a=x b=y", "m --adapter=a=x --adapter=b=y"),
        ('m --lora-modules={"name":"a","path":"x"}', "m --adapter=a=x"),
    ],
)
def test_vllms_flags_for_adapters_make_places_for_them(words, expected):
    assert own_words(words.split(), {"--adapter", "--max-adapters"}) == expected.split()


def test_the_line_of_progress_is_drawn_ten_times_a_second_and_removed(monkeypatch):
    from roofline.engine import progress

    clock, flushes = SimpleNamespace(now=0.5), []
    clock.monotonic = lambda: clock.now
    terminal = io.StringIO()
    terminal.flush = lambda: flushes.append(terminal.getvalue())
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr("sys.stderr", terminal)
    bar = progress.ProgressBar(4)
    bar.close()
    assert terminal.getvalue() == "", "nothing was drawn"
    lines = []
    for now, done in ((1.0, 0), (1.09, 1), (1.2, 1), (4.5, 3)):
        clock.now = now
        bar.update(lambda done=done: done)
        if len(flushes) > len(lines):
            lines.append(terminal.getvalue()[len("".join(lines)) :])
    assert lines == [
        f"\r\x1b[K[{'.' * 24}] 0 of 4 prompts",
        f"\r\x1b[K[{'#' * 6}{'.' * 18}] 1 of 4 prompts, 2 s left",  # three times 0.7 s
        f"\r\x1b[K[{'#' * 18}{'.' * 6}] 3 of 4 prompts, 1 s left",  # a third of four seconds
    ]
    bar.close()
    assert flushes[-1] == "".join(lines) + "\r\x1b[K"


def test_many_prompts_show_how_far_they_are_on_a_terminal_alone(llm, monkeypatch):
    from roofline.engine import progress

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(progress, "EVERY", 0.0)
    for prompts, terminal, options, shown in (
        (["a", "b"], Terminal(), {}, True),
        (["a", "b"], Terminal(), {"use_tqdm": False}, False),
        (["a", "b"], io.StringIO(), {}, False),
        (["a"], Terminal(), {}, False),
    ):
        monkeypatch.setattr("sys.stderr", terminal)
        llm.generate(prompts, GREEDY, **options)
        assert ("2 of 2 prompts" in terminal.getvalue()) == shown
        assert not shown or terminal.getvalue().endswith("\r\x1b[K"), "nothing of it stays"


@pytest.mark.parametrize("call", ["embed", "score"])
def test_vectors_of_many_texts_show_how_far_they_are_unless_that_is_not_wanted(llm, monkeypatch, call):
    from roofline.engine import llm as module

    counts, bars = [], []
    monkeypatch.setattr(module, "bar_for", lambda count: counts.append(count) or "a bar")
    monkeypatch.setattr(module, "pair_messages", lambda *_: [{"role": "user", "content": "b"}])
    monkeypatch.setattr(module, "yes_or_no", lambda _: None)
    monkeypatch.setattr(llm.answers, "vectors", lambda ids, pooling, bar: bars.append(bar) or [])
    words = (["a", "b", "a"],) if call == "embed" else ("a", ["a", "b", "a"])
    for options in ({}, {"use_tqdm": True}, {"use_tqdm": False}):
        assert getattr(llm, call)(*words, **options) == []
    assert (counts, bars) == ([3, 3], ["a bar", "a bar", None])
