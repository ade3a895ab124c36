"""JAX still has each private name. A failure names the function and the version of JAX."""

import inspect
import sys
import types

import jax
import pytest

from jaxgpt.runtime import jax_internals

BROKEN = f"jax {jax.__version__} no longer has what jax_internals.{{}} needs"


def test_set_gloo_hostname_finds_the_function_that_takes_it(monkeypatch):
    jaxlib = pytest.importorskip("jaxlib")
    seen = []
    found = getattr(jaxlib._jax, "make_gloo_tcp_collectives", None)
    assert found is not None, BROKEN.format("set_gloo_hostname")
    assert "hostname" in (getattr(found, "func", found).__doc__ or ""), BROKEN.format("gloo")
    monkeypatch.setattr(
        jaxlib._jax, "make_gloo_tcp_collectives", lambda **given: seen.append(given["hostname"])
    )
    for address in "10.0.0.7", "10.0.0.8":  # also when it connects again
        assert jax_internals.set_gloo_hostname(address)
        jaxlib._jax.make_gloo_tcp_collectives()
    assert seen == ["10.0.0.7", "10.0.0.8"]


def test_use_one_cache_key_finds_both_hashes():
    from jax._src import cache_key

    for name in "_hash_accelerator_config", "_hash_devices":
        assert hasattr(cache_key, name), BROKEN.format("use_one_cache_key")
        parameters = inspect.signature(getattr(cache_key, name)).parameters
        assert len(parameters) == 2, BROKEN.format("use_one_cache_key")


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("jaxlib._jax", lambda: jax_internals.set_gloo_hostname("10.0.0.7")),
        ("jax._src.cache_key", jax_internals.use_one_cache_key),
    ],
)
def test_without_the_name_there_is_a_fallback(module, call, monkeypatch):
    package, _, name = module.rpartition(".")
    monkeypatch.setattr(sys.modules[package], name, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert call() is False
