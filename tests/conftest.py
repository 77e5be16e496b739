"""What all tests share: 24 virtual CPU devices, a compilation cache, checked shapes, no network.

Environment variables must be set before jax is imported, so this file sets them at its own import. JAX_PLATFORMS can
be given from outside, to run the tests of kernels on an accelerator.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest

DEVICES = 24
ROOT = Path(__file__).resolve().parents[1]

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set its virtual devices")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    devices_flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {devices_flag}".strip()
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax-tests"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ["HF_HUB_OFFLINE"] = "1"

from rlx.launch import prepare  # noqa: E402

prepare()  # as the command does, before numpy is imported; the suite takes a tenth less time

# After the environment: these may import jax.
from jaxtyping import install_import_hook  # noqa: E402

import tests.typechecks  # noqa: E402

install_import_hook(tests.typechecks.CHECKED, "tests.typechecks.array_functions")


MADE = tuple(str(ROOT / name) + os.sep for name in ("models", "runs", "sessions", "cuts", "notebooks"))
live_tests = False  # tests with a real server make the real model first


def _only_what_a_checkout_has(event: str, arguments: tuple[object, ...]) -> None:
    """A test that reads what commands made here passes on this machine and fails on a new one."""
    if event == "open" and isinstance(arguments[0], str) and not live_tests:
        path = os.path.abspath(arguments[0])
        if path.startswith(MADE):
            raise AssertionError(f"a test opened {path}, which no clean checkout has; make what it needs in tmp_path")


sys.addaudithook(_only_what_a_checkout_has)


def pytest_runtest_setup(item: pytest.Item) -> None:
    global live_tests
    live_tests = item.get_closest_marker("sglang") is not None


@pytest.fixture(scope="session")
def devices8():
    """Eight devices to build meshes of."""
    import jax

    devices = jax.devices()
    if len(devices) < 8:
        pytest.skip(f"needs 8 devices, the {devices[0].platform} backend has {len(devices)}")
    return devices[:8]


MOST_MAPS = 25_000  # the kernel allows 65,530 a process, and compiling beyond aborts it


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Every compiled program takes memory maps until it is dropped; only files and slow tests are worth the look."""
    slow = item.get_closest_marker("slow") or item.get_closest_marker("exhaustive")
    maps = Path("/proc/self/maps")
    if (slow or nextitem is None or nextitem.path != item.path) and maps.exists():
        with maps.open("rb") as lines:
            many = sum(1 for _ in lines) > MOST_MAPS
        if many:
            import jax

            jax.clear_caches()
            gc.collect()
