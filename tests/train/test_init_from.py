"""`train.init_from`: a new run starts from another run's weights or from converted weights."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.checkpoint.metadata import read_meta
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, UsageError, config_from_file, parse_args
from jaxgpt.convert import convert_in_subprocess
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.restart import load_weights
from jaxgpt.train.run_directory import prepare_run
from jobs import SMALL, checkpoint_arrays, limited_devices, losses, records, run, train_here

SHORT = ("train.max_iters=4", "train.batch_size=4", "model.block_size=64")
SPIKE = (
    "train.batch_size=4", "spike.action=rewind", "spike.window=16", "spike.rewind_margin=4",
    "spike.loss_threshold=1.5",
)  # fmt: skip
STILL = ("optimizer.learning_rate=0", "optimizer.min_lr=0")
# The settings of SMALL without those of the model, which come from the weights.
OTHERS = tuple(
    word for word in SMALL if not word.startswith("model.") and "shakespeare" not in word
)[1:]


@pytest.fixture(scope="module")
def first_run(tmp_path_factory):
    """The folder of a run of four steps."""
    out = tmp_path_factory.mktemp("first") / "run"
    assert train_here(*SMALL, *SHORT, "model.bias=True", "--out", out, "--mesh", "2,1,1") == 0
    return out


def test_dropout_is_the_new_runs_own_choice(first_run):
    given = [f"train.init_from={first_run}", "model.dropout=0.25", "model.attention=xla"]
    model = parse_args(given, initial_model=initial_model).model
    assert (model.dropout, model.attention, model.n_embd) == (0.25, "xla", 64)
    assert parse_args(given[:1], initial_model=initial_model).model.dropout == 0


def params_of(folder, step):
    return {
        path: array
        for path, array in checkpoint_arrays(folder, step).items()
        if path.startswith("['params']")
    }


@pytest.mark.parametrize("mesh", ["1,2,2", pytest.param("2,1,1", marks=pytest.mark.long)])
def test_a_run_starts_from_the_weights_of_another(mesh, first_run, tmp_path):
    out = tmp_path / "run"
    given = (*OTHERS, f"train.init_from={first_run}", "train.max_iters=2", "train.batch_size=4")
    assert train_here(*given, *STILL, "--out", out, "--mesh", mesh) == 0
    model, theirs = (config_from_file(folder / "config.yaml").model for folder in (out, first_run))
    assert model == theirs
    assert sorted(losses(out)) == [1, 2]  # it is a new run
    expected = params_of(first_run, 4)
    found = params_of(out, 2)
    assert found.keys() == expected.keys()
    for path, array in expected.items():  # without a learning rate they stay as they were
        np.testing.assert_array_equal(found[path], array)
    moments = checkpoint_arrays(out, 2)
    assert all(moments[path].max() <= 2 for path in moments if path.endswith("['count']"))
    assert losses(out)[1] < losses(first_run)[1]
    assert "weights: step 4 of" in (out / "train.log").read_text()


@pytest.mark.long
def test_fewer_positions_are_the_first_ones(first_run, tmp_path):
    out = tmp_path / "run"
    given = (*OTHERS, f"train.init_from={first_run}", "train.max_iters=1", "train.batch_size=4")
    assert train_here(*given, *STILL, "model.block_size=16", "--out", out, "--mesh", "1,2,1") == 0
    path = "['params']['position_embedding']['embedding']"
    expected = checkpoint_arrays(first_run, 4)[path][:16]
    np.testing.assert_array_equal(checkpoint_arrays(out, 1)[path], expected)


@pytest.mark.long
def test_a_run_that_has_checkpoints_goes_on_without_its_first_weights(first_run, tmp_path):
    weights, out = tmp_path / "weights", tmp_path / "run"
    shutil.copytree(first_run, weights)
    given = (*OTHERS, f"train.init_from={weights}", "train.batch_size=4", "--out", out)
    assert train_here(*given, "train.max_iters=1", "--mesh", "1,1,1") == 0
    shutil.rmtree(weights)
    assert train_here(*given, "train.max_iters=2", "--mesh", "1,1,1") == 0
    other = f"train.init_from={tmp_path / 'other'}"
    assert train_here("--out", out, other, "train.max_iters=3", "--mesh", "1,1,1") == 0
    assert sorted(losses(out)) == [1, 2, 3]
    changed = [line for line in (out / "train.log").read_text().splitlines() if "changed" in line]
    assert changed and not any("init_from" in line for line in changed)


@pytest.mark.long
def test_a_resumed_run_that_goes_back_to_its_start_has_its_first_weights(first_run, tmp_path):
    """The source of the weights has newer checkpoints by then, and is later removed."""
    weights, out = tmp_path / "weights", tmp_path / "run"
    shutil.copytree(first_run, weights)
    given = (*OTHERS, f"train.init_from={weights}", "--out", out, "checkpoint.interval=50")
    assert train_here(*given, *SPIKE, "train.max_iters=8", "--mesh", "1,1,1") == 0
    before = losses(out)
    shutil.copytree(first_run / "checkpoints" / "4", weights / "checkpoints" / "5")
    spoiled = (*given, *SPIKE, "--faults.random_tokens", "24", "26", "train.max_iters=40")
    assert train_here(*spoiled, "--mesh", "1,1,1") == 0
    (rewind,) = records(out, "rewind")
    assert rewind["step"] == 0
    after = losses(out)
    assert {step: after[step] for step in range(1, 9)} == before

    shutil.rmtree(weights)
    with ProcessGroup(launcher="test") as cluster:
        started = prepare_run(parse_args(["--out", str(out), "train.max_iters=50"]), cluster)
    assert (started.init_folder, started.init_step) == (str(weights), 4)
    with pytest.raises(UsageError, match=r"weights: the weights of step 4, which the run began"):
        load_weights(Path(started.init_folder), started.init_step, None, cluster)


def test_all_processes_start_from_the_step_that_process_0_found(first_run, tmp_path):
    """The source of the weights may save newer checkpoints in the meantime."""
    weights = tmp_path / "weights"
    shutil.copytree(first_run, weights)
    given = (*OTHERS, f"train.init_from={weights}", "--out", str(tmp_path / "run"))
    config = parse_args([*map(str, given), "train.batch_size=4"], initial_model=initial_model)
    with ProcessGroup(launcher="test") as cluster:
        started = prepare_run(config, cluster)
    assert (started.init_folder, started.init_step) == (str(weights), 4)
    (weights / "checkpoints" / "5").mkdir()  # no checkpoint that could be read
    with limited_devices(1):
        steps = make_steps(started.config, make_mesh(MeshShape.parse("1,1,1")))
        state = load_weights(weights, started.init_step, steps, cluster)
    expected = params_of(first_run, 4)["['params']['norm']['scale']"]
    np.testing.assert_array_equal(state.params["norm"]["scale"], expected)


def test_options_that_have_no_weights_may_change(first_run, tmp_path):
    given = (*OTHERS, f"train.init_from={first_run}", "--out", str(tmp_path / "run"))
    settings = [*map(str, given), "train.batch_size=4", "model.norm_eps=1e-4"]
    with ProcessGroup(launcher="test") as cluster:
        started = prepare_run(parse_args(settings, initial_model=initial_model), cluster)
    assert "changed from the weights: model.norm_eps=0.0001 (was 1e-05)" in started.notes
    assert started.config.model.norm_eps == 1e-4


def test_a_default_may_be_written_out(first_run, tmp_path):
    given = [*map(str, OTHERS), f"train.init_from={first_run}", "--out", str(tmp_path / "run")]
    # n_embd=64: four heads of size 16
    given += ["model.n_kv_head=4", "model.head_dim=16", "model.mlp_hidden=256"]
    with ProcessGroup(launcher="test") as cluster:
        config = parse_args([*given, "train.batch_size=4"], initial_model=initial_model)
        assert not any("changed" in line for line in prepare_run(config, cluster).notes)


@pytest.mark.long
@pytest.mark.parametrize("launcher", [{}, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_a_conversion_on_the_way_says_what_is_wrong(launcher, tmp_path, monkeypatch):
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    out = tmp_path / "weights"
    for left in ("weights", "weights.partial-1", "weights.partial-x/weights"):
        (tmp_path / left).mkdir(parents=True)
    with pytest.raises(UsageError, match=f"^key: {tmp_path}/none: is not a folder; give one"):
        convert_in_subprocess(tmp_path / "none", out, "key")
    assert list(tmp_path.iterdir()) == []
    llama_folder(tmp_path / "llama", 256)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as raised:  # without a word of --out, which nobody gave
        convert_in_subprocess(tmp_path / "llama", tmp_path / "file" / "weights", "key")
    assert str(raised.value) == f"key: {tmp_path}/file/weights: cannot be written (File exists)"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            ["model.n_layer=3"],
            r"model.n_layer=3: the weights of train.init_from=.* have model.n_layer",
        ),
        (["model.bias=False"], "have model.bias=True; use that value, or leave the key out"),
        (["model.block_size=65"], "has 64 learned position embeddings; choose at most that many"),
        (["model.vocab_size=300"], "model.vocab_size=300: the weights of"),
    ],
)
def test_options_that_the_weights_do_not_have_are_one_sentence(
    settings, words, first_run, tmp_path
):
    given = (f"train.init_from={first_run}", "--out", tmp_path / "run", "train.batch_size=4")
    with pytest.raises(UsageError, match=words):
        train_here(*settings, *given, "--mesh", "1,1,1")


def test_the_model_of_a_preset_gives_way_to_the_weights(first_run, tmp_path):
    """A preset may shorten the rows (gpt2's have 1,024 tokens, and those of the weights 64)."""
    weights = parse_args([f"train.init_from={first_run}"], initial_model=initial_model).model

    def model(*settings):
        given = ["--config", *map(str, settings), f"train.init_from={first_run}"]
        return parse_args(given, initial_model=initial_model, note=notes.append).model

    notes = []
    assert model("gpt2", "model.dropout=0") == weights
    assert notes == ["the weights override the model options of --config gpt2"]
    assert model("llama-tiny", "model.block_size=32").block_size == 32
    short = tmp_path / "short.yaml"
    short.write_text("model: {n_layer: 4}")
    assert model(short).n_layer == 4  # the user's own file conflicts with the weights


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("/nowhere", "train.init_from=/nowhere: no such folder; give a run directory"),
        ("gpt2", "train.init_from=gpt2: no such folder; .* hf:FOLDER"),
        ("/", "train.init_from=/: has no checkpoint; give a run directory"),
        ("hf:/nowhere", "train.init_from=hf:/nowhere: no such folder; download the model"),
        ("hf:/", "train.init_from=hf:/: /config.json: cannot be read"),
        ("hf:", "train.init_from=hf:: names no folder; give hf:FOLDER"),
        ("resume", "train.init_from=resume: leave it out"),
        ("", "train.init_from=: is empty"),
    ],
)
def test_weights_that_are_not_there_are_one_sentence(value, words):
    with pytest.raises(UsageError, match=words):
        parse_args([f"train.init_from={value}"], initial_model=initial_model)


def test_weights_in_a_folder_that_may_not_be_entered_are_one_sentence(monkeypatch):
    def deny(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", deny)
    with pytest.raises(UsageError, match="init_from=hf:/private/model: cannot be read"):
        initial_model("hf:/private/model", None)


def llama_folder(folder, vocab_size):
    """Write a Hugging Face folder with random weights."""
    package = pytest.importorskip("safetensors.numpy")
    folder.mkdir()
    D, H, F, L = 32, 4, 48, 2
    config = {
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
        "num_key_value_heads": 2, "intermediate_size": F, "vocab_size": vocab_size,
        "max_position_embeddings": 32, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (vocab_size, D), "model.norm.weight": (D,)}
    for i in range(L):
        for name, shape in (
            ("input_layernorm", (D,)), ("post_attention_layernorm", (D,)),
            ("self_attn.q_proj", (D, D)), ("self_attn.k_proj", (D // 2, D)),
            ("self_attn.v_proj", (D // 2, D)), ("self_attn.o_proj", (D, D)),
            ("mlp.gate_proj", (F, D)), ("mlp.up_proj", (F, D)), ("mlp.down_proj", (D, F)),
        ):  # fmt: skip
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    draw = np.random.default_rng(0).normal
    tensors = {name: draw(0, 0.1, size).astype(np.float32) for name, size in shapes.items()}
    (folder / "config.json").write_text(json.dumps(config))
    package.save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.long
def test_a_folder_of_transformers_is_converted_on_the_way(tmp_path, monkeypatch):
    folder, out = tmp_path / "llama", tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    tensors = llama_folder(folder, 256)
    given = (*OTHERS, f"train.init_from=hf:{folder}", "train.max_iters=1", "train.batch_size=4")
    assert train_here(*given, *STILL, "--out", "run", "--mesh", "1,2,2") == 0
    # The run may be resumed from another working directory.
    assert read_meta(out, 1)["init_from"] == [str(out / "init_from"), 0]
    model = config_from_file(out / "config.yaml").model
    assert (model.position, model.n_kv_head, model.mlp_hidden) == ("rope", 2, 48)
    embedding = params_of(out, 1)["['params']['token_embedding']['embedding']"]
    np.testing.assert_array_equal(embedding, tensors["model.embed_tokens.weight"])
    assert f"from {folder}" in (out / "train.log").read_text()


def test_data_of_another_vocabulary_is_refused(tmp_path):
    llama_folder(tmp_path / "llama", 100)
    given = ("--out", tmp_path / "run", "train.batch_size=4", "--mesh", "1,1,1")
    with pytest.raises(UsageError, match="of 100; .* has a vocabulary of 256; prepare the"):
        train_here(f"train.init_from=hf:{tmp_path / 'llama'}", *given)


@pytest.mark.long
def test_data_of_another_tokenizer_is_refused(tmp_path, gpt2_folder, monkeypatch):
    folder, ours = tmp_path / "llama", tmp_path / "ours"
    monkeypatch.chdir(tmp_path)
    given = ("--out", "run", "train.batch_size=4", "--mesh", "1,1,1")
    llama_folder(folder, 50257)
    for theirs, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        shutil.copy(gpt2_folder / theirs, folder / name)
    job = run("convert", "from-hf", folder, "--out", ours)
    assert job.returncode == 0, job.stdout
    assert read_meta(ours, 0)["tokenizer"]["type"] == "huggingface"
    with pytest.raises(UsageError, match="different tokenizer from the weights of .*--tok"):
        train_here(f"train.init_from={ours}", *given)
    tokens = np.random.default_rng(0).integers(0, 50257, 9000).astype(np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    data = (f"data.path={tmp_path / 'a.bin'}", "data.val_share=0.1")
    # It came with the weights; the second start, with the same command, has it of the first.
    for steps in (1, 2):
        words = (f"train.init_from={ours}", *given, *data, *OTHERS[1:], f"train.max_iters={steps}")
        assert train_here(*words) == 0
        saved = read_meta(tmp_path / "run", steps)["tokenizer"]
        assert saved == read_meta(ours, 0)["tokenizer"]
    assert config_from_file(tmp_path / "run" / "config.yaml").data.tokenizer == str(
        tmp_path / "run"
    )


def test_converted_weights_are_no_run_to_go_on_with(tmp_path):
    folder, ours = tmp_path / "llama", tmp_path / "ours"
    llama_folder(folder, 256)
    job = run("convert", "from-hf", folder, "--out", ours)
    assert job.returncode == 0, job.stdout
    with pytest.raises(UsageError, match="weights written by jaxgpt.convert, not a run"):
        train_here("--out", ours, "--mesh", "1,1,1")
