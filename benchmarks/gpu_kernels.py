"""Every kernel of the gpu backend on fresh random inputs: its results beside float64's, its time beside the roofs.

Shapes are Llama-2-7B's and, for grouped heads, Llama-3-8B's; tests run the same cases on tiny shapes in Triton's
interpreter. What is timed is launches alone: copies between host and device lie outside of `run`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import triton
from torch import Tensor

from benchmarks.gpu_kernels_case import (
    BF16,
    F16,
    F32,
    TINY,
    Case,
    Result,
    Shapes,
    error,
    errors,
    of,
    result,
)
from benchmarks.gpu_kernels_latent import CompressedRows
from benchmarks.gpu_kernels_rows import Rows
from roofline.backends.gpu import tiles
from roofline.backends.gpu.kernels import (
    cutoff,
    embed,
    gated,
    logprobs,
    route,
    sample,
    scores,
    slots,
)
from roofline.backends.gpu.kernels.settings import SampleSettings
from roofline.backends.gpu.pack import LAYOUTS
from roofline.backends.reference import sampling as reference
from roofline.backends.sampling import SampleRows
from roofline.ops.batch import PAGE_TOKENS, Batch, BatchLimits, Segment

__all__ = ["TINY", "Bench", "Case", "Shapes", "error", "errors"]


@dataclass(frozen=True)
class Bench(Rows, CompressedRows):
    """Makes cases on a device."""

    def cases(self) -> Iterator[Callable[[], Case]]:
        """Makers of all cases, each to be called before the next is asked for: inputs exist while their case does, no
        longer. They are the same for the same seed."""
        for number, make in enumerate(self._all()):
            told = ", ".join([*map(str, make.args), *(f"{name}={value}" for name, value in make.keywords.items())])
            make.__dict__["__name__"] = f"{make.func.__name__}({told})"[:80]  # of a case that cannot be made
            torch.manual_seed(self.seed + number)
            yield make

    def _all(self) -> Iterator["partial[Case]"]:
        s = self.shapes
        few, decodes, grouped = s.few[-1], s.sequences[-1], s.heads // 4
        for rows in (*s.few, s.many):
            yield partial(self.norm, rows, s.width)
            yield partial(self.gate, rows)
            yield partial(self.rope, rows, s.heads)
        yield partial(self.norm, few, s.width, layer=True)
        yield partial(self.norm, few, s.width, delta=False)
        yield partial(self.norm, few, s.width, dtype=F16)
        yield partial(self.norm, few * s.heads, s.head_dim, delta=False)
        for weights in (0, 4):
            yield partial(self.norm, few * s.heads, s.head_dim, delta=False, weights=weights)
        yield partial(self.likened, few)
        yield partial(self.above, few)
        for kind in ("gelu_tanh", "gelu_erf"):
            yield partial(self.gate, few, kind)
            yield partial(self.gate, few, kind, alone=True)
        yield partial(self.gate, few, alone=True)
        yield partial(self.gate, few, dtype=F16)
        yield partial(self.rope, few, grouped, interleaved=True)
        yield partial(self.rope, few, grouped, norms=True)
        yield partial(self.rope, few, grouped, part=4)
        yield partial(self.rope, few, grouped, dtype=F16)
        yield partial(self.embedded, s.many)
        yield partial(self.taken, decodes)
        yield partial(self.slots, decodes, s.many)
        yield from self._products()
        yield from self._attention()
        yield from self._compressed()
        yield partial(self.routed, s.some, 8, 2, True)
        yield partial(self.routed, s.some, 60, 4, False)
        yield partial(self.combined, s.some, 2)
        yield partial(self.combined, s.some, 2, F16)
        for sequences, length in ((decodes, 1), (1, s.some)):
            yield partial(self.convolved, sequences, length)
            yield partial(self.recurred, sequences, length)
            yield partial(self.scanned, sequences, length, False)
            yield partial(self.scanned, sequences, length, True)
        yield partial(self.scored, decodes)
        yield partial(self.cut, decodes, top_p=0.9)
        yield partial(self.cut, decodes, top_k=50, top_p=0.9)
        yield partial(self.chosen, decodes, 0.0)
        yield partial(self.chosen, decodes, 0.8)
        yield partial(self.chosen, decodes, 0.8, top_p=0.9)
        yield partial(self.chosen, decodes, 0.8, top_k=50, top_p=0.9, min_p=0.02)
        yield partial(self.chosen, decodes, 0.8, adjusted=True)
        yield partial(self.logprobs, decodes, 5)

    def _products(self) -> Iterator["partial[Case]"]:
        s = self.shapes
        one, few = s.few[0], s.few[-1]
        for rows in s.few:
            for columns, width in ((3 * s.width, s.width), (s.width, s.width), (s.width, s.ffn), (s.vocab, s.width)):
                yield partial(self.product, rows, columns, width)
            yield partial(self.product, rows, 2 * s.ffn, s.width, gate=True)
        yield partial(self.product, s.many, s.width, s.width)
        yield partial(self.product, s.many, s.width, s.width, exact=True)
        yield partial(self.product, one, s.width, s.width, exact=True)
        yield partial(self.product, few, s.vocab, s.width, to=F32)
        yield partial(self.product, few, s.width, s.width, bias=True)
        yield partial(self.product, few, s.width, s.width, dtype=F16)
        for form in (*LAYOUTS, "E4M3"):
            for rows in (*s.few, s.some, s.many):
                yield partial(self.quantised, form, rows, 2 * s.ffn, s.width, gate=rows in s.few)
            if form in ("Q4_0", "Q4_K", "E4M3"):
                yield partial(self.quantised, form, few, 2 * s.ffn, s.width, exact=True)
                yield partial(self.quantised, form, few, 2 * s.ffn, s.width, dtype=F16)
                yield partial(self.widened, form)
                yield partial(self.widened, form, s.some)
        if self.chip.fp8:
            for rows in (*s.few, s.some, s.many):
                yield partial(self.eights, rows, 2 * s.ffn, s.width, gate=rows in s.few)
                yield partial(self.rounded, rows, s.width)
        yield partial(self.quantised, "Q4_0", one, s.width, s.width)
        yield partial(self.quantised, "Q4_0", one, s.width, s.ffn)
        yield partial(self.quantised, "Q4_K", few, s.width + 36, s.width)  # rows that no tile divides
        yield partial(self.product, few, s.width + 36, s.width)
        yield partial(self.expert, s.some, 2, 8)
        yield partial(self.expert, s.some, 2, 8, per_slot=True)
        yield partial(self.expert, s.some, 2, 8, exact=True)
        yield partial(self.expert, 8 * s.some, 2, 8)
        yield partial(self.expert, s.some, 2, 8, dtype=F16)
        yield partial(self.lora, s.some, 16)
        yield partial(self.lora, s.some, 64)
        yield partial(self.lora, s.some, 16, F16)

    def _compressed(self) -> Iterator["partial[Case]"]:
        s = self.shapes
        prompt, some = [(s.context, s.context)], [(1, s.context)] * s.sequences[1]
        for back in (False, True):
            for rows in (*s.few, s.many):
                yield partial(self.by_head, rows, back)
            yield partial(self.by_head, s.few[-1], back, exact=True)
        yield partial(self.by_head, s.few[-1], False, dtype=F16)
        for tokens in (s.few[-1], s.many):
            yield partial(self.rows_written, tokens)
        for n in s.sequences:
            yield partial(self.over_rows, [(1, s.context)] * n)
        for step in ([*some, (s.context // 2, s.context - 3)], prompt):
            yield partial(self.over_rows, step)
        for step in (some, prompt):
            yield partial(self.over_rows, step, exact=True)
        if self.chip.fp8:
            yield partial(self.over_rows, some, cache=self.chip.fp8)

    def _attention(self) -> Iterator["partial[Case]"]:
        s = self.shapes
        grouped, prompt = s.heads // 4, [(s.context, s.context)]
        for kv_heads in (s.heads, grouped):
            for n in s.sequences:
                yield partial(self.attention, [(1, s.context)] * n, kv_heads)
            yield partial(self.attention, prompt, kv_heads)
            yield partial(self.attention, prompt, kv_heads, exact=True)
        some = [(1, s.context)] * s.sequences[1]
        drafts = [(5, s.context)] * s.sequences[1]
        mixed = [*some, (s.context // 2, s.context - 3), (s.context // 4, s.context // 4)]  # one page is not full
        yield partial(self.attention, some, grouped, exact=True)
        yield partial(self.attention, drafts, grouped)
        yield partial(self.attention, mixed, grouped)
        yield partial(self.attention, mixed, grouped, exact=True)
        for step in (some, prompt):
            yield partial(self.attention, step, grouped, window=s.context // 4 + 5)
            yield partial(self.attention, step, grouped, cap=2.0)
            yield partial(self.attention, step, s.heads, alibi=True)
            yield partial(self.attention, step, grouped, dtype=F16)
        if self.chip.fp8:
            yield partial(self.stored, s.many)
            for n in s.sequences:
                yield partial(self.attention, [(1, s.context)] * n, grouped, cache=self.chip.fp8)
            yield partial(self.attention, prompt, grouped, cache=self.chip.fp8)

    def gate(self, rows: int, kind: str = "silu", *, alone: bool = False, dtype: torch.dtype = BF16) -> Case:
        ffn = self.shapes.ffn
        both, out = self.normal(rows, ffn if alone else 2 * ffn, dtype=dtype), self.empty(rows, ffn, dtype=dtype)

        def want() -> tuple[Tensor]:
            x, how = both[:, :ffn].double(), "tanh" if kind == "gelu_tanh" else "none"
            y = torch.nn.functional.silu(x) if kind == "silu" else torch.nn.functional.gelu(x, approximate=how)
            return (y if alone else y * both[:, ffn:].double(),)

        run = partial(gated.activated if alone else gated.gated, self.chip, kind, both, out=out)
        name = f"{kind}{'' if alone else '_mul'} {rows} x {ffn}{of(dtype)}"
        return Case(name, run, want, (result(out),), *gated.cost(rows, ffn, not alone))

    def embedded(self, tokens: int) -> Case:
        table, ids = self.normal(self.shapes.vocab, self.shapes.width), self.below(self.shapes.vocab, tokens)
        out = self.empty(tokens, self.shapes.width, dtype=F32)
        run = partial(embed.embed, self.chip, ids, table, out=out)
        cost = embed.cost(tokens, self.shapes.width)
        return Case(f"embed {tokens}", run, lambda: (table[ids.long()],), (result(out, tolerance=0.0),), *cost)

    def taken(self, rows: int) -> Case:
        x, numbers = self.normal(self.shapes.many, self.shapes.width), self.below(self.shapes.many, rows)
        out = self.empty(rows, self.shapes.width)
        run = partial(embed.embed, self.chip, numbers, x, out=out)
        cost = embed.cost(rows, self.shapes.width, out_bytes=2)
        return Case(f"take_rows {rows}", run, lambda: (x[numbers.long()],), (result(out, tolerance=0.0),), *cost)

    def slots(self, decodes: int, chunk: int) -> Case:
        """Decodes whose ids the host does not know, a chunk, and rows beyond the step."""
        context, beyond = self.shapes.context, 5
        tokens, each = decodes + chunk, -(-max(context, chunk) // PAGE_TOKENS)
        scratch, capacity = (decodes + 1) * each, tokens + beyond
        order = self.random().permutation(scratch).reshape(-1, each)
        batch = Batch(BatchLimits(capacity, decodes + 3, 1, scratch))
        steps = [Segment([-1 - i], context - 1 - i % 20, order[i].tolist()) for i in range(decodes)]
        batch.fill([*steps, Segment(range(chunk), 0, order[-1].tolist())], [0])
        at = [(order[i], step.first_position) for i, step in enumerate(steps)] + [(order[-1], i) for i in range(chunk)]
        right = [pages[i // PAGE_TOKENS] * PAGE_TOKENS + i % PAGE_TOKENS for pages, i in at]
        right += [scratch * PAGE_TOKENS + i % PAGE_TOKENS for i in range(tokens, capacity)]
        names = ("header", "positions", "seg_start", "page_start", "pages")
        fields = {name: self.integers(getattr(batch, name)) for name in names}
        sampled, start = self.below(1000, decodes), self.integers(batch.ids)
        ids, out = start.clone(), self.empty(capacity, dtype=torch.int64)

        def want() -> tuple[Tensor, ...]:
            return self.integers(right, torch.int64), torch.cat([sampled, start[decodes:]])

        run = partial(slots.slots, self.chip, ids=ids, sampled=sampled, scratch_page=scratch, out=out, **fields)
        results = result(out), result(ids, "ids", start=start)
        return Case(f"slots {decodes} + {chunk}", run, want, results, *slots.cost(tokens))

    def routed(self, tokens: int, count: int, top: int, renormalise: bool) -> Case:
        logits = self.normal(tokens, count, dtype=F32)
        weights, ids = self.empty(tokens, top, dtype=F32), self.empty(tokens, top, dtype=torch.int32)

        def want() -> tuple[Tensor, Tensor]:
            shares, chosen = logits.double().softmax(1).topk(top, dim=1)
            return shares / shares.sum(1, keepdim=True) if renormalise else shares, chosen.int()

        run = partial(route.route, self.chip, logits, renormalise=renormalise, weights=weights, ids=ids)
        results = result(weights, "weights", tolerance=1e-5), result(ids, "ids")
        return Case(f"route {tokens} to {top} of {count}", run, want, results, *route.cost(tokens, count, top))

    def combined(self, tokens: int, top: int, dtype: torch.dtype = BF16) -> Case:
        width = self.shapes.width
        x, out = self.normal(tokens * top, width, dtype=dtype), self.empty(tokens, width, dtype=dtype)
        weights = torch.rand(tokens, top, device=self.device)

        def want() -> tuple[Tensor]:
            return ((weights.double()[:, :, None] * x.double().view(tokens, top, width)).sum(1),)

        run = partial(route.combine, self.chip, x, weights, out=out)
        cost = route.combine_cost(tokens, top, width)
        return Case(f"combine {tokens} x {top}{of(dtype)}", run, want, (result(out),), *cost)

    def _logits(self, rows: int) -> Tensor:
        return 4 * self.normal(rows, self.shapes.vocab, dtype=F32)

    def _asked(self, logits: Tensor, **values: float) -> SampleRows:
        """Random seeds, and values for all rows. top_p is moved to the middle between two sums of weights, where no
        rounding decides which id is the last."""
        random, asked = self.random(), SampleRows.greedy(len(logits))
        asked.seed[:] = random.integers(0, 2**63, asked.rows)
        asked.position[:] = random.integers(0, 2**31 - 1, asked.rows)
        for name, value in values.items():
            getattr(asked, name)[:] = value
        if values.get("top_p", 1.0) < 1:
            for row, scaled in enumerate(logits.cpu().numpy() / asked.temperature[:, None]):
                kept = -np.sort(-scaled)[: int(asked.top_k[row]) or None]
                sums = np.cumsum(np.exp(kept - kept[0]).astype(np.float64))
                last = int(np.searchsorted(sums, values["top_p"] * sums[-1]))
                asked.top_p[row] = (2 * sums[last] - np.exp(kept[last] - kept[0])) / 2 / sums[-1]
        return asked

    def _adjust(self, asked: SampleRows) -> None:
        """Penalties for 100 ids of each row, biases for 20, a mask that leaves half."""
        random, count, vocab = self.random(), asked.rows, self.shapes.vocab
        asked.repetition[:], asked.presence[:], asked.frequency[:] = 1.3, 0.6, 0.37
        for name, most in (("hist", 100), ("bias", 20)):
            setattr(asked, f"{name}_start", np.arange(0, (count + 1) * most, most, dtype=np.int32))
            each = [random.permutation(vocab)[:most] for _ in range(count)]
            setattr(asked, f"{name}_ids", np.concatenate(each).astype(np.int32))
        asked.hist_counts = random.integers(0, 5, 100 * count).astype(np.int32)
        asked.bias_values = random.choice(np.array([-np.inf, -2.5, 3.3], np.float32), 20 * count)
        asked.mask = random.integers(0, 2**32, (count, -(-vocab // 32)), np.uint32)

    def scored(self, rows: int) -> Case:
        """Penalties, biases, a mask, a temperature: the reference's bits."""
        logits = self._logits(rows)
        asked = self._asked(logits, temperature=0.8)
        self._adjust(asked)
        settings = SampleSettings.of(asked, self.device)

        def want() -> tuple[Tensor]:
            raw = logits.cpu().numpy()
            found = [reference.penalised(raw[i], asked, i) / asked.temperature[i] for i in range(rows)]
            return (torch.from_numpy(np.stack(found)).to(self.device),)

        def run() -> tuple[Tensor]:
            return (scores.scores(self.chip, logits, settings),)

        cost = scores.cost(rows, self.shapes.vocab, True)
        return Case(f"scores {rows} rows", run, want, (Result("scores", None, 0.0),), *cost)

    def cut(self, rows: int, *, top_k: int = 0, top_p: float = 1.0) -> Case:
        """Where top-k and top-p cut."""
        scaled = self._logits(rows)
        asked = self._asked(scaled, temperature=1.0, top_k=top_k, top_p=top_p)
        settings = SampleSettings.of(asked, self.device)

        def want() -> tuple[Tensor, ...]:
            raw = scaled.cpu().numpy()
            kept = [reference.survivors(raw[i], top_k, float(asked.top_p[i]), 0.0) for i in range(rows)]
            lasts = [ids[np.lexsort((ids, -raw[i, ids]))[-1]] for i, ids in enumerate(kept)]
            ends = self.integers(lasts)
            return scaled.gather(1, ends.long()[:, None])[:, 0], ends, scaled.amax(1)

        run = partial(cutoff.cutoff, self.chip, scaled, settings)
        results = tuple(Result(name, None, 0.0) for name in ("thresholds", "lasts", "peaks"))
        cost = cutoff.cost(rows, self.shapes.vocab, bool(top_k) + (top_p < 1))
        return Case(f"cutoff {rows} rows, top_k {top_k}, top_p {top_p}", run, want, results, *cost)

    def chosen(self, rows: int, temperature: float, *, adjusted: bool = False, **values: float) -> Case:
        """The two kernels of `sample` that choose, on scores that lie ready, without its copies from and to the host;
        their ids are those of the reference's whole `sample`."""
        logits, vocab = self._logits(rows), self.shapes.vocab
        asked = self._asked(logits, temperature=temperature, **values)
        if adjusted:
            self._adjust(asked)
        settings = SampleSettings.of(asked, self.device)
        scaled = settings.cut or adjusted
        source = scores.scores(self.chip, logits, settings) if scaled else logits
        ends = cutoff.cutoff(self.chip, source, settings) if settings.cut else (settings.words,) * 3
        tile = tiles.choose(sample.NAME, self.chip)
        splits = -(-vocab // tile.sizes["SPLIT"])
        best, best_ids = self.empty(rows, splits, dtype=F32), self.empty(rows, splits, dtype=torch.int32)
        ids = self.empty(rows, dtype=torch.int32)

        def run() -> None:
            sample._choose[(rows, splits)](
                source, settings.words, *ends, best, best_ids, vocab, source.stride(0), SCALED=scaled, CUT=settings.cut,
                **tile.launch(),
            )  # fmt: skip
            merging = tile.compiler() | {"num_warps": 1}
            sample._merge[(rows,)](best, best_ids, ids, splits, SPLITS=triton.next_power_of_2(splits), **merging)

        def want() -> tuple[Tensor]:
            return (self.integers(reference.sample(logits.cpu().numpy(), asked).ids),)

        told = "".join(f", {name} {value}" for name, value in values.items()) + ", penalties" * adjusted
        name = f"sample {rows} rows, temperature {temperature}{told}"
        return Case(name, run, want, (result(ids),), *sample.cost(rows, vocab), scratch=(best, best_ids))

    def logprobs(self, rows: int, wanted: int) -> Case:
        """Of the chosen id and of the largest; a row in four does not ask."""
        logits = self._logits(rows)
        asked = self._asked(logits, temperature=1.0, logprobs=wanted)
        asked.logprobs[3::4] = -1
        settings, found = SampleSettings.of(asked, self.device), reference.sample(logits.cpu().numpy(), asked)
        ids = self.integers(found.ids)

        def want() -> tuple[Tensor, ...]:
            parts = (found.logprob, found.top_ids, found.top_logprobs)
            return tuple(torch.from_numpy(part).to(self.device) for part in parts)

        run = partial(logprobs.logprobs, self.chip, logits, settings, ids)
        results = Result("logprob", None, 1e-5), Result("top ids", None, 0.0), Result("top logprobs", None, 1e-5)
        cost = logprobs.cost(rows, self.shapes.vocab, wanted)
        return Case(f"logprobs {rows} rows, {wanted} each", run, want, results, *cost)
