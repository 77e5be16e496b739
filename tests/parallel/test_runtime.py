"""What the process knows of itself."""

import jax
import numpy as np
import pytest

from rlx.parallel import runtime


@pytest.fixture
def cache_settings():
    """jax's own, put back at the end."""
    names = [
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    ]
    before = {name: getattr(jax.config, name) for name in names}
    yield lambda: [getattr(jax.config, name) for name in names]
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_compilation_cache_is_kept_at_an_absolute_path(cache_settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runtime.use_compilation_cache("cache/jax")
    assert cache_settings() == [str(tmp_path / "cache" / "jax"), 0.05, 0]


def test_no_directory_leaves_jax_as_it_is(cache_settings):
    before = cache_settings()
    runtime.use_compilation_cache("")
    assert cache_settings() == before


def test_compilations_are_counted_once():
    x = jax.device_put(np.ones(7))
    function = jax.jit(lambda x: x * 3 + x)
    counter = runtime.CompilationCounter()
    function(x)
    assert counter.count == 1
    function(x)
    assert counter.count == 1
    later = runtime.CompilationCounter()
    jax.jit(lambda x: x * 5 + x)(x)
    assert (counter.count, later.count) == (2, 1)


def test_memory_in_use_is_in_gib():
    before = runtime.host_memory_gib()
    held = np.ones(2**25)  # a quarter of a GiB
    after = runtime.host_memory_gib()
    assert 0.2 < after - before < 0.3
    assert runtime.peak_host_memory_gib() >= after - 0.01
    del held
    assert runtime.host_memory_gib() < after - 0.2
    assert runtime.peak_host_memory_gib() >= after - 0.01


def test_device_memory_is_what_the_backend_says():
    device = jax.local_devices()[0]
    known = device.memory_stats() or {}
    assert set(runtime.device_memory_gib()) == {
        f"system/{name}"
        for key, name in [("bytes_in_use", "device_memory_gib"), ("peak_bytes_in_use", "device_memory_peak_gib")]
        if key in known
    }
