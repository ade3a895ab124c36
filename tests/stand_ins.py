"""Programs that stand in for others."""

import sys

# It says what nanogpt_worker.py would, of a model that takes 1,000 s a step and has no loss.
SLOW = f"""#!{sys.executable}
import json, sys
print(json.dumps({{"torch": "0", "threads": 3, "device": "abacus"}}), flush=True)
for line in sys.stdin:
    print(json.dumps({{"seconds": 1000.0, "losses": [0.0] * int(line)}}), flush=True)
"""


def program(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return path
