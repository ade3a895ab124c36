"""The doctor without large arrays, which it measures for 25 s: `quick_doctor.py [arguments]`."""

from jaxgpt.doctor import __main__ as doctor

initialize_jax = doctor.initialize_jax


def connect_and_hurry(*args, **options):
    facts = initialize_jax(*args, **options)
    from jaxgpt.doctor import examination  # imports JAX, after initialize_jax

    examination.TIME_FOR_COLLECTIVES = 0.0
    return facts


doctor.initialize_jax = connect_and_hurry
doctor.main()
