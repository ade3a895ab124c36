from jobs import SMALL, run


def test_two_devices_of_a_process_do_not_wait_for_each_other(tmp_path):
    """There are more steps and evaluation batches than XLA allows in flight."""
    options = ("--mesh", "2,1,1", "model.n_layer=1", "train.max_iters=120")
    often = ("train.log_interval=120", "train.eval_iters=60")
    job = run("train", *SMALL, *options, *often, "--out", tmp_path / "run", timeout=120)
    assert job.returncode == 0, job.stdout
