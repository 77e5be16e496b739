"""Programs that want files, the kernel's favours and the network."""

from __future__ import annotations

from tests.sandbox.attack import attack

FILES = (
    attack(
        "writes outside",
        """
        for path in "/usr/bin/x /etc/x /x /bin/x /lib/x /dev/x /proc/x /workspace/../x /usr/bin/env".split():
            refused(path, lambda: open(path, "a").close())
        refused("home", lambda: os.mkdir("/root"))
        """,
    ),
    attack(
        "reading a file of this machine",
        """
        refused("outside", lambda: open(OUTSIDE).read())
        refused("through proc", lambda: open("/proc/1/root" + OUTSIDE).read())
        refused("through cwd", lambda: open("/proc/1/cwd/.." + OUTSIDE).read())
        """,
    ),
    attack(
        "reading /etc/shadow and keys",
        """
        for path in "/etc/shadow /etc/sudoers /root/.ssh /root/.bashrc /etc/ssl/private /home /var/log /run".split():
            refused(path, lambda: os.listdir(path) if os.path.isdir(path) else open(path).read())
        print("HELD" if "root:x:0:0::/" in open("/etc/passwd").read() else "BROKE passwd")
        """,
    ),
    attack(
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
    attack(
        "links out of the workspace",
        """
        for target in (OUTSIDE, "/etc/shadow", "/proc/1/environ", "../../etc/shadow"):
            os.symlink(target, f"link{len(os.listdir('.'))}")
        refused("hard link", lambda: os.link("/usr/bin/env", "env"))
        for name in os.listdir("."):
            if name.startswith("link"): refused(name, lambda: HELD if SECRET not in open(name).read() else name)
        """,
    ),
    attack(
        "a link and a named pipe where a file is expected",
        """
        os.symlink("/etc/passwd", "answer.txt")
        os.mkfifo("pipe.txt")
        os.symlink("/", "up")
        print("HELD")
        """,
    ),
    attack(
        "device nodes",
        """
        import stat
        refused("block", lambda: os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(8, 0)))
        refused("memory", lambda: os.mknod("mem", 0o600 | stat.S_IFCHR, os.makedev(1, 1)))
        for path in ("/dev/sda", "/dev/vda", "/dev/mem", "/dev/kmsg", "/dev/nvidia0", "/dev/kvm", "/dev/fuse"):
            refused(path, lambda: open(path, "rb").read(1))
        """,
    ),
    attack(
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
    attack(
        "secrets of the environment",
        """
        found = [name for name, value in os.environ.items() if SECRET in value]
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try: found += [pid] if SECRET in open(f"/proc/{pid}/environ").read() else []
            except OSError: pass
        print("BROKE" if found or "RLX_ATTACK_SECRET" in os.environ else "HELD", found)
        """,
    ),
    attack(
        "command lines of this machine's processes",
        """
        pids = [pid for pid in os.listdir("/proc") if pid.isdigit()]
        print("HELD" if len(pids) <= 3 else "BROKE", pids)
        """,
    ),
    attack(
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
    attack(
        "mounting",
        """
        refused("tmpfs", lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, 0))
        refused("bind", lambda: call(165, b"/", b"/tmp", b"", 4096, 0))
        refused("remount", lambda: call(165, b"none", b"/usr", b"", 32 | 4096, 0))
        refused("umount", lambda: call(166, b"/etc/passwd", 2))
        refused("pivot_root", lambda: call(155, b"/tmp", b"/tmp"))
        """,
    ),
    attack(
        "namespaces of its own",
        """
        refused("unshare user", lambda: call(272, 0x10000000))
        refused("unshare user and mount", lambda: call(272, 0x10000000 | 0x20000))
        refused("clone", lambda: call(56, 0x10000000 | 17, 0, 0, 0, 0))
        refused("setns", lambda: call(308, os.open("/proc/1/ns/mnt", os.O_RDONLY), 0))
        """,
    ),
    attack(
        "leaving by chroot",
        """
        refused("chroot", lambda: os.chroot("/tmp"))
        refused("file handle", lambda: call(304, 3, ctypes.create_string_buffer(128), 0))
        """,
    ),
    attack(
        "writes to /proc and /sys",
        """
        for path in ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
                     "/proc/kcore", "/sys/kernel/uevent_helper", "/sys/fs/cgroup/memory/cgroup.procs"):
            refused(path, lambda: open(path, "w").write("1"))
        for pid in ("self", "1"): refused(pid, lambda: open(f"/proc/{pid}/oom_score_adj", "w").write("-1000"))
        """,
    ),
    attack(
        "control groups",
        """
        mounted = [line for line in open("/proc/mounts") if "cgroup" in line]
        print("BROKE" if mounted else "HELD", mounted)
        refused("mount", lambda: call(165, b"none", b"/tmp", b"cgroup2", 0, 0))
        """,
    ),
    attack(
        "calls that have broken kernels",
        """
        for number in (321, 323, 425, 298, 250, 248, 246, 175, 167, 169):
            # bpf userfaultfd io_uring_setup perf_event_open keyctl add_key kexec_load init_module swapon reboot
            refused(number, lambda: call(number, 0, 0, 0, 0, 0))
        """,
    ),
    attack(
        "system calls of the other kind",
        """
        refused("x32", lambda: call(0x40000000 | 101, 16, 1, 0, 0))
        """,
    ),
    attack(
        "the terminal of this process",
        """
        import fcntl, termios
        refused("tty", lambda: open("/dev/tty", "w"))
        refused("push", lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"))
        """,
    ),
    attack("the clock", "refused('set', lambda: time.clock_settime(time.CLOCK_REALTIME, 0))"),
    attack("the host's name", "refused('hostname', lambda: socket.sethostname('owned'))"),
)

NETWORK = (
    attack(
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
    attack(
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
