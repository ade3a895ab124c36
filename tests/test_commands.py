"""The commands as users type them, each in its own process."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxgpt import prepare, sample
from jaxgpt.config import UsageError
from jobs import AS_USERS, SMALL, losses, records, run


def test_shakespeare_is_prepared_with_nanogpts_words(tmp_path, tiny_shakespeare):
    job = run("prepare", "shakespeare_char", "--input", tiny_shakespeare, "--out", tmp_path / "s")
    assert job.returncode == 0
    wanted = [
        "length of dataset in characters: 1,115,394",
        "all the unique characters",
        "vocab size: 65",
        "train has 1,003,854 tokens",
        "val has 111,540 tokens",
    ]
    places = [job.stdout.index(words) for words in wanted]
    assert places == sorted(places)


def test_without_a_network_prepare_says_how_to_pass_a_file(tmp_path):
    # A proxy that nobody listens at stands for the missing network.
    nowhere = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    job = run("prepare", "shakespeare_char", "--out", tmp_path / "s", **nowhere)
    assert job.returncode == 2
    (line,) = job.stdout.strip().splitlines()
    assert "--input FILE" in line


@pytest.mark.parametrize("text", ["", "x", "xxxxxxxxxxxxxxxxxxxx"])
def test_too_little_text_is_refused(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(SystemExit) as end:
        prepare.main(["text", "--input", f"{tmp_path}/a.txt", "--out", f"{tmp_path}/data"])
    assert end.value.code == 2
    assert not (tmp_path / "data").exists()


@pytest.mark.long  # in short, the default run and the commands of the READMEs
@pytest.mark.parametrize("tokenizer", ["char", "byte"])
def test_a_text_of_ones_own_is_prepared_trained_on_and_continued(tmp_path, tokenizer):
    text, data, out = tmp_path / "a.txt", tmp_path / "data", tmp_path / "run"
    text.write_text("big fjord äöü\n" * 300)
    job = run("prepare", "text", "--input", text, text, "--tokenizer", tokenizer, "--out", data)
    assert job.returncode == 0, job.stdout
    arguments = ("model.block_size=32", "train.max_iters=200", "optimizer.learning_rate=3e-3")
    job = run("train", *SMALL, *arguments, f"data.path={data}", "--out", out)
    assert job.returncode == 0, job.stdout
    (tmp_path / "prompt.txt").write_text("big f")  # in nanoGPT's spelling
    options = (f"--start=FILE:{tmp_path}/prompt.txt", "--max_new_tokens", "24")
    greedy, drawn = ("--temperature", "0"), ("--top-k", "5", "--num-samples", "2")
    with ThreadPoolExecutor(2) as pool:
        first, second, drawn = pool.map(
            lambda more: run("sample", "--run", out, *options, *more), (greedy, greedy, drawn)
        )
    assert first.returncode == 0, first.stdout
    assert first.stdout == second.stdout
    assert first.stdout.startswith("big fjord äöü\nbig f")
    assert len(drawn.stdout.split("---\n")) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "/nowhere"], "/nowhere: no such folder"),
        (["--run", "/nowhere", "--seed", "99999999999"], "--seed: 99999999999: must be"),
        (
            ["--run", "/nowhere", "--seed", 2**31 - 1, "--num-samples", 2],
            "--seed=2147483647: must be at most 2147483646",
        ),
        (
            ["--run", "/nowhere", "--temperature", "-1"],
            "--temperature=-1.0: must be 0, or between 1e-06 and",
        ),
        (["--mesh", "-1,1,1", "--run", "/nowhere"], "/nowhere: no such folder"),
        (["--run", "/nowhere", "--top-p", "1.5"], "--top-p=1.5: must be more than 0 and at most 1"),
        (["--run", "/nowhere", "--min_p", "0"], "--min-p=0.0: must be more than 0 and at most 1"),
        (["--run", "/nowhere", "--stop", ""], "--stop: is empty"),
        (["--run", "/nowhere", "--prompt", "a", "--prompts", "b"], "not allowed with argument"),
        (["--run", "/nowhere", "--top-k", "x"], "--top-k: x: must be a whole number"),
        (["--run", "/nowhere", "--temperature", "1e-320"], "--temperature=1e-320: must be 0, or"),
        (["--run", "/nowhere", "--max-new-tokens", 2**31], "--max-new-tokens: 2147483648: must be"),
        (["--run", ""], "argument --run/--out/--out-dir: is empty"),
        ([], "are required: --run"),
        (["runs/mine"], "runs/mine: use --run runs/mine"),
    ],
)
def test_sample_explains_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        sample.main(list(map(str, arguments)))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and words in line


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", " \n\n", "a.txt: has no prompts"),
        pytest.param("a.jsonl", "[" * 100_000, "line 1: is not JSON", id="nested-lists"),
        ("a.jsonl", '"one"\n{"text": "two"}\n', "a.jsonl, line 2: must be a JSON string, or an"),
        ("a.jsonl", "one\n", "a.jsonl, line 1: is not JSON"),
        ("a.jsonl", "3\n", "a.jsonl, line 1: must be a JSON string"),
    ],
)
def test_a_file_of_prompts_is_refused_in_words(name, text, words, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError) as raised:
        sample.read_prompt_file(tmp_path / name)
    assert words in str(raised.value)


def test_prompts_are_read_from_lines_and_from_json(tmp_path):
    (tmp_path / "a.txt").write_text("one \n\n two\n")
    (tmp_path / "a.jsonl").write_text('"a\\nb"\n{"prompt": "", "id": 7}\n')
    assert list(sample.read_prompt_file(tmp_path / "a.txt").values()) == ["one ", " two"]
    assert list(sample.read_prompt_file(tmp_path / "a.jsonl").values()) == ["a\nb", ""]
    with pytest.raises(UsageError, match=r"--prompts .*none.txt: cannot be read"):
        sample.read_prompt_file(tmp_path / "none.txt")


def test_the_default_run_needs_nothing_and_compiles_its_step_once(tmp_path):
    """`python -m jaxgpt.train` on a machine without data, shortened."""
    job = run(
        "train", "--out", tmp_path / "run", "train.max_iters=12", "train.eval_interval=6",
        "checkpoint.interval=5", "--train-range-to-skip", "3", "4",
        JAXGPT_DATA=str(tmp_path / "data"), JAX_LOG_COMPILES="1", **AS_USERS,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    compiled = re.findall(r"Finished XLA compilation of (jit\(\w+\))", job.stdout)
    assert compiled.count("jit(train_step)") == 1
    assert compiled.count("jit(init_state)") == 1
    assert len(records(tmp_path / "run", "sample")) == 2
    assert "run directory: " in job.stdout.splitlines()[-1]
    second_half = job.stdout.split("step=6 train_loss", 1)[1].split("sample at step 6", 1)[1]
    assert "Finished XLA compilation" not in second_half  # nothing is compiled after first use


@pytest.mark.long
def test_a_short_run_of_nanogpts_setting_learns_as_nanogpt_does(tmp_path, shakespeare):
    job = run(
        "train", "--config", "shakespeare_char_cpu", "--out", tmp_path, "train.max_iters=250",
        "train.eval_iters=100", "train.sample_tokens=0", "train.seed=1", **AS_USERS,
    )  # fmt: skip
    assert job.returncode == 0, job.stdout
    (evaluation,) = records(tmp_path, "eval")
    assert evaluation["val_loss"] == pytest.approx(2.445, abs=0.05)  # nanoGPT's at step 250


@pytest.mark.long
def test_nanogpts_setting_reaches_nanogpts_loss(tmp_path, shakespeare):
    """nanoGPT's own code: 1.886 and 1.899 with two seeds."""
    reached = []
    for seed in (1, 2, 3):
        out = tmp_path / str(seed)
        job = run(
            "train", "--config", "shakespeare_char_cpu", "--out", out, f"train.seed={seed}",
            "train.eval_interval=0", "train.eval_iters=200", timeout=1200,
        )  # fmt: skip
        assert job.returncode == 0, job.stdout
        reached.append(records(out, "eval")[-1]["val_loss"])
        assert max(losses(out)) == 2000
    print("val loss of seeds 1-3:", reached)
    assert sum(reached) / 3 <= 1.92
