"""The doctor without the large arrays, which take 25 s: `quick_doctor.py [arguments]`."""

from jaxgpt.doctor import __main__ as doctor
from jaxgpt.doctor import report

report.COLLECTIVES_SECONDS = 0.0
doctor.main()
