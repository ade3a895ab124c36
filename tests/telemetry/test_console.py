import subprocess
import sys
from pathlib import Path

SAYS = """
from pathlib import Path
from jaxgpt.telemetry.console import Console
console = Console(True, Path("train.log"))
console.say("one")
console.say("two")
"""


def test_a_full_disk_behind_the_console_is_not_the_end(tmp_path):
    with Path("/dev/full").open("w") as full:
        said = subprocess.run([sys.executable, "-c", SAYS], cwd=tmp_path, stdout=full)
    assert said.returncode == 0
    one, warning, two = (tmp_path / "train.log").read_text().splitlines()
    assert one.endswith(" one") and two.endswith(" two")
    assert "warning: the console stopped: [Errno 28] No space left" in warning
