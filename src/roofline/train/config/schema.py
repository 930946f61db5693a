"""The keys of a run's configuration with their types and defaults: LLM Foundry's, and ours where it has none.

Unknown keys are refused by name. Keys of LLM Foundry's that cannot be switched here are accepted only with the value
that describes what we do (a `Literal` with one value).
"""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from roofline.common.json_types import JsonObject
from roofline.train.config.adapter import AdapterSection
from roofline.train.config.data_sets import EvalLoaders, EvalLoaderSection, LoaderSection
from roofline.train.config.objectives import DpoSection, GrpoSection
from roofline.train.config.observers import CallbacksSection, LoggersSection
from roofline.train.config.section import Bytes, Duration, RunLength, Section


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("0 would keep nothing to resume from: -1 keeps all")
    return value


Beta = Annotated[float, Field(ge=0, lt=1)]


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


class RopeDailSection(Section):
    """xpos_scale_base: of xpos, which is not here; files that name every default have it."""

    type: Literal["original"] = "original"
    pos_idx_in_fp32: Literal[True] = True
    xpos_scale_base: Literal[512] = 512


class AttnSection(Section):
    """attn_impl: all three mean torch's scaled_dot_product_attention, which picks a kernel for the device.

    kv_n_heads: heads of k and v of grouped_query_attention. rope: rotary positions; of rope_impl "hf", rope_hf_config
    has a type: no_scaling, linear with a factor, or llama3 with its four numbers.
    """

    attn_type: Literal["multihead_attention", "grouped_query_attention", "multiquery_attention"] = "multihead_attention"
    kv_n_heads: Annotated[int, Field(ge=1)] | None = None
    attn_impl: Literal["flash", "torch", "triton"] = "torch"
    attn_pdrop: Literal[0] = 0
    alibi: bool = False
    alibi_bias_max: Literal[8] = 8
    attn_uses_sequence_id: bool = False
    clip_qkv: None = None
    softmax_scale: None = None
    qk_ln: Literal[False] = False
    qk_gn: Literal[False] = False
    rope: bool = False
    rope_theta: Annotated[float, Field(gt=0)] = 10000
    rope_impl: Literal["dail", "hf"] = "dail"
    rope_dail_config: RopeDailSection = RopeDailSection()
    rope_hf_config: JsonObject = Field(default_factory=lambda: {"type": "no_scaling", "factor": 1.0})
    prefix_lm: Literal[False] = False


class FfnSection(Section):
    """ffn_hidden_size: replaces expansion_ratio * d_model. ffn_act_fn: {name: gelu} (also with approximate: tanh) or
    {name: silu}; of mptglu it is the gate's. Without a gate {name: relu} too."""

    ffn_type: Literal["mptmlp", "mptglu"] = "mptmlp"
    ffn_hidden_size: Annotated[int, Field(ge=1)] | None = None
    ffn_act_fn: JsonObject | None = None
    fc_type: Literal["torch"] = "torch"


class ModelSection(Section):
    """The model to train.

    name: mpt_causal_lm (its shape from d_model and the other keys), hf_causal_lm (a model's files:
        pretrained_model_name_or_path), or one of our presets ("mpt-125m", "llama-3.2-1b").
    config_overrides: canonical fields (models.config.ModelConfig) that replace those of a preset, or of hf_causal_lm
        with pretrained=false.
    use_auth_token: of a model that is fetched; those of runs are here already.
    loss_fn: fused_crossentropy computes logits chunk by chunk, torch_crossentropy all at once.
    """

    name: str
    d_model: Annotated[int, Field(ge=1)] | None = None
    n_heads: Annotated[int, Field(ge=1)] | None = None
    n_layers: Annotated[int, Field(ge=1)] | None = None
    expansion_ratio: Annotated[float, Field(gt=0)] = 4
    max_seq_len: int | None = None
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    no_bias: bool = False
    learned_pos_emb: bool = True
    tie_word_embeddings: bool = True
    attn_config: AttnSection = AttnSection()
    ffn_config: FfnSection = FfnSection()
    init_config: InitSection = InitSection()
    loss_fn: Literal["fused_crossentropy", "torch_crossentropy"] = "fused_crossentropy"
    norm_type: Literal["low_precision_layernorm", "layernorm", "low_precision_rmsnorm", "rmsnorm"] = "layernorm"
    resid_pdrop: Literal[0] = 0
    emb_pdrop: Literal[0] = 0
    init_device: Literal["meta", "cpu", "mixed"] = "meta"
    pretrained_model_name_or_path: str | None = None
    pretrained: bool = True
    use_auth_token: bool = False
    use_flash_attention_2: bool = False
    config_overrides: JsonObject = Field(default_factory=dict)

    @property
    def loads_weights(self) -> bool:
        """Whether the run begins with the weights of a model's files."""
        return self.name == "hf_causal_lm" and self.pretrained


class TokenizerSection(Section):
    """name: the model or folder whose tokenizer belongs to the run; it is copied into exports. Rows are tokenized
    already, so `kwargs` can say only what holds of them: model_max_length is at least max_seq_len."""

    class Kwargs(Section):
        model_max_length: Annotated[int, Field(ge=1)] | None = None
        use_fast: Literal[True] = True
        trust_remote_code: Literal[False] = False

    name: str
    kwargs: Kwargs = Kwargs()


class SchedulerSection(Section):
    """A learning rate schedule; run.schedule explains the names.

    t_cooldown, alpha_f_decay, alpha_f_cooldown: LLM Foundry's, of inv_sqrt_with_warmup alone.
    """

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
    t_cooldown: Duration = "0ba"
    alpha_f_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    alpha_f_cooldown: Annotated[float, Field(ge=0, le=1)] = 0.0

    @model_validator(mode="after")
    def _of_inverse_roots(self) -> "SchedulerSection":
        keys = ("t_cooldown", "alpha_f_decay", "alpha_f_cooldown")
        changed = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
        if changed and self.name != "inv_sqrt_with_warmup":
            raise ValueError(f"{changed[0]} belongs to inv_sqrt_with_warmup, not to {self.name}")
        if self.alpha_f and (self.alpha_f_decay or self.alpha_f_cooldown):
            raise ValueError("alpha_f is the least that is left, alpha_f_decay what is neared: give one of them")
        elif self.alpha_f_decay < self.alpha_f_cooldown:
            raise ValueError("alpha_f_cooldown is above alpha_f_decay: the rate must not rise again")
        return self


class OptimizerSection(Section):
    """decoupled_adamw: weight decay follows the schedule but not the learning rate, as in Composer; adamw: torch's;
    muon: Muon for hidden matrices (Jordan et al. 2024), adamw with adamw_lr (default lr) for the rest; decoupled_lionw:
    Lion with such a decay. Defaults are those of Composer's and LLM Foundry's classes: betas of 0.9 and 0.99 of
    decoupled_lionw, a weight_decay of 1e-5 of decoupled_adamw; what neither of them has, has what stands below."""

    name: Literal["decoupled_adamw", "adamw", "muon", "decoupled_lionw"]
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adamw_lr: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_their_classes(cls, values: object) -> object:
        if isinstance(values, Mapping) and values.get("name") == "decoupled_adamw":
            decay = values.get("weight_decay")
            return {**values, "weight_decay": 1e-5 if decay is None else decay}
        if not isinstance(values, Mapping) or values.get("name") != "decoupled_lionw":
            return values
        if values.get("eps") is not None:
            raise ValueError("decoupled_lionw has no eps: leave it out")
        return {**values, "betas": values.get("betas") or (0.9, 0.99)}


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
    backward_prefetch: Literal["BACKWARD_PRE"] = "BACKWARD_PRE"
    state_dict_type: Literal["sharded"] = "sharded"
    verbose: Literal[False] = False


class ElasticSection(Section):
    """Makes the trained weights bit-equal on any number of processes that divides virtual_shards, a power of two."""

    virtual_shards: Annotated[int, Field(ge=1)]
    threads: Annotated[int, Field(ge=1)] = 1


class CompileSection(Section):
    """Options of torch.compile; the model is compiled if this section exists. mode: of the backend inductor."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    backend: str = "inductor"

    @model_validator(mode="after")
    def _mode_is_inductors(self) -> "CompileSection":
        if self.mode is not None and self.backend != "inductor":
            raise ValueError(f"mode={self.mode} belongs to the backend inductor, not to {self.backend}")
        return self


class TrainConfig(Section):
    """The configuration of a run.

    adapter: what is trained of a model that exists; without it all parameters are, from their files or from scratch.
    stop_after: end the run early, with a checkpoint if they are saved; the schedule still follows max_duration.
    device_train_microbatch_size: rows at a time; "auto" halves them until a step fits into memory. precision: amp_*
    computes in 16 bits with float32 parameters. run_folder: for logs, receipts and, without save_folder, checkpoints.
    memory_limit: bytes ("8gb") that a process may use on a CPU. tensor_parallel: ranks that share each matrix. probes:
    record, at the start and at each checkpoint, the figures by which `roofline parity` finds a diverging layer.
    dist_timeout: seconds that a process waits for the others in an exchange. stop_timeout: seconds in which the
    processes of --nproc must have begun to stop after SIGTERM. expandable_segments: a GPU's memory is
    taken in segments that grow, so that less of it is lost between tensors. dpo, grpo: minimise that objective.
    """

    run_name: str | None = None
    run_folder: str | None = None
    max_seq_len: Annotated[int, Field(ge=2)]
    model: ModelSection
    adapter: AdapterSection | None = None
    tokenizer: TokenizerSection | None = None
    train_loader: LoaderSection
    eval_loader: EvalLoaders | None = None
    scheduler: SchedulerSection = SchedulerSection()
    optimizer: OptimizerSection
    algorithms: AlgorithmsSection = AlgorithmsSection()
    max_duration: RunLength
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
    dpo: DpoSection | None = None
    grpo: GrpoSection | None = None
    compile_config: CompileSection | None = None
    memory_limit: Bytes | None = None
    expandable_segments: bool = False
    dist_timeout: Annotated[float, Field(gt=0)] = 1800
    stop_timeout: Annotated[float, Field(gt=0)] = 15
    device: Literal["auto", "cpu", "gpu"] = "auto"
    progress_bar: bool = True
    log_to_console: bool = False
    log_config: Literal[True] = True
    console_log_interval: Duration = "1ba"
    probes: bool = True
    callbacks: CallbacksSection = CallbacksSection()
    loggers: LoggersSection = LoggersSection()
    save_interval: Duration = "0ba"
    save_folder: str | None = None
    save_num_checkpoints_to_keep: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] = -1
    save_overwrite: bool = False
    save_weights_only: Literal[False] = False
    accumulate_train_batch_on_tokens: Literal[True] = True
    spin_dataloaders: Literal[True] = True
    load_path: str | None = None
    load_weights_only: bool = False
    load_strict_model_weights: Literal[True] = True
    autoresume: bool | Literal["previous"] = False

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

    @property
    def evaluations(self) -> dict[str, EvalLoaderSection]:
        """The loaders of evaluations by their labels."""
        loaders = self.eval_loader or ()
        return {loader.label or "eval": loader for loader in (loaders if isinstance(loaders, tuple) else (loaders,))}
