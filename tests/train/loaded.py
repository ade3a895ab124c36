"""A training run that says which packages it had loaded by its first step, and by its end.

`loaded.py PACKAGE,PACKAGE... [train arguments]`
"""

import sys

from jaxgpt.perf.startup import Startup
from jaxgpt.train import __main__ as train

mark = Startup.mark


def look(when):
    print(f"loaded by the {when}:", *(n for n in sys.argv[1].split(",") if n in sys.modules))


def mark_and_look(self, phase):
    mark(self, phase)
    if phase == "first step":
        look(phase)
        print("compile cache:", self.compile_cache)


Startup.mark = mark_and_look
try:
    train.main(sys.argv[2:])
finally:
    look("end")
