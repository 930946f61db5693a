"""A transformers model of random weights, run with one technique at a time and timed."""

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from roofline.backends.gpu.runtime import libraries
from roofline.common.errors import UnsupportedError
from roofline.common.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

RECOMPILES = 64  # shapes a step is compiled for; torch falls back to eager, in silence, beyond its default of 8
CACHE_STEP = 64  # static caches are as long as a multiple of it: fewer shapes to compile for
ATTENTION = ("sdpa", "flash", "xformers")
# Technique -> the one kernel of torch's scaled_dot_product_attention that it may use; xformers has its own.
SDPA = {"sdpa": "EFFICIENT_ATTENTION", "flash": "FLASH_ATTENTION"}
PREFIX = "roofline_"


def random_model(config: JsonMapping, device: str, seed: int = 0, threads: int | None = None) -> "PreTrainedModel":
    """transformers' causal model of a config.json's content, in bf16, with its own random initialisation.

    Nothing is read from a hub or a disk. threads: of torch in this process from now on; None leaves them. Raises
    UnsupportedError where transformers cannot make it, or the device cannot hold it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    fields = {key: value for key, value in config.items() if key not in ("architectures", "torch_dtype")}
    with _ours("transformers' model"), torch.device(device):
        config_object = AutoConfig.for_model(**fields)
        model = AutoModelForCausalLM.from_config(config_object, dtype=torch.bfloat16, attn_implementation="eager")
    return model.eval()


class TransformersRunner:
    """A `Runner` of one model with a set of techniques, as a plain loop over its forward; decoding is greedy.

    The loop is kinder than `generate`: no logits processors, no stopping criteria, and one synchronisation at the end.
    Several runners may share a model: each call sets what it needs.

    techniques: any of "compile", "static" (which needs it), "tuned", and one of "sdpa", "flash", "xformers"; none is
    eager mode. ids: [batch, new] that the last call chose, its first from the prompt.
    """

    def __init__(self, model: "PreTrainedModel", techniques: frozenset[str], seed: int = 0) -> None:
        self.model, self.techniques, self.seed = model, techniques, seed
        self.device = next(model.parameters()).device
        self.static = "static" in techniques
        chosen = [name for name in ATTENTION if name in techniques]
        self._kernel = SDPA.get(chosen[0]) if chosen else None
        self._attention = register_attention(chosen[0]) if chosen else "eager"
        self._prefill, self._decode = self._steps()
        self._caches: dict[tuple[int, int], Cache] = {}
        self.ids: Tensor

    def prefill(self, batch: int, length: int) -> float:
        with self._set():
            cache, prompts = self._cache(batch, length), self._prompts(batch, length)
            start = self._now()
            self.ids = self._begin(prompts, cache)
            return self._now() - start

    def decode(self, batch: int, context: int, steps: int) -> float:
        import torch

        with self._set():
            cache = self._cache(batch, context + steps)
            ids = [self._begin(self._prompts(batch, context), cache)]
            start = self._now()
            for _ in range(steps):
                ids.append(self._next(ids[-1], cache))
            seconds = self._now() - start
            self.ids = torch.cat(ids, dim=1)
        return seconds

    def _begin(self, prompts: "Tensor", cache: "Cache") -> "Tensor":
        """The first ids [batch, 1]; a prompt of one token is a decoding step, which is compiled anyway."""
        if prompts.shape[1] > 1:
            return self._prefill(prompts, cache)
        return self._next(prompts, cache)

    def _next(self, ids: "Tensor", cache: "Cache") -> "Tensor":
        """A decoding step: ids [batch, 1] -> the next ones."""
        if not self.static or self.device.type != "cuda":
            return self._decode(ids, cache)
        import torch

        torch.compiler.cudagraph_mark_step_begin()
        return self._decode(ids, cache).clone()  # a graph's output is overwritten by its next replay

    def notes(self) -> JsonObject:
        return {}

    def close(self) -> None:
        """Drop caches and what was compiled."""
        self._caches.clear()
        if "compile" in self.techniques:
            import torch

            torch._dynamo.reset()

    def _steps(self) -> "tuple[Callable[..., Tensor], Callable[..., Tensor]]":
        """The functions of prefill and of a decode step: (ids [batch, n], cache) -> the next ids [batch, 1]."""
        model = self.model
        takes_position = "cache_position" in inspect.signature(model.forward).parameters  # transformers before 5

        def step(ids: "Tensor", cache: "Cache") -> "Tensor":
            more = {}
            if takes_position:
                import torch

                more["cache_position"] = torch.arange(ids.shape[1], device=ids.device) + cache.get_seq_length()
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)
            return out.logits[:, -1].argmax(-1, keepdim=True)

        if "compile" not in self.techniques:
            return step, step
        import torch

        if not self.static:  # the cache grows with every step
            compiled = torch.compile(step, dynamic=True)
            return compiled, compiled
        mode = "reduce-overhead" if self.device.type == "cuda" else None
        return torch.compile(step, dynamic=False), torch.compile(step, dynamic=False, fullgraph=True, mode=mode)

    def _cache(self, batch: int, length: int) -> "Cache":
        from transformers import DynamicCache, StaticCache

        if not self.static:
            return _construct(DynamicCache, config=self.model.config)
        length = -(-length // CACHE_STEP) * CACHE_STEP
        if (batch, length) not in self._caches:
            self._caches.clear()  # a grid goes on to other sizes, and on a GPU these are gigabytes
            common = {"device": self.device, "dtype": self.model.dtype}
            sizes = {"max_batch_size": batch, "max_cache_len": length}
            cache = _construct(StaticCache, config=self.model.config, **sizes, **common)
            # Its tensors are made at first use, which must not be inside of what is compiled.
            self.model(input_ids=self._prompts(batch, 1), past_key_values=cache, use_cache=True, logits_to_keep=1)
            self._caches[batch, length] = cache
        cache = self._caches[batch, length]
        cache.reset()
        return cache

    def _prompts(self, batch: int, length: int) -> "Tensor":
        """Random ids [batch, length], the same for every technique."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(0, self.model.config.vocab_size, (batch, length), generator=generator)
        return ids.to(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    @contextmanager
    def _set(self) -> Iterator[None]:
        """What one call needs: attention and its kernel, TunableOp, no gradients; errors become ours."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.model.config._attn_implementation = self._attention
        kernel = sdpa_kernel([getattr(SDPBackend, self._kernel)]) if self._kernel else nullcontext()
        tuned = libraries.tuning() if "tuned" in self.techniques else libraries.switched(False)
        what = "+".join(sorted(self.techniques)) or "eager"
        stock = libraries.summing_in_float32(False)  # our engine's loading switches it on for the process
        with _ours(f"transformers with {what}"), torch.no_grad(), kernel, _recompiles(torch), tuned, stock:
            yield


@contextmanager
def _ours(what: str) -> Iterator[None]:
    """Errors of torch and transformers become ours: a rung that does not run is a result, not the end of a bench."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        lines = str(error).strip().splitlines() or [""]
        raise UnsupportedError(what, f"{type(error).__name__}: {lines[0]}") from error


@contextmanager
def _recompiles(torch: ModuleType) -> Iterator[None]:
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: RECOMPILES}):
        yield


def _construct(kind: Any, **arguments: Any) -> Any:
    """An object from those of `given` that its constructor takes: they differ between versions of transformers."""
    takes = inspect.signature(kind.__init__).parameters
    return kind(**{name: value for name, value in arguments.items() if name in takes})


def register_attention(technique: str) -> str:
    """Teach transformers the attention of "sdpa", "flash" or "xformers"; the `attn_implementation` to ask for.

    A kernel that cannot take what it is given raises RuntimeError: no other takes its place silently.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"{PREFIX}{technique}"
    ALL_ATTENTION_FUNCTIONS.register(name, xformers_attention if technique == "xformers" else sdpa_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return name


def sdpa_attention(
    module: "Module",
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    attention_mask: "Tensor | None",
    **options: "float | None",
) -> "tuple[Tensor, None]":
    """torch's scaled_dot_product_attention, with whichever kernels it is allowed at the time.

    query [batch, heads, queries, head_dim], key and value [batch, kv_heads, keys, head_dim]: kv heads are repeated,
    since not every kernel takes grouped ones. Returns [batch, queries, heads, head_dim] and no weights.
    """
    from torch.nn import functional

    key, value = _repeated(module, key), _repeated(module, value)
    causal = attention_mask is None and query.shape[2] > 1
    scale = options.get("scaling")
    out = functional.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scale)
    return out.transpose(1, 2).contiguous(), None


def xformers_attention(
    module: "Module",
    query: "Tensor",
    key: "Tensor",
    value: "Tensor",
    attention_mask: "Tensor | None",
    **options: "float | None",
) -> "tuple[Tensor, None]":
    """xformers.ops.memory_efficient_attention; shapes as of `sdpa_attention`. Source: Lefaudeux et al. 2022, xFormers;
    Rabe and Staats 2021, Self-attention does not need O(n^2) memory."""
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    batch, heads, queries, _ = query.shape
    bias: Any = LowerTriangularMask() if attention_mask is None and queries > 1 else None
    if attention_mask is not None:  # True: to be seen
        bias = query.new_zeros(batch, heads, queries, key.shape[2])
        bias.masked_fill_(attention_mask[..., : key.shape[2]].logical_not(), float("-inf"))
    turned = (x.transpose(1, 2) for x in (query, _repeated(module, key), _repeated(module, value)))
    return memory_efficient_attention(*turned, attn_bias=bias, scale=options.get("scaling")), None


def _repeated(module: "Module", x: "Tensor") -> "Tensor":
    """[batch, kv_heads, keys, head_dim] -> [batch, heads, keys, head_dim]."""
    groups = getattr(module, "num_key_value_groups", 1)
    if groups == 1:
        return x
    batch, heads, keys, dim = x.shape
    return x[:, :, None].expand(batch, heads, groups, keys, dim).reshape(batch, heads * groups, keys, dim)
