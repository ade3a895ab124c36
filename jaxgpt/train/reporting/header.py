"""The header of a run: what is going to be trained, and on what."""

import dataclasses
from typing import Any

import jax

from jaxgpt import __version__
from jaxgpt.config import Config, profile_range, skip_ranges
from jaxgpt.models.weights import weights
from jaxgpt.parallel.mesh import describe
from jaxgpt.perf.flops import MFU_FORMULA, Rates
from jaxgpt.runtime import initialize
from jaxgpt.spikes.skip import SkipRanges, describe_faults, describe_spikes
from jaxgpt.train.functions import StepFunctions
from jaxgpt.train.run_directory import Run


def header_lines(
    run: Run, steps: StepFunctions, rates: Rates, facts: dict[str, Any], warnings: tuple[str, ...]
) -> list[str]:
    """Return the lines that a run begins its log with; `facts` are those of `initialize_jax`."""
    config, mesh, parallel = run.config, steps.mesh, run.config.parallel
    peak = "" if rates.peak else f"; not known for {mesh.devices.flat[0].device_kind}"
    return [
        f"jaxgpt {__version__}, run directory {run.directory}",
        *initialize.describe(facts),
        *run.notes,
        *config_lines(config),
        f"mesh: {describe(mesh)}; zero_stage={parallel.zero_stage} "
        f"sequence_parallel={parallel.sequence_parallel} remat={parallel.remat}",
        *parameter_lines(config, steps),
        batch_line(config, steps),
        f"attention: {steps.attention}",
        *(f"warning: {line}" for line in (*warnings, *describe_faults(config))),
        *run.dataset.describe(),
        *vocabulary_lines(run, rates, steps),
        *skip_lines(config, (run.resume_step or 0) + 1),
        describe_spikes(config),
        MFU_FORMULA + peak,
        *resume_lines(run, describe(mesh), facts["processes"]),
    ]


def resume_lines(run: Run, mesh: str, processes: int) -> list[str]:
    """Return a line on the checkpoint that the run goes on from, if any, and on both meshes."""
    if run.resume_step is None:
        return []
    meta = run.resume_meta
    return [
        f"resumed from step {run.resume_step}: mesh {meta['mesh']} on {meta['processes']} "
        f"processes -> {mesh} on {processes}"
    ]


def config_lines(config: Config) -> list[str]:
    """Return the configuration, a line per section."""
    lines = []
    for name, section in dataclasses.asdict(config).items():
        if isinstance(section, dict):
            lines.append(f"{name}: " + " ".join(f"{k}={v!r}" for k, v in section.items()))
    return lines


def parameter_lines(config: Config, steps: StepFunctions) -> list[str]:
    """Return the number of parameters, and of those that weight decay applies to."""
    total, without_positions = steps.n_parameters
    found = jax.tree.leaves(weights(config.model))
    decayed = [w.size for w in found if w.is_decayed]
    kept = [w.size for w in found if not w.is_decayed]
    return [
        f"model: {without_positions / 1e6:.2f}M parameters ({total:,} with positions)",
        f"weight decay: {sum(decayed):,} parameters in {len(decayed)} arrays; "
        f"not of {sum(kept):,} in {len(kept)}",
    ]


def batch_line(config: Config, steps: StepFunctions) -> str:
    """Return the batch of a step, of a device, and the tokens."""
    train, block_size = config.train, config.model.block_size
    n = train.gradient_accumulation_steps
    rows = steps.batch_shape.sharding.shard_shape(steps.batch_shape.shape)[0]
    parts = f", in {n} microbatches of {rows / n:g}" if n > 1 else ""
    return (
        f"batch: {train.batch_size} sequences a step in the whole job, {rows} on each device"
        f"{parts}; {train.batch_size * block_size:,} tokens a step; gradient accumulation {n}. "
        "train.batch_size counts the whole job (global); nanoGPT's and wordplay's is per device"
    )


def vocabulary_lines(run: Run, rates: Rates, steps: StepFunctions) -> list[str]:
    """Return a line if most of the vocabulary does not occur in the data."""
    model, tokenizer = run.config.model, run.dataset.tokenizer
    if tokenizer is None or tokenizer.vocab_size > model.vocab_size / 2:
        return []
    unused = (model.vocab_size - tokenizer.vocab_size) * model.n_embd
    return [
        f"vocabulary: the data has {tokenizer.vocab_size} tokens, "
        f"model.vocab_size={model.vocab_size}: {unused / 1e6:.1f}M of "
        f"{steps.n_parameters[0] / 1e6:.1f}M parameters and "
        f"{6 * unused / rates.flops_per_token:.0%} of the FLOPs are for tokens that never occur; "
        f"model.vocab_size={tokenizer.vocab_size} in a new run saves them"
    ]


def skip_lines(config: Config, first_step: int) -> list[str]:
    """Return the steps that are skipped, and a warning if none that is to be traced is left."""
    skips = SkipRanges(skip_ranges(config))
    traced = profile_range(config)
    left = range(max(traced.start, first_step), traced.stop)
    lines = [f"steps to skip: {skips}"]
    if traced and all(step in skips for step in left):
        lines.append(
            f"steps to trace: none, as profile_steps={config.profile_steps} are past or skipped"
        )
    return lines
