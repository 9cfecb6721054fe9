"""The system calls that the sandbox refuses, as a seccomp filter for bubblewrap.

Besides the dropped capabilities, it refuses calls by which programs have often left sandboxes: keys, tracing,
bpf, perf, io_uring, userfaultfd, mounts and namespaces, and sockets between virtual machines, which network
namespaces do not isolate. Refused calls fail with EPERM.
"""

import errno
import os
import platform
import struct
from functools import cache

__all__ = [
    "ARCHITECTURES",
    "REFUSED",
    "REFUSED_BY_FLAGS",
    "REFUSED_BY_VALUE",
    "UNCOUNTED_MEMORY",
    "filter_file",
    "seccomp_filter",
]

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Number of each architecture in the kernel's audit interface."""
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "syslog": (103, 116),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
}
"""Numbers of refused calls, in the order of `ARCHITECTURES`."""
REFUSED_BY_FLAGS = {"clone": (56, 220), "unshare": (272, 97)}
"""Calls that are refused if their first argument has a flag of `_NAMESPACES`."""
REFUSED_BY_VALUE = {"socket": (41, 198)}
"""Calls that are refused if their first argument is `_AF_VSOCK`."""
UNCOUNTED_MEMORY = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
"""Calls that allocate memory which no limit counts. The sandbox of programs refuses them too."""
_AF_VSOCK = 40
_CLONE3 = 435
_NAMESPACES = 0x7E020000
"""The flags of `clone` and `unshare` for namespaces: NEW{NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_X86_FORKS = (57, 58)
"""The calls `fork` and `vfork`, which only x86_64 has besides `clone`."""
_X32 = 0x40000000
"""The first number of the calls of x86_64 with 32-bit pointers, which no program uses."""

# Instructions of the kernel's packet filter, and where they find the call.
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _FAIL, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000


def seccomp_filter(machine: str, *, supervised: bool = False) -> bytes:
    """Return the filter for an architecture of `platform.machine`; empty if it is not supported. Processes
    that make calls of another architecture, such as 32-bit programs, are killed.

    `supervised` also refuses `UNCOUNTED_MEMORY`, and lets a supervisor decide on each new process and thread
    (the kernel's "user notification"), to limit their number.
    """
    if machine not in ARCHITECTURES:
        return b""
    column = list(ARCHITECTURES).index(machine)
    program = [
        _instruction(_LOAD, _ARCHITECTURE),
        *_return_if(_IF_EQUAL, ARCHITECTURES[machine], _KILL, otherwise=True),
        _instruction(_LOAD, _NUMBER),
        *(_return_if(_IF_AT_LEAST, _X32, _FAIL | errno.ENOSYS) if machine == "x86_64" else ()),
        # The flags of clone3 lie in memory, which a filter cannot read. Without it, libraries use clone.
        *_return_if(_IF_EQUAL, _CLONE3, _FAIL | errno.ENOSYS),
    ]
    for numbers in (REFUSED | (UNCOUNTED_MEMORY if supervised else {})).values():
        program += _return_if(_IF_EQUAL, numbers[column], _FAIL | errno.EPERM)
    if supervised and machine == "x86_64":
        for number in _X86_FORKS:
            program += _return_if(_IF_EQUAL, number, _ASK)
    by_argument = [
        *((name, numbers, _IF_ANY_BIT, _NAMESPACES) for name, numbers in REFUSED_BY_FLAGS.items()),
        *((name, numbers, _IF_EQUAL, _AF_VSOCK) for name, numbers in REFUSED_BY_VALUE.items()),
    ]
    for name, numbers, condition, value in by_argument:
        check = [
            _instruction(_LOAD, _FIRST_ARGUMENT),
            *_return_if(condition, value, _FAIL | errno.EPERM),
            _instruction(_RETURN, _ASK if supervised and name == "clone" else _ALLOW),
        ]
        program += [_instruction(_IF_EQUAL, numbers[column], 0, len(check)), *check]
    return b"".join([*program, _instruction(_RETURN, _ALLOW)])


@cache
def filter_file() -> str:
    """Return a path from which child processes of this process can read this machine's filter; empty if its
    architecture is not supported. The file is in memory, and ends with this process."""
    program = seccomp_filter(platform.machine())
    if not program:
        return ""
    file = os.memfd_create("seccomp")
    os.write(file, program)
    return f"/proc/{os.getpid()}/fd/{file}"


def _instruction(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """Return an instruction. `then` and `otherwise` are numbers of instructions to skip after it."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _return_if(condition: int, value: int, result: int, *, otherwise: bool = False) -> list[bytes]:
    """Return instructions that end the filter with `result` if the condition holds (`otherwise`: if not)."""
    skip = (1, 0) if otherwise else (0, 1)
    return [_instruction(condition, value, *skip), _instruction(_RETURN, result)]
