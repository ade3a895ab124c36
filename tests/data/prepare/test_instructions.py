"""Prompts and conversations: their tokens, and which tokens count toward the loss."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxgpt import prepare
from jaxgpt.config import UsageError
from jaxgpt.data.dataset import open_dataset
from jaxgpt.data.prepare.chat_template import ChatTemplate, find_template, template_files
from jaxgpt.data.prepare.own_text import prepare_text
from jaxgpt.data.tokenizers import ByteTokenizer, load_tokenizer
from jobs import load_config

TEMPLATE = """\
{{- bos_token -}}
{% for message in messages %}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""
MARKED = """\
{% for message in messages %}
{{ '<|' + message.role + '|>\\n' }}
{%- if message.role == 'assistant' %}
{% generation %}
{{- message.content + '<|end|>' }}
{%- endgeneration %}
{% else %}
{{- message.content + '<|end|>' }}
{%- endif %}
{{ '\\n' }}
{%- endfor %}"""
PAIRS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "Größe? ", "completion": "1 µm"},
    {"prompt": "", "completion": "all of it", "id": 3},
    {"prompt": "nothing", "completion": ""},
    *({"prompt": f"{n}*{n}=", "completion": f"{n * n}"} for n in range(20)),
]


def write(folder, lines, name="a.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return path


def prepared(folder, lines, tokenizer="byte", **options):
    """Return a dictionary: split -> (token IDs, mask)."""
    prepare_text(
        folder / "d", [write(folder, lines)], str(tokenizer), **({"val_share": 0.3} | options)
    )
    return {
        split: (
            np.fromfile(folder / "d" / f"{split}.bin", np.uint16).tolist(),
            np.fromfile(folder / "d" / f"{split}.mask.bin", np.uint8).tolist(),
        )
        for split in ("train", "val")
    }


def conversation(*texts):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


def rendered(document):
    """Return a conversation as `TEMPLATE` renders it: [(text, whether it counts)]."""
    parts = []
    for message in document["messages"]:
        is_answer = message["role"] == "assistant"
        parts += [(f"<|{message['role']}|>\n", 0), (f"{message['content']}<|end|>", is_answer)]
        parts += [("\n", 0)]
    return parts


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory):
    """A folder with a byte-level BPE tokenizer, special tokens and `TEMPLATE`, as on the Hub."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("chat")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    made.train_from_iterator(["the cat sat on the mat. hello there world"] * 9, trainer)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_completions_and_the_end_of_text_after_them_count(tmp_path):
    found = prepared(tmp_path, PAIRS)
    documents = {
        line["prompt"].encode() + line["completion"].encode(): line["prompt"].encode()
        for line in PAIRS
    }
    seen = []
    for tokens, mask in found.values():
        expected = []
        for document in bytes(tokens).split(b"\0"):
            prompt = documents[document]
            expected += [0] * len(prompt) + [1] * (len(document) - len(prompt)) + [1]
            seen.append(document)
        assert mask == expected[:-1]  # no end of text follows the last document
    assert sorted(seen) == sorted(documents)


def test_a_prompt_has_the_tokens_that_it_has_alone(tmp_path, gpt2_folder):
    """GPT-2 has tokens for "Nameless" and "Name", and " Paris" is one token."""
    lines = [
        {"prompt": "Name", "completion": "less"},
        {"prompt": "The capital of France is", "completion": " Paris"},
    ] * 10
    found = prepared(tmp_path, lines, gpt2_folder, val_share=0.5)
    tokenizer = load_tokenizer(gpt2_folder)
    name, less = (tokenizer.encode(text).tolist() for text in ("Name", "less"))
    assert tokenizer.encode("Nameless").tolist() != name + less
    france = tokenizer.encode("The capital of France is Paris").tolist()
    expected = {(*name, *less): len(less), tuple(france): 1}  # document -> what counts of it
    seen = []
    for tokens, mask in found.values():
        documents = list(map(tuple, split_at(tokens, 50256)))
        ends = len(documents) - 1
        assert sum(mask) == sum(expected[document] for document in documents) + ends
        seen += documents
    assert len(seen) == 20 and set(seen) == set(expected)


def split_at(tokens, mark):
    out = [[]]
    for token in tokens:
        if token == mark:
            out.append([])
        else:
            out[-1].append(token)
    return [part for part in out if part]


@pytest.mark.parametrize("marks", [False, True])
def test_what_the_assistant_says_counts_with_the_end_of_its_turn(tmp_path, marks):
    pytest.importorskip("jinja2")
    lines = [
        conversation("hi", "hello\n", "bye", "ciao"),
        conversation("<|end|>", "ünder"),
        conversation("no", "yes", "why?"),
        *(conversation(f"{n}", f"{n + 1}", "and?", f"{n + 2}") for n in range(20)),
    ]
    template = MARKED if marks else TEMPLATE
    (tmp_path / "t.jinja").write_text(template)
    found = prepared(tmp_path, lines, chat_template=tmp_path / "t.jinja")
    by_text = {"".join(text for text, _ in rendered(line)).encode(): line for line in lines}
    n_documents = 0
    for tokens, mask in found.values():
        expected = []
        for document in bytes(tokens).split(b"\0"):
            line = by_text[document]
            for text, counts in rendered(line):
                expected += [int(counts)] * len(text.encode())
            expected.append(int(line["messages"][-1]["role"] == "assistant"))
            n_documents += 1
        assert mask == expected[:-1]
    assert n_documents == len(lines)


def test_special_tokens_of_a_template_are_one_token_each(tmp_path, chat_tokenizer):
    import tokenizers

    lines = [conversation("the cat", "sat", f"on {n}", "the mat.") for n in range(10)]
    found = prepared(tmp_path, lines, chat_tokenizer, val_share=0.5)
    known = tokenizers.Tokenizer.from_file(str(chat_tokenizer / "tokenizer.json"))
    begin, end = map(known.token_to_id, ("<s>", "<|endoftext|>"))
    expected = {}
    for line in lines:
        ids, counted = [begin], [0]
        for text, counts in rendered(line):
            part = known.encode(text, add_special_tokens=False).ids
            ids += part
            counted += [int(counts)] * len(part)
        expected[tuple(ids)] = [*counted, 1]
    for tokens, mask in found.values():
        documents = list(map(tuple, split_at(tokens, end)))
        assert mask == sum((expected.pop(document) for document in documents), [])[:-1]
    assert not expected
    described = open_dataset(load_config("tiny", f"data.path={tmp_path / 'd'}").data, SHORT)
    assert described.tokenizer.end_of_text == end


SHORT = load_config("tiny", "model.block_size=4").model


# Templates that models were published with, and the answers that count in `TALK`.
TALK = [("user", "hi"), ("assistant", " hello "), ("user", "bye"), ("assistant", "ciao")]
PUBLISHED = {
    "ChatML": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        [" hello <|im_end|>", "ciao<|im_end|>"],
    ),
    "Llama 3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        "+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ["hello<|eot_id|>", "ciao<|eot_id|>"],
    ),
    "Gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        ["hello<end_of_turn>", "ciao<end_of_turn>"],
    ),
    "Mistral": (
        "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
        "{% endif %}{% endfor %}",
        [" hello </s>", "ciao</s>"],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_answers_are_found_in_the_text_of_published_templates(name):
    pytest.importorskip("jinja2")
    source, expected = PUBLISHED[name]
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, name)
    text, answers = template.render([{"role": role, "content": said} for role, said in TALK])
    assert [text[first:end] for first, end in answers] == expected
    assert text.startswith("<|im_start|>user" if name == "ChatML" else "<s>")


def test_an_empty_answer_has_an_empty_range():
    pytest.importorskip("jinja2")
    source = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n{% endif %}"
    )
    text, answers = ChatTemplate(source, {}, "plain").render(conversation("a", "")["messages"])
    assert answers == [(len(text), len(text))]


def test_a_generation_block_may_begin_with_a_plus_sign():
    source = (
        "{% for m in messages %}{%+ generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    text, answers = ChatTemplate(source, {}, "plain").render(conversation("a")["messages"])
    assert (text, answers) == ("a", [(0, 1)])


def test_files_of_two_kinds_have_the_tokens_that_each_has_alone(tmp_path, chat_tokenizer):
    """Names of special tokens are text in a prompt, and special tokens in a conversation."""
    files = (
        write(tmp_path, [{"prompt": "<|user|>", "completion": "the cat<|end|>"}] * 3, "a.jsonl"),
        write(tmp_path, [conversation("hello", "there")] * 3, "b.jsonl"),
    )

    def tokens(*inputs):
        prepare_text(tmp_path / "d", inputs, str(chat_tokenizer), split="train")
        columns = ("train.bin", np.uint16), ("train.mask.bin", np.uint8)
        return [np.fromfile(tmp_path / "d" / name, dtype).tolist() for name, dtype in columns]

    (a, a_mask), (b, b_mask) = map(tokens, files)
    end = [load_tokenizer(chat_tokenizer).end_of_text]
    assert tokens(*files) == [a + end + b, a_mask + [1] + b_mask]
    assert tokens(*files[::-1]) == [b + end + a, b_mask + [1] + a_mask]


def test_a_tokenizer_object_has_no_template_even_if_the_working_directory_does(
    tmp_path, monkeypatch
):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "a.jsonl").write_text(json.dumps(conversation("a", "b")))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="has no chat template"):
        prepare_text(tmp_path / "d", [tmp_path / "a.jsonl"], ByteTokenizer())
    assert template_files("char", None) == (None, None)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (
            [{"question": "?"}],
            "line 1 must be .* under 'text', but its keys are 'question'; choose keys with --jsonl",
        ),
        ([{"prompt": "a"}], "line 1 must be a JSON object with UTF-8 text under 'text'"),
        (
            [PAIRS[0], {"text": "a"}],
            "line 2 must be .* under 'prompt' and 'completion', but its keys are 'text'; choose",
        ),
        ([PAIRS[0], {"prompt": "a", "completion": 1}], "line 2 must be .* with --jsonl-key"),
        ([PAIRS[0], conversation("a", "b")], "line 2 must be .* 'prompt' and 'completion'"),
        ([{"text": "a"}, PAIRS[0]], "line 2 must be .* under 'text'"),
        ([{"text": "a", **PAIRS[0]}], "line 1: matches several kinds of lines; give --jsonl-key t"),
        ([conversation("a", "b"), {"messages": "a"}], "line 2: is of a different kind from the p"),
        ([conversation("a", "b"), {"messages": [1]}], "line 2: message 1 must have a `role`"),
        ([{"messages": [{"from": "human", "value": "a"}]}], "message 1 must have a `role` and"),
        (
            [{"messages": [{"role": "human", "content": "a"}]}],
            "line 1: message 1 has the role 'human', but it must be one of system, user, assistant",
        ),
        ([conversation("a")], "line 1: has no assistant message"),
        ([conversation("a", "b\0")], "contains the end-of-text token, 0, before its end.*--eos"),
        (
            [conversation("refuse", "b")],
            r"line 1: the chat template .* rejects the conversation \(not that\)",
        ),
        (
            [conversation("a", "b", "c", "changes")],
            "renders the first 2 messages differently if more messages follow",
        ),
        (
            [conversation("escape", "b")],
            r"line 1: the chat template .* rejects .* \(access to attribute '__class__'",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_line_is_named(tmp_path, lines, words):
    pytest.importorskip("jinja2")
    template = TEMPLATE + (
        "{% if messages[0].content == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
        "{% if messages[0].content == 'escape' %}{{ ().__class__.__mro__ }}{% endif %}"
    )
    changing = "{% if messages[-1].content == 'changes' %}other{% endif %}"
    (tmp_path / "t.jinja").write_text(changing + template)
    options = {"chat_template": tmp_path / "t.jinja"} if "messages" in lines[0] else {}
    with pytest.raises(UsageError, match=words):
        prepared(tmp_path, lines, **options)
    assert not (tmp_path / "d").exists()


def test_a_template_reaches_no_files_and_does_not_even_have_the_date(tmp_path):
    pytest.importorskip("jinja2")
    for source, words in (
        ("{% include 'a.jsonl' %}", "rejects the conversation"),
        ("{{ messages.append(1) }}", r"rejects the conversation \(.*unsafe"),
        ("{{ ''.__init__.__globals__ }}", "rejects the conversation"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "rejects the conversation"),
        ("{{ (messages|attr('__class__')) }}{{ x.y }}", "rejects the conversation"),
        ("{% for %}", "is not a valid chat template"),
    ):
        (tmp_path / "t.jinja").write_text(source)
        with pytest.raises(UsageError, match=words):
            prepared(tmp_path, [conversation("a", "b")], chat_template=tmp_path / "t.jinja")
    (tmp_path / "t.jinja").write_text("{{ strftime_now is defined }}" + TEMPLATE)
    tokens, _ = prepared(
        tmp_path, [conversation(f"{n}", "b") for n in range(20)],
        chat_template=tmp_path / "t.jinja",
    )["train"]  # fmt: skip
    assert bytes(tokens).startswith(b"False")


@pytest.mark.parametrize("templates", ["[1]", '[{"name": []}]', "1"])
def test_a_malformed_list_of_templates_is_refused(tmp_path, templates):
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {templates}}}')
    with pytest.raises(UsageError, match="tokenizer_config.json"):
        find_template(str(tmp_path), None)


def test_options_that_do_not_fit_the_lines_are_refused(tmp_path, gpt2_folder):
    with pytest.raises(UsageError, match="tokenizer byte has no chat template .*--chat-template"):
        prepared(tmp_path, [conversation("a", "b")])
    with pytest.raises(UsageError, match="gpt2 has no chat template"):
        prepared(tmp_path, [conversation("a", "b")], gpt2_folder)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    with pytest.raises(UsageError, match="t.jinja: is only for lines with messages, but .* has no"):
        prepared(tmp_path, PAIRS, chat_template=tmp_path / "t.jinja")
    with pytest.raises(UsageError, match="--format megatron: cannot .*mask .*--format nanogpt"):
        prepared(tmp_path, PAIRS, megatron=True, val_share=None)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(
        UsageError, match="--chat-template .*: is only for JSON lines with messages"
    ):
        prepare_text(tmp_path / "d", [tmp_path / "a.txt"], "byte", chat_template=tmp_path / "t.jin")
    with pytest.raises(UsageError, match=r"cannot read .*no.jinja .*--chat-template FILE"):
        prepared(tmp_path, [conversation("a", "b")], chat_template=tmp_path / "no.jinja")
    with pytest.raises(UsageError, match="^/proc/self/mem: cannot be read .Input/output error"):
        prepared(tmp_path, [conversation("a", "b")], chat_template=Path("/proc/self/mem"))


def test_keys_can_be_named(tmp_path):
    lines = [{"text": "whole", "question": f"{n}?", "answer": f"{n}!"} for n in range(20)]
    tokens, mask = prepared(tmp_path, lines, json_key="question,answer")["train"]
    assert bytes(tokens).startswith(b"1?1!\0") and mask[:5] == [0, 0, 1, 1, 1]


def test_text_that_replaces_instructions_leaves_no_mask(tmp_path):
    out = tmp_path / "d"
    command = ["text", "--tokenizer", "byte", "--workers", "1", "--out", str(out), "--input"]
    prepare.main([*command, str(write(tmp_path, PAIRS)), "--val-share", "0.3"])
    assert (out / "train.mask.bin").is_file()
    (tmp_path / "a.txt").write_text("text " * 100)
    prepare.main([*command, str(tmp_path / "a.txt"), "--overwrite"])
    assert {path.name for path in out.iterdir()} == {"train.bin", "val.bin", "meta.json"}
    dataset = open_dataset(load_config("tiny", f"data.path={out}").data, SHORT)
    assert not dataset.has_masks
