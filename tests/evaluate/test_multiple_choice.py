"""Multiple choice, beside log-likelihoods computed one choice at a time."""

import json
import random

import numpy as np
import pytest

from evaluation import BLOCK, TEXT, evaluated, opened, reference_logits, train
from jaxgpt.data.prepare.builtin import prepare_text
from jaxgpt.data.tokenizers import ByteTokenizer, HFTokenizer, load_tokenizer
from jaxgpt.evaluate.encoder import Encoder
from jaxgpt.evaluate.likelihood import Pair, encode_pair, log_likelihoods
from jaxgpt.evaluate.model import find_trained
from jaxgpt.evaluate.multiple_choice import read_questions
from jaxgpt.evaluate.report import as_json, as_table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    (folder / "a.txt").write_text(TEXT)
    prepare_text(folder / "data", [folder / "a.txt"], "byte")
    return train(folder / "run", f"data.path={folder}/data")


def questions(n=12):
    """Questions of which some are longer than the context; choices of 2 to 5 by turns."""
    draw, words = random.Random(1), TEXT.split()
    for i in range(n):
        size = 2 + i % 4
        yield {
            "question": " ".join(draw.choices(words, k=draw.randint(1, 12))) + " " * (i % 3 == 0),
            "choices": [" ".join(draw.choices(words, k=draw.randint(1, 3))) for _ in range(size)],
            "answer": draw.randrange(size),
        }


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def by_hand(log_probabilities, question, choice):
    """The log-likelihood of the bytes of a space and a choice after a question."""
    asked, whole = question.rstrip().encode(), f"{question} {choice}".encode()
    n = len(whole) - len(asked)
    row = whole[-(BLOCK + 1) :]
    found = log_probabilities(list(row[:-1]))
    return sum(found[i, row[i + 1]] for i in range(len(row) - 1 - n, len(row) - 1))


@pytest.mark.parametrize(
    ("batch", "mesh"), [(4, "1,1,1"), pytest.param(3, "2,2,2", marks=pytest.mark.long)]
)
def test_accuracies_are_those_of_a_computation_by_hand(run, tmp_path, batch, mesh):
    asked = list(questions())
    asked = [q for q in asked if all(len(c.encode()) < BLOCK - 2 for c in q["choices"])]
    assert len(asked) >= 8 and any(len(q["question"].encode()) > BLOCK for q in asked)
    path = write(tmp_path / "q.jsonl", asked)
    log_probabilities = reference_logits(run, find_trained(run).config)
    right = {"acc": [], "acc_norm": [], "acc_bytes": []}
    expected = []
    for q in asked:
        sums = [by_hand(log_probabilities, q["question"], choice) for choice in q["choices"]]
        expected += sums
        lengths = {
            "acc": [1] * len(sums),
            "acc_norm": [len(c) for c in q["choices"]],
            "acc_bytes": [len(c.encode()) for c in q["choices"]],
        }
        for name, divisors in lengths.items():
            scores = [s / d for s, d in zip(sums, divisors, strict=True)]
            right[name].append(scores.index(max(scores)) == q["answer"])
    found = evaluated("--run", run, "--multiple-choice", path, "--batch", batch, mesh=mesh)
    assert found["questions"] == len(asked)
    for name, hits in right.items():
        assert found[name] == pytest.approx(np.mean(hits))
        assert found[f"{name}_stderr"] == pytest.approx(np.std(hits, ddof=1) / len(hits) ** 0.5)
    table = as_table(found).splitlines()
    assert table[0].endswith(f"{len(asked)} questions of {path}")
    assert table[1].split()[:2] == ["acc", f"{found['acc']:.2%}"]
    read = read_questions(path, Encoder(ByteTokenizer(), 0), BLOCK)
    model = opened(run, batch, mesh)
    scored = log_likelihoods(model, [pair for q in read for pair in q.pairs])
    np.testing.assert_allclose([s.nats for s in scored], expected, atol=2e-5)


def test_one_question_has_no_standard_error(run, tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "", "choices": ["a", "b"], "answer": 1}])
    found = evaluated("--run", run, "--multiple-choice", path)
    assert found["acc_stderr"] is None and found["acc"] in (0, 1)
    assert "nonfinite" not in json.loads(as_json(found)) and "±" not in as_table(found)


def test_a_continuation_is_greedy_if_each_token_is_the_likeliest(run):
    model, prompt = opened(run), list(b"The na")
    log_probabilities = reference_logits(run, find_trained(run).config)
    greedy = list(prompt)
    for _ in range(6):
        greedy.append(int(log_probabilities(greedy)[-1].argmax()))
    assert model.generate(prompt, 6) == greedy[6:]
    other = [*greedy[6:11], (greedy[11] + 1) % 256]
    found = log_likelihoods(model, [Pair(prompt, greedy[6:]), Pair(prompt, other)])
    assert [answer.is_greedy for answer in found] == [True, False]


def test_the_two_texts_are_encoded_together_and_spaces_go_to_the_second(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"])
    made.train_from_iterator(["the cat sat on the mat " * 9], trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    end = tokenizer.end_of_text
    encoder = Encoder(tokenizer, end)
    assert isinstance(tokenizer, HFTokenizer)
    whole = tokenizer.encode("the cat sat").tolist()
    assert whole == [*tokenizer.encode("the cat"), *tokenizer.encode(" sat")]
    for context, rest in (("the cat", " sat"), ("the cat ", "sat"), ("the cat", " sat")):
        pair = encode_pair(encoder, context, rest)
        assert pair.context == tokenizer.encode("the cat").tolist()
        assert pair.continuation == tokenizer.encode(" sat").tolist()
    assert encode_pair(encoder, " ", "sat") == Pair([end], tokenizer.encode(" sat").tolist())
    assert encode_pair(encoder, "", " sat") == Pair([end], tokenizer.encode(" sat").tolist())


def test_lines_of_hellaswag_are_worded_as_lm_eval_words_them(tmp_path):
    line = {
        "ind": 24, "activity_label": "Roof shingle removal", "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he", "ctx": "A man is sitting on a roof. he",
        "endings": ["is using wrap.", "[title] Sit. [step] He is."], "label": "1",
    }  # fmt: skip
    path = write(tmp_path / "h.jsonl", [line, {k: line[k] for k in ("ctx", "endings", "label")}])
    whole, bare = read_questions(path, Encoder(ByteTokenizer(), 0), 1024)
    text = "Roof shingle removal: A man is sitting on a roof. He"
    assert bytes(whole.pairs[0].context).decode() == text
    assert bytes(whole.pairs[0].continuation).decode() == " is using wrap."
    assert whole.choices == ("is using wrap.", " Sit. He is.") and whole.answer == 1
    assert bytes(bare.pairs[0].context).decode() == line["ctx"] and bare.answer == 1
