"""Linear layers of models replaced in place: which are, which are refused, and by what name."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from roofline.common.errors import ConfigError  # noqa: E402
from roofline.torch import PackedLinear, quantize_linears  # noqa: E402


def test_a_model_of_transformers_with_packed_layers():
    pytest.importorskip("transformers")
    import torch_models as models

    model = models.build("llama", hidden_size=256, head_dim=64, intermediate_size=256)
    input_ids = models.ids(2, 12)
    with torch.no_grad():
        before = model(input_ids).logits
        assert quantize_linears(model, "Q8_0") == 2 * 7
        assert isinstance(model.model.layers[1].mlp.up_proj, PackedLinear)
        assert not isinstance(model.lm_head, PackedLinear)
        after = model(input_ids).logits
        torch.compiler.reset()
        compiled = torch.compile(model, backend="eager")(input_ids).logits
    assert 0 < (after - before).std() < 0.03 * before.std()  # 8 bits a weight
    assert torch.allclose(compiled, after, atol=1e-5)
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj"):
        quantize_linears(models.build("llama", hidden_size=36, num_attention_heads=2, intermediate_size=64))


@pytest.mark.parametrize("rank", [4, 32])
@pytest.mark.parametrize("options", [{"target_modules": ["q_proj"]}, {"modules_to_save": ["o_proj"]}])
def test_a_model_with_an_adapter_is_refused_as_it_is_and_taken_when_it_is_merged(rank, options):
    peft = pytest.importorskip("peft")
    import torch_models as models

    options = {"target_modules": ["v_proj"]} | options
    adapted = peft.get_peft_model(models.build("llama", intermediate_size=64), peft.LoraConfig(r=rank, **options))
    for model in (adapted, adapted.base_model.model):
        with pytest.raises(ConfigError, match=r"_proj has an adapter .* peft_model\.merge_and_unload\(\)"):
            quantize_linears(model, keep=["lora_A.default", "lora_B.default", "v_proj", "lm_head"])
        assert not any(isinstance(module, PackedLinear) for module in model.modules())
    assert quantize_linears(adapted.merge_and_unload()) == 14


class Shared(nn.Module):
    """One layer in two places, and the same block twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = self.first
        block = nn.Sequential(nn.Linear(64, 64))
        self.blocks = nn.ModuleList([block, block])
        self.lm_head = nn.Linear(64, 32)

    def forward(self, x):
        return self.lm_head(self.blocks[1](self.blocks[0](self.second(self.first(x)))))


def test_a_layer_in_several_places_stays_one():
    model, x = Shared().eval(), torch.randn(3, 64)
    before = model(x)
    assert quantize_linears(model, "Q8_0") == 2
    assert model.first is model.second
    assert isinstance(model.second, PackedLinear)
    assert model.blocks[0][0] is model.blocks[1][0]
    assert (model(x) - before).abs().max() < 0.05 * before.abs().max()


def test_a_layer_stays_where_one_of_its_names_is_kept():
    model = Shared()
    assert quantize_linears(model, "Q8_0", keep=["second", "lm_head"]) == 1
    assert isinstance(model.first, nn.Linear)


def test_keep_may_be_one_ending():
    """As a list of letters it would keep `up` and `gate_d` too."""
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("up", "gate_d", "lm_head")})
    assert quantize_linears(model, keep="lm_head") == 2
    assert isinstance(model["lm_head"], nn.Linear)


def test_a_layer_itself_is_refused_with_the_way():
    with pytest.raises(ConfigError, match=r"PackedLinear\.from_linear"):
        quantize_linears(nn.Linear(64, 32))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_owners_that_read_weights_themselves_are_named_with_all_that_must_stay(kind):
    model, x = kind(64, 4, 64, batch_first=True).eval(), torch.randn(2, 3, 64)
    with pytest.raises(
        ConfigError, match=r"self_attn\.out_proj: nn\.MultiheadAttention .* keep=\['lm_head', "
    ) as error:
        quantize_linears(model)
    assert isinstance(model.linear1, nn.Linear)
    keep = str(error.value).partition("keep=")[2].strip("[]").replace("'", "").split(", ")
    count = quantize_linears(model, keep=keep)
    assert count == (0 if kind is nn.TransformerEncoderLayer else 2)
    with torch.no_grad():
        assert model(x, *((x,) if count else ())).shape == x.shape


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_codes(linear):
    linear.weight = nn.Parameter(torch.zeros(32, 32, dtype=torch.int8), requires_grad=False)
    return linear


def with_hook(linear):
    linear.register_forward_hook(lambda module, args, out: 2 * out)
    return linear


@pytest.mark.parametrize(
    ("linear", "match"),
    [
        (Scaled(32, 32), "Scaled with a forward of its own"),
        (with_codes(nn.Linear(32, 32)), "int8"),
        (with_hook(nn.Linear(32, 32)), "hooks"),
        (nn.Linear(32, 32, device="meta"), "meta device"),
        (nn.Linear(40, 32), "multiples of 32"),
    ],
)
def test_layers_that_are_more_than_their_weight_are_refused_by_name(linear, match):
    model = nn.ModuleDict({"good": nn.Linear(32, 32), "bad": linear})
    with pytest.raises(ConfigError, match=f"^bad: .*{match}"):
        quantize_linears(model)
    assert type(model["good"]) is nn.Linear
