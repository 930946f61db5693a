"""Configurations of runs: LLM Foundry's keys with their meaning, and what is refused, by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from roofline.common.errors import ConfigError
from roofline.train.config.duration import Batches, batches
from roofline.train.config.read import parse_config, read_config
from roofline.train.config.schema import TrainConfig
from roofline.train.model import build
from tests.train.small import mapping

HERE = Path("data")

# The keys of LLM Foundry's MPT files of 2023, in their form: names on top, filled in below, blank where not used.
FOUNDRY = """
data_local: ./my-copy-c4
data_remote: # If blank, files must be present in data_local
max_seq_len: 2048
global_seed: 17

run_name: # If left blank, will be read from env var $RUN_NAME

model:
  name: mpt_causal_lm
  init_device: meta
  d_model: 2048
  n_heads: 16
  n_layers: 24
  expansion_ratio: 4
  max_seq_len: ${max_seq_len}
  vocab_size: 50368
  attn_config:
    attn_impl: triton
  loss_fn: torch_crossentropy

tokenizer:
  name: EleutherAI/gpt-neox-20b
  kwargs:
    model_max_length: ${max_seq_len}

train_loader:
  name: text
  dataset:
    local: ${data_local}
    remote: ${data_remote}
    split: train
    shuffle: true
    max_seq_len: ${max_seq_len}
    shuffle_seed: ${global_seed}
  drop_last: true
  num_workers: 8

eval_loader:
  name: text
  dataset:
    local: ${data_local}/held-out
    remote: ${data_remote}
    split: val
    shuffle: false
    max_seq_len: ${max_seq_len}
    shuffle_seed: ${global_seed}
  drop_last: false
  num_workers: 8

scheduler:
  name: cosine_with_warmup
  t_warmup: 100ba
  alpha_f: 0.1

optimizer:
  name: decoupled_adamw
  lr: 2e-4
  betas:
  - 0.9
  - 0.95
  eps: 1.0e-08
  weight_decay: 0.0

algorithms:
  gradient_clipping:
    clipping_type: norm
    clipping_threshold: 1.0

max_duration: 24800ba
eval_interval: 2000ba
eval_first: false
eval_subset_num_batches: -1
global_train_batch_size: 512

seed: ${global_seed}
device_eval_batch_size: 4
device_train_microbatch_size: auto
precision: amp_bf16

fsdp_config:
  sharding_strategy: FULL_SHARD
  mixed_precision: PURE
  activation_checkpointing: false
  activation_checkpointing_reentrant: false
  activation_cpu_offload: false
  limit_all_gathers: true
  verbose: false

progress_bar: false
log_to_console: true
console_log_interval: 1ba

callbacks:
  speed_monitor:
    window_size: 10
  lr_monitor: {}
  memory_monitor: {}
  runtime_estimator: {}

save_interval: 2000ba
save_num_checkpoints_to_keep: 1
save_overwrite: true
save_folder: s3://my-bucket/{run_name}/checkpoints
"""


def made(**changes: Any) -> TrainConfig:
    return parse_config(mapping(HERE, HERE, **changes))


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        made(**changes)
    message = str(caught.value)
    assert message.startswith("configuration: ")
    assert "\n" not in message
    return message.removeprefix("configuration: ")


@pytest.fixture
def foundry(tmp_path: Path) -> Path:
    path = tmp_path / "mpt-1b.yaml"
    path.write_text(FOUNDRY)
    return path


def test_an_mpt_file_of_llm_foundry_means_what_it_meant(foundry: Path) -> None:
    config = read_config(foundry)
    assert (config.run_name, config.seed, config.max_seq_len) == ("mpt-1b", 17, 2048)
    assert config.train_loader.dataset.local == "./my-copy-c4"
    assert config.train_loader.dataset.remote is None
    assert (config.train_loader.dataset.shuffle, config.train_loader.dataset.shuffle_seed) == (True, 17)
    assert config.train_loader.num_workers == 8
    assert config.eval_loader is not None
    assert (config.eval_loader.dataset.local, config.eval_loader.dataset.split) == ("./my-copy-c4/held-out", "val")
    assert config.tokenizer is not None
    assert config.tokenizer.kwargs == {"model_max_length": 2048}
    assert config.optimizer.name == "decoupled_adamw"
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.eps) == (2e-4, (0.9, 0.95), 1e-8)
    assert config.algorithms.gradient_clipping is not None
    assert config.algorithms.gradient_clipping.clipping_threshold == 1.0
    assert config.fsdp_config is not None
    assert config.fsdp_config.mixed_precision == "PURE"
    assert (config.scheduler.t_warmup, config.scheduler.t_max, config.scheduler.alpha_f) == ("100ba", "1dur", 0.1)
    assert config.device_train_microbatch_size == "auto"
    assert config.callbacks.speed_monitor.window_size == 10
    assert (config.save_overwrite, config.save_num_checkpoints_to_keep) == (True, 1)
    shape = build.model_config(config.model, config.max_seq_len)
    assert (shape["width"], shape["layers"], shape["heads"], shape["ffn"]) == (2048, 24, 16, 8192)
    assert (shape["positions"], shape["bias"], shape["tied"]) == ("learned", True, True)
    assert (shape["max_position"], shape["vocab"]) == (2048, 50368)


def test_names_may_lie_under_variables(foundry: Path) -> None:
    """The form of 2024: the same keys one level down, some of them unused."""
    found = yaml.safe_load(FOUNDRY.replace("${global_seed}", "${variables.global_seed}"))
    found["variables"] = {"global_seed": found.pop("global_seed"), "never_used": 1}
    assert parse_config(found).seed == 17


def test_a_configuration_reads_back_what_it_wrote(foundry: Path) -> None:
    config = read_config(foundry)
    assert parse_config(config.model_dump(mode="json")) == config


def test_alibi_is_the_released_form() -> None:
    config = made(model__attn_config={"alibi": True}, model__no_bias=True)
    shape = build.model_config(config.model, config.max_seq_len)
    assert (shape["positions"], shape["bias"]) == ("alibi", False)
    with pytest.raises(ConfigError, match="alibi or learned_pos_emb"):
        build.model_config(made(model__learned_pos_emb=False).model, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_duraton": "8ba"}, "unknown key max_duraton; did you mean 'max_duration'?"),
        ({"max_duraton": None}, "unknown key max_duraton; did you mean 'max_duration'?"),
        ({"optimizer__beta": None}, "unknown key optimizer.beta; did you mean 'betas'?"),
        ({"model__attn_config": {"atn_impl": "flash"}}, "unknown key model.attn_config.atn_impl; did you mean"),
        ({"train_loader__dataset__lokal": "x"}, "unknown key train_loader.dataset.lokal; did you mean 'local'?"),
        (
            {"train_loader__dataset__streams": {"c4": {"lokal": "x"}}},
            "unknown key train_loader.dataset.streams.c4.lokal; did you mean 'local'?",
        ),
        (
            {"algorithms": {"gradient_clipping": {"clipping_treshold": 1}}},
            "unknown key algorithms.gradient_clipping.clipping_treshold; did you mean 'clipping_threshold'?",
        ),
        (
            {"callbacks": {"speed_monitor": {"windw_size": 3}}},
            "unknown key callbacks.speed_monitor.windw_size; did you mean 'window_size'?",
        ),
        ({"callbacks": {"lr_monitor": {"a": 1}}}, "unknown key callbacks.lr_monitor.a"),
        ({"fsdp_config": {"sharding": "FULL_SHARD"}}, "unknown key fsdp_config.sharding; did you mean"),
        ({"elastic": {"virtual_shards": 4, "thread": 2}}, "unknown key elastic.thread; did you mean 'threads'?"),
        ({"unused_name": "${seed}"}, "unknown key unused_name"),
    ],
)
def test_unknown_keys_are_refused_by_name_at_any_depth(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes).startswith(message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer__lr": None}, "optimizer.lr is missing"),
        ({"model": None}, "model is missing"),
        ({"elastic": {}}, "elastic.virtual_shards is missing"),
        ({"optimizer__lr": "fast"}, "optimizer.lr = fast: input should be a valid number"),
        ({"optimizer__lr": 0}, "optimizer.lr = 0: input should be greater than 0"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas.1 is missing"),
        ({"optimizer__betas": [0.9, 1.5]}, "optimizer.betas.1 = 1.5: input should be less than 1"),
        ({"seed": "abc"}, "seed = abc: input should be a valid integer"),
        ({"seed": 1.5}, "seed = 1.5: input should be a valid integer"),
        ({"max_seq_len": 1}, "max_seq_len = 1: input should be greater than or equal to 2"),
        ({"global_train_batch_size": 0}, "global_train_batch_size = 0"),
        ({"precision": "bf16"}, "precision = bf16: input should be 'fp32', 'amp_bf16' or 'amp_fp16'"),
        ({"model__attn_config": {"attn_pdrop": 0.1}}, "model.attn_config.attn_pdrop = 0.1: input should be 0"),
        ({"train_loader": []}, "train_loader = []"),
        ({"loggers": {"wandbb": {}}}, "unknown key loggers.wandbb; did you mean 'wandb'?"),
        ({"max_duration": True}, "max_duration = True"),
        ({"fsdp_config": {"hybrid_group": 0}}, "fsdp_config.hybrid_group = 0"),
        ({"save_num_checkpoints_to_keep": 0}, "save_num_checkpoints_to_keep = 0"),
        ({"save_num_checkpoints_to_keep": -2}, "save_num_checkpoints_to_keep = -2"),
    ],
)
def test_values_of_a_wrong_kind_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    assert refusal(**changes).startswith(message)


def test_a_refusal_names_all_kinds_that_a_key_takes() -> None:
    message = refusal(device_train_microbatch_size="atuo")
    assert message.startswith("device_train_microbatch_size = atuo: ")
    assert "valid integer" in message
    assert "'auto'" in message
    message = refusal(fsdp_config={"activation_checkpointing": "selectiv"})
    assert message.startswith("fsdp_config.activation_checkpointing = selectiv: ")
    assert "'full' or 'selective'" in message
    assert refusal(seed="x", max_seq_len="y").endswith("(and 1 more)")


def test_nulls_are_as_good_as_no_value() -> None:
    plain = made()
    for key in (
        *("algorithms", "callbacks", "fsdp_config", "scheduler", "eval_loader", "save_folder", "precision"),
        *("scheduler__t_warmup", "model__init_config", "callbacks__speed_monitor", "algorithms__gradient_clipping"),
        *("train_loader__dataset__remote", "optimizer__weight_decay"),
    ):
        given = mapping(HERE, HERE)
        given.pop("precision")
        without = parse_config(given)
        *path, last = key.split("__")
        node = given
        for step in path:
            node = node.setdefault(step, {})
        node[last] = None
        assert parse_config(given) == without, key
    overrides = made(model__name="llama-3.2-1b", model__config_overrides={"sliding_window": None}).model
    assert overrides.config_overrides == {"sliding_window": None}, "a null in there is a value"
    assert plain.precision == "fp32"


def test_a_place_for_checkpoints_gets_one() -> None:
    assert made().save_interval == "0ba"
    assert made(save_folder="there").save_interval == "1dur"
    assert made(save_folder="there", save_interval=None).save_interval == "1dur"
    assert made(save_folder="there", save_interval="7ba").save_interval == "7ba"
    assert made(save_folder="there", save_interval="0ba").save_interval == "0ba"


def test_names_are_filled_in() -> None:
    config = made(a="${b}", b="${c.d}", c={"d": 7}, seed="${a}", run_name="run-${a}-${max_seq_len}")
    assert (config.seed, config.run_name) == (7, "run-7-16")
    assert "${a} leads to itself" in refusal(a="${b}", b="${a}", seed="${a}")
    assert "${nothing} names a key that is not there" in refusal(seed="${nothing}")
    assert "${c.e} names a key that is not there" in refusal(c={"d": 1}, seed="${c.e}")
    assert refusal(run_name="${oc.env:HOME}").startswith("${oc.env:HOME} is no key")


def test_changes_from_the_command_line(foundry: Path) -> None:
    changes = (
        *("optimizer.lr=1e-3", "global_seed=4", "fsdp_config=", "compile_config.mode=max-autotune"),
        *("optimizer.betas=[0.8, 0.9]", "train_loader.dataset.remote=s3://bucket/c4", "run_name=a=b"),
    )
    config = read_config(foundry, changes)
    assert (config.optimizer.lr, config.seed, config.train_loader.dataset.shuffle_seed) == (1e-3, 4, 4)
    assert config.fsdp_config is None
    assert config.compile_config is not None
    assert config.compile_config.mode == "max-autotune"
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train_loader.dataset.remote == "s3://bucket/c4"
    assert config.run_name == "a=b"
    for change, message in (
        ("optimizer.lr", r"written KEY\.KEY=VALUE"),
        ("=3", r"written KEY\.KEY=VALUE"),
        ("optimizer..lr=3", r"written KEY\.KEY=VALUE"),
        ("seed.x=3", "seed holds no keys"),
        ("seed=[1", "no YAML"),
        ("optimizer.lrr=1", "unknown key optimizer.lrr; did you mean 'lr'"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_config(foundry, [change])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "code.yaml").write_text("a: !!python/object/apply:os.getcwd []\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    for name, message in (
        ("list.yaml", "holds no keys"),
        ("broken.yaml", "is no YAML"),
        ("code.yaml", "is no YAML"),
        ("latin.yaml", "is no YAML"),
        ("missing.yaml", "there is no such file"),
        ("", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_config(tmp_path / name)
        assert "\n" not in str(caught.value)


RUN = Batches(samples=12, tokens=16, epoch=103, total=100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("200ba", 200), ("0ba", 0), ("1ep", 9), ("2ep", 18), ("0.5ep", 5), ("12ep", 103)),  # 103 / 12 = 8.58
        *(("512sp", 43), ("12sp", 1), ("13sp", 2), ("2048tok", 11), ("192tok", 1), ("193tok", 2), ("1e3tok", 6)),
        *(("0.1dur", 10), ("1dur", 100), ("0dur", 0), ("0.5dur", 50), ("0.123dur", 13)),
        *(("0.07dur", 7), ("0.55dur", 55), ("0.29dur", 29), ("0.57dur", 57)),  # each a batch more in floating point
        (" 3ba ", 3),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert batches("max_duration", text, RUN) == expected


@pytest.mark.parametrize(
    "text", ["200", "ba", "-1ba", "1 ba", "1x", "1e", "ten ba", "nanba", "1.5.2ep", "2dur", "", "1e999ba"]
)
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^scheduler\.t_warmup: "):
        batches("scheduler.t_warmup", text, RUN)


def test_a_part_of_a_run_whose_length_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"max_duration: '0\.5dur' is a part of the run"):
        batches("max_duration", "0.5dur", Batches(12, 16, 103))


def test_a_number_alone_is_in_epochs() -> None:
    """As Composer reads it."""
    config = made(max_duration=2, eval_interval=1, save_interval=0)
    assert (config.max_duration, config.eval_interval, config.save_interval) == ("2ep", "1ep", "0ep")
