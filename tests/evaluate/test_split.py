"""The loss on a full split equals that of a plain loop over its windows."""

import dataclasses
import json
import math

import numpy as np
import pytest

from blends import write_corpora
from evaluation import BLOCK, TEXT, evaluated, reference_logits, reference_losses, train
from jaxgpt.config import UsageError
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.token_file import TokenFile, Tokens
from jaxgpt.data.tokenizers import load_tokenizer
from jaxgpt.evaluate.__main__ import as_table
from jaxgpt.evaluate.split import Loss, Windows, open_split, read_chunks
from jaxgpt.evaluate.trained import find_trained
from jaxgpt.tracking.jsonl import json_line


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A text with several bytes per character, prepared as bytes."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(TEXT)
    prepare_text(folder / "data", [folder / "a.txt"], "byte")
    return folder / "data"


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "bytes", f"data.path={data}")


def tokens_of(data, split, dtype=np.uint16):
    return np.fromfile(data / f"{split}.bin", dtype)


@pytest.mark.parametrize("stride", [BLOCK, 20, 1])
def test_a_loss_is_that_of_a_plain_loop_over_windows(run, data, stride):
    config = find_trained(run).config
    tokens = tokens_of(data, "val")[: None if stride > 1 else 150]
    assert (len(tokens) - 1) % BLOCK  # the last window is shorter
    if stride == 1:
        cut = data.parent / "cut"
        cut.mkdir(exist_ok=True)
        for split in ("train", "val"):
            tokens.tofile(cut / f"{split}.bin")
        data = cut
    losses = reference_losses(reference_logits(run, config), tokens, BLOCK, stride)
    found = evaluated("--run", run, "--stride", stride, f"data.path={data}")
    assert found["tokens"] == losses.size == len(tokens) - 1
    assert found["loss"] == pytest.approx(losses.mean(), abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-5)


def test_files_that_were_never_split_are_scored_as_a_whole(run, tmp_path):
    texts = ["To be, or not to be: " * 20, "that is the question. " * 9]
    for name, text in zip(("a.txt", "b.txt"), texts, strict=True):
        (tmp_path / name).write_text(text)
    tokens = np.frombuffer("\0".join(texts).encode(), np.uint8).astype(np.int64)
    losses = reference_losses(reference_logits(run, find_trained(run).config), tokens, BLOCK, BLOCK)
    found = evaluated("--run", run, "--input", tmp_path / "a.txt", tmp_path / "b.txt")
    assert (found["split"], found["tokens"]) == ("all", losses.size)
    assert found["loss"] == pytest.approx(losses.mean(), abs=1e-6)
    prepare_text(tmp_path / "d", [tmp_path / "a.txt", tmp_path / "b.txt"], "byte", split="test")
    again = evaluated("--run", run, f"data.path={tmp_path / 'd'}", "--split", "test")
    assert (again["loss"], again["tokens"]) == (found["loss"], found["tokens"])


def test_all_splits_are_scored_one_after_another(run, data):
    """A run needs no training split to be evaluated on the others."""
    parts = [evaluated("--run", run, "--split", split) for split in ("train", "val")]
    found = evaluated("--run", run, "--split", "all")
    assert found["tokens"] == sum(part["tokens"] for part in parts)
    nats = sum(part["loss"] * part["tokens"] for part in parts)
    assert found["loss"] == pytest.approx(nats / found["tokens"], rel=1e-9)
    (data.parent / "only").mkdir()
    (data.parent / "only" / "val.bin").write_bytes((data / "val.bin").read_bytes())
    alone = evaluated("--run", run, f"data.path={data.parent / 'only'}")
    assert alone["loss"] == parts[1]["loss"]


@pytest.mark.parametrize("option", [(), ("--stride", 5)])
def test_a_context_may_be_shorter_than_the_model_s(run, data, option):
    losses = reference_losses(
        reference_logits(run, find_trained(run).config),
        tokens_of(data, "val"),
        11,
        *option[1:] or (11,),
    )
    found = evaluated("--run", run, "--block-size", 11, *option)
    assert (found["block_size"], found["tokens"]) == (11, losses.size)
    assert found["loss"] == pytest.approx(losses.mean(), abs=1e-6)


@pytest.mark.long
def test_a_shorter_context_of_rotary_positions_is_the_same_model(data, tmp_path):
    run = train(tmp_path / "run", f"data.path={data}", "model.position=rope")
    config = find_trained(run).config
    losses = reference_losses(reference_logits(run, config), tokens_of(data, "val"), 11, 11)
    found = evaluated("--run", run, "--block-size", 11)
    assert found["loss"] == pytest.approx(losses.mean(), abs=1e-6)
    assert find_trained(run, block_size=11).config.model.block_size == 11


def test_a_document_mask_keeps_attention_inside_documents(run, tmp_path):
    tokens = np.random.default_rng(0).integers(1, 256, 150).astype(np.uint16)
    tokens[::13] = 0  # ends a document
    for split in ("train", "val"):
        tokens.tofile(tmp_path / f"{split}.bin")
    log_probabilities = reference_logits(run, find_trained(run).config)

    def by_document(row):
        ends = np.flatnonzero(row == 0) + 1
        return np.concatenate(
            [log_probabilities(part) for part in np.split(row, ends) if part.size]
        )

    losses = reference_losses(by_document, tokens, BLOCK, BLOCK)
    given = ("--run", run, f"data.path={tmp_path}")
    assert evaluated(*given, "data.document_mask=True")["loss"] == pytest.approx(
        losses.mean(), abs=1e-6
    )
    assert abs(evaluated(*given)["loss"] - losses.mean()) > 1e-3


def test_tokenizers_are_compared_by_their_tokens(run, tmp_path):
    """Files of the same tokenizer may differ in indentation, key order or padding options."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [TEXT], tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters)
    )
    (tmp_path / "a.txt").write_text(TEXT)
    found = []
    for name in ("compact", "indented"):
        (tmp_path / name).mkdir()
        made.save(str(tmp_path / name / "tokenizer.json"), pretty=name == "indented")
        prepare_text(tmp_path / f"{name}_data", [tmp_path / "a.txt"], str(tmp_path / name))
        found.append(load_tokenizer(tmp_path / name))
    assert found[0].to_meta() != found[1].to_meta()
    settings = [f"data.path={tmp_path}/indented_data"]
    trained = dataclasses.replace(find_trained(run, settings=settings), tokenizer=found[0])
    assert open_split(trained, "val").warnings == ()
    other = find_trained(run, settings=settings)
    with pytest.raises(UsageError, match="has a different tokenizer"):
        open_split(other, "val")
    accepted = find_trained(run, settings=[*settings, "data.accept_changes=True"])
    assert "accepted by data.accept_changes" in open_split(accepted, "val").warnings[0]
    (warning,) = open_split(dataclasses.replace(other, tokenizer=None), "val").warnings
    assert "the model has no tokenizer" in warning
    (tmp_path / "indented_data" / "meta.json").unlink()
    assert "has no tokenizer; assuming that data" in open_split(other, "val").warnings[0]


@pytest.mark.parametrize(
    ("batch", "mesh"),
    [
        (1, "1,1,1"),
        (7, "2,2,2"),
        pytest.param(32, "1,1,1", marks=pytest.mark.long),
        pytest.param(1, "2,2,2", marks=pytest.mark.long),
        pytest.param(32, "2,2,2", marks=pytest.mark.long),
        pytest.param(5, "1,3,1", marks=pytest.mark.long),
        pytest.param(16, "1,2,4", marks=pytest.mark.long),
    ],
)
def test_batch_and_mesh_do_not_change_it(run, batch, mesh, layouts_fit):
    base = evaluated("--run", run, "--batch", 16)
    found = evaluated("--run", run, "--batch", batch, mesh=mesh)
    assert found["loss"] == pytest.approx(base["loss"], abs=1e-6)
    assert found["tokens"] == base["tokens"] and found["bytes"] == base["bytes"]


def test_bits_per_byte_count_bytes_and_not_characters(run, data):
    found = evaluated("--run", run)
    n = tokens_of(data, "val").size
    assert found["bytes"] == found["tokens"] == n - 1
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))


@pytest.mark.long
def test_characters_of_several_bytes(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    prepare_text(tmp_path / "data", [tmp_path / "a.txt"], "char")
    run = train(tmp_path / "run", f"data.path={tmp_path}/data")
    found = evaluated("--run", run)
    text = TEXT[int(0.9 * len(TEXT)) :]
    assert found["tokens"] == len(text) - 1
    assert found["bytes"] == len(text[1:].encode()) > found["tokens"]
    nats = found["loss"] * found["tokens"]
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / found["bytes"])


@pytest.mark.long
def test_sources_of_a_blend_are_read_one_by_one(tmp_path):
    lines = write_corpora(tmp_path)
    lines[3] = lines[3].replace("name3", "name1")  # two sources of a corpus
    settings = ("model.vocab_size=97", "data.val_share=0.05", "--data.blend", *lines)
    run = train(tmp_path / "run", *settings)
    found = evaluated("--run", run, mesh="2,1,1")
    assert list(found["corpora"]) == ["name0", "name1", "name2", "name4"]
    sizes = {name: corpus["tokens"] for name, corpus in found["corpora"].items()}
    # 700 of val.bin, the last 5 % of a flat file, the last documents of 250 tokens.
    assert sizes == {"name0": 699, "name1": 149 + 699, "name2": 249, "name4": 99}
    assert found["tokens"] == sum(sizes.values())
    whole = sum(c["loss"] * c["tokens"] for c in found["corpora"].values())
    assert found["loss"] == pytest.approx(whole / found["tokens"], rel=1e-12)
    config = find_trained(run).config
    first = tokens_of(tmp_path / "corpus0", "val")
    losses = reference_losses(reference_logits(run, config), first, BLOCK, BLOCK)
    assert found["corpora"]["name0"]["loss"] == pytest.approx(losses.mean(), abs=1e-6)
    table = as_table(found).splitlines()
    assert [line.split()[0] for line in table[2:]] == [*found["corpora"], "all"]


def test_a_corpus_named_all_has_its_own_row():
    loss = {"loss": 1.0, "perplexity": math.e, "bits_per_byte": 1.0, "tokens": 5, "bytes": 5}
    record = {"run": "r", "step": 1, "split": "val", "block_size": 8, "stride": 8}
    corpora = {"wiki": loss | {"tokens": 2}, "all": loss | {"tokens": 3}}
    table = as_table(record | loss | {"corpora": corpora}).splitlines()
    assert [line.split()[:2] for line in table[2:]] == [["wiki", "2"], ["all", "3"], ["all", "5"]]


def test_without_a_tokenizer_bits_per_byte_are_left_out(run, tmp_path):
    for split in ("train", "val"):
        (np.arange(500) % 50).astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    trained = find_trained(run, settings=[f"data.path={tmp_path}"])
    assert open_split(trained, "val").count_bytes() == [
        500 - 10
    ]  # byte 0 ends a text, and is first
    bare = dataclasses.replace(trained, tokenizer=None)
    assert open_split(bare, "val").count_bytes() == [None]
    unknown = Loss(10.0, 5, None)
    assert (unknown + Loss(1.0, 1, 4)).bits_per_byte is unknown.bits_per_byte is None
    found = evaluated("--run", run) | {"bytes": None, "bits_per_byte": None}
    assert json.loads(json_line(found))["bits_per_byte"] is None
    assert "bits/byte: the tokenizer is unknown; set data.tokenizer=FOLDER" in as_table(found)


@pytest.mark.parametrize(("n", "T", "stride"), [(2, 8, 8), (9, 8, 3), (10, 8, 8), (500, 8, 3)])
def test_windows_predict_each_token_once(n, T, stride):
    windows, seen = Windows(n, T, stride), []
    for row in range(len(windows)):
        held = windows.tokens(row)
        assert 2 <= len(held) <= T + 1
        counted = held[1:][windows.predicted(row)]
        assert len(counted) and (row == 0 or counted[0] - held[0] > T - stride)
        seen += counted
    assert seen == list(range(1, n))


def test_chunks_of_a_text_end_with_a_document(tmp_path, monkeypatch):
    from jaxgpt.evaluate import split

    monkeypatch.setattr(split, "CHUNK_TOKENS", 10)
    tokens = np.array([*range(1, 8), 0, *range(1, 30), 0, 5], np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    text = Tokens(TokenFile(tmp_path / "a.bin", np.uint16, tokens.size))
    chunks = list(read_chunks(text, 0))
    assert np.concatenate([chunk for _, chunk in chunks]).tolist() == tokens.tolist()
    assert chunks[0][1].size == 8 and [first for first, _ in chunks] == [0, 8, 18, 28, 38]


def test_the_run_s_own_settings_of_data_can_be_changed(run, data):
    n = tokens_of(data, "train").size
    assert evaluated("--run", run, "--split", "train")["tokens"] == n - 1
    lone = evaluated("--run", run, f"data.path={data}/train.bin", "data.val_share=0.25")
    assert lone["tokens"] == n - round(0.75 * n) - 1
