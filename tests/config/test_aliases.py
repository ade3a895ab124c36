"""Flags of other programs work, or the error says what to use instead."""

import importlib

import pytest

from jaxgpt.config import UsageError, load_config, parse_args
from jaxgpt.config.parse import unknown_key

WORKS = [
    # nanoGPT
    ("--n_layer=4 --n_head=4 --n_embd=64", "model.n_embd", 64),
    ("--block_size=32", "model.block_size", 32),
    ("--max_iters=7", "train.max_iters", 7),
    ("--eval_interval=3 --eval_iters=2", "train.eval_iters", 2),
    ("--learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
    ("--warmup_iters=5 --lr_decay_iters=9", "optimizer.lr_decay_iters", 9),
    ("--beta2=0.95 --weight_decay=0.0", "optimizer.weight_decay", 0.0),
    ("--grad_clip=0.5", "optimizer.grad_clip", 0.5),
    ("parallel.offload_optimizer=True", "parallel.offload", "moments"),  # ours until 0.1.0
    ("--dropout=0.1 --bias=True", "model.bias", True),
    ("--dataset=mine --out_dir=runs/a", "out", "runs/a"),
    ("--dtype=bfloat16 --seed=2", "train.dtype", "bfloat16"),
    # wordplay
    ("train.max_iters=100", "train.max_iters", 100),
    ("train.dtype=bf16", "train.dtype", "bfloat16"),
    ("train.dtype=fp32", "train.dtype", "float32"),
    ("model.n_layer=2 optimizer.learning_rate=1e-3", "model.n_layer", 2),
    # Megatron
    ("--num-layers 2 --hidden-size 64", "model.n_embd", 64),
    ("--num-attention-heads 8", "model.n_head", 8),
    ("--seq-length 64", "model.block_size", 64),
    ("--global-batch-size 48", "train.batch_size", 48),
    ("--train-iters 50", "train.max_iters", 50),
    ("--lr 6e-4 --min-lr 6e-5", "optimizer.min_lr", 6e-5),
    ("--lr-warmup-iters 10 --clip-grad 1.0", "optimizer.warmup_iters", 10),
    ("--adam-beta1 0.9 --adam-beta2 0.95", "optimizer.beta2", 0.95),
    ("--weight-decay 0.1", "optimizer.weight_decay", 0.1),
    ("--save runs/b --save-interval 20", "checkpoint.interval", 20),
    ("--log-interval 5 --eval-interval 10", "train.log_interval", 5),
    ("--train-range-to-skip 10 20 25 30", "train_range_to_skip", (10, 20, 25, 30)),
    ("--optimizer adam", "optimizer.name", "adamw"),
    ("--optimizer sgd --sgd-momentum 0.9", "optimizer.momentum", 0.9),
    ("--optimizer muon --muon-momentum 0.9", "optimizer.momentum", 0.9),
    ("--optimizer dist_muon", "optimizer.name", "muon"),
    ("--lr-decay-style cosine", "optimizer.schedule", "cosine"),
    ("--lr-decay-style constant", "optimizer.schedule", "constant"),
    ("--lr-decay-style WSD", "optimizer.schedule", "wsd"),
    ("--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt", "optimizer.wsd_decay", "sqrt"),
    ("--lr-decay-style WSD --lr-wsd-decay-style linear", "optimizer.wsd_decay", "linear"),
    ("--lr-decay-style=WSD --lr-wsd-decay-iters=20", "optimizer.wsd_decay_iters", 20),
    ("--num-query-groups 2", "model.n_kv_head", 2),
    ("--ffn-hidden-size 256", "model.mlp_hidden", 256),
    ("--kv-channels 16 --norm-epsilon 1e-6", "model.head_dim", 16),
    # Hugging Face
    ("num_key_value_heads=2 intermediate_size=96 rms_norm_eps=1e-6", "model.norm_eps", 1e-6),
    # torchtitan
    ("--optimizer.name AdamW", "optimizer.name", "adamw"),
    ("--training.steps 30 --training.seq_len 64", "train.max_iters", 30),
    ("--training.global_batch_size 48", "train.batch_size", 48),
    ("--optimizer.lr 3e-4", "optimizer.learning_rate", 3e-4),
    ("--checkpoint.interval 500", "checkpoint.interval", 500),
    # MaxText
    ("steps=12 max_target_length=64", "model.block_size", 64),
    ("base_emb_dim=64 base_num_decoder_layers=2", "model.n_layer", 2),
    ("learning_rate=3e-4 log_period=3", "train.log_interval", 3),
    ("opt_type=adamw", "optimizer.name", "adamw"),
    ("--mesh 2,1,4", "parallel.mesh", "2,1,4"),
]
ANSWERED = [
    # nanoGPT
    ("--batch_size=32 --compile=False", "train.batch_size=N"),
    ("--compile=False", "a step is always compiled"),
    ("--gradient_accumulation_steps=40", "train.gradient_accumulation_steps=N"),
    ("--device=cpu", "JAX_PLATFORMS=cpu"),
    ("--init_from=resume", "--out FOLDER"),
    ("--eval_only=True", "python -m jaxgpt.evaluate --run FOLDER"),
    ("--wandb_log=True", "metrics.jsonl"),
    ("--decay_lr=False", "optimizer.schedule=constant"),
    ("config/train_shakespeare_char.py", "--config shakespeare_char,"),
    ("config/train_gpt2.py", "--config gpt2,"),
    # wordplay
    ("data=shakespeare", "jaxgpt.prepare shakespeare_char"),
    ("model.batch_size=8", "did you mean train.batch_size?"),
    ("train.warmup_iters=8", "did you mean optimizer.warmup_iters?"),
    ("train.backend=DDP", "leave it out"),
    ("train.init_from=resume", "--out FOLDER"),
    ("optimizer.gas=4", "train.gradient_accumulation_steps=N"),
    ("train.compile=false", "a step is always compiled"),
    ("train.dtype=float16", "loss scaling"),
    ("train.dtype=fp16", "train.dtype=bfloat16"),
    # Megatron and DeepSpeed
    ("--micro-batch-size 4", "train.gradient_accumulation_steps=N"),
    ("--tensor-model-parallel-size 2", "--mesh 1,-1,N"),
    ("--pipeline-model-parallel-size 2", "no pipeline stages"),
    ("--zero-stage 1", "parallel.zero_stage=N --mesh 1,-1,1"),
    ("--sequence-parallel", "parallel.sequence_parallel=True"),
    ("--bf16", "train.dtype=bfloat16"),
    ("--fp16", "loss scaling"),
    ("--load ckpts", "--out FOLDER"),
    ("--data-path a_text_document", "data.path=PREFIX"),
    ("--data-file-list f", "data.file_list=FILE"),
    ("--vocab-file v", "data.tokenizer=FOLDER"),
    ("--recompute-activations", "parallel.remat=full"),
    ("--use-flash-attn", "model.attention=cudnn"),
    ("--deepspeed", "parallel.zero_stage=N"),
    ("--deepspeed_config ds.json", "parallel.zero_stage=N"),
    ("--exit-duration-in-mins 50", "train.time_limit=MINUTES"),
    ("--attention-dropout 0.1", "model.dropout=X"),
    ("--train-samples 1000", "train.max_iters=N"),
    ("--lr-decay-style linear", "optimizer.wsd_decay_iters=N"),
    ("--lr-decay-style inverse-square-root", "one of cosine, wsd, constant"),
    ("--lr-decay-style WSD --lr-wsd-decay-style exponential", "one of linear, sqrt"),
    ("--lr-wsd-decay-samples 1000", "optimizer.wsd_decay_iters=N"),
    ("--swiglu", "model.mlp=swiglu"),
    ("--normalization RMSNorm", "model.norm=rmsnorm"),
    ("--position-embedding-type rope", "model.position=rope"),
    ("--group-query-attention", "model.n_kv_head=N"),
    ("--untie-embeddings-and-output-weights", "model.tie_embeddings=False"),
    ("--disable-bias-linear", "model.bias=True or False"),
    ("--reset-attention-mask", "data.document_mask=True"),
    # torchtitan
    ("--lr_scheduler.decay_ratio 0.1", "optimizer.wsd_decay_iters=N"),
    ("--job.config_file llama3.toml", "--config FILE.yaml"),
    ("llama3_8b.toml", "--config FILE.yaml"),
    ("--training.local_batch_size 8", "train.batch_size=N"),
    ("--parallelism.tensor_parallel_degree 4", "--mesh 1,-1,N"),
    ("--parallelism.data_parallel_shard_degree 8", "--mesh 1,-1,1"),
    ("--parallelism.pipeline_parallel_degree 2", "no pipeline stages"),
    ("--activation_checkpoint.mode full", "parallel.remat=full"),
    # MaxText
    ("per_device_batch_size=8", "train.batch_size=N"),
    ("ici_fsdp_parallelism=4", "--mesh 1,-1,1"),
    ("ici_tensor_parallelism=4", "--mesh 1,-1,N"),
    ("dcn_data_parallelism=2", "--mesh -1,1,1"),
    ("base_output_directory=gs://x", "--out FOLDER"),
    ("run_name=a", "--out FOLDER"),
    ("remat_policy=full", "parallel.remat=full"),
    # slips
    ("model.n_layers=3", "did you mean model.n_layer?"),
    ("optimizer.learning_rat=1", "did you mean optimizer.learning_rate?"),
    ("spike.actoin=log", "did you mean spike.action?"),
    ("nonsense=1", "--help lists every key"),
    ("train.zzz=1", "--help lists every key"),
]

COMMANDS_WORK = [
    ("sample --out_dir=runs/a", "run", "runs/a"),
    ("sample --out_dir runs/a --start ROMEO", "prompt", "ROMEO"),
    ("sample --run runs/a --num_samples=3", "num_samples", 3),
    ("sample --run runs/a --max_new_tokens 50 --top_k=20", "top_k", 20),
    ("sample --run runs/a --temperature=0.5 --seed=2", "temperature", 0.5),
    ("evaluate --out_dir=runs/a", "run", "runs/a"),
    ("launch -np 8 -ppn 4", "ppn", 4),
    ("launch -ppn 4 --hostfile hosts", "hosts", "hosts"),
    ("launch --nproc_per_node=4", "ppn", 4),
    ("launch --ntasks 8 --ntasks-per-node 4", "n", 8),
]


def value(config, key):
    for part in key.split("."):
        config = getattr(config, part)
    return config


@pytest.mark.parametrize(("line", "key", "expected"), WORKS, ids=[line for line, *_ in WORKS])
def test_a_line_works_where_it_means_the_same(line, key, expected):
    assert value(parse_args(line.split()), key) == expected


@pytest.mark.parametrize(("line", "words"), ANSWERED, ids=[line for line, _ in ANSWERED])
def test_a_line_is_answered_with_the_one_to_type(line, words):
    with pytest.raises(UsageError) as caught:
        parse_args(line.split())
    assert words in str(caught.value) and "\n" not in str(caught.value)


def parser_of(line):
    command, *words = line.split()
    module = importlib.import_module(f"jaxgpt.{command}")
    if not hasattr(module, "parser"):  # a command that has a folder
        module = importlib.import_module(f"jaxgpt.{command}.__main__")
    return module.parser(), words


@pytest.mark.parametrize(("line", "option", "expected"), COMMANDS_WORK)
def test_an_option_works_where_it_means_the_same(line, option, expected):
    parser, words = parser_of(line)
    assert getattr(parser.parse_args(words), option) == expected


def test_every_key_without_its_last_letter_is_recognised():
    for name, section in load_config("tiny").to_dict().items():
        keys = [f"{name}.{key}" for key in section] if isinstance(section, dict) else []
        for key in keys:
            if len(key.rpartition(".")[2]) > 5:
                assert f"did you mean {key}?" in unknown_key(key[:-1])
