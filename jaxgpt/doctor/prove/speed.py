"""Speed of the presets, alone and beside nanoGPT, and the most expensive operations of a step."""

from collections.abc import Sequence
from pathlib import Path

from jaxgpt.config import DataConfig
from jaxgpt.data.dataset import dataset_directory
from jaxgpt.doctor.prove.check import Check, Missing
from jaxgpt.perf.roofline import Work
from jaxgpt.tracking.jsonl import read_records

ROOT = Path(__file__).parents[3]
ON_CPU = (
    "--steps", "1", "model.block_size=64", "train.gradient_accumulation_steps=1",
    "train.dtype=float32",
)  # fmt: skip
GPT2_ON_CPU = (*ON_CPU, "model.n_layer=2", "train.batch_size=2")
GPT2_XL_ON_CPU = (*ON_CPU, "model.n_layer=1", "train.batch_size=1")
GPT2_XL_ON_GPU = ("train.batch_size=96", "train.gradient_accumulation_steps=8")
NANOGPT_ON_GPU = {
    "gpt2": ("--compile", "--steps", "2", "train.gradient_accumulation_steps=20"),
    "shakespeare_char": ("--compile", "--steps", "200", "train.dtype=bfloat16"),
}
NANOGPT_ON_CPU = {
    "shakespeare_char_cpu": ("--rounds", "8"),
    "shakespeare_char": ("--steps", "1", "--rounds", "5"),
}


def gpt2(check: Check) -> None:
    words = ("--steps", "2") if check.on_gpu else GPT2_ON_CPU
    add_speed(check, "gpt2", words, {"tokens/s": 470_000}, source="llm.c: 468,000 on an H100")


def gpt2_xl(check: Check) -> None:
    words = GPT2_XL_ON_GPU if check.on_gpu else GPT2_XL_ON_CPU
    add_speed(check, "gpt2-xl", words, {"MFU": 0.55}, source="llm.c: 49 %")


def add_speed(
    check: Check, config: str, words: Sequence[str], goals: dict[str, float], source: str
) -> None:
    """Add the result of `bench step`; the goals apply to a GPU."""
    found = check.json("jaxgpt.bench", "step", "--config", config, *words)
    goals = goals if check.on_gpu else {}
    for name, value, unit, note in (
        ("tokens/s", found["tokens_per_sec"], "", found["data"]),
        ("time of a step", 1e3 * found["seconds_per_step"]["median"], "ms", ""),
        ("MFU", found["mfu"], "%", "" if found["mfu"] else "the peak is not known"),
        ("share of the largest matrix product's rate", found["share_of_matmul"], "%", ""),
        ("attention", found["attention"], "", ""),
        ("attention kernels in the compiled step", found["attention_kernels"], "", ""),
    ):
        check.add(name, value, unit, note, at_least=goals.get(name), source=source)


def nanogpt(check: Check) -> None:
    """Compare with nanoGPT, in turns, from the same weights on the same batches."""
    script, clone = ROOT / "tests/peers/nanogpt.py", check.options.nanogpt
    if not script.exists():
        raise Missing("the comparison scripts: run from a clone of jaxgpt")
    if clone is None or not (clone / "model.py").exists():
        raise Missing("a clone of nanoGPT: give it with --nanogpt DIR")
    beside = ("--repo", str(clone), "--torch", check.options.torch)
    for config, words in (NANOGPT_ON_GPU if check.on_gpu else NANOGPT_ON_CPU).items():
        found = check.json(str(script), *beside, "--config", config, *words)
        note = f"losses differ by {found['loss_difference']:.1g}"
        goal = 1.15 if config == "gpt2" else 1.5
        check.add(config, found["ratio"], "x", note, at_least=goal, source="nanoGPT")


def profile(check: Check) -> None:
    """List the most expensive operations of a gpt2 step, and what each loses to its roofline."""
    words = ("--steps", "3") if check.on_gpu else GPT2_ON_CPU
    trace = ("--profile", str(check.folder / "trace"))
    step = check.json("jaxgpt.bench", "step", "--config", "gpt2", *words, *trace)
    found, peak = step["profile"], step["matmul_flops_per_sec"]["median"]
    bandwidth, lost = check.json("jaxgpt.doctor.prove.machine")["copy_rate"], 0.0
    for category, seconds in found["categories"].items():
        if seconds:
            check.add(f"share of {category}", seconds / found["device_seconds"], "%")
    for operation in found["operations"]:
        note = f"{operation['category']}, {operation['source']}"
        if operation["work"]:
            least = Work(**operation["work"]).least_seconds(bandwidth, peak)
            lost += max(0.0, operation["seconds"] - least)
            note += f"; {1e3 * least:.3g} ms by its bytes and FLOPs"
        check.add(operation["name"], 1e3 * operation["seconds"], "ms", note)
    roofs = "the roofs: this device's copy rate, and its fastest matrix product"
    check.add("these operations beyond their rooflines", 1e3 * lost, "ms", roofs)


def shakespeare(check: Check) -> None:
    """Train a small preset to its end on a GPU, and for 250 steps on a CPU."""
    gpu = ("--config", "shakespeare_char", "train.dtype=bfloat16")
    cpu = ("--config", "shakespeare_char_cpu", "train.max_iters=250", "train.eval_iters=5")
    words = (*(gpu if check.on_gpu else cpu), *shakespeare_data(check), "train.sample_tokens=0")
    check.run("jaxgpt.train", *words, "--out", str(check.folder / "run"))
    records = read_records(check.folder / "run" / "metrics.jsonl", "eval")
    best = min(r["val_loss"] for r in records if r["val_loss"] is not None)
    goal = 1.48 if check.on_gpu else None
    check.add("best validation loss", best, at_most=goal, source="nanoGPT: 1.47")


def shakespeare_data(check: Check) -> list[str]:
    """Return the settings for Tiny Shakespeare, or for the `python` data set without it."""
    if check.options.text is not None:
        folder, text = str(check.folder / "data"), str(check.options.text)
        check.run("jaxgpt.prepare", "text", "--input", text, "--tokenizer", "char", "--out", folder)
        return [f"data.path={folder}"]
    if (dataset_directory(DataConfig(dataset="shakespeare_char")) / "train.bin").exists():
        return []
    check.add("text", "Python's standard library: give Tiny Shakespeare with --text FILE")
    return ["data.dataset=python"]
