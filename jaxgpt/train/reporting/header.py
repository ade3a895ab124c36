"""The first lines of a run's log, which describe the model, the devices and the data."""

import dataclasses
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from jaxgpt import __version__
from jaxgpt.config import Config, profile_range, skip_ranges
from jaxgpt.models.weights import weights
from jaxgpt.optim.muon import adamw_ratio, is_hidden_matrix
from jaxgpt.parallel.mesh import describe, mesh_axes_with
from jaxgpt.perf.flops import MFU_FORMULA, Rates
from jaxgpt.perf.units import count
from jaxgpt.runtime import initialize
from jaxgpt.spikes.faults import describe_faults
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.train.jitted import JittedFunctions
from jaxgpt.train.run_directory import Run

SETTINGS_WIDTH = 100  # settings are wrapped at this width, not counting the section's name
# `summary_lines` leaves out notes in `facts` with these prefixes.
USUAL_NOTES = ("compile cache: ", "GPU memory: ", "malloc: ", "time limit: none, ")


def header_lines(
    run: Run, steps: JittedFunctions, rates: Rates, facts: dict[str, Any], warnings: Sequence[str]
) -> list[str]:
    """Return the first lines of a run's log; `facts` is the result of `initialize_jax`."""
    config, mesh, parallel, spike = run.config, steps.mesh, run.config.parallel, run.config.spike
    total, multiplied = steps.n_parameters
    what = "positions" if config.model.tie_embeddings else "all embeddings"
    looked_up = f" ({total:,} including {what})" if total > multiplied else ""
    found = jax.tree.leaves(weights(config.model))
    decayed = [w.n_parameters for w in found if w.is_decayed]
    kept = [w.n_parameters for w in found if not w.is_decayed]
    values = dataclasses.asdict(config)
    sections = {"settings": {k: v for k, v in values.items() if not isinstance(v, dict)}}
    sections |= {k: v for k, v in values.items() if isinstance(v, dict)}
    detected = "never" if spike.action == "off" else f"after the first {spike.window} steps"
    return [
        f"jaxgpt {__version__}, run directory {run.directory}",
        *initialize.describe(facts),
        *run.notes,
        *(
            f"{name}: {line}"
            for name, section in sections.items()
            for line in textwrap.wrap(
                " ".join(f"{key}={value!r}" for key, value in section.items()),
                SETTINGS_WIDTH,
                break_long_words=False,
                break_on_hyphens=False,
            )
        ),
        f"mesh: {describe(mesh)}; zero_stage={parallel.zero_stage} "
        f"sequence_parallel={parallel.sequence_parallel} remat={parallel.remat}",
        f"model: {multiplied / 1e6:.2f}M parameters{looked_up}",
        f"weight decay: applied to {sum(decayed):,} parameters in {len(decayed)} arrays, "
        f"not to {sum(kept):,} in {len(kept)} arrays",
        *_optimizer_lines(config),
        _batch_line(config, steps),
        f"attention: {steps.attention}",
        *(f"warning: {line}" for line in (*warnings, *describe_faults(config))),
        *run.dataset.describe(),
        *_vocabulary_lines(run, rates, steps),
        f"steps to skip: {SkipRanges(skip_ranges(config))}",
        f"spikes: spike.action={spike.action}, detected {detected} (spike.window)",
        MFU_FORMULA
        + ("" if rates.peak else f"; the peak of {mesh.devices.flat[0].device_kind} is not known"),
        *_untraced_lines(run),
    ]


def summary_lines(
    run: Run, steps: JittedFunctions, rates: Rates, facts: dict[str, Any], warnings: Sequence[str]
) -> list[str]:
    """Return the short header for the console: the main facts, and anything unusual.

    The arguments are those of `header_lines`.
    """
    config, mesh, parallel = run.config, steps.mesh, run.config.parallel
    train, accumulated = config.train, config.train.gradient_accumulation_steps
    tokens = train.batch_size * config.model.block_size
    skips = SkipRanges(skip_ranges(config))
    sources = run.dataset.sources
    place = sources[0].entry.path if len(sources) == 1 else count(len(sources), "source")
    first, last = (run.resume_step or 0) + 1, train.max_iters
    left = f"steps {first} to {last}" if first <= last else f"no steps left of {last}"
    layout = [describe(mesh)]
    if mesh_axes_with("shards_parameters", mesh):
        layout.append(f"zero_stage={parallel.zero_stage}")
    if parallel.remat != "none":
        layout.append(f"remat={parallel.remat}")
    notes = [line for line in facts["notes"] if not line.startswith(USUAL_NOTES)]
    return [
        f"jaxgpt {__version__}: {config.config}, {left}, run directory {run.directory}",
        initialize.summary(facts),
        f"mesh: {' '.join(layout)}",
        f"model: {steps.n_parameters[1] / 1e6:.2f}M parameters; attention: "
        + steps.attention.partition(" ")[0],
        f"batch: {count(train.batch_size, 'sequence')}, {tokens:,} tokens per step of the whole job"
        + (f", in {accumulated} microbatches" if accumulated > 1 else ""),
        f"data: {place}, {run.dataset.size('train'):,} training tokens",
        *run.notes,
        *notes,
        *(f"warning: {line}" for line in (*warnings, *describe_faults(config))),
        *_vocabulary_lines(run, rates, steps),
        *([f"steps to skip: {skips}"] if skips.ranges else []),
        *_untraced_lines(run),
        "all settings: train.log and config.yaml; train.verbose=True prints them, too",
    ]


def _untraced_lines(run: Run) -> list[str]:
    """If all of profile_steps are past or skipped, return a line saying that no step is traced."""
    skips, traced = SkipRanges(skip_ranges(run.config)), profile_range(run.config)
    left = range(max(traced.start, (run.resume_step or 0) + 1), traced.stop)
    if not traced or any(step not in skips for step in left):
        return []
    return [
        f"steps to trace: none, because profile_steps={run.config.profile_steps} are past or "
        "skipped"
    ]


def _optimizer_lines(config: Config) -> list[str]:
    """For Muon, return a line that says how many parameters Muon and AdamW update."""
    if config.optimizer.name != "muon":
        return []
    found = jax.tree.leaves(weights(config.model))
    hidden = [w.n_parameters for w in found if is_hidden_matrix(w)]
    rest = [w.n_parameters for w in found if not is_hidden_matrix(w)]
    return [
        f"optimizer: muon updates {sum(hidden):,} parameters in {len(hidden)} arrays; adamw updates"
        f" {sum(rest):,} in {len(rest)} arrays, at {adamw_ratio(config.optimizer):g} x the learning"
        " rate"
    ]


def _batch_line(config: Config, steps: JittedFunctions) -> str:
    """Return a line about the global batch size and the batch size per device."""
    train, block_size = config.train, config.model.block_size
    n = train.gradient_accumulation_steps
    rows = steps.batch_sharding.shard_shape((train.batch_size, block_size + 1))[0]
    parts = f", in {n} microbatches of {rows / n:g}" if n > 1 else ""
    return (
        f"batch: {count(train.batch_size, 'sequence')} per step in the whole job, {rows} on each "
        f"device{parts}; {train.batch_size * block_size:,} tokens per step; gradient accumulation "
        f"{n}. train.batch_size is the global batch size; in nanoGPT and wordplay it is per device"
    )


def _vocabulary_lines(run: Run, rates: Rates, steps: JittedFunctions) -> list[str]:
    """Return a line about unused tokens if the tokenizer uses at most half of the vocabulary."""
    model, tokenizer = run.config.model, run.dataset.tokenizer
    if tokenizer is None or tokenizer.vocab_size > model.vocab_size / 2:
        return []
    tables = 1 if model.tie_embeddings else 2
    unused = (model.vocab_size - tokenizer.vocab_size) * model.n_embd
    return [
        f"vocabulary: the tokenizer has {tokenizer.vocab_size} tokens, "
        f"model.vocab_size={model.vocab_size}: {tables * unused / 1e6:.1f}M of "
        f"{steps.n_parameters[0] / 1e6:.1f}M parameters and "
        f"{6 * unused / rates.flops_per_token:.0%} of the FLOPs are spent on tokens that never "
        f"occur; a new run with model.vocab_size={tokenizer.vocab_size} avoids that"
    ]
