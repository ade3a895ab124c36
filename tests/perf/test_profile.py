import functools
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import MeshShape, load_config
from jaxgpt.kernels.attention import TokenPositions, xla_attention
from jaxgpt.perf.clock import Clock
from jaxgpt.perf.hlo import Operation, is_product, parse_hlo, read_operations
from jaxgpt.perf.profile import Event, StepProfile, Tracing, describe, report, summary

N_STEPS = 3
SIZE = 512


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    """The profile of a program with one matmul, one all-reduce, and attention."""
    mesh = jax.make_mesh((8,), ("device",), axis_types=(AxisType.Auto,))
    rows = PartitionSpec("device")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, rows), out_specs=(rows, rows))
    def step(a, q):
        total = jax.lax.psum(a[0] @ a[0], "device")
        at = TokenPositions(jnp.arange(64))
        return jnp.tanh(total)[None], xla_attention(q, q * 2, q * 3, at, at)

    arguments = jnp.ones((8, SIZE, SIZE)), jnp.ones((8, 64, 2, 16))
    compiled = step.lower(*arguments).compile()
    out = compiled(*arguments)
    directory = tmp_path_factory.mktemp("profile")
    tracing = Tracing(directory, ProcessGroup(launcher="test"), out)
    for _ in range(N_STEPS):
        out = compiled(*arguments)
    found = tracing.stop(out, N_STEPS, 1.0, compiled.as_text())
    assert list(directory.glob("plugins/profile/*/*.xplane.pb"))  # where TensorBoard looks
    return found


def test_evaluations_and_saves_between_traced_steps_are_not_step_time(tmp_path):
    step = jax.jit(lambda x: x @ x).lower(jnp.eye(8)).compile()
    clock, lines = Clock(), []
    clock.enter("step")
    traced = StepProfile(
        SimpleNamespace(config=load_config("tiny", "profile_steps=4:5"), directory=tmp_path),
        ProcessGroup(launcher="test"),
        step,
        SimpleNamespace(clock=clock, info=lines.append),
    )
    state = jnp.eye(8)
    for number in (4, 5):
        traced.before(number, state)
        state = step(state)
        traced.after(number, state)
        with clock.within("evaluation" if number == 4 else "save"):
            time.sleep(0.5)
    (line,) = lines
    (milliseconds,) = re.findall(r"profile of 2 steps, ([\d.]+) ms each", line)
    assert float(milliseconds) < 500 / 2


def test_every_device_runs_each_operation_once_a_step(profile):
    assert {op["count"] for op in profile["operations"]} == {1}
    assert profile["device_seconds"] > 0
    assert sum(profile["categories"].values()) == pytest.approx(profile["device_seconds"])
    shares = [op["share"] for op in profile["operations"]]
    assert shares == sorted(shares, reverse=True) and sum(shares) <= 1 + 1e-9


def test_operations_have_the_right_categories(profile):
    by_category = {}
    for op in profile["operations"]:
        by_category.setdefault(op["category"], []).append(op["name"])
    assert len(by_category["matmul"]) == len(by_category["collective"]) == 1
    assert by_category["elementwise"] and by_category["attention"]
    # 2 x 512^3 FLOPs against 2 x 2 x 2 x 64^2 x 16 in attention.
    assert profile["categories"]["matmul"] > profile["categories"]["attention"] > 0


def compiled_step(mesh, *settings):
    """Return the HLO of a small model's training step."""
    from jaxgpt.parallel.mesh import make_mesh
    from jaxgpt.train.jitted import make_steps

    config = load_config(
        "tiny", "model.n_layer=1", "model.n_embd=32", "model.n_head=2", "model.block_size=16",
        "model.vocab_size=64", "train.batch_size=8", *settings,
    )  # fmt: skip
    return make_steps(config, make_mesh(mesh)).lower_train_step().compile().as_text()


def test_ring_attention_counts_as_attention():
    program = parse_hlo(compiled_step(MeshShape(4, context=2), "parallel.context_impl=ring"))
    operations = read_operations(program)
    in_ring = [
        operations[name].category
        for name, instruction in program.instructions.items()
        if is_product(instruction)
        and any(file.endswith("parallel/ring.py") for file, _, _ in program.stack(instruction))
    ]
    assert set(in_ring) == {"attention"}


def test_operations_of_a_model_have_their_source_lines():
    hlo = compiled_step(MeshShape(2, 2, 2))
    operations = read_operations(parse_hlo(hlo))
    sources = {}
    for op in operations.values():
        sources.setdefault(op.category, set()).add(op.source.partition(":")[0])
    assert "kernels/attention.py" in sources["attention"]
    assert "models/layers.py" not in sources["attention"]  # products with weights count as matmul
    assert any(source.startswith("models/") for source in sources["matmul"])
    assert "train/step.py" in sources["elementwise"]
    kinds = ("all-reduce(", "all-gather(", "reduce-scatter(", "all-to-all(")
    expected = sum(any(f" {kind}" in line for kind in kinds) for line in hlo.split("\n"))
    assert sum(op.category == "collective" for op in operations.values()) == expected > 0


def test_waiting_is_the_time_in_a_collective_before_the_last_process_arrives():
    operations = {"sum": Operation("collective", ""), "dot": Operation("matmul", "")}

    def process(*events):
        return report([Event(*event) for event in events], operations)

    early = process(("dot", "cpu 0", 0.0, 1.0), ("sum", "cpu 0", 1.0, 5.0))
    late = process(("dot", "cpu 0", 0.0, 4.0), ("sum", "cpu 0", 4.0, 2.0))
    found = summary([early, late], operations, n_steps=1, seconds=6.0)
    assert found["categories"]["collective"] == (5 + 2) / 2
    assert found["collective_waiting"] == (3 + 0) / 2
    assert found["device_seconds"] == 6
    words = describe(found | {"may_be_incomplete": False})
    assert "collective " in words and "CUDA graphs" not in words
    assert "waiting    1500.000 ms   25.0%" in words


def test_a_library_in_a_folder_named_jaxgpt_is_not_a_source_in_this_package():
    """Here, the library is in an environment inside a clone. A frame names its parent's ID + 1."""
    text = """HloModule jit_train_step

FileNames
1 "/home/me/jaxgpt/jaxgpt/train/step.py"
2 "/home/me/jaxgpt/.venv/lib/python3.11/site-packages/optax/_tree_math.py"

FunctionNames
1 "train_step"
2 "tree_sum"

FileLocations
1 {file_name_id=1 function_name_id=1 line=113 end_line=113}
2 {file_name_id=2 function_name_id=2 line=187 end_line=187}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

ENTRY %main (a: f32[8]) -> f32[8] {
  ROOT %sum = f32[8]{0} add(%a, %a), metadata={op_name="sum" stack_frame_id=2}
}
"""
    operations = read_operations(parse_hlo(text))
    assert operations["sum"].source == "train/step.py:113 train_step"


def test_an_incomplete_gpu_trace_names_the_flag_that_completes_it():
    operations = {"dot": Operation("matmul", "models/transformer.py:67")}
    events = [Event("dot", "gpu 0", 0.0, 1.0)]
    found = summary([report(events, operations)], operations, n_steps=1, seconds=100.0)
    words = describe(found | {"may_be_incomplete": True})
    assert "XLA_FLAGS=--xla_gpu_enable_command_buffer=" in words and "matmul" in words
    nothing = summary([report([], operations)], operations, n_steps=1, seconds=100.0)
    assert "xla_gpu_enable_command_buffer=" in describe(nothing | {"may_be_incomplete": True})


# HLO as XLA writes it, after xla/service/gpu/cublas_cudnn.h and docs/async_ops.md.
GPU = """
HloModule jit_train_step, is_scheduled=true

%scattered (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

%moved (p.1: bf16[8,4]) -> bf16[4,8] {
  %p.1 = bf16[8,4]{1,0} parameter(0)
  ROOT %t = bf16[4,8]{1,0} transpose(%p.1), dimensions={1,0}
}

%triton (p.2: bf16[8,4], p.3: bf16[4,8]) -> bf16[8,8] {
  %p.2 = bf16[8,4]{1,0} parameter(0)
  %p.3 = bf16[4,8]{1,0} parameter(1)
  ROOT %d = bf16[8,8]{1,0} dot(%p.2, %p.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[8,4], b: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[8,4]{1,0} parameter(0)
  %gemm = (bf16[8,8]{1,0}, s8[33554432]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm"
  %lt = bf16[8,8]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
  %fused = bf16[8,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%triton
  %flash = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%a), custom_call_target="__cudnn$fmhaSoftmax"
  %back = bf16[8,8]{1,0} custom-call(%a), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %turned = bf16[4,8]{1,0} fusion(%a), kind=kInput, calls=%moved
  %sent = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1}}, dimensions={0}
  %async = ((f32[8]{0}), f32[4]{0}) async-start(%x), calls=%scattered
  %topk = (f32[4]{0}, s32[4]{0}) custom-call(%x), custom_call_target="TopK"
  %sum = bf16[8,8]{1,0} add(%lt, %fused)
}
"""


def test_gpu_operations_have_the_right_categories():
    found = {name: op.category for name, op in read_operations(parse_hlo(GPU)).items()}
    expected = {
        "matmul": ("gemm", "lt", "fused"),
        "attention": ("flash", "back"),
        "copy": ("turned",),
        "collective": ("sent", "async"),
        "other": ("topk",),
        "elementwise": ("sum",),
    }
    for category, names in expected.items():
        assert {found[name] for name in names} == {category}, category
