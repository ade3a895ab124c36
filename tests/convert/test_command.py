"""Command lines and shell scripts of other programs are converted to commands of jaxgpt."""

import contextlib
import shlex

import pytest

from jaxgpt.config import parse_args
from jaxgpt.convert.__main__ import main

# The structure of examples/pretrain_gpt.sh in Megatron-DeepSpeed and of
# examples/llama/train_llama3_8b_h100_fp8.sh in Megatron-LM.
SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
CHECKPOINT_PATH=${1:-"runs/a"}
NUM_NODES=2 # two nodes
GPUS_PER_NODE=4
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
GLOBAL_BATCH=$((WORLD_SIZE * 4))
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES # hosts
)
GPT_ARGS="
    --num-layers 24 \\
    --hidden-size ${HIDDEN:-1024} \\
    --num-attention-heads 16 \\
    --seq-length 512
"
TRAINING_ARGS=(
    "--micro-batch-size 4"
    --global-batch-size $GLOBAL_BATCH
    --lr 1e-4 --train-iters 100
)
TRAINING_ARGS+=("--bf16")
if [ ! -f "pretrain_gpt.py" ]; then
    exit 1
fi
touch $(echo danger | tee @MARK@)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS "${TRAINING_ARGS[@]}" \\
    --data-path $DATA_PATH --save $CHECKPOINT_PATH |& tee log.txt
"""


def convert(capsys, *words, status=0):
    """Return the printed command, and the notes about it."""
    with pytest.raises(SystemExit, match=str(status)) if status else contextlib.nullcontext():
        main(["command", *map(str, words)])
    captured = capsys.readouterr()
    return captured.out.strip(), captured.err


def test_a_script_is_expanded_but_not_run(tmp_path, capsys, monkeypatch):
    script, mark = tmp_path / "train.sh", tmp_path / "mark"
    script.write_text(SCRIPT.replace("@MARK@", str(mark)))
    monkeypatch.delenv("DATA_PATH", raising=False)
    command, notes = convert(capsys, script)
    assert not mark.exists()
    launcher, _, train = command.partition(" -- python -m jaxgpt.train ")
    assert launcher == "python -m jaxgpt.launch -n 8 -ppn 4"
    assert "data.path=$DATA_PATH" in train.split()
    assert "not set in the script: $DATA_PATH" in notes
    config = parse_args(shlex.split(train))
    model, settings = config.model, config.train
    assert (model.n_layer, model.n_embd, model.n_head, model.block_size) == (24, 1024, 16, 512)
    assert (settings.batch_size, settings.max_iters, settings.dtype) == (32, 100, "bfloat16")
    assert (model.bias, model.dropout) == (True, 0.1)  # Megatron's defaults
    assert config.out == "runs/a"
    assert config.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("script", "launcher"),
    [
        (
            "NHOSTS=$(wc -l < $PBS_NODEFILE)\n"
            "mpiexec -n $((NHOSTS*12)) -ppn 12 python pretrain_gpt.py --num-layers 2",
            "python -m jaxgpt.launch -ppn 12 -- ",
        ),
        (
            "srun -n $((NNODES*4)) python pretrain_gpt.py --num-layers 2",
            "python -m jaxgpt.launch -- ",
        ),
        ("torchrun --nnodes=$N --nproc_per_node=4 train.py", "python -m jaxgpt.launch -ppn 4 -- "),
        ("torchrun --nnodes=2 --nproc_per_node=$NGPU train.py", "python -m jaxgpt.launch -- "),
        ("torchrun --nproc_per_node=gpu --nnodes=4 train.py", "python -m jaxgpt.launch -- "),
        ("torchrun --nnodes=1:4 --nproc_per_node=8 train.py", "python -m jaxgpt.launch -ppn 8 -- "),
        ("deepspeed --num_nodes 2 train.py", "python -m jaxgpt.launch -- "),
    ],
)
def test_an_unknown_number_of_processes_is_left_to_the_launcher(script, launcher, capsys):
    line, notes = convert(capsys, script)
    assert line.startswith(launcher + "python -m jaxgpt.train")
    assert "is not known before the job starts" in notes


@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        (
            "mpiexec --verbose --envall -n 8 -ppn 4 --hostfile hosts --cpu-bind depth -d 16",
            "--verbose, --envall, --hostfile hosts, --cpu-bind depth, -d 16",
        ),
        (
            "mpiexec -n 8 --cpu-bind=none --envall /opt/bin/python3.11 -u",
            "--cpu-bind=none, --envall",
        ),
        ("torchrun --standalone --nproc_per_node=8", "--standalone"),
        ("srun -n 8 --gpus-per-node 4 python", "--gpus-per-node 4"),
    ],
)
def test_a_note_lists_the_launcher_s_options_that_are_left_out(launcher, options, capsys):
    _, notes = convert(capsys, f"{launcher} pretrain_gpt.py --num-layers 2")
    (note,) = [line for line in notes.splitlines() if "launcher options left out" in line]
    assert note.endswith(f": {options}")


@pytest.mark.parametrize(
    "launcher",
    [
        "python -m jaxgpt.launch --",
        "python -m jaxgpt.launch --hosts h --ppn 4 --",
        "python -m jaxgpt.launch -n8 --restarts 50 --spare-nodes 1 -- numactl -N 1",
        "python -m jaxgpt.launch -n 1",
    ],
)
def test_the_options_of_jaxgpt_launch_are_kept(launcher, capsys):
    train = "python -m jaxgpt.train --config gpt2 --mesh -1,4,1"
    line, notes = convert(capsys, f"A=1 {launcher} {train}")
    assert line == f"{launcher} {train}" and notes == ""


@pytest.mark.parametrize(
    "launcher",
    [
        "srun --ntasks-per-node=4",
        "srun --ntasks-per-node 4",
        "mpirun -N 4",
        "mpirun -N 4 --hostfile h",
        "deepspeed --hostfile=h --num_gpus 4",
    ],
)
def test_a_number_per_host_applies_to_all_hosts(launcher, capsys):
    line, notes = convert(capsys, f"{launcher} python pretrain_gpt.py --num-layers 2")
    assert line.startswith("python -m jaxgpt.launch -ppn 4 -- python -m jaxgpt.train ")
    assert "before the job starts" not in notes


@pytest.mark.parametrize("launcher", ["srun", "mpirun", "mpiexec -l", "deepspeed --hostfile h"])
def test_a_launcher_without_numbers_uses_all_hosts(launcher, capsys):
    line, notes = convert(capsys, f"{launcher} python pretrain_gpt.py --num-layers 2")
    assert line.startswith("python -m jaxgpt.launch -- python -m jaxgpt.train ")
    assert "note: number of processes: the value is not known before the job starts" in notes


def test_a_launcher_without_other_options_gets_no_note(capsys):
    for launcher in ("mpiexec -n 8 -ppn 4 python3 -u -m", "python -m torch.distributed.run -m"):
        assert (
            "launcher options" not in convert(capsys, f"{launcher} pretrain_gpt --num-layers 2")[1]
        )


def test_a_known_number_of_processes_is_kept(capsys):
    line, notes = convert(capsys, "srun -N $NNODES -n 8 python pretrain_gpt.py --num-layers 2")
    assert line.startswith("python -m jaxgpt.launch -n 8 -- ") and "before the job" not in notes


@pytest.mark.parametrize(
    ("launcher", "numbers"),
    [
        ("srun -N 1 --ntasks-per-node=4 python", "-n 4 -ppn 4"),
        ("mpirun --np 4 python", "-n 4"),
        ("deepspeed --num_gpus 4 python", "-n 4 -ppn 4"),
        ("torchrun --nnodes=2", "-n 2 -ppn 1"),  # one process per host, by default
        ("srun -N 2 python", "-n 2 -ppn 1"),
        ("srun -N2 -n8 python", "-n 8 -ppn 4"),
        ("srun -n8 python", "-n 8"),
        ("mpiexec -n4 python", "-n 4"),
        ("mpirun -n 8 -N 4 python", "-n 8 -ppn 4"),  # Open MPI
        ("aprun -n 8 -N 4 python", "-n 8 -ppn 4"),
        ("mpiexec.openmpi -np 8 -N 4 python", "-n 8 -ppn 4"),
        ("flux run -N 2 --tasks-per-node=4 python", "-n 8 -ppn 4"),
        ("accelerate launch --num-processes 8 --num-machines 2", "-n 8 -ppn 4"),
        # srun starts torchrun once on each host
        ("srun -N 4 --ntasks-per-node=1 torchrun --nnodes 4 --nproc_per_node 8", "-n 32 -ppn 8"),
        ("srun -n4 -N4 accelerate launch --num_processes 32 --num_machines 4", "-n 32 -ppn 8"),
        ("env A=1 /opt/bin/mpirun -n 8 -N 4 env B=1 python", "-n 8 -ppn 4"),
    ],
)
def test_the_numbers_of_a_launcher_are_kept_without_notes(launcher, numbers, capsys):
    line, notes = convert(capsys, f"{launcher} pretrain_gpt.py --num-layers 2")
    assert line.startswith(f"python -m jaxgpt.launch {numbers} -- ") and notes == ""


def test_a_single_process_needs_no_launcher(capsys):
    line, notes = convert(capsys, "mpiexec -n 1 python pretrain_gpt.py --num-layers 2")
    assert line.startswith("python -m jaxgpt.train ") and notes == ""


def test_options_of_programs_between_launcher_and_python_are_listed(capsys):
    for launcher, numbers, options in (
        ("mpiexec -n 4 numactl -N 1 -m 1", "-n 4", "-N 1, -m 1"),
        ("numactl -N 0 python -m jaxgpt.launch -n 2 --", "-n 2", "-N 0"),
        ("nice -n 5 mpiexec -n 4", "-n 4", "-n 5"),
    ):
        line, notes = convert(capsys, f"{launcher} python train.py")
        assert line.startswith(f"python -m jaxgpt.launch {numbers} -- python")
        assert f"binding: {options}" in notes
    line, _ = convert(capsys, "conda run -n nanogpt python train.py")
    assert line.startswith("python -m jaxgpt.train")


@pytest.mark.parametrize("inner", ["$PYTHON", "torchrun --nproc_per_node=4"])
def test_jaxgpt_launch_starts_the_new_command_only(inner, capsys):
    line, _ = convert(capsys, f"python -m jaxgpt.launch -n 4 -- {inner} train.py")
    assert line == "python -m jaxgpt.launch -n 4 -- python -m jaxgpt.train --config gpt2"


@pytest.mark.parametrize("launcher", ["mpiexec -n 8", "torchrun --nproc_per_node=4 --nnodes=2"])
def test_the_launcher_s_processes_determine_the_microbatches(launcher, capsys):
    sizes = "--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64"
    line, notes = convert(capsys, f"{launcher} pretrain_gpt.py {sizes}")
    assert "train.gradient_accumulation_steps=4" in line.split()  # 64 / (4 x (8 / 2))
    assert "64 / (4 x 4)" in notes


@pytest.mark.parametrize("launcher", ["mpiexec -n $N", ""])
def test_without_a_number_of_processes_a_note_gives_the_microbatches(launcher, capsys):
    sizes = "--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 64"
    line, notes = convert(capsys, f"{launcher} python pretrain_gpt.py {sizes}")
    assert "accumulation" not in line
    assert "N is 32 divided by the number of devices" in notes  # 64 x 2 / 4


def test_variables_come_from_the_environment(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.sh"
    script.write_text(SCRIPT)
    monkeypatch.setenv("HIDDEN", "2048")
    monkeypatch.setenv("DATA_PATH", "/data/mine")
    command, _ = convert(capsys, script)
    assert {"model.n_embd=2048", "data.path=/data/mine"} <= set(command.split())


@pytest.mark.parametrize(
    ("line", "command"),
    [
        (
            "torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py",
            "python -m jaxgpt.launch -n 8 -ppn 8 -- python -m jaxgpt.train --config gpt2",
        ),
        ("python train.py", "python -m jaxgpt.train --config gpt2"),  # nanoGPT's defaults
        (
            "python data/shakespeare_char/prepare.py",
            "python -m jaxgpt.prepare shakespeare_char",
        ),
        (  # nanoGPT's sample.py has num_samples = 10 and max_new_tokens = 500
            "python sample.py --out_dir=a --start='O Romeo' --top_k=5 --device=cpu > log",
            "python -m jaxgpt.sample --run a --num-samples 10 --max-new-tokens 500 "
            "--prompt 'O Romeo' --top-k 5",
        ),
        ("torchrun --nproc_per_node=gpu train.py", "python -m jaxgpt.train --config gpt2"),
        # nanoGPT's train.py has batch_size = 12 and gradient_accumulation_steps = 5 * 8.
        (
            "python train.py --batch_size=20",
            "python -m jaxgpt.train --config gpt2 train.batch_size=800 "
            "train.gradient_accumulation_steps=5",
        ),
        (
            "torchrun --nproc_per_node=4 train.py --gradient_accumulation_steps=20",
            "python -m jaxgpt.launch -n 4 -ppn 4 -- python -m jaxgpt.train --config gpt2 "
            "train.batch_size=240 train.gradient_accumulation_steps=5",
        ),
        (
            "deepspeed --num_nodes 2 --num_gpus 4 pretrain_gpt.py --seed 2",
            "python -m jaxgpt.launch -n 8 -ppn 4 -- python -m jaxgpt.train --config megatron "
            "train.seed=2",
        ),
        (
            "accelerate launch --num_processes 8 --num_machines 2 train.py",
            "python -m jaxgpt.launch -n 8 -ppn 4 -- python -m jaxgpt.train --config gpt2",
        ),
        (
            "mpiexec -n 8 -ppn 4 python3 -m wordplay train.max_iters=9 2>&1 | tee a.log",
            "python -m jaxgpt.launch -n 8 -ppn 4 -- python -m jaxgpt.train --config wordplay "
            "train.max_iters=9",
        ),
        (
            "MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.steps 9",
            "python -m jaxgpt.train --config llama3-8b train.max_iters=9",
        ),
        (
            "python3 -m maxtext.trainers.pre_train.train run_name=a base_output_directory=runs",
            "python -m jaxgpt.train --config maxtext --out runs/a",
        ),
        (
            "python src/levanter/main/train_lm.py --config_path config/gpt2_small.yaml",
            "python -m jaxgpt.train --config gpt2",
        ),
        (
            "srun -n 4 python -m jaxgpt.train --out 'run #2' train.seed=2",
            "python -m jaxgpt.launch -n 4 -- python -m jaxgpt.train --out 'run #2' train.seed=2",
        ),
    ],
)
def test_a_line_is_converted(capsys, line, command):
    assert convert(capsys, line)[0] == command
    assert convert(capsys, *shlex.split(line))[0] == command


# The first command of the course on wordplay, with and without its launcher.
@pytest.mark.parametrize(
    ("line", "prefix"),
    [
        ("launch python3 __main__.py", "python -m jaxgpt.launch -- "),
        ("cd src/wordplay && launch python3 __main__.py", "python -m jaxgpt.launch -- "),
        ("python3 __main__.py", ""),
        ("mpiexec -n 4 python3 src/wordplay/__main__.py", "python -m jaxgpt.launch -n 4 -- "),
    ],
)
@pytest.mark.parametrize(
    ("words", "preset"),
    [("+experiment=shakespeare data=shakespeare", "shakespeare_char"),
     ("data=shakespeare", "wordplay")],
)  # fmt: skip
def test_wordplay_s_main_file_is_recognized(capsys, line, prefix, words, preset):
    command, _ = convert(capsys, f"{line} {words} train.backend=DDP train.max_iters=100")
    start = f"{prefix}python -m jaxgpt.train --config {preset} "
    assert command.startswith(start)
    config = parse_args(shlex.split(command.removeprefix(prefix))[3:], counts_devices_later=True)
    assert (config.data.dataset, config.train.max_iters) == ("shakespeare_char", 100)


def test_flags_without_an_equivalent_are_named(capsys):
    command, notes = convert(capsys, "python train.py --weird=1 --seed=2", status=1)
    assert command == "python -m jaxgpt.train --config gpt2 train.seed=2"
    assert "note: left out: --weird=1" in notes


@pytest.mark.parametrize(
    ("size", "left_out"), [("x", "note: left out: train.batch_size=x\n"), ("$UNSET", "")]
)
def test_a_default_that_is_not_typed_is_not_listed_as_left_out(size, left_out, capsys):
    _, notes = convert(capsys, f"python train.py --batch_size={size}", status=1 if left_out else 0)
    assert left_out in notes and notes.count("left out") == (left_out != "")
    assert (
        "note: gradient_accumulation_steps=40 in train.py: ignored; nanoGPT would train on 40 "
        f"times --batch_size={size}\n" in notes
    )


@pytest.mark.parametrize(
    ("script", "variables"),
    [
        ("CUDA_VISIBLE_DEVICES=0 OMP_NUM_THREADS=4 python train.py", "CUDA_VISIBLE_DEVICES=0"),
        ("export CUDA_VISIBLE_DEVICES=1; python train.py", "CUDA_VISIBLE_DEVICES=1"),
        ("CUDA_VISIBLE_DEVICES=0 python sample.py", "CUDA_VISIBLE_DEVICES=0"),
        (
            "GPUS=2,3 && mpiexec -n 2 -x HIP_VISIBLE_DEVICES=$GPUS python train.py",
            "HIP_VISIBLE_DEVICES=2,3",
        ),
        (
            "export JAX_PLATFORMS=cpu\nXLA_FLAGS='--xla_a=1 --xla_b=2' python -m jaxgpt.train",
            "JAX_PLATFORMS=cpu XLA_FLAGS='--xla_a=1 --xla_b=2'",
        ),
    ],
)
def test_a_note_lists_the_variables_that_choose_devices(script, variables, capsys):
    _, notes = convert(capsys, script)
    assert f"note: set {variables} before the new command, too\n" in notes


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("train", "a nanoGPT .py file is not read"),
        ("my_own", "a nanoGPT .py file is not read; give its settings as flags"),
        ("train_tiny", "a nanoGPT .py file is not read"),  # not the preset tiny
        ("eval_gpt2", "use python -m jaxgpt.evaluate"),
    ],
)
def test_a_python_file_with_settings_is_left_out(name, advice, exists, tmp_path, capsys):
    file, mark = tmp_path / f"{name}.py", tmp_path / "mark"
    if exists:
        file.write_text(f"open({str(mark)!r}, 'w')\nbatch_size = 2\n")
    command, notes = convert(capsys, f"python train.py {file} --batch_size=3", status=1)
    assert command.startswith("python -m jaxgpt.train --config gpt2 train.batch_size=120 ")
    assert f"note: {file}: {advice}" in notes and f"note: left out: {file}\n" in notes
    assert not mark.exists()


def test_the_training_command_of_nanogpt_s_readme_is_converted(capsys):
    names = "data/shakespeare_char/prepare.py", "train.py --n_layer=2", "sample.py --out_dir=a"
    line, _ = convert(capsys, "\n".join(f"python {name}" for name in names))
    assert line == "python -m jaxgpt.train --config gpt2 model.n_layer=2"


def test_arguments_of_sample_py_without_an_equivalent_are_named(capsys):
    line, notes = convert(capsys, "python sample.py --init_from=gpt2-xl --weird=1", status=1)
    assert line == "python -m jaxgpt.sample --run out --num-samples 10 --max-new-tokens 500"
    assert "use --run hf:FOLDER" in notes
    assert "note: left out: --init_from=gpt2-xl, --weird=1\n" in notes


def test_the_launcher_and_the_variables_of_sample_py_are_kept(capsys, monkeypatch):
    monkeypatch.delenv("PROMPT", raising=False)
    line = 'mpiexec -n 4 --cpu-bind none python sample.py --out_dir=x --start="$PROMPT"'
    line, notes = convert(capsys, line)
    assert line == (
        "python -m jaxgpt.launch -n 4 -- python -m jaxgpt.sample --run x --num-samples 10 "
        '--max-new-tokens 500 --prompt "$PROMPT"'
    )
    assert "launcher options left out" in notes and notes.count("--cpu-bind none") == 1
    assert "note: not set in the script: $PROMPT\n" in notes


def test_sample_py_is_converted_if_prepare_py_has_no_equivalent(capsys):
    names = "data/openwebtext/prepare.py", "sample.py --out_dir=a", "sample.py --out_dir=b"
    line, _ = convert(capsys, "\n".join(f"python {name}" for name in names))
    assert line == "python -m jaxgpt.sample --run a --num-samples 10 --max-new-tokens 500"


def test_a_dataset_that_is_not_built_in_is_answered_with_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["command", "python data/openwebtext/prepare.py"])
    assert "use python -m jaxgpt.prepare text --input FILES" in capsys.readouterr().err


@pytest.mark.parametrize("own", ["$@", '"$@"', "$*", '"${@}"', '"${@:2}"'])
def test_the_script_s_own_arguments_are_left_out(capsys, own):
    script = f"torchrun pretrain_gpt.py {own} --num-layers 2 --deepspeed {own}\n"
    command, notes = convert(capsys, script)
    assert command == "python -m jaxgpt.train --config megatron model.n_layer=2"
    assert notes == "note: ignored (no effect here): --deepspeed\n"


def test_flags_without_an_effect_are_not_a_failure(capsys):
    _, notes = convert(capsys, "python train.py --compile=False --wandb_log=True --seed=2")
    assert "left out" not in notes


@pytest.mark.parametrize(
    ("typed", "setting", "meant"),
    [
        ("--lr-decay-stlye cosine", "optimizer.schedule=cosine", "--lr-decay-style"),
        ("--global-batch-szie 768", "train.batch_size=768", "--global-batch-size"),
        ("--mirco-batch-size 4", "train.batch_size_per_device=4", "--micro-batch-size"),
        ("--micro-batchsize 4", "train.batch_size_per_device=4", "--micro-batch-size"),
        ("--sequence-paralel", "parallel.sequence_parallel=True", "parallel.sequence_parallel"),
        ("--qk-layernrom", "model.qk_norm=True", "--qk-layernorm"),
        ("--data-path-cache cache", "", "--data-cache-path"),
    ],
)
def test_a_misspelled_flag_is_corrected_with_a_remark(typed, setting, meant, capsys):
    command, notes = convert(capsys, f"torchrun pretrain_gpt.py {typed} --seed 2")
    assert set(command.split()[5:]) == {"train.seed=2", setting} - {""}
    assert f"note: {typed.split()[0]}: unknown key; did you mean {meant}?\n" in notes
    assert f"note: corrected: {typed}\n" in notes


# These flags exist: the first two in MaxText, the third in Megatron-LM, the last in torchtitan.
@pytest.mark.parametrize(
    "flag",
    ["--rope_min_timescale 4", "--v_head_dim 8", "--lr-warmup-init 0.1", "--model.name llama3"],
)
def test_a_flag_with_a_similar_name_is_not_a_slip(flag, capsys):
    command, notes = convert(capsys, f"torchrun pretrain_gpt.py {flag} --seed 2", status=1)
    assert command == "python -m jaxgpt.train --config megatron train.seed=2"
    assert f"note: left out: {flag}\n" in notes


def test_a_misspelled_flag_does_not_replace_the_flag_itself(capsys):
    line = "torchrun pretrain_gpt.py --global-batch-size 8 --global-batch-szie 16"
    command, notes = convert(capsys, line, status=1)
    assert command == "python -m jaxgpt.train --config megatron train.batch_size=8"
    assert "note: left out: --global-batch-szie 16" in notes


FLAGS = (
    "--num-layers $NLAYERS --hidden-size $HIDDEN --tensor-model-parallel-size $TP "
    "--pipeline-model-parallel-size $PP --micro-batch-size 4 --global-batch-size 1536"
)
ONE_PER_LINE = "NLAYERS=32\nHIDDEN=4096\nTP=2\nPP=4\n"


@pytest.mark.parametrize(
    "assignments",
    [
        ONE_PER_LINE,
        "NLAYERS=32; HIDDEN=4096; TP=2; PP=4;",
        "NLAYERS=32 && HIDDEN=4096 && TP=2 && PP=4",
        "NLAYERS=32 HIDDEN=4096 TP=2 PP=4",
        "export NLAYERS=32 HIDDEN=4096 TP=2 PP=4",
        "declare -i NLAYERS=32 HIDDEN=$((NLAYERS * 128)) TP=2; readonly PP=$(( TP + 2 ))",
        'A="x; TP=9 && y" B=(1 2; 3) NLAYERS=32 HIDDEN="4096"; TP=${TP:-2} PP=4',
        'if [ -z "$A" ]; then NLAYERS=32 HIDDEN=4096; TP=2; else echo none; fi; PP=4',
        "for i in 1 2; do NLAYERS=32; export HIDDEN=4096 TP=2; done; PP=4",
        'TP=2; [[ "$DEBUG" ]] && TP=1 || NLAYERS=32; HIDDEN=4096 PP=4',
        'TP=2\nif [ -z "$TP" ]; then\n  TP=8\nfi\nNLAYERS=32 HIDDEN=4096 PP=4',
    ],
)
def test_several_assignments_may_share_a_line(assignments, capsys, monkeypatch):
    for name in ("NLAYERS", "HIDDEN", "TP", "PP", "A"):
        monkeypatch.delenv(name, raising=False)
    command = f"mpiexec -n 192 python pretrain_gpt.py {FLAGS} > log 2>&1 &"
    line, notes = convert(capsys, f"{assignments}\n{command}")
    assert "not set in the script" not in notes
    given = {"model.n_layer=32", "model.n_embd=4096", "stage=4,data=-1,tensor=2"}
    # Megatron's formula: 1536 / (4 x (192 / (2 x 4)))
    assert given | {"train.gradient_accumulation_steps=16"} <= set(line.split())


@pytest.mark.parametrize(
    ("script", "out"),
    [
        ("python train.py --out_dir a --n_layer=4 # don't use 'b' # or \"c", "a"),
        ("# it's\npython train.py --out_dir \"a #1\" --n_layer=4 # don't", "'a #1'"),
        ("OUT='it #1' # isn't\npython train.py --out_dir \"$OUT\" --n_layer=4", "'it #1'"),
        ("python train.py --out_dir a\"b #\"'1 #2' \\\n  --n_layer=4", "'ab #1 #2'"),
        ('echo "one \\\n # two"; python train.py --out_dir a\\#1 --n_layer=4 #3', "'a#1'"),
        ("cat << END\nI can't\nEND\npython train.py --out_dir a --n_layer=4 # it's", "a"),
    ],
)
def test_a_comment_starts_outside_quotes(script, out, capsys):
    line, _ = convert(capsys, script)
    assert line == f"python -m jaxgpt.train --config gpt2 --out {out} model.n_layer=4"


@pytest.mark.parametrize("end", ["; N=8 | tee log", " 2>&1 | tee log", " &> log &", " >& log"])
def test_the_command_may_share_a_line_with_its_assignments(end, capsys):
    line, _ = convert(capsys, f"N=4; cd src && python train.py --n_layer=$N{end}")
    assert line == "python -m jaxgpt.train --config gpt2 model.n_layer=4"


def test_a_command_that_is_rewritten_with_sed_is_converted(capsys):
    """From train_llama_nersc_perlmutter.sh in ALCF's Megatron-DeepSpeed."""
    script = """\
run="python train.py --n_layer=4"
run=$(echo "${run}" | sed -e "s/ */ /g")
eval "${run}"
"""
    line, _ = convert(capsys, script)
    assert line == "python -m jaxgpt.train --config gpt2 model.n_layer=4"


def test_every_unset_variable_and_every_dropped_flag_is_listed(capsys, monkeypatch):
    for name in ("NLAYERS", "HIDDEN", "TP", "PP", "TB"):
        monkeypatch.delenv(name, raising=False)
    script = f"mpiexec -n 192 python pretrain_gpt.py {FLAGS} --tensorboard-dir $TB"
    line, notes = convert(capsys, script, status=1)
    assert "note: not set in the script: $HIDDEN, $NLAYERS, $PP, $TB, $TP\n" in notes
    dropped = "--tensor-model-parallel-size $TP, --pipeline-model-parallel-size $PP"
    assert f"note: left out: {dropped}\n" in notes
    assert "accumulation" not in line  # it depends on the mesh
    assert f"--micro-batch-size 4: ignored, because the mesh lacks {dropped}" in notes


def test_a_size_that_depends_on_an_unset_variable_is_not_computed(capsys, monkeypatch):
    monkeypatch.delenv("TP", raising=False)
    flags = "--tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size $TP --context 2"
    line, notes = convert(capsys, f"torchrun pretrain_gpt.py {flags}", status=1)
    assert "vocab_size" not in line  # padded to a multiple of 128 x TP
    assert "use model.vocab_size=N, the padded size" in notes


@pytest.mark.parametrize(
    "steps", ["--lr-decay-iters $N", "--lr-warmup-iters $N", "--lr-decay-samples $N"]
)
def test_a_schedule_with_an_unset_variable_is_not_computed(steps, capsys, monkeypatch):
    monkeypatch.delenv("N", raising=False)
    line = f"torchrun pretrain_gpt.py --micro-batch-size 4 --train-iters 100 {steps}"
    command, notes = convert(capsys, line, status=1 if "samples" in steps else 0)
    assert ("optimizer.lr_decay_iters=100" in command) == ("decay" not in steps)
    assert ("=$N" in command) == ("samples" not in steps)


def test_a_note_gives_the_width_of_megatron_s_default(capsys):
    line = "torchrun pretrain_gpt.py --micro-batch-size 4 --train-iters 100 --swiglu"
    _, notes = convert(capsys, f"{line} --hidden-size 192")
    # 192 x 8/3, rounded down to a multiple of 64
    assert "Megatron's default, --ffn-hidden-size 512: means model.mlp_hidden=512\n" in notes


@pytest.mark.parametrize("option", ["-n", "--nnodes", "-ppn"])
def test_a_number_of_thousands_of_digits_is_refused(option, capsys):
    line = f"mpiexec {option} {'9' * 5000} python pretrain_gpt.py --num-layers 2"
    with pytest.raises(SystemExit, match="2"):
        main(["command", line])
    assert f"{option} 999" in (error := capsys.readouterr().err)
    assert "must be a whole number, less than 10^18" in error


def test_a_variable_that_extends_an_unset_one_is_expanded_once(capsys):
    main(["command", 'TREE="/lib:$TREE"\npython $TREE/train.py --n_layer=4'])
    assert "model.n_layer=4" in capsys.readouterr().out


def test_arithmetic_on_a_name_without_a_value_is_kept(capsys):
    main(["command", "python train.py --n_layer=$((None))"])
    assert "model.n_layer=$((None))" in capsys.readouterr().out


def test_a_missing_script_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["command", "nowhere/train.sh"])
    assert "nowhere/train.sh: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "ls -l",
        "",
        "python other.py",
        "python pretrain.py",
        "echo train.py",
        "python __main__.py a=1",
    ],
)
def test_a_line_without_a_known_program_is_refused(capsys, line):
    with pytest.raises(SystemExit) as end:
        main(["command", line])
    assert end.value.code == 2
    assert "calls none of wordplay, pretrain_gpt" in capsys.readouterr().err
