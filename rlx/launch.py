"""The start of the `rlx` command: settings of the process, its large blocks of memory in huge pages, then `rlx.cli`.

XLA on a CPU asks for the memory of a program's intermediate results at each run and gives it back after it, and glibc
asks the kernel for blocks of that size each time, which zeroes them page by page (docs/measurements.md). glibc reads
whether it may ask for huge pages at the start of a process only, hence a second start. This is for the command alone: a
program of its own calls `rlx.cli.main`, which starts nothing again.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

TUNABLES, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
OLDEST_GLIBC = (2, 35)  # that knows it
# Of the second start. An argument of Python, since a variable may be lost on the way and there must be no third.
MARK = "rlx_huge_pages"
COLLECTED_AFTER = 20_000  # containers made less those freed since the last time; 700 in Python 3.12
COMPUTING = ("train", "sft", "evaluate", "edge", "cuts", "chat", "serve", "signal")
_KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def main() -> int:
    if sys.argv[1:2] and sys.argv[1] in COMPUTING:
        with_huge_pages()
    prepare()
    try:
        from rlx import cli  # after the second start, so once

        return cli.main()
    except KeyboardInterrupt:  # while modules are imported, say; programs that have something to end do it themselves
        if not os.environ.get("RLX_TRACEBACK"):
            sys.excepthook = lambda *_: None
        raise  # so that the process ends by the signal, and with it a loop of the shell around it


def prepare() -> None:
    """What makes the start of a command shorter (docs/measurements.md), and holds as long as the process: modules and
    traced programs are hundreds of thousands of objects that stay, which Python's collector would look through again
    and again, and threads of numpy's BLAS would wait busily for work that does not come. Before numpy is imported."""
    gc.set_threshold(COLLECTED_AFTER)
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # 2^4 cycles, the least


def with_huge_pages() -> None:
    """Begin this process again with huge pages where the kernel gives them to those who ask.

    Where that cannot be, or the program came from the standard input, it goes on as it is. Processes that it starts
    have what was in GLIBC_TUNABLES before. With GLIBC_TUNABLES=glibc.malloc.hugetlb=0 nothing begins again.
    """
    tunables = os.environ.get(TUNABLES, "")
    if MARK in sys._xoptions:
        _set_tunables(tunables.removesuffix(f"{TUNABLE}=1").removesuffix(":"))  # the C library has read them
    elif TUNABLE not in tunables and sys.orig_argv[1:] not in ([], ["-"]) and can_be_asked_for():
        _set_tunables(":".join([*filter(None, [tunables]), f"{TUNABLE}=1"]))
        try:
            os.execv(sys.executable, [sys.executable, "-X", MARK, *sys.orig_argv[1:]])
        except (OSError, ValueError, TypeError):  # an embedded interpreter, or one that may not
            _set_tunables(tunables)


def _set_tunables(value: str) -> None:
    if value:
        os.environ[TUNABLES] = value
    else:
        os.environ.pop(TUNABLES, None)


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
