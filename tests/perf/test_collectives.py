import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxgpt.perf.collectives import Collective, read_collectives, ring_bytes

MESH = {"data": 2, "fsdp": 2, "tensor": 2}
F32 = 4  # bytes


def compiled(function, in_specs, out_specs, *shapes, dtype=jnp.float32, sizes=MESH):
    """Return the HLO text of a shard_map over eight CPU devices."""
    mesh = make_mesh(sizes)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return jax.jit(mapped).lower(*arguments).compile().as_text()


def make_mesh(sizes):
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def program(*lines, partitions=8):
    """Return a hand-written program with one computation."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m, num_partitions={partitions}\n\nENTRY %main () -> f32[] {{\n{body}\n}}\n"


AXES = [
    axes
    for n in (1, 2, 3)
    for axes in itertools.combinations(MESH, n)  # every non-empty subset
]


@pytest.mark.parametrize("axes", AXES, ids="-".join)
def test_psum_is_an_all_reduce_over_its_axes(axes):
    hlo = compiled(lambda x: jax.lax.psum(x, axes), P(), P(), (8, 16))
    assert read_collectives(hlo, MESH) == (Collective("all-reduce", axes, 1, 8 * 16 * F32),)


def test_all_gather_counts_the_whole_array():
    hlo = compiled(lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), P("fsdp"), P(), (8, 16))
    assert read_collectives(hlo, MESH) == (Collective("all-gather", ("fsdp",), 1, 8 * 16 * F32),)


def test_reduce_scatter_counts_the_whole_array():
    hlo = compiled(
        lambda x: jax.lax.psum_scatter(x, ("fsdp", "tensor"), tiled=True),
        P(),
        P(("fsdp", "tensor")),
        (8, 16),
    )
    assert read_collectives(hlo, MESH) == (
        Collective("reduce-scatter", ("fsdp", "tensor"), 1, 8 * 16 * F32),
    )


def test_the_pieces_of_an_all_to_all_count_as_one_array():
    hlo = compiled(
        lambda x: jax.lax.all_to_all(x, "fsdp", 1, 0, tiled=True), P("fsdp"), P("fsdp"), (8, 16)
    )
    assert read_collectives(hlo, MESH) == (Collective("all-to-all", ("fsdp",), 1, 4 * 16 * F32),)


def test_the_axis_of_a_permute_comes_from_its_source_target_pairs():
    hlo = compiled(
        lambda x: jax.lax.ppermute(x, "tensor", [(0, 1), (1, 0)]), P("tensor"), P("tensor"), (8, 16)
    )
    assert read_collectives(hlo, MESH) == (
        Collective("collective-permute", ("tensor",), 1, 4 * 16 * F32),
    )


def test_the_cpu_communicates_bfloat16_as_float32():
    # A plan made on CPUs counts twice the bytes of bfloat16 arrays on an accelerator.
    hlo = compiled(
        lambda x: jax.lax.all_gather(x, "fsdp", tiled=True) * 2,
        P("fsdp"),
        P(),
        (8, 16),
        dtype=jnp.bfloat16,
    )
    assert read_collectives(hlo, MESH) == (Collective("all-gather", ("fsdp",), 1, 8 * 16 * F32),)


def test_a_psum_of_several_leaves_counts_each():
    hlo = compiled(
        lambda *x: jax.lax.psum(x, "data"), (P(),) * 3, (P(),) * 3, (8, 16), (4,), (3, 3)
    )
    assert read_collectives(hlo, MESH) == (
        Collective("all-reduce", ("data",), 3, (8 * 16 + 4 + 3 * 3) * F32),
    )


def scanned(length, body, unroll=1):
    def run(x):
        return jax.lax.scan(lambda c, _: (body(c), None), x, None, length, unroll=unroll)[0]

    return run


def summed(axis):
    return lambda x: jnp.sin(jax.lax.psum(x, axis))


LOOPS = {
    "scan": (scanned(5, summed("tensor")), 5),
    "nested": (scanned(3, scanned(5, summed("tensor"))), 15),
    "nested twice": (scanned(2, lambda x: scanned(3, scanned(5, summed("tensor")))(x) + 1), 30),
    "unrolled": (scanned(12, summed("tensor"), unroll=2), 12),
    "started late": (lambda x: jax.lax.fori_loop(2, 9, lambda _, c: summed("tensor")(c), x), 7),
    "long steps": (
        lambda x: jax.lax.while_loop(
            lambda c: c[0] < 10, lambda c: (c[0] + 3, summed("tensor")(c[1])), (0, x)
        )[1],
        4,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_collectives_in_a_loop_count_once_per_iteration(name):
    function, times = LOOPS[name]
    hlo = compiled(function, P(), P(), (8, 16))
    assert read_collectives(hlo, MESH) == (
        Collective("all-reduce", ("tensor",), times, times * 8 * 16 * F32),
    )


def test_a_loop_with_an_unknown_trip_count_is_an_error():
    def until_small(x):
        return jax.lax.while_loop(lambda c: jnp.max(c) > 1e-3, lambda c: summed("data")(c) / 4, x)

    with pytest.raises(ValueError, match="number of iterations is unknown"):
        read_collectives(compiled(until_small, P(), P(), (8, 16)), MESH)
    quiet = compiled(
        lambda x: jax.lax.while_loop(lambda c: jnp.max(c) > 1e-3, lambda c: c / 4, x),
        P(),
        P(),
        (8, 16),
    )
    assert read_collectives(quiet, MESH) == ()


def test_a_conditional_counts_its_larger_branch():
    def either(x):
        return jax.lax.cond(x[0, 0] > 0, summed("data"), lambda x: summed("data")(x[:2])[:1] + x, x)

    assert read_collectives(compiled(either, P(), P(), (8, 16)), MESH) == (
        Collective("all-reduce", ("data",), 1, 8 * 16 * F32),
    )


def test_a_single_device_does_not_communicate():
    sizes = {"data": 1, "fsdp": 8, "tensor": 1}
    hlo = compiled(lambda x: jax.lax.psum(x, ("data", "tensor")), P(), P(), (8, 16), sizes=sizes)
    assert read_collectives(hlo, sizes) == ()


def test_equal_collectives_are_merged_and_sorted_by_mesh_axis():
    def several(x):
        x = jnp.sin(jax.lax.psum(x, "tensor"))
        x = jnp.sin(jax.lax.psum(x, "data"))
        x = jnp.sin(jax.lax.psum(x, ("data", "fsdp")))
        return jax.lax.psum(x, "tensor")

    found = read_collectives(compiled(several, P(), P(), (8, 16)), MESH)
    assert [(c.axes, c.count) for c in found] == [
        (("data",), 1),
        (("tensor",), 2),
        (("data", "fsdp"), 1),
    ]


@pytest.mark.parametrize(
    ("before", "after", "kind", "axes", "share"),
    [
        # A device's quarter of the rows becomes its quarter of the columns.
        (("data", "fsdp"), ("data", "fsdp"), "all-to-all", ("data", "fsdp"), 4),
        (("tensor", "data"), ("tensor", "data"), "all-to-all", ("data", "tensor"), 4),
        # Each device has half of its columns, and gathers the other half.
        (("data",), ("tensor",), "all-gather", ("data",), 2),
    ],
)
def test_collectives_that_xla_inserts_for_a_layout_change_are_counted(
    before, after, kind, axes, share
):
    mesh = make_mesh(MESH)
    rows, columns = NamedSharding(mesh, P(before)), NamedSharding(mesh, P(None, after))
    double = jax.jit(lambda x: x * 2, in_shardings=rows, out_shardings=columns)
    hlo = double.lower(jax.ShapeDtypeStruct((16, 16), jnp.float32)).compile().as_text()
    expected = Collective(kind, axes, 1, 16 * 16 * F32 // share)
    assert read_collectives(hlo, MESH) == (expected,)


def groups_along(sizes, axes):
    """Return the device groups along some axes, found one device at a time."""
    groups = {}
    for device, place in enumerate(np.ndindex(*sizes.values())):
        fixed = tuple(i for i, name in zip(place, sizes, strict=True) if name not in axes)
        groups.setdefault(fixed, []).append(device)
    return "{" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups.values()) + "}"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_axes_of_listed_groups_are_found(n):
    sizes = {"data": 4, "fsdp": 3, "context": 1, "tensor": 2, "stage": 2}
    for axes in itertools.combinations([a for a in sizes if sizes[a] > 1], n):
        line = f"ROOT %a = f32[10]{{0}} all-reduce(%x), replica_groups={groups_along(sizes, axes)}"
        assert read_collectives(program(line, partitions=48), sizes)[0].axes == axes


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", ("data", "tensor")),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("{{1,0},{2,3},{5,4},{6,7}}", ("tensor",)),
        ("[1,8]<=[8]", ("data", "tensor")),
        ("[4,2]<=[8]", ("tensor",)),
        ("[2,4]<=[4,2]T(1,0)", ("data",)),
        ("[4,2]<=[2,2,2]T(2,1,0)", ("data",)),  # 0,4 1,5 2,6 3,7: half of the axis
        ("[8,1]<=[8]", None),
        ("mesh['data'=4,'tensor'=2] {'data'}", ("data",)),
        ("mesh['data'=4,'tensor'=2] {'data','tensor'}", ("data", "tensor")),
        ("mesh['axis_0'=1,'axis_1'=8] {'axis_1'}", ("data", "tensor")),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("tensor",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("data",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(2)2}", ("data",)),
        (
            "mesh['axis_0'=1,'axis_1'=2,'axis_2'=4], device_ids=([4,2]T(1,0)) {'axis_1'}",
            ("tensor",),
        ),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", ("data",)),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("data",)),
    ],
)
def test_every_notation_for_groups_is_parsed(groups, axes):
    sizes = {"data": 4, "tensor": 2}
    line = f"ROOT %a = bf16[10,3]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, etc"
    found = read_collectives(program(line), sizes)
    assert found == ((Collective("all-reduce", axes, 1, 60),) if axes else ())


def test_a_permute_spans_every_axis_that_a_pair_crosses():
    def axes_of(pairs):
        line = f"%p = f32[10]{{0}} collective-permute(%x), source_target_pairs={pairs}, etc"
        return [c.axes for c in read_collectives(program(line), MESH)]

    assert axes_of("{{0,0},{1,4},{4,1}}") == [("data", "tensor")]
    assert axes_of("{{0,2},{2,0}}") == [("fsdp",)]
    assert axes_of("{{0,0},{1,1}}") == []


# Asynchronous forms that XLA's GPU backend writes, each with its count and bytes.
GROUPS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true, to_apply=%add"
STARTED = [
    ("(bf16[2,4]{1,0}, bf16[4,4]{1,0})", "all-gather", "bf16[4,4]{1,0}", 1, 32),
    (
        "((f32[2]{0}, f32[3]{0}), (f32[4]{0}, f32[6]{0}))", "all-gather",
        "(f32[4]{0}, f32[6]{0})", 2, 40,
    ),
    ("f32[5]{0}", "all-reduce", "f32[5]{0}", 1, 20),
    ("(f32[5]{0}, f32[])", "all-reduce", "(f32[5]{0}, f32[])", 2, 24),
    ("((f32[8]{0:T(128)S(1)}), f32[4]{0}, s32[])", "reduce-scatter", "f32[4]{0}", 1, 32),
    ("((s8[2,8]{1,0}), s8[2,8]{1,0})", "all-to-all", "s8[2,8]{1,0}", 1, 16),
    ("(f16[6]{0}, f16[6]{0}, u32[], u32[])", "collective-permute", "f16[6]{0}", 1, 12),
]  # fmt: skip


@pytest.mark.parametrize(("started", "kind", "done", "count", "size"), STARTED)
def test_asynchronous_operations_count_once(started, kind, done, count, size):
    groups = GROUPS
    if kind == "collective-permute":
        groups = groups.replace("replica_groups", "source_target_pairs")
    hlo = program(
        f"%s = {started} {kind}-start(%x), dimensions={{0}}, {groups}",
        f"ROOT %d = {done} {kind}-done(%s)",
    )
    assert read_collectives(hlo, MESH) == (Collective(kind, ("tensor",), count, size),)


def test_collectives_in_called_computations_are_counted():
    inner = f"  ROOT %r = f32[4]{{0}} all-reduce(%x), {GROUPS}\n}}\n"
    hlo = program(
        "%a = ((f32[4]{0}), f32[4]{0}) async-start(%x), calls=%wrapped",
        "%b = f32[4]{0} async-done(%a), calls=%wrapped",
        "%c = f32[4]{0} call(%b), to_apply=%wrapped",
        "%e = f32[4]{0} conditional(%i, %b, %b), branch_computations={%wrapped, %wrapped}",
        "ROOT %f = f32[4]{0} fusion(%c), kind=kLoop, calls=%wrapped",
    )
    head, entry = hlo.split("ENTRY")
    hlo = f"{head}%wrapped (x: f32[4]) -> f32[4] {{\n{inner}\nENTRY{entry}"
    assert read_collectives(hlo, MESH) == (Collective("all-reduce", ("tensor",), 4, 64),)


def test_a_program_for_another_mesh_is_an_error():
    hlo = compiled(lambda x: jax.lax.psum(x, "data"), P(), P(), (8, 16))
    with pytest.raises(ValueError, match="the program is for 8 devices"):
        read_collectives(hlo, {"data": 4, "fsdp": 1, "tensor": 1})


def ring_all_reduce(inputs):
    """Sum n arrays around a ring; return the sums, and the bytes that a device sends per step.

    The first half of the steps is a reduce-scatter, the second an all-gather.
    """
    n, sent = len(inputs), []
    held = [np.split(array, n) for array in inputs]
    for step in range(2 * (n - 1)):
        moving = [held[d][(d - step) % n] for d in range(n)]  # what each device sends to the next
        for d in range(n):
            chunk = (d - 1 - step) % n
            old = held[d][chunk] if step < n - 1 else 0
            held[d][chunk] = old + moving[d - 1]
        sent.append(moving[0].nbytes)
    return [np.concatenate(chunks) for chunks in held], sent


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ring_bytes_match_a_simulated_ring(n):
    inputs = np.random.default_rng(0).integers(0, 9, (n, 24))
    outputs, sent = ring_all_reduce(inputs)
    assert all((output == inputs.sum(0)).all() for output in outputs)
    assert ring_bytes("all-reduce", inputs[0].nbytes, n) == pytest.approx(sum(sent))
    assert ring_bytes("reduce-scatter", inputs[0].nbytes, n) == pytest.approx(sum(sent[: n - 1]))
    assert ring_bytes("all-gather", inputs[0].nbytes, n) == pytest.approx(sum(sent[n - 1 :]))


def test_an_all_to_all_sends_a_fraction_of_its_bytes_and_a_permute_sends_all():
    # In an all-to-all, a device keeps 1/n of its array; a permutation sends everything.
    assert ring_bytes("all-to-all", 1200, 4) == 900
    assert ring_bytes("collective-permute", 1200, 4) == 1200
