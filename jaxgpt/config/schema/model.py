"""Settings of what is trained, how, and on what: model, optimizer, data."""

from dataclasses import dataclass
from typing import Literal

from jaxgpt.config.schema.bounds import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Rate,
    Share,
    VocabSize,
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network: a pre-norm transformer. The defaults are GPT-2's; presets set the others."""

    n_layer: Count = 3
    """Number of transformer layers, L."""
    n_head: Count = 4
    """Number of attention heads, H."""
    n_kv_head: Count | None = None
    """Number of key-value heads, G: fewer than n_head is grouped-query attention (arXiv
    2305.13245), 1 multi-query; None is n_head."""
    head_dim: Count | None = None
    """Size of a head, K; None is n_embd / n_head."""
    n_embd: Count = 128
    """Width of the residual stream, D."""
    block_size: Count = 128
    """Context length in tokens, T."""
    bias: bool = False
    """Biases in linear layers and layer norms, as in GPT-2; False is a bit faster."""
    qkv_bias: bool = False
    """Biases of queries, keys and values without `bias`, as in Qwen2."""
    qk_norm: bool = False
    """RMSNorm of each query and key head before positions, as in Qwen3."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Norm of the stream: layernorm (GPT-2) or rmsnorm (arXiv 1910.07467)."""
    norm_eps: Positive = 1e-5
    """Epsilon of the norms, added to the variance."""
    position: Literal["learned", "rope"] = "learned"
    """Positions: a learned embedding (GPT-2), or rotary embeddings of queries and keys (rope, arXiv
    2104.09864)."""
    rope_theta: Positive = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling: tuple[float, ...] = ()
    """Llama 3.1's scaling of the rotary wavelengths: factor, low_freq_factor, high_freq_factor,
    original_max_position, such as `8 1 4 8192`; none by default."""
    mlp: str = "gelu"
    """Kind of MLP: gelu, gelu_tanh (GPT-2's own weights), swiglu (arXiv 2002.05202), relu2 (arXiv
    2109.08668)."""
    mlp_hidden: Count | None = None
    """Width of the MLP, F; None is 4 n_embd, for swiglu Llama's rule: 8/3 n_embd, rounded up to a
    multiple of 256."""
    dropout: Rate = 0.0
    """Dropout rate of embeddings, attention and residuals; 0 for pre-training."""
    vocab_size: VocabSize | None = None
    """Number of tokens, V; None takes it from the data's meta.json."""
    tie_embeddings: bool = True
    """Use the token embedding as output layer too; False gives that weights of its own."""
    sliding_window: Count | None = None
    """Number of tokens that a token attends to, with itself (Mistral); None is all before it."""
    logit_softcap: Positive | None = None
    """Bound of the logits, c tanh(logits / c) (Gemma 2); None is no bound."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Attention kernel; auto picks the fastest that can run, and the log says which."""

    @property
    def kv_heads(self) -> int:
        """The number of key-value heads, G."""
        return self.n_kv_head or self.n_head

    @property
    def head_size(self) -> int:
        """The size of a head, K."""
        return self.head_dim or self.n_embd // self.n_head

    @property
    def n_positions(self) -> int | None:
        """The number of learned positions, T; None where positions are rotary."""
        return self.block_size if self.position == "learned" else None

    @property
    def mlp_width(self) -> int:
        """The width of the MLP, F."""
        if self.mlp_hidden is None and self.mlp == "swiglu":
            return -(-8 * self.n_embd // 3 // 256) * 256
        return self.mlp_hidden or 4 * self.n_embd

    @property
    def matrix_elements(self) -> int:
        """The number of elements of all matrices of the layers."""
        mlp = (3 if self.mlp == "swiglu" else 2) * self.mlp_width
        attention = 2 * self.head_size * (self.n_head + self.kv_heads)
        return self.n_layer * self.n_embd * (attention + mlp)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the schedule of its learning rate."""

    name: str = "adamw"
    """The optimizer (jaxgpt/optim/README.md)."""
    learning_rate: NonNegative = 3e-3
    """Peak learning rate; for adafactor relative to the RMS of each matrix."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up: a cosine to min_lr; the peak and a short decay to min_lr (wsd:
    warm-up, stable, decay; arXiv 2404.06395); or the peak."""
    min_lr: float | None = None
    """Learning rate at and after lr_decay_iters; None is a tenth of the peak. Not for constant."""
    warmup_iters: CountOrZero = 50
    """Steps of linear warm-up."""
    lr_decay_iters: Count = 300
    """Step at which cosine or wsd reach min_lr: mostly train.max_iters, but a run made longer keeps
    its learning rates."""
    wsd_decay_iters: Count | None = None
    """Length of wsd's decay, which ends at lr_decay_iters; None is a fifth of lr_decay_iters."""
    wsd_decay: Literal["linear", "sqrt"] = "linear"
    """Shape of wsd's decay, x from 0 to 1: 1 - x (linear) or 1 - sqrt(x) (arXiv 2405.18392)."""
    weight_decay: NonNegative = 0.1
    """Decay of matrices and embeddings, times the learning rate; never of biases and norms."""
    beta1: Rate = 0.9
    """Decay rate of the first moment, of adamw, lion, and the part of muon that is adamw."""
    beta2: Rate = 0.99
    """Decay rate of the second moment (of lion: of the average); 0.95 suits adamw's large
    batches. Not for adafactor, whose decay rate grows, and sgd."""
    momentum: Rate = 0.95
    """Momentum of muon (Nesterov's) and sgd; 0 is sgd without."""
    adamw_learning_rate: NonNegative | None = None
    """Peak learning rate of what muon leaves to adamw: embeddings, output layer, norms, biases. It
    follows the same schedule, in proportion. None is learning_rate, which muon's scale suits."""
    grad_clip: NonNegative = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    @property
    def wsd_decay_length(self) -> int:
        """Return the number of steps of wsd's decay."""
        return self.wsd_decay_iters or max(1, self.lr_decay_iters // 5)

    @property
    def wsd_decay_start(self) -> int:
        """Return the last step before wsd's decay; negative if that is too long."""
        return self.lr_decay_iters - self.wsd_decay_length


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data."""

    dataset: str = "python"
    """Name of a prepared data set: a folder of $JAXGPT_DATA (default ~/.cache/jaxgpt)."""
    path: str | None = None
    """In place of a named data set: a folder with train.bin, val.bin and meta.json; or PREFIX of
    Megatron-LM's PREFIX.bin and PREFIX.idx; or one nanoGPT .bin file."""
    blend: tuple[str, ...] = ()
    """Corpora to mix: `WEIGHT PATH [CORPUS]` each, with paths as in data.path, in quotes if they
    have spaces. Weights are normalised; lines of the same CORPUS are counted together."""
    file_list: str | None = None
    """File with lines of data.blend (ALCF's Megatron-DeepSpeed); paths from the working folder."""
    val_share: Share = 0.01
    """Share of a corpus, its last documents, kept for validation where it has no val.bin."""
    tokenizer: str | None = None
    """A tokenizer.json, or the folder with it, for data that came without one."""
    document_mask: bool = False
    """Keep attention inside a document, with positions from its begin; the order of the data stays.
    A document ends with its end-of-text token."""
    end_of_text: CountOrZero | None = None
    """Id of the end-of-text token, for data.document_mask; None takes the tokenizer's."""
    accept_changes: bool = False
    """Resume from a checkpoint although its data has changed: for this start only."""
