"""The options of the network, compared with a plain float64 NumPy version of the papers."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxgpt.config import ModelConfig, UsageError, load_config, mesh_shape
from jaxgpt.data.batch import input_batch
from jaxgpt.models.attention import AttentionSetting, choose_attention, fallback_warnings
from jaxgpt.models.mlp import MLPS
from jaxgpt.models.rope import rope_frequencies
from jaxgpt.models.transformer import GPT
from jaxgpt.models.weights import count_parameters
from jaxgpt.parallel.mesh import make_mesh
from jaxgpt.train.jitted import make_steps
from jobs import limited_devices

SMALL = {"n_layer": 2, "n_embd": 24, "block_size": 20, "vocab_size": 37}
LLAMA = SMALL | {"norm": "rmsnorm", "position": "rope", "mlp": "swiglu", "mlp_hidden": 40}
FAMILIES = {
    "llama 2": LLAMA | {"n_head": 4, "tie_embeddings": False},
    "llama 3": LLAMA | {"n_head": 6, "n_kv_head": 2, "rope_scaling": (8.0, 1.0, 4.0, 8.0)},
    "mistral": LLAMA | {"n_head": 4, "n_kv_head": 1, "sliding_window": 6},
    "qwen 2": LLAMA | {"n_head": 4, "n_kv_head": 2, "qkv_bias": True, "rope_theta": 1e6},
    "qwen 3": LLAMA | {"n_head": 3, "n_kv_head": 1, "head_dim": 10, "qk_norm": True},
    "qwen 2, windows": LLAMA
    | {
        "n_head": 4,
        "qkv_bias": True,
        "layers": ("global", "local"),
        "sliding_window": 6,
    },
    "gemma 3": LLAMA
    | {
        "n_layer": 5,
        "n_head": 4,
        "n_kv_head": 2,
        "norm": "rmsnorm_1p",
        "post_norm": True,
        "qk_norm": True,
        "mlp": "geglu_tanh",
        "scale_embeddings": True,
        "query_pre_attn_scalar": 11,
        "layers": ("local", "local", "global"),
        "sliding_window": 4,
        "local_rope_theta": 50.0,
        "rope_theta": 1000.0,
        "rope_scaling": (4.0,),
    },
    "others": SMALL | {"mlp": "relu2", "logit_softcap": 3.0, "norm_eps": 0.1, "bias": True},
}
END = 5  # the token that ends a document


def network_of(config, **options):
    """(the network, parameters in which nothing is 0 or 1 by initialization)."""
    draw = np.random.default_rng(1).normal

    def make():
        return GPT(config, rngs=nnx.Rngs(params=0), **options)

    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
    params = jax.tree.map(lambda p: p + np.float32(0.1 * draw(size=p.shape)), params)
    graph = nnx.graphdef(nnx.eval_shape(make))
    end_of_text = options.get("end_of_text")

    @jax.jit
    def compute(params, tokens):
        return nnx.merge(graph, params)(input_batch(tokens, end_of_text))

    return compute, params


def reference_logits(params, tokens_T, config):
    """Return the logits as the papers define them, one position and head at a time."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    T, H, G = len(tokens_T), config.n_head, config.kv_heads
    K = config.head_dim or config.n_embd // H

    def rms(x, scale):
        scale = 1 + scale if config.norm == "rmsnorm_1p" else scale
        return x / np.sqrt((x**2).mean() + config.norm_eps) * scale

    def norm(x, w):
        if config.norm != "layernorm":
            return rms(x, w["scale"])
        return (x - x.mean()) / np.sqrt(x.var() + config.norm_eps) * w["scale"] + w["bias"]

    def turn(x, position, is_local):
        if config.position != "rope":
            return x
        out = np.empty(K)
        is_other = is_local and config.local_rope_theta
        for i in range(K // 2):
            frequency = (is_other or config.rope_theta) ** (-2 * i / K)
            if len(config.rope_scaling) == 1 and not is_other:
                frequency /= config.rope_scaling[0]
            elif config.rope_scaling and not is_other:
                factor, low, high, original = config.rope_scaling
                wavelength = 2 * math.pi / frequency
                if wavelength > original / low:
                    frequency /= factor
                elif wavelength > original / high:
                    smooth = (original / wavelength - low) / (high - low)
                    frequency = (1 - smooth) * frequency / factor + smooth * frequency
            angle = position * frequency
            a, b = x[i], x[i + K // 2]
            out[i] = a * math.cos(angle) - b * math.sin(angle)
            out[i + K // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def projected(v, attention, position, is_local):
        def linear(module):
            y = np.tensordot(v, module["kernel"], 1)
            return y + module["bias"] if "bias" in module else y

        if "qkv" in attention:
            q, k, w = linear(attention["qkv"])
        else:
            q, (k, w) = linear(attention["q"]), linear(attention["kv"])
        if config.qk_norm:
            q = np.array([rms(x, attention["q_norm"]["scale"]) for x in q])
            k = np.array([rms(x, attention["k_norm"]["scale"]) for x in k])
        q, k = ([turn(x, position, is_local) for x in heads] for heads in (q, k))
        return q, k, w

    def mlp(v, m):
        def linear(x, module):
            y = np.tensordot(x, module["kernel"], 1)
            return y + module["bias"] if "bias" in module else y

        if "gate_up" in m:
            gate, up = linear(v, m["gate_up"])
            if config.mlp == "swiglu":
                return linear(gate / (1 + np.exp(-gate)) * up, m["down"])
            # arXiv 1606.08415, section 2
            tanh = np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))
            return linear(0.5 * gate * (1 + tanh) * up, m["down"])
        return linear(np.maximum(linear(v, m["up"]), 0) ** 2, m["down"])

    x = [p["token_embedding"]["embedding"][t] for t in tokens_T]
    if config.scale_embeddings:
        x = [v * math.sqrt(config.n_embd) for v in x]
    if config.position == "learned":
        x = [v + p["position_embedding"]["embedding"][i] for i, v in enumerate(x)]
    for layer in range(config.n_layer):
        b = jax.tree.map(operator.itemgetter(layer), p["layers"])
        kinds = config.layers or ("local" if config.sliding_window else "global",)
        is_local = kinds[layer % len(kinds)] == "local"
        window = config.sliding_window if is_local else T
        qkv = [
            projected(norm(v, b["norm_1"]), b["attention"], i, is_local) for i, v in enumerate(x)
        ]
        for i in range(T):
            heads = []
            for h in range(H):
                seen = range(max(0, i - window + 1), i + 1)
                scores = np.array([qkv[i][0][h] @ qkv[j][1][h * G // H] for j in seen])
                weights = np.exp(scores / math.sqrt(config.query_pre_attn_scalar or K))
                values = np.array([qkv[j][2][h * G // H] for j in seen])
                heads.append(weights @ values / weights.sum())
            out = b["attention"]["out"]
            y = np.tensordot(np.array(heads), out["kernel"], 2) + out.get("bias", 0)
            x[i] = x[i] + (norm(y, b["post_norm_1"]) if config.post_norm else y)
        for i, v in enumerate(x):
            y = mlp(norm(v, b["norm_2"]), b["mlp"])
            x[i] = v + (norm(y, b["post_norm_2"]) if config.post_norm else y)
    table = p["token_embedding" if config.tie_embeddings else "head"]["embedding"]
    logits = np.array([table @ norm(v, p["norm"]) for v in x])[:, : config.vocab_size]
    cap = config.logit_softcap
    return cap * np.tanh(logits / cap) if cap else logits


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_papers(family, scan_layers):
    config = ModelConfig(**FAMILIES[family])
    network, params = network_of(config, scan_layers=scan_layers)
    tokens = np.random.default_rng(0).integers(37, size=20)
    found = network(params, tokens[None])[0, :, :37]
    expected = reference_logits(params, tokens, config)
    assert abs(found - expected).max() < 2e-5 * abs(expected).max()


def test_scaled_frequencies_are_llama_31s():
    """Compare with the values of the formula in Llama's reference code at three wavelengths."""
    plain = 5e5 ** -(np.arange(0, 128, 2) / 128)
    found = rope_frequencies(128, 5e5, (8, 1, 4, 8192))
    wavelengths = 2 * np.pi / plain
    is_short, is_long = wavelengths < 8192 / 4, wavelengths > 8192
    assert is_short.any() and is_long.any() and (~is_short & ~is_long).any()
    np.testing.assert_allclose(found[is_short], plain[is_short], rtol=1e-6)
    np.testing.assert_allclose(found[is_long], plain[is_long] / 8, rtol=1e-6)
    between = slice(is_short.sum(), 64 - is_long.sum())
    assert (found[between] < plain[between]).all() and (found[between] > plain[between] / 8).all()


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("auroragpt-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3.2-1b", 1_235_814_400),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("gemma3-1b", 999_885_952),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset, parameters):
    """The numbers are from the model cards and from Hugging Face's parameter counts."""
    assert count_parameters(load_config(preset).model)[0] == parameters


def test_parameters_that_multiply_leave_out_what_is_looked_up():
    config = load_config("llama3-8b").model
    total, multiplied = count_parameters(config)
    assert total - multiplied == 128_256 * 4096
    assert count_parameters(load_config("llama3.2-1b").model) == (1_235_814_400,) * 2


@pytest.mark.parametrize("mlp", sorted(MLPS))
def test_the_width_of_the_mlp_is_llamas_rule_for_swiglu(mlp):
    """arXiv 2302.13971, section 2.2: 2/3 of 4 D; in its code rounded up to a multiple of 256."""
    expected = 11008 if mlp == "swiglu" else 4 * 4096
    assert ModelConfig(n_embd=4096, mlp=mlp).mlp_width == expected
    assert ModelConfig(n_embd=4096, mlp=mlp, mlp_hidden=100).mlp_width == 100


# Documents


def test_a_document_begins_after_the_end_of_the_one_before():
    tokens = jnp.array([[7, END, 8, 9, END, END, 1], [END, 2, 3, 4, 5 + END, 6, 7]])
    expected = [[0, 0, 2, 2, 2, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    batch = input_batch(tokens, END)
    assert (jnp.arange(7) - batch.positions).tolist() == expected
    is_same = batch.segments[:, :, None] == batch.segments[:, None, :]
    starts = jnp.array(expected)
    assert (is_same == (starts[:, :, None] == starts[:, None, :])).all()


@pytest.mark.parametrize(
    "family", [pytest.param("learned", marks=pytest.mark.long), "llama 3", "mistral"]
)
def test_a_packed_row_has_the_losses_of_its_documents_alone(family):
    options = SMALL | {"n_head": 4} if family == "learned" else FAMILIES[family]
    config = ModelConfig(**options)
    masked, params = network_of(config, end_of_text=END)
    plain, _ = network_of(config)
    texts = [[1, 2, 3, 4, END], [9, END], [11, 12, 13, 14, 15, 16, 17, END], [21, 22, 23, 24, 25]]
    row = np.array([sum(texts, [])])
    found, leaking = masked(params, row)[0], plain(params, row)[0]
    at, leaks = 0, []
    for text in texts:
        alone = plain(params, np.array([text]))[0]
        np.testing.assert_allclose(found[at : at + len(text)], alone, atol=1e-5)
        leaks.append(abs(leaking[at : at + len(text), :37] - alone[:, :37]).max())
        at += len(text)
    assert leaks[0] < 1e-5 and min(leaks[1:]) > 1e-2


@pytest.mark.parametrize(
    ("version", "options", "kernel", "reason"),
    [
        ((0, 11, 2), {"block_size": 1024}, "cudnn", "plus a document mask of 2 T^2 bytes"),
        ((0, 11, 2), {"block_size": 1024, "sliding_window": 100}, "cudnn", "document mask"),
        ((0, 11, 2), {"block_size": 1001}, "blockwise", "even model.block_size for data.document_"),
        ((0, 11, 2), {"block_size": 16384}, "cudnn", "document mask"),
        (
            (0, 11, 2),
            {"block_size": 32768},
            "blockwise",
            "cuDNN would need a document mask of 2 T^2",
        ),
        ((0, 11, 2), {"block_size": 32768, "attention": "cudnn"}, "cudnn", "model.attention=cudnn"),
        ((0, 11, 2), {"block_size": 1024, "attention": "xla"}, "xla", "model.attention=xla"),
        (
            (0, 11, 1),
            {"block_size": 1024},
            "blockwise",
            "cuDNN needs JAX 0.11.2 or newer for data.",
        ),
        ((0, 11, 1), {"block_size": 1024, "dropout": 0.1}, "blockwise", "does not support dropout"),
    ],
)
def test_documents_need_a_mask(monkeypatch, version, options, kernel, reason):
    monkeypatch.setattr(jax, "__version_info__", version)
    config = ModelConfig(n_head=12, n_embd=768, **options)
    setting = AttentionSetting(config, "bfloat16", "gpu", 9.0, document_mask=True)
    chosen, why = choose_attention(setting)
    assert chosen == kernel and reason in why
    is_slower = kernel == "blockwise"
    assert len(fallback_warnings(setting, chosen, why)) == is_slower


def test_cudnn_with_documents_is_refused_on_an_old_jax(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    setting = AttentionSetting(
        ModelConfig(attention="cudnn"), "bfloat16", "gpu", 9.0, document_mask=True
    )
    with pytest.raises(UsageError, match="attention=cudnn: cuDNN needs JAX 0.11.2 .*; use auto"):
        choose_attention(setting)
    assert choose_attention(setting._replace(document_mask=False))[0] == "cudnn"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["model.n_kv_head=3"], "model.n_kv_head=3: must divide model.n_head=4"),
        (["model.rope_theta=5"], "model.rope_theta: needs? model.position=rope"),
        (
            ["model.position=rope", "--model.rope_scaling", "8", "1"],
            "model.rope_scaling=8.0 1.0: must be one factor",
        ),
        (
            ["model.position=rope", "--model.rope_scaling", "8", "4", "1", "8192"],
            "needs 0 < low_freq_factor",
        ),
        (["model.position=rope", "model.head_dim=7"], "model.head_dim=7"),
        (["model.bias=True", "model.qkv_bias=True"], "model.qkv_bias=True"),
        (["model.norm=batchnorm"], "model.norm=batchnorm: must be one of layernorm, rmsnorm"),
        (["model.mlp=swish"], ""),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(settings, sentence):
    if not sentence:
        with pytest.raises(UsageError, match="model.mlp=swish: must be one of .*swiglu"):
            count_parameters(load_config("tiny", *settings, "model.vocab_size=65").model)
        return
    with pytest.raises(UsageError, match=sentence):
        load_config("tiny", *settings)


def test_remat_saves_as_much_with_a_pattern_of_layers():
    """Temporary memory of a step: with remat=full, 12 layers need a few times as much as one."""

    def temporary(*words):
        config = load_config(
            "tiny", "model.n_layer=12", "model.vocab_size=256", "model.position=rope",
            "parallel.scan_layers=True", *words,
        )  # fmt: skip
        with limited_devices(1):
            steps = make_steps(config, make_mesh(mesh_shape(config)), slices=1, on_cpu=False)
        return steps.lower_train_step().compile().memory_analysis().temp_size_in_bytes

    pattern = ("model.sliding_window=64", "--model.layers", *["local"] * 5, "global")
    assert temporary(*pattern, "parallel.remat=full") < temporary(*pattern) / 2
