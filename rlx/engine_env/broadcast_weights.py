"""The trainer's rank of a torch process group: broadcasts stretches of files to one engine's ranks.

    .venv-sglang/bin/python rlx/engine_env/broadcast_weights.py

A script for the engines' environment, started by `rlx.sync.distributed`. It reads a command a line from its standard
input, in JSON, and answers with a line each: {"ok": true} or {"ok": false, "error": ...}. It ends with its input.

    {"op": "join", "group": NAME, "backend": "gloo" | "nccl", "address": HOST, "port": PORT, "world": RANKS,
     "seconds": SECONDS}
    {"op": "send", "path": FILE, "offset": BYTES, "count": BYTES}
    {"op": "leave"}
"""

import datetime
import json
import mmap
import os
import sys

import torch
from torch.distributed import Backend, PrefixStore, broadcast, destroy_process_group, rendezvous
from torch.distributed.distributed_c10d import _new_process_group_helper, _world


def join(group, backend, address, port, world, seconds):
    """Rank 0 of a group that torch's default group has no part in, under the names that SGLang's ranks look for."""
    timeout = datetime.timedelta(seconds=seconds)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", 0, world, timeout=timeout))
    store.set_timeout(timeout)
    prefixed = PrefixStore(group, store)
    options = {"group_name": group, "backend_options": None, "timeout": timeout}
    made, _ = _new_process_group_helper(size, rank, [], Backend(backend), prefixed, **options)
    _world.pg_group_ranks[made] = {i: i for i in range(size)}
    return made, torch.device("cuda" if backend == "nccl" else "cpu")


def send(group, device, path, offset, count):
    """Every byte of the stretch to every rank, as one tensor of bytes."""
    with open(path, "rb") as file:
        # A private mapping: torch wants memory that it could write to, and writes nothing.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    stretch = torch.frombuffer(mapped, dtype=torch.uint8, offset=offset, count=count)
    broadcast(stretch.to(device), src=0, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    group = device = None
    for line in sys.stdin:
        command = json.loads(line)
        operation = command.pop("op")
        try:
            if operation == "join":
                group, device = join(**command)
            elif operation == "send":
                send(group, device, **command)
            elif operation == "leave":
                destroy_process_group(group)
            else:
                raise ValueError(f"no operation {operation!r}")
            answer: dict[str, object] = {"ok": True}
        except Exception as error:
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
