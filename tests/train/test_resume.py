"""Optimizer settings that change when a run resumes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxgpt.config import UsageError, load_config
from jaxgpt.train.resume import check_resume, ranges_to_skip, rate_after_decay, rate_in_warmup
from jobs import SMALL, train_here

DATA = SimpleNamespace(sources=[SimpleNamespace(entry=None)], fingerprints=[], tokenizer_meta=None)


def notes(before, after, forget=()):
    """Return the lines of `check_resume` for a checkpoint that was saved with other settings."""
    saved = load_config("tiny", *before).to_dict()
    for key in forget:
        del saved["optimizer"][key]
    meta = {"config": saved, "data_fingerprint": [], "tokenizer": None}
    return check_resume(load_config("tiny", *after), Path("run"), 5, meta, DATA)


def test_another_optimizer_is_refused(tmp_path):
    settings = (*SMALL, "model.n_layer=1", "train.max_iters=1", "--mesh", "1,1,1")
    assert train_here(*settings, "--out", tmp_path) == 0
    with pytest.raises(UsageError) as error:
        train_here("--out", tmp_path, "train.max_iters=2", "optimizer.name=muon")
    assert str(error.value) == (
        f"optimizer.name=muon: {tmp_path}/checkpoints/1 was trained with optimizer.name=adamw; "
        "use that value, or another run directory"
    )


@pytest.mark.parametrize(("then", "now"), [("0", "0.9"), ("0.9", "0")])
def test_momentum_that_sgd_has_no_state_for_is_refused(then, now):
    sgd = "optimizer.name=sgd"
    with pytest.raises(UsageError, match=f"optimizer.momentum={float(now)}: .*{float(then)}; use"):
        notes((sgd, f"optimizer.momentum={then}"), (sgd, f"optimizer.momentum={now}"))


@pytest.mark.parametrize(
    ("name", "then", "now"), [("sgd", 0.9, 0.8), ("muon", 0.95, 0.0), ("muon", 0.0, 0.9)]
)
def test_another_momentum_with_the_same_state_is_said(name, then, now):
    name = f"optimizer.name={name}"
    (line,) = notes((name, f"optimizer.momentum={then}"), (name, f"optimizer.momentum={now}"))
    assert line == f"changed since step 5: optimizer.momentum={now} (was {then})"


def test_another_schedule_is_said():
    (line,) = notes((), ("optimizer.schedule=wsd", "optimizer.wsd_decay_iters=9"))
    assert line == (
        "changed since step 5: optimizer.schedule=wsd (was cosine), "
        "optimizer.wsd_decay_iters=9 (was None)"
    )


@pytest.mark.parametrize(
    ("now", "rate"),
    [
        ((), "0.0003"),  # a tenth of the peak of tiny
        (("optimizer.min_lr=1e-5", "optimizer.schedule=wsd"), "1e-05"),
    ],
)
def test_a_run_that_is_longer_than_its_decay_says_its_learning_rate(now, rate):
    config = load_config("tiny", "train.max_iters=550", *now)
    (line,) = rate_after_decay(config, None)
    assert line == (
        "train.max_iters=550 exceeds optimizer.lr_decay_iters=300: the learning rate is "
        f"{rate} from step 300 on; to let it decay until the end, set optimizer.lr_decay_iters=550"
    )
    (line,) = rate_after_decay(config, 299)
    # Step 300 is the middle of a cosine from step 50 to 550; wsd still has its peak.
    peak = "0.003" if now else "0.00165"
    assert line.endswith(f"optimizer.lr_decay_iters=550, which makes it {peak} at step 300")


def test_a_decay_within_warmup_ends_one_step_after_it():
    (line,) = rate_after_decay(
        load_config("tiny", "train.max_iters=60", "optimizer.lr_decay_iters=10"), None
    )
    assert "lr_decay_iters=10: the learning rate is 0.0003 from step 51 on" in line


@pytest.mark.parametrize(
    "now",
    [
        ("train.max_iters=300",),
        ("train.max_iters=400", "optimizer.lr_decay_iters=400"),
        ("train.max_iters=400", "optimizer.schedule=constant"),
        ("train.max_iters=30", "optimizer.lr_decay_iters=10"),  # warm-up takes 50 steps
    ],
)
def test_a_run_within_its_decay_does_not(now):
    assert rate_after_decay(load_config("tiny", *now), 100) == []


def test_an_old_checkpoint_was_trained_with_the_defaults_of_newer_keys():
    keys = ("schedule", "momentum", "adamw_learning_rate", "wsd_decay", "wsd_decay_iters")
    assert notes((), (), forget=keys) == []


def test_fine_tuning_that_ends_during_warmup_says_its_learning_rate():
    words = ("tiny", "optimizer.learning_rate=1e-4", "optimizer.warmup_iters=50")
    config = load_config(*words).replace(train__init_from="weights", train__max_iters=10)
    assert rate_in_warmup(config) == [
        "train.max_iters=10 is less than optimizer.warmup_iters=50: the learning rate reaches only "
        "2e-05; to reach 0.0001, lower optimizer.warmup_iters"
    ]
    assert rate_in_warmup(config.replace(train__max_iters=50)) == []
    assert rate_in_warmup(config.replace(train__init_from=None)) == []


def test_a_skipped_range_that_is_no_longer_given_ends_at_the_checkpoint():
    saved = load_config("tiny", "--train-range-to-skip", "3", "4", "20", "30", "40", "50")
    meta = {"config": saved.to_dict()}
    assert ranges_to_skip([], [], 24, meta) == ((3, 4, 20, 24), [])
    assert ranges_to_skip([(20, 30)], [], 24, meta) == ((3, 4, 20, 30), [])
