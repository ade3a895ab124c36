"""The pictures in the README: `python notebooks/gallery.py [spike] [memory] [report]`.

Without a name, all three pictures are drawn. This takes six minutes on two busy CPU cores. The
pictures are written to `gallery/` beside this file. Drawing them requires the `report` extra. The
picture `report` also requires a browser: `pip install playwright`, then `playwright install
chromium`.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "gallery"
GIB = 2**30
RUN = (
    "--config shakespeare_char_cpu data.dataset=python model.n_layer=2 model.n_embd=64 "
    "optimizer.learning_rate=0.005 optimizer.warmup_iters=5 train.max_iters=150 "
    "train.log_interval=1 train.eval_interval=50 train.eval_iters=2 train.sample_tokens=80 "
    "checkpoint.interval=20 checkpoint.keep=5"
).split()
SPIKE = (
    "--faults.random_tokens 76 79 spike.action=rewind spike.window=32 spike.loss_threshold=8 "
    "spike.rewind_margin=10 spike.skip_before=2 spike.skip_after=6"
).split()
PLAN = (
    "--config gpt-7b --device h100 train.batch_size=64 train.gradient_accumulation_steps=8 "
    "parallel.remat=full --json"
).split()
SCATTER = "parallel.reduce_every=microbatch"  # otherwise, fsdp does not shard accumulated gradients
STRATEGIES = {
    "data parallel\n(ZeRO 0)": "--mesh 8,1,1 parallel.zero_stage=0",
    "ZeRO 1": "--mesh 1,8,1 parallel.zero_stage=1",
    "ZeRO 2": f"--mesh 1,8,1 parallel.zero_stage=2 {SCATTER}",
    "ZeRO 3": f"--mesh 1,8,1 parallel.zero_stage=3 {SCATTER}",
    "tensor +\nsequence": "--mesh 1,1,8 parallel.sequence_parallel=True",
    "ZeRO 3 (4)\n+ tensor (2)": f"--mesh 1,4,2 parallel.sequence_parallel=True {SCATTER}",
    "pipeline\n(8 stages)": "--mesh stage=8",
}


def jaxgpt(command, *arguments):
    """Run a jaxgpt command, and return its stdout. Raise `CalledProcessError` if it fails."""
    words = [sys.executable, "-m", f"jaxgpt.{command}", *map(str, arguments)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw_spike(folder):
    """Train on random tokens in steps 76 to 79, and plot the losses before and after the rewind."""
    import matplotlib.pyplot as plt

    run = folder / "spike"
    jaxgpt("train", *RUN, *SPIKE, "--out", run)
    found = records(run)
    (rewind,) = (record for record in found if record["kind"] == "rewind")
    dropped = np.array(rewind["dropped_losses"], float)
    kept = [(r["step"], r["loss"]) for r in found if r["kind"] == "train"]
    first, last = rewind["skip"]
    _, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.axvspan(first - 0.5, last + 0.5, color="0.88", label=f"skipped: steps {first} to {last}")
    axes.plot(*dropped.T, color="#d55e00", lw=1.2, label="dropped by the rewind")
    axes.plot(*np.array(kept, float).T, color="#0072b2", lw=1.2, label="the run")
    back = rewind["dropped"][0] - 1
    axes.annotate(
        f"back to the checkpoint\nof step {back}", (back, dict(kept)[back]), (back - 28, 4.4),
        arrowprops={"arrowstyle": "->"},
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="loss, nats per token", title="A loss spike and the recovery")
    axes.legend(frameon=False)
    plt.savefig(FOLDER / "spike.png", dpi=110)


def draw_memory(_):
    """Draw the memory per GPU that `jaxgpt.plan` estimates for gpt-7b on 8 GPUs."""
    import matplotlib.pyplot as plt

    plans = [json.loads(jaxgpt("plan", *PLAN, *s.split())) for s in STRATEGIES.values()]
    parts = {
        "parameters": "#0072b2", "moments": "#56b4e9", "gradients": "#009e73",
        "activations_and_temporaries": "#e69f00",
    }  # fmt: skip
    _, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    bottom = np.zeros(len(plans))
    for part, color in parts.items():
        sizes = np.array([plan["memory"][part] for plan in plans]) / GIB
        axes.bar(list(STRATEGIES), sizes, 0.7, bottom, color=color, label=part.replace("_", " "))
        bottom += sizes
    capacity = plans[0]["memory"]["capacity"] / GIB
    axes.axhline(capacity, color="black", ls="--", lw=1)
    axes.text(len(plans) - 0.6, capacity + 2, f"usable on an H100: {capacity:.0f} GiB", ha="right")
    config = plans[0]["config"]
    rows, tokens = config["train"]["batch_size"], config["model"]["block_size"]
    title = f"gpt-7b on 8 GPUs, batch of {rows} x {tokens:,} tokens"
    axes.set(ylabel="GiB per GPU", title=title)
    axes.tick_params("x", labelsize=8)
    axes.legend(frameon=False)
    plt.savefig(FOLDER / "memory.png", dpi=110)


def draw_report(folder):
    """Write the report page of two runs, and take a screenshot of its top."""
    from playwright.sync_api import sync_playwright

    spike, plain, page = folder / "spike", folder / "plain", folder / "report.html"
    if not spike.exists():
        jaxgpt("train", *RUN, *SPIKE, "--out", spike)
    jaxgpt("train", *RUN, "optimizer.learning_rate=0.002", "--out", plain)
    jaxgpt("report", spike, plain, "-o", page)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        window = browser.new_page(viewport={"width": 1200, "height": 560})
        window.goto(page.as_uri())
        window.wait_for_selector(".bk-Figure")
        window.wait_for_timeout(1000)  # milliseconds, to let the page draw the panels
        window.screenshot(path=FOLDER / "report.png")
        browser.close()


PICTURES = {"spike": draw_spike, "memory": draw_memory, "report": draw_report}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[1:] or PICTURES:
            try:
                PICTURES[name](Path(scratch))
            except ModuleNotFoundError as error:
                package = error.name.partition(".")[0]
                source = "-e '.[report]'" if package == "matplotlib" else package
                sys.exit(f"error: {name}: needs {package}; pip install {source}")
            print(f"wrote {FOLDER / name}.png")
