"""Programs that try to harm what is around them. A table: what each tries, and what must come of it.

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
FOREVER = frozenset({Limit.WALL, Limit.CPU})
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


def _attack(name: str, program: str, limits: frozenset[Limit | None] = REFUSED, held: bool = True) -> Attack:
    return Attack(name, _REFUSE + textwrap.dedent(program), limits, held)


PROCESSES = (
    _attack(
        "fork bomb",
        """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        FOREVER,
    ),
    _attack(
        "fork bomb of the shell",
        "os.execv('/bin/sh', ['sh', '-c', 'f() { f | f & f; }; f'])",
        FOREVER | REFUSED,
        held=False,
    ),
    _attack(
        "thread bomb",
        """
        def spin():
            while True: pass
        def start():
            while True: threading.Thread(target=spin).start()
        try: start()
        except RuntimeError: print("HELD", flush=True)
        while True: pass
        """,
        FOREVER,
    ),
    _attack(
        "vfork and exec for ever",
        """
        while True:
            try: subprocess.Popen(["sleep", "60"])
            except OSError: pass
        """,
        FOREVER,
    ),
    _attack(
        "tree of zombies",
        """
        for _ in range(1000):
            try:
                if os.fork() == 0: os._exit(0)
            except OSError: break
        print("HELD", flush=True)
        time.sleep(60)
        """,
        FOREVER,
    ),
    _attack("sleeping past the limit", "time.sleep(600)", FOREVER),
    _attack(
        "ignoring every signal",
        """
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
        """,
        FOREVER,
    ),
    _attack(
        "a daemon by double fork and setsid",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                while True: time.sleep(1)
            os._exit(0)
        print("HELD")
        """,
    ),
    _attack(
        "a daemon that keeps the output open",
        """
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        print("HELD")
        """,
    ),
    _attack(
        "a child that has stopped itself",
        """
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
        print("HELD")
        """,
    ),
    _attack("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", FOREVER),
    _attack(
        "closing the output and going on",
        """
        for file in (0, 1, 2): os.close(file)
        os.setsid() if os.fork() == 0 else None
        while True: time.sleep(1)
        """,
        FOREVER,
    ),
    _attack(
        "outliving its parent's death",
        """
        libc.prctl(1, 0)  # PR_SET_PDEATHSIG: no signal
        libc.prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        if os.fork() == 0:
            os.setsid()
            while True: time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        held=False,
    ),
    _attack(
        "stopping the first process of its namespace",
        """
        os.kill(1, signal.SIGSTOP)
        os.kill(1, signal.SIGTERM)
        while True: time.sleep(1)
        """,
        FOREVER | REFUSED,
        held=False,
    ),
)

SIGNALS = (
    _attack(
        "killing its parent and everything else",
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.kill(os.getppid(), 0)
            try: os.kill(-1, signal.SIGKILL)
            except OSError: pass
            os._exit(0)
        time.sleep(60)
        """,
        FOREVER | REFUSED,
        held=False,
    ),
    _attack(
        "signals to every number of a process",
        """
        mine = {1, os.getpid()}
        def all_numbers():
            reached = []
            for pid in range(2, 33000):
                if pid in mine: continue
                try: os.kill(pid, 0); reached.append(pid)
                except ProcessLookupError: pass
            return reached if len(reached) > 2 else HELD
        refused("signals", all_numbers)
        """,
    ),
    _attack(
        "ptrace of the first process",
        """
        refused("attach", lambda: call(101, 16, 1, 0, 0))
        refused("seize", lambda: call(101, 0x4206, 1, 0, 0))
        """,
    ),
    _attack(
        "reading the memory of the first process",
        """
        refused("mem", lambda: open("/proc/1/mem", "r+b").seek(4096) and open("/proc/1/mem", "rb").read(1))
        refused("process_vm_readv", lambda: call(310, 1, 0, 0, 0, 0, 0))
        """,
    ),
    _attack(
        "renicing and scheduling in real time",
        """
        refused("nice", lambda: os.nice(-10))
        refused("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
        """,
    ),
    _attack(
        "raising its own limits",
        """
        import resource
        for what in ("RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_CPU", "RLIMIT_NOFILE"):
            number = getattr(resource, what)
            hard = resource.getrlimit(number)[1]
            refused(what, lambda: resource.setrlimit(number, (hard + 1, hard + 1)))
        """,
    ),
)

MEMORY_AND_DISK = (
    _attack(
        "memory hog",
        "hog = [bytearray(1 << 22) for _ in iter(int, 1)]",
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "memory hog of many processes",
        """
        for _ in range(8):
            if os.fork() == 0: break
        hog = []
        while True: hog.append(b"x" * (1 << 21))
        """,
        frozenset({Limit.MEMORY, None}) | FOREVER,
        held=False,
    ),
    _attack(
        "memory by mmap, touched and locked",
        """
        import mmap
        def lock():
            area = mmap.mmap(-1, 1 << 28)
            address = ctypes.addressof(ctypes.c_char.from_buffer(area))
            if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(1 << 28)) != 0:
                raise OSError(ctypes.get_errno(), "mlock")
        refused("mlock", lock)
        """,
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "memory in files without names",
        """
        def fill():
            files = [os.memfd_create(str(i)) for i in range(64)]
            for file in files:
                for _ in range(64): os.write(file, b"x" * (1 << 20))
        refused("memfd", fill)
        """,
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "memory in System V segments",
        """
        def fill():
            for _ in range(64):
                segment = libc.shmget(0, ctypes.c_size_t(1 << 24), 0o1600)
                libc.shmat.restype = ctypes.c_void_p
                address = libc.shmat(segment, None, 0)
                if segment < 0 or address in (None, 2**64 - 1): raise OSError(ctypes.get_errno(), "shm")
                ctypes.memset(address, 1, 1 << 24)
        refused("shm", fill)
        """,
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "a huge file",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def fill():
            with open("huge", "wb") as file:
                for _ in range(4096): file.write(b"x" * (1 << 20))
        refused("file", fill)
        """,
        frozenset({Limit.DISK, Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "a sparse file",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def hole():
            with open("holes", "wb") as file: os.ftruncate(file.fileno(), 1 << 40)
        refused("truncate", hole)
        refused("allocate", lambda: os.posix_fallocate(os.open("more", os.O_CREAT | os.O_WRONLY), 0, 1 << 34))
        """,
    ),
    _attack(
        "many files that fill the disk",
        """
        def fill():
            for i in range(4096):
                with open(f"part{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("files", fill)
        """,
        frozenset({Limit.DISK, Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "deleted files that stay open",
        """
        def fill():
            kept = []
            for i in range(512):
                kept.append(open("gone", "wb"))
                os.unlink("gone")
                kept[-1].write(b"x" * (1 << 20))
                kept[-1].flush()
        refused("deleted", fill)
        """,
        frozenset({Limit.DISK, Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "many small files",
        """
        def fill():
            for i in range(1_000_000): open(f"f{i}", "w").close()
        refused("inodes", fill)
        """,
        frozenset({Limit.FILES, None}),
        held=False,
    ),
    _attack(
        "directories, deep",
        """
        def dig():
            for _ in range(1_000_000):
                os.mkdir("d")
                os.chdir("d")
        refused("depth", dig)
        """,
        frozenset({Limit.FILES, None}),
        held=False,
    ),
    _attack(
        "filling /tmp",
        """
        def fill():
            for i in range(4096):
                with open(f"/tmp/{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("/tmp", fill)
        """,
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack(
        "filling /dev/shm",
        """
        def fill():
            for i in range(4096):
                with open(f"/dev/shm/{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("/dev/shm", fill)
        """,
        frozenset({Limit.MEMORY, None}),
        held=False,
    ),
    _attack("endless output", "while True: os.write(1, b'x' * 65536)", frozenset({Limit.OUTPUT})),
    _attack("endless errors", "while True: os.write(2, b'x' * 65536)", frozenset({Limit.OUTPUT})),
    _attack(
        "output of many processes",
        """
        for _ in range(4): os.fork()
        while True: os.write(1, b"x" * 65536)
        """,
        frozenset({Limit.OUTPUT}),
    ),
    _attack(
        "spinning on every core",
        """
        for _ in range(3): os.fork()
        while True: pass
        """,
        FOREVER,
    ),
    _attack(
        "ignoring the signal of the CPU limit",
        """
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True: pass
        """,
        FOREVER,
    ),
)

FILES = (
    _attack(
        "writes outside",
        """
        for path in "/usr/bin/x /etc/x /x /bin/x /lib/x /dev/x /proc/x /workspace/../x /usr/bin/env".split():
            refused(path, lambda: open(path, "a").close())
        refused("home", lambda: os.mkdir("/root"))
        """,
    ),
    _attack(
        "reading a file of this machine",
        """
        refused("outside", lambda: open(OUTSIDE).read())
        refused("through proc", lambda: open("/proc/1/root" + OUTSIDE).read())
        refused("through cwd", lambda: open("/proc/1/cwd/.." + OUTSIDE).read())
        """,
    ),
    _attack(
        "reading /etc/shadow and keys",
        """
        for path in "/etc/shadow /etc/sudoers /root/.ssh /root/.bashrc /etc/ssl/private /home /var/log /run".split():
            refused(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
        print("HELD" if "root:x:0:0::/" in open("/etc/passwd").read() else "BROKE passwd")
        """,
    ),
    _attack(
        "reading other workspaces",
        """
        found = []
        for base, directories, files in os.walk("/"):
            directories[:] = [d for d in directories if os.path.join(base, d) not in ("/proc", "/usr", "/dev")]
            for name in files:
                try: text = open(os.path.join(base, name), errors="replace").read(100_000)
                except OSError: continue
                if SECRET in text: found.append(os.path.join(base, name))
        print("BROKE" if found else "HELD", found)
        """,
    ),
    _attack(
        "links out of the workspace",
        """
        for target in (OUTSIDE, "/etc/shadow", "/proc/1/environ", "../../etc/shadow"):
            os.symlink(target, f"link{len(os.listdir('.'))}")
        refused("hard link", lambda: os.link("/usr/bin/env", "env"))
        for name in os.listdir("."):
            if name.startswith("link"): refused(name, lambda: HELD if SECRET not in open(name).read() else name)
        """,
    ),
    _attack(
        "a link and a named pipe where a file is expected",
        """
        os.symlink("/etc/passwd", "answer.txt")
        os.mkfifo("pipe.txt")
        os.symlink("/", "up")
        print("HELD")
        """,
    ),
    _attack(
        "device nodes",
        """
        import stat
        refused("block", lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
        refused("memory", lambda: os.mknod("mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
        for path in ("/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/nvidia0", "/dev/kvm", "/dev/fuse"):
            refused(path, lambda: open(path, "rb").read(1))
        """,
    ),
    _attack(
        "becoming root through a set-uid program",
        """
        os.environ["PATH"] = "/usr/bin:/usr/sbin"
        refused("setuid", lambda: os.setuid(0))
        refused("setgroups", lambda: os.setgroups([0]))
        import shutil
        shutil.copy("/usr/bin/env", "env")
        os.chmod("env", 0o6755)
        for argv in (["su", "-c", "id -u"], ["sudo", "-n", "id", "-u"], ["mount"]):
            try: said = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
            except OSError: said = ""
            print("BROKE" if said.strip() == "0" else "HELD", argv)
        print("HELD" if "NoNewPrivs:\\t1" in open("/proc/self/status").read() else "BROKE")
        """,
    ),
    _attack(
        "secrets of the environment",
        """
        found = [name for name, value in os.environ.items() if SECRET in value]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try: found += [pid] if SECRET in open(f"/proc/{pid}/environ").read() else []
            except OSError: pass
        print("BROKE" if found or "RLX_ATTACK_SECRET" in os.environ else "HELD", found)
        """,
    ),
    _attack(
        "command lines of this machine's processes",
        """
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
        print("HELD" if len(pids) <= 3 else "BROKE", pids)
        """,
    ),
    _attack(
        "files that this process has open",
        """
        opened = []
        for file in range(3, 1024):
            try: opened.append(os.readlink(f"/proc/self/fd/{file}"))
            except OSError: pass
        print("HELD" if opened in ([], ["/workspace/attack.py"]) else "BROKE", opened)
        """,
    ),
)

KERNEL = (
    _attack(
        "mounting",
        """
        refused("tmpfs", lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, 0))
        refused("bind", lambda: call(165, b"/", b"/tmp", b"", 4096, 0))
        refused("remount", lambda: call(165, b"none", b"/usr", b"", 32 | 4096, 0))
        refused("umount", lambda: call(166, b"/etc/passwd", 2))
        refused("pivot_root", lambda: call(155, b"/tmp", b"/tmp"))
        """,
    ),
    _attack(
        "namespaces of its own",
        """
        refused("unshare user", lambda: call(272, 0x10000000))
        refused("unshare user and mount", lambda: call(272, 0x10000000 | 0x20000))
        refused("clone", lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0))
        refused("setns", lambda: call(308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))
        """,
    ),
    _attack(
        "leaving by chroot",
        """
        refused("chroot", lambda: os.chroot("/tmp"))
        refused("file handle", lambda: call(304, 3, ctypes.create_string_buffer(128), 0))
        """,
    ),
    _attack(
        "writes to /proc and /sys",
        """
        for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
                     "/proc/kcore", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/cgroup.procs"):
            refused(path, lambda: open(path, "w").write("1"))
        for pid in ("self", "1"): refused(pid, lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("-1000"))
        """,
    ),
    _attack(
        "control groups",
        """
        mounted = [line for line in open("/proc/mounts") if "cgroup" in line]
        print("BROKE" if mounted else "HELD", mounted)
        refused("mount", lambda: call(165, b"none", b"/tmp", b"cgroup2", 0, 0))
        """,
    ),
    _attack(
        "calls that have broken kernels",
        """
        for number in (321, 323, 425, 298, 250, 248, 246, 175, 167, 169):
            # bpf userfaultfd io_uring_setup perf_event_open keyctl add_key kexec_load init_module swapon reboot
            refused(number, lambda: call(number, 0, 0, 0, 0, 0))
        """,
    ),
    _attack(
        "system calls of the other kind",
        """
        refused("x32", lambda: call(0x40000000 | 101, 16, 1, 0, 0))
        """,
    ),
    _attack(
        "the terminal of this process",
        """
        import fcntl, termios
        refused("tty", lambda: open("/dev/tty", "w"))
        refused("push", lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"))
        """,
    ),
    _attack("the clock", "refused('set', lambda: time.clock_settime(time.CLOCK_REALTIME, 0))"),
    _attack("the host's name", "refused('hostname', lambda: socket.sethostname('owned'))"),
)

NETWORK = (
    _attack(
        "connections to this machine and others",
        """
        def reach(family, address):
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(1)
                connection.connect(address)
        refused("this machine", lambda: reach(socket.AF_INET, ("127.0.0.1", PORT)))
        refused("another", lambda: reach(socket.AF_INET, ("1.1.1.1", 53)))
        refused("metadata", lambda: reach(socket.AF_INET, ("169.254.169.254", 80)))
        refused("names", lambda: socket.getaddrinfo("example.org", 80))
        refused("abstract", lambda: reach(socket.AF_UNIX, "\\0" + ABSTRACT))
        """,
    ),
    _attack(
        "raw sockets and packets",
        """
        refused("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
        refused("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
        def interfaces():
            names = [name for _, name in socket.if_nameindex()]
            return HELD if names == ["lo"] else names
        refused("interfaces", interfaces)
        """,
    ),
)

ATTACKS = (*PROCESSES, *SIGNALS, *MEMORY_AND_DISK, *FILES, *KERNEL, *NETWORK)
