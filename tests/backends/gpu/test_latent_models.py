"""Models of attention over compressed rows on the gpu backend: which form a load takes, and what its cache holds."""

import json

import numpy as np
import pytest
from gpu_loading import pretend
from gpu_models import LIMITS, LLAMA, check_exact_steps, distance, logits, steps

from roofline import bundle
from roofline.backends.compressed_rows import holds_compressed_rows
from roofline.backends.fit import split_on_host, split_on_product
from roofline.backends.gpu.program import compile_for_gpu
from roofline.backends.options import LoadOptions
from roofline.bench.plan.plan import shape_of
from roofline.common.errors import UnsupportedError
from roofline.hardware.chips import chips
from roofline.hardware.chips.products import titled
from roofline.models.registry import config_of
from roofline.ops.batch import PAGE_TOKENS, Segment
from roofline.weights.random_weights import random_checkpoint
from tests.models import latent_config

torch = pytest.importorskip("torch")
YOUTU = {**LLAMA, "family": "youtu", "heads": 6, "kv_heads": 6, "head_dim": 40, "rotary_dim": 8, "kv_rank": 48}
YOUTU |= {"value_dim": 32, "latent": True, "rope_style": "interleaved"}


@pytest.fixture
def deepseek(tmp_path):
    """A configuration of DeepSeek-V2 without weights."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(latent_config.DEEPSEEK), encoding="utf-8")
    return str(path)


def loaded(source, **options):
    """A load with random weights, which the caller closes."""
    return bundle.load(source, weights="random:1", text=False, cache_tokens=256, **options).executable


def executables(chip="sm_90", **options):
    """(gpu executable, reference executable) of one Program."""
    from roofline.backends.gpu.runtime.executable import GpuExecutable, Runtime
    from roofline.backends.reference.executable import ReferenceExecutable

    source = random_checkpoint(YOUTU, seed=3)
    wanted = LoadOptions(backend="gpu", **options)
    program = compile_for_gpu(source, config_of(source.config), wanted, chips.get(chip))
    shape = {"limits": LIMITS, "num_pages": 16, "max_context": 128, "weights_hash": "7e57"}
    gpu = GpuExecutable(program, source.read, Runtime(chips.get(chip), "cpu", wanted.exact), **shape)
    return gpu, ReferenceExecutable(program, source.read, **shape)


def test_a_load_holds_rows_and_plans_count_them(deepseek, monkeypatch):
    """The bytes of a token in a plan are those that the cache of a load takes, on a GPU and on a host."""
    pretend(monkeypatch, memory=1 << 30)
    for backend, split in (
        ("gpu", split_on_product(*shape_of(deepseek, ""), titled("H100 SXM"))),
        ("cpu", split_on_host(*shape_of(deepseek, "", on_host=True))),
    ):
        executable = loaded(deepseek, backend=backend)
        planned = split.parts[0].needs.token
        assert planned == latent_config.ROW_BYTES
        assert executable.page_bytes == PAGE_TOKENS * planned
        if backend == "gpu":
            k, v = executable._caches["kv0"]
            assert k.untyped_storage().nbytes() == (executable.num_pages + 1) * executable.page_bytes
            assert v.data_ptr() == k.data_ptr() + 2 * 16
            assert v.shape[-1] == 64
        executable.close()


@pytest.mark.slow
def test_files_that_transformers_wrote_give_its_logits(tmp_path, monkeypatch):
    """Of layers without experts, whose choice a rounding to 16 bits may change: a prompt, then a token behind it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.DeepseekV2Config(**latent_config.DEEPSEEK | {"first_k_dense_replace": 2})
    judge = transformers.DeepseekV2ForCausalLM(config).eval()
    judge.save_pretrained(tmp_path)
    pretend(monkeypatch, memory=1 << 30)
    executable = bundle.load(str(tmp_path), text=False, cache_tokens=256, backend="gpu").executable
    assert executable.page_bytes == PAGE_TOKENS * latent_config.ROW_BYTES
    ids = np.random.default_rng(2).integers(0, 96, 30).tolist()
    with torch.no_grad():
        want = judge(torch.tensor([ids])).logits[0].numpy()
    for first, stop in ((0, 29), (29, 30)):
        got = logits(executable, [Segment(ids[first:stop], first, [4, 2])])
        assert distance(got[0], want[stop - 1]) < 0.02
    assert distance(got[0], want[5]) > 0.2
    executable.close()


def test_adapters_have_keys_and_values_of_all_heads(deepseek, monkeypatch):
    """One on kv_b_proj changes the matrix that makes them of the rows."""
    pretend(monkeypatch, memory=1 << 30)
    executable = loaded(deepseek, backend="gpu", max_adapters=1)
    assert executable.page_bytes == PAGE_TOKENS * latent_config.EXPANDED_BYTES
    assert any("kv_up" in name for name in executable.adapters.sites)
    executable.close()


def test_rows_that_are_wider_than_the_kernel_has_stay_expanded():
    options = LoadOptions(backend="gpu")
    for rank, turned, held in ((512, 64, True), (513, 64, False), (512, 65, False)):
        config = {"kv_rank": rank, "rotary_dim": turned}
        assert holds_compressed_rows(options, config) == held
        assert holds_compressed_rows(LoadOptions(backend="cpu"), config)
    assert not holds_compressed_rows(options, {"rotary_dim": 64}), "a model without such rows"


@pytest.mark.parametrize("device", ["auto", "H100 SXM", "EPYC 9654"])
def test_simulated_devices_hold_what_their_backend_would(device):
    options = LoadOptions(backend="simulated", device=device)
    assert holds_compressed_rows(options, {"kv_rank": 512, "rotary_dim": 64})
    assert holds_compressed_rows(options, {"kv_rank": 1024, "rotary_dim": 64}) == (device != "H100 SXM")


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_rows_in_8_bits_equal_the_reference(chip):
    """A row that a rounding to 16 bits moves may become the next one of 8 bits, for all heads at once."""
    (gpu, reference), (_, wide) = executables(chip, kv_cache_dtype="fp8"), executables(chip)
    assert gpu._caches["kv0"][0].element_size() == 1
    for step in steps():
        got, want, sixteen = (logits(one, step) for one in (gpu, reference, wide))
        assert distance(got, want) < 0.03 < distance(sixteen, want)


@pytest.mark.slow
def test_exact_steps_do_not_depend_on_company_or_chunks():
    gpu, _ = executables(exact=True)
    check_exact_steps(gpu)


def test_what_the_kernel_does_not_have_is_refused():
    from dataclasses import replace

    from roofline.backends.gpu.runtime.lower import check

    source = random_checkpoint(YOUTU, seed=3)
    program = compile_for_gpu(source, config_of(source.config), LoadOptions(backend="gpu"), chips.get("sm_90"))
    check(program)

    def changed(**attrs):
        body = (replace(i, attrs=i.attrs | attrs) if i.op == "attend" else i for i in program.body)
        return replace(program, body=tuple(body))

    for name, value in (("window", 20), ("soft_cap", 5.0), ("alibi", True)):
        with pytest.raises(UnsupportedError, match=f"compressed rows with {name} on a GPU"):
            check(changed(**{name: value}))
