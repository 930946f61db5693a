"""Keys of LLM Foundry's that are refused with the reason, and what to write in their place.

Those of data sets are keyed by `dataset`, whatever loader they belong to.
"""

_IN_THE_MODEL = "algorithms change gradients alone: write "
_ELSEWHERE = "no in-context task is evaluated while a run trains: evaluate what `roofline train export` writes"

_ANY_NUMBER = "the order of samples is the same for any number of nodes"
_CACHE = "samples are computed without a cache, which changes none of them"
_MLFLOW = "models are registered with MLflow from the exported folders"

REASONS = {
    "algorithms.alibi": f"{_IN_THE_MODEL}model.attn_config.alibi",
    "algorithms.fused_layernorm": f"{_IN_THE_MODEL}compile_config, which fuses norms",
    "algorithms.gated_linear_units": f"{_IN_THE_MODEL}a model that has them, such as llama-3-8b",
    "algorithms.low_precision_layernorm": f"{_IN_THE_MODEL}model.norm_type",
    "generate.use_cache": _CACHE,
    "generate_callback.use_cache": _CACHE,
    "hf_checkpointer.mlflow_logging_config": _MLFLOW,
    "hf_checkpointer.mlflow_registered_model_name": _MLFLOW,
    "callbacks.optimizer_monitor": "log.jsonl has the gradient's norm of each step; probes have those of layers",
    "code_paths": "code of yours is found by its package's entry points (docs/how-to/extending.md)",
    "dataset.num_canonical_nodes": _ANY_NUMBER,
    "dataset.partition_algo": _ANY_NUMBER,
    "dataset.replication": "write tensor_parallel, whose processes read the same rows",
    "dataset.sampling_granularity": "samples of an epoch are taken one by one",
    "eval_gauntlet": _ELSEWHERE,
    "icl_tasks": _ELSEWHERE,
    "icl_tasks_str": _ELSEWHERE,
    "load_ignore_keys": "a checkpoint is loaded as a whole; load_weights_only takes the parameters alone",
    "max_split_size_mb": "expandable_segments keeps memory from being cut up",
    "metadata": "write tags and notes under loggers",
    "model.peft_config": "write the section adapter: rank, alpha and targets",
    "profiler": "the card and log.jsonl have the time of each step; run under a profiler of torch or the vendor",
    "python_log_level": "the environment's ROOFLINE_LOG sets it",
    "save_filename": "a checkpoint is a folder, step-N; save_folder says where",
    "save_latest_filename": "autoresume finds the last checkpoint by its manifest",
}
