"""All uses of JAX's private APIs.

Each function documents why it needs a private name, and what it does if JAX has removed the name.
If a name is missing, tests/runtime/test_jax_internals.py fails and reports the function.
"""

import functools


def set_gloo_hostname(address: str) -> bool:
    """Make Gloo, the collectives library for CPUs, listen on `address` on this host.

    Call this before JAX initializes its backends. Returns True. Reason: By default, Gloo listens on
    the address that the host name resolves to, and JAX has no setting to change this. On Debian,
    this address is 127.0.1.1, which no other host can reach. Fallback: return False and let Gloo
    choose the address.
    """
    try:
        from jaxlib import _jax

        make = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return False
    make = getattr(make, "func", make)  # already wrapped if this process connects again
    _jax.make_gloo_tcp_collectives = functools.partial(make, hostname=address)
    return True


def use_one_cache_key() -> bool:
    """Make a program's compile-cache key the same on all processes of a CPU job. Return True.

    This applies to programs that run on the devices of all processes.

    Reason: JAX's key includes the topology, which differs between the processes of a CPU job. Only
    process 0 writes cache entries, so the other processes would not find an entry. This function
    makes JAX use the device kinds instead of the topology, as JAX does for platforms without a
    topology. Fallback: return False, and the caller compiles without a cache.
    """
    try:
        from jax._src import cache_key

        cache_key._hash_accelerator_config = cache_key._hash_devices
    except (ImportError, AttributeError):
        return False
    return True
