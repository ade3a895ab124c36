"""`python -m jaxgpt.replay` repeats steps of a finished run."""

import json
import random

import pytest

from jaxgpt.config import UsageError
from jaxgpt.replay import read_history
from jobs import FIVE_AXES, SMALL, records, run

# At a learning rate of 0.01, rounding errors grow by over 100,000 in the gradient norm of step 37.
RUN = (
    *SMALL, *FIVE_AXES, "model.n_embd=32", "train.max_iters=40", "checkpoint.interval=10",
    "checkpoint.keep=9",
    "optimizer.warmup_iters=2", "optimizer.learning_rate=0.005", "spike.action=rewind",
    "spike.window=16", "spike.rewind_margin=10", "spike.skip_before=2", "spike.skip_after=1",
    "--faults.random_tokens", "26", "27", "--train-range-to-skip", "12", "13",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a skip, a rewind, and a restart on another mesh."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    for settings in (("--mesh", "2,1,2", "train.max_iters=20"), ()):
        job = run("train", *RUN, *settings, "--out", out)
        assert job.returncode == 0, job.stdout
    assert len(records(out, "rewind")) == 1
    return out


def replayed(out, *arguments):
    job = run("replay", "--run", out, "--step", *arguments)
    return job.returncode, job.stdout


def test_steps_agree_bit_for_bit_where_they_were_trained(finished):
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    for steps, mesh in (((5, 10), "data=2 fsdp=1 tensor=2"), ((14, 23, 40), "stage=2")):
        status, said = replayed(finished, *steps)
        assert status == 0, said
        lines = said.splitlines()
        assert len(lines) == len(steps)
        assert all(line.startswith("agrees bit for bit: step") for line in lines), said
        assert all(mesh in line for line in lines), said
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


@pytest.mark.long
def test_twenty_steps_drawn_at_random_agree(finished):
    trained = [r["step"] for r in records(finished) if not r["skipped"]]
    steps = random.Random(0).sample(trained, 20)
    for mesh in ((), ("--mesh", "1,1,2")):
        status, said = replayed(finished, *steps, *mesh)
        assert status == 0 and said.count("agrees ") == 20, said


def test_on_another_mesh_they_agree_to_rounding(finished):
    status, said = replayed(finished, 9, "--mesh", "4,1,1")
    assert status == 0 and "agrees up to rounding (the run had mesh data=2" in said, said


def test_hundreds_of_steps_do_not_deadlock_cpu_devices(tmp_path):
    settings = ("model.n_embd=8", "model.n_head=1", "model.block_size=16", "train.batch_size=4")
    length = ("train.max_iters=300", "train.log_interval=100", "--mesh", "4,1,1")
    job = run("train", *SMALL, *settings, *length, "--out", tmp_path / "run")
    assert job.returncode == 0, job.stdout
    job = run("replay", "--run", tmp_path / "run", "--step", "300", timeout=100)
    assert job.returncode == 0, job.stdout


def changed(run, name, step, change):
    """Change a recorded metric of a step."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        record = json.loads(line)
        if record["kind"] == "train" and record["step"] == step:
            lines[number] = json.dumps({**record, name: record[name] + change})
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def with_checkpoint_10(finished, tmp_path):
    """The same run, of which only the checkpoint before the rewind is left."""
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    for path in finished.iterdir():
        if path.name != "checkpoints":
            (run / path.name).symlink_to(path)
    (run / "checkpoints" / "10").symlink_to(finished / "checkpoints" / "10")
    return run


def test_a_line_that_was_changed_is_found(with_checkpoint_10):
    """All other steps agree, although the checkpoint does not know what the rewind skipped."""
    (rewind,) = records(with_checkpoint_10, "rewind")
    assert rewind["step"] == 10 and rewind["skip"][0] > 20
    changed(with_checkpoint_10, "loss", 36, 1e-6)
    status, said = replayed(with_checkpoint_10, 38)
    assert status == 1, said
    assert said.startswith("differs: step 38 from checkpoint 10") and "step 36: loss was" in said


def test_a_step_whose_settings_no_checkpoint_has_is_refused(with_checkpoint_10):
    read_history(with_checkpoint_10, [38])
    changed(with_checkpoint_10, "lr", 37, 1e-5)
    words = "--step 38: no checkpoint has the settings of step 37, which had a learning rate of 0"
    with pytest.raises(UsageError, match=words):
        read_history(with_checkpoint_10, [9, 38])
    read_history(with_checkpoint_10, [9, 36])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["99"], "--step 99: the run ends at step 40; choose"),
        (["13"], "--step 13: was skipped; choose 11 or 14"),
        (["0"], "at least 1"),
    ],
)
def test_bad_input_is_one_sentence(finished, arguments, words):
    status, said = replayed(finished, *arguments)
    assert status == 2 and words in said and "Traceback" not in said
