"""Programs that try to harm what is around them. What each tries, and what must come of it.

A program prints BROKE where it got what it must not have, and HELD where it was refused; one that exhausts something
must be stopped by one of the limits that are named, or be refused like the others. In every one of them, what
`SECRET` names is text that stands in a file of this machine and in another sandbox's workspace, and OUTSIDE is the
path of that file.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from rlx.sandbox.base import Limit


class Attack(NamedTuple):
    name: str
    program: str  # Python
    limits: frozenset[Limit | None]  # of which one ends it; None: it ends by itself
    held: bool = True  # it must have printed HELD, where it ended by itself


REFUSED = frozenset({None})
# What has filled up, at whatever speed.
FULL = frozenset({None, Limit.MEMORY, Limit.DISK, Limit.FILES, Limit.WALL, Limit.CPU})
FOREVER = frozenset({Limit.WALL, Limit.CPU})
MANY = FOREVER | {Limit.MEMORY}  # processes without end: whichever is used up first
_REFUSE = """
def refused(what, action):
    try:
        said = action()
    except (OSError, MemoryError, ValueError, AttributeError, OverflowError) as error:
        print("HELD", what, type(error).__name__, error, flush=True)
    else:
        print("BROKE" if said is not HELD else "HELD", what, said, flush=True)
HELD = object()
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    if libc.syscall(*arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
"""


def attack(name: str, program: str, limits: frozenset[Limit | None] = REFUSED, held: bool = True) -> Attack:
    return Attack(name, _REFUSE + textwrap.dedent(program), limits, held)
