"""Programs that attack with processes and signals."""

from __future__ import annotations

from tests.sandbox.attack import FOREVER, MANY, REFUSED, attack

PROCESSES = (
    attack(
        "fork bomb",
        """
        while True:
            try:
                os.fork()
            except OSError:
                pass
        """,
        MANY,
    ),
    attack(
        "fork bomb of the shell",
        "os.execv('/bin/sh', ['sh', '-c', 'f() { f | f & f; }; f'])",
        MANY | REFUSED,
        held=False,
    ),
    attack(
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
        MANY,
    ),
    attack(
        "vfork and exec for ever",
        """
        while True:
            try: subprocess.Popen(["sleep", "60"])
            except OSError: pass
        """,
        FOREVER,
    ),
    attack(
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
    attack("sleeping past the limit", "time.sleep(600)", FOREVER),
    attack(
        "ignoring every signal",
        """
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
        """,
        FOREVER,
    ),
    attack(
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
    attack(
        "a daemon that keeps the output open",
        """
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True: time.sleep(1)
        print("HELD")
        """,
    ),
    attack(
        "a child that has stopped itself",
        """
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.1)
        print("HELD")
        """,
    ),
    attack("stopping itself", "os.kill(os.getpid(), signal.SIGSTOP)", FOREVER),
    attack(
        "closing the output and going on",
        """
        for file in (0, 1, 2): os.close(file)
        os.setsid() if os.fork() == 0 else None
        while True: time.sleep(1)
        """,
        FOREVER,
    ),
    attack(
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
    attack(
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
    attack(
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
    attack(
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
    attack(
        "ptrace of the first process",
        """
        refused("attach", lambda: call(101, 16, 1, 0, 0))
        refused("seize", lambda: call(101, 0x4206, 1, 0, 0))
        """,
    ),
    attack(
        "reading the memory of the first process",
        """
        refused("mem", lambda: open("/proc/1/mem", "r+b").seek(4096) and open("/proc/1/mem", "rb").read(1))
        refused("process_vm_readv", lambda: call(310, 1, 0, 0, 0, 0, 0))
        """,
    ),
    attack(
        "renicing and scheduling in real time",
        """
        refused("nice", lambda: os.nice(-10))
        refused("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
        """,
    ),
    attack(
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
