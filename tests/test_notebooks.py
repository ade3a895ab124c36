"""The lessons run from top to bottom, and the committed files show their outputs."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import AS_USERS, environment

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_lesson = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def kinds_of_outputs(notebook):
    """Return for each code cell how many pictures it shows, and whether it prints text."""
    cells = [cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [
        (
            sum("image/png" in output.get("data", {}) for output in outputs),
            any(output["output_type"] == "stream" for output in outputs),
        )
        for outputs in cells
    ]


@pytest.mark.long
@each_lesson
def test_lesson_runs(path, shakespeare, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name, value in environment(**AS_USERS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER), prepend=":")  # the lessons import drawing.py
    # The kernel that runs these tests, not one that the user may have registered.
    monkeypatch.setenv("JUPYTER_PATH", "")
    notebook = nbformat.read(path, as_version=4)
    committed = kinds_of_outputs(notebook)
    # A lesson takes about a minute on two idle cores, and several minutes on a busy machine.
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert kinds_of_outputs(notebook) == committed, "run the lesson again and commit its outputs"


@each_lesson
def test_committed_lesson_shows_its_outputs(path):
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    pictures = [o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})]
    assert pictures
    assert sum(len(base64.b64decode(picture)) for picture in pictures) < 400_000


@pytest.mark.parametrize(
    ("picture", "package", "source"),
    [("memory", "matplotlib", "-e '.[report]'"), ("report", "playwright", "playwright")],
)
def test_a_picture_without_its_package_is_refused_in_a_sentence(picture, package, source):
    code = (
        "import runpy, sys\n"
        f"sys.modules['{package}'] = None\n"
        f"sys.argv = ['gallery.py', '{picture}']\n"
        f"runpy.run_path({str(FOLDER / 'gallery.py')!r}, run_name='__main__')"
    )
    job = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert job.returncode == 1
    assert job.stderr == f"error: {picture}: needs {package}; pip install {source}\n"


def test_the_readme_shows_each_picture_of_the_gallery_with_its_command():
    shown = (FOLDER.parent / "README.md").read_text()
    pictures = sorted((FOLDER / "gallery").iterdir())
    assert [picture.name for picture in pictures] == ["memory.png", "report.png", "spike.png"]
    for picture in pictures:
        assert picture.stat().st_size < 150_000
        assert f"](notebooks/gallery/{picture.name})" in shown
        assert f"`python notebooks/gallery.py {picture.stem}`" in shown
