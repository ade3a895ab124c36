import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgpt.config import MeshShape, Sampling, UsageError, load_config
from jaxgpt.data.batch import input_batch
from jaxgpt.data.tokenizers import CharTokenizer
from jaxgpt.models.transformer import gpt_graph
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train import generate as generation
from jaxgpt.train import inference
from jaxgpt.train.generate import make_generate, prompt_window
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices

V = 11
T = 6


def reader(next_logits, reads=None):
    """Return a fake decoder whose cache is the text that it has read.

    Args:
        next_logits: (parameters, the last token, the one before) -> logits_V.
        reads: list that collects the number of tokens in each call.
    """

    def read(params, text_T, tokens_1T, first, last=-1):
        if reads is not None:
            jax.debug.callback(lambda n=tokens_1T.size: reads.append(n), ordered=True)
        text_T = jax.lax.dynamic_update_slice(text_T, tokens_1T[0], (first,))
        last = first + last % tokens_1T.size
        before = jnp.where(last > 0, text_T[last - 1], 0)
        return next_logits(params, text_T[last], before)[None], text_T

    return lambda params: (functools.partial(read, params), jnp.zeros(T, jnp.int32))


def counting_logits(sharpness, last, before):
    """Logits that predict the sum of the last two tokens, modulo V."""
    return sharpness * jax.nn.one_hot((last + before) % V, V)


def generate(prompt, n, temperature=0.0, top_k=None, sharpness=100.0, reads=None):
    window = np.zeros(T, np.int32)
    window[: len(prompt)] = prompt
    made = jax.jit(
        make_generate(reader(counting_logits, reads), T, V, n, Sampling(temperature, top_k))
    )
    return np.asarray(made(sharpness, window, np.int32(len(prompt)), np.int32(0))).tolist()


def fibonacci(a, b, n):
    out = []
    for _ in range(n):
        a, b = b, (a + b) % V
        out.append(b)
    return out


def test_each_token_follows_from_those_before_it():
    assert generate([1, 1], 20) == fibonacci(1, 1, 20)  # longer than the window


def test_a_token_is_read_once_until_the_block_is_full():
    """After that, every new token changes all positions, and so all keys and values."""
    reads = []
    generate([1, 1], 8, reads=reads)
    jax.effects_barrier()
    assert reads == [T, 1, 1, 1, 1, 1] + 3 * [T]


@pytest.mark.parametrize(("length", "pieces"), [(3, [4]), (4, [4]), (5, [4, 4])])
def test_a_prompt_is_read_in_no_more_pieces_than_it_needs(length, pieces, monkeypatch):
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 4)
    reads = []
    prompt = [1, *fibonacci(1, 1, length - 1)]
    assert generate(prompt, 1, reads=reads) == fibonacci(*prompt[-2:], 1)
    jax.effects_barrier()
    assert reads == [*pieces, 1]
    assert generate(prompt, 20) == fibonacci(*prompt[-2:], 20)


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 5.0, "top_k": 1}])
def test_a_sure_model_or_a_single_candidate_leaves_no_choice(options):
    assert generate([2, 3], 15, **options) == fibonacci(2, 3, 15)


def test_an_indifferent_model_draws_all_tokens_alike():
    drawn = generate([1, 1], 2000, temperature=1.0, sharpness=0.0)
    assert np.bincount(drawn, minlength=V).min() > 2000 / V / 2


def ranked_logits(params, last, before):
    """Logits that slightly prefer larger tokens, whatever the text."""
    return jnp.arange(V) / 10


@pytest.mark.parametrize("k", [1, 3, V, 100])
def test_top_k_limits_the_choice(k):
    made = jax.jit(make_generate(reader(ranked_logits), T, V, 1000, Sampling(1.0, k)))
    drawn = np.asarray(made(0, np.zeros(T, np.int32), np.int32(1), np.int32(0)))
    assert set(drawn.tolist()) == set(range(max(0, V - k), V))


def test_tokens_that_the_tokenizer_lacks_are_not_drawn():
    made = jax.jit(make_generate(reader(ranked_logits), T, 5, 1000, Sampling(1.0)))
    drawn = np.asarray(made(0, np.zeros(T, np.int32), np.int32(1), np.int32(0)))
    assert set(drawn.tolist()) == set(range(5))


BLOCK, CHARACTERS = 16, 65
SHAPE = (f"model.block_size={BLOCK}", f"model.vocab_size={CHARACTERS}", "model.n_layer=2")


def made_steps(mesh, *options):
    """Return the config, the compiled functions, and parameters that generate varied text."""
    sizes = MeshShape.parse(mesh)
    config = load_config("tiny", *SHAPE, "--mesh", mesh, *options)
    with limited_devices(sizes.n_devices):
        steps = make_steps(config, make_mesh(sizes))
    draw = np.random.default_rng(1).normal
    params = jax.tree.map(
        lambda p: np.asarray(p) + np.float32(0.15 * draw(size=p.shape)), steps.init().params
    )
    if "position_embedding" in params:
        params["position_embedding"]["embedding"] *= 4
    where = jax.tree.map(lambda leaf: leaf.sharding, steps.state_shapes.params)
    return config, steps, jax.device_put(params, where)


def recomputed(config, params, prompts, n):
    """Generate greedily like nanoGPT, which recomputes the last block for each token."""
    graph = gpt_graph(config.model, dtype=jnp.dtype(config.train.dtype))
    logits = jax.jit(lambda params, tokens: nnx.merge(graph, params)(input_batch(tokens)))
    params = jax.device_get(params)
    written = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(n):
            context = text[-BLOCK:]
            padded = np.array([context + [0] * (BLOCK - len(context))])
            text.append(int(logits(params, padded)[0, len(context) - 1, :CHARACTERS].argmax()))
        written.append(text[len(prompt) :])
    return written


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param(None, ("--mesh", "1,1,2", "model.bias=True"), marks=pytest.mark.long),
        ("1,1,1", ()),
        pytest.param("2,2,2", ("parallel.remat=full",), marks=pytest.mark.long),
        pytest.param(
            "2,2,2",
            ("parallel.sequence_parallel=True", "model.dropout=0.5"),
            marks=pytest.mark.long,
        ),
        ("1,2,3", ("model.n_head=6", "model.n_embd=60")),  # does not divide the vocabulary
        ("stage=2,fsdp=2", ("train.gradient_accumulation_steps=2",)),
    ],
)
def test_a_text_is_the_one_that_recomputing_its_prefix_gives(mesh, options, monkeypatch):
    """With a mesh, the model counts as large, so its parameters stay sharded."""
    if mesh is None:
        _, mesh, *options = options
    else:
        monkeypatch.setattr(inference, "SMALL_BYTES", 0)
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 7)
    config, steps, params = made_steps(mesh, *options)
    n = BLOCK + 5
    made = jax.jit(
        make_generate(steps.make_decoder, config.model.n_positions, CHARACTERS, n, Sampling())
    )
    draw = np.random.default_rng(2).integers
    prompts = [draw(0, CHARACTERS, size).tolist() for size in (1, 9, BLOCK)]
    found = []
    for prompt in prompts:
        window = np.zeros(BLOCK, np.int32)
        window[: len(prompt)] = prompt
        found.append(made(params, window, np.int32(len(prompt)), np.int32(0)).tolist())
    assert len(set(itertools.chain(*found))) > 5
    assert made._cache_size() == 1  # prompts of any length share a program
    assert found == recomputed(config, params, prompts, n)


LLAMA = ("model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.n_kv_head=2")
DOCUMENTS = ("data.document_mask=True", "data.end_of_text=3")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param("1,1,1", LLAMA, marks=pytest.mark.long),
        ("1,1,1", (*LLAMA, "model.sliding_window=5", "model.qk_norm=True")),
        pytest.param(  # does not divide the 2 heads
            "2,1,4", (*LLAMA, "model.tie_embeddings=False"), marks=pytest.mark.long
        ),
        ("1,2,2", (*LLAMA, *DOCUMENTS)),
        # Learned positions, which begin again.
        pytest.param("1,1,1", DOCUMENTS, marks=pytest.mark.long),
    ],
)
def test_a_text_goes_on_past_the_block(mesh, options, monkeypatch):
    """With rotary positions, the text equals that of a model with a longer block.

    That model has a sliding window of this model's block. With learned positions, the text ends
    at BLOCK.
    """
    monkeypatch.setattr(inference, "SMALL_BYTES", 0)
    monkeypatch.setattr(generation, "PREFILL_CHUNK", 7)
    config, steps, params = made_steps(mesh, *options)
    is_rope = config.model.position == "rope"
    n = 3 * BLOCK if is_rope else BLOCK - 9
    made = jax.jit(
        make_generate(steps.make_decoder, config.model.n_positions, CHARACTERS, n, Sampling())
    )
    window = config.model.sliding_window or BLOCK
    longer = config.replace(model__block_size=5 * BLOCK, model__sliding_window=window)
    graph = gpt_graph((longer if is_rope else config).model, end_of_text=config.document_end)
    logits = jax.jit(
        lambda params, tokens: nnx.merge(graph, params)(input_batch(tokens, config.document_end))
    )
    whole = jax.device_get(params)
    for size in (2, 9):
        prompt = np.random.default_rng(size).integers(0, CHARACTERS, size)
        prompt[0] = 3  # ends a document
        padded = np.zeros(BLOCK, np.int32)
        padded[:size] = prompt
        found = made(params, padded, np.int32(size), np.int32(0)).tolist()
        text = prompt.tolist()
        for _ in range(n):
            row = np.zeros((1, 5 * BLOCK if is_rope else BLOCK), np.int32)
            row[0, : len(text)] = text
            text.append(int(logits(whole, row)[0, len(text) - 1, :CHARACTERS].argmax()))
        assert found == text[size:]
        assert len(set(found)) > 3


@pytest.mark.parametrize("small_bytes", [0, 2**28])
def test_a_token_costs_what_its_own_position_does(small_bytes, monkeypatch):
    """Two FLOPs per weight of each matrix, and four per element of each visible key."""
    monkeypatch.setattr(inference, "SMALL_BYTES", small_bytes)
    _, steps, params = made_steps("1,1,1", "model.n_layer=1", "model.n_embd=128")

    def read(params, token):
        read, cache = steps.make_decoder(params)
        return read(cache, token, 3)[0]

    D, padded = 128, 128
    needed = 2 * (12 * D**2 + padded * D) + 4 * BLOCK * D
    program = jax.jit(read).lower(params, np.zeros((1, 1), np.int32)).compile()
    assert needed <= program.cost_analysis()["flops"] < 1.3 * needed


def test_a_prompt_is_cut_to_the_window():
    tokenizer = CharTokenizer("abc")
    window, length = prompt_window(tokenizer, "abcabc", 4)
    assert (window.tolist(), length) == ([2, 0, 1, 2], 4)
    window, length = prompt_window(tokenizer, "b", 4)
    assert (window.tolist(), length) == ([1, 0, 0, 0], 1)
    assert prompt_window(tokenizer, "", 4)[1] == 1
    with pytest.raises(UsageError, match="'x'"):
        prompt_window(tokenizer, "x", 4)


def test_a_prompt_whose_characters_are_all_dropped_counts_as_empty(monkeypatch):
    tokenizer = CharTokenizer("abc")
    monkeypatch.setattr(tokenizer, "encode", lambda text: np.array([], np.int64))
    window, length = prompt_window(tokenizer, "x", 4)
    assert (window.tolist(), length) == ([0, 0, 0, 0], 1)
