import argparse
import dataclasses
import os
import re
import typing
from pathlib import Path

import numpy as np
import pytest

from jaxgpt.config import (
    Config,
    MeshShape,
    UsageError,
    check_batch,
    check_shape,
    checked,
    config_from_dict,
    help,
    load_config,
    mesh_shape,
    override_data,
    parse_args,
    skip_ranges,
    whole_number,
)
from jaxgpt.config.values import parse_value
from readme_code import load_block


def test_both_spellings_of_an_override_mean_the_same():
    by_equals = parse_args(["--config", "gpt2", "optimizer.learning_rate=3e-4"])
    by_flag = parse_args(["--config=gpt2", "--optimizer.learning-rate", "3e-4"])
    assert by_equals == by_flag
    assert by_equals.optimizer.learning_rate == 3e-4
    assert by_equals.model.n_layer == 12


@pytest.mark.parametrize(
    ("preset", "shape"),
    {  # nanoGPT's configurations; GPT-2's from Radford et al. 2019, table 2
        "shakespeare_char_cpu": (4, 4, 128, 64),
        "shakespeare_char": (6, 6, 384, 256),
        "gpt2": (12, 12, 768, 1024),
        "gpt2-medium": (24, 16, 1024, 1024),
        "gpt2-large": (36, 20, 1280, 1024),
        "gpt2-xl": (48, 25, 1600, 1024),
    }.items(),
)
def test_presets_have_the_published_shapes(preset, shape):
    model = load_config(preset).model
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == shape


def test_help_shows_the_defaults_of_the_default_run():
    assert load_config("tiny") == Config()


def test_a_misspelled_key_beside_init_from_is_the_only_problem():
    """The model of the weights is not read then, and 8 does not divide the default's heads."""
    given = ["train.init_from=weights", "optimizer.learning_rat=1e-5", "--mesh", "1,1,8"]
    with pytest.raises(UsageError) as raised:
        parse_args(given, initial_model=lambda path, out: {"n_head": ["8"]})
    first, *_, corrected = str(raised.value).splitlines()
    assert first.startswith("optimizer.learning_rat: ") and "n_head" not in str(raised.value)
    assert "optimizer.learning_rate=1e-5" in corrected


def test_other_data_has_another_end_of_text_token(tmp_path):
    kept = tmp_path / "config.yaml"
    settings = ("data.dataset=a", "data.document_mask=True", "data.end_of_text=400")
    kept.write_text(load_config("tiny", *settings).to_yaml())
    given = ["--config", str(kept), "train.seed=7"]
    assert parse_args(given).data.end_of_text == 400
    assert parse_args([*given, "data.dataset=b"]).data.end_of_text is None
    assert parse_args([*given, "data.dataset=b", "data.end_of_text=0"]).data.end_of_text == 0


def test_a_configuration_survives_yaml_and_json():
    config = parse_args(["train.time_limit=1.5", "--train-range-to-skip", "3", "4"])
    assert config_from_dict(config.to_dict(), "test") == config


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1.0e+3"])
def test_a_whole_number_may_have_an_exponent(number, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(f"train: {{max_iters: {number}}}")
    from_file = load_config(str(file)).train.max_iters
    for given in (from_file, load_config("tiny", f"train.max_iters={number}").train.max_iters):
        assert given == 1000 and type(given) is int


@pytest.mark.parametrize("number", ["1.5", "1e-3", "1e400", "-1e3", "nan"])
def test_a_number_with_a_fraction_is_not_a_whole_number(number):
    with pytest.raises(UsageError, match="train.max_iters=.*: must be a whole number"):
        load_config("tiny", f"train.max_iters={number}")


def test_paths_and_numpy_numbers_are_valid_values():
    plain = load_config("tiny").replace(out="runs/a", train__seed=3)
    assert checked(plain.replace(out=Path("runs/a"), train__seed=np.int64(3))) == plain


def test_a_batch_size_per_device_counts_in_a_library_call_too():
    config = load_config("tiny").replace(
        parallel__mesh="2,1,1", train__batch_size_per_device=3, train__gradient_accumulation_steps=5
    )
    assert checked(config).train.batch_size == 2 * 3 * 5
    with pytest.raises(UsageError, match="number of devices is unknown"):
        checked(config.replace(parallel__mesh="-1,1,1"))


def test_a_yaml_file_in_a_folder_without_access_is_one_sentence(monkeypatch):
    def deny(path, **options):
        if path.name == "mine.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path, **options)

    monkeypatch.setattr(Path, "stat", deny)
    with pytest.raises(UsageError, match="config=closed/mine.yaml: no such file or preset"):
        load_config("closed/mine.yaml")


@pytest.mark.parametrize("key", ["out", "train.init_from"])
def test_a_folder_without_access_is_one_sentence(key, monkeypatch):
    def deny(path, **options):
        if "closed" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path, **options)

    monkeypatch.setattr(Path, "stat", deny)
    with pytest.raises(UsageError, match=f"{key}=closed: Permission denied; give a folder"):
        parse_args([f"{key}=closed"], initial_model=lambda path, out: Path(path).stat())


def test_an_existing_run_directory_brings_its_own_configuration(tmp_path):
    config = load_config("shakespeare_char_cpu", "train.max_iters=7")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = parse_args(["--out", str(tmp_path), "train.seed=3"])
    assert again.train.max_iters == 7
    assert again.train.seed == 3
    assert again.model == config.model


@pytest.mark.parametrize("wrong", ["many", "0"])
def test_a_wrong_value_that_nobody_gave_is_named_with_its_file(tmp_path, wrong):
    kept = tmp_path / "config.yaml"
    kept.write_text(load_config("tiny").to_yaml().replace("n_head: 4", f"n_head: {wrong}"))
    with pytest.raises(UsageError, match=rf"model.n_head={wrong}: must .* \(set in {kept}\)$"):
        parse_args(["--out", str(tmp_path)])
    with pytest.raises(UsageError, match=rf"^model.n_head={wrong}: must be [^(]*$"):
        parse_args(["--out", str(tmp_path), f"model.n_head={wrong}"])
    assert parse_args(["--out", str(tmp_path), "model.n_head=2"]).model.n_head == 2


def test_an_alias_in_yaml_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("model: &a {n_layer: 1}\ntrain: *a\n")
    with pytest.raises(UsageError, match=r"a.yaml: not readable as YAML \(it has an alias, "):
        load_config(str(tmp_path / "a.yaml"))


@pytest.mark.parametrize("text", ["!!timestamp soon", "!!int ''", "9999-99-99", "!!bool maybe"])
def test_a_value_that_yaml_cannot_convert_is_refused(tmp_path, text):
    (tmp_path / "a.yaml").write_text(f"train: {{seed: {text}}}\n")
    with pytest.raises(UsageError, match="a.yaml: not readable as YAML"):
        load_config(str(tmp_path / "a.yaml"))


def test_all_problems_of_a_file_and_a_command_line_are_listed(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {n_layers: 3, n_embd: big}\ntrain: 9\noptimiser: {beta1: 0.9}\n")
    with pytest.raises(UsageError) as error:
        parse_args(["--config", str(file), "train.seed=x", "--mehs", "1,2,1"])
    number = "must be a whole number, at least"
    assert str(error.value).splitlines() == [
        "6 problems",
        f"  {file}: model.n_layers: unknown key; did you mean model.n_layer?",
        f"  {file}: train=9: must be a section with lines such as `key: value`",
        f"  {file}: optimiser.beta1: unknown key; did you mean optimizer.beta1?",
        f"  model.n_embd=big: {number} 1 and less than 2^31 (set in {file})",
        "  --mehs: unknown key; did you mean --mesh?",
        f"  train.seed=x: {number} 0 and less than 2^31",
    ]
    with pytest.raises(UsageError) as error:  # the command line overrides model.n_embd
        parse_args(["--config", str(file), "model.n_embd=64"])
    assert "model.n_embd" not in str(error.value)


def test_null_in_yaml_is_an_empty_list_or_text(tmp_path):
    path = tmp_path / "null.yaml"
    path.write_text("data: {blend: null}\ntrain: {trackers: , sample_prompt: null}\n")
    config = parse_args(["--config", str(path), "data.path=x"], note=print)
    assert (config.data.blend, config.train.trackers, config.train.sample_prompt) == ((), (), "")


def test_a_section_with_no_lines_has_no_settings(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {n_layer: 3}\ntrain:\n  # seed: 3\n")
    config = parse_args(["--config", str(file)])
    assert (config.model.n_layer, config.train) == (3, Config().train)


@pytest.mark.parametrize("again", ["train:\n  seed: 3\n", "seed: 3\n"])
def test_a_key_that_is_there_twice_is_refused(tmp_path, again):
    file = tmp_path / "mine.yaml"
    file.write_text("seed: 1\n" * ("train" not in again) + "train:\n  max_iters: 7\n" + again)
    with pytest.raises(
        UsageError, match=rf"{file}: not .* \({again.partition(':')[0]} is given tw"
    ):
        parse_args(["--config", str(file)])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("config: llama-tiny", "config=llama-tiny: a file cannot extend a preset; copy"),
        ("out: runs/mine", "out=runs/mine: has no effect in a file; give --out"),
        ("out: null\nconfig: []\ntrain2: 1", "train2: unknown key"),
        ("parallel: {mesh: 2,4,1}", "parallel.4: unknown key; put quotes around values with com"),
        ("parallel: {mesh: 1,1,1}", "1 is given twice; put quotes around values with commas"),
    ],
)
def test_a_setting_that_a_file_cannot_have_is_reported_with_the_alternative(
    tmp_path, text, problem
):
    file = tmp_path / "mine.yaml"
    file.write_text(f"{text}\ntrain: {{batch_size: 8}}\n")
    with pytest.raises(UsageError) as caught:
        parse_args(["--config", str(file)])
    assert problem in str(caught.value)


def test_anothers_run_settings_do_not_bring_its_directory(tmp_path):
    config = load_config("tiny", f"--out={tmp_path}", "train.max_iters=7")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    again = parse_args(["--config", str(tmp_path / "config.yaml")])
    assert again.train.max_iters == 7
    assert again.out is None


def test_a_flag_takes_the_next_word_whatever_it_looks_like():
    config = parse_args(["--out", "runs/lr=0.001", "--train.sample_prompt", "x.y = 1"])
    assert config.out == "runs/lr=0.001"
    assert config.train.sample_prompt == "x.y = 1"


def test_nothing_after_the_equals_sign_is_an_empty_list():
    assert parse_args(["train.trackers=", "train_range_to_skip="]).train.trackers == ()


def test_a_file_is_a_configuration_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {max_iters: 3}\noptimizer: {learning_rate: 1e-3}\n")
    config = parse_args(["--config", str(file)])
    assert (config.train.max_iters, config.optimizer.learning_rate) == (3, 1e-3)
    file.write_text("compile_cache: off\nspike: {action: off}\nmodel: {bias: off}\n")
    config = parse_args(["--config", str(file)])  # YAML's off is False
    assert (config.compile_cache, config.spike.action, config.model.bias) == ("off", "off", False)
    home = Path.home()
    config = parse_args(["--config", str(file), "--out=~/run", "data.path=~/ds"])
    assert (config.out, config.data.path) == (f"{home}/run", f"{home}/ds")
    file.write_text("parallel: {mesh: [2, -1, 4]}\n")
    assert parse_args(["--config", str(file)]).parallel.mesh == "2,-1,4"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.n_layers=3"], ["model.n_layers", "did you mean model.n_layer?"]),
        (["--max-iter", "3"], ["--max-iter", "train.max_iters"]),
        (["model.n_layer=x"], ["model.n_layer=x", "whole number"]),
        (["optimizer.learning_rate=fast"], ["optimizer.learning_rate=fast", "a finite number"]),
        (["model.bias=maybe"], ["model.bias=maybe", "True or False"]),
        (["train.dtype=float16"], ["train.dtype=float16", "float16 needs loss scaling"]),
        (["parallel.zero_stage=5"], ["parallel.zero_stage=5", "0, 1, 2, 3"]),
        (["--mesh", "2,2"], ["parallel.mesh=2,2", "data,fsdp,tensor"]),
        (["--mesh", "-1,-1,1"], ["parallel.mesh=-1,-1,1", "at most one"]),
        (["--mesh", "1,1,3"], ["parallel.mesh=1,1,3", "model.n_head=4"]),
        (["--mesh", "5,1,1"], ["train.batch_size=24", "multiple of", "5"]),
        (["--mesh"], ["--parallel.mesh", "needs a value"]),
        (["--config", "nope"], ["config=nope", "shakespeare_char"]),
        (["train"], ["train", "section.key=value"]),
        (["=3"], ["=3", "section.key=value"]),
        ([""], ["''", "section.key=value"]),
        (["--train-range-to-skip", "1", "2", "3"], ["1 2 3", "pairs"]),
        (["--train-range-to-skip", "5", "2"], ["5 2", "first <= last"]),
        (
            ["--train-range-to-skip", "1", "2", "--train_range_to_skip=5", "6"],
            ["--train_range_to_skip=5", "given twice"],
        ),
        (["optimizer.warmup_iters=3000000000"], ["3000000000", "less than 2^31"]),
        (["model.vocab_size=9999999999999"], ["9999999999999", "less than 2^31"]),
        (["train.batch_size=100000000"], ["batch_size=100000000", "fewer than 2^31"]),
        (["out=~nosuchuser/x"], ["out=~nosuchuser/x", "no home directory"]),
        (["checkpoint.local=~nosuchuser/x"], ["checkpoint.local=~nosuchuser/x", "no home"]),
        (["out=~a\0b"], ["out='~a\\x00b'", "not a valid file name"]),
        (["--train-range-to-skip", "0", "2"], ["0 2", "1 <= first"]),
        (["train.gradient_accumulation_steps=5"], ["gradient_accumulation_steps=5", "24"]),
        (["model.n_head=3"], ["model.n_embd=128", "model.n_head=3"]),
        (["model.dropout=1.0"], ["model.dropout=1.0", "less than 1"]),
        (["--train-range-to-skip"], ["--train_range_to_skip", "needs a value"]),
        (["train.time_limit=inf"], ["train.time_limit=inf", "1000000"]),
        (["train.max_iters=0"], ["train.max_iters=0", "at least 1"]),
        (["optimizer.learning_rate=inf"], ["optimizer.learning_rate=inf", "finite"]),
        (["optimizer.learning_rate=nan"], ["optimizer.learning_rate=nan"]),
        (["--profile-steps", "12"], ["profile_steps=12", "A:B"]),
        (["--profile-steps", f"1:{'9' * 5000}"], ["profile_steps=1:9", "A:B"]),
        (["--profile-steps", "5:4"], ["profile_steps=5:4", "A <= B"]),
        (["--profile-steps", "290:301"], ["profile_steps=290:301", "train.max_iters=300"]),
        (["optimizer.min_lr=1"], ["optimizer.min_lr=1", "learning_rate"]),
        (
            ["optimizer.schedule=wsd", "optimizer.lr_decay_iters=60"],
            ["warmup_iters=50", "at most 48", "a fifth of", "=60", "wsd_decay_iters=10 or less"],
        ),
        (
            ["optimizer.schedule=wsd", "optimizer.wsd_decay_iters=260"],
            ["warmup_iters=50", "at most 40", "wsd_decay_iters=260", "wsd_decay_iters=250 or less"],
        ),
        (
            ["optimizer.schedule=wsd", "optimizer.wsd_decay_iters=301"],
            ["optimizer.wsd_decay_iters=301", "at most optimizer.lr_decay_iters=300"],
        ),
        (["optimizer.schedule=wsd", "optimizer.min_lr=1"], ["optimizer.min_lr=1", "learning_rate"]),
        (["optimizer.schedule=step"], ["optimizer.schedule=step", "cosine, linear, wsd, constant"]),
        (
            ["optimizer.name=muon", "optimizer.learning_rate=0", "optimizer.adamw_learning_rate=1"],
            ["optimizer.adamw_learning_rate=1.0", "learning_rate above 0"],
        ),
        (["spike.window=99999999"], ["spike.window=99999999", "at most 100000"]),
        (["spike.action=rewind", "checkpoint.interval=0"], ["checkpoint.interval=0", "rewind"]),
        (
            ["checkpoint.keep_every=100"],
            ["keep_every=100", "a multiple of checkpoint.interval=150"],
        ),
        (["checkpoint.keep_every=9", "checkpoint.interval=0"], ["keep_every=9", "interval=0"]),
        (["checkpoint.keep_best=1", "train.eval_interval=0"], ["keep_best=1", "eval_interval=0"]),
        (["checkpoint.keep_best=1", "train.eval_interval=70"], ["keep_best=1", "eval_interval=70"]),
        (["checkpoint.interval_minutes=0"], ["interval_minutes=0", "more than 0"]),
        (["checkpoint.local="], ["checkpoint.local=: is empty"]),
        (["--out", "model.n_layer=9"], ["out=model.n_layer=9: is a setting, not a path"]),
        (["parallel.offload=state"], ["parallel.offload=state", "parallel.scan_layers=True"]),
    ],
)
def test_a_mistake_is_one_sentence_with_key_value_and_remedy(arguments, words):
    with pytest.raises(UsageError) as error:
        parse_args(arguments)
    message, *correction = str(error.value).splitlines()
    assert not correction or correction[0].startswith("corrected command")
    for word in words:
        assert word in message


def test_a_dataset_that_a_path_replaces_is_mentioned():
    given = ["data.path=a", "data.dataset=b"]
    text = "data.dataset=b: has no effect, because data.path is given"
    notes = []
    parse_args(given, note=notes.append)
    assert notes == [text]
    with pytest.raises(UsageError, match=f"{text}; leave one"):
        override_data(load_config("tiny"), given)
    parse_args(["data.path=None", "data.dataset=b"], note=notes.append)
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("choice", "unused"),
    [
        ("schedule=constant", "min_lr=0"),
        ("schedule=constant", "lr_decay_iters=100"),
        ("schedule=cosine", "wsd_decay_iters=100"),
        ("schedule=linear", "wsd_decay_iters=100"),
        ("schedule=constant", "wsd_decay=sqrt"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(choice, unused):
    with pytest.raises(UsageError) as error:
        parse_args([f"optimizer.{choice}", f"optimizer.{unused}"])
    assert str(error.value) == (
        f"optimizer.{unused}: has no effect with optimizer.{choice}; leave it out"
    )


@pytest.mark.parametrize(
    "line",
    [
        # The preset's min_lr, which the schedule does not use, is above the learning rate.
        "--config gpt2 optimizer.schedule=constant optimizer.learning_rate=3e-5",
        "optimizer.schedule=constant optimizer.warmup_iters=300",
        "optimizer.schedule=wsd optimizer.wsd_decay_iters=250",  # all steps after warm-up
        "optimizer.name=muon optimizer.momentum=0 optimizer.adamw_learning_rate=3e-4",
        "optimizer.name=sgd optimizer.momentum=0 optimizer.schedule=wsd optimizer.wsd_decay=sqrt",
    ],
)
def test_a_setting_is_checked_where_it_is_used_only(line):
    parse_args(line.split())


def test_minus_one_fills_an_axis():
    config = load_config("tiny", "--mesh", "-1,2,4")
    assert mesh_shape(config, 16) == MeshShape(2, 2, 4)
    with pytest.raises(UsageError, match="does not divide the job's 12 devices"):
        mesh_shape(config, 12)


def test_the_mesh_must_have_the_devices():
    config = load_config("tiny", "--mesh", "2,1,4")
    with pytest.raises(UsageError, match="product is 8 but the job has 4"):
        mesh_shape(config, 4)


def test_rows_are_shared_out_by_microbatch():
    config = load_config("tiny", "train.gradient_accumulation_steps=4")
    check_batch(config, MeshShape(6))
    with pytest.raises(UsageError, match="4 microbatches"):
        check_batch(config, MeshShape(8))


def test_skip_ranges_come_in_pairs():
    config = parse_args(["--train-range-to-skip", "10", "20", "25", "30"])
    assert skip_ranges(config) == ((10, 20), (25, 30))


def test_every_key_has_a_line_of_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    config = load_config()
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                assert f"--{section.name}.{field.name}" in printed
        else:
            assert f"--{section.name}" in printed


def test_help_begins_with_examples_and_groups(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"])
    head = capsys.readouterr().out.partition("--config: ")[0]
    assert len(head.splitlines()) <= 40
    examples = [line for line in head.splitlines() if line.startswith(("  python", "  mpiexec"))]
    assert len(examples) == 5
    for name in ("shakespeare_char", "optimizer   Optimizer and learning-rate schedule"):
        assert name in head


def test_the_examples_in_help_are_valid():
    for line in help.USAGE.splitlines():
        if line.startswith(("  {prog} ", "  mpiexec")):
            parse_args(line.partition("{prog}")[2].split())


def test_help_for_one_group_shows_its_keys_only(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help", "spike"])
    printed = capsys.readouterr().out
    assert "--spike.window" in printed and "--model." not in printed
    for key, line in (
        ("spike.window", "--out runs/a --help spike.window model.n_layer"),
        ("out", "--help out"),
    ):
        with pytest.raises(SystemExit):
            parse_args(line.split())
        assert re.findall(r"--[\w.]+", capsys.readouterr().out) == [f"--{key}"]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("optimizr", "did you mean optimizer?"),
        ("optimizer.nam", "did you mean optimizer.name?"),
        ("zzz", "use one of checkpoint, data,"),
    ],
)
def test_help_for_an_unknown_group_is_a_mistake(word, hint, capsys):
    with pytest.raises(UsageError) as caught:
        parse_args(["--help", word])
    assert str(caught.value).startswith(f"--help {word}: unknown setting or group; {hint}")
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    "line", ["--help --config gpt2", "--config gpt2 --help", "--help gpt2", "-h model.n_layer=2"]
)
def test_help_works_anywhere_on_a_command_line(line, capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(line.split())
    assert end.value.code == 0 and "--model.n_layer" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "on_cpus", "on_gpus"), [("None", True, False), ("true", True, True), ("False", 0, 0)]
)
def test_layers_are_looped_over_where_it_is_asked_for_and_else_on_cpus(given, on_cpus, on_gpus):
    config = load_config("gpt2", f"parallel.scan_layers={given}")
    assert config.scans_layers(on_cpu=True) == on_cpus
    assert config.scans_layers(on_cpu=False) == on_gpus


@pytest.mark.parametrize("given", ["0", "-1", "1.5", pytest.param("9" * 5000, id="5000-digits")])
def test_an_option_that_is_not_a_whole_number_is_a_mistake(given):
    with pytest.raises(argparse.ArgumentTypeError, match="must be a whole number"):
        whole_number()(given)


def test_every_key_of_a_dict_is_checked():
    with pytest.raises(ValueError, match="mask\\? is 'a'"):
        check_shape({"mask?": "a"}, {str: int})
    check_shape({}, {"mask?": int})


def test_the_readme_s_key_has_bounds_and_help(tmp_path, monkeypatch):
    example = load_block("jaxgpt/config/README.md", "example_config", tmp_path).ExampleConfig
    kind = typing.get_type_hints(example, include_extras=True)["label_smoothing"]
    monkeypatch.setattr(help, "settings", lambda: {"example.label_smoothing": kind})
    (line, text) = help._entries(example, "example.", {})
    assert line.endswith("a finite number, at least 0 and less than 1 (default: 0.0)")
    assert text.strip() == (
        "Probability mass to spread evenly over all tokens; 0 disables label smoothing."
    )
    assert parse_value("example.label_smoothing", kind, ["0.1"]) == 0.1
    with pytest.raises(UsageError, match="example.label_smoothing=1: must be .* less than 1"):
        parse_value("example.label_smoothing", kind, ["1"])
