"""Log-likelihoods of texts equal those of the plain network on one device."""

import random

import numpy as np
import pytest

from evaluation import BLOCK, TEXT, opened, reference_logits, train
from jaxgpt.cluster.process_group import ProcessGroup
from jaxgpt.config import Sampling, UsageError
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.evaluate.log_likelihoods import Pair, log_likelihoods
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.train import inference

SIZES = (1, 3, 9, BLOCK - 1, BLOCK, BLOCK + 5, 17, 2)  # of prompts, in tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    (folder / "a.txt").write_text(TEXT)
    prepare_text(folder / "data", [folder / "a.txt"], "byte")
    return train(folder / "run", f"data.path={folder}/data")


@pytest.mark.parametrize(
    ("batch", "mesh"), [(4, "1,1,1"), pytest.param(3, "2,2,2", marks=pytest.mark.long)]
)
def test_log_likelihoods_are_sums_of_log_probabilities(run, batch, mesh):
    draw, text = random.Random(1), TEXT.encode()
    pairs, expected = [], []
    log_probabilities = reference_logits(run, find_trained(run).config)
    for length in (1, 7, BLOCK, BLOCK + 1, 3 * BLOCK):  # of contexts: the last ones are too long
        for n in (1, 5, BLOCK):
            start = draw.randrange(len(text) - length - n)
            middle, end = start + length, start + length + n
            pairs.append(Pair(list(text[start:middle]), list(text[middle:end])))
            row = text[start:end][-(BLOCK + 1) :]
            found = log_probabilities(list(row[:-1]))
            last = range(len(row) - 1 - n, len(row) - 1)
            expected.append(sum(found[i, row[i + 1]] for i in last))
    scored = log_likelihoods(opened(run, batch, mesh), pairs)
    np.testing.assert_allclose([s.nats for s in scored], expected, atol=5e-5)


@pytest.mark.parametrize("mesh", ["1,1,1", pytest.param("2,2,2", marks=pytest.mark.long)])
def test_a_batch_of_prompts_continues_each_of_them(run, mesh, monkeypatch):
    """Some texts reach the end of the block before others, and all go beyond it."""
    monkeypatch.setattr(inference, "SMALL_BYTES", 0)
    prompts = [list(TEXT.encode()[5 * n : 5 * n + size]) for n, size in enumerate(SIZES)]
    log_probabilities, n_tokens = reference_logits(run, find_trained(run).config), BLOCK + 3
    expected = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(n_tokens):
            text.append(int(log_probabilities(text[-BLOCK:])[-1].argmax()))
        expected.append(text[len(prompt) :])
    model = opened(run, mesh=mesh)
    for at_once in (n_tokens, 6):
        blocks = model.stream_tokens(prompts, n_tokens, Sampling(), [0] * len(prompts), at_once)
        assert np.concatenate(list(blocks), axis=1).tolist() == expected


def test_a_seed_draws_the_same_text_in_any_batch(run):
    model, sampling = opened(run), Sampling(1.5, top_p=0.95)
    prompts, seeds = [[65], [66, 67], [65]], [4, 5, 6]
    (block_BN,) = model.stream_tokens(prompts, 30, sampling, seeds, 30)
    alone = [
        model.generate_tokens(prompt, 30, 1.5, seed=seed, top_p=0.95)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    assert block_BN.tolist() == alone and alone[0] != alone[2]


def test_a_continuation_is_greedy_if_each_token_is_the_likeliest(run):
    model, prompt = opened(run), list(b"The na")
    log_probabilities = reference_logits(run, find_trained(run).config)
    greedy = list(prompt)
    for _ in range(6):
        greedy.append(int(log_probabilities(greedy)[-1].argmax()))
    assert model.generate_tokens(prompt, 6) == greedy[6:]
    other = [*greedy[6:11], (greedy[11] + 1) % 256]
    found = log_likelihoods(model, [Pair(prompt, greedy[6:]), Pair(prompt, other)])
    assert [answer.is_greedy for answer in found] == [True, False]


def test_a_process_raises_the_error_of_another_process_that_cannot_read_the_weights(
    run, monkeypatch
):
    """Otherwise, it would wait for the other process at the first collective."""

    def raise_other(self, error):
        raise UsageError(error or "process 1: the weights are damaged")

    monkeypatch.setattr(ProcessGroup, "raise_if_any", raise_other)
    with pytest.raises(UsageError, match="process 1"):
        opened(run)
