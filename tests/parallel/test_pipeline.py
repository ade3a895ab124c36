"""A pipeline computes what one device computes, and communicates what its schedule says."""

import functools
import itertools
import re

import numpy as np
import pytest

from jaxgpt.config import MeshShape, UsageError, load_config, mesh_shape
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.parallel.pipeline import LayerGroups
from jaxgpt.perf.collectives import read_collectives
from jaxgpt.perf.hlo import parse_hlo
from jaxgpt.plan.program import COMPILE_ONLY
from jaxgpt.train.jitted import make_steps
from jobs import SMALL, checkpoint_arrays, limited_devices, losses, trace, train_here

SIZES = (
    "data.dataset=python",
    "model.n_embd=32",
    "model.block_size=32",
    "train.batch_size=16",
    "optimizer.warmup_iters=0",
)
GPT2 = ("shakespeare_char_cpu", "model.bias=True", "model.dropout=0.1")
LLAMA = (
    "llama-tiny", "model.n_head=4", "model.n_kv_head=2", "model.mlp_hidden=64",
    # At the preset's rate, rounding grows: on 2,1,1, the gradient norm differs by 4e-4 in step 20.
    "optimizer.learning_rate=1e-4", "optimizer.min_lr=1e-5",
)  # fmt: skip
CIRCULAR = ("parallel.schedule=circular", "parallel.stage_repeats=2")


def arguments(family, n_layer, *options):
    return (*family, *SIZES, f"model.n_layer={n_layer}", *options)


@functools.cache
def on_one_device(n_steps, *args):
    return trace(n_steps, *args, "--mesh", "1,1,1", devices=1)


def check(n_steps, args, mesh, *options):
    """Compare a pipeline with one device that runs the same microbatches."""
    expected = on_one_device(n_steps, *args)
    found = trace(n_steps, *args, *options, "--mesh", mesh, devices=MeshShape.parse(mesh).n_devices)
    for key in ("params", "rows"):
        assert found[key] == expected[key]
    for key in ("losses", "norms"):
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-4)
    assert np.isfinite(found["evaluated"])


@pytest.mark.parametrize(
    ("family", "n_layer", "mesh", "options"),
    [
        (GPT2, 4, "stage=2,data=2,tensor=2", ("parallel.sequence_parallel=True",)),
        # Groups of 2, 1, 1 and 1 layers.
        ((*LLAMA, "optimizer.name=muon"), 5, "stage=2,fsdp=2", CIRCULAR),
    ],
    ids=["gpipe", "circular"],
)
def test_a_pipeline_changes_no_result(family, n_layer, mesh, options):
    args = arguments(family, n_layer)
    check(3, args, mesh, "train.gradient_accumulation_steps=4", *options)


@pytest.mark.long
@pytest.mark.parametrize("family", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("schedule", [(), CIRCULAR], ids=["gpipe", "circular"])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(
    "sizes", [s for s in itertools.product((2, 4), (1, 2), (1, 2)) if np.prod(s) <= 8]
)
def test_all_pipelines_change_no_result(family, schedule, zero, sizes):
    stages, replicas, tensor = sizes
    mesh = f"stage={stages},{'fsdp' if zero else 'data'}={replicas},tensor={tensor}"
    accumulation = "train.gradient_accumulation_steps=4"
    check(20, arguments(family, 8), mesh, accumulation, *schedule, f"parallel.zero_stage={zero}")


def test_groups_of_layers_are_dealt_out_in_turn():
    groups = LayerGroups(n_layers=8, n_stages=2, n_repeats=2)
    assert groups.layers.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert groups.warnings == ()
    uneven = LayerGroups(n_layers=10, n_stages=4, n_repeats=1)
    assert uneven.sizes == [3, 3, 2, 2]
    assert uneven.firsts.tolist() == [[0, 3, 6, 8]]
    (sentence,) = uneven.warnings
    assert "2 of 4 groups of layers hold 3 layers, the others 2" in sentence
    patterns = LayerGroups(n_layers=12, n_stages=4, n_repeats=1, pattern=2)
    assert patterns.sizes == [4, 4, 2, 2]


@functools.cache
def compiled(mesh, *options):
    config = load_config(*arguments(GPT2[:2], 4), "--mesh", mesh, *options)
    config = config.replace(model__vocab_size=256)
    shape = mesh_shape(config)
    with limited_devices(shape.n_devices):
        steps = make_steps(config, make_mesh(shape))
    return steps.lower_train_step().compile(COMPILE_ONLY)


def collectives(mesh, *options):
    """Return (kind, axes) -> number of arrays that a step communicates."""
    found = read_collectives(compiled(mesh, *options).as_text(), MeshShape.parse(mesh))
    return {(c.kind, c.axes): c.count for c in found}


@pytest.mark.parametrize("schedule", [(), CIRCULAR], ids=["gpipe", "circular"])
def test_activations_move_to_the_next_stage_once_per_tick(schedule):
    mesh, M, S, v = "stage=2,fsdp=2", 4, 2, 2 if schedule else 1
    options = (f"train.gradient_accumulation_steps={M}", *schedule)
    found = collectives(mesh, *options)
    ticks = v * M + S - 1
    assert found["collective-permute", ("stage",)] == 2 * ticks  # forward and backward
    text = compiled(mesh, *options).as_text()
    pairs = re.findall(r"collective-permute.*source_target_pairs=\{(.*?)\}\}", text)
    neighbors = {"0,2", "1,3"} | ({"2,0", "3,1"} if schedule else set())
    backward = {",".join(reversed(pair.split(","))) for pair in neighbors}
    assert {frozenset(found.strip("{").split("},{")) for found in pairs} == {
        frozenset(neighbors), frozenset(backward)
    }  # fmt: skip


def test_weights_are_gathered_and_gradients_are_reduced_once_per_step():
    few, many = (
        collectives("stage=2,fsdp=2", f"train.gradient_accumulation_steps={M}") for M in (2, 8)
    )
    moves = ("collective-permute", ("stage",))
    assert few.pop(moves) == 2 * 3
    assert many.pop(moves) == 2 * 9
    assert few == many
    assert few["all-gather", ("fsdp",)] <= 4 + 2  # matrices of the layers, and two embeddings


def n_products(program, wanted):
    """Return how many matmuls each device executes whose result or operands have a size."""

    def count(computation):
        return sum(map(count_in, program.computations[computation]))

    def count_in(instruction):
        if instruction.opcode == "while":
            trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.arguments)
            return int(trips[1]) * count(instruction.attribute("body"))
        if instruction.opcode == "dot":
            operands = (program.instructions[name].dims for name in instruction.operands)
            return wanted in itertools.chain(instruction.dims, *operands)
        return sum(map(count, instruction.called))

    return count(program.entry)


def test_the_stages_share_the_layers_and_the_head():
    """All stages run one program. Each computes the head for M / S microbatches."""
    M, S, L, V, F = 8, 4, 4, 256, 128
    program = parse_hlo(compiled(f"stage={S}", f"train.gradient_accumulation_steps={M}").as_text())
    assert n_products(program, V) == 3 * M // S
    ticks, layers = M + S - 1, L // S
    # Forward, backward, and again what the backward pass needs: all but the MLP's last product.
    assert n_products(program, F) == (2 + 4 + 1) * layers * ticks


def test_memory_grows_with_boundary_activations_only():
    """Each microbatch adds the input and the output of a stage: 2 B T D numbers."""
    options = ("model.n_layer=8", "train.batch_size=64")
    few, many = (
        compiled("stage=4", *options, f"train.gradient_accumulation_steps={M}").memory_analysis()
        for M in (16, 64)
    )
    boundary = 4 * 32 * 32  # bytes of one row
    kept = 2 * (64 - 16)  # microbatches of 1 row instead of 4, with the same number of rows
    assert many.temp_size_in_bytes - few.temp_size_in_bytes < kept * boundary


def test_a_checkpoint_is_moved_between_meshes_bit_by_bit(tmp_path):
    """Skipped steps change nothing, so their checkpoint holds what was restored.

    The steps after them are those of one device, with the same data.
    """
    settings = (*SMALL, "model.n_layer=4", "train.gradient_accumulation_steps=4", *CIRCULAR)
    settings += ("checkpoint.interval=1", "checkpoint.keep=9")
    settings += ("--train-range-to-skip", *map(str, (3, 3, 5, 5, 7, 7)))
    meshes = {2: "context=2,stage=2,tensor=2", 4: "2,1,4", 6: "1,1,1"}
    for last, mesh in (meshes | {8: meshes[2]}).items():
        run = (*settings, "--out", tmp_path / "run", "--mesh", mesh, f"train.max_iters={last}")
        assert train_here(*run) == 0
    for step in (3, 5, 7):
        saved, restored = (checkpoint_arrays(tmp_path / "run", s) for s in (step - 1, step))
        assert all((saved[path] == restored[path]).all() for path in saved)
        assert restored.keys() == saved.keys()
    alone = ("--out", tmp_path / "alone", "--mesh", "1,1,1", "train.max_iters=8")
    assert train_here(*settings, *alone) == 0
    moved, still = (
        [loss for loss in losses(tmp_path / name).values() if loss is not None]
        for name in ("run", "alone")
    )
    assert moved == pytest.approx(still, rel=1e-4) and len(moved) == 5
    assert saved["['params']['layers']['mlp']['up']['kernel']"].shape == (4, 64, 256)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mesh", "stage=8"), "stage=8 is more than model.n_layer=3 allows"),
        (("--mesh", "stage=2"), "needs at least 2 microbatches"),
        (("parallel.schedule=1f1b",), "must be one of gpipe, circular"),
        (("parallel.stage_repeats=2",), "needs parallel.schedule=circular"),
        (("--mesh", "stage=2,stage=2"), "sizes by name"),
        (("--mesh", "stages=2"), "did you mean stage"),
        (
            ("--mesh", "stage=2", "model.layers=local global", "model.sliding_window=8"),
            "not a multiple of the 2 layers",
        ),
        (
            ("--mesh", "stage=2", "train.gradient_accumulation_steps=2",
             "parallel.offload=moments"),
            "not supported with pipeline stages",
        ),
        (
            ("--mesh", "stage=2", "train.gradient_accumulation_steps=2",
             "parallel.reduce_every=microbatch"),
            "reduces gradients once per step",
        ),
    ],
)  # fmt: skip
def test_a_pipeline_that_cannot_work_is_refused_in_one_sentence(options, words):
    with pytest.raises(UsageError, match=words) as caught:
        load_config("tiny", *options)
    assert "\n" not in str(caught.value)
