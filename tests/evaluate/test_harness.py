"""lm_eval's scores of a run equal those of its Hugging Face models with the same weights.

$JAXGPT_EVAL is a Python with lm_eval, torch, transformers and what jaxgpt needs.
"""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from evaluation import SHAPE, TEXT
from jaxgpt.convert.__main__ import main as convert
from jaxgpt.convert.names import NANOGPT
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.evaluate.trained import find_trained
from jobs import checkpoint_arrays, environment, train_here
from side_by_side import peer_weights

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("JAXGPT_EVAL")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PYTHON, reason="JAXGPT_EVAL names no Python with lm_eval"),
]
T = 48
TASKS = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: "{{answer}}"
        metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
    """,
    "rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{question}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
    """,
    "written": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{choices[0]}}"
        generation_kwargs: {until: ["costs"], max_gen_toks: 40, do_sample: false}
        metric_list: [{metric: exact_match}]
    """,
}


def tokenizer_file(folder, special=("<|endoftext|>",)):
    """Write a tokenizer.json. Of two special tokens, the first precedes each text, as in Llama."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(special), initial_alphabet=letters
    )
    made.train_from_iterator(TEXT.splitlines(), trainer)
    if len(special) > 1:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
        )
    made.save(str(folder / "tokenizer.json"))


def questions(n=60):
    """Yield questions, some longer than the context and some ending with a space."""
    draw, words = random.Random(5), TEXT.split()
    for i in range(n):
        size = 60 if i % 5 == 0 else draw.randint(3, 20)
        yield {
            "question": " ".join(draw.choices(words, k=size)) + " " * (i % 4 == 1),
            "choices": [" ".join(draw.choices(words, k=draw.randint(1, 5))) for _ in range(4)],
            "answer": draw.randrange(4),
        }


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run, its weights in Hugging Face's format, questions, and lm_eval tasks."""
    home = tmp_path_factory.mktemp("harness")
    for name in ("hf", "tasks"):
        (home / name).mkdir()
    tokenizer_file(home / "hf")
    (home / "a.txt").write_text(TEXT)
    prepare_text(home / "data", [home / "a.txt"], str(home / "hf"))
    settings = (f"model.block_size={T}", "model.bias=True", "train.max_iters=60")
    words = (*SHAPE, *settings, "--mesh", "1,1,1", f"data.path={home}/data", "--out", home / "run")
    assert train_here(*words) == 0
    trained = find_trained(home / "run")
    model, flat = trained.config.model, checkpoint_arrays(home / "run", 60)
    named = {tuple(path[2:-2].split("']['")): array for path, array in flat.items()}
    params = unflatten_dict(named)["params"]
    np.savez(home / "hf" / "weights.npz", **peer_weights(params, model, NANOGPT))
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    about = {key: getattr(model, key) for key in sizes}
    about["end_of_text"] = trained.tokenizer.end_of_text
    (home / "hf" / "model.json").write_text(json.dumps(about))
    python(ROOT / "tests/evaluate/save_hugging_face.py", home / "hf")
    write_tasks(home)
    return home


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A Llama in Hugging Face's format, whose tokenizer puts <s> before each text, and tasks."""
    home = tmp_path_factory.mktemp("llama")
    for name in ("tokens", "tasks"):
        (home / name).mkdir()
    tokenizer_file(home / "tokens", ("<s>", "</s>"))
    (home / "a.txt").write_text(TEXT)
    prepare_text(home / "data", [home / "a.txt"], str(home / "tokens"))
    model = ("model.norm=rmsnorm", "model.position=rope", "model.mlp=swiglu", "model.n_kv_head=2")
    settings = (f"model.block_size={T}", "train.max_iters=60", f"data.path={home}/data")
    words = (*SHAPE, *model, *settings, "--mesh", "1,1,1", "--out", home / "run")
    assert train_here(*words) == 0
    convert(["to-hf", "--run", str(home / "run"), "--out", str(home / "hf")])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (home / "hf" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "</s>"}))
    shutil.copy(home / "tokens" / "tokenizer.json", home / "hf")  # it adds <s>
    write_tasks(home)
    return home


def write_tasks(home):
    lines = "".join(json.dumps(q) + "\n" for q in questions())
    (home / "q.jsonl").write_text(lines)
    for name, text in TASKS.items():
        head = f"task: {name}\ndataset_path: json\ntest_split: test\n"
        data = json.dumps({"data_files": {"test": str(home / "q.jsonl")}})
        body = "\n".join(line[8:] for line in text.splitlines())
        (home / "tasks" / f"{name}.yaml").write_text(f"{head}dataset_kwargs: {data}{body}")


def python(*words):
    """Run Python code with lm_eval and without network access."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [PYTHON, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env=environment(**offline),
    )
    assert job.returncode == 0, job.stdout
    return job.stdout


def scores(home, out, *words):
    """Return (results of each task, answers of each task by document)."""
    tasks = ("--tasks", ",".join(TASKS), "--include_path", home / "tasks")
    printed = python(*words, *tasks, "--output_path", home / out, "--log_samples")
    (file,) = (home / out).rglob("results_*.json")
    answers = {}
    for task in TASKS:
        (samples,) = (home / out).rglob(f"samples_{task}_*.jsonl")
        lines = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda s: s["doc_id"])
        answers[task] = [line["resps"] for line in lines]
    assert printed.count("|choices|") == 1  # the table, once
    return json.loads(file.read_text())["results"], answers


def scores_of_hf(home):
    words = ("--model", "hf", "--device", "cpu", "--batch_size", "1")
    return scores(home, "of_hf", "-m", "lm_eval", *words, "--model_args", f"pretrained={home}/hf")


@pytest.fixture(scope="module")
def hugging_face(home):
    return scores_of_hf(home)


@pytest.mark.parametrize("mesh", ["1,1,1", "2,1,2"])
def test_scores_are_those_of_hugging_face(home, hugging_face, mesh):
    model = ("--model", "jaxgpt", "--model_args", f"run={home}/run,mesh=[{mesh}]")
    command = ("-m", "jaxgpt.evaluate", "lm-eval")
    compare(scores(home, f"of_{mesh}", *command, *model), hugging_face)


def test_scores_of_llama_are_those_of_hugging_face(llama):
    model = ("--model", "jaxgpt", "--model_args", f"run=hf:{llama}/hf")
    command = ("-m", "jaxgpt.evaluate", "lm-eval")
    compare(scores(llama, "of_jaxgpt", *command, *model), scores_of_hf(llama))


def compare(ours, theirs):
    """Scores, texts and log-likelihoods are the same."""
    (found, answers), (expected, expected_answers) = ours, theirs
    for task in TASKS:
        compared = [key for key, value in expected[task].items() if isinstance(value, float)]
        assert len(compared) >= 1
        for key in compared:
            assert found[task][key] == pytest.approx(expected[task][key], rel=2e-5), (task, key)
    assert answers["written"] == expected_answers["written"]
    assert len({text for doc in answers["written"] for (text,) in doc}) > 3
    for doc, doc_ in zip(answers["choices"], expected_answers["choices"], strict=True):
        for ((nats, greedy),), ((nats_, greedy_),) in zip(doc, doc_, strict=True):
            assert float(nats) == pytest.approx(float(nats_), abs=1e-4) and greedy == greedy_
    rolling = zip(answers["rolling"], expected_answers["rolling"], strict=True)
    for ((nats,),), ((nats_,),) in rolling:
        assert float(nats) == pytest.approx(float(nats_), rel=1e-5)


def test_repeated_requests_get_different_samples(home):
    task = (home / "tasks" / "written.yaml").read_text().replace("task: written", "task: repeated")
    task = task.replace("do_sample: false", "do_sample: true, temperature: 1") + "\nrepeats: 3\n"
    (home / "tasks" / "repeated.yaml").write_text(task)
    model = ("--model", "jaxgpt", "--model_args", f"run={home}/run", "--tasks", "repeated")
    where = ("--include_path", home / "tasks", "--output_path", home / "repeated")
    python("-m", "jaxgpt.evaluate", "lm-eval", *model, *where, "--limit", "2", "--log_samples")
    (samples,) = (home / "repeated").rglob("samples_repeated_*.jsonl")
    for line in samples.read_text().splitlines():
        (texts,) = json.loads(line)["resps"]
        assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("run={home}/nothing", "{home}/nothing: no such folder"),
        ("pretrained=gpt2", "pretrained is unknown; give run"),
        ("run={home}/run,dtype=fp8", "dtype=fp8: must be"),
        ("run={home}/run,step=7", "step 7: {home}/run has no such checkpoint; choose from 60"),
    ],
)
def test_bad_arguments_are_one_sentence(home, given, sentence):
    words = ("--model", "jaxgpt", "--model_args", given.format(home=home), "--tasks", "choices")
    job = subprocess.run(
        [PYTHON, "-m", "jaxgpt.evaluate", "lm-eval", *words, "--include_path", home / "tasks"],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=str(ROOT)),
    )
    assert job.returncode == 2 and "Traceback" not in job.stderr
    last = job.stderr.splitlines()[-1]
    assert last.startswith("error: ") and sentence.format(home=home) in last
