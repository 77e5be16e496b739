"""A filter of system calls, as the program of the kernel's packet filter that seccomp(2) takes.

Namespaces and an unprivileged user already refuse what these calls would do; the filter keeps a program from reaching
the kernel's code behind them at all. Refused calls fail with EPERM, those of another machine's kind end the process.
"""

from __future__ import annotations

import platform
import struct
from typing import NamedTuple

_LOAD, _EQUAL, _GREATER_EQUAL, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _KILL, _EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_X32 = 0x40000000  # the bit of system calls of the x32 kind, whose numbers would pass for others


class _Machine(NamedTuple):
    audit: int  # AUDIT_ARCH_*
    refused: dict[str, int]
    uncounted: dict[str, int]  # memory of no process's addresses, which control groups alone count


_COMMON = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429}
_COMMON |= {"fsopen": 430, "fsmount": 432, "mount_setattr": 442}
_X86 = {"ptrace": 101, "personality": 135, "pivot_root": 155, "acct": 163, "mount": 165, "umount2": 166, "swapon": 167}
_X86 |= {"swapoff": 168, "reboot": 169, "init_module": 175, "delete_module": 176, "quotactl": 179, "kexec_load": 246}
_X86 |= {"add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298, "setns": 308}
_X86 |= {"open_by_handle_at": 304, "process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "bpf": 321}
_X86 |= {"kexec_file_load": 320, "userfaultfd": 323}
_ARM = {"umount2": 39, "mount": 40, "pivot_root": 41, "quotactl": 60, "acct": 89, "personality": 92, "unshare": 97}
_ARM |= {"kexec_load": 104, "init_module": 105, "delete_module": 106, "ptrace": 117, "reboot": 142, "add_key": 217}
_ARM |= {"request_key": 218, "keyctl": 219, "swapon": 224, "swapoff": 225, "perf_event_open": 241, "setns": 268}
_ARM |= {"open_by_handle_at": 265, "process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "bpf": 280}
_ARM |= {"userfaultfd": 282, "kexec_file_load": 294}
_MACHINES = {
    "x86_64": _Machine(0xC000003E, _X86 | _COMMON, {"shmget": 29, "msgget": 68, "memfd_create": 319}),
    "aarch64": _Machine(0xC00000B7, _ARM | _COMMON, {"msgget": 186, "shmget": 194, "memfd_create": 279}),
}


def program(machine: str = platform.machine(), *, grouped: bool = True) -> bytes | None:
    """The filter, None for a machine whose numbers of system calls are not known here.

    grouped: control groups limit memory; where none do, what only they would count is refused.
    """
    if machine not in _MACHINES:
        return None
    audit, refused, uncounted = _MACHINES[machine]
    numbers = sorted((refused if grouped else refused | uncounted).values())
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, audit, yes=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        _step(_GREATER_EQUAL, _X32, yes=len(numbers) + 1),
        *(_step(_EQUAL, number, yes=len(numbers) - i) for i, number in enumerate(numbers)),
        _step(_RETURN, _ALLOW),
        _step(_RETURN, _EPERM),
    ]
    return b"".join(code)


def refused_calls(machine: str = platform.machine()) -> list[str]:
    return sorted(_MACHINES[machine].refused) if machine in _MACHINES else []


def _step(code: int, value: int, *, yes: int = 0) -> bytes:
    """One instruction; `yes` of those after it are skipped where its comparison holds."""
    return struct.pack("=HBBI", code, yes, 0, value)
