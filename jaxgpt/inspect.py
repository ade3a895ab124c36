"""Show the rows of a training step: `python -m jaxgpt.inspect --run DIR --step 1234`.

Prints the text, file and offset of each row, and its document if the data has a document index.
Without `--worst`, the command does not load the model, and is as fast for step 10^9 as for step 1.
Instead of `--run`, you can pass `--config NAME` and the same settings as for jaxgpt.train. Settings
after `--run`, such as data.path=DIR, override the run's settings.

If the data has a loss mask, `targets` is the number of tokens in a row that count toward the loss.
The text of these tokens is printed between [[ and ]].

`sequence` is the index of a row among all rows of the run, from 0. If train.batch_size changes, no
sequence is repeated or skipped. For steps up to the newest checkpoint, the command uses the batch
size that the run trained with; for later steps, it uses train.batch_size.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxgpt.checkpoint.metadata import list_checkpoints, valid_checkpoints
from jaxgpt.cluster.process_group import ProcessGroup, join_process_group
from jaxgpt.cluster.shutdown import job_exit_handler
from jaxgpt.config import (
    CommandParser,
    Config,
    UsageError,
    config_from_file,
    file_path,
    parse_args,
    skip_ranges,
    whole_number,
)
from jaxgpt.data.blend import blend_shares, parse_lines
from jaxgpt.data.dataset import Dataset, open_dataset, with_vocabulary
from jaxgpt.data.loader import Loader
from jaxgpt.evaluate.model import Model, Rows
from jaxgpt.evaluate.trained import Trained, without_training
from jaxgpt.spikes.policy import skipped_by_rewinds
from jaxgpt.spikes.skip import SkipRanges
from jaxgpt.tracking.jsonl import METRICS, json_line, read_records
from jaxgpt.train.init_from import initial_model
from jaxgpt.train.resume import (
    batch_sizes,
    saved_settings,
    source_hashes,
    with_moved_tokenizer,
)

OTHER_DATA = "warning: this data differs from the data that the run was trained on"


class StepRows(NamedTuple):
    """The wanted rows of a training step."""

    dataset: Dataset
    # For each row, a dict with `step`, `row` and the values returned by `origin`. If there is a
    # loss mask, it also has `targets`, the number of targets that count toward the loss.
    records: list[dict[str, Any]]
    tokens: np.ndarray  # int32 (rows, T+1)
    weights: np.ndarray | None  # loss weights, uint8 (rows, T+1); None if there is no loss mask
    notes: list[str]  # remarks and warnings for the user

    def sorted_by_loss(self, losses: np.ndarray) -> "StepRows":
        """Return the rows with their `loss`, the highest first. `losses` has shape (rows,)."""
        order = np.argsort(-np.nan_to_num(losses, nan=np.inf), kind="stable")
        records = [{**self.records[i], "loss": float(losses[i])} for i in order]
        weights = None if self.weights is None else self.weights[order]
        return self._replace(records=records, tokens=self.tokens[order], weights=weights)


def parser() -> CommandParser:
    out = CommandParser(prog="python -m jaxgpt.inspect", description=__doc__)
    which = out.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", "--out", type=file_path, metavar="DIR", help="a run directory")
    which.add_argument("--config", metavar="NAME", help="a preset or YAML file, instead of a run")
    count = whole_number()
    out.add_argument("--step", type=count, required=True, metavar="N", help="step, as in the log")
    out.add_argument("--rows", metavar="A:B", help="rows A to B-1, or one row A; default: all")
    worst = "compute losses with the last checkpoint before N; print the highest losses first"
    out.add_argument("--worst", action="store_true", help=worst)
    out.add_argument("--mesh", default="1,-1,1", help="mesh for --worst: data,fsdp,tensor")
    out.add_argument("--json", action="store_true", help="print rows as JSON lines, with token IDs")
    out.add_argument("settings", nargs="*", metavar="section.key=value")
    return out


def main(argv: list[str] | None = None) -> None:
    with job_exit_handler():
        arguments = parser().parse_args(argv)
        base = ["--out", str(arguments.run)] if arguments.run else ["--config", arguments.config]
        run = arguments.run
        if run and not (run / "config.yaml").is_file() and saved_settings(run) is None:
            raise UsageError(f"--run {run}: has no config.yaml; give a run directory")
        # Do not read the initial weights, which may be gone. config.yaml has the model's
        # dimensions.
        model_of = None if run else initial_model
        config = parse_args(
            [*base, *arguments.settings], parser().prog, model_of, saved_settings=saved_settings
        )
        with join_process_group() as cluster:
            wanted = arguments.step, arguments.rows
            rows = cluster.run_on_all(_look_up, config, arguments.run, *wanted)
            if arguments.worst:
                config = with_vocabulary(config, rows.dataset)
                config = config.replace(parallel__mesh=arguments.mesh)
                at = _checkpoint_before(arguments.run, arguments.step)
                rows.notes.append(f"losses are computed with checkpoint {at}")
                rows = rows.sorted_by_loss(row_losses(config, arguments.run, at, rows, cluster))
            if cluster.is_main:
                print("".join(f"{note}\n" for note in rows.notes), end="", file=sys.stderr)
                show(rows, arguments.json)


def _look_up(config: Config, run: Path | None, step: int, wanted: str | None) -> StepRows:
    """Return the `wanted` rows of a step.

    `wanted` has the format of `--rows`. `run` is None if there is no run directory.
    """
    config = with_moved_tokenizer(config, run) if run else config
    dataset = open_dataset(config.data, config.model)
    config = with_vocabulary(config, dataset)
    sizes = batch_sizes(run, config) if run else None
    loader = Loader.for_training(dataset, config, batch_sizes=sizes)
    size = loader.batch_sizes.at(step)
    chosen = _chosen_rows(wanted, size)
    records = [{"step": step, "row": row, **origin(dataset, loader, step, row)} for row in chosen]
    weights = loader.read_weights(step, chosen) if loader.has_masks else None
    if weights is not None:
        for record, weights_of_row in zip(records, weights, strict=True):
            record["targets"] = int(weights_of_row[1:].sum())
    notes = differences(config, dataset, run, step)
    if loader.is_random(step):
        notes.append(f"step {step} has random tokens, because of faults.random_tokens")
    if size != config.train.batch_size:
        notes.append(f"train.batch_size was {size} at step {step}")
    return StepRows(dataset, records, loader.read(step, chosen), weights, notes)


@functools.lru_cache(maxsize=1000)
def row_text(run: Path, step: int, row: int, corpus: str, source: str, offset: int) -> str:
    """Return the origin and text of a row in a spike record, or why it cannot be read.

    `row`, `corpus`, `source` and `offset` come from the record (see `worst_rows`). `source` is
    empty if the record has no source. If the row's tokens are not at that place, or if they are
    random because of faults.random_tokens, the row is looked up with the settings in config.yaml,
    and the result starts with notes on why this may be another row. If the data has no tokenizer,
    token IDs replace the text. The last 1,000 results are cached, so later changes to the run or
    its data may have no effect.
    """
    if step < 1:  # the record is damaged
        return f"row {row} cannot be read: there is no step {step}"
    try:
        config = with_moved_tokenizer(config_from_file(run / "config.yaml"), run)
        dataset, length = open_dataset(config.data, config.model), config.model.block_size + 1
        named = [s.tokens["train"] for s in dataset.sources if str(s.entry.path) == source]
        holding = [tokens for tokens in named if 0 <= offset <= tokens.size - length]
        is_random = Loader.for_training(dataset, config).is_random(step)
        if holding and not is_random:
            tokens = holding[0]
            ids = tokens.read(offset, length)
            tokens.check_vocab_range(ids, offset, dataset.vocab_size)
            found = {"corpus": corpus, "file": tokens.file.path, "offset": tokens.first + offset}
            near = _checkpoint_near(run, step)  # only other data affects a recorded place
            notes = [OTHER_DATA] if near and _has_other_data(dataset, near[1]) else []
        else:
            rows = _look_up(config, run, step, str(row))
            (found,), ids, notes = rows.records, rows.tokens[0], rows.notes
            if source and not is_random:
                what = f"tokens {offset:,} to {offset + length - 1:,} of {source}"
                notes.append(f"warning: the run trained on {what}, which its data no longer has")
        ids, tokenizer = ids.tolist(), dataset.tokenizer
        text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))
    except (UsageError, OSError) as error:
        return f"row {row} cannot be read: {error}"
    where = f"row {row}, {found['corpus']}, {found['file']} at token {found['offset']:,}:"
    return "\n".join([*notes, where, text])


def _chosen_rows(given: str | None, batch_size: int) -> range:
    """Return the rows that `--rows` selects, by default all rows.

    Raises `UsageError` if `--rows` is invalid.
    """
    if found := re.fullmatch(r"([0-9]{0,9}):([0-9]{0,9})|([0-9]{1,9})", given or ":"):
        first, end, only = found.groups()
        start = int(only or first or 0)
        stop = start + 1 if only else int(end or batch_size)
        if start < stop <= batch_size:
            return range(start, stop)
    limits = f"0 <= A < B <= train.batch_size={batch_size}"
    raise UsageError(f"--rows={given}: must be A:B with {limits}, or one row")


def origin(dataset: Dataset, rows: Loader, step: int, row: int) -> dict[str, Any]:
    """Return the origin of a row of training data, as a dict.

    `sequence` is the index of the row among all rows of the run, from 0. `corpus` is a name, and
    `file` is a path. `offset` is the number of tokens in the file before the row. `document` is the
    zero-based index of the row's first document, and `document_start` is the number of tokens in
    the file before that document. Both are None if the data has no document index.
    faults.random_tokens does not affect the result.
    """
    location = rows.row_location(step, row)
    tokens = dataset.sources[location.source].tokens["train"]
    document = dataset.find_document(location.source, "train", location.offset)
    return {
        "sequence": rows.sequence(step, row),
        "corpus": rows.names[location.corpus],
        "file": str(tokens.file.path),
        "offset": tokens.first + location.offset,
        "document": document and document.number,
        "document_start": document and document.start,
    }


def _checkpoint_near(run: Path, step: int) -> tuple[int, dict[str, Any]] | None:
    """Return the step and JSON of the first undamaged checkpoint at or after a step.

    If there is no such checkpoint, return those of the newest undamaged one. Return None if there
    is none.
    """
    if not (saved := valid_checkpoints(run)):
        return None
    at = min((s for s in saved if s >= step), default=max(saved))
    return at, saved[at]


def _has_other_data(dataset: Dataset, meta: dict[str, Any]) -> bool:
    return source_hashes(meta["data_fingerprint"]) != source_hashes(dataset.fingerprints)


def differences(config: Config, dataset: Dataset, run: Path | None, step: int) -> list[str]:
    """Return notes on why a run may not have trained on these rows at this step.

    Possible reasons are a skipped step, different data, a different data.blend or a different
    train.seed. These are compared with the first undamaged checkpoint at or after `step`. If the
    run restarted between `step` and that checkpoint, a note says so. If there is no such
    checkpoint, they are compared with the newest undamaged one. If the run restarted between that
    checkpoint and `step`, data.blend and train.seed are not compared. `run` is None if there is no
    run directory.
    """
    notes = []
    rewound = skipped_by_rewinds(run, batch_sizes(run, config)) if run else ()
    if step in SkipRanges([*skip_ranges(config), *rewound]):
        notes.append(f"step {step} is skipped, so the run does not train on its rows")
    if run is None or (near := _checkpoint_near(run, step)) is None:
        return notes
    at, then = near
    path, metrics = run / "checkpoints" / str(at), run / METRICS
    starts = [r["step"] for r in read_records(metrics, "start")] if metrics.exists() else []
    has_newer_settings = any(at <= after < step for after in starts)  # in config.yaml
    if _has_other_data(dataset, then):
        notes.append(OTHER_DATA)
    elif len(dataset.sources) > 1 and not has_newer_settings:
        entries = parse_lines(then["config"]["data"]["blend"], "data.blend")
        if blend_shares(entries) != blend_shares([source.entry for source in dataset.sources]):
            notes.append(
                "warning: data.blend had other weights or corpora around this step; for the run's "
                f"rows, add the data.blend in {path / 'meta' / 'metadata'}"
            )
    seed = then["config"]["train"]["seed"]
    if seed != config.train.seed and not has_newer_settings:
        was = f"train.seed was {seed} around this step, but is {config.train.seed} here"
        notes.append(f"warning: {was}; for the run's rows, add train.seed={seed}")
    if any(step <= after < at for after in starts):
        notes.append(
            f"the run restarted between step {step} and {path}, so the data, data.blend and "
            "train.seed at this step may differ from those in that checkpoint"
        )
    return notes


def _checkpoint_before(run: Path | None, step: int) -> int:
    """Return the step of the newest checkpoint before `step`.

    If there is no earlier checkpoint, return the step of the newest one. Raises `UsageError` if
    there are no checkpoints or no run directory.
    """
    saved = list_checkpoints(run) if run else []
    if not saved:
        raise UsageError("--worst: needs --run with a checkpoint, to compute the losses")
    return max((s for s in saved if s < step), default=saved[-1])


def row_losses(
    config: Config, run: Path, at: int, rows: StepRows, cluster: ProcessGroup
) -> np.ndarray:
    """Return each row's mean loss in nats, as float64 (rows,).

    The parameters come from the checkpoint of step `at`. Each mean is weighted by the loss weights,
    if there are any. If all weights of a row are 0, the row's mean is 0. This starts JAX. All
    processes must call this.
    """
    size = min(len(rows.tokens), config.microbatch_size)
    # Use any attention kernel that runs here, because training may have used other devices.
    config = config.replace(model__attention="auto", train__matmul_dtype=None)
    config, T = without_training(config), config.model.block_size
    model = Model(Trained(str(run), at, config, None, T, "own"), size, cluster)
    scores = model.score(Rows(len(rows.tokens), T, rows.tokens.__getitem__))
    losses_RT = np.array([losses for (losses,) in scores], np.float64)
    weights_RT = np.ones(losses_RT.shape) if rows.weights is None else rows.weights[:, 1:]
    return (losses_RT * weights_RT).sum(axis=1) / np.maximum(weights_RT.sum(axis=1), 1)


def show(rows: StepRows, as_json: bool) -> None:
    """Print the records and text of rows, or JSON lines with token IDs and any loss weights.

    If there is no tokenizer, token IDs are printed instead of text, and `text` in JSON is null.
    """
    tokenizer, weights = rows.dataset.tokenizer, rows.weights

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    for i, record in enumerate(rows.records):
        ids = rows.tokens[i].tolist()
        if as_json:
            extra = {} if weights is None else {"weights": weights[i].tolist()}
            text = text_of(ids) if tokenizer else None
            print(json_line({**record, "text": text, "tokens": ids, **extra}), end="")
            continue
        about = ", ".join(f"{k} {v}" for k, v in record.items() if v is not None)
        print(f"--- {about}")
        print(text_of(ids) if weights is None else mark_targets(ids, weights[i].tolist(), text_of))


def mark_targets(ids: list[int], weights: list[int], text_of: Callable[[list[int]], str]) -> str:
    """Return the text of a row, with [[ and ]] around the targets that count toward the loss.

    `ids` and `weights` have one element per token. A target counts unless its weight is 0. The
    first token is not a target.
    """
    counts = [False, *map(bool, weights[1:])]
    out = []
    for is_counted, run in itertools.groupby(zip(ids, counts, strict=True), lambda pair: pair[1]):
        text = text_of([token for token, _ in run])
        out.append(f"[[{text}]]" if is_counted else text)
    return "".join(out)


if __name__ == "__main__":
    main()
