"""The attack suite: a table of programs, with what each tries and what must come of it (`tests.sandbox.attack`)."""

from __future__ import annotations

from tests.sandbox.attacks_by_processes import PROCESSES, SIGNALS
from tests.sandbox.attacks_by_use import MEMORY_AND_DISK
from tests.sandbox.attacks_on_isolation import FILES, KERNEL, NETWORK

ATTACKS = (*PROCESSES, *SIGNALS, *MEMORY_AND_DISK, *FILES, *KERNEL, *NETWORK)
