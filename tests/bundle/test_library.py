"""libroofline: C programs answer from a bundle with the ids of the Python engine."""

import ctypes as c
import json
import math
import re
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import library_binding as lb
import numpy as np
import pytest
from bundle_models import tokenizer_json
from library_binding import Library, sampling
from library_programs import documented, greedy

import roofline
import roofline._native as native
from roofline.bundle import compile_model, load
from roofline.bundle.reader import open_bundle
from roofline.engine.config import EngineConfig
from roofline.engine.local import LocalEngine
from roofline.engine.params import SamplingParams
from roofline.text.tokenizers.binary_file import to_bytes
from roofline.text.tokenizers.vocabulary import AddedToken, Vocabulary

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FINISH = {None: lb.RUNNING, "stop": lb.STOP, "length": lb.LENGTH, "error": lb.FAILED}
Answer = list[tuple[int, int, str]]  # id, finish, log-probability


def test_the_documented_program(compiled: Any, bundle: Path) -> None:
    ids = [5, 17, 200, 3]
    done = subprocess.run([compiled(documented()), bundle, "20", *map(str, ids)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    numbers, _, text = done.stdout.partition(b"\n")
    answer, wanted = greedy(bundle, ids, 20)
    assert list(map(int, numbers.split())) == answer
    assert text.removesuffix(b"\n").decode(errors="replace") == wanted
    failed = subprocess.run([compiled(documented()), bundle / "nowhere", "20", "1"], capture_output=True, timeout=60)
    assert failed.returncode == 1
    assert b"is no bundle" in failed.stderr


def test_sinks_and_biases_of_experts(compiled: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it writes the model")
    from moe_models import transformers_model

    answers_as_python_does(compiled, transformers_model("gpt_oss"), tmp_path)


@pytest.mark.parametrize("name", ["llama_heads_of_20", "ministral3", "deepseek_v3", "mamba"])
def test_families_whose_steps_differ(name: str, compiled: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it makes the model")
    from tests.models.parity_cases import CASES, theirs

    answers_as_python_does(compiled, theirs({**CASES[name].config, "vocab": 300}), tmp_path)


def answers_as_python_does(compiled: Any, model: Any, tmp_path: Path) -> None:
    """A model of transformers, compiled, has in C the greedy answer that it has in Python."""
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    path, ids = compile_model(str(tmp_path / "model"), tmp_path / "bundle").path, [5, 17, 200, 3] * 8
    done = subprocess.run([compiled(documented()), path, "20", *map(str, ids)], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answer, _ = greedy(path, ids, 20)
    assert list(map(int, done.stdout.partition(b"\n")[0].split())) == answer


def test_a_program_with_a_decimal_comma(compiled: Any, bundle: Path, tmp_path: Path) -> None:
    command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")]
    if shutil.which("localedef") is None or subprocess.run(command, capture_output=True).returncode > 1:
        pytest.skip("there is no locale to make")
    start = "if (argc < 4 || argc > 4096) {"
    assert documented().count(start) == 1
    source = documented().replace(
        start, 'if (!setlocale(LC_ALL, "de_DE.UTF-8") || strtod("1,5", NULL) != 1.5) abort();\n' + start
    )
    program = compiled("#include <locale.h>\n" + source)
    done = subprocess.run(
        [program, bundle, "20", "5", "17"], capture_output=True, env={"LOCPATH": str(tmp_path)}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(map(int, done.stdout.partition(b"\n")[0].split())) == greedy(bundle, [5, 17], 20)[0]


def test_the_real_model_answers_without_python(compiled: Any, smollm2_path: Path, tmp_path: Path) -> None:
    path = compile_model(str(smollm2_path), tmp_path / "bundle").path
    tokenizer, _ = open_bundle(path).text()
    ids = tokenizer.encode("The capital of France is", add_special=False)
    command = [compiled(documented()), path, "12", *map(str, ids)]
    done = subprocess.run(command, capture_output=True, timeout=60, env={})
    assert done.returncode == 0, done.stderr
    answer, text = greedy(path, ids, 12)
    assert done.stdout.decode() == " ".join(map(str, answer)) + f" \n{text}\n"


def requests(vocab: int, count: int) -> list[tuple[list[int], int, SamplingParams]]:
    """(prompt, which of its n answers, parameters) of everything that sampling has."""
    rng, made = np.random.default_rng(5), []
    for i in range(count):
        low = int(rng.integers(1, 4))
        values = rng.random(8)
        params = SamplingParams(
            temperature=float(rng.choice([0, 0.7, 1.3])),
            top_k=int(rng.choice([0, 0, 5])),
            top_p=float(rng.choice([1, 0.9, 0.4])),
            min_p=float(rng.choice([0, 0, 0.05])),
            repetition_penalty=float(rng.choice([1, 1, 1.3])),
            presence_penalty=float(rng.choice([0, 0, 0.5])),
            frequency_penalty=float(rng.choice([0, 0, -0.3])),
            seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            max_tokens=None if i == 0 else int(rng.integers(low, 60)),
            min_tokens=low if i % 3 == 0 else 0,
            ignore_eos=bool(values[0] < 0.3),
            logprobs=0 if i % 2 else None,
            stop_token_ids=tuple(rng.integers(0, vocab, 6).tolist()) if i % 4 == 1 else (),
            logit_bias={int(k): float(values[1] * 4 - 2) for k in rng.integers(0, vocab, 5)} if i % 5 == 2 else {},
        )
        made.append((rng.integers(0, vocab, int(rng.integers(1, 90))).tolist(), i % 3, params))
    return made


def line(prompt: list[int], index: int, p: SamplingParams) -> str:
    bias = [*(i for i, _ in p.logit_bias), *(v for _, v in p.logit_bias)]
    numbers = [p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty]
    numbers += [p.frequency_penalty, p.seed, index, p.max_tokens or 0, p.min_tokens, int(p.ignore_eos)]
    numbers += [int(p.logprobs is not None), len(p.stop_token_ids), *p.stop_token_ids, len(p.logit_bias), *bias]
    return " ".join(map(str, [*numbers, len(prompt), *prompt]))


def python_answers(path: Path, asked: list[Any], **options: Any) -> list[Answer]:
    """Each request alone, with as many answers as the index needs; the one of that index."""
    model = load(str(path), **options)
    eos = open_bundle(path).identity.eos_ids
    engine = LocalEngine(model.executable, EngineConfig(prefix_cache=False))
    answers = []
    for prompt, index, params in asked:
        many = SamplingParams(**{**vars(params), "n": index + 1})
        engine.submit(prompt, many, eos_ids=eos)
        answer: Answer = []
        while engine.has_work:
            for event in engine.step():
                for at, token in enumerate(event.ids):
                    last = at == len(event.ids) - 1
                    value = event.logprobs[at].logprob if event.logprobs else math.nan
                    if event.index == index:
                        answer.append((token, FINISH[event.finish_reason] if last else 0, f"{value:.9g}"))
        answers.append(answer)
    return answers


def c_answers(program: Path, path: Path, asked: list[Any], *options: Any) -> list[Answer]:
    """All requests at once, through the C program. options: isa, threads, cache, length, sequences, step tokens."""
    done = subprocess.run(
        [program, path, *map(str, options), str(len(asked))],
        input="\n".join(line(*one) for one in asked),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Answer] = [[] for _ in asked]
    for words in map(str.split, done.stdout.splitlines()):
        answers[int(words[0]) - 1].append((int(words[1]), int(words[2]), words[3]))
    return answers


@pytest.mark.slow
def test_every_request_has_the_ids_of_the_python_engine(compiled: Any, bundle: Path) -> None:
    asked = requests(300, 30)
    wanted = python_answers(bundle, asked, cache_tokens=1024, max_model_len=200)
    assert {answer[-1][1] for answer in wanted} == {lb.STOP, lb.LENGTH}
    program = compiled((HERE / "library_requests.c").read_text())
    best = native.isas()[0]
    for options in (
        (best, 2, 4096, 200, 64, 512),
        ("portable", 1, 208, 200, 8, 16),  # little room: queues, small chunks, pre-emption
        (best, 3, 400, 200, 30, 40),
    ):
        assert c_answers(program, bundle, asked, *options) == wanted, options


@pytest.mark.slow
def test_the_real_model_has_the_ids_of_the_python_engine(compiled: Any, smollm2_path: Path, tmp_path: Path) -> None:
    path = compile_model(str(smollm2_path), tmp_path / "bundle").path
    asked = requests(49152, 8)[1:]
    wanted = python_answers(path, asked, cache_tokens=1024, max_model_len=512)
    program = compiled((HERE / "library_requests.c").read_text())
    assert c_answers(program, path, asked, native.isas()[0], 2, 768, 512, 8, 128) == wanted


def test_what_it_says_about_a_model(library: Library, bundle: Path) -> None:
    opened, model = open_bundle(bundle), load(str(bundle))
    handle = library.open(bundle, threads=2, cache_tokens=1000, max_length=77, max_sequences=3)
    info = lb.Info(size=c.sizeof(lb.Info))
    assert library.c.rl_info(handle, c.byref(info)) == lb.OK
    assert info.name.decode() == opened.manifest.name
    assert info.bundle.decode() == opened.manifest.id
    assert info.isa.decode() == native.isas()[0]
    assert (info.threads, info.max_length, info.cache_tokens, info.max_sequences) == (2, 77, 1008, 3)
    assert info.vocab_size == model.executable.vocab_size
    assert (info.bos_id, info.add_bos) == (256, model.tokenizer.add_bos)
    assert info.eos_ids[: info.eos_count] == list(opened.identity.eos_ids)
    assert info.fingerprint.decode() == model.executable.fingerprint
    library.close(handle)


def test_versions_symbols_and_languages(files: Any, library: Library, tmp_path: Path) -> None:
    major, minor, patch = map(int, roofline.__version__.split("+")[0].split(".")[:3])
    assert library.c.rl_version() == major * 10000 + minor * 100 + patch
    declared = set(re.findall(r"^RL_API .*?\b(rl_\w+)\(", (files.include / "roofline.h").read_text(), re.MULTILINE))
    assert len(declared) == 10
    listed = subprocess.run(["nm", "-D", "--defined-only", files.library], capture_output=True, text=True, check=True)
    functions = {f"{name}@@ROOFLINE_{major}" for name in declared}
    assert {words.split()[-1] for words in listed.stdout.splitlines()} == functions | {f"ROOFLINE_{major}"}
    needed = subprocess.run(["readelf", "-d", files.library], capture_output=True, text=True, check=True)
    assert "python" not in needed.stdout.lower()
    (tmp_path / "cpp.cpp").write_text(
        "#include <roofline.h>\n"
        "int main() { rl_options o = RL_OPTIONS; rl_sampling s = RL_SAMPLING; (void)o, (void)s; }"
    )
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{files.include}", "-c", "cpp.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)


def test_events_wait_for_room_and_aborts_are_told(library: Library, bundle: Path) -> None:
    handle = library.open(bundle, threads=1, cache_tokens=512)
    made = sampling(temperature=0, max_tokens=6, ignore_eos=1)
    numbers = [library.submit(handle, [i, i + 1], made) for i in range(5)]
    assert numbers == [1, 2, 3, 4, 5]
    together = library.run(handle)
    more = [library.submit(handle, [i, i + 1], made) for i in range(5)]
    assert library.c.rl_abort(handle, more[2]) == lb.OK  # before its first step
    first = library.step(handle, 1)
    assert first is not None
    assert [(e.request, e.id, e.finish) for e in first] == [(more[2], -1, lb.ABORT)]
    assert library.c.rl_abort(handle, more[4]) == lb.OK
    assert library.c.rl_abort(handle, more[4]) == lb.OK
    assert library.c.rl_abort(handle, numbers[0]) == lb.OK  # it has ended
    rest = library.run(handle, 1)
    for i in (0, 1, 3):
        events = rest[more[i]]
        assert [e.id for e in events] == [e.id for e in together[numbers[i]]]
        assert [e.index for e in events] == list(range(6))
        assert [e.finish for e in events] == [0, 0, 0, 0, 0, lb.LENGTH]
        assert all(math.isnan(e.logprob) for e in events)
    assert rest[more[4]][-1].finish == lb.ABORT
    assert len(rest[more[4]]) <= 2
    assert library.step(handle) is None
    for unknown in (0, 11, 2**63):
        assert library.c.rl_abort(handle, unknown) == lb.INVALID
    library.close(handle)


def test_requests_come_from_other_threads(library: Library, bundle: Path) -> None:
    handle = library.open(bundle, threads=2, cache_tokens=512, max_sequences=4)
    made = sampling(temperature=0, max_tokens=8, ignore_eos=1)
    library.submit(handle, [1, 2, 3], made)
    (alone,) = library.run(handle).values()
    found: dict[int, list[int]] = {}
    numbers: list[int] = []

    def submit() -> None:
        for i in range(10):
            number = library.submit(handle, [1, 2, 3], made)
            if i % 5 == 4:
                assert library.c.rl_abort(handle, number) == lb.OK
            else:
                numbers.append(number)

    writers = [threading.Thread(target=submit) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers) or len(found) < 30:
        for event in library.step(handle, 5) or []:
            found.setdefault(event.request, []).append(event.id)
    for event in [e for events in library.run(handle).values() for e in events]:
        found[event.request].append(event.id)
    assert len(set(numbers)) == 24
    for number in numbers:
        assert found[number] == [e.id for e in alone]
    library.close(handle)


def test_a_request_whose_logits_are_no_numbers_fails_alone(library: Library, bundle: Path) -> None:
    raw = (bundle / "code.bin").read_bytes()
    at = -(-struct.unpack_from("<q", raw, 64)[0] // (2 << 20)) * (2 << 20)  # the vectors follow the matrices
    with (bundle / "weights.bin").open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<f", math.nan))
    handle = library.open(bundle, cache_tokens=512)
    number = library.submit(handle, [1, 2, 3])
    assert [(e.id, e.finish) for e in library.run(handle)[number]] == [(-1, lb.FAILED)]
    library.close(handle)


def test_bytes_of_ids(library: Library, bundle: Path) -> None:
    tokenizer, _ = open_bundle(bundle).text()
    handle = library.open(bundle, threads=1, cache_tokens=64)
    for i in range(300):
        wanted = b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i)
        assert library.decode(handle, [i]) == wanted
    ids = tokenizer.encode("Naïve 漢字 🙂", add_special=False)
    assert library.decode(handle, [256, *ids, 257]).decode() == "Naïve 漢字 🙂"
    assert library.decode(handle, ids, 3) == "Naïve".encode()[:3]
    size = lb.SIZE()
    assert library.c.rl_decode(handle, (lb.INT * 1)(300), 1, None, 0, c.byref(size)) == lb.INVALID
    assert library.c.rl_decode(handle, (lb.INT * 2)(65, 66), 2, None, 0, c.byref(size)) == lb.OK
    assert size.value == 2
    library.close(handle)


def test_bytes_of_other_vocabularies(library: Library, bundle: Path) -> None:
    tokens = ["▁", "▁the", "<0x0A>", "<0xff>", "é", "", "<0x1>", "a▁b", '"\\', "\U0001f600"]
    added = [AddedToken(2, "<nl>", False), AddedToken(10, "<s>", True), AddedToken(12, "\U0001f600\n", False)]
    added.append(AddedToken(13, "▁▁", False))  # a run of spaces, as Gemma's
    for byte_level in (False, True):
        words = to_bytes(Vocabulary("BPE", tokens, added=added, byte_level=byte_level))
        _replace(bundle, "tokenizer.bin", words)
        handle = library.open(bundle, threads=1, cache_tokens=64)
        found = [library.decode(handle, [i]).decode("utf-8", "surrogateescape") for i in range(14)]
        plain = [" ", " the", "<nl>", "\udcff", "é", "", "<0x1>", "a b", '"\\', "\U0001f600"]
        if byte_level:
            plain = ["▁", "▁the", "<nl>", "<0xff>", "\udce9", "", "<0x1>", "a▁b", '"\\', "\U0001f600"]
        assert found == [*plain, "", "", "\U0001f600\n", "▁▁" if byte_level else "  "]
        library.close(handle)
    _replace(bundle, "tokenizer.bin", to_bytes(Vocabulary("WordPiece", tokens, byte_level=False, continues="##")))
    handle, size = library.open(bundle, threads=1, cache_tokens=64), lb.SIZE()
    assert library.c.rl_decode(handle, (lb.INT * 1)(1), 1, None, 0, c.byref(size)) == lb.BUNDLE
    assert "its tokens are words (WordPiece, WordLevel)" in library.error()
    library.close(handle)
    lies = (words.replace(b"counts", b"founts"), words.replace(b"[10, 0", b"[11, 0"))
    for damaged in (b"", b"RLTOK2\n", words[:20], words[:-1], words + b"x", b"X" + words[1:], *lies):
        _replace(bundle, "tokenizer.bin", damaged)
        handle, size = library.open(bundle, threads=1, cache_tokens=64), lb.SIZE()
        assert library.c.rl_decode(handle, (lb.INT * 1)(1), 1, None, 0, c.byref(size)) == lb.BUNDLE, damaged
        assert "tokenizer.bin" in library.error()
        library.close(handle)


def _replace(bundle: Path, name: str, data: bytes) -> None:
    """Another file, of the size that the manifest says."""
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["files"][name]["bytes"] = len(data)
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (bundle / name).write_bytes(data)


def test_a_bundle_without_a_tokenizer(library: Library, tmp_path: Path) -> None:
    from bundle_models import write_model

    path = compile_model(str(write_model(tmp_path / "bare", tokenizer=False)), tmp_path / "bundle").path
    handle, size = library.open(path, threads=1, cache_tokens=64), lb.SIZE()
    number = library.submit(handle, [1, 2], sampling(max_tokens=4))
    assert len(library.run(handle)[number]) == 4
    assert library.c.rl_decode(handle, (lb.INT * 1)(1), 1, None, 0, c.byref(size)) == lb.UNSUPPORTED
    assert "has no tokenizer: " in library.error()
    assert "tokenizer.json" in library.error()
    library.close(handle)
