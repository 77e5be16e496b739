"""What runs inside a remote sandbox: `python3 remote_runner.py run|list|pack|unpack REQUEST`. It knows nothing of rlx.

Services run a command and return its output as one text, at whatever length; this gives what `Execution` has. The
request and the answer, which is printed, are JSON. A program shares the sandbox with it, and may spoil its own answer.

run      {"command", "stdin": a file or "", "env", "wall_s", "limits"} ->
         {"exit_code", "stdout": base64, "stderr": base64, "seconds", "stopped_by": name or null}
list     {} -> [path, ...]
pack     {"to": a file} -> {}
unpack   {"from": a file} -> {}
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import time

WORKSPACE = "/tmp/rlx/workspace"
_CHUNK = 65536


def run(request):
    limits, start = request["limits"], time.monotonic()
    with open(request["stdin"] or os.devnull, "rb") as stdin:
        process = subprocess.Popen(
            request["command"],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=WORKSPACE,
            env={**os.environ, "HOME": WORKSPACE, **request["env"]},
            start_new_session=True,
            preexec_fn=lambda: _limit(limits),
        )
    outputs, stopped_by = _collect(process, start + request["wall_s"], limits["output_bytes"])
    _kill(process)
    code = process.wait()
    if stopped_by is None and code == -signal.SIGXCPU:
        stopped_by = "cpu"
    said = dict(zip(("stdout", "stderr"), (base64.b64encode(data).decode() for data in outputs)))
    code = 128 - code if code < 0 else code
    return {**said, "exit_code": code, "seconds": time.monotonic() - start, "stopped_by": stopped_by}


def _limit(limits):
    cpu = max(1, round(limits["cpu_s"]))
    wanted = ((resource.RLIMIT_CPU, cpu, cpu + 1), (resource.RLIMIT_CORE, 0, 0))
    for what, soft, hard in (*wanted, (resource.RLIMIT_FSIZE, limits["file_bytes"], limits["file_bytes"])):
        resource.setrlimit(what, (soft, hard))


def _collect(process, end, limit):
    """([stdout, stderr], the limit that was passed)."""
    data = {process.stdout: bytearray(), process.stderr: bytearray()}
    with selectors.DefaultSelector() as waiting:
        for stream in data:
            waiting.register(stream, selectors.EVENT_READ)
        while (waiting.get_map() and process.poll() is None) or waiting.select(0):
            if time.monotonic() > end:
                return list(data.values()), "wall"
            for key, _ in waiting.select(0.05):
                chunk = os.read(key.fd, _CHUNK)
                left = limit - sum(map(len, data.values()))
                data[key.fileobj] += chunk[:left]
                if len(chunk) > left:
                    return list(data.values()), "output"
                if not chunk:
                    waiting.unregister(key.fileobj)
    while process.poll() is None:
        if time.monotonic() > end:
            return list(data.values()), "wall"
        time.sleep(0.01)
    return list(data.values()), None


def _kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _paths():
    """Everything in the workspace, without following links."""
    for base, directories, files in os.walk(WORKSPACE):
        for name in directories + files:
            yield os.path.relpath(os.path.join(base, name), WORKSPACE)


def list_files(request):
    full = ((path, os.path.join(WORKSPACE, path)) for path in _paths())
    return sorted(path for path, place in full if os.path.isfile(place) and not os.path.islink(place))


def pack(request):
    """As `rlx.sandbox.files.pack`: equal bytes for equal trees."""
    with tarfile.open(request["to"], "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(_paths()):
            place = os.path.join(WORKSPACE, path)
            info, data = tarfile.TarInfo(path), b""
            if os.path.islink(place):
                info.type, info.linkname = tarfile.SYMTYPE, os.readlink(place)
            elif os.path.isdir(place):
                info.type = tarfile.DIRTYPE
            elif os.path.isfile(place):
                with open(place, "rb") as file:
                    data = file.read()
            else:
                continue
            executable = not os.path.islink(place) and os.stat(place).st_mode & 0o100
            info.mode, info.size = 0o755 if executable else 0o644, len(data)
            tar.addfile(info, io.BytesIO(data))
    return {}


def unpack(request):
    shutil.rmtree(WORKSPACE)
    os.mkdir(WORKSPACE)
    with tarfile.open(request["from"]) as tar:
        if hasattr(tarfile, "tar_filter"):
            tar.extractall(WORKSPACE, filter="tar")
        else:
            tar.extractall(WORKSPACE)
    return {}


if __name__ == "__main__":
    os.makedirs(WORKSPACE, exist_ok=True)
    action = {"run": run, "list": list_files, "pack": pack, "unpack": unpack}[sys.argv[1]]
    print(json.dumps(action(json.loads(sys.argv[2]))))
