"""The lessons run from top to bottom."""

from pathlib import Path

import pytest

from jobs import AS_USERS, environment

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_lesson_runs(path, shakespeare, tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    for name, value in environment(**AS_USERS).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(path, as_version=4)
    # The kernel that runs these tests, not one that the user may have registered.
    monkeypatch.setenv("JUPYTER_PATH", "")
    NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    printed = "".join(o.get("text", "") for o in outputs)
    assert "ROMEO:" in printed
