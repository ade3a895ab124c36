"""The estimates that `--advise` ranks meshes by, compared with compiled programs and papers."""

import dataclasses

import pytest

from jaxgpt.config import MeshShape, load_config, mesh_shape
from jaxgpt.models.weights import count_parameters
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan.advise import Estimator, search_layouts
from jaxgpt.plan.estimate import layer_activations, memory_traffic
from jaxgpt.plan.layout import MATMUL_EFFICIENCY, Plan, plan_layout
from jaxgpt.plan.program import COMPILE_ONLY, Memory, Program, with_fewer_replicas
from jaxgpt.train.jitted import make_steps
from jaxgpt.train.sharded_model import layer_groups
from jobs import limited_devices

MEDIUM = (
    "gpt2", "model.n_layer=8", "model.n_embd=512", "model.n_head=8", "model.block_size=512",
    "model.vocab_size=8192", "train.loss_chunk=512", "train.dtype=bfloat16",
)  # fmt: skip
SP = "parallel.sequence_parallel=True"
CIRCULAR = ("parallel.schedule=circular", "parallel.stage_repeats=2")


def microbatches(n, rows=1):
    return f"train.gradient_accumulation_steps={n}", f"train.batch_size={n * rows}"


def estimated(config: object, mesh: MeshShape, device: str, per_host: int = 8) -> Plan:
    return Estimator(config, DEVICES[device], per_host).plan(mesh, config)


def both(*options):
    """Return the estimated and the compiled plan of a layout."""
    config = load_config(*MEDIUM, *options)
    mesh = mesh_shape(config)
    with limited_devices(mesh.n_devices):
        return estimated(config, mesh, "h100"), plan_layout(config, mesh, DEVICES["h100"], 8)


@pytest.mark.parametrize("options", [(), ("model.post_norm=True", "model.position=rope")])
def test_full_remat_recomputes_as_many_flops_as_the_compiled_step(options):
    def flops(n_layer, remat):
        layers = f"model.n_layer={n_layer}", f"parallel.remat={remat}", "parallel.scan_layers=False"
        words = (*layers, "model.vocab_size=256", "train.batch_size=8", "--mesh", "1,1,1")
        with limited_devices(1):
            steps = make_steps(load_config("tiny", *words, *options), make_mesh(MeshShape()))
            compiled = steps.lower_train_step().compile(COMPILE_ONLY)
        return steps.model.config, compiled.cost_analysis()["flops"]

    config, full = flops(2, "full")
    again = full - flops(2, "none")[1] - flops(1, "full")[1] + flops(1, "none")[1]
    plan = Plan(config, MeshShape(), DEVICES["h100"], 1, Program(Memory(0, 0, 0)))
    tokens = config.train.batch_size * config.model.block_size
    assert plan.recomputed_flops_per_token / 2 == pytest.approx(again / tokens, rel=0.05)


@pytest.mark.parametrize("n", [16, 64])
@pytest.mark.parametrize(
    "layout",
    [
        ("stage=4,tensor=2", SP),
        pytest.param(("stage=4",), marks=pytest.mark.long),
        pytest.param(("stage=4,data=2", "parallel.remat=full"), marks=pytest.mark.long),
        pytest.param(("stage=4,fsdp=2", *CIRCULAR), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_the_memory_of_a_pipeline_is_estimated_within_a_tenth(layout, n):
    rows = 2 * load_mesh(layout[0]).split_of("splits_batch")
    estimate, compiled = both("--mesh", *layout, *microbatches(n, rows))
    assert estimate.memory.total == pytest.approx(compiled.memory.total, rel=0.1)
    for name in ("parameters", "gradients", "moments"):
        found = getattr(estimate.memory, name)
        assert found == pytest.approx(getattr(compiled.memory, name), rel=0.001)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_memory_of_an_offloaded_state_is_estimated(stage):
    options = ("parallel.offload=state", f"parallel.zero_stage={stage}", *microbatches(4, 4))
    estimate, compiled = both("--mesh", "2,2,1", "parallel.scan_layers=True", *options)
    for name in ("parameters", "gradients", "moments", "in_host"):
        found = getattr(estimate.memory, name)
        assert found == pytest.approx(getattr(compiled.memory, name), rel=0.001)


def load_mesh(text):
    return MeshShape.parse(text)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize(
    "mesh", ["2,4,1", "1,4,2", "data=2,context=4", "stage=2,context=2,tensor=2"]
)
def test_the_memory_of_a_step_is_estimated_within_a_quarter(mesh, remat):
    """The estimate decides only which layouts are compiled."""
    n = microbatches(4, 4 * load_mesh(mesh).split_of("splits_batch"))
    estimate, compiled = both("--mesh", mesh, *n, f"parallel.remat={remat}")
    assert estimate.memory.total == pytest.approx(compiled.memory.total, rel=0.25)


@pytest.mark.parametrize("mesh", ["8,1,1", "1,4,2"])
def test_an_estimate_includes_the_matmuls_of_muon_and_the_moments_of_adamw(mesh):
    """Each of Newton-Schulz's 5 steps takes 4 R^2 C + 2 R^3 FLOPs for an R x C matrix.

    Each layer has four D x D matrices and two D x 4D matrices. There are as many layers as devices.
    These matrices have one moment, and the embeddings have two. `tensor` does not split positions.
    """
    D, L, V, T = 512, 8, 8192, 512
    per_layer = 4 * (4 * D**3 + 2 * D**3) + 2 * (4 * D**2 * 4 * D + 2 * D**3)
    config = load_config(*MEDIUM, "optimizer.name=muon", "--mesh", mesh, *microbatches(1, 8))
    muon = estimated(config, mesh_shape(config), "h100")
    assert muon.program.update_flops == 5 * per_layer
    fsdp, tensor = muon.mesh["fsdp"], muon.mesh["tensor"]
    moments = (12 * L * D**2 + 2 * V * D) / (fsdp * tensor) + 2 * T * D / fsdp
    assert muon.memory.moments == pytest.approx(4 * moments, rel=0.005)
    program = dataclasses.replace(muon.program, update_flops=0)
    without = dataclasses.replace(muon, program=program)
    seconds = 5 * per_layer / (MATMUL_EFFICIENCY * DEVICES["h100"].peak_flops["bfloat16"])
    assert muon.estimate.update - without.estimate.update == pytest.approx(seconds)


@pytest.mark.parametrize("context", [1, 8])
def test_a_ring_divides_the_scores_if_its_size_does_not_divide_the_heads(context):
    """Each token has a row of T float32 scores per head, and three copies are kept."""
    config = load_config("tiny", "model.n_head=4", "model.block_size=1024")
    mesh, tokens = MeshShape(context=context), 1024 // context
    kept = {
        remat: layer_activations(config.replace(parallel__remat=remat), mesh, tokens, True)[0]
        for remat in ("none", "attention")
    }
    assert kept["none"] - kept["attention"] == 3 * 4 * tokens * 4 * 1024


@pytest.mark.parametrize(
    ("name", "rows", "length", "vocabulary", "counted"),
    [
        # Bytes that h100_bytes.py counts in programs compiled for H100s (perf/DETAILS.md).
        ("gpt2", 24, 1024, 50257, 74.2e9),
        ("gpt2-xl", 8, 1024, 50257, 220.4e9),
        ("llama3.2-1b", 4, 4096, 128256, 228.0e9),
    ],
)
def test_memory_traffic_matches_programs_compiled_for_an_h100(
    name, rows, length, vocabulary, counted
):
    config = load_config(
        name, f"model.vocab_size={vocabulary}", f"model.block_size={length}", *microbatches(1, rows)
    )
    update = 32 * count_parameters(config.model)[0]  # eight accesses to float32 arrays
    moved = memory_traffic(config, MeshShape()) + update
    assert moved == pytest.approx(counted, rel=0.1)
    halves = memory_traffic(config, MeshShape(data=2)), memory_traffic(config, MeshShape(context=2))
    assert halves[0] == halves[1] < 0.75 * memory_traffic(config, MeshShape())


@pytest.mark.parametrize(
    ("name", "device", "mesh", "options", "tokens_per_sec"),
    [
        # Measured with jaxgpt (bench/DETAILS.md).
        ("gpt2", "h200", "1,1,1", (), 537_000),
        # llm.c, on one and on eight GPUs.
        ("gpt2", "h100", "1,1,1", (), 475_000),
        ("gpt2", "h100", "8,1,1", (), 468_000),
        ("gpt2-xl", "h100", "1,1,1", microbatches(32, 16), 48_500),
        # MaxText, on eight GPUs. Its recomputation is unknown.
        ("llama2-7b", "h100", "1,8,1", (*microbatches(1, 64), "parallel.remat=dots"), 11_400),
    ],
)
def test_speeds_are_estimated_within_a_tenth(name, device, mesh, options, tokens_per_sec):
    config = load_config(name, "--mesh", mesh, *options)
    estimate = estimated(config, mesh_shape(config), device).estimate
    assert estimate.tokens_per_sec_per_device == pytest.approx(tokens_per_sec, rel=0.1)


def published(name, mesh, n_microbatches, n_repeats):
    """Return the estimated plan of a layout in examples/sc21 of NVIDIA's Megatron-LM."""
    config = load_config(
        name, "--mesh", mesh, SP, f"train.gradient_accumulation_steps={n_microbatches}",
        *(("parallel.schedule=circular", f"parallel.stage_repeats={n_repeats}") if n_repeats > 1
          else ()),
    )  # fmt: skip
    return estimated(config, mesh_shape(config), "a100-80gb")


@pytest.mark.parametrize(
    ("layout", "flops", "teraflops"),
    [
        # arXiv 2104.04473: table 2, and the layout of run_figure_12.sh: 8 layers per stage, 2 at a
        # time. Table 1: the model with 1 T parameters.
        (("gpt-175b", "stage=12,data=16,tensor=8", 96, 4), (96, 12288, 1536), 141),
        (("gpt-1t", "stage=64,data=6,tensor=8", 512, 1), (128, 25600, 3072), 163),
    ],
    ids=["175b", "1t"],
)
def test_megatrons_layouts_take_about_as_long_as_published(layout, flops, teraflops):
    """The paper's equation 3: 96 B T L D^2 (1 + T / 6 D + V / 16 L D) FLOPs per step."""
    (L, D, B), T, V = flops, 2048, 51200
    total = 96 * B * T * L * D**2 * (1 + T / (6 * D) + V / (16 * L * D))
    plan = published(*layout)
    measured = total / plan.mesh.n_devices / (teraflops * 1e12)
    assert plan.fits
    assert plan.estimate.step == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("name", "mesh", "n_microbatches", "n_repeats"),
    [
        ("gpt-175b", "stage=12,data=16,tensor=8", 96, 4),
        pytest.param("gpt-1t", "stage=64,data=6,tensor=8", 512, 1, marks=pytest.mark.long),
    ],
    ids=["175b", "1t"],
)
def test_advice_is_no_slower_than_megatrons_layout(
    name, mesh, n_microbatches, n_repeats, monkeypatch
):
    monkeypatch.setattr("jaxgpt.plan.advise._compile", lambda plan: plan)
    layout = published(name, mesh, n_microbatches, n_repeats)
    a100, n = DEVICES["a100-80gb"], layout.mesh.n_devices
    best = search_layouts(load_config(name), n, a100, 8).plans[0]
    assert best.fits and best.estimate.step <= 1.05 * layout.estimate.step


@pytest.mark.parametrize(
    ("name", "options", "n", "network", "axis"),
    [
        # Over 20 Gb/s per GPU, gathering weights in every layer takes longer than a bubble.
        ("gpt-175b", (), 512, 2.5e9, "stage"),
        ("gpt-7b", (), 64, 25e9, "fsdp"),
        ("llama3-8b", ("model.block_size=131072", "train.batch_size=16"), 64, 25e9, "context"),
    ],
)
def test_the_best_mesh_suits_the_network_and_the_sequence(
    name, options, n, network, axis, monkeypatch
):
    monkeypatch.setattr("jaxgpt.plan.advise._compile", lambda plan: plan)
    device = dataclasses.replace(DEVICES["a100-80gb"], network_bandwidth=network)
    best = search_layouts(load_config(name, *options), n, device, 8).plans[0]
    assert best.fits and best.mesh[axis] > 1
    assert best.hosts_spanned(["tensor"]) == 1
    if axis != "context":
        assert best.mesh["context"] == 1


def test_fewer_replicas_do_not_change_the_work_of_a_device():
    """More devices than XLA can simulate are planned by leaving out replicas."""
    options = ("--mesh", "4096,1,1", "model.vocab_size=8192", "train.batch_size=8192")
    config = load_config("tiny", *options)
    smaller, mesh = with_fewer_replicas(config, MeshShape(4096))
    assert mesh == MeshShape(2048) and smaller.microbatch_size == 4096
    assert with_fewer_replicas(config, MeshShape(2048))[1] == MeshShape(2048)
    pipeline = MeshShape(6, 2, 8, stage=64)
    assert with_fewer_replicas(config, pipeline)[1] == MeshShape(2, 2, 8, stage=64)


@pytest.mark.parametrize(("stages", "sizes"), [(1, [12]), (2, [2] * 6)])
def test_repeats_split_layers_only_in_a_pipeline(stages, sizes):
    words = ("model.n_layer=12", "parallel.schedule=circular", "parallel.stage_repeats=3")
    config = load_config("tiny", *words)
    assert layer_groups(config, MeshShape(stage=stages)).sizes == sizes


def test_without_a_pipeline_all_layers_are_one_group_even_if_a_pattern_does_not_divide_them():
    config = load_config("gemma3-1b")  # 26 layers, in a pattern of 6
    assert layer_groups(config, MeshShape()).sizes == [26]
