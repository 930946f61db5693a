"""The matrices of attention over compressed rows, in either of their forms."""

import numpy as np
import pytest

from roofline.ops import formats
from roofline.weights.checkpoint import Checkpoint
from roofline.weights.latent_form import latent_form
from roofline.weights.random_weights import random_checkpoint
from tests.models.parity_cases import DEEPSEEK3, YOUTU

HEADS, PLAIN, VALUE, RANK = 4, 16, 24, 32  # of DEEPSEEK3


def stored(form: str, latent: bool = False) -> Checkpoint:
    """A checkpoint as a file would have it."""
    made = random_checkpoint(DEEPSEEK3 | {"latent": latent, "q_rank": 64}, 3, form)
    made.kind = "safetensors"
    return made


@pytest.mark.parametrize("form", ["F32", "BF16"])
def test_the_matrix_of_keys_and_values_is_taken_apart_and_put_together(form: str) -> None:
    whole = stored(form)
    apart = latent_form(whole, latent=True)
    name = "layers.1.attn.kv_up.weight"
    heads = whole.dequantize(name).reshape(HEADS, PLAIN + VALUE, RANK)
    keys = apart.dequantize("layers.1.attn.k_up.weight").reshape(HEADS, RANK, PLAIN)
    values = apart.dequantize("layers.1.attn.v_up.weight").reshape(HEADS, VALUE, RANK)
    assert np.array_equal(keys, heads[:, :PLAIN].swapaxes(1, 2))
    assert np.array_equal(values, heads[:, PLAIN:])
    again = latent_form(apart, latent=False)
    assert again.tensors == whole.tensors
    assert np.array_equal(again.read(name), whole.read(name))


def test_values_keep_their_blocks_and_keys_become_floats() -> None:
    whole = stored("Q8_0")
    apart = latent_form(whole, latent=True)
    kinds = {name.rsplit(".", 2)[1]: info.format for name, info in apart.tensors.items() if "_up" in name}
    assert (kinds["k_up"], kinds["v_up"]) == ("F32", "Q8_0")
    heads = whole.dequantize("layers.0.attn.kv_up.weight").reshape(HEADS, PLAIN + VALUE, RANK)
    values = apart.read("layers.0.attn.v_up.weight")
    assert np.array_equal(formats.get("Q8_0").dequantize(values, (HEADS, VALUE, RANK)), heads[:, PLAIN:])
    keys = apart.dequantize("layers.0.attn.k_up.weight").reshape(HEADS, RANK, PLAIN)
    assert np.array_equal(keys, heads[:, :PLAIN].swapaxes(1, 2))


def test_matrices_in_blocks_are_put_together_in_float32() -> None:
    apart = stored("F32", latent=True)
    mixed = latent_form(apart, latent=False)
    assert mixed.tensors["layers.0.attn.kv_up.weight"].format == "F32"
    keys = apart.dequantize("layers.0.attn.k_up.weight").reshape(HEADS, RANK, PLAIN)
    heads = mixed.dequantize("layers.0.attn.kv_up.weight").reshape(HEADS, PLAIN + VALUE, RANK)
    assert np.array_equal(heads[:, :PLAIN], keys.swapaxes(1, 2))


def test_a_form_that_is_there_stays() -> None:
    whole = stored("F32")
    assert latent_form(whole, latent=False) is whole
    plain = random_checkpoint({**YOUTU, "latent": True}, 3, "F32")
    assert latent_form(plain, latent=True) is plain
