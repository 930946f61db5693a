"""Configurations of runs: LLM Foundry's keys with their meaning, and what is refused, by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from roofline.common.errors import ConfigError, UnsupportedError
from roofline.train.config.data_sets import DatasetSection
from roofline.train.config.duration import DurationUnits, batches
from roofline.train.config.read import parse_config, read_config
from roofline.train.config.schema import TrainConfig
from roofline.train.model import shapes
from roofline.train.run import preflight
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
    held_out = config.evaluations["eval"].dataset
    assert (held_out.local, held_out.split) == ("./my-copy-c4/held-out", "val")
    assert config.tokenizer is not None
    assert config.tokenizer.kwargs.model_max_length == 2048
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
    shape = shapes.model_config(config.model, config.max_seq_len)
    assert (shape["width"], shape["layers"], shape["heads"], shape["ffn"]) == (2048, 24, 16, 8192)
    assert (shape["positions"], shape["bias"], shape["tied"]) == ("learned", True, True)
    assert (shape["max_position"], shape["vocab"]) == (2048, 50368)


def test_names_may_lie_under_variables(foundry: Path) -> None:
    """The form of 2024: the same keys one level down, some of them unused."""
    found = yaml.safe_load(FOUNDRY.replace("${global_seed}", "${variables.global_seed}"))
    found["variables"] = {"global_seed": found.pop("global_seed"), "never_used": 1}
    assert parse_config(found).seed == 17


def test_an_optimizer_without_further_keys_is_torchs() -> None:
    adam = made(optimizer={"name": "adamw", "lr": 1e-3}).optimizer
    torch = pytest.importorskip("torch", reason="torch's defaults are compared")
    reference = torch.optim.AdamW([torch.zeros(1)], lr=1e-3).defaults
    assert adam.eps == reference["eps"]


def test_a_configuration_reads_back_what_it_wrote(foundry: Path) -> None:
    config = read_config(foundry)
    assert parse_config(config.model_dump(mode="json")) == config


def test_alibi_is_the_released_form() -> None:
    config = made(model__attn_config={"alibi": True}, model__no_bias=True)
    shape = shapes.model_config(config.model, config.max_seq_len)
    assert (shape["positions"], shape["bias"]) == ("alibi", False)
    with pytest.raises(UnsupportedError, match="alibi or learned_pos_emb"):
        shapes.model_config(made(model__learned_pos_emb=False).model, 16)


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
        *(
            ({key: value}, f"{key} is no key here: it is a key of MosaicML's platform, whose `parameters` are")
            for key, value in {"name": "a", "image": "b", "command": "c", "compute": {"gpus": 8}}.items()
        ),
        ({"integrations": [{"integration_type": "git_repo"}]}, "integrations is no key here: it is a key of MosaicML"),
        ({"parameters": {"seed": 1}}, "parameters is no key here: it is a key of MosaicML's platform"),
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
        (
            {"model__attn_config": {"qk_ln": True}},
            "model.attn_config.qk_ln = True: input should be False: of the models",
        ),
        (
            {"model__attn_config": {"prefix_lm": True}},
            "model.attn_config.prefix_lm = True: input should be False: every",
        ),
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


def test_a_section_is_not_repeated_where_its_keys_do_not_fit_each_other() -> None:
    """It may be long; the value of a key that takes no section is short, and is named."""
    optimizer = {"name": "decoupled_lionw", "lr": 1e-3, "eps": 1e-8}
    assert refusal(optimizer=optimizer) == "optimizer: decoupled_lionw has no eps: leave it out"
    assert refusal(seed={"a": 1}) == "seed = {'a': 1}: input should be a valid integer"


def lines_of(error: ConfigError) -> list[str]:
    """The faults of an error that has several."""
    head, *lines = str(error).split("\n")
    assert head == f"{len(lines)} faults of the configuration:"
    return [line.removeprefix("  ") for line in lines]


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        made(seed="x", max_seq_len="y", sede=1, model__d_modell=3, optimizer={"name": "adamw"})
    assert [line.removeprefix("configuration: ") for line in lines_of(caught.value)] == [
        "max_seq_len = y: input should be a valid integer, unable to parse string as an integer",
        "unknown key model.d_modell; did you mean 'd_model'?",
        "optimizer.lr is missing",
        "seed = x: input should be a valid integer, unable to parse string as an integer",
        "unknown key sede; did you mean 'seed'?",
    ]


def test_faults_of_every_kind_are_named_at_once(tmp_path: Path) -> None:
    """Those of keys and types, of durations, of references, across sections, of the shape, the tokenizer and paths."""
    keys = mapping(tmp_path / "nothing", tmp_path / "run", sede=1, optimizer__lr=-1, max_duration="5xx")
    keys |= {"eval_interval": "2dur", "save_folder": "${nowhere}", "memory_limit": "8 pints", "width": 36}
    keys["model"] |= {"n_heads": 5, "d_model": "${width}"}
    keys |= {"tokenizer": {"name": "nosuch", "kwargs": {"model_max_length": 8}}, "load_path": str(tmp_path / "none")}
    keys["eval_loader"] = [{"label": "a"}, {"label": "a"}]
    del keys["global_train_batch_size"]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(keys))
    changes = ["precision=bf17", "width=33", "callbacks.early_stopper.patience=7", "train_loader.dataset.split=part"]
    with pytest.raises(ConfigError) as caught:
        read_config(file, changes, preflight.faults)
    assert not (tmp_path / "run").exists()
    missing = f"train_loader.dataset.local = {tmp_path / 'nothing'} with split = part: there is no such folder"
    expected = [
        f"{file}: save_folder: ${{nowhere}} names a key that is not there",
        f"{file}: optimizer.lr = -1: input should be greater than 0",
        f"{file}: max_duration = 5xx: '5xx' is no duration such as 200ba, 1ep, 512sp, 1e9tok or 0.1dur",
        f"{file}: eval_interval = 2dur: '2dur' is a part of the run: it is from 0dur to 1dur",
        f"{file}: global_train_batch_size is missing",
        "--set precision=bf17: precision = bf17: input should be 'fp32', 'amp_bf16' or 'amp_fp16'",
        f"{file}: memory_limit = 8 pints: '8 pints' is no number of bytes such as 1000000, 20gb or 1.5GiB",
        f"{file}: callbacks.early_stopper.monitor is missing",
        f"{file}: callbacks.early_stopper.dataloader_label is missing",
        f"{file}: unknown key sede; did you mean 'seed'?",
        f"{file}: rows of 16 tokens are longer than tokenizer.kwargs.model_max_length=8",
        f"{file}: eval_loader: each of several needs a label of its own",
        "--set width=33: model: n_heads: 5 heads do not divide d_model=33",
        f"{file}: tokenizer.name = nosuch: there is no model 'nosuch'",
        f"--set train_loader.dataset.split=part: {missing}",
        f"{file}: eval_loader.0.dataset: local is missing, the folder of shards, or remote, their URL",
        f"{file}: load_path: {tmp_path / 'none'} holds no complete checkpoint",
    ]
    lines = lines_of(caught.value)
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=False)] == expected
    assert len(lines) == len(expected)


def test_one_fault_is_one_line_with_the_change_that_it_comes_from(foundry: Path) -> None:
    for change, message in (
        ("optimizer.lr=fast", "--set optimizer.lr=fast: optimizer.lr = fast: input should be a valid number"),
        ("foo.bar=1", "--set foo.bar=1: unknown key foo"),
        ("optimizer=", "--set optimizer=: optimizer is missing"),
        ("global_seed=x", "--set global_seed=x: "),
        ("max_seq_len=1", "--set max_seq_len=1: max_seq_len = 1: "),
    ):
        with pytest.raises(ConfigError) as caught:
            read_config(foundry, ["precision=fp32", change])
        assert all(line.startswith(message.split(": ")[0]) for line in str(caught.value).split("\n  ")[-1:])
        assert message in str(caught.value)
    foundry.write_text(foundry.read_text().replace("precision: amp_bf16", "precision: bf17"))
    with pytest.raises(ConfigError) as caught:
        read_config(foundry, ["optimizer.lr=1e-3"])
    assert str(caught.value).startswith(f"{foundry}: precision = bf17")


WATCHING = {"early_stopper": {"monitor": "LanguageCrossEntropy", "dataloader_label": "eval"}}


def test_what_follows_from_a_fault_is_not_named(tmp_path: Path) -> None:
    """A shape without its width, and a vocabulary that is not known, are no faults of their own."""
    for changes, message in (
        ({"model__d_model": "wide"}, "model.d_model = wide: "),
        ({"model": {"name": 7}}, "model.name = 7: "),
        ({"model__vocab_size": "x", "tokenizer": {"name": "org/elsewhere"}}, "model.vocab_size = x: "),
        ({"train_loader__dataset": {"local": 7}}, "train_loader.dataset.local = 7: "),
        ({"eval_interval": "x", "eval_loader": {"name": "synthetic"}, "callbacks": WATCHING}, "eval_interval = x: "),
        ({"a.b": 7}, "unknown key a.b"),
    ):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "index.json").touch()
        with pytest.raises(ConfigError) as caught:
            parse_config(mapping(tmp_path / "data", tmp_path / "run", **changes), further=preflight.faults)
        assert str(caught.value).startswith(f"configuration: {message}"), str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_blank_name_is_that_of_the_environment_or_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(run_name=None, save_folder="there/${run_name}").save_folder == "there/configuration"
    monkeypatch.setenv("RUN_NAME", "mine")
    assert made(run_name=None, save_folder="there/${run_name}").save_folder == "there/mine"
    assert made(run_name="other").run_name == "other"


def test_keys_that_only_say_what_is_done_anyway_are_taken() -> None:
    section = {"backward_prefetch": "BACKWARD_PRE"}
    config = made(model__use_flash_attention_2=True, model__use_auth_token=False, fsdp_config=section, dist_timeout=600)
    assert config.dist_timeout == 600
    assert (made().dist_timeout, made().stop_timeout) == (1800, 15)  # as in docs/reference/training.md
    assert "fsdp_config.backward_prefetch = NONE" in refusal(fsdp_config={"backward_prefetch": "NONE"})


def test_lion_has_betas_of_its_own_and_no_eps() -> None:
    assert made(optimizer={"name": "decoupled_lionw", "lr": 1e-4}).optimizer.betas == (0.9, 0.99)
    assert made(optimizer={"name": "decoupled_lionw", "lr": 1e-4, "betas": [0.8, 0.9]}).optimizer.betas == (0.8, 0.9)
    assert "has no eps" in refusal(optimizer={"name": "decoupled_lionw", "lr": 1e-4, "eps": 1e-8})


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            {"shuffle_algo": "py1e"},
            "train_loader.dataset.shuffle_algo = py1e: input should be 'py1b', 'py1s' or 'naive'",
        ),
        ({"shuffle_algo": "py1s", "shuffle_block_size": 9}, "shuffle_block_size belongs to shuffle_algo=py1b"),
        ({"repeat": 0}, "train_loader.dataset.repeat = 0: it is no number above 0"),
        ({"streams": {"a": {"proportion": "x"}}}, "streams.a.proportion = x: it is no number above 0"),
        ({"repeat": 2, "choose": 9}, "proportion, repeat and choose exclude each other"),
        ({"repeat": 2, "streams": {"a": {}}}, "belong to each of the streams"),
        ({"streams": {"a": {"proportion": 2}, "b": {}}}, "all streams have a proportion, or none has"),
        ({"epoch_size": "many"}, "train_loader.dataset.epoch_size = many: "),
        ({"batching_method": "random"}, "train_loader.dataset.batching_method = random: input should be 'stratified'"),
        ({"num_canonical_nodes": 64}, "train_loader.dataset.num_canonical_nodes is no key here: the order of samples"),
    ],
)
def test_keys_of_data_sets_that_mean_nothing_here_are_refused(dataset: dict[str, Any], message: str) -> None:
    assert message in refusal(train_loader={"dataset": dataset})


def test_files_of_runs_of_earlier_versions_say_a_proportion_everywhere() -> None:
    dataset = made(
        train_loader={"dataset": {"proportion": 1, "streams": {"a": {"proportion": 1}}}}
    ).train_loader.dataset
    assert dataset.streams["a"].proportion == 1


def test_evaluations_read_each_row_once() -> None:
    assert "each row is evaluated once" in refusal(eval_loader={"dataset": {"epoch_size": 9}})
    assert "each row is evaluated once" in refusal(eval_loader={"dataset": {"streams": {"a": {"repeat": 2}}}})


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
    with pytest.raises(ConfigError, match=r"seed: \$\{a\} leads to itself"):
        made(a="${b}", b="${a}", seed="${a}")
    assert "${nothing} names a key that is not there" in refusal(seed="${nothing}")
    assert "${c.e} names a key that is not there" in refusal(c={"d": 1}, seed="${c.e}")
    assert refusal(run_name="${oc.env:HOME}").startswith("run_name: ${oc.env:HOME} is no key")


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
    (tmp_path / "text.yaml").write_text("train\n")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "code.yaml").write_text("a: !!python/object/apply:os.getcwd []\n")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    for name, message in (
        ("list.yaml", "list.yaml is a list, and a configuration has keys on top: name the YAML file of a run"),
        ("text.yaml", "text.yaml is one value, and a configuration has keys on top"),
        ("empty.yaml", "empty.yaml is empty, and a configuration has keys on top"),
        ("broken.yaml", "is no YAML"),
        ("code.yaml", "is no YAML"),
        ("latin.yaml", "is no YAML"),
        ("missing.yaml", "there is no such file"),
        ("", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            read_config(tmp_path / name)
        assert "\n" not in str(caught.value)
        with pytest.raises(ConfigError, match=message):
            read_config(str(tmp_path / name))


def test_keys_that_are_there_twice_are_among_the_faults(foundry: Path) -> None:
    lines = len(foundry.read_text().splitlines())
    foundry.write_text(foundry.read_text() + "precision: bf17\nsede: 1\nmax_seq_len: 64\n")
    first = {
        key: next(i for i, line in enumerate(foundry.read_text().splitlines(), 1) if line.startswith(f"{key}:"))
        for key in ("precision", "max_seq_len")
    }
    with pytest.raises(ConfigError) as caught:
        read_config(foundry, ["max_seq_len=128"])
    for key, line in (("precision", lines + 1), ("max_seq_len", lines + 3)):
        twice = f"{foundry}: {key} is there twice, on lines {first[key]} and {line}: keep one of the two"
        assert twice in str(caught.value).split("\n  ")
    assert "unknown key sede" in str(caught.value)
    with pytest.raises(ConfigError, match=r"--set model=\{a: 1, a: 2\}: a is there twice, on line 1"):
        read_config(foundry, ["model={a: 1, a: 2}"])


RUN = DurationUnits(samples=12, tokens=16, epoch=103, total=100)


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
        batches("max_duration", "0.5dur", DurationUnits(12, 16, 103))


def test_a_number_alone_is_in_epochs() -> None:
    """As Composer reads it."""
    config = made(max_duration=2, eval_interval=1, save_interval=0)
    assert (config.max_duration, config.eval_interval, config.save_interval) == ("2ep", "1ep", "0ep")


@pytest.mark.parametrize(
    ("text", "samples"),
    [("7k", 7_000), ("12K", 12_000), ("30m", 30_000_000), ("12b", 12_000_000_000), ("45", 45), (45, 45)],
)
def test_an_epoch_is_counted_in_thousands_and_more(text: str | int, samples: int) -> None:
    assert DatasetSection(epoch_size=text).epoch_size == samples  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["k", "12t", "1.5k", "-1k", "0k", 0])
def test_no_other_counts_are_read(text: str | int) -> None:
    with pytest.raises(ValueError, match="epoch_size"):
        DatasetSection(epoch_size=text)  # type: ignore[arg-type]


def test_variables_that_nothing_refers_to_are_no_unknown_key(tmp_path: Path) -> None:
    assert parse_config(mapping(tmp_path, tmp_path) | {"variables": {"unused": 1}}).seed == 5
