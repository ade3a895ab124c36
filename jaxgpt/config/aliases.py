"""Tables of other programs' flags. A flag with the same meaning as a jaxgpt key is accepted as an
alias. For other flags, the error says what to use instead.

Sources: nanoGPT's configurator.py, wordplay's Hydra keys, Megatron-LM's arguments.py, DeepSpeed's
JSON keys, torchtitan's job configs, and MaxText's base.yml.
"""

# Flags of other programs, with underscores instead of dashes -> jaxgpt's key.
KEY_ALIASES = {
    "out_dir save job.dump_folder": "out",
    "n_layer num_layers base_num_decoder_layers": "model.n_layer",
    "n_head num_attention_heads base_num_query_heads": "model.n_head",
    "n_embd hidden_size base_emb_dim": "model.n_embd",
    "num_query_groups num_key_value_heads base_num_kv_heads": "model.n_kv_head",
    "ffn_hidden_size intermediate_size base_mlp_dim": "model.mlp_hidden",
    "kv_channels": "model.head_dim",
    "norm_epsilon layernorm_epsilon rms_norm_eps normalization_layer_epsilon": "model.norm_eps",
    "rotary_base rope_max_timescale": "model.rope_theta",
    "add_qkv_bias": "model.qkv_bias",
    "qk_layernorm": "model.qk_norm",
    "block_size seq_length training.seq_len max_target_length": "model.block_size",
    "bias": "model.bias",
    "dropout": "model.dropout",
    "max_iters train_iters training.steps steps": "train.max_iters",
    "global_batch_size train_batch_size training.global_batch_size": "train.batch_size",
    "eval_interval": "train.eval_interval",
    "eval_iters": "train.eval_iters",
    "log_interval metrics.log_freq log_period": "train.log_interval",
    "dtype": "train.dtype",
    "seed training.seed": "train.seed",
    "init_from": "train.init_from",
    "dataset": "data.dataset",
    "optimizer opt_type": "optimizer.name",
    "learning_rate lr optimizer.lr": "optimizer.learning_rate",
    "lr_decay_style lr_schedule_type lr_scheduler.decay_type": "optimizer.schedule",
    "lr_wsd_decay_style": "optimizer.wsd_decay",
    "lr_wsd_decay_iters": "optimizer.wsd_decay_iters",
    "sgd_momentum muon_momentum": "optimizer.momentum",
    "min_lr": "optimizer.min_lr",
    "warmup_iters lr_warmup_iters lr_scheduler.warmup_steps": "optimizer.warmup_iters",
    "lr_decay_iters": "optimizer.lr_decay_iters",
    "weight_decay": "optimizer.weight_decay",
    "beta1 adam_beta1": "optimizer.beta1",
    "beta2 adam_beta2": "optimizer.beta2",
    "grad_clip clip_grad gradient_clipping training.max_norm": "optimizer.grad_clip",
    "mesh": "parallel.mesh",
    "offload_optimizer parallel.offload_optimizer": "parallel.offload",
    "save_interval checkpoint_period": "checkpoint.interval",
}

# jaxgpt's key -> value in another program -> jaxgpt's value.
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"}
VALUE_ALIASES = {
    "train.dtype": _DTYPES,
    "parallel.grad_reduce_dtype": _DTYPES,
    "optimizer.name": {"adam": "adamw", "AdamW": "adamw", "Muon": "muon", "dist_muon": "muon"},
    "optimizer.schedule": {"WSD": "wsd"},
    "optimizer.wsd_decay": {"minus_sqrt": "sqrt", "1-sqrt": "sqrt"},
    "parallel.offload": {"False": "none", "True": "moments"},
}
_HALVES = "fp16 float16 f16 half"
_NEEDS_SCALING = (
    "float16 needs loss scaling, which jaxgpt does not support; use train.dtype=bfloat16 or "
    "train.dtype=float32"
)

# Flags of other programs, or the part of a flag after its last dot -> what to use instead.
KEY_SUGGESTIONS = {
    "batch_size local_batch_size per_device_batch_size": (
        "use train.batch_size=N, the number of sequences per step in the whole job: sequences per "
        "device x devices x microbatches"
    ),
    "gradient_accumulation_steps gas micro_batch_size train_micro_batch_size_per_gpu": (
        "use train.gradient_accumulation_steps=N to split the global batch into N microbatches"
    ),
    "epochs num_epochs train_samples train_tokens": "use train.max_iters=N, a number of steps",
    "exit_duration_in_mins": "use train.time_limit=MINUTES",
    "bf16": "use train.dtype=bfloat16",
    _HALVES: _NEEDS_SCALING,
    "compile": "leave it out: a step is always compiled",
    "device hardware": (
        "accelerators are detected automatically; to choose a platform, set JAX_PLATFORMS=cpu or "
        "JAX_PLATFORMS=cuda in the environment"
    ),
    "backend distributed_backend local_rank": (
        "leave it out: processes find each other through their launcher's environment variables"
    ),
    "model model_name preset": "use --config NAME, such as --config gpt2",
    "config_file": "use --config NAME, --config FILE.yaml or settings such as section.key=value",
    # checkpoints and files
    "resume load run_name base_output_directory checkpoint.folder": (
        "use --out FOLDER: it holds everything that a run writes, and the same --out resumes the "
        "run"
    ),
    "eval_only": "use python -m jaxgpt.evaluate --run FOLDER, which evaluates on a whole split",
    "always_save_checkpoint": "use checkpoint.interval=N and checkpoint.keep=N",
    "wandb_log wandb_project wandb_run_name": "there is no W&B tracker; read metrics.jsonl",
    "tensorboard_dir": "leave it out: event files go to tensorboard/ in the run directory",
    # data
    "data": "run python -m jaxgpt.prepare shakespeare_char and use data.dataset=shakespeare_char",
    "data_path data_file_list train_data dataset_path": (
        "use data.path=PREFIX for one source, or data.file_list=FILE for weighted sources"
    ),
    "vocab_file merge_file tokenizer_model": (
        "use data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER"
    ),
    "split": "use data.val_share=X, the share of the data to use for validation",
    # the model and the optimizer
    "max_position_embeddings": "use model.block_size=N",
    "normalization": "use model.norm=rmsnorm or model.norm=layernorm",
    "position_embedding_type": "use model.position=rope or model.position=learned",
    "swiglu squared_relu": "use model.mlp=swiglu or model.mlp=relu2",
    "group_query_attention": "use model.n_kv_head=N with N less than model.n_head",
    "untie_embeddings_and_output_weights": "use model.tie_embeddings=False",
    "add_bias_linear disable_bias_linear": "use model.bias=True or False",
    "reset_attention_mask reset_position_ids": (
        "use data.document_mask=True, which restricts attention and positions to one document"
    ),
    "attention_dropout hidden_dropout": "use model.dropout=X, which sets all dropout rates",
    "use_flash_attn": "use model.attention=cudnn, or leave it at auto",
    "decay_lr": "use optimizer.schedule=constant for no decay, or cosine or wsd",
    "decay_ratio": "use optimizer.schedule=wsd optimizer.wsd_decay_iters=N, a number of steps",
    "lr_wsd_decay_samples": "use optimizer.wsd_decay_iters=N",
    "min_lr_factor": "use optimizer.min_lr=X",
    "muon_lr": (
        "use optimizer.learning_rate=X for the matrices, and optimizer.adamw_learning_rate=Y for "
        "all other parameters"
    ),
    "lr_warmup_fraction lr_warmup_samples": "use optimizer.warmup_iters=N",
    "lr_decay_samples": "use optimizer.lr_decay_iters=N",
    # parallelism
    "tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism": (
        "use --mesh 1,-1,N for N-way tensor parallelism"
    ),
    "data_parallel_shard_degree ici_fsdp_parallelism dcn_fsdp_parallelism": (
        "use --mesh 1,-1,1 to shard over all devices, or --mesh D,F,T to set the size of each axis"
    ),
    "data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism": (
        "use --mesh -1,1,1 for data parallelism over all devices"
    ),
    "pipeline_model_parallel_size pipeline_parallel_degree": (
        "there are no pipeline stages; if the model does not fit, shard it over F devices with "
        "--mesh D,F,T"
    ),
    "context_parallel_size": (
        "there is no context parallelism; to save memory on long sequences, use "
        "parallel.sequence_parallel=True with --mesh -1,1,N"
    ),
    "sequence_parallel": "use parallel.sequence_parallel=True",
    "recompute_activations recompute_granularity checkpoint_activations mode remat_policy": (
        "use parallel.remat=full, dots or attention"
    ),
    "use_distributed_optimizer": "use parallel.zero_stage=1 with --mesh 1,-1,1",
    "zero_stage": "use parallel.zero_stage=N --mesh 1,-1,1, which shards over the fsdp axis",
    "deepspeed": "use parallel.zero_stage=N with --mesh D,F,T",
    "deepspeed_config": "use parallel.zero_stage=N and train.batch_size=N",
}

# `key=value`, where the value comes from another program -> what to use instead.
VALUE_SUGGESTIONS = {
    "train.dtype=fp16 train.dtype=float16 train.dtype=f16 train.dtype=half": _NEEDS_SCALING,
    "optimizer.schedule=linear": (
        "use optimizer.schedule=wsd with optimizer.wsd_decay_iters=N, where N is "
        "optimizer.lr_decay_iters - optimizer.warmup_iters, so that the decay begins after warm-up"
    ),
}


def find(table: dict[str, str], word: str) -> str:
    """Return a table's entry for a flag, or an empty string if there is none."""
    return next((text for words, text in table.items() if word in words.split()), "")
