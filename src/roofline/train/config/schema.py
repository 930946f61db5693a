"""The keys of a run's configuration with their types and defaults: LLM Foundry's, and ours where it has none.

Unknown keys are refused by name. Keys of LLM Foundry's that cannot be switched here are accepted only with the value
that describes what we do (a `Literal` with one value).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from roofline.common.json_types import JsonObject


def _epochs(value: object) -> object:
    """A duration; a bare number counts epochs, as in Composer."""
    return f"{value}ep" if isinstance(value, int) and not isinstance(value, bool) else value


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("0 would keep nothing to resume from: -1 keeps all")
    return value


Duration = Annotated[str, BeforeValidator(_epochs)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Part of a configuration: unknown keys are refused, and a null stands for the default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in cls.model_fields}


class InitSection(Section):
    """How matrices are initialised; norms start as ones and biases as zeros.

    name: "kaiming_normal_" has standard deviation sqrt(2 / columns) and is the default for mpt_causal_lm, "baseline_"
        has init_std and is the default for other models.
    init_div_is_residual: matrices that write into the residual stream are divided by sqrt(2 * layers) (Radford et al.
        2019), or by this number; False or 0: by nothing.
    """

    name: Literal["kaiming_normal_", "baseline_"] | None = None
    init_std: Annotated[float, Field(gt=0)] = 0.02
    init_div_is_residual: bool | Annotated[float, Field(ge=0)] = True
    fan_mode: Literal["fan_in"] = "fan_in"
    init_nonlinearity: Literal["relu"] = "relu"


class AttnSection(Section):
    """attn_impl: all three mean torch's scaled_dot_product_attention, which picks a kernel for the device."""

    attn_type: Literal["multihead_attention"] = "multihead_attention"
    attn_impl: Literal["flash", "torch", "triton"] = "torch"
    attn_pdrop: Literal[0] = 0
    alibi: bool = False
    alibi_bias_max: Literal[8] = 8
    attn_uses_sequence_id: bool = False
    clip_qkv: None = None
    softmax_scale: None = None
    qk_ln: Literal[False] = False
    prefix_lm: Literal[False] = False


class ModelSection(Section):
    """The model to train.

    name: mpt_causal_lm (its shape from d_model and the other keys), hf_causal_lm (a model's files:
        pretrained_model_name_or_path), or one of our presets ("mpt-125m", "llama-3.2-1b").
    config_overrides: canonical fields (models.config.ModelConfig) that replace those of a preset, or of hf_causal_lm
        with pretrained=false.
    loss_fn: fused_crossentropy computes logits chunk by chunk, torch_crossentropy all at once.
    """

    name: str
    d_model: int | None = None
    n_heads: int | None = None
    n_layers: int | None = None
    expansion_ratio: float = 4
    max_seq_len: int | None = None
    vocab_size: int | None = None
    no_bias: bool = False
    learned_pos_emb: bool = True
    tie_word_embeddings: bool = True
    attn_config: AttnSection = AttnSection()
    init_config: InitSection = InitSection()
    loss_fn: Literal["fused_crossentropy", "torch_crossentropy"] = "fused_crossentropy"
    norm_type: Literal["low_precision_layernorm", "layernorm"] = "layernorm"
    resid_pdrop: Literal[0] = 0
    emb_pdrop: Literal[0] = 0
    init_device: Literal["meta", "cpu", "mixed"] = "meta"
    pretrained_model_name_or_path: str | None = None
    pretrained: bool = True
    use_auth_token: Literal[False] = False
    config_overrides: JsonObject = {}


class TokenizerSection(Section):
    """name: the model or folder whose tokenizer belongs to the run; it is copied into exports."""

    name: str
    kwargs: JsonObject = {}


class StreamSection(Section):
    """One data set: a folder (local), or a URL (remote) with a folder as its cache (local)."""

    local: str | None = None
    remote: str | None = None
    split: str | None = None
    proportion: int | float | str = 1


class DatasetSection(StreamSection):
    """A data set, or several under `streams`. shuffle_seed: default the run's seed; cache_limit: bytes or "20gb"."""

    streams: dict[str, StreamSection] = {}
    shuffle: bool = False
    shuffle_seed: int | None = None
    shuffle_block_size: int | None = None
    max_seq_len: int | None = None
    eos_token_id: int | None = None
    cache_limit: int | str | None = None
    predownload: int | None = None


class LoaderSection(Section):
    """name: "synthetic" stands for random ids instead of a data set. num_workers: threads that read ahead."""

    name: Literal["text", "synthetic"] = "text"
    dataset: DatasetSection = DatasetSection()
    drop_last: bool = True
    num_workers: Annotated[int, Field(ge=0)] = 1
    pin_memory: bool = True
    persistent_workers: bool = True
    prefetch_factor: Annotated[int, Field(ge=1)] = 2
    timeout: float = 0


class SchedulerSection(Section):
    """A learning rate schedule; run.schedule explains the names."""

    name: Literal[
        "constant_with_warmup",
        "cosine_with_warmup",
        "linear_decay_with_warmup",
        "inv_sqrt_with_warmup",
        "warmup_stable_decay",
    ] = "constant_with_warmup"
    t_warmup: Duration = "0ba"
    t_max: Duration = "1dur"
    t_decay: Duration = "0.1dur"
    t_scale: Duration = "100ba"
    decay: Literal["cosine", "linear", "1-sqrt"] = "1-sqrt"
    alpha_f: Annotated[float, Field(ge=0, le=1)] = 0.0


class OptimizerSection(Section):
    """decoupled_adamw: weight decay follows the schedule but not the learning rate, as in Composer; adamw: torch's;
    muon: Muon for hidden matrices (Jordan et al. 2024), adamw with adamw_lr (default lr) for the rest."""

    name: Literal["decoupled_adamw", "adamw", "muon"]
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adamw_lr: float | None = None


class ClippingSection(Section):
    """clipping_type: "norm" limits the norm of all gradients together, "value" each element."""

    clipping_type: Literal["norm", "value"] = "norm"
    clipping_threshold: Annotated[float, Field(gt=0)] = 1.0


class AlgorithmsSection(Section):
    """What changes gradients before the optimizer uses them."""

    gradient_clipping: ClippingSection | None = None


class FsdpSection(Section):
    """Sharding by torch's FSDP2.

    sharding_strategy: FULL_SHARD; HYBRID_SHARD: sharded inside groups of hybrid_group ranks (default: the ranks of a
        host), with a copy in each group; SHARD_GRAD_OP: parameters stay gathered from forward to backward pass.
    mixed_precision: PURE reduces gradients in the compute precision (elastic runs still in float32); DEFAULT and FULL
        in float32.
    activation_checkpointing: True or "full" recomputes blocks; "selective" keeps matrix products and attention.
    """

    sharding_strategy: Literal["FULL_SHARD", "HYBRID_SHARD", "SHARD_GRAD_OP"] = "FULL_SHARD"
    hybrid_group: Annotated[int, Field(ge=1)] | None = None
    mixed_precision: Literal["PURE", "DEFAULT", "FULL"] = "DEFAULT"
    activation_checkpointing: bool | Literal["full", "selective"] = False
    activation_checkpointing_reentrant: Literal[False] = False
    activation_cpu_offload: Literal[False] = False
    limit_all_gathers: Literal[True] = True
    use_orig_params: Literal[True] = True
    sync_module_states: Literal[True] = True
    state_dict_type: Literal["sharded"] = "sharded"
    verbose: Literal[False] = False


class ElasticSection(Section):
    """Makes the trained weights bit-equal on any number of processes that divides virtual_shards, a power of two."""

    virtual_shards: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)] = 1


class CompileSection(Section):
    """Options of torch.compile; the model is compiled if this section exists."""

    mode: str | None = None
    backend: str = "inductor"


class CallbacksSection(Section):
    """Options of what is always measured. speed_monitor: window_size: steps that displayed speeds average over; warmup:
    first steps that the card leaves out; gpu_flops_available: the device's peak in FLOP/s, instead of the known one."""

    class Speed(Section):
        window_size: Annotated[int, Field(ge=1)] = 10
        warmup: Annotated[int, Field(ge=0)] = 2
        gpu_flops_available: Annotated[float, Field(gt=0)] | None = None

    class Nothing(Section):
        pass

    speed_monitor: Speed = Speed()
    lr_monitor: Nothing | None = None
    memory_monitor: Nothing | None = None
    runtime_estimator: Nothing | None = None


class Logger(Section):
    """Options of one logger."""

    rank_zero_only: Literal[True] = True


class TensorboardLogger(Logger):
    """log_dir: default RUN_FOLDER/tensorboard; flush_interval: seconds between writes at the most."""

    log_dir: str | None = None
    flush_interval: Annotated[int, Field(ge=1)] = 120


class WandbLogger(Logger):
    """Options of wandb.init. name: default the run's; dir: default the run's folder; id: of a run to continue."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    dir: str | None = None
    id: str | None = None
    mode: Literal["online", "offline", "disabled"] | None = None
    log_artifacts: Literal[False] = False


class MlflowLogger(Logger):
    """tracking_uri: default MLflow's own; experiment_name; run_name: default the run's; flush_interval: seconds."""

    tracking_uri: str | None = None
    experiment_name: str = "roofline"
    run_name: str | None = None
    tags: dict[str, str] = {}
    flush_interval: Annotated[float, Field(ge=0)] = 10
    log_system_metrics: Literal[False] = False


class LoggersSection(Section):
    """Each logger that has a section gets every number of the log; null: it is not used."""

    tensorboard: TensorboardLogger | None = None
    wandb: WandbLogger | None = None
    mlflow: MlflowLogger | None = None


class TrainConfig(Section):
    """The configuration of a run.

    stop_after: end the run early, with a checkpoint if they are saved; the schedule still follows max_duration.
    device_train_microbatch_size: rows at a time; "auto" halves them until a step fits into memory. precision: amp_*
    computes in 16 bits with float32 parameters. run_folder: for logs, receipts and, without save_folder, checkpoints.
    memory_limit: bytes ("8gb") that a process may use on a CPU. tensor_parallel: ranks that share each matrix. probes:
    record, at the start and at each checkpoint, the figures by which `roofline parity` finds a diverging layer.
    """

    run_name: str | None = None
    run_folder: str | None = None
    max_seq_len: Annotated[int, Field(ge=2)]
    model: ModelSection
    tokenizer: TokenizerSection | None = None
    train_loader: LoaderSection
    eval_loader: LoaderSection | None = None
    scheduler: SchedulerSection = SchedulerSection()
    optimizer: OptimizerSection
    algorithms: AlgorithmsSection = AlgorithmsSection()
    max_duration: Duration
    stop_after: Duration | None = None
    eval_interval: Duration = "0ba"
    eval_first: bool = False
    eval_subset_num_batches: int = -1
    global_train_batch_size: Annotated[int, Field(ge=1)]
    device_eval_batch_size: Annotated[int, Field(ge=1)] = 1
    device_train_microbatch_size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    device_train_grad_accum: None = None
    seed: int = 17
    precision: Literal["fp32", "amp_bf16", "amp_fp16"] = "amp_bf16"
    deterministic_mode: bool = False
    fsdp_config: FsdpSection | None = None
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    elastic: ElasticSection | None = None
    compile_config: CompileSection | None = None
    memory_limit: int | str | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    progress_bar: bool = True
    log_to_console: bool = False
    console_log_interval: Duration = "1ba"
    probes: bool = True
    callbacks: CallbacksSection = CallbacksSection()
    loggers: LoggersSection = LoggersSection()
    save_interval: Duration = "0ba"
    save_folder: str | None = None
    save_num_checkpoints_to_keep: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] = -1
    save_overwrite: bool = False
    load_path: str | None = None
    load_weights_only: bool = False
    autoresume: bool = False

    @model_validator(mode="before")
    @classmethod
    def _save_at_the_end(cls, values: object) -> object:
        """With save_folder but without save_interval there is one checkpoint, at the end."""
        if (
            isinstance(values, Mapping)
            and values.get("save_folder") is not None
            and values.get("save_interval") is None
        ):
            return {**values, "save_interval": "1dur"}
        return values
