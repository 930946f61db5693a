"""DPO and GRPO: TRL's losses on the same log-probabilities, and gradients through the model beside plain autograd."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")
torch = pytest.importorskip("torch", reason="training is torch")

from roofline.train.config.objectives import DpoSection, GrpoSection  # noqa: E402
from roofline.train.data.loader import Rows  # noqa: E402
from roofline.train.data.row_arrays import RowArrays  # noqa: E402
from roofline.train.model.cross_entropy import IGNORED  # noqa: E402
from roofline.train.model.objective import TrainingObjective  # noqa: E402
from roofline.train.parallel.processes import World  # noqa: E402
from roofline.train.preference.dpo import PairLoss, of_documents  # noqa: E402
from roofline.train.preference.grpo import AnswerLoss, advantages  # noqa: E402
from roofline.train.run.gradients import Gradients  # noqa: E402
from tests.train.objective_cases import GRPO, PAIRS, answers, pairs  # noqa: E402
from tests.train.test_modules import CONFIGS, made  # noqa: E402

TRL = json.loads(Path(__file__).with_name("trl_numbers.json").read_text())  # written by write_trl_numbers.py


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_a_pair_s_loss_and_slopes_are_trl_s(case: tuple[str, float, float]) -> None:
    name, beta, smoothing = case
    given, expected = pairs(), TRL["dpo"][" ".join(map(str, case))]
    objective = PairLoss(DpoSection(loss=name, beta=beta, label_smoothing=smoothing))
    # The pairs lie one behind the other in one row, and behind them tokens that fill it up.
    documents = torch.arange(6).repeat_interleave(7)[None]
    row = torch.nn.functional.pad(given.policy.reshape(1, -1), (0, 5)).requires_grad_()
    documents = torch.nn.functional.pad(documents, (0, 5), value=6)
    counts = torch.nn.functional.pad(given.counts.reshape(1, -1), (0, 5))
    facts = {"pairs": torch.tensor([3]), "reference": given.reference.sum(1).view(1, 3, 2)}
    noted: list[Any] = []
    loss = objective.value(counts, documents, facts, noted.append)(row) / objective.units(counts, facts)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    slopes = torch.tensor(expected["slopes"], dtype=torch.float64)
    torch.testing.assert_close((row.grad[0, :-5].view(6, 7)) * given.counts, slopes * given.counts, rtol=1e-6, atol=0)
    assert [float(each) / 3 for each in noted[0]] == pytest.approx(expected["figures"], rel=1e-6)


@pytest.mark.parametrize("case", GRPO, ids=str)
def test_an_answer_s_loss_and_slopes_are_trl_s(case: tuple[str, float, float]) -> None:
    name, high, kl = case
    given, expected = answers(), TRL["grpo"][" ".join(map(str, case))]
    section = GrpoSection(reward="exact_match", loss=name, clip_high=high, kl=kl, max_new_tokens=16, group=3)
    objective = AnswerLoss(section)
    facts = {"old": given.old, "advantage": torch.from_numpy(advantages(section, given.rewards.numpy())).reshape(-1)}
    torch.testing.assert_close(facts["advantage"], given.advantages, rtol=1e-9, atol=0)
    if kl:
        facts["reference"] = given.reference
    scores = given.scores.clone().requires_grad_()
    loss = objective.value(given.counts, None, facts, lambda _: None)(scores) / objective.units(given.counts, facts)
    loss.backward()
    assert loss.item() == pytest.approx(expected["loss"], rel=1e-6)
    slopes = torch.tensor(expected["slopes"], dtype=torch.float64)
    torch.testing.assert_close(scores.grad, slopes, rtol=1e-6, atol=1e-12)


def test_advantages_that_are_not_scaled() -> None:
    section = GrpoSection(reward="exact_match", scale="none")
    assert advantages(section, np.array([[1.0, 0.0, 2.0]])).tolist() == [[0.0, -1.0, 1.0]]
    assert not advantages(GrpoSection(reward="exact_match"), np.ones((2, 3))).any()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ["llama", "llama_untied", "mixtral", "mpt_alibi"])
def test_gradients_through_the_chunked_head_are_those_of_autograd(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roofline.train.model.modules.chunk_rows", lambda vocab: 7)
    model = made(CONFIGS[name])
    vocab, generator = CONFIGS[name]["vocab"], torch.Generator().manual_seed(5)
    ids = torch.randint(0, vocab, (2, 20), generator=generator)
    documents = (torch.arange(20) // 5).expand(2, -1)  # two pairs a row
    targets = ids.roll(-1, 1).masked_fill(torch.arange(20) % 5 > 2, IGNORED)  # 3 of 5: the next token is the document's
    reference = -3 * torch.rand(2, 4, generator=generator, dtype=torch.float64)
    objective = PairLoss(DpoSection(beta=0.3))
    facts = {"pairs": torch.tensor([2, 1]), "reference": reference.view(2, 2, 2)}
    value = objective.value(targets != IGNORED, documents, facts, lambda _: None)

    scores = (model(ids, documents=documents) / temperature).log_softmax(-1)
    picked = scores.gather(2, targets.clamp(min=0)[..., None])[..., 0] * (targets != IGNORED)
    wanted = value(picked)
    (3 * wanted).backward()
    expected = {name: each.grad.clone() for name, each in model.named_parameters()}
    model.zero_grad()
    found = model(ids, targets, documents, objective=TrainingObjective(value, temperature))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    (3 * found).backward()
    for name, each in model.named_parameters():
        largest = float(expected[name].abs().max())
        assert largest > 0, name
        torch.testing.assert_close(each.grad, expected[name], rtol=1e-3, atol=1e-4 * largest)
    with torch.no_grad():
        without = model(ids, targets, documents, objective=TrainingObjective(value, temperature))
    assert without == found.detach()


def test_rows_without_targets_have_a_gradient_of_zero() -> None:
    model = made(CONFIGS["llama"])
    ids = torch.zeros(1, 8, dtype=torch.int64)
    loss = model(ids, torch.full_like(ids, IGNORED), objective=TrainingObjective(lambda scores: scores.sum()))
    loss.backward()
    assert loss.item() == 0
    assert all(not each.grad.any() for each in model.parameters())


def test_sums_of_documents() -> None:
    values, documents = torch.tensor([[1.0, 2, 3, 4]]), torch.tensor([[0, 0, 1, 3]])
    assert of_documents(values, documents, 4).tolist() == [[3, 3, 0, 4]]


def test_a_rank_without_rows_computes_a_loss_of_zero() -> None:
    model, objective = made(CONFIGS["llama"]), PairLoss(DpoSection())
    computed = Gradients(model, World(), "fp32", None)
    computed.objective = objective
    none, documents = np.empty((0, 8), np.int64), np.empty((0, 8), np.int64)
    facts = {"pairs": np.empty(0, np.int64), "reference": np.empty((0, 2, 2))}
    loss = computed.loss(none, documents, np.empty((0, 8), bool), facts)
    loss.backward()
    assert loss.item() == 0
    assert all(not each.grad.any() for each in model.parameters())
    with torch.no_grad():
        assert computed.held_out(RowArrays(none, documents, np.empty((0, 8), bool)), facts) == (0.0, 0)
    assert computed.means(0) == {"reward_chosen": 0.0, "reward_rejected": 0.0, "accuracy": 0.0}


def test_answers_of_a_batch_that_is_begun_again_are_counted_once() -> None:
    """Memory ends in the first two of three rows; a second update with the same answers counts none of them."""
    model, objective = made(CONFIGS["llama"]), AnswerLoss(GrpoSection(reward="exact_match"))
    computed = Gradients(model, World(), "fp32", None)
    computed.objective, computed.size = objective, 2

    def watch() -> None:
        if computed.size == 2 and objective.apart.count:
            raise MemoryError

    model.watch = watch
    tokens = np.arange(24).reshape(3, 8)
    part = RowArrays(tokens, np.zeros_like(tokens), np.arange(8) > np.arange(2, 5)[:, None])
    facts = {"old": np.full((3, 8), -3, np.float32), "advantage": np.ones(3, np.float32)}
    objective.fresh = 3
    for _ in range(2):
        computed.backward(Rows(0, np.arange(3), (part,)), [facts])
        assert (computed.size, objective.apart.count) == (1, 5 + 4 + 3)
