"""The doctor without large arrays, which it measures for 25 s: `quick_doctor.py [arguments]`."""

from jaxgpt.doctor import __main__ as doctor

connect = doctor.connect


def connect_and_hurry(*args, **options):
    facts = connect(*args, **options)
    from jaxgpt.doctor import examination  # imports JAX, after connect

    examination.TIME_FOR_COLLECTIVES = 0.0
    return facts


doctor.connect = connect_and_hurry
doctor.main()
