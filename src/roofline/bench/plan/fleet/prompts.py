"""The prompts that replicas compute in a slice: which share a step, when it ends, how much time that takes."""

from dataclasses import dataclass

import numpy as np

from roofline.bench.plan.fleet.service import Service
from roofline.bench.plan.fleet.waiting import Waiting


@dataclass(frozen=True)
class Computed:
    """What prompts took in a slice. first: float64 [requests], moments of first ids; seconds, steps: float64
    [replicas], of steps with prompt tokens that lie in the slice."""

    first: np.ndarray
    seconds: np.ndarray
    steps: np.ndarray


class Prompts:
    """Steps with prompt tokens. Of each replica the last one that is planned: start, end: float64 [replicas], moments;
    tokens: in it. A prompt that comes before it begins goes along, one that comes later has the step after it."""

    def __init__(self, service: Service, replicas: int) -> None:
        self._service = service
        self._start, self._end, self._tokens = np.zeros((3, replicas))
        self._carry, self._carry_steps = np.zeros((2, replicas))  # seconds and steps that lie beyond the slice before

    def compute(self, requests: Waiting, decoding: np.ndarray, now: float, seconds: float) -> Computed:
        """The slice that begins now. requests: that begin, in the order in which they came; decoding: float64
        [replicas], answers that each decodes meanwhile."""
        decode = self._service.decode_step(np.maximum(decoding, 1))
        spent, steps = self._carry.copy(), self._carry_steps.copy()
        step_of = np.empty(len(requests), np.int64)  # of each request, an index into `ends`
        ends = np.empty(len(requests))
        latest = np.zeros(len(spent), np.int64)  # index of the last step of each replica
        places = requests.places()
        by_place = np.argsort(places, kind="stable")
        begin = 0
        for bound in np.cumsum(np.bincount(places)):
            chosen = by_place[begin:bound]  # one request at most of each replica
            rows, arrived = requests.replica[chosen], np.maximum(requests.arrived[chosen], now)
            joins, added, more = self._place(rows, arrived, requests.prompt[chosen], decoding, decode)
            latest[rows] = np.where(joins & (begin > 0), latest[rows], chosen)
            step_of[chosen] = latest[rows]
            ends[latest[rows]] = self._end[rows]
            spent[rows] += added
            steps[rows] += more
            begin = bound
        later = np.minimum(spent, np.maximum(0.0, self._end - (now + seconds)))
        part = later / np.maximum(spent, 1e-12)
        self._carry, self._carry_steps = later, steps * part
        return Computed(ends[step_of], np.minimum(spent - later, seconds), steps * (1 - part))

    def _place(
        self, rows: np.ndarray, arrived: np.ndarray, prompt: np.ndarray, decoding: np.ndarray, decode: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Put one prompt of each of some replicas into a step: whether it goes along with the last that is planned, the
        seconds and the steps that it adds, [rows] each."""
        start, end, tokens, limit = self._start[rows], self._end[rows], self._tokens[rows], self._service.step_tokens
        joins = (arrived < start) & (tokens + prompt <= limit)
        idle = arrived >= end
        # Since the last of these steps others only decoded, one after the other; the one under way goes on to its end.
        decodes = np.floor((arrived - end) / decode[rows]) + 1
        next_step = np.where(decoding[rows] > 0.5, end + decodes * decode[rows], arrived)
        begin = np.where(idle, next_step, np.where(joins, start, end))
        total = np.where(joins, tokens + prompt, prompt)
        steps = np.maximum(1.0, total / limit)
        ends = begin + self._service.prompt_step(decoding[rows], total / steps) * steps
        self._start[rows], self._end[rows], self._tokens[rows] = begin, ends, total
        return joins, ends - np.where(joins, end, begin), np.where(joins, 0.0, steps)

    def drop(self, replicas: np.ndarray) -> None:
        """Forget what some replicas have planned."""
        for values in (self._start, self._end, self._tokens, self._carry, self._carry_steps):
            values[replicas] = 0.0
