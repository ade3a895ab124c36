"""`python -m jaxgpt.plan`, compared with actual arrays and compiled programs."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jaxgpt.config import MeshShape, load_config, mesh_shape
from jaxgpt.models.weights import count_parameters
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import Collective
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan import __main__ as plan_command
from jaxgpt.plan.advise import Advice, reason, search_layouts, train_options
from jaxgpt.plan.layout import MATMUL_EFFICIENCY, Plan, plan_layout
from jaxgpt.plan.program import Memory, Program
from jaxgpt.plan.report import advice_report, plan_report
from jaxgpt.plan.traffic import expected_traffic, sum_traffic
from jaxgpt.runtime.allocator import USABLE
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices, run, scalars

MODEL = (
    "tiny", "model.n_layer=2", "model.n_embd=128", "model.vocab_size=256", "model.block_size=64",
    "train.batch_size=16",
)  # fmt: skip
SCAN = "parallel.scan_layers=True"


def long(*options):
    return pytest.param(options, marks=pytest.mark.long)


LAYOUTS = (
    long("8,1,1", "parallel.zero_stage=0"),
    long("1,8,1", "parallel.zero_stage=1"),
    ("2,4,1", "parallel.zero_stage=2", "train.gradient_accumulation_steps=2"),
    long("1,8,1", "parallel.remat=full", SCAN),
    long("2,2,2", "parallel.sequence_parallel=True", "train.dtype=bfloat16", SCAN),
    long("1,2,4", "parallel.offload=moments", "train.loss_chunk=100", SCAN),
)


def configured(mesh, *options):
    return load_config(*MODEL, "--mesh", mesh, *options)


def live_bytes(tree):
    device = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == device]
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_a_plan_matches_the_memory_of_the_program(layout):
    config = configured(*layout)
    sizes = mesh_shape(config)
    plan = plan_layout(config, sizes, DEVICES["cpu"], 8)
    steps = make_steps(config, make_mesh(sizes))
    state = steps.init()
    assert plan.memory.parameters == live_bytes(state.params)
    assert plan.memory.moments == live_bytes(state.opt_state)

    rows = jax.device_put(np.zeros((16, 65), np.int32), steps.batch_shape.sharding)
    found = steps.train_step.lower(state, *scalars(config, 1), rows).compile().memory_analysis()
    needed = found.argument_size_in_bytes + found.temp_size_in_bytes
    assert plan.memory.total == pytest.approx(needed, rel=0.01)


@pytest.mark.long  # in the short form, the code of both is made the same way
@pytest.mark.parametrize("layout", LAYOUTS, ids=" ".join)
def test_compiling_without_optimizations_does_not_change_the_plan(layout):
    job = run("plan", "--config", *MODEL, "--mesh", *layout, "--json")
    assert job.returncode == 0, job.stdout
    found, config = json.loads(job.stdout), configured(*layout)
    plan = plan_layout(config, mesh_shape(config), DEVICES["cpu"], 8)
    assert found["memory"]["total"] == pytest.approx(plan.memory.total, rel=0.001)
    assert found["collectives"] == json.loads(json.dumps(plan.to_dict()["collectives"]))


@pytest.mark.parametrize(
    ("stage", "parameters", "gradients", "moments"),
    [
        pytest.param(0, 1, 1, 1, marks=pytest.mark.long),
        pytest.param(1, 1, 1, 8, marks=pytest.mark.long),
        pytest.param(2, 1, 8, 8, marks=pytest.mark.long),
        (3, 8, 8, 8),
    ],
)
def test_state_follows_the_formula_of_the_zero_paper(stage, parameters, gradients, moments):
    """arXiv 1910.02054, figure 1, with 4 bytes for a parameter: 4 + 4 + 8 bytes, each over N."""
    config = configured("1,8,1", f"parallel.zero_stage={stage}")
    n, _ = count_parameters(config.model)
    memory = plan_layout(config, MeshShape(1, 8, 1), DEVICES["cpu"], 8).memory
    assert memory.parameters == pytest.approx(4 * n / parameters, rel=0.02)
    assert memory.gradients == pytest.approx(4 * n / gradients, rel=0.02)
    assert memory.moments == pytest.approx(8 * n / moments, rel=0.02)
    state = make_steps(config, make_mesh(MeshShape(1, 8, 1))).init()
    assert live_bytes(state) == pytest.approx(4 * n / parameters + 8 * n / moments, rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
def test_a_plan_for_a_gpu_counts_bfloat16_and_host_memory(gradients):
    dtypes = ("train.dtype=bfloat16", f"parallel.grad_reduce_dtype={gradients}")
    config = configured("1,4,2", *dtypes, "parallel.offload=moments", SCAN)
    plan = plan_layout(config, MeshShape(1, 4, 2), DEVICES["a100"], 4)
    assert plan.memory.in_host == plan.memory.moments - 4  # Adam's count stays
    compiled = {(c.kind, c.axes): (c.count, c.bytes) for c in plan.program.collectives}
    found = sum_traffic(expected_traffic(config, plan.mesh))
    in_theory = {(c.kind, c.axes): (c.count, c.bytes) for c in found}
    assert compiled == in_theory  # also in bytes, though a CPU has no bfloat16
    assert plan.program.attention.startswith("cudnn")
    assert plan.estimate.mfu < 0.6 and plan.estimate.step > 0
    slower = plan_layout(config, MeshShape(1, 4, 2), DEVICES["a100"], 1)
    assert slower.estimate.step > plan.estimate.step
    assert "tensor=2 spans 2 hosts" in slower.warnings[0] and not plan.warnings


def test_a_gpu_kernel_is_planned_whether_chosen_by_auto_or_by_name():
    memory = []
    for kernel in ("auto", "cudnn"):
        config = configured("1,1,1", "train.dtype=bfloat16", SCAN, f"model.attention={kernel}")
        with limited_devices(1):
            plan = plan_layout(config, MeshShape(), DEVICES["h100"], 1)
        assert plan.program.attention.startswith("cudnn")
        memory.append(plan.memory)
    assert memory[0] == memory[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [("1,2,1",), ("1,1,1",), ("1,1,2", "parallel.sequence_parallel=True")],
    ids=" ".join,
)
def test_planned_memory_of_flash_attention_is_linear_in_the_block_size(layout):
    def temporaries(block_size, device, *words):
        config = configured(
            *layout, "train.dtype=bfloat16", f"model.block_size={block_size}", "model.n_head=2",
            "train.batch_size=2", "train.loss_chunk=256", SCAN, *words,
        )  # fmt: skip
        sizes = mesh_shape(config)
        with limited_devices(sizes.n_devices):
            return plan_layout(config, sizes, device, 2).memory.activations_and_temporaries

    h100, mi250x = DEVICES["h100"], DEVICES["mi250x"]
    assert temporaries(2048, h100) < 2.5 * temporaries(1024, h100)
    assert temporaries(4096, mi250x) < 2.5 * temporaries(2048, mi250x)  # one block at a time
    all_at_once = "model.attention=xla"
    assert temporaries(2048, mi250x, all_at_once) > 3 * temporaries(1024, mi250x, all_at_once)


@pytest.mark.long
def test_offloaded_moments_are_copied_back_for_the_update():
    config = configured("1,8,1", "train.dtype=bfloat16", SCAN)
    kept = plan_layout(config, MeshShape(1, 8, 1), DEVICES["a100"], 4)
    config = config.replace(parallel__offload="moments")
    away = plan_layout(config, MeshShape(1, 8, 1), DEVICES["a100"], 4)
    there_and_back = 2 * away.memory.in_host / 32e9  # PCIe 4.0 x16
    assert away.estimate.update - kept.estimate.update == pytest.approx(there_and_back)
    memory = Memory(parameters=10, gradients=10, moments=20, in_host=20, host_at_once=5)
    assert memory.total == 25


@pytest.mark.long
def test_offloaded_layers_need_at_most_a_quarter_of_their_state_on_the_device():
    """Without moments, a layer takes 8 bytes per parameter: 4 for itself, 4 for its gradient."""
    options = ("parallel.offload=state", "parallel.remat=full", "train.batch_size=2", SCAN)

    def planned(n_layer):
        config = configured("1,1,1", *options, f"model.n_layer={n_layer}")
        with limited_devices(1):
            return plan_layout(config, MeshShape(1, 1, 1), DEVICES["h100"], 1).memory

    few, many = planned(2), planned(10)
    layers = many.parameters - few.parameters
    assert many.in_host - few.in_host == 4 * layers
    assert many.total - few.total <= 2 * layers / 2


@pytest.mark.parametrize(
    ("axes", "mesh", "per_host", "hosts"),
    [
        (("tensor",), (3, 1, 8), 12, 2),  # devices 8 to 15 are on two hosts of 12
        (("tensor",), (8, 1, 4), 4, 1),
        (("fsdp",), (2, 4, 4), 4, 4),
        (("fsdp",), (2, 2, 2), 8, 1),
        (("data",), (2, 2, 2), 4, 2),
        (("data", "tensor"), (2, 1, 4), 4, 2),
        (("fsdp", "tensor"), (4, 2, 2), 4, 1),
    ],
)
def test_hosts_spanned_by_a_group_follow_the_device_order(axes, mesh, per_host, hosts):
    shape = MeshShape(*mesh)
    plan = Plan(load_config("tiny"), shape, DEVICES["a100"], per_host, Program(Memory(0, 0, 0)))
    assert plan.hosts_spanned(axes) == hosts


@pytest.mark.long
@pytest.mark.parametrize(
    ("room", "best", "n", "per_host"), [(16, "data", 4, 2), (3.5, "ZeRO", 2, 2)]
)
def test_advice_follows_the_rules(room, best, n, per_host):
    """The model has 0.2 billion parameters and 3.2 GB of state, and is sharded only if needed."""
    device = dataclasses.replace(DEVICES["a100"], memory=int(room / USABLE * 2**30))
    config = configured(
        "-1,1,1", "train.dtype=bfloat16", "model.n_embd=1024", "model.n_layer=16",
        "model.n_head=16", "train.batch_size=64", SCAN,
    )  # fmt: skip
    with limited_devices(n):
        found = search_layouts(config, n, device, per_host, 12).plans
        best_plan = plan_layout(found[0].config, found[0].mesh, device, per_host)
    mesh = found[0].mesh
    assert mesh["tensor"] == mesh["stage"] == mesh["context"] == 1 and found[0].fits
    assert (mesh["fsdp"] > 1) == (best == "ZeRO")
    assert ("ZeRO-3 over" in reason(found[0])) == (best == "ZeRO")
    assert all(a.fits >= b.fits for a, b in zip(found, found[1:], strict=False))
    assert max(a.mesh["tensor"] for a in found) == per_host
    assert found[0] == best_plan  # each row is the plan of its own options


def search_fit(share, *options):
    """Return the options and plan that fit on a device with a share of the memory of a layout."""
    config = configured("8,1,1", "model.n_embd=256", SCAN, *options)
    plan = plan_layout(config, MeshShape(8, 1, 1), DEVICES["a100"], 8)
    device = dataclasses.replace(DEVICES["a100"], memory=int(share * plan.memory.total / USABLE))
    (best,) = search_layouts(config, 8, device, 8, 1).plans
    if best.fits:  # it is the plan of the options that it names
        assert best == plan_layout(best.config, best.mesh, device, 8)
    return train_options(best, config), best


def test_a_plan_that_does_not_fit_suggests_a_layout_that_does():
    options, best = search_fit(0.7)
    assert best.fits and options.startswith(f"--mesh {best.mesh}")


@pytest.mark.long
def test_advice_adds_microbatches_if_no_mesh_alone_fits():
    """Eight rows per device leave too much to keep, even if layers are recomputed."""
    options, best = search_fit(0.2, "train.batch_size=64")
    assert best.fits and "train.gradient_accumulation_steps=" in options
    assert not search_fit(0.03)[1].fits  # less than an eighth of the state


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mesh", "2,4,1", "--device", "b9000"), ("--device: invalid choice: 'b9000'", "h100")),
        (("--mesh", "2,1,3"), ("tensor=3", "model.n_head=4")),
        (("--mesh", "2,4,1", "parallel.zero_stage=5"), ("parallel.zero_stage=5", "0, 1, 2, 3")),
        (("--mesh", "7,1,1"), ("train.batch_size=24", "7")),
        (("--advise", "0"), ("--advise: 0", "at least 1")),
        (("--advise", "8", "--mesh", "8,1,1"), ("--mesh", "--advise")),
        (
            ("--mesh", "1,4096,1", "train.batch_size=4096"),
            ("parallel.mesh=1,4096,1", "2048", "data"),
        ),
        (("--advise", "8", "parallel.remat=full"), ("parallel.remat=full", "--advise")),
        (("--advise", "8", "train.gradient_accumulation_steps=2"), ("steps=2", "--advise")),
        (
            ("--advise", "8", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
            ("--tensor-model-parallel-size 2", "--sequence-parallel", "--advise"),
        ),
        (("--advise", "99999"), ("--advise=99999", "65536")),
        (("--mesh", "6,1,1", "--device", "a100"), ("--devices-per-host=4", "a100", "6")),
        (("--mesh", "2,1,1", "--devices-per-host", "0"), ("--devices-per-host: 0", "at least 1")),
        (("--mesh", "2,1,1", "data.dataset=nosuch"), ("data.dataset=nosuch", "vocab_size")),
        (("--advise", "8", "--devices-per-host", "3"), ("--devices-per-host=3", "8")),
        (("--mesh", "2,4,1", "--devices"), ("--devices",)),
        (("--mesh", "2,4,1", "--device"), ("--device",)),
        (("--mesh", "2,4,1", "--nonsense", "1"), ("--nonsense",)),
        (("--advise", "two"), ("--advise: two", "whole number")),
        (("--mesh", "1,1,1", "--devices-per-host", "9" * 20), ("--devices-per-host: 9", "2^63")),
        (
            ("--mesh", "1,1,4", "parallel.sequence_parallel=True", "model.block_size=66"),
            ("parallel.sequence_parallel=True", "tensor=4", "66"),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_a_one_line_error(arguments, words, capsys):
    """The error comes before JAX starts for other devices, which would fail in this process."""
    with pytest.raises(SystemExit) as end:
        plan_command.main(["--config", "tiny", *arguments])
    assert end.value.code == 2
    line, *corrected = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(word in line for word in words), line
    if corrected:
        assert corrected[0].startswith("corrected settings (without --")
        assert corrected[1:] == ["  --config tiny --mesh 2,4,1"]


@pytest.mark.long
def test_a_preset_can_be_planned_without_options():
    """Meta's Llama 3 8B has 8,030,261,248 parameters; the preset's mesh is for any number."""
    job = run("plan", "--config", "llama3-8b")
    assert job.returncode == 0, job.stdout
    assert "llama3-8b, 8,030,261,248 parameters, on 1 x cpu" in job.stdout
    assert "parallel.mesh=1,-1,1: -1 is planned as 1" in job.stdout


def test_a_batch_that_no_mesh_divides_is_an_error():
    job = run("plan", "--config", "tiny", "model.vocab_size=256", "--advise", "7")
    words = r"^error: --advise=7: no mesh that .*train.batch_size=24; make it a multiple of 7$"
    assert job.returncode == 2 and re.search(words, job.stdout, re.MULTILINE), job.stdout


def test_advice_replaces_a_number_of_microbatches_that_does_not_divide_the_batch():
    """The preset's 5 microbatches do not divide 48 rows."""
    settings = ("train.batch_size=48", "model.n_layer=2", "model.n_embd=128", "model.n_head=2")
    job = run("plan", "--config", "gpt2", "--device", "a100", "--advise", 2, *settings)
    assert job.returncode == 0, job.stdout
    options = re.search(r"^use (--mesh .*?): ", job.stdout, re.MULTILINE)[1].split()
    config = load_config("gpt2", *settings, *options)
    assert config.train.gradient_accumulation_steps == 1 and mesh_shape(config).n_devices == 2


def test_a_plan_that_does_not_fit_is_printed_even_if_the_search_considers_no_mesh():
    """Slices of 256 tokens are shorter than `MIN_SLICE`, and 8 stages need 8 layers."""
    job = run(
        "plan", "--config", "gpt-175b", "--device", "h100", "--mesh", "context=8",
        "--devices-per-host", "1", "model.n_layer=6", "train.batch_size=1",
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    assert "DOES NOT FIT: " in job.stdout and "--advise" not in job.stdout
    assert "context = 8 uses ulysses, because 256 tokens per device are too few" in job.stdout


def test_a_plan_warns_that_it_ignores_fp8():
    config = configured("1,1,1", "train.dtype=bfloat16", "train.matmul_dtype=float8", SCAN)
    with limited_devices(1):
        plan = plan_layout(config, MeshShape(), DEVICES["h100"], 1)
    (warning,) = plan.warnings
    assert "train.matmul_dtype=float8" in warning and "matmuls in bfloat16" in warning


def test_gpt_175b_can_be_planned_on_a_laptop():
    job = run("plan", "--config", "gpt-175b", "--mesh", "8,16,8", "--json")
    assert job.returncode == 0, job.stdout
    plan = json.loads(job.stdout)
    # GPT-3's table 2.1: 96 layers of 12288; per layer 12 D^2 split over tensor and fsdp, and
    # 2 D + 2 D of norms and 2 D of row-parallel biases whole, 3 D + 4 D of others over tensor.
    L, D, V, T = 96, 12288, 50304, 2048
    split = (L * 12 * D * D + V * D) / (16 * 8) + T * D / 16
    whole = L * 6 * D + 2 * D + L * 7 * D / 8
    assert plan["memory"]["parameters"] == 4 * (split + whole)
    assert plan["memory"]["moments"] == 8 * (split + whole) + 4
    assert plan["devices"] == 1024 and plan["fits"] is False


@pytest.mark.parametrize(
    ("config", "microbatches", "gigabytes"),
    [("gpt2", 5, 36.5), pytest.param("gpt2-xl", 60, 51.1, marks=pytest.mark.long)],
)
def test_a_plan_for_an_h100_is_close_to_the_memory_that_its_compiler_reports(
    config, microbatches, gigabytes
):
    """XLA of jaxlib 0.11.2, for an H100 with cuDNN's attention: arguments and temporaries."""
    accumulation = f"train.gradient_accumulation_steps={microbatches}"
    job = run(
        "plan", "--config", config, "--mesh", "1,1,1", "--device", "h100", accumulation, "--json"
    )
    assert job.returncode == 0, job.stdout
    total = json.loads(job.stdout)["memory"]["total"]
    assert gigabytes * 1e9 < total < 1.2 * gigabytes * 1e9


def test_advice_says_that_a_model_is_too_large_for_this_machine():
    config, program = configured("1,1,1"), Program(Memory(2**60, 0, 0))
    plan = Plan(config, mesh_shape(config), DEVICES["cpu"], 1, program)
    text = advice_report(Advice([plan], 1), plan.config)
    assert "none of these layouts fits on 1 x cpu with " in text
    options = f"--mesh {plan.mesh} (1,073,741,824 GiB)"
    assert (
        f"none of the layouts that were tried on 1 x cpu fits; the best is {options}; use more "
        "devices, or try more layouts with --advise 1\n"
    ) in plan_report(plan, plan)


@pytest.mark.parametrize(
    ("mesh", "why"), [("1,2,1", "differ by at most 4%"), ("2,1,1", "pure data parallelism")]
)
def test_advice_shows_the_warnings_of_the_first_layout_and_why_it_is_not_the_fastest(mesh, why):
    def plan(mesh, remat, warning="times are estimated"):
        program = Program(Memory(8, 8, 8, 8), warnings=(warning,))
        config = configured(mesh, f"parallel.remat={remat}", "train.dtype=bfloat16")
        return Plan(config, mesh_shape(config), DEVICES["h100"], 8, program)

    slow, fast = plan("1,2,1", "full"), plan("1,2,1", "none", "of the second layout")
    first = slow if mesh == "1,2,1" else plan(mesh, "none")
    faster = dataclasses.replace(fast, config=fast.config.replace(train__batch_size=8))
    text = advice_report(Advice([first, faster], 2), fast.config)
    assert why in text and re.findall("warning: (.*)", text) == ["times are estimated"]
    assert first.summary()["warnings"] == ("times are estimated",)
    text = advice_report(Advice([faster, slow], 2), fast.config)
    assert "not the fastest" not in text


def test_the_maximum_number_of_simulated_devices_can_be_planned():
    arguments = ("--config", "tiny", "--mesh", "2048,1,1", "train.batch_size=2048")
    job = run("plan", *arguments, "model.n_layer=1", "--device", "h100")
    assert job.returncode == 0, job.stdout
    assert "fits: " in job.stdout


def test_a_report_is_readable_and_printed_by_one_process():
    job = run(
        "plan", "--config", "gpt2", "--mesh", "2,2,1", "--device", "a100", "parallel.remat=full",
        "train.batch_size=32", "train.gradient_accumulation_steps=1", processes=2,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    lines = job.stdout.splitlines()
    assert sum(line.startswith("fits: ") for line in lines) == 1
    assert max(map(len, lines)) <= 140
    assert any(line.startswith("ESTIMATE") for line in lines)
    assert "all-gather over fsdp" in job.stdout and " 0.00 " not in job.stdout


@pytest.mark.parametrize(("kind", "rounds"), [("all-gather", 1), ("all-reduce", 2)])
def test_the_time_of_a_ring_includes_bandwidth_and_latency_per_hop(kind, rounds):
    """24 devices on two hosts have 23 hops per round, of which one is between the hosts.

    On a host of Aurora, the network is faster than the links between the devices.
    """
    device, size = DEVICES["pvc"], 10**9
    assert 12 * device.network_bandwidth > device.link_bandwidth
    memory = Memory(0, 0, 0)
    plan = Plan(load_config("tiny"), MeshShape(1, 24, 1), device, 12, Program(memory))
    seconds = rounds * size * 23 / 24 / device.link_bandwidth
    latency = 8.4e-6 + rounds * (22 * 3.4e-6 + 9.6e-6)
    found = plan.seconds(Collective(kind, ("fsdp",), 1, size))
    assert found == pytest.approx(seconds + latency, rel=1e-9)


@pytest.mark.parametrize("n", [1, 4])
def test_offloaded_accumulators_are_read_and_written_by_each_microbatch(n):
    """The norm and the update then read the gradients, and a single microbatch only writes them."""
    words = ("parallel.offload=state", SCAN, f"train.gradient_accumulation_steps={n}")
    P, G, M = 10_000, 100, 1  # bytes of parameters, gradients and moments
    memory = Memory(P, (2 if n > 1 else 1) * G, M, in_host=1)
    plan = Plan(load_config(*MODEL, *words), MeshShape(), DEVICES["h100"], 8, Program(memory))
    of_parameters, of_moments = (2 * n + 2) * P, 2 * M
    of_gradients = ((2 * n if n > 1 else 1) + 2) * G
    assert plan.host_traffic == of_parameters + of_moments + of_gradients


@pytest.mark.parametrize("gigabytes", [0.01, 1000])
def test_transfers_of_a_ring_overlap_only_with_attention(gigabytes):
    config = load_config(*MODEL, "train.dtype=bfloat16")
    sent = Collective("collective-permute", ("context",), 1, int(gigabytes * 1e9))
    program = Program(Memory(1, 1, 1, 1), (sent,))
    plan = Plan(config, MeshShape(context=8), DEVICES["h100"], 8, program)
    model, device = config.model, DEVICES["h100"]
    flops = 12 * model.n_layer * model.n_embd * model.block_size * plan.tokens / 8
    attention = flops / (MATMUL_EFFICIENCY * device.peak_flops["bfloat16"])
    expected = max(0, plan.seconds(sent) - attention)
    assert plan.estimate.exposed_communication == pytest.approx(expected, abs=1e-12)
