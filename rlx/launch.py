"""The start of the `rlx` command: a process whose large blocks of memory are in huge pages, then `rlx.cli`.

XLA on a CPU asks for a program's intermediate results at each run and gives them back after it, and glibc asks the
kernel for blocks of that size each time. In pages of 4 KiB that is a sixth of the CPU time of an update. glibc reads
whether it may ask for huge pages (`glibc.malloc.hugetlb`) at the start of a process only, hence a second start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TUNABLE = "glibc.malloc.hugetlb"
OLDEST_GLIBC = (2, 35)  # that knows it
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def main() -> int:
    with_huge_pages()
    from rlx import cli  # not imported twice

    return cli.main()


def with_huge_pages() -> None:
    """Begin this process again with huge pages where the kernel gives them to those who ask.

    Whoever set GLIBC_TUNABLES to something about them has their way.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if TUNABLE in tunables or not can_be_asked_for():
        return
    os.environ["GLIBC_TUNABLES"] = ":".join([*filter(None, [tunables]), f"{TUNABLE}=1"])
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def can_be_asked_for(kernel: Path = _KERNEL) -> bool:
    """Whether this libc can ask, and the kernel gives huge pages to those who do and not to everybody."""
    try:
        libc, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        given = kernel.read_text()
    except (ValueError, OSError):  # another libc, another kernel
        return False
    numbers = tuple(int(part) for part in version.split(".")[:2])
    return libc == "glibc" and numbers >= OLDEST_GLIBC and "[madvise]" in given


if __name__ == "__main__":
    sys.exit(main())
