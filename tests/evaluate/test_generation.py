"""Generated texts equal those of transformers, and do not depend on the batch they are in.

The tests of whole models need torch and transformers.
"""

import itertools

import numpy as np
import pytest

from jaxgpt import load_model, sample
from jaxgpt.config import Sampling
from jaxgpt.evaluate.stop_strings import Written, text_so_far
from jaxgpt.sample import new_parts
from jaxgpt.train.generate import limit_choice

# Noise for the weights with which greedy texts do not repeat one token.
FAMILIES = {"gpt2": 0.0, "llama3": 0.1, "qwen2": 0.2, "gemma3": 0.0}
V, N = 96, 40
TEXT = "The naïve café sells crème brûlées — 日本語 😀 costs 13 €; a day is a long time\n" * 40
PROMPTS = (
    "The", "a long time", "café", "日本", "costs 13 €; a day is", "m", "brûlées — ", "time\nThe",
)  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    pytest.importorskip("torch")
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folders(transformers, tmp_path_factory):
    """Random models of four families, with a BPE tokenizer, as folders."""
    import tokenizers
    import torch

    from reference_models import FAMILIES as DESCRIBED
    from reference_models import randomize

    home = tmp_path_factory.mktemp("models")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.decoder = tokenizers.decoders.Fuse()
    bpe.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=V, special_tokens=["<|endoftext|>"])
    )
    assert bpe.get_vocab_size() == V  # jaxgpt never draws a token that the tokenizer lacks
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    for family, noise in FAMILIES.items():
        config, options = DESCRIBED[family]
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config(**options | {"vocab_size": V}))
        randomize(model)
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * torch.randn_like(weight)
        model.save_pretrained(home / family)
        fast.save_pretrained(home / family)
    return home


def reference(transformers, folder):
    """Return a function prompt -> (new token IDs, their text), which decodes greedily."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def generate(prompt, **options):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        found = model.generate(
            ids, max_new_tokens=N, do_sample=False, pad_token_id=0, tokenizer=tokenizer, **options
        )
        new = found[0, ids.shape[1] :].tolist()
        return new, tokenizer.decode(new)

    return generate


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_and_stop_strings_are_those_of_transformers(
    family, transformers, folders, tmp_path, capsys
):
    generate, model = reference(transformers, folders / family), load_model(folders / family)
    encoded = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    expected = [generate(prompt) for prompt in PROMPTS]
    tokens = [new for new, _ in expected]
    assert len(set(itertools.chain(*tokens))) > 10  # not one token again and again
    blocks = model.stream_tokens(encoded, N, Sampling(), [0] * len(PROMPTS), 7)
    assert np.concatenate(list(blocks), axis=1).tolist() == tokens
    assert [model.generate_tokens(prompt, N) for prompt in encoded] == tokens
    # Stop strings that cross a boundary between tokens, and one that does not occur.
    starts = [len(model.tokenizer.decode(new[: 4 + 2 * i])) for i, new in enumerate(tokens)]
    stops = [text[at - 1 : at + 2] for at, (_, text) in zip(starts, expected, strict=True)]
    stops = [stop for stop in stops if len(stop) == 3]
    assert len(stops) > 2
    stops.append("no such text")
    ended = [generate(prompt, stop_strings=stops) for prompt in PROMPTS]
    texts = [model.generate(p, N, 0, None, stop=stops) for p in PROMPTS]
    n_ended = 0
    for prompt, (new, text), ours in zip(PROMPTS, ended, texts, strict=True):
        found = [text.index(stop) for stop in stops if stop in text]
        if len(new) == N or found:  # transformers also finds a string that begins in the prompt
            assert ours == prompt + text[: min(found, default=None)]
            n_ended += bool(found)
    assert n_ended > 2
    (tmp_path / "prompts.jsonl").write_text("".join(f"{p!r}\n" for p in PROMPTS).replace("'", '"'))
    words = ["--run", f"hf:{folders / family}", "--prompts", f"{tmp_path}/prompts.jsonl"]
    options = ["--temperature", "0", "--max-new-tokens", str(N), "--stream", "--batch-size", "5"]
    for stop in stops:
        options += ["--stop", stop]
    arguments = sample.parser().parse_args([*words, *options])
    capsys.readouterr()
    sample.write(arguments)
    assert capsys.readouterr().out == "---\n".join(f"{text}\n" for text in texts)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.05},
        {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_the_choice_is_that_of_transformers(options, transformers):
    import torch
    from transformers.generation import logits_process

    scores = torch.from_numpy(np.random.default_rng(0).normal(0, 3, (20, V)).astype(np.float32))
    classes = {
        "temperature": logits_process.TemperatureLogitsWarper,
        "top_k": logits_process.TopKLogitsWarper,
        "top_p": logits_process.TopPLogitsWarper,
        "min_p": logits_process.MinPLogitsWarper,
    }
    expected = scores
    for name, value in options.items():
        expected = classes[name](value)(None, expected)
    sampling = Sampling(**options)
    found = np.stack([limit_choice(row, sampling) for row in scores.numpy()])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"min_p": 0.41}, [0, 1]),  # 0.25 / 0.5 and 0.2 / 0.5
        ({"min_p": 0.39}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),  # of 0.5, 0.25 and 0.2, which sum to 0.95
        ({"top_p": 1.0, "min_p": 1e-6}, [0, 1, 2, 3]),
    ],
)
def test_options_keep_the_tokens_that_their_definitions_name(options, kept):
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float32))
    found = limit_choice(logits, Sampling(temperature=1.0, **options))
    assert np.flatnonzero(np.isfinite(found)).tolist() == kept


@pytest.mark.parametrize(
    ("new", "stop", "is_last", "expected"),
    [
        ("one two", [], False, Written("> one two", False)),
        ("one two", [], True, Written("> one two", True)),
        ("one two three", ["two"], False, Written("> one ", True)),
        ("one\n", ["\n\n"], False, Written("> one", False)),  # it may continue
        ("one\n", ["\n\n"], True, Written("> one\n", True)),
        ("xabc", ["abc", "b"], False, Written("> xa", True)),  # "b" was complete first
        ("na\ufffd", [], False, Written("> na", False)),
        ("na\ufffd", [], True, Written("> na\ufffd", True)),
        ("", ["> "], False, Written("> ", False)),  # the prompt does not count
    ],
)
def test_a_text_ends_before_its_stop_string(new, stop, is_last, expected):
    assert text_so_far("> ", f"> {new}", stop, is_last) == expected


def test_parts_appear_once_all_before_them_is_final():
    snapshots = [
        [Written("a", False), Written("b!", True), Written("c", False)],
        [Written("aa", True), Written("b!", True), Written("c", False)],
        [Written("aa", True), Written("b!", True), Written("cc", True)],
    ]
    parts = new_parts(snapshots)
    assert [next(parts) for _ in range(2)] == ["", "a"]
    assert "".join(parts) == "a\n---\nb!\n---\ncc\n"
