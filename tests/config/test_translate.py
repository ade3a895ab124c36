"""Whole command lines of other programs: what they select, and the single message if they fail."""

import itertools
import json
import shlex

import pytest

from jaxgpt.config import (
    MeshShape,
    UsageError,
    aliases,
    describe_batch_size,
    load_config,
    mesh_shape,
    parse_args,
    with_batch_size,
)
from jaxgpt.config.parse import presets
from jaxgpt.config.translate import translate
from jaxgpt.models.weights import count_parameters

# The two commands of the ALCF course (github.com/saforem2/parallel-training-slides, March 2024, and
# github.com/saforem2/llms-at-scale, July 2024).
SHAKESPEARE = (
    "+experiment=shakespeare data=shakespeare train.backend=DDP train.max_iters=100 "
    "train.log_interval=5 train.compile=false"
)
GPT2_ON_CHARACTERS = (
    "train.backend=DDP train.eval_interval=100 data=shakespeare train.dtype=bf16 "
    "model.batch_size=64 model.block_size=1024 train.max_iters=1000 train.log_interval=10 "
    "train.compile=false"
)


def parse(line):
    """Return the configuration of a command line, and the notes about it."""
    notes = []
    config = parse_args(shlex.split(line), note=notes.append, counts_devices_later=True)
    return config, notes


@pytest.mark.parametrize(
    ("line", "devices", "parameters", "tokens"),
    [  # from the logs of the course
        (SHAKESPEARE, 8, "10.65", 131_072),
        (GPT2_ON_CHARACTERS, 4, "85.00", 262_144),
    ],
)
def test_the_commands_of_the_course_train_its_models(line, devices, parameters, tokens):
    config, notes = parse(line)
    multiplied = count_parameters(config.replace(model__vocab_size=65).model)[1]
    assert f"{multiplied / 1e6:.2f}" == parameters
    shape = mesh_shape(config, devices)
    assert shape == MeshShape(data=devices)
    assert with_batch_size(config, shape).train.batch_size * config.model.block_size == tokens
    assert f"64 sequences per device x {devices} devices; {tokens:,}" in describe_batch_size(
        config, shape
    )
    assert config.parallel.zero_stage == 0
    assert config.data.dataset == "shakespeare_char"
    assert any("train.compile=false: ignored; a step is always compiled" in text for text in notes)


def test_a_command_of_the_course_has_the_settings_in_its_log():
    config, notes = parse(GPT2_ON_CHARACTERS)
    model, train, optimizer = config.model, config.train, config.optimizer
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == (12, 12, 768, 1024)
    assert (model.dropout, model.bias, model.mlp) == (0.0, False, "gelu")
    assert (train.max_iters, train.eval_interval, train.eval_iters) == (1000, 100, 200)
    assert (train.dtype, train.log_interval) == ("bfloat16", 10)
    assert (optimizer.learning_rate, optimizer.min_lr, optimizer.weight_decay) == (6e-4, 6e-5, 0.1)
    assert (optimizer.warmup_iters, optimizer.lr_decay_iters) == (100, 600_000)
    assert (optimizer.beta1, optimizer.beta2, optimizer.grad_clip) == (0.9, 0.95, 1.0)
    assert any("85M character-level model with GPT-2's shape" in text for text in notes)


@pytest.mark.parametrize(
    ("setting", "key", "expected"),
    [  # settings in the course's logs
        ("train.framework=pytorch train.port=null train.precision=null", "train.seed", 1337),
        ("train.seed=null train.ngpus=null train.device=null", "train.seed", 1337),
        ("train.use_wandb=true train.wandb_project=WordPlay", "train.trackers", ("tensorboard",)),
        ("train.use_wandb=false train.ds_config_path=null", "parallel.zero_stage", 0),
        ("train.eval_only=false train.always_save_checkpoint=false", "train.eval_iters", 200),
        ("train.init_from=scratch train.warmup_iters=10", "optimizer.warmup_iters", 10),
        ("model.activation=gelu model.vocab_size=65", "model.vocab_size", 65),
        ("data.dataset=shakespeare_char data.root_path=null", "data.dataset", "shakespeare_char"),
        ("data.out_dir=out-shakespeare-char", "out", "out-shakespeare-char"),
        ("optimizer.gas=2 optimizer.name=AdamW", "train.gradient_accumulation_steps", 2),
        ("optimizer.gradient_accumulation_steps=1 optimizer.decay_lr=true", "train.max_iters", 100),
    ],
)
def test_settings_in_the_logs_of_the_course_are_accepted(setting, key, expected):
    config, _ = parse(f"{SHAKESPEARE} {setting}")
    for part in key.split("."):
        config = getattr(config, part)
    assert config == expected


def test_null_turns_off_what_can_be_turned_off():
    config, _ = parse("train.hang_timeout=null train.time_limit=null train.seed=null")
    assert (config.train.hang_timeout, config.train.time_limit) == (None, None)
    assert config.train.seed == 1337


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # MaxText and levanter decay until the last step, to a tenth of the learning rate. The
        # default warm-up is a tenth of the steps (MaxText's base.yml) or a hundredth (levanter).
        (
            "MaxText/configs/base.yml run_name=x base_output_directory=/o steps=1000 "
            "per_device_batch_size=8 learning_rate=3e-4",
            (100, 1000, 3e-5),
        ),
        (
            "MaxText/configs/base.yml steps=1000 per_device_batch_size=8 learning_rate=3e-4 "
            "warmup_steps_fraction=0.02 cosine_learning_rate_final_fraction=0.5 "
            "learning_rate_schedule_steps=2000",
            (40, 2000, 1.5e-4),
        ),
        ("MaxText/configs/base.yml per_device_batch_size=8", (15000, 150001, 3e-6)),
        ("--config_path config/llama_small_fast.yaml", (200, 20000, 1e-4)),
        (
            "--config_path config/llama_small_fast.yaml --trainer.num_train_steps 10000",
            (100, 10000, 1e-4),
        ),
    ],
)
def test_schedules_have_the_length_that_their_programs_would_use(line, expected):
    optimizer = parse(line)[0].optimizer
    found = optimizer.warmup_iters, optimizer.lr_decay_iters, optimizer.min_lr
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "checkpoints"])
def test_a_run_directory_without_an_option_is_answered_with_out(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"to resume the run, use --out {tmp_path}; to start"):
        parse(str(tmp_path))


def test_an_own_file_s_schedule_is_kept(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text(load_config("tiny", "optimizer.warmup_iters=500").to_yaml())
    flags = "steps=1000 per_device_batch_size=8 learning_rate=1e-3 --mesh 1,1,1"
    optimizer = parse(f"--config {file} {flags}")[0].optimizer
    assert (optimizer.warmup_iters, optimizer.lr_decay_iters) == (500, 300)


MEGATRON_SMALL = (
    "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
    "--micro-batch-size 4 --train-iters 100 --mesh 1,1,1"
)


def test_megatron_s_schedule_is_the_same_with_its_preset_given():
    inferred, _ = parse(f"{MEGATRON_SMALL} --swiglu")
    given, _ = parse(f"--config megatron {MEGATRON_SMALL} --swiglu")
    assert given.optimizer == inferred.optimizer and given.model == inferred.model
    assert given.optimizer.schedule == "linear" and given.optimizer.lr_decay_iters == 100


def test_megatron_s_constant_rate_has_no_decay():
    config, _ = parse(f"{MEGATRON_SMALL} --lr-decay-style constant --lr-warmup-iters 0")
    assert config.optimizer.schedule == "constant"


def test_nanogpt_s_microbatches_divide_the_batch():
    config, notes = parse("config/train_gpt2.py --batch_size=16 --gradient_accumulation_steps=32")
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == (512, 4)
    assert any("train.batch_size=512, which is 32 times --batch_size=16" in note for note in notes)
    given = "config/train_gpt2.py --batch_size=24 train.gradient_accumulation_steps=2"
    config, _ = parse(given)
    assert (config.train.batch_size, config.train.gradient_accumulation_steps) == (960, 2)


@pytest.mark.parametrize(
    ("arguments", "n_devices", "expected"),
    [  # nanoGPT's config/train_gpt2.py has batch_size = 12 and gradient_accumulation_steps = 5 * 8
        ("config/train_gpt2.py --batch_size=20", 4, ("800", "10")),
        ("config/train_gpt2.py --batch_size=20", 16, ("800", "1")),
        ("config/train_gpt2.py --gradient_accumulation_steps=8", 8, ("96", "1")),
        ("config/train_gpt2.py", 8, (None, None)),  # the preset's 480 sequences
        # config/train_shakespeare_char.py has 64 and 1
        ("config/train_shakespeare_char.py --gradient_accumulation_steps=4", 2, ("256", "2")),
        ("config/train_shakespeare_char.py --batch_size=12", 2, ("12", None)),
    ],
)
def test_nanogpt_s_batch_is_multiplied_by_its_default_accumulation(arguments, n_devices, expected):
    line = translate(arguments.split(), presets(), n_devices=n_devices)
    keys = "train.batch_size", "train.gradient_accumulation_steps"
    assert tuple(line.words.get(key, [None])[0] for key in keys) == expected


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ("--gradient_accumulation_steps=4.0 --batch_size=1e1", "train.batch_size", "40"),
        (
            "--micro-batch-size 4e0 --global-batch-size 1e2",
            "train.gradient_accumulation_steps",
            "5",  # 100 / (4 x 5)
        ),
        (
            "--micro-batch-size 4 --train-iters 1e5 --lr-warmup-fraction .01",
            "optimizer.warmup_iters",
            "1000",
        ),
        ("--global-batch-size 100 --train-samples 1e6", "train.max_iters", "10000"),
        ("per_device_batch_size=1.2e1", "train.batch_size_per_device", "12"),
        ("--tensor-model-parallel-size 2.0", "parallel.mesh", "-1,1,2"),
    ],
)
def test_whole_numbers_of_other_programs_may_be_written_as_floats(arguments, key, value):
    line = translate(arguments.split(), presets(), n_devices=5)
    assert line.words[key] == [value] and not line.problems


@pytest.mark.parametrize("size", ["1.5", "-1e1", "1e19", "nan", "inf", "1e400", "9" * 5000])
def test_other_numbers_are_not_converted(size):
    line = translate(["--gradient_accumulation_steps=4", f"--batch_size={size}"], presets())
    assert line.words["train.batch_size"] == [size]
    assert line.left_out == ["--gradient_accumulation_steps=4"]


def test_wordplay_s_experiments_have_one_microbatch():
    config, _ = parse("+experiment=gpt2 --mesh 1,8,1")
    assert config.train.gradient_accumulation_steps == 1
    config, _ = parse("+experiment=gpt2 train.gas=2 --mesh 1,8,1")
    assert config.train.gradient_accumulation_steps == 2


def test_flags_with_a_broader_effect_are_explained():
    small = MEGATRON_SMALL.replace("--mesh", "--attention-dropout 0.0 --eod-mask-loss --mesh")
    _, notes = parse(small)
    assert any("also the dropout rate of hidden states" in note for note in notes)
    assert any("also restricts attention to documents" in note for note in notes)
    _, notes = parse(f"{small} --hidden-dropout 0.0 --reset-attention-mask")
    assert not any("also the dropout rate" in note for note in notes)


@pytest.mark.parametrize(
    ("line", "mesh"),
    [
        ("model_name=llama2-7b ici_data_parallelism=-1 ici_fsdp_parallelism=1", "-1,1,1"),
        ("+experiment=gpt2 train.backend=DDP", "-1,1,1"),
        ("+experiment=gpt2 train.backend=FSDP", "1,-1,1"),
    ],
)
def test_a_typed_axis_replaces_the_mesh_of_a_preset(line, mesh):
    assert parse(line)[0].parallel.mesh == mesh


def test_batches_per_device_are_multiplied_by_devices_and_microbatches():
    config, notes = parse(f"{SHAKESPEARE} model.batch_size=4 optimizer.gas=3 --mesh 2,2,2")
    assert config.train.batch_size == 4 * 3 * 2 * 2  # the devices of the tensor axis share rows
    assert config.train.batch_size_per_device is None
    assert "train.batch_size=48: 4 sequences per device x 4 devices x 3 microbatches" in notes[-1]


def test_a_global_batch_size_replaces_the_batch_size_of_the_experiment():
    config, _ = parse("+experiment=shakespeare train.batch_size=32")
    assert (config.train.batch_size, config.train.batch_size_per_device) == (32, None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_takes_the_zero_stage_of_its_configuration(tmp_path, stage):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": stage}}, indent="\t"))
    config, _ = parse(f"{SHAKESPEARE} train.backend=deepspeed train.ds_config_path={file}")
    assert config.parallel.zero_stage == stage
    assert config.parallel.mesh == ("1,-1,1" if stage else "-1,1,1")
    for flag in (1, 2):  # Megatron-DeepSpeed passes the file to DeepSpeed, which ignores the flag
        config, notes = parse(f"--deepspeed --zero-stage {flag} --deepspeed_config {file}")
        assert config.parallel.zero_stage == stage
        assert any(f"--zero-stage {flag}: ignored" in note for note in notes) == (flag != stage)


def test_without_a_file_the_zero_stage_flag_replaces_that_of_the_backend():
    for backend in ("FSDP", "deepspeed"):
        config, notes = parse(f"{SHAKESPEARE} train.backend={backend} --zero-stage 2")
        assert config.parallel.zero_stage == 2
        assert not any("--zero-stage 2: ignored" in note for note in notes)


@pytest.mark.parametrize("file", ["/nowhere.json", "~no-such-user/ds.json"])
def test_an_unreadable_deepspeed_configuration_is_a_problem(file):
    with pytest.raises(UsageError, match="not readable .* use parallel.zero_stage=N"):
        parse(f"{SHAKESPEARE} train.backend=deepspeed train.ds_config_path={file}")


# These values raise AttributeError, IndexError, KeyError and ValueError in PyYAML.
@pytest.mark.parametrize(
    "value",
    ["!!timestamp x", "!!int ''", "!!bool x", "!!float x", "{stage: true}", "{stage: 4}"],
)
def test_an_invalid_deepspeed_configuration_is_a_problem(tmp_path, value):
    file = tmp_path / "ds.yaml"
    file.write_text(f"zero_optimization: {value}")
    with pytest.raises(UsageError, match="not readable .* use parallel.zero_stage=N"):
        parse(f"{SHAKESPEARE} train.backend=deepspeed train.ds_config_path={file}")


@pytest.mark.parametrize("content", ["{}", "", "[]", "zero_optimization: {}"])
def test_deepspeed_s_default_is_stage_0(tmp_path, content):
    file = tmp_path / "ds.yaml"
    file.write_text(content)
    config, _ = parse(f"{SHAKESPEARE} train.backend=deepspeed train.ds_config_path={file}")
    assert config.parallel.zero_stage == 0


def test_the_translation_of_wordplay_s_data_is_in_a_note():
    assert "data=shakespeare: means data.dataset=shakespeare_char" in parse(SHAKESPEARE)[1]


def test_a_resumed_run_keeps_its_model(tmp_path):
    kept, _ = parse("model.n_layer=2")
    (tmp_path / "config.yaml").write_text(kept.to_yaml())
    config, notes = parse(f"--out {tmp_path} train.backend=DDP")
    assert config.model == kept.model
    assert config.train == kept.train
    assert not any("85M" in text for text in notes)


FLAGS = sorted({*aliases.KEY_ALIASES, *aliases.SETTINGS, *aliases.NEUTRAL, *aliases.IGNORED})
ODD = ("", "x", "-1", "0", "9" * 5000, "1e400", "nan", "2 3", "=", "=0")


@pytest.mark.parametrize("rest", ["", " --batch_size=2 --train-iters 9", " --micro-batch-size 1"])
def test_any_value_of_any_flag_is_translated_or_a_problem(rest):
    for flag, value in itertools.product(FLAGS, ODD):
        argument = f"--{flag}{value}" if value[:1] == "=" else f"--{flag} {value}"
        line = translate(f"{argument}{rest}".split(), presets())
        assert line.words or line.notes or line.problems or line.other.later or line.other.axes


@pytest.mark.parametrize("rest", ["", " --global-batch-size 8 --micro-batch-size 1"])
def test_any_value_of_a_misspelled_flag_is_translated_or_a_problem(rest):
    for flag, value in itertools.product(FLAGS[::5], ("", "-1", "9" * 5000, "$X", "2 3", "=")):
        argument = f"--{flag[:-1]}{value}" if value == "=" else f"--{flag[:-1]} {value}"
        line = translate(f"{argument}{rest}".split(), presets(), guesses=False)
        assert line.notes or line.problems


def test_all_problems_are_in_one_message():
    line = "model.n_layers=2 train.max_iters=many nonsense=1 spike.actoin=off --seed 2 'a b'"
    with pytest.raises(UsageError) as caught:
        parse(line)
    first, *problems, header, command = str(caught.value).splitlines()
    assert first == "5 problems"
    for words in ("model.n_layer?", "train.max_iters=many", "nonsense", "spike.action?", "'a b'"):
        assert sum(words in problem for problem in problems) == 1
    assert len(problems) == 5
    assert header == "corrected command (without nonsense=1, a b, train.max_iters=many):"
    config, _ = parse(command.removeprefix("  python -m jaxgpt.train "))
    assert (config.model.n_layer, config.spike.action, config.train.seed) == (2, "off", 2)


def test_a_wrong_choice_is_reported_with_the_other_problems():
    with pytest.raises(UsageError) as caught:
        parse_args(
            ["optimizer.name=adam2", "train.max_iters=x"],
            choices={"optimizer.name": {"adamw": (), "lion": ()}},
        )
    first, choice, value = str(caught.value).splitlines()
    assert first == "2 problems"
    assert choice == "  optimizer.name=adam2: must be one of adamw, lion"
    assert value.startswith("  train.max_iters=x: ")


def test_no_command_is_offered_if_nothing_can_be_corrected():
    with pytest.raises(UsageError) as caught:
        parse("train.max_iters=0 train.batch_size=-1")
    assert [line[:7] for line in str(caught.value).splitlines()] == [
        "2 probl",
        "  train",
        "  train",
    ]


def test_a_contradiction_is_reported_with_the_other_problems():
    with pytest.raises(UsageError) as caught:
        parse("model.n_layers=2 model.n_embd=130")
    lines = str(caught.value).splitlines()
    assert len(lines) == 3 and lines[0] == "2 problems"  # no command: it would fail
    assert "model.n_embd=130: must be a multiple of model.n_head=4" in lines[2]


def test_a_wrong_preset_is_reported_with_the_other_problems():
    with pytest.raises(UsageError) as caught:
        parse("--config nope model.n_layers=2")
    assert "config=nope: no such file or preset" in str(caught.value)
    assert str(caught.value).splitlines()[-1] == "  python -m jaxgpt.train model.n_layer=2"


# The default command of ALCF's Megatron-DeepSpeed (ALCF/helpers.sh at ffa3456d) for AuroraGPT-7B.
ALCF = """--lr 0.0002 --lr-decay-style cosine --lr-warmup-fraction 0.05 --swiglu --hidden-dropout 0
--attention-dropout 0 --normalization rmsnorm --disable-bias-linear --no-query-key-layer-scaling
--use-rotary-position-embeddings --untie-embeddings-and-output-weights --num-key-value-heads 8
--ffn-hidden-size 11008 --use-flash-attn-v2 --tokenizer-type Llama2Tokenizer
--tokenizer-model ALCF/tokenizer.model --log-timers-to-tensorboard
--log-optimizer-states-to-tensorboard --tensorboard-dir ck/tensorboard --deepspeed
--no-pipeline-parallel --deepspeed_config=ds.json --zero-stage=1 --bf16
--use-checkpoint-opt_param-scheduler --accumulate-allreduce-grads-in-fp32
--adjust-word-embedding-init --adam-beta1=0.9 --adam-beta2=0.95 --adam-eps=0.00001 --clip-grad=1.0
--data-cache-path=ck/cache --data-file-list=ALCF/data-lists/aurora/dolma.txt
--distributed-backend=ccl --ds-sequence-parallel-size=1 --eval-interval=100 --eval-iters=20
--global-batch-size=768 --hidden-size=4096 --init-method-std=.009882 --log-interval=1 --load=ck
--max-position-embeddings=65536 --micro-batch-size=4 --no-bias-gelu-fusion --no-bias-dropout-fusion
--no-masked-softmax-fusion --no-gradient-accumulation-fusion --num-layers=32
--num-attention-heads=32 --optimizer=adamw --pipeline-model-parallel-size=1
--rotary-position-embeddings-theta=50000 --save=ck --seq-length=4096 --split=990,10,0
--shuffle-sample-in-corpus --save-interval=50 --train-iters=635782 --tensor-model-parallel-size=1
--timing-log-level=1 --weight-decay=0.1 --word-embedding-init-std=0.632455532"""
# examples/llama/train_llama3_8b_h100_fp8.sh of Megatron-LM (without its fp8 options).
MEGATRON = """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
--num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
--seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
--rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--normalization RMSNorm --init-method-std 0.0134 --attention-backend fused
--untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748
--lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4
--decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.1
--adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion
--calculate-per-token-loss --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1
--log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --profile
--profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save ck --load ck --tensorboard-dir tb"""
# README.md of nanoGPT.
NANOGPT = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
--log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
--max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"""
# benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md of torchtitan.
TORCHTITAN = """--job.config_file ./torchtitan/models/llama3/train_configs/llama3_8b.toml
--training.local_batch_size=2 --training.steps 2000"""
# docs/run_maxtext/run_maxtext_single_host_gpu.md of MaxText.
MAXTEXT = """src/maxtext/configs/gpu/models/llama2_7b.yml run_name=llama dcn_data_parallelism=1
ici_fsdp_parallelism=8 base_output_directory=runs attention=cudnn_flash_te scan_layers=False
use_iota_embed=True hardware=gpu"""
# docs/Getting-Started-Training.md of levanter.
LEVANTER = """--config_path config/llama_small_fast.yaml --model.num_heads 20 --model.num_layers 36
--model.hidden_dim 1280 --trainer.num_train_steps 10000"""
LLAMA = {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "bias": False, "dropout": 0.0}


@pytest.mark.parametrize(
    ("line", "model", "train", "left_out"),
    [
        (
            ALCF,
            LLAMA | {"n_layer": 32, "n_embd": 4096, "n_kv_head": 8, "mlp_hidden": 11008,
                     "rope_theta": 50000, "vocab_size": 32000, "tie_embeddings": False},
            {"max_iters": 635782, "batch_size": 768, "dtype": "bfloat16"},
            ["--adjust-word-embedding-init", "--init-method-std=.009882",
             "--word-embedding-init-std=0.632455532"],
        ),
        (
            MEGATRON,
            LLAMA | {"n_layer": 32, "n_embd": 4096, "n_kv_head": 8, "mlp_hidden": 14336,
                     "vocab_size": 128256, "block_size": 8192},
            {"max_iters": 1953125000 // 128, "batch_size": 128, "time_limit": 235},
            ["--init-method-std 0.0134", "--decoupled-lr 5.0e-4", "--decoupled-min-lr 4.5e-5"],
        ),
        (NANOGPT, {"n_layer": 4, "n_embd": 128, "dropout": 0.0}, {"batch_size": 12}, []),
        (TORCHTITAN, LLAMA | {"n_layer": 32, "vocab_size": 128256}, {"max_iters": 2000}, []),
        (MAXTEXT, LLAMA | {"n_layer": 32, "mlp_hidden": 11008}, {"dtype": "bfloat16"}, []),
        (
            LEVANTER,
            LLAMA | {"n_layer": 36, "n_embd": 1280, "n_head": 20, "mlp_hidden": 2048},
            {"max_iters": 10000, "batch_size": 256},
            [],
        ),
    ],
    ids=["alcf", "megatron", "nanogpt", "torchtitan", "maxtext", "levanter"],
)  # fmt: skip
def test_a_public_command_fails_at_most_once(line, model, train, left_out):
    if left_out:
        with pytest.raises(UsageError) as caught:
            parse(line)
        *_, header, corrected = str(caught.value).splitlines()
        assert header == f"corrected command (without {', '.join(left_out)}):"
        line = corrected.removeprefix("  python -m jaxgpt.train ")
    config, _ = parse(line)
    assert {key: getattr(config.model, key) for key in model} == model
    assert {key: getattr(config.train, key) for key in train} == train


def test_megatron_s_defaults_are_used_for_its_commands():
    line = (
        "--num-layers 2 --hidden-size 192 --num-attention-heads 4 --seq-length 64 --lr 1e-3 "
        "--micro-batch-size 4 --train-iters 100 --lr-warmup-iters 10 --swiglu"
    )
    config, notes = parse(line)
    model, optimizer = config.model, config.optimizer
    assert (model.bias, model.dropout, model.tie_embeddings) == (True, 0.1, True)
    assert model.mlp_hidden == 512  # 192 x 8/3, rounded down to a multiple of 64
    assert (optimizer.schedule, optimizer.min_lr, optimizer.lr_decay_iters) == ("linear", 0.0, 100)
    assert (optimizer.weight_decay, optimizer.beta2) == (0.01, 0.999)
    assert config.train.batch_size_per_device == 4
    assert any("--config megatron" in text for text in notes)


# Megatron's formula (num_microbatches_calculator.py): the number of microbatches is the global
# batch size / (micro-batch size x data-parallel size). The data-parallel size is the number of
# devices / (tensor x pipeline x context).
@pytest.mark.parametrize(
    ("flags", "n_devices", "steps"),
    [
        ("--tensor-model-parallel-size 2", 192, ["4"]),
        ("", 192, ["2"]),
        ("--pipeline-model-parallel-size 4 --context-parallel-size 2", 192, ["16"]),
        ("--use-distributed-optimizer --tensor-model-parallel-size 2", 192, ["4"]),
        ("--mesh 2,48,2", None, ["4"]),
        ("", 384, ["1"]),
        ("", 5, None),  # 5 x 4 does not divide 1536
        ("--tensor-model-parallel-size 5", 192, None),
        ("--gas 6", 192, ["6"]),
        ("--tensor-model-parallel-size 2", None, None),
    ],
)
def test_microbatches_are_megatron_s(flags, n_devices, steps):
    argv = f"--micro-batch-size 4 --global-batch-size 1536 {flags}".split()
    line = translate(argv, presets(), n_devices=n_devices)
    assert line.words.get("train.gradient_accumulation_steps") == steps
    assert line.words["train.batch_size"] == ["1536"]
    assert sum(note.startswith("--micro-batch-size 4: ") for note in line.notes) == 1


def test_unknown_devices_give_the_formula_of_the_microbatches():
    line = "--micro-batch-size 4 --global-batch-size 1536 --tensor-model-parallel-size 2"
    _, notes = parse(line)
    formula = "steps=N, where N is 768 divided by the number of devices"  # 1536 x 2 / 4
    assert any(formula in note for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "--save ck --load ck",
        "--blend-sample-in-corpus",
        "--merge-file m",
        "--no-position-embedding",
        "--tokenizer-type GPT2BPETokenizer --merge-file m",
    ],
)
def test_a_flag_does_not_vanish_without_a_note(line):
    flag = " ".join(line.split()[-2:])
    assert any(note.startswith(f"{flag}: ") for note in parse(line)[1])


def test_other_commands_show_corrected_settings_only():
    with pytest.raises(UsageError) as caught:
        parse_args(["model.n_layers=2", "--mesh", "1,1,2"], "python -m jaxgpt.plan")
    assert str(caught.value).splitlines()[-2:] == [
        "corrected settings:",
        "  model.n_layer=2 --mesh 1,1,2",
    ]


def test_a_batch_that_micro_batches_do_not_divide_is_said_without_a_number_of_devices():
    line = translate("--micro-batch-size 5 --global-batch-size 768".split(), presets())
    (note,) = line.notes
    assert "because the global batch size, 768, is not a multiple of 5; " in note
    assert "train.gradient_accumulation_steps" not in line.words
