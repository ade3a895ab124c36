"""What users of other programs type: accepted where the meaning is the same, else answered.

Sources: nanoGPT's configurator.py, wordplay's Hydra keys, Megatron-LM's arguments.py, DeepSpeed's
JSON keys, torchtitan's job configs, MaxText's base.yml.
"""

# Spelling -> the key that means the same. Dashes count as underscores.
SAME = {
    "mesh": "parallel.mesh",
    # nanoGPT
    "out_dir": "out",
    "n_layer": "model.n_layer",
    "n_head": "model.n_head",
    "n_embd": "model.n_embd",
    "block_size": "model.block_size",
    "bias": "model.bias",
    "dropout": "model.dropout",
    "max_iters": "train.max_iters",
    "eval_interval": "train.eval_interval",
    "eval_iters": "train.eval_iters",
    "log_interval": "train.log_interval",
    "dtype": "train.dtype",
    "seed": "train.seed",
    "dataset": "data.dataset",
    "learning_rate": "optimizer.learning_rate",
    "min_lr": "optimizer.min_lr",
    "warmup_iters": "optimizer.warmup_iters",
    "lr_decay_iters": "optimizer.lr_decay_iters",
    "weight_decay": "optimizer.weight_decay",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "grad_clip": "optimizer.grad_clip",
    # Megatron-LM, Megatron-DeepSpeed, DeepSpeed
    "num_layers": "model.n_layer",
    "hidden_size": "model.n_embd",
    "num_attention_heads": "model.n_head",
    "seq_length": "model.block_size",
    "global_batch_size": "train.batch_size",
    "train_batch_size": "train.batch_size",
    "train_iters": "train.max_iters",
    "lr": "optimizer.learning_rate",
    "lr_warmup_iters": "optimizer.warmup_iters",
    "clip_grad": "optimizer.grad_clip",
    "gradient_clipping": "optimizer.grad_clip",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "save": "out",
    "save_interval": "checkpoint.interval",
    # torchtitan
    "training.steps": "train.max_iters",
    "training.seq_len": "model.block_size",
    "training.global_batch_size": "train.batch_size",
    "training.max_norm": "optimizer.grad_clip",
    "training.seed": "train.seed",
    "optimizer.lr": "optimizer.learning_rate",
    "lr_scheduler.warmup_steps": "optimizer.warmup_iters",
    "job.dump_folder": "out",
    "metrics.log_freq": "train.log_interval",
    # MaxText
    "steps": "train.max_iters",
    "max_target_length": "model.block_size",
    "base_emb_dim": "model.n_embd",
    "base_num_decoder_layers": "model.n_layer",
    "base_num_query_heads": "model.n_head",
    "checkpoint_period": "checkpoint.interval",
    "log_period": "train.log_interval",
}

_PER_DEVICE = (
    "type train.batch_size=N, the rows of a step of the whole job: rows per device x devices x "
    "microbatches"
)
_TENSOR = "type --mesh -1,1,N for N-way tensor parallelism"
_FSDP = "type --mesh 1,-1,1 to shard over all devices, or --mesh D,F,T for the size of each axis"
_DATA = "type --mesh -1,1,1 for data parallelism over all devices"
_MICROBATCHES = "type train.gradient_accumulation_steps=N to compute the global batch in N parts"
_NO_PIPELINE = "there are no pipeline stages; use --mesh D,F,T with fsdp for models that do not fit"
_OUT = "type --out FOLDER: a run is kept in one folder, and started again it goes on from there"
_CONFIG = "type --config NAME or --config FILE.yaml, or each setting as section.key=value"
_DATA_PATH = "type data.path=PREFIX for one source, or data.file_list=FILE for weighted ones"
_DTYPE = "type train.dtype=bfloat16"
_HALF = (
    "float16 needs loss scaling, which jaxgpt does not have; type train.dtype=bfloat16 or "
    "train.dtype=float32"
)
_REMAT = "type parallel.remat=full, dots or attention"
_STEPS = "type train.max_iters=N: runs are counted in steps"
_PLATFORM = "set JAX_PLATFORMS=cpu or cuda in the environment; accelerators are found by themselves"
_COMPILED = "leave it out: a step is always compiled"
_LAUNCHED = "leave it out: processes find each other by their launcher's variables"
_NO_WEIGHTS = "runs start from new weights; with --out FOLDER a run goes on from its checkpoint"
_TRACKER = "there is no Weights & Biases tracker; metrics.jsonl and TensorBoard are always written"

# Spelling, or its last part -> the line to type instead.
ANSWERS = {
    # nanoGPT and wordplay
    "batch_size": _PER_DEVICE,
    "gradient_accumulation_steps": _MICROBATCHES,
    "compile": _COMPILED,
    "device": _PLATFORM,
    "backend": _LAUNCHED,
    "init_from": _NO_WEIGHTS,
    "eval_only": "type --out FOLDER train.max_iters=N, N being the step of its checkpoint",
    "always_save_checkpoint": "type checkpoint.interval=N and checkpoint.keep=N",
    "wandb_log": _TRACKER,
    "wandb_project": _TRACKER,
    "wandb_run_name": _TRACKER,
    "decay_lr": "type optimizer.min_lr=X, equal to optimizer.learning_rate for no decay",
    "data": "run python -m jaxgpt.prepare shakespeare_char; type data.dataset=shakespeare_char",
    "resume": _OUT,
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "gas": _MICROBATCHES,
    # Megatron-LM, Megatron-DeepSpeed, DeepSpeed
    "micro_batch_size": _MICROBATCHES,
    "train_micro_batch_size_per_gpu": _MICROBATCHES,
    "tensor_model_parallel_size": _TENSOR,
    "pipeline_model_parallel_size": _NO_PIPELINE,
    "context_parallel_size": "type parallel.sequence_parallel=True with --mesh -1,1,N",
    "sequence_parallel": "type parallel.sequence_parallel=True",
    "max_position_embeddings": "type model.block_size=N",
    "ffn_hidden_size": "the MLP is 4 x model.n_embd wide",
    "attention_dropout": "type model.dropout=X, one rate for embeddings, attention and residuals",
    "hidden_dropout": "type model.dropout=X, one rate for embeddings, attention and residuals",
    "bf16": _DTYPE,
    "fp16": _HALF,
    "load": _OUT,
    "data_path": _DATA_PATH,
    "data_file_list": _DATA_PATH,
    "train_data": _DATA_PATH,
    "vocab_file": "type data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER",
    "merge_file": "type data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER",
    "tokenizer_model": "type data.tokenizer=FOLDER, or prepare the data with --tokenizer FOLDER",
    "split": "type data.val_share=X, the share of a corpus that validates",
    "lr_decay_style": "the learning rate decays by a cosine to optimizer.min_lr",
    "lr_warmup_fraction": "type optimizer.warmup_iters=N",
    "lr_warmup_samples": "type optimizer.warmup_iters=N",
    "lr_decay_samples": "type optimizer.lr_decay_iters=N",
    "train_samples": _STEPS,
    "train_tokens": _STEPS,
    "recompute_activations": _REMAT,
    "recompute_granularity": _REMAT,
    "checkpoint_activations": _REMAT,
    "use_flash_attn": "type model.attention=cudnn, or leave it at auto",
    "use_distributed_optimizer": "type parallel.zero_stage=1 with --mesh 1,-1,1",
    "use_mcore_models": "leave it out",
    "zero_stage": "type parallel.zero_stage=N --mesh 1,-1,1: state is sharded over the axis fsdp",
    "deepspeed": "type parallel.zero_stage=N with --mesh D,F,T",
    "deepspeed_config": "type parallel.zero_stage=N and train.batch_size=N",
    "distributed_backend": _LAUNCHED,
    "local_rank": _LAUNCHED,
    "tensorboard_dir": "leave it out: event files are in the run directory's tensorboard/",
    "exit_duration_in_mins": "type train.time_limit=MINUTES",
    # torchtitan
    "local_batch_size": _PER_DEVICE,
    "tensor_parallel_degree": _TENSOR,
    "pipeline_parallel_degree": _NO_PIPELINE,
    "data_parallel_shard_degree": _FSDP,
    "data_parallel_replicate_degree": _DATA,
    "config_file": _CONFIG,
    "mode": _REMAT,
    "checkpoint.folder": _OUT,
    # MaxText
    "per_device_batch_size": _PER_DEVICE,
    "ici_fsdp_parallelism": _FSDP,
    "dcn_fsdp_parallelism": _FSDP,
    "ici_tensor_parallelism": _TENSOR,
    "ici_data_parallelism": _DATA,
    "dcn_data_parallelism": _DATA,
    "base_output_directory": _OUT,
    "run_name": _OUT,
    "dataset_path": _DATA_PATH,
    "remat_policy": _REMAT,
    "hardware": _PLATFORM,
}

DTYPES = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "float": "float32"}
HALVES = ("float16", "fp16", "f16", "half")

# Command -> another program's option or word -> ours, with the same meaning.
COMMAND_SAME = {
    "sample": {"--out-dir": "--run", "--start": "--prompt"},  # nanoGPT
    "launch": {  # mpiexec, ezpz, torchrun, srun
        "-ppn": "--ppn",
        "--nproc": "-n",
        "--nproc-per-node": "--ppn",
        "--ntasks": "-n",
        "--ntasks-per-node": "--ppn",
        "--np": "-n",
        "-f": "--hosts",
        "-machinefile": "--hosts",
        "--machinefile": "--hosts",
        "-hostfile": "--hosts",
        "--hostfile": "--hosts",
    },
    "prepare": {"--json-keys": "--jsonl-key", "--json-key": "--jsonl-key"},
}
_ONE_CHECKPOINT = "samples are written by the newest checkpoint of --run FOLDER, or by --step N"
_OF_HOSTS = "type -n N for processes in all, or --ppn P for processes on each host"
# Command -> another program's option or word -> the line to type instead.
COMMAND_ANSWERS = {
    "sample": {
        "--init-from": _ONE_CHECKPOINT,
        "--load": _ONE_CHECKPOINT,
        "--device": _PLATFORM,
        "--compile": _COMPILED,
        "--dtype": "samples are computed in the dtype of the run",
        "--num-tokens": "type --max-new-tokens N",
    },
    "launch": {
        "--nnodes": _OF_HOSTS,
        "--nodes": _OF_HOSTS,
        "--nhosts": _OF_HOSTS,
        "--num-nodes": _OF_HOSTS,
        "--num-gpus": _OF_HOSTS,
        "--master-addr": _LAUNCHED,
        "--master-port": _LAUNCHED,
    },
    "prepare": {
        "openwebtext": "is not downloaded; type python -m jaxgpt.prepare text --input FOLDER "
        "--tokenizer GPT2_FOLDER --name openwebtext, with its text or JSON lines in FOLDER",
        "shakespeare": "type python -m jaxgpt.prepare shakespeare_char, or text --input FILE "
        "--tokenizer GPT2_FOLDER --name shakespeare for tokens of GPT-2",
        "--output-prefix": "type --out FOLDER, with --format megatron for a .bin and .idx",
        "--tokenizer-type": "type --tokenizer FOLDER, with encoder.json and vocab.bpe of GPT-2",
        "--vocab-file": "type --tokenizer FOLDER, with encoder.json and vocab.bpe of GPT-2",
        "--merge-file": "type --tokenizer FOLDER, with encoder.json and vocab.bpe of GPT-2",
        "--append-eod": "leave it out: documents end with the tokenizer's end of text",
    },
}


def translate(command: str, word: str) -> str:
    """Return our spelling of a command's option, which may be followed by `=value`.

    Raises:
        LookupError: with the line to type instead.
    """
    name, equals, value = word.partition("=")
    name = name.replace("_", "-") if name.startswith("--") else name
    if answer := COMMAND_ANSWERS.get(command, {}).get(name):
        raise LookupError(answer)
    return COMMAND_SAME.get(command, {}).get(name, name) + equals + value


def answer(key: str) -> str:
    """Return the line to type in place of a key that another program has; empty if not known."""
    return ANSWERS.get(key) or ANSWERS.get(key.rpartition(".")[2], "")


def answer_to_file(word: str) -> str:
    """Return the line to type in place of a configuration that is a Python or TOML file."""
    if not word.endswith((".py", ".toml")):
        return ""
    name = word.rpartition("/")[2].rpartition(".")[0].removeprefix("train_")
    return f"configurations are YAML files; type --config {name}, or --config FILE.yaml"
