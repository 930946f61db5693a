"""Prompts of roofline.torch as users of transformers have them: encodings, masks, arrays and lists."""

import json
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the encodings are transformers'")

import torch_models as models  # noqa: E402

from roofline.common.errors import RequestError, RooflineError  # noqa: E402
from roofline.engine.params import SamplingParams  # noqa: E402
from roofline.torch import TorchModel, from_model  # noqa: E402

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
TEXTS = ["the cat and the hat", "dog"]


@pytest.fixture(scope="module")
def model() -> Iterator[TorchModel]:
    with from_model(models.build("llama"), models.tokenizer(), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def tokenizer():
    made = models.tokenizer()
    made.pad_token = "</s>"
    return made


@pytest.fixture(scope="module")
def wanted(model):
    return [output.ids for output in model.generate(TEXTS, GREEDY)]


def encodings(tokenizer):
    yield tokenizer(TEXTS)  # lists of several lengths
    for side in ("left", "right"):
        for kind in ("pt", "np", None):
            yield tokenizer(TEXTS, return_tensors=kind, padding=True, padding_side=side)
    yield [tokenizer(text) for text in TEXTS]
    yield [tokenizer(text, return_tensors="pt") for text in TEXTS]
    yield [TEXTS[0], tokenizer(TEXTS[1])]


def test_encodings_are_the_prompts_they_stand_for(model, tokenizer, wanted):
    for encoding in encodings(tokenizer):
        assert [output.ids for output in model.generate(encoding, GREEDY)] == wanted
    assert [output.ids for output in model.generate(tokenizer(TEXTS[0]), GREEDY)] == wanted[:1]
    encoding = tokenizer(TEXTS, return_tensors="pt", padding=True)
    for answers in (model.generate_ids(encoding, GREEDY), model.generate_ids(**encoding, params=GREEDY)):
        assert [answer.tolist() for answer in answers] == wanted


def test_an_encoding_answers_as_transformers_generate_does(tokenizer):
    """Greedy answers of transformers to a padded batch, in float32."""
    theirs = models.build("llama")
    encoding = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    with torch.no_grad():
        out = theirs.generate(**encoding, do_sample=False, max_new_tokens=4, pad_token_id=tokenizer.pad_token_id)
    wanted = out[:, encoding.input_ids.shape[1] :]
    with from_model(theirs, backend="reference", arithmetic="plain") as ours:
        assert [answer.tolist() for answer in ours.generate_ids(encoding, GREEDY)] == wanted.tolist()


def test_mappings_are_prompts_as_llm_has_them(model, wanted):
    ids = model.llm.encode(TEXTS[1])
    for prompt in ({"prompt": TEXTS[1]}, {"prompt_token_ids": ids}, [{"prompt_token_ids": np.array(ids)}]):
        assert [output.ids for output in model.generate(prompt, GREEDY)] == wanted[1:]


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ({"text": "hi"}, "a mapping with 'text'"),
        ({"attention_mask": [1]}, "a mapping with 'attention_mask'"),
        ({"input_ids": [5], "token_type_ids": [0]}, "'token_type_ids'"),
        ({"input_ids": [5, 6], "attention_mask": [1]}, "another shape"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, "other numbers"),
        ({"input_ids": [5, 6], "attention_mask": [0, 0]}, "no tokens"),
        ({"input_ids": "hi"}, "input_ids: str"),
        (torch.tensor([[True, False]]), "no ids"),
        (torch.tensor([[5.0]]), "not a list of token ids"),
        ([True, False], "no ids"),
        (7, "neither a string nor"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(model, prompts, match):
    with pytest.raises(RequestError, match=match):
        model.generate(prompts, GREEDY)


def test_ids_may_be_lists_and_have_a_mask(model):
    ids = models.ids(2, 7)
    first, second = (answer.tolist() for answer in model.generate_ids(ids, GREEDY))
    for same in (ids.tolist(), [ids[0], ids[1].numpy()], ids.numpy()):
        assert [answer.tolist() for answer in model.generate_ids(same, GREEDY)] == [first, second]
    (alone,) = model.generate_ids(ids[0].tolist(), GREEDY)
    assert alone.tolist() == first
    padded, mask = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids], 1), torch.ones(2, 10, dtype=torch.bool)
    mask[:, :3] = False
    assert model.generate_ids(padded, GREEDY, attention_mask=mask)[1].tolist() == second
    assert model.generate_ids(padded[1], GREEDY, attention_mask=mask[1].tolist())[0].tolist() == second


@pytest.mark.parametrize(
    ("input_ids", "mask"),
    [
        (torch.tensor([True, False]), None),
        (torch.tensor([1.5]), None),
        (torch.zeros(1, 1, 1, dtype=torch.int64), None),
        (torch.tensor(5), None),
        ([], None),
        ("text", None),
        ([[5], 6], None),
        ([5, 6], [1]),
        ([5, 6], [[1, 1], [1, 1]]),
        ({"input_ids": [5]}, [1]),
    ],
)
def test_ids_that_are_none_are_refused(model, input_ids, mask):
    with pytest.raises(RequestError):
        model.generate_ids(input_ids, GREEDY, attention_mask=mask)
    assert not model.engine.has_work


def test_logits_of_lists_are_refused_by_name(model):
    with pytest.raises(RequestError, match="list is no tensor"):
        model.logits([5, 6])


def test_ids_of_arrays_are_whole_numbers_that_json_writes(model):
    ids = models.ids(2, 5)
    prompts = (ids.numpy(), list(ids.numpy()), [*map(list, ids.numpy())], ids, [*ids])
    for prompt in prompts:
        outputs = model.llm.generate(prompt, GREEDY)
        assert json.loads(json.dumps([output.prompt_ids for output in outputs])) == ids.tolist()
    for prompt in (ids[0].numpy(), ids[0], list(ids[0].numpy()), list(ids[0])):
        (output,) = model.llm.generate(prompt, GREEDY)
        assert json.loads(json.dumps(output.prompt_ids)) == ids[0].tolist()


def test_a_closed_model_says_so():
    model = from_model(models.build("llama"), models.tokenizer(), backend="reference")
    model.close()
    model.close()
    calls = (model.logits, model.hidden_states, model.generate_ids, model.generate, lambda _: model.llm.stats())
    for call in calls:
        with pytest.raises(RooflineError, match="this model is closed: load it again"):
            call(torch.tensor([5]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_new_tokens": 3}, r"generate\w*, as SamplingParams, has no option 'max_new_tokens': give max_tokens=N"),
        ({"do_sample": False}, r"generate\w*, as SamplingParams, has no option 'do_sample': temperature=0 takes"),
        ({"max_tokens": 3}, r"generate\w* has no option 'max_tokens': give SamplingParams\(max_tokens=\.\.\.\)"),
        ({"attention_masks": [[1]]}, r"generate\w*, as SamplingParams, has no option 'attention_masks'"),
    ],
)
def test_options_of_transformers_are_refused_with_what_to_give(model, options, match):
    for generate in (model.generate, model.generate_ids):
        with pytest.raises(TypeError, match=f"^{match}"):
            generate([[5, 6]], **options)
