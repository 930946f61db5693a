"""`roofline serve` takes vLLM's flags where they mean the same; of the others those that ask for nothing."""

import pytest

from roofline.cli.parser import Parser, UsageError
from roofline.cli.run.serve import command
from roofline.engine.keywords import _OTHER, _OTHER_SERVING, _SAME, _SAME_SERVING, own_words


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("-tp 2 -pp=3 --data-parallel-size 4 --backend gpu", "--tp 2 --pp 3 --dp 4 --backend gpu"),
        ("--max-num-seqs 7 --max-num-batched-tokens 99", "--max-running 7 --max-batch-tokens 99"),
        ("--max-model-len 64 --api-key k --served-model-name n", "--context 64 --api-key k --served-model-name n"),
        ("--no-enable-prefix-caching", "--no-prefix-cache"),
        ("--enable-prefix-caching", "--prefix-cache"),
        ("--kv-cache-dtype bfloat16", "--kv-cache-dtype bf16"),
        (
            "--tool-call-parser llama3_json --reasoning-parser=qwen3",
            "--tool-call-parser llama3 --reasoning-parser think",
        ),
        ("--tool-call-parser hermes", "--tool-call-parser hermes"),
        ("--ssl-keyfile a --ssl-certfile b", "--tls-key a --tls-certificate b"),
        ("--disable-uvicorn-access-log --enforce-eager", "--no-access-log --no-graphs"),
        ("--model m", "m"),
        ("--model=m --port 1", "m --port 1"),
        ("--disable-log-requests --enable-auto-tool-choice --dtype auto --seed None --root-path= m", "m"),
        ("m --uvicorn-log-level info --no-trust-remote-code --swap-space 0 --no-enable-log-requests", "m"),
        ("m --enable-lora", "m --max-adapters 1"),
        ("--enable-lora --max-loras 3 --max-lora-rank 8 m", "--max-adapters 3 --max-adapter-rank 8 m"),
        ("m --enable-lora --lora-modules a=x b=y --port 1", "m --adapter a=x --adapter b=y --port 1"),
        ('--lora-modules={"name":"a","path":"x","base_model_name":null} b=y m', "--adapter a=x --adapter b=y m"),
        ("m --enable-lora --no-enable-lora", "m"),
        ("m --limit-mm-per-prompt {} --override-generation-config {} --async-scheduling --convert embed", "m"),
        ('m --structured-outputs-config {"backend":"auto"} --lora-dtype auto --no-fully-sharded-loras', "m"),
        ("m --block-size 16 --generation-config vllm --hf-overrides {}", "m"),
        ("m --enable-prompt-tokens-details --no-disable-fastapi-docs --no-disable-log-stats", "m"),
        ("m --no-enable-prompt-tokens-details --disable-fastapi-docs --disable-log-stats", "m"),
        ("m --no-disable-log-requests --no-disable-frontend-multiprocessing --api-server-count 1", "m"),
        ("m --ssl-cert-reqs 0 --cpu-offload-gb 0 --max-logprobs 20 --data-parallel-size 1", "m --dp 1"),
    ],
)
def test_flags_mean_what_ours_mean(words, ours):
    parser = Parser("serve", command)
    assert parser.parse(words.split()) == Parser("serve", command).parse(ours.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpu-memory-utilization 0.9", "there is no option --gpu-memory-utilization: --cache-tokens N is the size"),
        ("--trust-remote-code", "there is no option --trust-remote-code: no code of a model's repository is run"),
        ("--dtype half", "there is no option --dtype: the file says"),
        ("--seed 1", "there is no option --seed: each request gives its seed"),
        ("--no-enable-chunked-prefill", "long prompts are always computed in chunks, of --max-batch-tokens"),
        ("--root-path /llm", "let the proxy take its path off"),
        ("--quantization awq", "there is no option --quantization"),
        ("--tool-call-parser jamba", "--tool-call-parser='jamba' cannot be used"),
        ("--tensor-parallel-size x", "--tensor-parallel"),
        ("--max-num-seqs", "--max-running needs a value"),
        ("--lora-modules", "--lora-modules needs a value: give NAME=PATH"),
        ("--lora-modules {1", "--lora-modules: give NAME=PATH, or an object of name and path"),
        ('--lora-modules {"name":"a","path":"x","base_model_name":"m"}', "an object of name and path and nothing else"),
        ("--max-cpu-loras 4", "--max-cpu-loras: --max-adapters N counts all adapters that are loaded"),
        ('--limit-mm-per-prompt {"image":2}', "--limit-mm-per-prompt: models read text alone"),
        ('--override-generation-config {"top_k":1}', "each request gives its sampling"),
        ('--structured-outputs-config {"backend":"outlines"}', "llguidance holds answers to a form"),
        ("--no-async-scheduling", "--no-async-scheduling: leave it out"),
        ("--convert classify", "--convert: an LLM generates, embeds and scores"),
        ("--made-up 1", "there is no option --made-up"),
        ("--no-enable-auto-tool-choice", "tools are called where the request has them"),
        ("--disable-frontend-multiprocessing", "the engine is always a process of its own"),
        ("--enable-log-requests", "no line of the log has text of prompts"),
        ("--ssl-cert-reqs 1", "clients are known by keys"),
        ("--cpu-offload-gb 1", "in the host's memory"),
        ("--swap-space 1", "a sequence that loses its pages is computed again"),
        ("--max-logprobs 19", "20 alternatives at most"),
        ("--api-server-count 2", "one process speaks HTTP"),
        ("--block-size 15", "a page has 16 tokens"),
        ("--block-size 17", "a page has 16 tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_can(words, message):
    with pytest.raises(UsageError) as refused:
        Parser("serve", command).parse(["m", *words.split()])
    assert message in str(refused.value)


def test_every_row_is_needed_and_leads_to_an_option_of_ours():
    flags = Parser("serve", command).flags
    for target in (*_SAME.values(), *_SAME_SERVING.values()):
        assert "--" + target.replace("_", "-") in flags
    for name in (*_OTHER, *_OTHER_SERVING):
        assert "--" + name.replace("_", "-") not in flags, "an option of ours of this name is never refused here"


def test_what_stands_behind_two_dashes_is_left_alone():
    assert own_words(["--", "--dtype", "auto"], ()) == ["--", "--dtype", "auto"]
    words = ["--enable-lora", "--", "--lora-modules", "a=x"]
    assert own_words(words, ("--max-adapters",)) == ["--max-adapters=1", *words[1:]]
