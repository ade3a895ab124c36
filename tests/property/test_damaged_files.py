"""A damaged file is read, or rejected with a one-line error: no traceback, no hang."""

import contextlib
import functools
import importlib.util
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blends import write_pair
from jaxgpt.checkpoint.checkpointer import Checkpoints, restore_params
from jaxgpt.checkpoint.metadata import add_checksum, newest_undamaged, read_meta
from jaxgpt.config import (
    UsageError,
    config_from_dict,
    config_from_file,
    load_config,
    mesh_shape,
    parse_args,
    skip_ranges,
)
from jaxgpt.convert import nanogpt, safetensors, torch_file
from jaxgpt.convert.families import read_model
from jaxgpt.convert.safetensors import open_folder, write_folder
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.tokenizers import load_tokenizer
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.inspect import differences
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.replay import read_history
from jaxgpt.report.__main__ import goodput_report, spikes_report
from jaxgpt.report.page import sections
from jaxgpt.report.panels import PANELS, series_of
from jaxgpt.spikes.policy import (
    commit_rewind,
    pending_rewind,
    read_rewinds,
    skipped_by_rewinds,
)
from jaxgpt.spikes.report import rewind_line
from jaxgpt.tracking.jsonl import JsonLines, Samples
from jaxgpt.tracking.run_files import read_runs
from jaxgpt.tracking.starts import start_rows
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.resume import check_resume, missing_records, saved_settings
from jaxgpt.train.state import checkpoint_tree, state_from_checkpoint
from jobs import SMALL, limited_devices, train_here
from mutations import changed_value, damaged
from time_limit import time_limit

HAS_TORCH = importlib.util.find_spec("torch") is not None
ROWS = [{"row": 3, "loss": 7.5, "corpus": "web", "source": "/data/web", "offset": 8192}]
NUMBERS = {"loss": 7.25, "grad_norm": 4.5, "median": 3.0, "limit": 3.5, "rows": ROWS}
REWINDS = [
    {"cause": "loss", **NUMBERS, "spike": 9, "to": 0, "skip": [8, 11], "dropped": [1, 10],
     "done": True, "sequences": [14, 21]},
    {"cause": "loss", **NUMBERS, "spike": 18, "to": 10, "skip": [16, 19], "dropped": [11, 20],
     "done": False, "sequences": [30, 37]},
]  # fmt: skip
GOODPUT = {"kind": "goodput", "step": 9, "after": 0, "start": 1.0, "began": 1.0, "ended": 9.0,
           "seconds": {"compile": 5.0, "step": 3.0}, "is_last": False}  # fmt: skip
RECORDS = [
    {"kind": "start", "step": 0, "mesh": "data=1", "processes": 1, "devices": "cpu", "jax": "0",
     "batch_size": 2, "consumed_sequences": 0},
    GOODPUT,
    {"kind": "straggler", "step": 3, "rank": 1, "host": "a", "own": 0.3, "median": 0.1,
     "data": 0.1, "seconds": 0.4},
    {"kind": "spike", "step": 4, "cause": "nonfinite", "action": "skip_update", "rows": ROWS,
     "loss": None, "grad_norm": None, "nonfinite": True},
    {"kind": "rewind", "step": 5, "spike": 9, "cause": "loss", **NUMBERS, "dropped": [6, 10],
     "skip": [8, 11], "dropped_losses": [[8, 3.1], [9, 7.25], [10, None]]},
    {"kind": "train", "step": 8, "loss": None, "grad_norm": None, "skipped": True,
     "consumed_tokens": 10},
    {"kind": "spike", "step": 14, "cause": "grad_norm", "action": "log", **NUMBERS},
    {"kind": "eval", "step": 20, "train_loss": 3.0, "val_loss": 3.1},
    {"kind": "sample", "step": 20, "text": "so it is"},
]  # fmt: skip
LLAMA = {
    "model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "layer_types": ["full_attention"] * 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with one file of every kind that jaxgpt reads."""
    home = tmp_path_factory.mktemp("home")
    arguments = (*SMALL, "train.max_iters=20", "checkpoint.interval=10", "train.log_interval=10")
    train_here(*arguments, "--out", home / "run")
    with (home / "run" / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in RECORDS)
    (home / "run" / "rewinds.json").write_text(json.dumps(REWINDS))
    (home / "text.txt").write_text("Now is the winter of our discontent. " * 400)
    prepare_text(home / "data", [home / "text.txt"], "char")
    tokens = np.arange(4000, dtype=np.uint16) % 97
    write_pair(home / "pair", [tokens[first : first + 250] for first in range(0, 4000, 250)])
    tokens.tofile(home / "flat.bin")
    (home / "list.txt").write_text(f"0.5 {home}/data a\n0.25 {home}/data b\n")
    (home / "gpt2").mkdir()
    letters = [*"nowisthe", "\u0120", "no", "now", "<|endoftext|>"]
    (home / "gpt2" / "encoder.json").write_text(json.dumps({w: i for i, w in enumerate(letters)}))
    (home / "gpt2" / "vocab.bpe").write_text("#version: 0.2\nn o\nno w\n")
    tokenizers = pytest.importorskip("tokenizers")
    models, split = tokenizers.models, tokenizers.pre_tokenizers.Whitespace()
    vocabulary = {"<unk>": 0, "</s>": 1, "now": 2, "is": 3}
    words = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    words.pre_tokenizer = split
    (home / "words").mkdir()
    words.save(str(home / "words" / "tokenizer.json"))
    (home / "words" / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    (home / "hf").mkdir()
    (home / "hf" / "config.json").write_text(json.dumps(LLAMA))
    arrays = {"a.weight": np.ones((4, 3), np.float32), "b": np.ones(7, np.float32)}
    shapes = {name: array.shape for name, array in arrays.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors, "SHARD_BYTES", 40)
        write_folder(home / "hf", arrays.items(), shapes, "float32")
    model_args = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, bias=False, vocab_size=9)
    if HAS_TORCH:
        import torch_files

        torch_files.save(home / "ckpt.pt", {"model": arrays, "model_args": model_args})
    (home / "preset.yaml").write_text(load_config("gpt2").to_yaml())
    return home


def run_config(home):
    return config_from_dict(read_meta(home / "run", 10)["config"], "run")


def dataset(*arguments):
    config = load_config("tiny", "model.block_size=8", *arguments)
    return open_dataset(config.data, config.model)


def read_data(*arguments):
    data = dataset(*arguments)
    data.verify()
    data.describe()
    data.find_document(0, "train", 700)
    if data.tokenizer is not None:
        data.tokenizer.decode(data.sources[0].tokens["val"].read(0, 20))
        data.tokenizer.encode("now is")


def read_tokenizer(path):
    tokenizer = load_tokenizer(path)
    tokenizer.decode(tokenizer.encode("now is the winter"))
    tokenizer.count_bytes(tokenizer.encode("now is the winter"))


def go_on(home):
    """Read the records that a resumed run reads."""
    run = SimpleNamespace(directory=home / "run")
    config = run_config(home).replace(out=str(home / "run"), train__eval_interval=10)
    missing_records(config, dataset("data.dataset=python"), 20)
    read_history(home / "run", [10, 20])
    commit_rewind(home / "run", REWINDS[-1], 5)
    for tracker in (JsonLines(), Samples()):
        tracker.open(run, 10)
        tracker.close()


def read_checkpoints(home):
    """Read the JSON of checkpoints as a run and all commands on a run do."""
    run, config = home / "run", run_config(home).replace(out=str(home / "run"))
    data = dataset("data.dataset=python")
    step, meta, _ = newest_undamaged(run, "quarantine")
    check_resume(config, run, step, meta, data)
    skip_ranges(config_from_dict(meta["config"], "checkpoint"))
    read_history(run, [10])
    differences(config, data, run, 12)
    with contextlib.suppress(UsageError):
        initial_model("hf:none", str(run))
    find_trained(run)


def read_all_rewinds(home):
    for rewind in read_rewinds(home / "run"):
        rewind_line(rewind)
    skipped_by_rewinds(home / "run", BatchSizes([(1, 2)]))
    if rewind := pending_rewind(home / "run"):
        commit_rewind(home / "run", rewind, 0)


def read_hf(home):
    for tensor in open_folder(home / "hf").values():
        tensor.read()


def read_nanogpt(home):
    found = torch_file.load(home / "ckpt.pt")
    if isinstance(found, dict) and {"model", "model_args"} <= found.keys():
        nanogpt.model_of(home / "ckpt.pt", found["model_args"])
        for tensor in nanogpt.tensors_of(home / "ckpt.pt", found["model"]).values():
            tensor.read()


def read_preset(home):
    parse_args(["--config", str(home / "preset.yaml")])


def read_kept(home):
    parse_args(["--out", str(home / "run"), "train.max_iters=30"], saved_settings=saved_settings)
    config_from_file(home / "run" / "config.yaml")


@functools.cache
def functions(folder):
    config = config_from_dict(read_meta(folder / "run", 10)["config"], "run")
    config = config.replace(parallel__mesh="1,1,1")
    with limited_devices(1):
        return config, make_steps(config, make_mesh(mesh_shape(config)))


def restore(home):
    config, steps = functions(home)
    with limited_devices(1):
        tree = checkpoint_tree(steps.state_shapes)
        found = Checkpoints(home / "run", config).restore(20, tree)
        state_from_checkpoint(*found, steps.state_shapes)
        restore_params(home / "run", 20, steps.state_shapes.params)


def run_of(home):
    (run,) = read_runs([home / "run"])
    return run


def read_page(home):
    run = run_of(home)
    sections([run], "title")
    for panel in PANELS:
        series_of(run, panel)


# name -> files that are damaged, and what reads them
READERS = {
    "report spikes": ("run/metrics.jsonl", lambda home: spikes_report([run_of(home)], 80, None)),
    "report spikes --png": (
        "run/metrics.jsonl", lambda home: spikes_report([run_of(home)], 80, home / "x.png")),
    "report startup": ("run/starts.jsonl", lambda home: start_rows("run", home / "run", "dead")),
    "report goodput": ("run/metrics.jsonl", lambda home: goodput_report([run_of(home)], 80)),
    "report: texts": ("run/metrics.jsonl", read_page),
    "report: settings": ("run/config.yaml", lambda home: run_of(home).row()),
    "cluster.json": ("run/cluster.json", lambda home: goodput_report([run_of(home)], 80)),
    "records of a resumed run": ("run/metrics.jsonl", go_on),
    "rewinds.json": ("run/rewinds.json", read_all_rewinds),
    "checkpoint JSON": ("run/checkpoints/20/meta/metadata", read_checkpoints),
    "checkpoint JSON, sealed": ("run/checkpoints/20/meta/metadata", read_checkpoints),
    "checkpoint arrays": ("run/checkpoints/20/**/*", restore),
    "config.yaml of a run": ("run/config.yaml", read_kept),
    "preset": ("preset.yaml", read_preset),
    "meta.json": ("data/meta.json", lambda home: read_data(f"data.path={home}/data")),
    "token folder": ("data/*.bin", lambda home: read_data(f"data.path={home}/data")),
    "token file": (
        "flat.bin", lambda home: read_data(f"data.path={home}/flat.bin", "model.vocab_size=97")),
    "Megatron index": (
        "pair.idx", lambda home: read_data(f"data.path={home}/pair", "model.vocab_size=97")),
    "file list": ("list.txt", lambda home: read_data(f"data.file_list={home}/list.txt")),
    "tokenizer.json": ("words/tokenizer.json", lambda home: read_tokenizer(home / "words")),
    "tokenizer_config.json": (
        "words/tokenizer_config.json", lambda home: read_tokenizer(home / "words")),
    "GPT-2's encoder.json": ("gpt2/encoder.json", lambda home: read_tokenizer(home / "gpt2")),
    "GPT-2's vocab.bpe": ("gpt2/vocab.bpe", lambda home: read_tokenizer(home / "gpt2")),
    "tokenizer of a data set": ("data/meta.json", lambda home: read_tokenizer(home / "data")),
    "config.json": ("hf/config.json", lambda home: read_model(home / "hf")),
    "safetensors": ("hf/*.safetensors", read_hf),
    "safetensors index": ("hf/*.index.json", read_hf),
    "ckpt.pt": ("ckpt.pt", read_nanogpt),
}  # fmt: skip
EXAMPLES, LONG_EXAMPLES = 4, 65
COSTLY = {"checkpoint arrays", "report spikes --png"}
MARKS = dict.fromkeys(COSTLY, pytest.mark.long)
MARKS["ckpt.pt"] = pytest.mark.skipif(not HAS_TORCH, reason="torch is not installed")
NAMES = [pytest.param(name, marks=MARKS.get(name, ())) for name in READERS]


def drawn_damage(draw, name, path):
    """Return the path's content, damaged."""
    content = path.read_bytes()
    if name.endswith("sealed"):
        meta = draw(changed_value(json.loads(content)))
        sealed = isinstance(meta, dict)
        meta = add_checksum({k: v for k, v in meta.items() if k != "sha256"}) if sealed else meta
        return json.dumps(meta).encode()
    is_json = path.suffix in (".json", ".jsonl") or path.name.lower().endswith("metadata")
    return draw(damaged(content, is_json))


def attempt(draw, name, home):
    """Damage a file, read it, restore it, and return the error, or "" if there is none."""
    pattern, read = READERS[name]
    paths = [p for p in sorted(home.glob(pattern)) if p.is_file() and p.stat().st_size]
    path = draw(st.sampled_from(paths))
    kept = {p: p.read_bytes() for p in (*(home / "run").glob("*.json*"), path)}
    try:
        path.write_bytes(drawn_damage(draw, name, path))
        with time_limit(), contextlib.redirect_stdout(io.StringIO()):
            read(home)
    except UsageError as error:
        return str(error)
    finally:
        for p, content in kept.items():
            p.write_bytes(content)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(name, home, request):
    examples = LONG_EXAMPLES if request.config.getoption("--long") else EXAMPLES

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def check(data):
        sentence = attempt(data.draw, name, home)
        assert "[Errno" not in sentence, sentence
        if "\n" in sentence:  # all wrong keys of a file at once, each in a line
            head, *problems = sentence.splitlines()
            assert head == f"{len(problems)} problems" and all(": " in p for p in problems), (
                sentence
            )

    check()


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_file_is_read(name, home, monkeypatch):
    monkeypatch.setitem(globals(), "drawn_damage", lambda draw, name, path: path.read_bytes())
    assert attempt(lambda strategy: strategy.elements[0], name, home) == ""
