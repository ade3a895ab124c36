"""Tables of other programs' flags. Flags with the same meaning as a jaxgpt setting are accepted.
Flags without effect here are ignored. For some others, a message suggests what to use instead.

Sources: nanoGPT's configurator.py, wordplay's Hydra keys, the arguments.py of Megatron-LM and
Megatron-DeepSpeed, DeepSpeed's JSON keys, torchtitan's job configs, MaxText's base.yml, and
levanter's TrainerConfig.
"""

from collections.abc import Container


def by_word(table: dict[str, str]) -> dict[str, str]:
    """Return a table with one entry per word. Keys of `table` are words separated by spaces."""
    return {word: text for words, text in table.items() for word in words.split()}


# Maps other programs' flags, with underscores instead of dashes, to jaxgpt's keys.
KEY_ALIASES = by_word({
    "out_dir save job.dump_folder data.out_dir trainer.checkpointer.base_path": "out",
    "n_layer num_layers base_num_decoder_layers model.num_layers": "model.n_layer",
    "n_head num_attention_heads base_num_query_heads model.num_heads": "model.n_head",
    "n_embd hidden_size base_emb_dim model.dim model.hidden_dim": "model.n_embd",
    "num_query_groups num_key_value_heads base_num_kv_heads model.num_kv_heads": "model.n_kv_head",
    "ffn_hidden_size intermediate_size base_mlp_dim model.intermediate_dim": "model.mlp_hidden",
    "kv_channels head_dim": "model.head_dim",
    "norm_epsilon layernorm_epsilon rms_norm_eps normalization_layer_epsilon": "model.norm_eps",
    "rotary_base rope_max_timescale rotary_position_embeddings_theta": "model.rope_theta",
    "add_qkv_bias": "model.qkv_bias",
    "qk_layernorm": "model.qk_norm",
    "normalization": "model.norm",
    "position_embedding_type": "model.position",
    "model.activation": "model.mlp",
    "block_size seq_length training.seq_len max_target_length model.seq_len": "model.block_size",
    "bias": "model.bias",
    "dropout attention_dropout hidden_dropout": "model.dropout",
    "vocab_size": "model.vocab_size",
    "max_iters train_iters training.steps steps trainer.num_train_steps": "train.max_iters",
    "batch_size global_batch_size train_batch_size training.global_batch_size": "train.batch_size",
    "trainer.train_batch_size trainer.batch_size": "train.batch_size",
    "eval_interval trainer.steps_per_eval": "train.eval_interval",
    "eval_iters": "train.eval_iters",
    "log_interval metrics.log_freq log_period": "train.log_interval",
    "dtype training.mixed_precision_param": "train.dtype",
    "seed training.seed trainer.seed": "train.seed",
    "init_from": "train.init_from",
    "wandb_project wandb.project train.wandb_project": "train.tracker_project",
    "wandb_run_name wandb_exp_name wandb.name train.wandb_run_name": "train.tracker_name",
    "wandb.group": "train.tracker_group",
    "exit_duration_in_mins": "train.time_limit",
    "dataset": "data.dataset",
    "data_file_list": "data.file_list",
    "optimizer opt_type": "optimizer.name",
    "learning_rate lr optimizer.lr": "optimizer.learning_rate",
    "lr_decay_style lr_schedule_type lr_scheduler.decay_type": "optimizer.schedule",
    "lr_wsd_decay_style": "optimizer.wsd_decay",
    "lr_wsd_decay_iters": "optimizer.wsd_decay_iters",
    "sgd_momentum muon_momentum": "optimizer.momentum",
    "min_lr": "optimizer.min_lr",
    "warmup_iters lr_warmup_iters train.warmup_iters": "optimizer.warmup_iters",
    "lr_scheduler.warmup_steps": "optimizer.warmup_iters",
    "lr_decay_iters": "optimizer.lr_decay_iters",
    "weight_decay": "optimizer.weight_decay",
    "beta1 adam_beta1": "optimizer.beta1",
    "beta2 adam_beta2": "optimizer.beta2",
    "adam_eps": "optimizer.eps",
    "grad_clip clip_grad gradient_clipping training.max_norm": "optimizer.grad_clip",
    "mesh": "parallel.mesh",
    "offload_optimizer parallel.offload_optimizer": "parallel.offload",
    "sequence_parallel": "parallel.sequence_parallel",
    "scan_layers": "parallel.scan_layers",
    "save_interval checkpoint_period checkpoint.every": "checkpoint.interval",
})  # fmt: skip

# Maps other programs' flags to settings with the same effect. {} stands for the flag's value. The
# following names are not settings; `other_programs.py` replaces them:
# mesh.AXIS     size of one mesh axis; mesh.rest names the axis that gets all remaining devices
# samples.KEY   value of KEY in sequences instead of steps
# tokens.KEY    value of KEY in tokens instead of steps
# later.NAME    value that depends on other settings
SETTINGS = by_word({
    "bf16": "train.dtype=bfloat16",
    "wandb_log metrics.enable_wandb": "train.trackers=wandb",
    "decay_lr": "later.decay_lr={}",
    "swiglu": "model.mlp=swiglu",
    "squared_relu": "model.mlp=relu2",
    "disable_bias_linear": "model.bias=False",
    "add_bias_linear": "model.bias=True",
    "use_rotary_position_embeddings": "model.position=rope",
    "untie_embeddings_and_output_weights": "model.tie_embeddings=False",
    "use_distributed_optimizer": "parallel.zero_stage=1 mesh.rest=fsdp",
    "zero_stage": "parallel.zero_stage={} later.zero_stage={}",
    "grad_reduce_in_bf16": "parallel.grad_reduce_dtype=bfloat16",
    "recompute_activations": "parallel.remat=attention",
    "checkpoint_activations": "parallel.remat=full",
    "recompute_granularity activation_checkpoint.mode remat_policy": "parallel.remat={}",
    "reset_attention_mask reset_position_ids eod_mask_loss": "data.document_mask=True",
    "model.batch_size local_batch_size training.local_batch_size": "train.batch_size_per_device={}",
    "per_device_train_batch_size": "train.batch_size_per_device={}",
    "train_micro_batch_size_per_gpu": "train.batch_size_per_device={}",
    "per_device_batch_size": "later.per_device={}",
    "micro_batch_size trainer.per_device_parallelism": "later.micro_batch_size={}",
    "gradient_accumulation_steps": "later.nanogpt_accumulation={}",
    "optimizer.gas gas": "train.gradient_accumulation_steps={}",
    "optimizer.gradient_accumulation_steps": "train.gradient_accumulation_steps={}",
    "train_samples": "samples.train.max_iters={}",
    "lr_decay_samples": "samples.optimizer.lr_decay_iters={}",
    "lr_warmup_samples": "samples.optimizer.warmup_iters={}",
    "lr_wsd_decay_samples": "samples.optimizer.wsd_decay_iters={}",
    "train_tokens": "tokens.train.max_iters={}",
    "lr_decay_tokens": "tokens.optimizer.lr_decay_iters={}",
    "lr_warmup_tokens": "tokens.optimizer.warmup_iters={}",
    "lr_warmup_fraction warmup_steps_fraction": "later.warmup_fraction={}",
    "cosine_learning_rate_final_fraction learning_rate_final_fraction": "later.final_fraction={}",
    "learning_rate_schedule_steps": "optimizer.lr_decay_iters={}",
    "data": "later.data={}",
    "data_path": "later.data_path={}",
    "split": "later.split={}",
    "experiment": "later.experiment={}",
    "load": "later.load={}",
    "base_output_directory": "later.output={}",
    "run_name": "later.run_name={}",
    "tokenizer_type": "later.tokenizer={}",
    "merge_file": "later.merges={}",
    "no_bias_gelu_fusion": "later.exact_gelu=True",
    "backend": "later.backend={}",
    "ds_config_path deepspeed_config": "later.ds_config={}",
    "config_path job.config_file model_name": "config={}",
    "tensor_model_parallel_size": "mesh.tensor={}",
    "tensor_parallel_degree": "mesh.tensor={} mesh.rest=fsdp",
    "ici_tensor_parallelism dcn_tensor_parallelism": "mesh.tensor={} mesh.rest=fsdp",
    "pipeline_model_parallel_size pipeline_parallel_degree": "mesh.stage={}",
    "ici_pipeline_parallelism dcn_pipeline_parallelism": "mesh.stage={}",
    "num_pipeline_microbatches": "later.pipeline_microbatches={}",
    "num_pipeline_repeats": "parallel.schedule=circular parallel.stage_repeats={}",
    "context_parallel_size ds_sequence_parallel_size": "mesh.context={}",
    "context_parallel_degree": "mesh.context={} mesh.rest=fsdp",
    "ici_context_parallelism dcn_context_parallelism": "mesh.context={} mesh.rest=fsdp",
    "data_parallel_shard_degree mesh.fsdp": "mesh.fsdp={}",
    "ici_fsdp_parallelism dcn_fsdp_parallelism": "mesh.fsdp={}",
    "data_parallel_replicate_degree mesh.data": "mesh.data={}",
    "ici_data_parallelism dcn_data_parallelism": "mesh.data={}",
})  # fmt: skip

# Other programs' flags that set a key with a broader effect: (key, flag, effect of the key).
BROADER = (
    ("model.dropout", "attention_dropout", "which is also the dropout rate of hidden states"),
    (
        "data.document_mask",
        "eod_mask_loss",
        "which also restricts attention to documents and restarts positions",
    ),
)

# Other programs' flags that have no effect here, whatever their value.
IGNORED = frozenset("""
    compile framework port ngpus precision use_wandb wandb_save_dir
    always_save_checkpoint device hardware local_rank distributed_backend
    tensorboard_dir log_timers_to_tensorboard log_optimizer_states_to_tensorboard
    group_query_attention max_position_embeddings no_position_embedding use_flash_attn
    use_flash_attn_v1 use_flash_attn_v2 use_flash_attn_triton use_flash_attn_builder
    attention_backend deepspeed no_pipeline_parallel deepspeed_activation_checkpointing
    recompute_method recompute_num_layers checkpoint_num_layers no_query_key_layer_scaling
    no_masked_softmax_fusion no_bias_swiglu_fusion no_bias_dropout_fusion
    no_gradient_accumulation_fusion no_async_tensor_model_parallel_allreduce no_rope_fusion
    accumulate_allreduce_grads_in_fp32 cross_entropy_loss_fusion calculate_per_token_loss
    overlap_grad_reduce overlap_param_gather use_mcore_models use_checkpoint_opt_param_scheduler
    override_opt_param_scheduler manual_gc empty_unused_memory_level ckpt_format log_throughput
    log_params_norm log_num_zeros_in_grad timing_log_level distributed_timeout_minutes
    num_workers data_cache_path data_impl mock_data no_create_attention_mask_in_dataloader
    no_mmap_bin_files tiktoken_pattern vocab_file tokenizer_model profile profile_step_start
    profile_step_end profiler profiler_steps module job.description metrics.enable_tensorboard
    compile.enable compile.components
    shuffle_sample shuffle_sample_in_corpus blend_sample_in_corpus dataset_type
    use_iota_embed reuse_example_batch max_segments_per_seq
    trainer.ray.auto_start_cluster trainer.eval_per_device_parallelism transformer_impl use_mics
    hysteresis initial_loss_scale loss_scale loss_scale_window min_loss_scale
""".split())  # fmt: skip

# Maps other programs' flags to the values that have no effect here.
NEUTRAL = by_word({
    "context_parallel_size context_parallel_degree ds_sequence_parallel_size": "1",
    "ici_context_parallelism dcn_context_parallelism": "1",
    "expert_model_parallel_size expert_parallel_degree": "1",
    "rotary_percent": "1 1.0",
    "trainer.per_device_parallelism learning_rate_schedule_steps": "-1",
    "init_method_std": "0.02 .02",
    "make_vocab_size_divisible_by": "128",
    "eval_only": "False false",
    "decay_lr": "True true",
    "train.init_from init_from": "scratch",
    "model_name": "default",
    "enable_checkpointing": "True true",
    "fp16": "False false",
    "backend": "nccl gloo mpi ccl",
    "attention": "autoselected dot_product flash cudnn_flash_te cudnn_flash_jax",  # MaxText's
})  # fmt: skip

# Maps the names of other programs' configurations to settings.
CONFIGS = by_word({
    "gpt2_small": "config=gpt2",
    "train_gpt2": "config=gpt2",
    "llama3_debugmodel debug_model": "config=llama-tiny",
    "llama_small_fast": (
        "config=llama-tiny model.n_layer=12 model.n_head=12 model.n_kv_head=None model.n_embd=768 "
        "model.mlp_hidden=2048 model.block_size=1024 train.batch_size=256 train.max_iters=20000 "
        "optimizer.learning_rate=1e-3 train.dtype=bfloat16"
    ),
})  # fmt: skip
NANOGPT = "gpt2"  # the preset with the defaults of nanoGPT's train.py
# Maps the names of nanoGPT's configurations to its batch size and its number of microbatches, which
# all processes share.
NANOGPT_BATCHES = {
    "train_gpt2": ("12", "40"),  # also the defaults of train.py
    "train_shakespeare_char": ("64", "1"),
    "finetune_shakespeare": ("1", "32"),
}
# Maps values of nanoGPT's --init_from to advice.
_DOWNLOADED = "jaxgpt downloads no weights; download the model, and use train.init_from=hf:FOLDER"
NANOGPT_WEIGHTS = dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), _DOWNLOADED)
NANOGPT_WEIGHTS["resume"] = "leave it out; --out FOLDER resumes a run from its checkpoint"
# Maps the NAME in wordplay's `data=NAME` to the name of a dataset.
WORDPLAY_DATA = {
    "shakespeare": "shakespeare_char", "owt": "openwebtext", "yelp": "yelp_review_full",
}  # fmt: skip
# Maps the NAME in wordplay's `experiment=NAME` to a preset and wordplay's batch size per device.
WORDPLAY_EXPERIMENTS = {
    "shakespeare": ("shakespeare_char", 64),
    "owt": ("gpt2", 12),
    "gpt2": ("gpt2", 12),
    "gpt2_medium": ("gpt2-medium", 4),
    "gpt2_large": ("gpt2-large", 4),
    "gpt2_xl": ("gpt2-xl", 1),
}
# Maps Megatron's --tokenizer-type to the vocabulary size before padding.
MEGATRON_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}

# Maps jaxgpt's keys to tables that translate other programs' values to jaxgpt's values.
_DTYPES = by_word({"bf16": "bfloat16", "fp32 f32 float": "float32"})
VALUE_ALIASES = {
    "train.dtype": _DTYPES,
    "train.matmul_dtype": {"fp8": "float8"},
    "parallel.grad_reduce_dtype": _DTYPES,
    "optimizer.name": by_word({"adam AdamW apex.adam": "adamw", "Muon dist_muon": "muon"}),
    "model.norm": {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"},
    "model.position": {"learned_absolute": "learned"},
    "parallel.remat": {"selective": "attention"},
    "optimizer.schedule": {"WSD": "wsd"},
    "optimizer.wsd_decay": by_word({"minus_sqrt 1-sqrt": "sqrt"}),
    "parallel.offload": {"False": "none", "True": "moments"},
}
_HALVES = "fp16 float16 f16 half"
_NEEDS_SCALING = (
    "float16 needs loss scaling, which jaxgpt does not support; use train.dtype=bfloat16 or "
    "train.dtype=float32"
)

# Maps other programs' flags to advice: what to use instead, or why the flag is ignored. The entry
# for NAME also applies to flags that end in `.NAME`.
KEY_SUGGESTIONS = by_word({
    "epochs num_epochs": "use train.max_iters=N, a number of steps",
    "exit_interval": (
        "use train.max_iters=N to stop after step N, or train.time_limit=MINUTES to save and stop "
        "after a given time"
    ),
    _HALVES: _NEEDS_SCALING,
    "compile": "a step is always compiled",
    "device hardware": (
        "accelerators are detected automatically; to choose a platform, set JAX_PLATFORMS=cpu or "
        "JAX_PLATFORMS=cuda in the environment"
    ),
    "distributed_backend local_rank port ngpus": (
        "processes find each other through their launcher's environment variables"
    ),
    "precision": "train.dtype sets the compute dtype",
    "model preset": "use --config NAME, such as --config gpt2",
    "devices gpus n_gpu num_gpus n_gpus ngpu num_devices mesh_shape": (
        "use --mesh D,F,T, such as --mesh 8,1,1 for 8 devices"
    ),
    "config_file": "use --config NAME, --config FILE.yaml or settings such as section.key=value",
    # checkpoints and files
    "resume base_output_directory checkpoint.folder": (
        "use --out FOLDER: it holds everything that a run writes, and the same --out resumes the "
        "run"
    ),
    "load": (
        "use --out FOLDER to resume a run of jaxgpt, or import the weights with "
        "python -m jaxgpt.convert from-megatron and use train.init_from=FOLDER"
    ),
    "enable_checkpointing": "use checkpoint.interval=0 to save only after the last step",
    "checkpointer.save_interval": "use checkpoint.interval_minutes=N",
    "eval_only": "use python -m jaxgpt.evaluate --run FOLDER, which evaluates on a whole split",
    "always_save_checkpoint": "checkpoint.interval and checkpoint.keep control saving",
    "use_wandb": "use train.trackers=wandb",
    "tensorboard_dir": "event files go to tensorboard/ in the run directory",
    # data
    "root_path": "use data.path=FOLDER",
    "data.file data.input data.text input text": (
        "run python -m jaxgpt.prepare text --input FILE --out FOLDER, then set data.path=FOLDER"
    ),
    "train_data dataset_path": (
        "use data.path=PREFIX for one source, or data.file_list=FILE for weighted sources"
    ),
    "dataset_type mock_data": "without data settings, a dataset that needs no download is used",
    "vocab_file merge_file tokenizer_model": (
        "use data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER"
    ),
    # the model and the optimizer
    "max_position_embeddings": "model.block_size sets the number of positions",
    "no_position_embedding": "model.position chooses learned or rotary positions",
    "apply_layernorm_1p": "use model.norm=rmsnorm_1p, if the norm is RMSNorm",
    "init_method_std word_embedding_init_std adjust_word_embedding_init": (
        "weights are always initialized as in GPT-2, with a standard deviation of 0.02"
    ),
    "make_vocab_size_divisible_by": "use model.vocab_size=N, the padded size",
    "decay_ratio": "use optimizer.schedule=wsd optimizer.wsd_decay_iters=N, a number of steps",
    "min_lr_factor": "use optimizer.min_lr=X",
    "muon_lr decoupled_lr decoupled_min_lr": (
        "use optimizer.name=muon optimizer.learning_rate=X for the matrices, and "
        "optimizer.adamw_learning_rate=Y for all other parameters"
    ),
    "shuffle_sample shuffle_sample_in_corpus": "samples are always shuffled across all data",
    "blend_sample_in_corpus": (
        "the sources of a corpus are always mixed in proportion to their weights"
    ),
    "step_batch_size_schedule rampup_batch_size": (
        "use train.batch_size=N, and change it when you resume the run"
    ),
    # parallelism
    "num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank": (
        "use parallel.schedule=circular with parallel.stage_repeats=V, where V is the number of "
        "groups of layers on each stage"
    ),
    "expert_model_parallel_size expert_parallel_degree": "mixture of experts is not supported",
    "cpu_optimizer": "use parallel.offload=moments, unless the model is split into stages",
    "use_mics": "to shard over groups of F devices, use --mesh D,F,T",
    "fp8 fp8_format": "use train.matmul_dtype=float8",
    "fp8_amax_history_len fp8_amax_compute_algo": (
        "with train.matmul_dtype=float8, scales are computed from the current tensors"
    ),
    "fp8_param_gather": "parameters are gathered in train.dtype, even with FP8 matmuls",
})  # fmt: skip

# Maps flags to their replacements in a corrected command. The table lists only those flags in
# KEY_SUGGESTIONS that have a single replacement.
KEY_FIXES = by_word({_HALVES: "train.dtype=bfloat16"})

# Maps `key=value`, where the value is from another program, to advice on what to use instead.
VALUE_SUGGESTIONS = by_word({
    "train.dtype=fp16 train.dtype=float16 train.dtype=f16 train.dtype=half": _NEEDS_SCALING,
    "train.dtype=fp8 train.dtype=float8": "use train.dtype=bfloat16 train.matmul_dtype=float8",
    "train.eval_iters=0": "use train.eval_interval=0 to evaluate only after the last step",
})  # fmt: skip
# Maps values in VALUE_SUGGESTIONS to the values in a corrected command.
VALUE_FIXES = by_word({_HALVES: "bfloat16"})


def known_end(name: str, names: Container[str]) -> str:
    """Return the longest suffix of a dotted name that is in `names`, or an empty string."""
    while name and name not in names:
        name = name.partition(".")[2]
    return name


def find_end(table: dict[str, str], name: str) -> str:
    """Return the entry for a dotted name's longest suffix in a table, or an empty string."""
    return table.get(known_end(name, table), "")
