"""The compiled step communicates as much as the papers say."""

import math

import pytest

from jaxgpt.config import load_config, mesh_shape
from jaxgpt.models.weights import count_parameters
from jaxgpt.perf.collectives import ring_bytes
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan.program import compile_step
from jaxgpt.plan.traffic import expected_traffic, sum_traffic
from jobs import limited_devices

pytestmark = pytest.mark.usefixtures("layouts_fit")

L, D, T, V, B = 3, 64, 32, 256, 32
MODEL = (
    "tiny", f"model.n_layer={L}", f"model.n_embd={D}", f"model.block_size={T}",
    f"model.vocab_size={V}", f"train.batch_size={B}",
)  # fmt: skip
SP, SCAN = "parallel.sequence_parallel=True", "parallel.scan_layers=True"
DOCUMENTS = ("data.document_mask=True", "data.end_of_text=10")
OFFLOAD = ("parallel.offload=state", SCAN)
POST_NORM = ("model.post_norm=True", "model.position=rope")
LLAMA = ("model.position=rope", "model.mlp=swiglu", "model.n_kv_head=2", "model.bias=False")


def settings(mesh, *options):
    config = load_config(*MODEL, "--mesh", mesh, *options)
    return config, mesh_shape(config)


def compiled_traffic(config, mesh):
    """Return (kind, axes) -> (number of arrays, bytes), read from the program."""
    with limited_devices(mesh.n_devices):
        return by_kind_and_axes(compile_step(config, mesh, DEVICES["cpu"], 8).collectives)


def traffic_in_theory(config, mesh):
    return by_kind_and_axes(sum_traffic(expected_traffic(config, mesh)))


def by_kind_and_axes(collectives):
    return {(c.kind, c.axes): (c.count, c.bytes) for c in collectives}


def long(*layout):
    """One whose parts are all in others."""
    return pytest.param(layout, marks=pytest.mark.long)


@pytest.mark.parametrize(
    "layout",
    [
        long("8,1,1"),
        long("8,1,1", "train.gradient_accumulation_steps=4"),
        long("1,8,1", "parallel.zero_stage=0"),
        long("1,8,1", "parallel.zero_stage=2"),
        ("1,8,1", "parallel.zero_stage=3"),
        long("1,8,1", "parallel.zero_stage=1"),
        long("1,8,1", "parallel.zero_stage=2", SCAN),
        long("1,8,1", "parallel.zero_stage=3", SCAN),
        long("1,8,1", "parallel.zero_stage=0", SCAN),
        long("1,8,1", "parallel.zero_stage=1", SCAN),
        *(
            long("1,8,1", f"parallel.zero_stage={stage}", "train.gradient_accumulation_steps=4")
            for stage in (2, 3)
        ),
        long("1,8,1", "parallel.zero_stage=1", "train.gradient_accumulation_steps=4"),
        ("1,8,1", "train.gradient_accumulation_steps=4", "parallel.reduce_every=microbatch"),
        long("2,4,1", "model.bias=True"),
        ("1,1,4",),
        long("1,1,4", "parallel.remat=full"),
        long("1,1,4", "parallel.remat=dots", SCAN),
        long("1,1,4", "train.loss_chunk=100"),
        long("1,1,4", SP),
        ("1,1,4", SP, SCAN, "parallel.remat=full"),
        ("2,1,4", *DOCUMENTS, "train.gradient_accumulation_steps=2"),
        long("2,1,4"),
        ("2,1,4", SP, "model.bias=True"),
        ("2,2,2", SP, "train.gradient_accumulation_steps=2"),
        long("1,2,3", "model.n_head=6", "model.n_embd=60", "train.gradient_accumulation_steps=2"),
        long("1,1,3", "model.n_head=6", "model.n_embd=60", SP, "model.block_size=33"),
        ("2,1,4", *LLAMA, "model.qk_norm=True"),  # four ranks share two key-value heads
        ("2,1,2", SP, SCAN, *LLAMA),
        long("1,1,4", SP, *LLAMA),
        long("1,1,2", SP, "parallel.remat=full", *LLAMA),
        long("1,1,2", SP, "parallel.remat=dots", *LLAMA),
        ("1,1,4", SP, SCAN, "parallel.remat=full", *POST_NORM),
        long("1,1,4", "parallel.remat=full", *POST_NORM),
        ("2,2,1", "parallel.zero_stage=1", *OFFLOAD, "train.gradient_accumulation_steps=4"),
        long("2,2,1", "parallel.zero_stage=3", *OFFLOAD, "train.gradient_accumulation_steps=4"),
        long("2,2,1", "parallel.zero_stage=3", *OFFLOAD),
        long("4,1,1", *OFFLOAD, "train.gradient_accumulation_steps=4"),
        long("2,1,2", *OFFLOAD, "train.gradient_accumulation_steps=2"),
    ],
    ids=" ".join,
)
def test_communication_of_a_step_matches_the_formulas(layout):
    """Equal in kind, mesh axis, number of arrays and bytes."""
    config, mesh = settings(*layout)
    assert compiled_traffic(config, mesh) == traffic_in_theory(config, mesh)


PIPELINE = ("train.gradient_accumulation_steps=8", "model.n_layer=8", SCAN)
CIRCULAR = ("parallel.schedule=circular", "parallel.stage_repeats=2")


@pytest.mark.parametrize(
    "layout",
    [
        ("stage=2,fsdp=2,tensor=2", SP, *PIPELINE),
        long("stage=4,data=2", *PIPELINE),
        long("stage=2,data=2,tensor=2", *DOCUMENTS, *PIPELINE),
        long("stage=2,data=2,tensor=2", "parallel.remat=full", *PIPELINE),
        long("stage=2,data=2,tensor=2", "parallel.remat=full", SP, *PIPELINE),
        long("stage=2,data=4", *CIRCULAR, *PIPELINE),
        ("stage=2,data=2,tensor=2", SP, *CIRCULAR, *PIPELINE),
        ("stage=3,data=2", *PIPELINE),  # neither the layers nor D can be divided by 3
        long("stage=2,data=2", *PIPELINE, "model.n_layer=7"),
        long("stage=2,fsdp=2", *PIPELINE, "model.n_layer=5"),
        long("stage=2,data=2", *CIRCULAR, *PIPELINE, "model.n_layer=6"),
        long("context=4,data=2", "parallel.context_impl=ulysses", SCAN),
        ("context=4,data=2", "parallel.context_impl=ring", SCAN),
        long("context=2,data=2,tensor=2", "parallel.context_impl=ring", SP, SCAN),
        ("context=2,data=2,tensor=2", "parallel.context_impl=ulysses", "parallel.remat=full",
         SCAN, *LLAMA),
        long("stage=2,context=2,tensor=2", "parallel.context_impl=ring", *PIPELINE),
        long("stage=2,context=2,tensor=2", "parallel.context_impl=ulysses", SP, *PIPELINE),
    ],
    ids=" ".join,
)  # fmt: skip
def test_communication_of_pipelines_and_context_parallelism_matches_the_formulas(layout):
    """Equal in bytes, except for arrays that do not depend on D, such as positions and norms."""
    config, mesh = settings(*layout)
    found, expected = compiled_traffic(config, mesh), traffic_in_theory(config, mesh)
    small = 16384 + 512  # the ring moves the batch to its layout
    assert sum(size for _, size in found.values()) > 50 * small
    for key in found.keys() | expected.keys():
        (count, size), (n, bytes) = found.get(key, (0, 0)), expected.get(key, (0, 0))
        assert abs(size - bytes) <= small, key
        if key[0] in ("all-gather", "reduce-scatter", "all-to-all") and size > small:
            assert count == n, key


def volume(mesh, *options):
    """Return the number of bytes that a device sends in a step."""
    config, mesh = settings(mesh, *options)
    return sum(
        ring_bytes(t.kind, t.bytes, math.prod(mesh[a] for a in t.axes))
        for t in expected_traffic(config, mesh)
    )


def test_zero_communicates_the_volume_in_its_paper():
    """arXiv 1910.02054, section 7: 2 Psi for stages 0 to 2, 3 Psi for stage 3."""
    n, _ = count_parameters(load_config(*MODEL).model)
    psi = 4 * n * 7 / 8  # bytes, of which a ring of 8 sends 7/8
    assert volume("8,1,1") == pytest.approx(2 * psi, rel=0.01)
    for stage, factor in ((0, 2), (1, 2), (2, 2)):
        assert volume("1,8,1", f"parallel.zero_stage={stage}") == pytest.approx(
            factor * psi, rel=0.01
        )
    # The embeddings are gathered once, and everything else twice.
    embeddings = 4 * (V + T) * D * 7 / 8
    assert volume("1,8,1") == pytest.approx(3 * psi - embeddings, rel=0.01)


def test_tensor_parallelism_communicates_the_volume_in_its_paper():
    """arXiv 1909.08053, section 3: 4 all-reduces of B T D numbers per layer, 2 around them."""
    config, mesh = settings("1,1,4")
    found = [t for t in expected_traffic(config, mesh) if t.purpose.startswith("activations")]
    assert sum(t.count for t in found) == 4 * L + 2
    assert sum(t.bytes for t in found) == (4 * L + 2) * B * T * D * 4
    assert {(t.kind, t.axes) for t in found} == {("all-reduce", ("tensor",))}


def test_sequence_parallelism_sends_no_more_than_tensor_parallelism():
    """Except for the extra all-gather in the backward pass (arXiv 2205.05198, section 4.2.2)."""
    config, mesh = settings("1,1,4", SP)
    extra = sum(t.bytes for t in expected_traffic(config, mesh) if "again" in t.purpose)
    assert extra == 2 * L * B * T * D * 4
    norms_and_positions = 4 * (2 * L * D + D + T * D) * 3 / 4 * 2
    assert volume("1,1,4", SP) == volume("1,1,4") + extra * 3 / 4 + norms_and_positions


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_does_not_multiply_the_reductions(stage):
    once, _ = gradients(stage, "train.gradient_accumulation_steps=1")
    assert gradients(stage, "train.gradient_accumulation_steps=4")[0] == once
    every = gradients(
        stage, "train.gradient_accumulation_steps=4", "parallel.reduce_every=microbatch"
    )
    assert every[1] == (4 if stage >= 2 else 1) * gradients(stage)[1]


def gradients(stage, *options):
    """(bytes, bytes that are reduce-scattered) of the gradients."""
    config, mesh = settings("2,4,1", f"parallel.zero_stage={stage}", *options)
    found = [t for t in expected_traffic(config, mesh) if t.purpose == "gradients"]
    return sum(t.bytes for t in found), sum(t.bytes for t in found if t.kind == "reduce-scatter")
