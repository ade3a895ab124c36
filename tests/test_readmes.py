"""A reader can type every example in the documents: each Bash or Python block runs as printed.

The documents are the README.md and DETAILS.md of each folder. The blocks of a document run in order
in one scratch folder. A block marked ```bash long takes minutes, or repeats what other tests cover,
so it runs only with --long. Output, and commands that need a network, a cluster or a GPU, are in
```text blocks.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import environment

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT)
    for name in ("README.md", "DETAILS.md")
    for path in ROOT.rglob(name)
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^ *```(.*?)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "bash": ["bash", "-euo", "pipefail", "-c"],
    "bash long": ["bash", "-euo", "pipefail", "-c"],
    "python": [sys.executable, "-c"],
}


def blocks(document):
    """Return the (kind, text) of each block that is to run."""
    found = BLOCK.findall((ROOT / document).read_text())
    return [(kind, text) for kind, text in found if kind in PROGRAMS]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d)], ids=str)
def test_examples_run_as_printed(document, tmp_path, data_home, request):
    (tmp_path / "data").mkdir()
    for name in ("python", "shakespeare_char"):
        if (data_home / name).exists():
            shutil.copytree(data_home / name, tmp_path / "data" / name)
    for name in ("configs", "launch", "notebooks"):
        (tmp_path / name).symlink_to(ROOT / name)
    settings = environment(JAXGPT_DATA=str(tmp_path / "data"), PYTHONPATH=str(ROOT))
    for kind, text in blocks(document):
        if kind != "bash long" or request.config.getoption("--long"):
            job = subprocess.run(
                [*PROGRAMS[kind], text],
                cwd=tmp_path,
                env=settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=600,
            )
            assert job.returncode == 0, f"{text}\n{job.stdout}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_block_is_of_a_known_kind(document):
    kinds = {kind for kind, _ in BLOCK.findall((ROOT / document).read_text())}
    assert kinds <= {*PROGRAMS, "diff", "text"}


@pytest.mark.parametrize("readme", [d for d in DOCUMENTS if d.name == "README.md"], ids=str)
def test_a_readme_begins_with_the_question_it_answers(readme):
    first = (ROOT / readme).read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith("?") or readme == Path("README.md")


def test_the_front_door_is_short_and_its_paths_exist():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    for path in re.findall(r"`((?:jaxgpt/[\w/]*|launch/|configs/|notebooks/))`", text):
        assert (ROOT / path / "README.md").is_file(), path
    for path in re.findall(r"`([\w/.]+/[\w.]+\.(?:md|py|sh|txt))`", text):
        if path.startswith(("jaxgpt", "launch", "configs", "notebooks")):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_a_file_and_a_section(document):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        path, _, section = link.partition("#")
        if "://" in path:
            continue
        target = ROOT / document.parent / path if path else ROOT / document
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            # GitHub drops punctuation from the anchor of a heading.
            anchors = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            assert section in anchors, link


def test_every_room_has_a_readme():
    rooms = [path.parent for path in (ROOT / "jaxgpt").glob("*/__init__.py")]
    missing = {room.name for room in rooms if not (room / "README.md").exists()}
    assert not missing
