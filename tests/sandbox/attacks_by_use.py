"""Programs that use up memory, disk, output and CPU time."""

from __future__ import annotations

from rlx.sandbox.base import Limit
from tests.sandbox.attack import FOREVER, FULL, attack

MEMORY_AND_DISK = (
    attack(
        "memory hog",
        """
        def fill():
            hog = []
            while True: hog.append(bytearray(1 << 22))
        refused("memory", fill)
        """,
        FULL,
    ),
    attack(
        "memory hog of many processes",
        """
        for _ in range(8):
            if os.fork() == 0: break
        def fill():
            hog = []
            while True: hog.append(b"x" * (1 << 21))
        refused("memory", fill)
        """,
        FULL,
    ),
    attack(
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
        FULL,
    ),
    attack(
        "memory in files without names",
        """
        def fill():
            files = [os.memfd_create(str(i)) for i in range(64)]
            for file in files:
                for _ in range(4): os.write(file, b"x" * (1 << 20))
        refused("memfd", fill)
        """,
        FULL,
    ),
    attack(
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
        FULL,
    ),
    attack(
        "a huge file",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def fill():
            with open("huge", "wb") as file:
                for _ in range(4096): file.write(b"x" * (1 << 20))
        refused("file", fill)
        """,
        FULL,
    ),
    attack(
        "a sparse file",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        def hole():
            with open("holes", "wb") as file: os.ftruncate(file.fileno(), 1 << 40)
        refused("truncate", hole)
        refused("allocate", lambda: os.posix_fallocate(os.open("more", os.O_CREAT | os.O_WRONLY), 0, 1 << 34))
        """,
    ),
    attack(
        "many files that fill the disk",
        """
        def fill():
            for i in range(4096):
                with open(f"part{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("files", fill)
        """,
        FULL,
    ),
    attack(
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
        FULL,
    ),
    attack(
        "many small files",
        """
        def fill():
            for i in range(1_000_000): open(f"f{i}", "w").close()
        refused("inodes", fill)
        """,
        FULL,
    ),
    attack(
        "directories, deep",
        """
        def dig():
            for _ in range(1_000_000):
                os.mkdir("d")
                os.chdir("d")
        refused("depth", dig)
        """,
        FULL,
    ),
    attack(
        "filling /tmp",
        """
        def fill():
            for i in range(4096):
                with open(f"/tmp/{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("/tmp", fill)
        """,
        FULL,
    ),
    attack(
        "filling /dev/shm",
        """
        def fill():
            for i in range(4096):
                with open(f"/dev/shm/{i}", "wb") as file: file.write(b"x" * (1 << 20))
        refused("/dev/shm", fill)
        """,
        FULL,
    ),
    attack("endless output", "while True: os.write(1, b'x' * 65536)", frozenset({Limit.OUTPUT})),
    attack("endless errors", "while True: os.write(2, b'x' * 65536)", frozenset({Limit.OUTPUT})),
    attack(
        "output of many processes",
        """
        for _ in range(4): os.fork()
        while True: os.write(1, b"x" * 65536)
        """,
        frozenset({Limit.OUTPUT}),
    ),
    attack(
        "spinning on every core",
        """
        for _ in range(3): os.fork()
        while True: pass
        """,
        FOREVER,
    ),
    attack(
        "ignoring the signal of the CPU limit",
        """
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True: pass
        """,
        FOREVER,
    ),
)
