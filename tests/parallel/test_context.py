"""Context parallelism: attention to keys on other devices."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxgpt.config import MeshShape, UsageError, load_config
from jaxgpt.kernels.attention import TokenPositions, xla_attention
from jaxgpt.parallel import context, ring
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.perf.collectives import read_collectives
from jaxgpt.perf.hardware import DEVICES
from jaxgpt.plan.advise import Estimator
from jaxgpt.plan.program import COMPILE_ONLY
from jaxgpt.train import sharded_model
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices, run, trace

AXES = ("context",)
SMALL = (
    "shakespeare_char_cpu", "data.dataset=python", "model.n_layer=2", "model.n_head=8",
    "model.n_embd=64", "model.block_size=64", "train.batch_size=8", "parallel.scan_layers=True",
)  # fmt: skip
LLAMA = (
    "model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.mlp_hidden=128",
    "model.n_kv_head=2", "model.tie_embeddings=False",
)  # fmt: skip
DOCUMENTS = ("data.document_mask=True", "data.end_of_text=10")  # a document is a line
WINDOWS = ("model.layers=local global", "model.sliding_window=20")


def plain(q, k, v, at, window):
    """Attention of the whole row, in float64."""
    return xla_attention(q, k, v, at, at, window)


def split(impl, n, q, k, v, at, window):
    """The same on n devices, each with a slice of the row."""

    def local(q, k, v, at):
        if impl == "ulysses":
            at = context.gather_positions(at, AXES)
            return context.ulysses_attention(AXES, xla_attention, q, k, v, at, at, window, None)
        q, k, v, *at = (context.to_zigzag(x, AXES) for x in (q, k, v, *at))
        at = context.gather_positions(TokenPositions(*at), AXES)
        out = ring.ring_attention(AXES, q, k, v, at, at, window, None)
        return context.from_zigzag(out, AXES)

    tokens = PartitionSpec(None, "context")
    with limited_devices(n):
        mesh = make_mesh(MeshShape(context=n))
    return jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens)(q, k, v, at)


def document_positions(B, T):
    begins = np.random.default_rng(1).random((B, T)) < 0.1
    begins[:, 0] = False
    starts = np.maximum.accumulate(np.where(begins, np.arange(T), 0), axis=1)
    return TokenPositions(*(x.astype(np.int32) for x in (np.arange(T) - starts, begins.cumsum(1))))


@pytest.mark.parametrize(
    ("impl", "n", "G", "window"),
    [
        ("ring", 2, 4, None),
        ("ring", 4, 2, None),
        ("ring", 4, 4, 9),
        ("ring", 4, 2, 20),
        ("ring", 2, 2, 30),  # more than half a row
        ("ulysses", 2, 4, None),
        ("ulysses", 4, 2, 9),
    ],
)
def test_outputs_and_gradients_are_those_of_plain_attention(impl, n, G, window):
    compare_with_plain_attention(impl, n, G, window)


@pytest.mark.long
@pytest.mark.parametrize(
    ("impl", "n", "G", "window"),
    list(itertools.product(("ring", "ulysses"), (2, 3, 8), (1, 8, 24), (None, 7, 30, 100))),
)
def test_every_form_has_the_outputs_and_gradients_of_plain_attention(impl, n, G, window):
    compare_with_plain_attention(impl, n, G, window, H=24, T=96)


def compare_with_plain_attention(impl, n, G, window, H=4, T=32, B=2, K=8):
    with jax.enable_x64(True):
        draw = np.random.default_rng(0).normal
        q, d_out = (draw(size=(B, T, H, K)) for _ in range(2))
        k, v = (draw(size=(B, T, G, K)) for _ in range(2))
        at = document_positions(B, T)
        results = []
        for attend in (plain, functools.partial(split, impl, n)):

            def value_and_gradients(*operands, attend=attend):
                out, pull_back = jax.vjp(lambda q, k, v: attend(q, k, v, at, window), *operands[:3])
                return out, *pull_back(operands[3])

            lowered = jax.jit(value_and_gradients).lower(q, k, v, d_out)
            results.append(lowered.compile(COMPILE_ONLY)(q, k, v, d_out))
        scale = max(np.abs(x).max() for x in results[0])
        for expected, found in zip(*results, strict=True):
            assert found.dtype == np.float64
            assert np.abs(found - expected).max() <= 1e-12 * scale


def test_the_zigzag_layout_and_back():
    for n in (2, 3, 8):
        tokens = PartitionSpec(None, "context")
        with limited_devices(n):
            mesh = make_mesh(MeshShape(context=n))
        on_mesh = functools.partial(jax.shard_map, mesh=mesh, in_specs=tokens, out_specs=tokens)
        row = jnp.arange(4 * n)[None]  # chunks of two
        moved = jax.jit(on_mesh(lambda x: context.to_zigzag(x, AXES)))(row)
        chunks = (np.asarray(moved).reshape(n, 2, 2)[..., 0] // 2).tolist()
        assert chunks == [[i, 2 * n - 1 - i] for i in range(n)]
        back = jax.jit(on_mesh(lambda x: context.from_zigzag(x, AXES)))(moved)
        np.testing.assert_array_equal(back, row)


@functools.cache
def reference(*options, n_steps=4):
    return trace(n_steps, *SMALL, *options, "--mesh", "1,1,1", devices=1)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=2,context=4", ("parallel.context_impl=ring",)),
        ("context=4,tensor=2", (*LLAMA, *DOCUMENTS, *WINDOWS, "parallel.context_impl=ring")),
        ("fsdp=2,context=2,tensor=2", (*LLAMA, *DOCUMENTS, "parallel.context_impl=ulysses")),
        ("context=8", ("model.dropout=0.2", "train.gradient_accumulation_steps=2")),
    ],
)
def test_the_losses_are_those_of_one_device(mesh, options):
    same_on_any_mesh = [o for o in options if not o.startswith("parallel.")]
    sequence_parallel = ("parallel.sequence_parallel=True",) if "tensor" in mesh else ()
    n = MeshShape.parse(mesh).n_devices
    found = trace(4, *SMALL, *options, *sequence_parallel, "--mesh", mesh, devices=n)
    assert_same(found, reference(*same_on_any_mesh))


def assert_same(found, expected):
    assert found["params"] == expected["params"] and found["rows"] == expected["rows"]
    for name in ("losses", "norms", "evaluated"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("impl", ["ring", "ulysses"])
@pytest.mark.parametrize(
    "mesh", ["context=2", "context=4", "context=8", "context=2,tensor=2", "context=4,tensor=2"]
)
@pytest.mark.parametrize("family", [(), LLAMA])
@pytest.mark.parametrize("masks", [(), DOCUMENTS, WINDOWS, (*DOCUMENTS, *WINDOWS)])
def test_every_form_has_the_losses_of_one_device(mesh, impl, family, masks):
    options = (*family, *masks)
    shape = ("--mesh", mesh, f"parallel.context_impl={impl}")
    found = trace(20, *SMALL, *options, *shape, devices=MeshShape.parse(mesh).n_devices)
    assert_same(found, reference(*options, n_steps=20))


@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "optimizer"),
    [
        ("fsdp=2,context=4", "adamw"),
        ("stage=2,fsdp=2,context=2", "adamw"),
        ("stage=2,context=2,tensor=2", "muon"),
    ],
)
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize("impl", ["ring", "ulysses"])
@pytest.mark.parametrize("family", [(), LLAMA], ids=["gpt2", "llama"])
def test_five_axes_have_the_losses_of_one_device(mesh, optimizer, zero_stage, impl, family):
    if zero_stage == 0 and "fsdp" not in mesh:
        pytest.skip("no axis shards parameters")
    options = (*family, *DOCUMENTS, f"optimizer.name={optimizer}")
    options = (*options, "train.gradient_accumulation_steps=2")
    shape = ("--mesh", mesh, f"parallel.context_impl={impl}", f"parallel.zero_stage={zero_stage}")
    found = trace(20, *SMALL, *options, *shape, devices=8)
    assert_same(found, reference(*options, n_steps=20))


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["data=2,context=2,tensor=2", "stage=2,context=2,tensor=2"])
def test_commands_work_on_a_split_sequence(mesh, tmp_path):
    """The run samples; its steps are repeated, inspected, evaluated and continued elsewhere."""
    mesh, other = ("--mesh", mesh), ("--mesh", "1,1,1")
    settings = (
        *SMALL, "train.gradient_accumulation_steps=2", "train.eval_interval=2",
        "train.sample_tokens=20", "checkpoint.interval=2", "train.verify_interval=1",
        "--train-range-to-skip", "2", "2", "profile_steps=3:3",
    )  # fmt: skip
    ring = "parallel.context_impl=ring"
    out = ("--out", tmp_path / "run")
    job = run("train", "--config", *settings, *mesh, ring, *out, "train.max_iters=4")
    assert job.returncode == 0, job.stdout
    log = (out[1] / "train.log").read_text()
    assert "context = 2 uses ring" in log and "operations take" in log  # the profile's table
    job = run("replay", "--run", out[1], "--step", 4)
    assert job.returncode == 0 and "bit for bit" in job.stdout, job.stdout
    for command in (
        ("inspect", "--run", out[1], "--step", 3, "--worst", "--json"),
        ("evaluate", "--run", out[1], "--json"),
    ):
        here, there = (run(*command, *place) for place in (mesh, other))
        assert here.returncode == there.returncode == 0, here.stdout + there.stdout
        found, expected = (
            [float(x) for x in re.findall(r'"loss": ([\d.]+)', job.stdout)] for job in (here, there)
        )
        assert len(found) > 0
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    alone = (*other, "train.verify_interval=0", "train.sample_tokens=0")
    job = run("train", *out, *alone, "train.max_iters=6")
    assert job.returncode == 0 and "resumed from step 4" in job.stdout, job.stdout


def compiled_steps(mesh, *options):
    config = load_config(*SMALL, *options, "--mesh", mesh).replace(model__vocab_size=65)
    shape = MeshShape.parse(mesh)
    with limited_devices(shape.n_devices):
        return make_steps(config, make_mesh(shape))


def count(kind, mesh, *options):
    """Number of collectives of one kind in a train step."""
    compiled = compiled_steps(mesh, *options).lower_train_step().compile(COMPILE_ONLY)
    found = read_collectives(compiled.as_text(), MeshShape.parse(mesh))
    return sum(c.count for c in found if c.kind == kind)


@pytest.mark.parametrize("n", [2, 4])
def test_a_ring_sends_keys_and_gradients_n_minus_1_times(n):
    """Keys and values in the forward and the backward pass, and their gradients."""
    counts = [
        count("collective-permute", f"context={n}", "parallel.context_impl=ring", *layers)
        for layers in (["model.n_layer=1"], ["model.n_layer=3"])
    ]
    assert (counts[1] - counts[0]) / 2 == 3 * (n - 1)


def test_a_short_window_needs_no_ring():
    """Each chunk (8 tokens) fetches the 19 keys before it from three chunks, of 8, 8 and 3."""
    options = ("parallel.context_impl=ring", "model.sliding_window=20")
    counts = [
        count("collective-permute", "context=4", *options, f"model.n_layer={L}") for L in (1, 3)
    ]
    assert (counts[1] - counts[0]) / 2 == 2 * 3 * 2  # two directions, forward and backward


@pytest.mark.parametrize(("options", "n"), [((), 2), (("model.n_kv_head=2",), 3)])
def test_ulysses_needs_two_or_three_all_to_alls_in_each_pass(options, n):
    options = (*options, "parallel.context_impl=ulysses", "model.n_layer=3")
    assert count("all-to-all", "context=4", *options) == 2 * 3 * n


def test_all_devices_of_a_causal_ring_compute_equally_much():
    """The pairs (query, key) that are visible, and the products of chunks, are the same in number.

    Each visible product of two chunks is computed exactly once.
    """
    n, chunk = 4, 8
    tokens = np.arange(2 * n * chunk).reshape(2 * n, chunk)
    chunks = [[i, 2 * n - 1 - i] for i in range(n)]
    own = [tokens[list(pair)].ravel() for pair in chunks]
    visible = [sum(position + 1 for position in positions) for positions in own]
    assert max(visible) / np.mean(visible) == 1
    computed = []
    for i, step in itertools.product(range(n), range(n)):
        source = (i - step) % n
        computed += [
            (chunks[i][mine], chunks[source][theirs])
            for mine, theirs in ring.visible_pairs(step, i, source)
        ]
    assert sorted(computed) == [(q, k) for q in range(2 * n) for k in range(q + 1)]


@pytest.mark.long
@pytest.mark.parametrize("impl", ["ring", "ulysses"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_eight_devices_need_less_than_a_sixth_of_the_memory(impl, remat):
    T, temporary = 32768, {}
    options = (
        f"model.block_size={T}", "model.n_layer=4", "model.n_embd=256", "model.position=rope",
        "train.batch_size=1", f"parallel.remat={remat}",
    )  # fmt: skip
    for mesh in ("context=1", "context=8"):
        steps = compiled_steps(mesh, *options, f"parallel.context_impl={impl}")
        compiled = steps.lower_train_step().compile(COMPILE_ONLY)
        temporary[mesh] = compiled.memory_analysis().temp_size_in_bytes
        assert not re.search(rf"\b{T},{T}\b", compiled.as_text())
    assert temporary["context=8"] <= temporary["context=1"] / 6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mesh context=3", "context = 3 must divide model.block_size=64"),
        (
            "--mesh context=4,tensor=2 model.block_size=12 parallel.sequence_parallel=True",
            "context x tensor = 8 must divide model.block_size=12",
        ),
        (
            "--mesh context=16 parallel.context_impl=ulysses",
            "context x tensor = 16 does not divide model.n_head=8",
        ),
        (
            "--mesh context=4 model.block_size=12 parallel.context_impl=ring",
            "2 x context = 8 does not divide model.block_size=12",
        ),
        (
            "--mesh context=2 model.dropout=0.1 parallel.context_impl=ring",
            "ring attention cannot use attention dropout, but model.dropout=0.1",
        ),
        (
            "--mesh context=2 model.attention=xla parallel.context_impl=ring",
            "ring attention has its own blockwise kernel, but model.attention=xla",
        ),
        ("--mesh context=16 model.dropout=0.1", "not possible with ulysses .*, nor with ring"),
        ("--mesh context=2,context=2", "sizes by name"),
        ("--mesh contxt=2", "did you mean context"),
        ("parallel.context_impl=flash", "ulysses"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(options, words):
    with pytest.raises(UsageError, match=words) as error:
        load_config(*SMALL, *options.replace("--mesh ", "parallel.mesh=").split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "devices_per_host", "expected", "why"),
    [
        ("model.n_head=8", 8, "ulysses", "its devices share a host"),
        ("model.n_head=6 model.n_embd=48", 8, "ring", "does not divide model.n_head=6"),
        ("model.dropout=0.1", 8, "ulysses", "dropout"),
        ("", 2, "ulysses", "16 tokens per device are too few"),
        ("model.block_size=65536", 2, "ring", "16384 tokens per device"),
        ("parallel.context_impl=ring", 8, "ring", "parallel.context_impl=ring"),
    ],
)
def test_the_implementation_is_chosen_and_the_choice_explained(
    options, devices_per_host, expected, why
):
    shape = MeshShape(context=4)
    config = load_config(*SMALL, *options.split(), "--mesh", str(shape))
    impl, reason = context.choose_implementation(config, shape, devices_per_host)
    assert impl == expected and why in reason


@pytest.mark.parametrize(("per_host", "expected"), [(4, "ring"), (6, "ulysses"), (12, "ulysses")])
def test_a_group_spans_hosts_unless_the_hosts_are_divided_evenly(per_host, expected):
    """With 4 devices per host, a group of 3 devices fits on a host, but the second one does not."""
    T = 3 * context.RING_TOKENS
    words = ("model.n_head=6", "model.n_embd=48", f"model.block_size={T}", "--mesh")
    config = load_config(*SMALL, *words, "data=4,context=3")
    shape = MeshShape(data=4, context=3)
    assert context.choose_implementation(config, shape, per_host)[0] == expected


@pytest.mark.parametrize(
    ("per_host", "uses"),
    [
        (2, "ulysses, because it divides the heads, and its devices share a host"),
        (1, "ring, because it spans hosts, and 32 tokens per device"),
    ],
)
def test_a_run_chooses_by_the_hosts_of_the_job_and_advice_by_its_option(
    per_host, uses, monkeypatch
):
    config = load_config(*SMALL, "--mesh", "context=2").replace(model__vocab_size=65)
    shape = MeshShape(context=2)
    monkeypatch.setattr(context, "RING_TOKENS", 32)
    monkeypatch.setattr(sharded_model, "devices_per_host", lambda mesh, hosts: per_host)
    with limited_devices(2):
        steps = make_steps(config, make_mesh(shape), hosts=(0,))
    assert f"context = 2 uses {uses}" in steps.attention
    plan = Estimator(config, DEVICES["a100"], per_host).plan(shape, config)
    kind = "all-to-all" if per_host == 2 else "collective-permute"
    assert kind in {c.kind for c in plan.program.collectives if c.axes == ("context",)}
