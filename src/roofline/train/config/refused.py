"""Keys of LLM Foundry's that are refused with the reason, and what to write in their place; so are values of some.

Those of data sets are keyed by `dataset`, whatever loader they belong to.
"""

_IN_THE_MODEL = "algorithms change gradients alone: write "
_ELSEWHERE = "no in-context task is evaluated while a run trains: evaluate what `roofline train export` writes"

_ANY_NUMBER = "the order of samples is the same for any number of nodes"
_CACHE = "samples are computed without a cache, which changes none of them"
_CODE = "code that comes with a model is never run: leave it out"
_EXPERTS = "models with experts are trained from their files (hf_causal_lm), not made by mpt_causal_lm"
_FETCHED = "files of buckets are fetched once, checked by their hashes or versions, and tried again for three minutes"
_METRICS = "the log has loss, perplexity and speed of each step; other figures come from `roofline bench tasks`"
_MLFLOW = "models are registered with MLflow from the exported folders"

_OF_EXPERTS = (
    *("memory_optimized_mlp", "mlp_impl", "mlp_type", "moe_dropout", "moe_jitter_eps", "moe_lbl_in_fp32"),
    *("moe_loss_weight", "moe_normalize_expert_weights", "moe_num_experts", "moe_top_k", "moe_weight_parallelism"),
    *("moe_world_size", "uniform_expert_assignment"),
)

_NORMS = (
    "of the models here those read from their files have it, such as qwen3 (hf_causal_lm), and mpt_causal_lm has not"
)
_PLATFORM = "it is a key of MosaicML's platform, whose `parameters` are the configuration: write those keys on top"

REASONS = {
    "accumulate_train_batch_on_tokens": "every token of a batch has the same weight, in whatever microbatch it is",
    **dict.fromkeys(("cluster", "command", "compute", "entrypoint", "env_variables", "image"), _PLATFORM),
    **dict.fromkeys(("integrations", "name", "parameters", "scheduling", "secrets", "submission"), _PLATFORM),
    **dict.fromkeys(("gpu_num", "gpu_type", "platform"), _PLATFORM),
    "attn_config.attn_pdrop": "no layer drops anything out",
    **dict.fromkeys(("attn_config.qk_gn", "attn_config.qk_ln"), _NORMS),
    "attn_config.prefix_lm": "every token attends to those before it alone",
    "algorithms.alibi": f"{_IN_THE_MODEL}model.attn_config.alibi",
    "algorithms.fused_layernorm": f"{_IN_THE_MODEL}compile_config, which fuses norms",
    "algorithms.gated_linear_units": f"{_IN_THE_MODEL}a model that has them, such as llama-3-8b",
    "algorithms.low_precision_layernorm": f"{_IN_THE_MODEL}model.norm_type",
    "generate.use_cache": _CACHE,
    "generate_callback.use_cache": _CACHE,
    "hf_checkpointer.mlflow_logging_config": _MLFLOW,
    "hf_checkpointer.mlflow_registered_model_name": _MLFLOW,
    "callbacks.optimizer_monitor": "log.jsonl has the gradient's norm of each step; probes have those of layers",
    "cuda_load_lazy": "it is torch's default already",
    "code_paths": "code of yours is found by its package's entry points (docs/how-to/extending.md)",
    "dataset.allow_unsafe_types": "unpickling runs whatever code the file holds, so such columns are not read",
    "dataset.decoder_only_format": "models with an encoder, such as T5, are not trained",
    "dataset.keep_zip": "a cache holds unpacked shards alone",
    **dict.fromkeys(("dataset.download_retry", "dataset.download_timeout", "dataset.validate_hash"), _FETCHED),
    "dataset.num_canonical_nodes": _ANY_NUMBER,
    "dataset.partition_algo": _ANY_NUMBER,
    "dataset.replication": "write tensor_parallel, whose processes read the same rows",
    "dataset.sampling_granularity": "samples of an epoch are taken one by one",
    "device_train_batch_size": "write global_train_batch_size, which is the same for any number of processes",
    **dict.fromkeys(("eval_gauntlet", "eval_gauntlet_str", "icl_tasks", "icl_tasks_str"), _ELSEWHERE),
    **dict.fromkeys(("icl_max_seq_len", "icl_seq_len", "icl_subset_num_batches"), _ELSEWHERE),
    **dict.fromkeys((f"ffn_config.{name}" for name in _OF_EXPERTS), _EXPERTS),
    "flatten_metadata": "write tags and notes under loggers",
    "fsdp_config.forward_prefetch": "FSDP2 gathers ahead by itself",
    "load_ignore_keys": "a checkpoint is loaded as a whole; load_weights_only takes the parameters alone",
    "max_split_size_mb": "expandable_segments keeps memory from being cut up",
    "metadata": "write tags and notes under loggers",
    **dict.fromkeys(
        (f"model.{name}_metrics" for name in ("use_train", "additional_train", "additional_eval")), _METRICS
    ),
    "model.allow_embedding_resizing": "a model keeps the vocabulary of its files",
    "model.attn_implementation": "write attn_config.attn_impl, or leave it out: torch picks a kernel of the device",
    "model.load_in_8bit": "write the section adapter with base: q8_0",
    "model.pretrained_lora_id_or_path": "merge the adapter first: `roofline merge MODEL ADAPTER -o OUT`",
    "model.should_save_peft_only": "an adapter's run writes the adapter alone; `roofline merge` joins the two",
    **dict.fromkeys(("model.trust_remote_code", "kwargs.trust_remote_code"), _CODE),
    "model.peft_config": "write the section adapter: rank, alpha and targets",
    "only_composer_checkpoint": "leave out callbacks.hf_checkpointer",
    "only_hf_checkpoint": "leave out save_interval and save_folder: a run writes no checkpoint then",
    "profiler": "the card and log.jsonl have the time of each step; run under a profiler of torch or the vendor",
    "python_log_level": "the environment's ROOFLINE_LOG sets it",
    "save_ignore_keys": "a checkpoint is whole",
    "save_filename": "a checkpoint is a folder, step-N; save_folder says where",
    "save_latest_filename": "autoresume finds the last checkpoint by its manifest",
    "spin_dataloaders": "a run that goes on computes where its data stands, and reads nothing twice",
    "tp_config": "write tensor_parallel",
    "train_subset_num_batches": "write max_duration, or dataset.epoch_size",
}
