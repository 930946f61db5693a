"""Log-probabilities of prompt tokens: rows of a step whose id is known before the step is computed.

A row that scores a prompt token is an ordinary row of sampling: greedy, with a bias on the id that stands in the
prompt, which no logit outweighs. So every backend can compute it, and its log-probabilities are those of the raw
logits, as everywhere. A step has no more rows than its batch, so a prompt that is scored is computed in smaller chunks.
"""

import numpy as np

from roofline.backends.sampling import Sampled, SampleRows
from roofline.engine.events import TokenLogprob, token_logprob
from roofline.engine.schedule.plan import PromptScores, StepPlan

DECISIVE = 1e30  # above every logit, and far from infinity
PER_ROW = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position"),
    *("repetition", "presence", "frequency", "logprobs"),
)


def with_scores(rows: SampleRows, plan: StepPlan) -> SampleRows:
    """All rows of a step. rows: those of `plan.sampled`; those that score prompt tokens stand among them."""
    sampled = plan.sampled_rows()  # where each of `rows` stands
    total = rows.rows + plan.scored
    result = SampleRows.greedy(total)
    for name in PER_ROW:
        getattr(result, name)[sampled] = getattr(rows, name)
    scoring = np.ones(total, bool)
    scoring[sampled] = False
    tokens = [token for score in plan.scores for token in score.ids]
    result.logprobs[scoring] = [score.alternatives for score in plan.scores for _ in score.ids]
    history = np.zeros(total, np.int32)
    history[sampled] = np.diff(rows.hist_start)
    result.hist_start[1:] = np.cumsum(history)
    result.hist_ids, result.hist_counts = rows.hist_ids, rows.hist_counts
    biases = np.ones(total, np.int32)
    biases[sampled] = np.diff(rows.bias_start)
    result.bias_start[1:] = np.cumsum(biases)
    decisive = np.zeros(int(biases.sum()), bool)
    decisive[result.bias_start[:-1][scoring]] = True
    result.bias_ids = np.empty(len(decisive), np.int32)
    result.bias_values = np.full(len(decisive), DECISIVE, np.float32)
    result.bias_ids[decisive], result.bias_ids[~decisive] = tokens, rows.bias_ids
    result.bias_values[~decisive] = rows.bias_values
    if rows.mask is not None:
        result.mask = np.full((total, rows.mask.shape[1]), 0xFFFFFFFF, np.uint32)  # [rows, words]
        result.mask[sampled] = rows.mask
    return result


def without_scores(sampled: Sampled, plan: StepPlan) -> Sampled:
    """The rows of `plan.sampled` among all rows of a step."""
    own = plan.sampled_rows()
    return Sampled(sampled.ids[own], sampled.logprob[own], sampled.top_ids[own], sampled.top_logprobs[own])


def scores_of(sampled: Sampled, scores: PromptScores) -> list[TokenLogprob] | None:
    """The log-probability of each prompt token of these rows; None where the logits are not numbers."""
    rows = range(scores.row, scores.row + len(scores.ids))
    if any(int(sampled.ids[row]) != token for row, token in zip(rows, scores.ids, strict=True)):
        return None
    return [
        token_logprob(token, row, scores.alternatives, sampled) for row, token in zip(rows, scores.ids, strict=True)
    ]
