"""Training on rows with masked targets."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from evaluation import BLOCK, SHAPE, evaluated, reference_logits, reference_losses
from jaxgpt import inspect
from jaxgpt.config import UsageError, load_config, mesh_shape
from jaxgpt.data.batch import TokenRows, input_batch
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.loader import Loader
from jaxgpt.evaluate.split import Loss
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.reporting.corpora import corpus_means
from jobs import limited_devices, records, scalars, train_here

ARGUMENTS = (
    "shakespeare_char_cpu", "model.n_layer=2", "model.n_embd=64", "model.vocab_size=97",
    "model.dropout=0", "train.batch_size=16",
)  # fmt: skip
B, T = 16, 64


def masked_rows():
    """Return rows with very different numbers of unmasked targets; four rows have none."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(97, size=(B, T + 1), dtype=np.int32)
    weights = (draw.random((B, T + 1)) < np.linspace(0, 1, B)[:, None] ** 3).astype(np.uint8)
    weights[1::4] = 0  # all rows of a microbatch of four
    weights[:, 0] = 1  # never a target
    return TokenRows(tokens, weights)


@functools.cache
def step_on(*layout, rows=masked_rows):
    """Return the metrics of a step, the parameters before and after it, and evaluation losses."""
    config = load_config(*ARGUMENTS, *layout)
    shape = mesh_shape(config)
    with limited_devices(shape.n_devices):
        mesh = make_mesh(shape)
    steps = make_steps(config, mesh, has_masks=True)
    state = steps.init()
    before = jax.device_get(state.params)
    batch = jax.device_put(rows(), steps.batch_sharding)
    losses = np.asarray(steps.eval_step(state.params, batch))
    compiled = steps.lower_train_step().compile()
    state, metrics = compiled(state, *scalars(config, 1), batch)
    return jax.device_get(metrics), before, jax.device_get(state.params), losses


@functools.cache
def reference():
    """Return the loss, row losses and gradient norm from the plain network, optax and NumPy."""
    rows, config = masked_rows(), load_config(*ARGUMENTS)
    _, params, _, _ = step_on("--mesh", "1,1,1")
    graph, targets = gpt_graph(config.model), rows.tokens[:, 1:]
    counts = rows.weights[:, 1:] == 1

    def logits_of(params):
        return nnx.merge(graph, params)(input_batch(jnp.asarray(rows.tokens[:, :-1])))[..., :97]

    logits = np.asarray(jax.jit(logits_of)(params), np.float64)
    log_sums = np.log(np.exp(logits).sum(axis=-1))
    losses = log_sums - np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    by_row = [
        row[count].mean() if count.any() else 0 for row, count in zip(losses, counts, strict=True)
    ]

    def mean_loss(params):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params), targets)
        return losses[counts].mean()

    norm = optax.tree.norm(jax.jit(jax.grad(mean_loss))(params))
    return losses[counts].mean(), np.array(by_row), float(norm)


@pytest.mark.parametrize(
    "layout",
    [
        ("1,1,1",),
        ("1,1,1", "train.gradient_accumulation_steps=4"),
        ("1,1,1", "train.loss_chunk=100"),
        ("2,2,2",),
        ("2,2,2", "train.gradient_accumulation_steps=4", "parallel.sequence_parallel=True"),
        ("1,4,1", "parallel.zero_stage=2", "train.gradient_accumulation_steps=4"),
        pytest.param(
            (
                "1,2,1",
                "parallel.offload=state",
                "parallel.scan_layers=True",
                "train.gradient_accumulation_steps=2",
            ),
            marks=pytest.mark.skipif(
                jax.__version_info__ >= (0, 12),
                reason="XLA aborts while it compiles this model for CPUs (also without masks)",
            ),
        ),
    ],
    ids=" ".join,
)
def test_the_loss_is_the_mean_over_the_targets_that_count(layout):
    metrics, _, _, evaluated_losses = step_on("--mesh", *layout)
    loss, row_losses, norm = reference()
    counts = masked_rows().weights[:, 1:].sum(axis=1)
    assert metrics.loss == pytest.approx(loss, rel=1e-6)
    np.testing.assert_allclose(metrics.row_losses, row_losses, rtol=1e-6)
    np.testing.assert_allclose(evaluated_losses, row_losses, rtol=1e-6)
    assert metrics.row_weights.tolist() == counts.tolist() and 0 in counts
    assert metrics.scalars["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_masked_targets_change_nothing():
    """The values of tokens that are only masked targets do not matter."""

    def with_other_ends():
        rows = masked_rows()
        rows.weights[:, -1] = 0
        tokens = rows.tokens.copy()
        tokens[:, -1] = 96 - tokens[:, -1]
        return TokenRows(tokens, rows.weights)

    def with_ends():
        rows = masked_rows()
        rows.weights[:, -1] = 0
        return rows

    ends, others = (step_on("--mesh", "1,1,1", rows=rows) for rows in (with_ends, with_other_ends))
    assert ends[0].loss == others[0].loss
    jax.tree.map(np.testing.assert_array_equal, ends[2], others[2])


def test_a_batch_without_any_target_has_the_loss_0():
    def nothing():
        rows = masked_rows()
        return TokenRows(rows.tokens, rows.weights * 0)

    metrics, _, after, losses = step_on(
        "--mesh", "2,1,1", "train.gradient_accumulation_steps=2", rows=nothing
    )
    assert metrics.loss == metrics.scalars["grad_norm"] == 0 and not losses.any()
    assert int(metrics.detection.nonfinite) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_the_mean_of_a_corpus_is_over_its_targets():
    rows = [
        (np.array([0, 1, 0, 2]), np.float32([1, 2, 3, 0]), np.float32([10, 5, 30, 0])),
        (np.array([1, 1, 0, 2]), np.float32([4, 0, 5, 0]), np.float32([15, 0, 10, 0])),
    ]
    assert corpus_means(["a", "b", "c"], rows) == {
        "a": (1 * 10 + 3 * 30 + 5 * 10) / 50,
        "b": (2 * 5 + 4 * 15) / 20,
        "c": None,
    }
    assert corpus_means(["a"], [(np.zeros(2, int), np.float32([1, 2]), None)]) == {"a": 1.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a blend of a source with a mask and one without."""
    home = tmp_path_factory.mktemp("masked")
    for name, n in (("a", 3000), ("b", 2000)):
        (home / name).mkdir()
        for seed, split in enumerate(("train", "val")):
            draw = np.random.default_rng([seed, n])
            draw.integers(1, 97, size=n).astype(np.uint16).tofile(home / name / f"{split}.bin")
            if name == "a":
                mask = (draw.random(n) < 0.2).astype(np.uint8)
                mask[: n // 2] = 0  # many rows have no target
                mask.tofile(home / name / f"{split}.mask.bin")
    settings = (
        *SHAPE, "model.vocab_size=97", "train.eval_iters=2", "--mesh", "2,1,1",
        "--data.blend", f"1 {home / 'a'}", f"1 {home / 'b'}",
    )  # fmt: skip
    assert train_here(*settings, "--out", home / "run") == 0
    return home / "run"


def test_evaluation_is_over_the_targets_that_count(run):
    config = find_trained(run).config
    log_probabilities = reference_logits(run, config)
    dataset = open_dataset(config.data, config.model)
    (found,) = (r for r in records(run, "eval") if r["step"] == 3)
    for split in ("train", "val"):
        loader = Loader.for_evaluation(dataset, split, config, None)
        losses = {"a": [], "b": []}
        for step in (1, 2):
            rows = range(config.train.batch_size)
            weights = loader.read_weights(step, rows)
            for row, (tokens, counts) in enumerate(
                zip(loader.read(step, rows), weights, strict=True)
            ):
                row_losses = reference_losses(log_probabilities, tokens, BLOCK, BLOCK)
                corpus = loader.names[loader.row_location(step, row).corpus]
                losses[corpus] += row_losses[counts[1:] == 1].tolist()
        name = f"{split}_loss"
        assert found[name] == pytest.approx(np.mean(losses["a"] + losses["b"]), rel=1e-6)
        for corpus, those in losses.items():
            assert found["corpora"][corpus][name] == pytest.approx(np.mean(those), rel=1e-6)


@pytest.mark.parametrize("words", [(), ("--stride", 20), ("--batch", 3)])
def test_evaluate_counts_the_targets_that_count(run, words):
    config = find_trained(run).config
    log_probabilities = reference_logits(run, config)
    found = evaluated("--run", run, *words)
    stride = words[1] if words[:1] == ("--stride",) else BLOCK
    every = []
    for name in ("a", "b"):
        tokens = np.fromfile(run.parent / name / "val.bin", np.uint16)
        losses = reference_losses(log_probabilities, tokens, BLOCK, stride)
        if name == "a":
            mask = np.fromfile(run.parent / name / "val.mask.bin", np.uint8)
            losses = losses[mask[1:] == 1]
        every += losses.tolist()
        assert found["corpora"][name]["tokens"] == losses.size
        assert found["corpora"][name]["loss"] == pytest.approx(losses.mean(), rel=1e-6)
    assert found["tokens"] == len(every)
    assert found["loss"] == pytest.approx(np.mean(every), rel=1e-6)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(every)), rel=1e-5)


def test_evaluate_counts_the_bytes_of_targets_that_count(run, tmp_path):
    """Each token is one byte, except the end-of-text token 0, which has no bytes."""
    text = np.frombuffer("né 0\0? ja".encode() * 20, np.uint8).astype(np.uint16) % 97
    mask = (np.arange(text.size) % 3 == 0).astype(np.uint8)
    for split in ("train", "val"):
        text.tofile(tmp_path / f"{split}.bin")
        mask.tofile(tmp_path / f"{split}.mask.bin")
    blend = f"data.blend=1 {tmp_path}"
    found = evaluated("--run", run, blend, "data.tokenizer=byte")
    assert found["tokens"] == mask[1:].sum()
    assert found["bytes"] == (mask[1:] * (text[1:] != 0)).sum()


def test_the_loss_of_no_tokens_is_unknown():
    nothing = Loss(0.0, 0, 0)
    assert np.isnan(nothing.mean) and np.isnan(nothing.perplexity)
    assert nothing.bits_per_byte is None
    assert (nothing + Loss(6.0, 3, 4)).mean == 2.0


def test_inspect_shows_which_targets_count(run, tmp_path, capsys):
    words = ["--run", str(run), "--step", "2", "--rows", "0:6"]
    inspect.main([*words, "--json"])
    out = capsys.readouterr().out

    for record in map(json.loads, out.splitlines()):
        folder = run.parent / record["corpus"]
        here = slice(record["offset"], record["offset"] + BLOCK + 1)
        mask = np.ones(BLOCK + 1)
        if record["corpus"] == "a":
            mask = np.fromfile(folder / "train.mask.bin", np.uint8)[here]
        assert record["weights"] == mask.tolist()
        assert record["targets"] == mask[1:].sum()
    assert inspect.mark_targets([5, 6, 7, 8], [1, 0, 1, 1], str) == "[5, 6][[[7, 8]]]"


def test_a_run_does_not_go_on_with_another_mask(run, tmp_path):
    mask = np.fromfile(run.parent / "a" / "train.mask.bin", np.uint8)
    try:
        for changed in (1 - mask, None):
            if changed is None:
                (run.parent / "a" / "train.mask.bin").unlink()
            else:
                changed.tofile(run.parent / "a" / "train.mask.bin")
            with pytest.raises(
                UsageError, match="a has different tokens from the training data of"
            ):
                train_here("--out", run, "train.max_iters=4")
    finally:
        mask.tofile(run.parent / "a" / "train.mask.bin")
