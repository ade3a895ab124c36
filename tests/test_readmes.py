"""A reader can type every example in the READMEs: each block of Bash or Python runs as printed.

The blocks of a README run in order in one scratch folder. A block marked ```bash long takes
minutes, or repeats what other tests cover, so it runs only with --long. Output, and commands that
need a network, a cluster or a GPU, are in ```text blocks.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import environment

ROOT = Path(__file__).parents[1]
READMES = sorted(
    path.relative_to(ROOT)
    for path in ROOT.rglob("README.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
BLOCK = re.compile(r"^ *```(.*?)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {
    "bash": ["bash", "-euo", "pipefail", "-c"],
    "bash long": ["bash", "-euo", "pipefail", "-c"],
    "python": [sys.executable, "-c"],
}


def blocks(readme):
    """Return the (kind, text) of each block that is to run."""
    found = BLOCK.findall((ROOT / readme).read_text())
    return [(kind, text) for kind, text in found if kind in PROGRAMS]


@pytest.mark.parametrize("readme", [r for r in READMES if blocks(r)], ids=str)
def test_examples_run_as_printed(readme, tmp_path, data_home, request):
    (tmp_path / "data").mkdir()
    for name in ("python", "shakespeare_char"):
        if (data_home / name).exists():
            shutil.copytree(data_home / name, tmp_path / "data" / name)
    for name in ("configs", "launch", "notebooks"):
        (tmp_path / name).symlink_to(ROOT / name)
    settings = environment(JAXGPT_DATA=str(tmp_path / "data"), PYTHONPATH=str(ROOT))
    for kind, text in blocks(readme):
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


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_every_block_is_of_a_known_kind(readme):
    kinds = {kind for kind, _ in BLOCK.findall((ROOT / readme).read_text())}
    assert kinds <= {*PROGRAMS, "diff", "text"}


@pytest.mark.parametrize("readme", READMES, ids=str)
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


@pytest.mark.parametrize("readme", READMES, ids=str)
def test_links_lead_to_a_file_and_a_section(readme):
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / readme).read_text()):
        path, _, section = link.partition("#")
        if "://" in path:
            continue
        target = ROOT / readme.parent / path if path else ROOT / readme
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
