"""Layers on the host: each sees its own weights, in any order of use, however the two streams interleave."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roofline.backends.gpu.memory.offload import Immediate, Offload
from roofline.common.errors import ConfigError

torch = pytest.importorskip("torch")


def layers_of(count, seed=0):
    """Layers of unlike sizes and types."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "w": torch.randn(3 + index % 3, 5, generator=generator).bfloat16(),
            "scale": torch.full((1 + index % 4,), float(index)),
            "q": torch.full((7, 3), index, dtype=torch.uint8).T,
        }
        for index in range(count)
    ]


def same(got, wanted):
    return got.keys() == wanted.keys() and all(torch.equal(got[name], wanted[name]) for name in wanted)


class Machine:
    """Two streams whose queues run interleaved at random, an operation at a time, with respect for the events alone.

    A wait that is left out, or waits for the wrong event, shows as a read of the wrong bytes under some seed.
    """

    def __init__(self, deaf=()):
        self.queues, self.deaf, self.copies = {"compute": [], "copy": []}, deaf, 0
        self.done = set()

    def _put(self, stream, action, after=None):
        event = object()
        self.queues[stream].append((action, after, event))
        return event

    def copy(self, target, source):
        self.copies += 1
        return self._put("copy", lambda: target.copy_(source))

    def before_reading(self, copied):
        if "reading" not in self.deaf:
            self._put("compute", lambda: None, copied)

    def after_reading(self):
        return self._put("compute", lambda: None)

    def before_copying(self, read):
        if "copying" not in self.deaf:
            self._put("copy", lambda: None, read)

    def compute(self, action):
        self._put("compute", action)

    def run(self, seed):
        choose = random.Random(seed)
        while any(self.queues.values()):
            ready = [
                n for n, queue in self.queues.items() if queue and (queue[0][1] is None or queue[0][1] in self.done)
            ]
            assert ready, "the streams wait for each other"
            action, _, event = self.queues[choose.choice(ready)].pop(0)
            action()
            self.done.add(event)


def steps_on(machine, layers, hosted, buffers, order, seed):
    """Whether every use of the machine's streams saw its own layer's weights."""
    offload = Offload(layers, "cpu", hosted, buffers, machine)
    seen = []
    for layer in order:
        with offload.using(layer) as weights:
            wanted = layers[layer]
            machine.compute(lambda weights=weights, wanted=wanted: seen.append(same(weights, wanted)))
    machine.run(seed)
    assert len(seen) == len(order)
    return all(seen)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_layer_sees_its_own_weights(data):
    count = data.draw(st.integers(1, 7))
    hosted = data.draw(st.lists(st.integers(0, count - 1), max_size=count))
    buffers = data.draw(st.integers(1, 4))
    layers = layers_of(count)
    order = [*range(count)] * 3
    if data.draw(st.booleans()):  # a step that is left, or another order altogether
        order = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    assert steps_on(Machine(), layers, hosted, buffers, order, data.draw(st.integers(0, 1000)))
    offload = Offload(layers, "cpu", hosted, buffers)
    for layer in order:
        with offload.using(layer) as weights:
            assert same(weights, layers[layer])


@pytest.mark.parametrize("deaf", ["reading", "copying"])
def test_a_wait_left_out_is_seen(deaf):
    """The machine finds both races: reading before the copy is done, and copying before the reading is."""
    results = [steps_on(Machine((deaf,)), layers_of(4), range(4), 2, [*range(4)] * 2, seed) for seed in range(30)]
    assert not all(results)


@pytest.mark.parametrize(("buffers", "hosted", "copies"), [(2, 4, 13), (4, 4, 4), (9, 4, 4), (1, 2, 6), (2, 0, 0)])
def test_a_layer_is_copied_once_a_step_and_not_at_all_where_it_has_a_buffer(buffers, hosted, copies):
    """Over three steps; with two buffers the first layer of a fourth step is on its way already."""
    machine = Machine()
    assert steps_on(machine, layers_of(5), range(hosted), buffers, [*range(5)] * 3, 1)
    assert machine.copies == copies


def test_the_next_layer_is_on_its_way_while_one_computes():
    machine = Machine()
    offload = Offload(layers_of(6), "cpu", [1, 4], 2, machine)
    for layer in (0, 1):
        with offload.using(layer):
            assert machine.copies == 2 * layer


def test_a_failing_step_leaves_the_rest_intact():
    layers = layers_of(4)
    offload = Offload(layers, "cpu", range(4), 2)
    with pytest.raises(RuntimeError), offload.using(1):
        raise RuntimeError("a kernel failed")
    for layer in (0, 1, 2, 3):
        with offload.using(layer) as weights:
            assert same(weights, layers[layer])


def test_what_cannot_be_offloaded_is_refused():
    for hosted, buffers in (([4], 2), ([-1], 2), ([0], 0)):
        with pytest.raises(ConfigError, match="offload"):
            Offload(layers_of(4), "cpu", hosted, buffers)
    offload = Offload(layers_of(2), "cpu", [0, 1])
    with offload.using(0), pytest.raises(AssertionError, match="at a time"), offload.using(1):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_a_gpus_own_streams(buffers):
    """Layers of 64 MiB, so that copies outlast the host's calls; each use sums its layer on the device."""
    layers = [{"w": torch.full((4096, 4096), float(index))} for index in range(8)]
    offload = Offload(layers, "cuda", [0, 2, 3, 5, 7], buffers)
    sums = []
    for layer in [*range(8)] * 5:
        with offload.using(layer) as weights:
            sums.append(weights["w"].double().sum())
    assert torch.stack(sums).tolist() == [float(index) * 2**24 for index in range(8)] * 5


def test_the_link_is_timed():
    from roofline.backends.gpu.measure.roofs import link_rate

    assert 1e6 < link_rate("cpu", 1 << 20) < 1e13


def test_a_model_runs_on_offloaded_layers():
    """The families' own forward, its blocks given what `using` yields: the same bits as with all weights in place."""
    from roofline.models.forward import forward
    from roofline.models.registry import configure
    from roofline.models.spec import expand, nest
    from roofline.ops.batch import Batch, BatchLimits, Segment
    from tests.models.eager import ContiguousCache, eager_batch

    fields = {"family": "llama", "width": 32, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48}
    fields |= {"vocab": 40, "norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "rope_style": "half"}
    fields |= {"max_position": 64, "tied": True, "attention_bias": False, "qk_norm": False, "sliding_window": None}
    family, cfg = configure(fields)
    torch.manual_seed(0)
    parameters = {p.name: torch.randn(p.shape) * 0.2 for p in expand(family.spec(cfg), 4) if p.tied_to is None}
    layers = [
        {n.removeprefix(f"layers.{i}."): t for n, t in parameters.items() if n.startswith(f"layers.{i}.")}
        for i in range(4)
    ]
    offload = Offload(layers, "cpu", [0, 1, 3], 2, Immediate())
    batch = Batch(BatchLimits(9, 1, 9, 1))
    batch.fill([Segment(range(9), 0, [0])], range(9))

    def call_block(block, cfg, _, x, layer, batch):
        with offload.using(layer) as weights:
            return block(cfg, nest(list(weights), list(weights.values())), x, layer, batch)

    with torch.no_grad():
        wanted = forward(family, cfg, parameters, eager_batch(batch, ContiguousCache(2)))
        without = {
            n: t if not n.startswith("layers.") else torch.full_like(t, torch.nan) for n, t in parameters.items()
        }
        got = forward(family, cfg, without, eager_batch(batch, ContiguousCache(2)), call_block)
    assert torch.equal(got, wanted)
