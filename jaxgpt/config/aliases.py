"""What users of other programs type: accepted where the meaning is the same, else answered.

Sources: nanoGPT's configurator.py, wordplay's Hydra keys, Megatron-LM's arguments.py, DeepSpeed's
JSON keys, torchtitan's job configs, MaxText's base.yml.
"""

# Each table has the words of other programs on the left. Dashes count as underscores.

SAME = {
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

# Key -> word of another program -> ours.
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"}
VALUES = {
    "train.dtype": _DTYPES,
    "parallel.grad_reduce_dtype": _DTYPES,
    "optimizer.name": {"adam": "adamw", "AdamW": "adamw", "Muon": "muon", "dist_muon": "muon"},
    "optimizer.schedule": {"WSD": "wsd"},
    "optimizer.wsd_decay": {"minus_sqrt": "sqrt", "1-sqrt": "sqrt"},
    "parallel.offload": {"False": "none", "True": "moments"},
}
_HALVES = "fp16 float16 f16 half"
_NEEDS_SCALING = (
    "float16 needs loss scaling, which jaxgpt does not have; type train.dtype=bfloat16 or "
    "train.dtype=float32"
)

# A whole word, or what follows its last dot: the line to type instead.
ANSWERS = {
    "batch_size local_batch_size per_device_batch_size": (
        "type train.batch_size=N, the rows of a step of the whole job: rows per device x devices x "
        "microbatches"
    ),
    "gradient_accumulation_steps gas micro_batch_size train_micro_batch_size_per_gpu": (
        "type train.gradient_accumulation_steps=N to compute the global batch in N parts"
    ),
    "epochs num_epochs train_samples train_tokens": "type train.max_iters=N, a number of steps",
    "exit_duration_in_mins": "type train.time_limit=MINUTES",
    "bf16": "type train.dtype=bfloat16",
    _HALVES: _NEEDS_SCALING,
    "compile": "leave it out: a step is always compiled",
    "device hardware": (
        "set JAX_PLATFORMS=cpu or cuda in the environment; accelerators are found by themselves"
    ),
    "backend distributed_backend local_rank": (
        "leave it out: processes find each other by their launcher's variables"
    ),
    "model model_name preset": "type --config NAME, such as --config gpt2",
    "config_file": "type --config NAME or --config FILE.yaml, or each setting as section.key=value",
    # checkpoints and files
    "resume load run_name base_output_directory checkpoint.folder": (
        "type --out FOLDER: a run is kept in one folder, and started again it goes on from there"
    ),
    "eval_only": "type python -m jaxgpt.evaluate --run FOLDER, which reads a whole split",
    "always_save_checkpoint": "type checkpoint.interval=N and checkpoint.keep=N",
    "wandb_log wandb_project wandb_run_name": "there is no W&B tracker; read metrics.jsonl",
    "tensorboard_dir": "leave it out: event files are in the run directory's tensorboard/",
    # data
    "data": "run python -m jaxgpt.prepare shakespeare_char; type data.dataset=shakespeare_char",
    "data_path data_file_list train_data dataset_path": (
        "type data.path=PREFIX for one source, or data.file_list=FILE for weighted ones"
    ),
    "vocab_file merge_file tokenizer_model": (
        "type data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER"
    ),
    "split": "type data.val_share=X, the share of a corpus that validates",
    # the model and the optimizer
    "max_position_embeddings": "type model.block_size=N",
    "normalization": "type model.norm=rmsnorm or layernorm",
    "position_embedding_type": "type model.position=rope or learned",
    "swiglu squared_relu": "type model.mlp=swiglu or relu2",
    "group_query_attention": "type model.n_kv_head=N, fewer than model.n_head",
    "untie_embeddings_and_output_weights": "type model.tie_embeddings=False",
    "add_bias_linear disable_bias_linear": "type model.bias=True or False",
    "reset_attention_mask reset_position_ids": (
        "type data.document_mask=True: attention and positions stay inside a document"
    ),
    "attention_dropout hidden_dropout": "type model.dropout=X, one rate for all places",
    "use_flash_attn": "type model.attention=cudnn, or leave it at auto",
    "decay_lr": "type optimizer.schedule=constant for no decay, cosine or wsd for one",
    "decay_ratio": "type optimizer.schedule=wsd optimizer.wsd_decay_iters=N, a number of steps",
    "lr_wsd_decay_samples": "type optimizer.wsd_decay_iters=N",
    "min_lr_factor": "type optimizer.min_lr=X",
    "muon_lr": "type optimizer.learning_rate=X, and optimizer.adamw_learning_rate=X for the rest",
    "lr_warmup_fraction lr_warmup_samples": "type optimizer.warmup_iters=N",
    "lr_decay_samples": "type optimizer.lr_decay_iters=N",
    # layouts
    "tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism": (
        "type --mesh 1,-1,N for N-way tensor parallelism"
    ),
    "data_parallel_shard_degree ici_fsdp_parallelism dcn_fsdp_parallelism": (
        "type --mesh 1,-1,1 to shard over all devices, or --mesh D,F,T for the size of each axis"
    ),
    "data_parallel_replicate_degree ici_data_parallelism dcn_data_parallelism": (
        "type --mesh -1,1,1 for data parallelism over all devices"
    ),
    "pipeline_model_parallel_size pipeline_parallel_degree": (
        "there are no pipeline stages; use --mesh D,F,T with fsdp for models that do not fit"
    ),
    "context_parallel_size": "type parallel.sequence_parallel=True with --mesh -1,1,N",
    "sequence_parallel": "type parallel.sequence_parallel=True",
    "recompute_activations recompute_granularity checkpoint_activations mode remat_policy": (
        "type parallel.remat=full, dots or attention"
    ),
    "use_distributed_optimizer": "type parallel.zero_stage=1 with --mesh 1,-1,1",
    "zero_stage": "type parallel.zero_stage=N --mesh 1,-1,1: state is sharded over the axis fsdp",
    "deepspeed": "type parallel.zero_stage=N with --mesh D,F,T",
    "deepspeed_config": "type parallel.zero_stage=N and train.batch_size=N",
}

# `key=word` of another program: the line to type instead.
VALUE_ANSWERS = {
    "train.dtype=fp16 train.dtype=float16 train.dtype=f16 train.dtype=half": _NEEDS_SCALING,
    "optimizer.schedule=linear": (
        "type optimizer.schedule=wsd with optimizer.wsd_decay_iters=N, all steps after warm-up: "
        "optimizer.lr_decay_iters - optimizer.warmup_iters"
    ),
}


def find(table: dict[str, str], word: str) -> str:
    """Return what a table says of a word; empty if nothing."""
    return next((text for words, text in table.items() if word in words.split()), "")
