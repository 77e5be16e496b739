"""What the process asks of jax and of the machine: the compilation cache, how much was compiled, memory in use."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import jax


def use_compilation_cache(directory: str) -> None:
    """Keep compiled programs in `directory` between runs; "" leaves jax as it is."""
    if directory:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class CompilationCounter:
    """Counts programs compiled (or fetched from the cache) by this process since it was made."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def host_memory_gib() -> float:
    """Resident memory of this process, GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    return pages * resource.getpagesize() / 2**30 or peak_host_memory_gib()


def peak_host_memory_gib() -> float:
    """The most that was ever resident, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def device_memory_gib() -> dict[str, float]:
    """Memory in use on the first device and its peak, GiB; empty where the backend does not say (CPU)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    names = {"bytes_in_use": "device_memory_gib", "peak_bytes_in_use": "device_memory_peak_gib"}
    return {f"system/{name}": stats[key] / 2**30 for key, name in names.items() if key in stats}
