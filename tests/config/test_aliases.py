"""Flags of other programs work, or the error says what to use instead."""

import importlib
import shlex

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
    ("--batch_size=32 --compile=False", "train.batch_size", 32),
    ("--batch_size=12 --gradient_accumulation_steps=40", "train.batch_size", 480),
    ("--device=cpu --wandb_log=True --backend=nccl", "parallel.zero_stage", 3),
    ("--init_from=scratch --decay_lr=True", "train.init_from", None),
    ("--wandb_log=True --wandb_project=a", "train.trackers", ("wandb",)),
    ("--wandb_log=False", "train.trackers", ("tensorboard",)),
    ("--decay_lr=False --warmup_iters=9 --min_lr=1e-5", "optimizer.schedule", "constant"),
    ("--decay_lr=False --warmup_iters=9 --min_lr=1e-5", "optimizer.warmup_iters", 0),
    ("config/train_shakespeare_char.py", "config", "shakespeare_char"),
    ("config/train_gpt2.py", "model.n_layer", 12),
    # wordplay
    ("train.max_iters=100", "train.max_iters", 100),
    ("train.dtype=bf16", "train.dtype", "bfloat16"),
    ("train.dtype=fp32", "train.dtype", "float32"),
    ("model.n_layer=2 optimizer.learning_rate=1e-3", "model.n_layer", 2),
    ("data=shakespeare", "data.dataset", "shakespeare_char"),
    ("data=owt", "data.dataset", "openwebtext"),
    ("train.warmup_iters=8", "optimizer.warmup_iters", 8),
    ("train.backend=DDP", "parallel.zero_stage", 0),
    ("train.backend=DDP", "parallel.mesh", "-1,1,1"),
    ("train.backend=FSDP", "parallel.zero_stage", 3),
    ("train.backend=FSDP", "parallel.mesh", "1,-1,1"),
    ("train.backend=deepspeed", "parallel.zero_stage", 1),  # wordplay's ds_config.yaml
    ("train.backend=deepspeed --mesh 1,2,1", "parallel.mesh", "1,2,1"),
    ("optimizer.gas=4 train.batch_size=8", "train.gradient_accumulation_steps", 4),
    ("model.activation=gelu train.compile=false", "model.mlp", "gelu"),
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
    ("--lr-decay-style linear", "optimizer.schedule", "linear"),
    ("--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt", "optimizer.wsd_decay", "sqrt"),
    ("--lr-decay-style WSD --lr-wsd-decay-style linear", "optimizer.wsd_decay", "linear"),
    ("--lr-decay-style=WSD --lr-wsd-decay-iters=20", "optimizer.wsd_decay_iters", 20),
    ("--num-query-groups 2", "model.n_kv_head", 2),
    ("--ffn-hidden-size 256", "model.mlp_hidden", 256),
    ("--kv-channels 16 --norm-epsilon 1e-6", "model.head_dim", 16),
    ("--tensor-model-parallel-size 2", "parallel.mesh", "-1,1,2"),
    ("--tensor-model-parallel-size 2 --zero-stage 1", "parallel.mesh", "1,-1,2"),
    ("--zero-stage 0", "parallel.mesh", "-1,1,1"),
    ("--zero-stage 2", "parallel.zero_stage", 2),
    (
        "--pipeline-model-parallel-size 2 train.gradient_accumulation_steps=2",
        "parallel.mesh",
        "stage=2,data=-1",
    ),
    (
        "ici_pipeline_parallelism=2 ici_tensor_parallelism=2 train.gradient_accumulation_steps=2",
        "parallel.mesh",
        "stage=2,fsdp=-1,tensor=2",
    ),
    ("--pipeline-model-parallel-size 1 --context-parallel-size 1", "parallel.mesh", "-1,1,1"),
    ("--context-parallel-size 2", "parallel.mesh", "data=-1,context=2"),
    ("--ds-sequence-parallel-size 2 --zero-stage 1", "parallel.mesh", "fsdp=-1,context=2"),
    ("ici_context_parallelism=2 dcn_context_parallelism=2", "parallel.mesh", "fsdp=-1,context=4"),
    ("--use-distributed-optimizer", "parallel.zero_stage", 1),
    ("--sequence-parallel", "parallel.sequence_parallel", True),
    ("--bf16", "train.dtype", "bfloat16"),
    ("--fp16=False", "train.dtype", "float32"),
    ("--data-path a_text_document", "data.path", "a_text_document"),
    ("--data-path 0.3 a 0.7 b --seed 2", "data.blend", ("0.3 a", "0.7 b")),
    ("--data-file-list f", "data.file_list", "f"),
    ("--split 949,50,1", "data.val_share", 0.051),
    ("--split 100,0,0", "data.val_share", 0.01),
    ("--vocab-file v --seed 2", "train.seed", 2),
    ("--recompute-activations", "parallel.remat", "attention"),
    ("--recompute-granularity full --recompute-method uniform", "parallel.remat", "full"),
    ("--checkpoint-activations", "parallel.remat", "full"),
    ("--use-flash-attn-v2 --deepspeed --exit-duration-in-mins 50", "train.time_limit", 50),
    ("--attention-dropout 0.1 --hidden-dropout .1", "model.dropout", 0.1),
    ("--swiglu", "model.mlp", "swiglu"),
    ("--normalization RMSNorm", "model.norm", "rmsnorm"),
    ("--position-embedding-type rope", "model.position", "rope"),
    ("--use-rotary-position-embeddings", "model.position", "rope"),
    ("--qk-layernorm --swiglu", "model.qk_norm", True),
    ("--group-query-attention --num-query-groups 2", "model.n_kv_head", 2),
    ("--untie-embeddings-and-output-weights", "model.tie_embeddings", False),
    ("--disable-bias-linear", "model.bias", False),
    ("--add-bias-linear", "model.bias", True),
    ("--reset-attention-mask", "data.document_mask", True),
    ("--global-batch-size 8 --train-samples 1000", "train.max_iters", 125),
    ("--train-iters 200 --lr-warmup-fraction 0.05", "optimizer.warmup_iters", 10),
    # 8 x 64 = 512 tokens per step
    ("--seq-length 64 --global-batch-size 8 --train-tokens 5120", "train.max_iters", 10),
    (
        "--seq-length 64 --global-batch-size 8 --lr-decay-tokens 51200 --lr-warmup-fraction 0.1",
        "optimizer.warmup_iters",
        10,
    ),
    (
        "--seq-length 64 --global-batch-size 8 --lr-warmup-tokens 2048",
        "optimizer.warmup_iters",
        4,
    ),
    ("--init-method-std 0.02 --make-vocab-size-divisible-by 128", "out", None),
    ("--adam-eps 1e-5", "optimizer.eps", 1e-5),
    ("--transformer-impl local --hysteresis 2 --initial-loss-scale 4096 --use-mics", "out", None),
    ("--save runs/b --load runs/b", "out", "runs/b"),
    ("--tokenizer-type Llama2Tokenizer", "model.vocab_size", 32000),
    # padded to a multiple of 128 x 8, as Megatron-LM's log says for this size
    (
        "--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 4",
        "model.vocab_size",
        50688,
    ),
    # Hugging Face
    ("num_key_value_heads=2 intermediate_size=96 rms_norm_eps=1e-6", "model.norm_eps", 1e-6),
    ("--per_device_train_batch_size 8 --mesh 2,2,1", "train.batch_size", 32),
    # torchtitan
    ("--optimizer.name AdamW", "optimizer.name", "adamw"),
    ("--training.mixed_precision_param bfloat16", "train.dtype", "bfloat16"),
    ("--metrics.enable_wandb", "train.trackers", ("wandb",)),
    ("--training.steps 30 --training.seq_len 64", "train.max_iters", 30),
    ("--training.global_batch_size 48", "train.batch_size", 48),
    ("--optimizer.lr 3e-4", "optimizer.learning_rate", 3e-4),
    ("--checkpoint.interval 500", "checkpoint.interval", 500),
    ("checkpoint.every=50 model.dim=64 model.seq_len=32", "checkpoint.interval", 50),
    ("--job.config_file train_configs/llama3_8b.toml", "config", "llama3-8b"),
    ("--module llama3 --config llama3_8b", "model.vocab_size", 128256),
    ("--training.local_batch_size 8 --mesh 2,2,1", "train.batch_size", 32),
    ("--parallelism.tensor_parallel_degree 4", "parallel.mesh", "1,-1,4"),
    ("--parallelism.data_parallel_shard_degree 8", "parallel.mesh", "1,8,1"),
    (
        "--parallelism.data_parallel_replicate_degree 2 --parallelism.data_parallel_shard_degree 4",
        "parallel.mesh",
        "2,4,1",
    ),
    ("--parallelism.pipeline_parallel_degree 1 --seed 2", "train.seed", 2),
    ("--activation_checkpoint.mode full", "parallel.remat", "full"),
    # MaxText
    ("steps=12 max_target_length=64", "model.block_size", 64),
    ("base_emb_dim=64 base_num_decoder_layers=2", "model.n_layer", 2),
    ("learning_rate=3e-4 log_period=3", "train.log_interval", 3),
    ("opt_type=adamw", "optimizer.name", "adamw"),
    # MaxText's global batch is this size x all devices, including those of the tensor axis
    ("model_name=llama2-7b per_device_batch_size=8 --mesh 2,2,1", "train.batch_size", 32),
    ("model_name=llama2-7b per_device_batch_size=8 --mesh 2,2,2", "train.batch_size", 64),
    (
        "model_name=llama2-7b per_device_batch_size=2 --mesh data=2,context=4",
        "train.batch_size",
        16,
    ),
    # In a pipeline, all microbatches together are this size x all devices.
    (
        "model_name=llama2-7b per_device_batch_size=4 ici_pipeline_parallelism=2 "
        "ici_fsdp_parallelism=2 num_pipeline_microbatches=4",
        "train.batch_size",
        16,
    ),
    (
        "model_name=llama2-7b per_device_batch_size=8 --mesh 2,2,1 num_pipeline_microbatches=4",
        "train.batch_size",
        32,
    ),
    (
        "model_name=llama2-7b --mesh stage=2,fsdp=2 num_pipeline_microbatches=-1",
        "train.gradient_accumulation_steps",
        2,
    ),
    (
        "model_name=llama2-7b per_device_batch_size=4 --mesh stage=2,fsdp=2",
        "train.gradient_accumulation_steps",
        2,
    ),
    ("ici_fsdp_parallelism=4 dcn_fsdp_parallelism=2", "parallel.mesh", "1,8,1"),
    ("ici_fsdp_parallelism=-1 dcn_data_parallelism=-1", "parallel.mesh", "1,-1,1"),
    ("dcn_data_parallelism=2 ici_fsdp_parallelism=4", "parallel.mesh", "2,4,1"),
    ("ici_tensor_parallelism=4", "parallel.mesh", "1,-1,4"),
    ("run_name=a base_output_directory=runs", "out", "runs/a"),
    ("src/maxtext/configs/base.yml model_name=llama2-7b", "config", "llama2-7b"),
    ("out=runs/base.yml", "config", "tiny"),  # not MaxText's base.yml
    ("attention=cudnn_flash_te", "model.attention", "auto"),
    ("model.attention=flash", "model.attention", "flash"),  # not MaxText's; refused later
    ("remat_policy=full", "parallel.remat", "full"),
    # levanter
    ("trainer.mesh.fsdp=2 trainer.num_train_steps=9", "parallel.mesh", "1,2,1"),
    ("--config_path config/gpt2_small.yaml", "config", "gpt2"),
    ("--mesh 2,1,4", "parallel.mesh", "2,1,4"),
]
# (line, words of the error, the settings of the corrected command)
ANSWERED = [
    # nanoGPT
    ("--gradient_accumulation_steps=40", "train.gradient_accumulation_steps=N", None),
    ("--init_from=resume", "--out FOLDER", None),
    ("--init_from=gpt2-xl --seed 2", "train.init_from=hf:FOLDER", "train.seed=2"),
    ("--eval_only=True", "python -m jaxgpt.evaluate --run FOLDER", None),
    ("--decay_lr=maybe --seed 2", "must be True or False", "train.seed=2"),
    ("config/mine.py", "config/mine.py: a nanoGPT .py file is not read", "--config gpt2"),
    ("config/eval_gpt2.py --seed 2", "use python -m jaxgpt.evaluate", "train.seed=2"),
    # wordplay
    ("train.init_from=resume", "--out FOLDER", None),
    ("+experiment=nope --seed 2", "shakespeare, owt, gpt2", "train.seed=2"),
    ("train.backend=horovod --seed 2", "must be DDP, deepspeed or FSDP", "train.seed=2"),
    ("train.dtype=float16", "loss scaling", "train.dtype=bfloat16"),
    ("train.dtype=fp16", "train.dtype=bfloat16", "train.dtype=bfloat16"),
    ("model.batch_size=8 train.batch_size=8", "leave out one of them", None),
    # Megatron and DeepSpeed
    ("--num-layers-per-virtual-pipeline-stage 2", "parallel.schedule=circular", None),
    ("--zero-stage 4", "0, 1, 2, 3", None),
    ("--fp16", "loss scaling", "train.dtype=bfloat16"),
    ("--fp16 --seed 2", "the new command has train.dtype=bfloat16", "train.dtype=bfloat16"),
    ("--data-path 0.3 a 0.7 --seed 2", "pairs of a weight and a path", "train.seed=2"),
    ("--num-layer 3", "did you mean --num-layers?", "model.n_layer=3"),
    ("--seq-lenght 64", "did you mean --seq-length?", "model.block_size=64"),
    (
        "--micro-batchsize 3 --mesh 2,1,1",
        "did you mean --micro-batch-size?",
        "--config megatron --mesh 2,1,1 train.batch_size_per_device=3",
    ),
    ("--data-path-cache c --seed 2", "did you mean --data-cache-path?", "train.seed=2"),
    ("--qk-layernrom --seed 2", "did you mean --qk-layernorm?", "model.qk_norm=True"),
    ("--swigl --seed 2", "did you mean --swiglu?", "model.mlp=swiglu train.seed=2"),
    ("--load ckpts", "--out FOLDER", None),
    ("--save a --load b", "convert from-megatron", "--out a"),
    ("--deepspeed_config /nowhere.json", "parallel.zero_stage=N", None),
    ("--attention-dropout 0.1 --hidden-dropout 0", "also sets model.dropout", "model.dropout=0.1"),
    ("--tensor-model-parallel-size 2 --mesh 1,1,4", "--mesh is also given", "--mesh 1,1,4"),
    ("--train-samples 1000", "train.max_iters=N", None),
    ("--train-tokens 4096 --global-batch-size 8", "train.max_iters=N", "train.batch_size=8"),
    ("--make-vocab-size-divisible-by 64", "model.vocab_size=N", None),
    ("--bf16 mine.yml --seed 2", "config=mine.yml: no such file", None),
    ("--bf16 gpt2", "did you mean --config gpt2?", "--config gpt2 train.dtype=bfloat16"),
    ("--swiglu=2 --seed 2", "must be True or False", "train.seed=2"),
    ("train.matmul_dtype=half", "must be one of float8, or None", None),
    ("--config exps/gpt2.yaml", "exps/gpt2.yaml: no such file or preset", None),
    ("config=configs/base.yml", "configs/base.yml: no such file or preset", None),
    ("attention=blockwise", "did you mean model.attention?", None),
    ("train.max_iterz=null --seed 2", "did you mean train.max_iters?", "train.seed=2"),
    ("--exit-interval 10 --seed 2", "train.time_limit=MINUTES", "train.seed=2"),
    # a flag with a similar name and another meaning is not a slip
    ("--exit-intervals 10 --seed 2", "unknown key; python -m", "train.seed=2"),
    ("checkpoint.keep_latest_k=10 --seed 2", "unknown key; python -m", "train.seed=2"),
    ("--init-method-std 0.006 --seed 2", "0.02", "train.seed=2"),
    ("--lr-decay-style inverse-square-root", "one of cosine, linear, wsd, constant", None),
    ("--lr-decay-style WSD --lr-wsd-decay-style exponential", "one of linear, sqrt", None),
    ("--lr-wsd-decay-samples 1000", "optimizer.wsd_decay_iters=N", None),
    # torchtitan
    ("--lr_scheduler.decay_ratio 0.1", "optimizer.wsd_decay_iters=N", None),
    ("--job.config_file mine.toml", "no such file or preset", None),
    # MaxText
    ("per_device_batch_size=8", "the number of devices is unknown", None),
    ("per_device_batch_size=0.5", "train.batch_size=N", None),
    (
        "model_name=llama2-7b per_device_batch_size=1 --mesh stage=2 num_pipeline_microbatches=4",
        "train.batch_size=N",
        "--config llama2-7b --mesh stage=2 train.gradient_accumulation_steps=4",
    ),
    ("base_output_directory=gs://x", "--out FOLDER", None),
    # slips
    ("model.n_layers=3", "did you mean model.n_layer?", "model.n_layer=3"),
    (
        "optimizer.learning_rat=1",
        "did you mean optimizer.learning_rate?",
        "optimizer.learning_rate=1",
    ),
    ("spike.actoin=log", "did you mean spike.action?", "spike.action=log"),
    ("--mehs 1,2,1", "did you mean --mesh?", "--mesh 1,2,1"),
    ("--ouput runs/a train.seed=2", "did you mean --out?", "--out runs/a train.seed=2"),
    ("gpt2 train.seed=2", "did you mean --config gpt2?", "--config gpt2 train.seed=2"),
    ("model.n_layer 3", "did you mean --model.n_layer 3?", "model.n_layer=3"),
    ("model.n_layer = 3 --seed 2", "model.n_layer = 3: did you mean", "model.n_layer=3"),
    ("-mesh 2,1,1 lr 3e-4", "-mesh 2,1,1: did you mean --mesh 2,1,1?", "--mesh 2,1,1"),
    ("\u2014mesh 2,1,1 lr 3e-4", "did you mean --mesh 2,1,1?", "--mesh 2,1,1"),  # a pasted dash
    ("lr train.seed=2", "'lr': must be section.key=value", "train.seed=2"),
    ("--gpus 8", "use --mesh D,F,T", None),
    ("--data.file a.txt", "jaxgpt.prepare text", None),
    (
        "train_aGPT_7B.sh train.seed=2",
        "train_aGPT_7B.sh: is a shell script; to print jaxgpt's command for it, run "
        "python -m jaxgpt.convert command train_aGPT_7B.sh",
        "train.seed=2",
    ),
    ("/ train.seed=2", "/: to train on text, run python -m jaxgpt.prepare", "train.seed=2"),
    ("nonsense=1", "python -m jaxgpt.train --help lists every key", None),
    ("train.zzz=1", "python -m jaxgpt.train --help lists every key", None),
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
    assert value(parse_args(line.split(), counts_devices_later=True), key) == expected


@pytest.mark.parametrize(("line", "words", "corrected"), ANSWERED, ids=[row[0] for row in ANSWERED])
def test_a_line_is_answered_with_the_one_to_type(line, words, corrected):
    with pytest.raises(UsageError) as caught:
        parse_args(line.split())
    problem, *rest = str(caught.value).splitlines()
    assert words in str(caught.value)
    if corrected is None:
        assert not [line for line in rest if "python -m" in line] or "without" in rest[-2]
    else:
        assert set(corrected.split()) <= set(rest[-1].split())
        command = shlex.split(rest[-1].removeprefix("  python -m jaxgpt.train "))
        parse_args(command, counts_devices_later=True)


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


def test_every_key_without_its_last_letter_is_recognized():
    for name, section in load_config("tiny").to_dict().items():
        keys = [f"{name}.{key}" for key in section] if isinstance(section, dict) else []
        for key in keys:
            if len(key.rpartition(".")[2]) > 5:
                assert f"did you mean {key}?" in unknown_key(key[:-1])
