"""Rewinds of a tiny model on four simulated devices, after a few steps of random tokens."""

import gc
import itertools
import json
import shutil
import time

import numpy as np
import pytest

from jaxgpt.cluster import shutdown as exits
from jaxgpt.config import UsageError, load_config
from jaxgpt.data.batch_sizes import BatchSizes
from jaxgpt.spikes import policy as rewinds
from jaxgpt.tracking.jsonl import read_records
from jaxgpt.train import loop, restart, setup
from jaxgpt.train.reporting.goodput import account, read_goodput
from jaxgpt.train.resume import ranges_to_skip
from jobs import SMALL, checkpoint_arrays, losses, records, run, train_here

# By step 36, the model has learned enough for random tokens (loss 8) to stand out.
POISONED = (
    *SMALL, "--mesh", "2,1,2", "model.n_layer=1", "model.n_embd=32", "optimizer.warmup_iters=2",
    "optimizer.learning_rate=0.01", "train.max_iters=60", "checkpoint.interval=10",
    "checkpoint.keep=10", "spike.window=16", "--faults.random_tokens", "36", "38",
)  # fmt: skip
REWIND = (
    "spike.action=rewind", "spike.rewind_margin=10", "spike.skip_before=2", "spike.skip_after=6",
)  # fmt: skip
TO, SKIP = 20, (34, 42)
RESTORED_AFTER = 2  # seconds


def train_to_the_end(out, *arguments):
    assert train_here(*POISONED, *arguments, "--out", out) == exits.DONE


@pytest.fixture(scope="module")
def rewound(tmp_path_factory):
    out, restore = tmp_path_factory.mktemp("runs") / "rewound", loop.Checkpoints.restore

    def restore_slowly(*arguments):
        time.sleep(RESTORED_AFTER)
        return restore(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Checkpoints, "restore", restore_slowly)
        train_to_the_end(out, *REWIND)
    return out


def numbers(out):
    """Return step -> loss from metrics.jsonl, in which no step may occur twice."""
    steps = [r["step"] for r in records(out)]
    assert steps == sorted(set(steps))
    return losses(out)


def assert_same_run(out, expected):
    assert numbers(out) == numbers(expected)
    a, b = checkpoint_arrays(out, 60), checkpoint_arrays(expected, 60)
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()
    (found,), (wanted,) = records(out, "rewind"), records(expected, "rewind")
    assert {**found, "dropped": None} == {**wanted, "dropped": None}


def test_a_rewound_run_goes_on_as_if_the_range_had_been_given_by_hand(rewound, tmp_path):
    out = tmp_path / "by_hand"
    train_to_the_end(out, "train.max_iters=20", "spike.action=log")
    by_hand = ("--train-range-to-skip", *map(str, SKIP))
    train_to_the_end(out, *by_hand, "spike.action=log")
    assert numbers(out) == numbers(rewound)
    assert [s for s, loss in numbers(rewound).items() if loss is None] == list(range(34, 43))
    a, b = checkpoint_arrays(out, 60), checkpoint_arrays(rewound, 60)
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()


def test_what_was_dropped_is_on_record(rewound):
    (record,) = records(rewound, "rewind")
    assert record["step"] == TO and record["spike"] == 36 and record["cause"] == "loss"
    assert record["skip"] == list(SKIP)
    assert record["dropped"] == [21, 36]
    assert [step for step, _ in record["dropped_losses"]] == list(range(21, 37))
    assert record["loss"] > record["limit"] > record["median"]
    worst = [row["loss"] for row in record["rows"]]
    assert len(worst) == 8 and worst == sorted(worst, reverse=True)
    log = (rewound / "train.log").read_text()
    assert "warning: injected faults: random_tokens=(36, 38)" in log
    assert "rewound to step 20 because of the spike at step 36" in log


def test_going_back_is_not_in_the_time_of_the_next_step(rewound):
    first, *_ = (r for r in records(rewound) if r["step"] == TO + 1)
    assert first["dt"] < RESTORED_AFTER


def test_what_was_dropped_counts_as_lost_and_going_back_as_restoring(rewound):
    found = read_goodput(rewound)
    jumps = [(a.step, b.after) for a, b in itertools.pairwise(found) if a.step != b.after]
    assert jumps == [(36, TO)] and found[-1].step == 60
    dropped = 0.0
    for record in found[: [r.after for r in found].index(TO)]:
        n_dropped = record.step - max(record.after, TO)
        if n_dropped > 0:
            dropped += record.seconds["step"] * n_dropped / (record.step - record.after)
    total = account(found)
    assert total["lost"] == pytest.approx(dropped) and dropped > 0
    assert total["state"] > RESTORED_AFTER


def test_tensorboard_shows_no_step_twice_after_a_rewind(rewound):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(rewound / "tensorboard"))
    events.Reload()
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert len(events.Scalars("train/loss")) == len(shown)
    logged = {step: loss for step, loss in losses(rewound).items() if loss is not None}
    assert shown == pytest.approx(logged)
    assert [e.step for e in events.Tensors("rewind/text_summary")] == [TO]
    assert [e.step for e in events.Scalars("spikes/skipped")] == list(range(34, 43))
    for tag in events.Tags()["scalars"]:
        steps = [e.step for e in events.Scalars(tag)]
        assert steps == sorted(set(steps)), tag


@pytest.mark.long
def test_skip_update_does_what_a_range_given_by_hand_would(tmp_path):
    action, end = "spike.action=skip_update", ("train.max_iters=45", "train.log_interval=20")
    train_to_the_end(tmp_path / "found", action, *end)
    by_hand = ("--train-range-to-skip", "36", "38")
    train_to_the_end(tmp_path / "by_hand", action, *end, *by_hand)
    spikes = records(tmp_path / "found", "spike")
    assert [(r["step"], r["action"]) for r in spikes] == [(s, "skip_update") for s in (36, 37, 38)]
    a, b = (checkpoint_arrays(tmp_path / name, 45) for name in ("found", "by_hand"))
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()


def empty_numbers(state):
    """Empty the files that contain the arrays of a checkpoint."""
    for part in state.glob("**/d/*"):
        part.write_bytes(b"")


class Killed(Exception):
    pass


@pytest.mark.long  # test_spikes.py has a short version with several processes
@pytest.mark.parametrize(
    "place",
    ["restore_state", "commit_rewind", "truncate_metrics", "finish_rewind", "skip range"],
)
def test_killed_in_the_middle_a_run_ends_the_same(rewound, tmp_path, place, monkeypatch):
    """The run is killed before and after the restore, during the commit, and later."""

    made = []

    class Checkpoints(loop.Checkpoints):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    def killed(*args, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Checkpoints", Checkpoints)
        if place == "skip range":
            step = setup.Reporter.step
            patch.setattr(
                setup.Reporter,
                "step",
                lambda self, number, *rest: (
                    killed() if number == 38 and rest[0] is None else step(self, number, *rest)
                ),
            )
        else:
            patch.setattr(rewinds if place == "truncate_metrics" else restart, place, killed)
        with pytest.raises(Killed):
            train_here(*POISONED, *REWIND, "--out", tmp_path)
    made[0].close()  # if a process had been killed, its threads would have ended, too
    gc.collect()  # ends Orbax's event loop now, because that would break parsing in Python 3.11
    is_committed = place not in ("restore_state", "commit_rewind")
    assert (tmp_path / "rewinds.json").exists() == is_committed
    assert train_here("--out", tmp_path, *POISONED, *REWIND) == exits.DONE
    assert_same_run(tmp_path, rewound)


def decided(directory, saved, *settings, step=36, batch_size=12):
    config = load_config("tiny", *REWIND, "checkpoint.interval=10", *settings)
    spike = {"kind": "spike", "step": step, "action": "rewind", "cause": "loss", "loss": 8.0}
    spike |= {"grad_norm": 1.0, "rows": []}
    sizes = BatchSizes([(1, batch_size)])
    config = config.replace(train__batch_size=batch_size)
    return rewinds.decide_rewind(config, directory, saved, spike, step + 1, sizes)


def test_a_batch_size_changed_after_a_rewind_skips_the_same_sequences(tmp_path):
    rewind = decided(tmp_path, [10, 20, 30])
    assert (rewind["to"], rewind["skip"]) == (20, list(SKIP))
    rewinds.commit_rewind(tmp_path, rewind, 20)
    before = BatchSizes([(1, 12)])
    assert rewinds.skipped_by_rewinds(tmp_path, before) == [SKIP]
    after = before.change_after(20, 24)  # 240 sequences up to step 20, then 24 per step
    bad = range(33 * 12, 42 * 12)  # the sequences of steps 34 to 42
    rewound = rewinds.skipped_by_rewinds(tmp_path, after)
    expected = 20 + 1 + (bad[0] - 240) // 24, 20 + 1 + (bad[-1] - 240) // 24
    assert rewound == [expected]
    # A checkpoint saved after the rewind has its range with the old steps.
    saved = load_config("tiny", "--train-range-to-skip", "3", "4", *map(str, SKIP))
    skip, warnings = ranges_to_skip([], rewound, 24, {"config": saved.to_dict()})
    assert (skip, warnings) == ((3, 4, *expected), [])


def test_without_a_regular_checkpoint_a_rewind_uses_another(tmp_path):
    """checkpoint.interval has changed from 10 to 15, and a signal caused the save at step 25."""
    assert decided(tmp_path, [10, 20, 25, 30], "checkpoint.interval=15")["to"] == 25
    assert decided(tmp_path, [15, 20, 25, 30], "checkpoint.interval=15")["to"] == 15
    assert decided(tmp_path, [5], "checkpoint.interval=26")["to"] == 5  # due at step 26
    with pytest.raises(rewinds.NoRewind, match="no checkpoint at or before step 26"):
        decided(tmp_path, [30], "checkpoint.interval=15")


def test_an_interrupted_rewind_that_goes_further_back_keeps_all_dropped_losses(tmp_path):
    """The checkpoint of step 20 was damaged after the first commit."""
    lines = [{"kind": "train", "step": s, "loss": 1 / s, "skipped": False} for s in range(1, 38)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewinds.commit_rewind(tmp_path, decided(tmp_path, [10, 20]), 20)
    rewinds.commit_rewind(tmp_path, rewinds.pending_rewind(tmp_path), 10)
    (record,) = records(tmp_path, "rewind")
    assert record["step"] == 10 and record["dropped"] == [11, 37]
    assert record["dropped_losses"] == [[s, 1 / s] for s in range(11, 38)]


def test_a_rewind_to_a_damaged_checkpoint_goes_further_back(rewound, tmp_path, monkeypatch):
    """The target of a rewind is read before newer checkpoints are removed."""
    decide, restore, seen = restart.decide_rewind, loop.Checkpoints.restore, []

    def rewind_to_damage(config, directory, *rest):
        empty_numbers(directory / "checkpoints" / "20" / "state")
        return decide(config, directory, *rest)

    def restored(checkpoints, step, *rest):
        seen.append((step, (tmp_path / "checkpoints" / "30").exists()))
        return restore(checkpoints, step, *rest)

    monkeypatch.setattr(restart, "decide_rewind", rewind_to_damage)
    monkeypatch.setattr(loop.Checkpoints, "restore", restored)
    train_to_the_end(tmp_path, *REWIND)
    assert seen == [(20, True), (10, True)]
    assert numbers(tmp_path) == numbers(rewound)
    (record,) = records(tmp_path, "rewind")
    assert (record["step"], record["dropped"], record["skip"]) == (10, [11, 36], list(SKIP))
    assert [step for step, _ in record["dropped_losses"]] == list(range(11, 37))
    (damage,) = records(tmp_path, "damage")
    assert damage["step"] == 10 and damage["path"].endswith("20.damaged")


@pytest.mark.long
def test_what_a_signal_saved_does_not_decide_where_a_run_goes_back_to(rewound, tmp_path):
    keep = "checkpoint.keep=2"
    for stop_at in (22, 26):
        assert train_here(*POISONED, *REWIND, keep, "--out", tmp_path, stop_at=stop_at) == 75
    train_to_the_end(tmp_path, *REWIND, keep)
    assert_same_run(tmp_path, rewound)


@pytest.mark.long
def test_without_a_checkpoint_so_old_a_run_begins_anew(tmp_path):
    more = ("checkpoint.interval=30", "spike.rewind_margin=20", "train.log_interval=25")
    train_to_the_end(tmp_path, *REWIND, *more)
    (record,) = records(tmp_path, "rewind")
    # Between two log lines, a spike is detected while the next step is running.
    assert record["step"] == 0 and record["dropped"] == [1, 37]
    assert list(numbers(tmp_path)) == [25, *range(34, 43), 50, 60]
    assert not (tmp_path / "metrics.jsonl.old").exists()
    settings = (*POISONED, *REWIND, *more, "--out", tmp_path / "stopped")
    assert train_here(*settings, stop_at=37) == exits.STOPPED
    log = (tmp_path / "stopped" / "train.log").read_text()
    assert "stopped by the test and rewound to the start; the same command" in log


def test_after_so_many_rewinds_it_stops_with_a_report(tmp_path, capsys):
    arguments = (*POISONED, *REWIND, "spike.max_rewinds=1", "spike.skip_after=0", "--out", tmp_path)
    assert train_here(*arguments) == exits.FAILED
    printed = capsys.readouterr().out
    assert "spike.max_rewinds=1: step 37 spiked again" in printed
    assert "Spikes, skips and rewinds" in printed and "rewound to step 20" in printed
    assert [r["spike"] for r in records(tmp_path, "rewind")] == [36]
    assert [r["step"] for r in records(tmp_path, "spike") if r["cause"] == "loss"] == [37]
    arguments = (*arguments, "spike.max_rewinds=2")
    for lost in ("meta", "."):  # a run cannot go back to a damaged checkpoint, either
        for step in (10, 20):
            shutil.rmtree(tmp_path / "checkpoints" / str(step) / lost)
        assert train_here(*arguments) == exits.FAILED
        assert "no checkpoint at or before step 27; continue with" in capsys.readouterr().out
        assert (tmp_path / "checkpoints" / "30" / "meta").exists()


def test_too_many_steps_that_are_not_finite_stop_the_run_with_a_good_checkpoint(tmp_path, capsys):
    fault = ("faults.nan_step=12", "faults.nan_device=3", "spike.max_consecutive_nonfinite=1")
    train = ("train.log_interval=5", "checkpoint.interval=11")
    assert train_here(*POISONED, *fault, *train, "--out", tmp_path) == exits.FAILED
    lines = capsys.readouterr().out.splitlines()
    (line,) = (
        line for line in lines if line.startswith("error: spike.max_consecutive_nonfinite=1")
    )
    assert "in 1 consecutive step, up to step 12; lower optimizer.learning_rate" in line
    assert all(np.isfinite(array).all() for array in checkpoint_arrays(tmp_path, 15).values())
    (spike,) = records(tmp_path, "spike")
    assert spike["step"] == 12 and spike["cause"] == "nonfinite" and spike["nonfinite"]
    count = [a for name, a in checkpoint_arrays(tmp_path, 15).items() if "count" in name]
    assert count == [14]


@pytest.mark.parametrize("damaged", ["", "x", '{"a": 1}', "[{}]"])
def test_damaged_rewinds_are_named(tmp_path, damaged):
    (tmp_path / "rewinds.json").write_text(damaged)
    with pytest.raises(UsageError, match=r"rewinds.json: is damaged .*--train-range-to-skip"):
        train_here(*POISONED, "--out", tmp_path)


def test_skipped_steps_do_not_make_a_saved_state_another_one(tmp_path):
    fault = ("faults.nan_step=15", "spike.max_consecutive_nonfinite=1")
    train = ("train.log_interval=5", "checkpoint.interval=11", "--train-range-to-skip", "12", "14")
    assert train_here(*POISONED, *fault, *train, "--out", tmp_path) == exits.FAILED
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["11"]


@pytest.mark.long
def test_a_run_that_cannot_go_on_does_not_replace_its_good_checkpoints(tmp_path, capsys):
    lost = ("optimizer.learning_rate=1e18", "optimizer.warmup_iters=0", "train.log_interval=1")
    settings = (*POISONED, *lost, "spike.max_consecutive_nonfinite=3", "--out", tmp_path)
    found = []
    for _ in range(3):
        assert train_here(*settings) == exits.FAILED
        assert "the loss or gradient was not finite in " in capsys.readouterr().out
        found.append(sorted(p.name for p in (tmp_path / "checkpoints").iterdir()))
    assert found[0] == found[1] == found[2] != []


def test_the_device_of_a_rehearsed_fault_has_to_be_there(tmp_path):
    fault = ("faults.nan_step=2", "faults.nan_device=4")
    with pytest.raises(UsageError, match="faults.nan_device=4: the mesh has 4 devices"):
        train_here(*POISONED, *fault, "--out", tmp_path)


def test_spikes_are_recorded_whatever_the_interval_of_the_log(tmp_path):
    train_to_the_end(tmp_path, "train.log_interval=25", "train.max_iters=42")
    found = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "spike"]
    assert [r["step"] for r in found if r["cause"] == "loss"][:2] == [36, 37]
    assert {r["action"] for r in found} == {"log"}


@pytest.mark.long
def test_tiny_shakespeare_gets_over_a_poisoned_stretch(tmp_path, shakespeare):
    """Train nanoGPT's CPU example with twenty steps of random tokens in the middle."""
    poison = ("--faults.random_tokens", "1000", "1019")
    rewind = ("spike.action=rewind",)
    found = {}
    for name, arguments in {
        "clean": (), "rewind": (*poison, *rewind), "again": (*poison, *rewind),
        "skip": (*poison, "spike.action=skip_update"), "off": (*poison, "spike.action=off"),
    }.items():  # fmt: skip
        out = tmp_path / name
        job = run(
            "train", "--config", "shakespeare_char_cpu", "train.sample_tokens=0", *arguments,
            "--out", out, timeout=3600,
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
        found[name] = records(out, "eval")[-1]["val_loss"]
        print(f"{name}: val loss {found[name]:.4f}")
    assert records(tmp_path / "clean", "spike") == []
    (record,) = records(tmp_path / "rewind", "rewind")
    assert record["spike"] == 1000 and record["dropped"][1] <= 1002
    assert found["rewind"] == pytest.approx(found["clean"], abs=0.02)
    assert found["skip"] == pytest.approx(found["clean"], abs=0.02)
    a, b = (checkpoint_arrays(tmp_path / name, 2000) for name in ("rewind", "again"))
    assert all((a[name] == b[name]).all() for name in b) and a.keys() == b.keys()
    assert losses(tmp_path / "rewind") == losses(tmp_path / "again")
