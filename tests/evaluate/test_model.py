"""Log-likelihoods of texts equal those of the plain network on one device."""

import random

import numpy as np
import pytest

from evaluation import BLOCK, TEXT, opened, reference_logits, train
from jaxgpt.data.prepare.builtin import prepare_text
from jaxgpt.evaluate.model import Pair, find_trained, log_likelihoods


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
