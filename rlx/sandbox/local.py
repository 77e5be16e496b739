"""Sandboxes on this machine: a directory for each, programs isolated by bubblewrap or, if so chosen, hardly at all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from rlx.config.sandbox import SandboxConfig, SandboxLimits
from rlx.sandbox import cgroups, files, isolation, processes, seccomp
from rlx.sandbox.base import Execution, Limit, SandboxError, check_command
from rlx.sandbox.running import Tree, execute
from rlx.sandbox.storage import Root

_ETC, _FILTER = "etc", "filter"  # beside the workspaces


_Handles = list[int]  # where bubblewrap says what it has started; the filter of system calls, where there is one


class _Shared(NamedTuple):
    """What the sandboxes of a provider have in common."""

    kind: Literal["bubblewrap", "subprocess"]
    root: Root
    groups: cgroups.Hierarchies
    filtered: bool
    read_only: tuple[str, ...]


class LocalSandboxes:
    """The provider of kinds "bubblewrap" and "subprocess"."""

    def __init__(self, config: SandboxConfig):
        if config.kind == "daytona":
            raise ValueError("sandbox.kind = 'daytona' is not a sandbox of this machine: rlx.sandbox.daytona has those")
        self._config, self._kind = config, config.kind
        self._groups = cgroups.find()
        isolated, grouped = config.kind == "bubblewrap", bool(self._groups.version)
        self._filter = seccomp.program(grouped=grouped) if isolated else None
        self._shared: _Shared | None = None
        self._slots = list(range(config.max_open + 1))  # one for the probe
        self._made = 0

    async def start(self) -> None:
        missing = isolation.missing_tools(self._kind)
        if missing:
            raise SandboxError(
                f"sandboxes of kind {self._kind!r} need {', '.join(missing)}, not found on PATH. To install them: "
                "sudo apt-get install bubblewrap util-linux, or `make system-deps`. Without any isolation: "
                "sandbox.kind = 'subprocess'."
            )
        root = await asyncio.to_thread(Root, self._config.directory, self._groups, own_users=_own_users(self._kind))
        self._shared = _Shared(self._kind, root, self._groups, self._filter is not None, self._config.read_only)
        try:
            if self._kind == "bubblewrap":
                processes.adopt_orphans(True)
                await asyncio.to_thread(isolation.write_etc, root.path / _ETC)
                (root.path / _FILTER).write_bytes(self._filter or b"")
            await self._probe()
        except BaseException:
            await self.close()
            raise

    async def open(self, limits: SandboxLimits) -> LocalSandbox:
        if self._shared is None:
            raise SandboxError("sandboxes were not started")
        if not self._slots:
            raise SandboxError(f"more than sandbox.max_open = {self._config.max_open} sandboxes are open")
        slot, self._made = self._slots.pop(), self._made + 1
        sandbox = LocalSandbox(self._shared, f"{self._made:06d}", limits, slot, lambda: self._slots.append(slot))
        making = asyncio.ensure_future(asyncio.to_thread(sandbox.make))
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await asyncio.wait((making,))
            await sandbox.close()
            raise
        return sandbox

    async def close(self) -> None:
        if self._shared is not None:
            await asyncio.to_thread(self._shared.root.close)
            self._shared = None
            if self._kind == "bubblewrap":
                processes.adopt_orphans(False)

    def describe(self) -> dict[str, str]:
        return isolation.describe(
            self._kind,
            self._groups,
            in_memory=bool(self._shared and self._shared.root.in_memory),
            filtered=self._filter is not None,
        )

    async def _probe(self) -> None:
        sandbox = await self.open(self._config.limits)
        try:
            said = await sandbox.run(["python3", "-I", "-S", "-c", "print('ready')"])
        finally:
            await sandbox.close()
        if said.stdout != b"ready\n":
            words = said.stderr.decode(errors="replace").strip()[-500:]
            raise SandboxError(
                f"a sandbox of kind {self._kind!r} could not run python3 (exit code {said.exit_code}, {words!r}). "
                "docs/sandboxes.md says what the system must allow: user namespaces for users, and in a container a "
                "seccomp profile and a /proc that permit them. python3 must be below /usr or sandbox.read_only."
            )


def _own_users(kind: Literal["bubblewrap", "subprocess"]) -> bool:
    """Whether each sandbox has a user: only root can make a process another's."""
    return kind == "bubblewrap" and os.geteuid() == 0


class LocalSandbox:
    """See `rlx.sandbox.base.Sandbox`."""

    def __init__(self, shared: _Shared, name: str, limits: SandboxLimits, slot: int, release: Callable[[], None]):
        self.limits = limits
        self.workspace = ""  # its path on this machine
        self.user = isolation.user_of(slot) if _own_users(shared.kind) else None
        self.group: cgroups.Cgroup | None = None
        self._shared, self._release = shared, release
        self._name = name
        self._open = False
        self._commands: set[asyncio.Task[Execution]] = set()  # that run
        self._closing: asyncio.Task[None] | None = None

    def make(self) -> None:
        """Raises: SandboxError."""
        root, groups = self._shared.root, self._shared.groups
        self._open = True
        try:
            self.workspace = root.make(self._name, self.user, self.limits)
            if groups.version:
                self.group = cgroups.Cgroup(groups, f"{root.path.name}-{self._name}", self.limits)
        except OSError as error:
            self._open = False
            self._remove()
            raise SandboxError(f"a sandbox could not be made: {error}") from error

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Execution:
        self._check_open()
        check_command(command, env or {})
        running = asyncio.create_task(self._run(command, stdin, timeout_s, env))
        self._commands.add(running)
        running.add_done_callback(self._commands.discard)
        return await running

    async def _run(
        self, command: Sequence[str], stdin: bytes, timeout_s: float | None, env: Mapping[str, str] | None
    ) -> Execution:
        isolated = self._shared.kind == "bubblewrap"
        own = {**isolation.ENVIRONMENT, "HOME": self.workspace, "TMPDIR": "/tmp", **(env or {})}
        with self._handles() as handles:
            execution = await execute(
                [*self._launcher(env or {}, handles), *command],
                stdin=stdin,
                env=isolation.ENVIRONMENT if isolated else own,  # bubblewrap sets the program's
                cwd="/" if isolated else self.workspace,
                wall_s=min(self.limits.wall_s, self.limits.wall_s if timeout_s is None else timeout_s),
                limits=self.limits,
                tree=self._tree(handles),
                pass_fds=tuple(handles),
            )
            if handles and execution.stopped_by is None and processes.first_process(handles[0]) is None:
                words = execution.stderr.decode(errors="replace").strip()[-300:]
                raise SandboxError(f"a sandbox did not start (exit code {execution.exit_code}): {words}")
            return execution

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        await asyncio.to_thread(files.write, self.workspace, path, data, self.user)

    async def read(self, path: str) -> bytes:
        self._check_open()
        return await asyncio.to_thread(files.read, self.workspace, path, self.limits.file_bytes)

    async def list(self) -> list[str]:
        self._check_open()
        entries = await asyncio.to_thread(files.entries, self.workspace, self.limits)
        return [entry.path for entry in entries if entry.kind == "file"]

    async def snapshot(self) -> bytes:
        self._check_open()
        return await asyncio.to_thread(files.pack, self.workspace, self.limits)

    async def restore(self, snapshot: bytes) -> None:
        self._check_open()
        await asyncio.to_thread(self._replace, snapshot)

    async def close(self) -> None:
        if self._open:
            self._open = False
            self._closing = asyncio.create_task(self._close())
        if self._closing is not None:
            await asyncio.shield(self._closing)  # goes on where whoever waits for it is cancelled

    async def _close(self) -> None:
        """Commands end first: what they clear up themselves must still be there."""
        for command in self._commands:
            if not command.cancelling():
                command.cancel()
        if self._commands:
            await asyncio.wait(self._commands)
        await asyncio.to_thread(self._remove)

    def _check_open(self) -> None:
        if not self._open:
            raise SandboxError("the sandbox is closed")

    def _replace(self, snapshot: bytes) -> None:
        for name in os.listdir(self.workspace):
            files.remove(os.path.join(self.workspace, name))
        files.unpack(self.workspace, snapshot, self.user)

    def _remove(self) -> None:
        """Also gives its number back, unless something of it is left: another's programs would be of the same user.

        Raises: SandboxError.
        """
        with contextlib.ExitStack() as steps:
            if self.workspace:
                steps.callback(self._shared.root.remove, self.workspace)
            if self.group is not None:
                steps.callback(self.group.remove)
                steps.callback(self.group.kill)
            try:
                steps.close()
            except (OSError, subprocess.CalledProcessError) as error:
                raise SandboxError(f"a sandbox could not be removed: {error}") from error
        processes.reap_adopted()
        self._release()

    @contextlib.contextmanager
    def _handles(self) -> Iterator[_Handles]:
        """Open while a command runs; none for one that is not isolated."""
        opened = []
        if self._shared.kind == "bubblewrap":
            opened.append(os.memfd_create("info", os.MFD_CLOEXEC))
            if self._shared.filtered:
                opened.append(os.open(self._shared.root.path / _FILTER, os.O_RDONLY | os.O_CLOEXEC))
        try:
            yield opened
        finally:
            for file in opened:
                os.close(file)

    def _launcher(self, env: Mapping[str, str], handles: _Handles) -> list[str]:
        isolated = self._shared.kind == "bubblewrap"
        argv = isolation.become(self.user, self.group.joins if self.group else ())
        if isolated:
            etc = str(self._shared.root.path / _ETC)
            argv += isolation.namespaces(self.workspace, self.limits, env, self._shared.read_only, etc)
            argv += isolation.handles(*handles)
        return argv + isolation.limited(self.limits, grouped=self.group is not None, of_user=isolated)

    def _tree(self, handles: _Handles) -> Tree:
        group, limits, in_memory = self.group, self.limits, self._shared.root.in_memory
        before = group.cpu_seconds() if group else None

        def first() -> int | None:
            return processes.first_process(handles[0]) if handles else None

        def kill(leader: int, has_ended: bool) -> None:
            if (process := first()) is not None:
                processes.kill(process, leader)  # the kernel ends its namespace with it, whatever is in there
            if not (
                handles and has_ended
            ):  # bubblewrap is alone in its group, and nobody must get its number's signals
                processes.kill_group(leader)
            if group:
                group.kill()

        def over() -> Limit | None:
            now = group.cpu_seconds() if group else None
            if now is not None and before is not None and now - before > limits.cpu_s:
                return Limit.CPU
            return None if in_memory else files.over_limit(self.workspace, limits, deleted())

        def deleted() -> int:
            process = first()
            return 0 if process is None else processes.deleted_bytes(process, os.stat(self.workspace).st_dev)

        def ended() -> Limit | None:
            if group and group.out_of_memory():
                return Limit.MEMORY
            return None if in_memory else files.over_limit(self.workspace, limits)

        def settled() -> bool:
            process = first()
            return (process is None or processes.bury(process)) and not (group and group.processes())

        return Tree(kill, over, ended, settled)
