"""Private names of JAX: the only file that may use them.

Each function gives the reason, and what happens with a version of JAX that no longer has the name.
tests/runtime/test_jax_internals.py fails for such a version, by the name of the function.
"""

import functools


def set_gloo_hostname(address: str) -> bool:
    """Let Gloo, the collective library between CPUs, listen at this address of the host.

    Call it before JAX makes its first device. Reason: Gloo takes what the host's own name stands
    for (on Debian 127.0.1.1, which no other host can reach), and JAX has no setting for it.
    Fallback: False, and Gloo chooses.
    """
    try:
        from jaxlib import _jax

        make = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return False
    make = getattr(make, "func", make)  # in a process that connects again
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
    return True


def use_one_cache_key() -> bool:
    """Give a program the same key in the compile cache on all processes of a CPU job.

    Reason: JAX's key contains the topology, which looks different from every process on CPUs; only
    process 0 would find what it wrote. Where JAX cannot describe a topology it takes the kinds of
    devices instead, and so does this. Fallback: False, and the job compiles without a cache.
    """
    try:
        from jax._src import cache_key

        cache_key._hash_accelerator_config = cache_key._hash_devices
    except (ImportError, AttributeError):
        return False
    return True
