"""TensorBoard on a run, or on every run of a directory.

    rlx tensorboard runs/quickstart
    rlx tensorboard runs --port 6007

Prints the address once it answers; Ctrl-C ends it. It sees new records as they are written, and new runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import signal
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tensorboard import default, program

from rlx import cli
from rlx.metrics.tensorboard import flatten, write_sweep
from rlx.metrics.view import NotARun, read_run, runs_below

EVERY_SECONDS = 5.0  # between two looks for new runs
DASHBOARD = "#custom_scalars"
PARTS = {"supervised": "sft", "watch": "watch"}  # folders of a run with events of their own, and what they are called


class BoardError(RuntimeError):
    """TensorBoard could not be started."""


def event_folders(path: Path) -> dict[str, Path]:
    """Name -> directory of events, of a run or of the runs in a directory.

    Raises:
      NotARun: where there are none; says what there is.
    """
    runs = runs_below(path) or [read_run(path).path]
    found = {_name(run): run / "events" for run in runs}
    found |= {_name(run / part): run / part / "events" for run in runs for part in PARTS}
    return {name: folder for name, folder in found.items() if folder.is_dir()}


def _name(run: Path) -> str:
    run = run.resolve()
    return f"{run.parent.name}-{PARTS[run.name]}" if run.name in PARTS else run.name


def link(folders: dict[str, Path], into: Path) -> None:
    """Makes each folder visible as into/NAME, so that TensorBoard calls a run by its name."""
    for name, folder in folders.items():
        if not (into / name).is_symlink():
            (into / name).symlink_to(folder.resolve(), target_is_directory=True)


def describe_sweep(path: Path, into: Path) -> None:
    """Several runs of one directory are shown by the settings that they differ in."""
    runs = runs_below(path)
    if len(runs) > 1:
        write_sweep(into, [flatten(read_run(run).config) for run in runs])


def launch(logdir: Path, port: int, host: str = "127.0.0.1") -> str:
    """Serves `logdir` from a thread of this process and returns the address, which answers.

    Raises:
      BoardError: the port is taken, or the server does not answer.
    """
    # The data server in Rust would end with a process group of its own; the one in Python ends with this process.
    arguments = ["", f"--logdir={logdir}", f"--port={port}", f"--host={host}", "--load_fast=false"]
    arguments += ["--reload_interval=5", "--samples_per_plugin=text=100,histograms=200"]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    board = program.TensorBoard(default.get_plugins())
    with contextlib.redirect_stderr(io.StringIO()) as said:
        board.configure(argv=arguments)
    try:
        url = board.launch()
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = answer.read()
    except (program.TensorBoardServerException, OSError) as error:
        raise BoardError(
            f"TensorBoard cannot serve on {host}:{port} ({error}); give another --port, or 0 for any free one"
        ) from error
    if b"TensorBoard" not in body:
        raise BoardError(f"{url} answers, but it is no TensorBoard: {said.getvalue()[-300:]}")
    return url


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set."""
    stopped = threading.Event()
    previous = {kind: signal.signal(kind, lambda *_: stopped.set()) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)


def serve(path: Path, port: int, host: str) -> None:
    """Serves until a signal. Raises what `event_folders` and `launch` do."""
    folders = event_folders(path)
    if not folders:
        raise NotARun(f"{path} has no TensorBoard events: it was made with metrics.tensorboard = False, or just began")
    with stop_signals() as stopped, tempfile.TemporaryDirectory(prefix="rlx-tensorboard-") as logdir:
        link(folders, Path(logdir))
        describe_sweep(path, Path(logdir))
        url = launch(Path(logdir), port, host)
        print(f"TensorBoard of {', '.join(sorted(folders))}: {url}{DASHBOARD}   (Ctrl-C ends it)", flush=True)
        while not stopped.wait(EVERY_SECONDS):
            link(event_folders(path), Path(logdir))
    print("TensorBoard has ended.")


def main(argv: list[str] | None = None) -> int:
    """`rlx tensorboard`: 0 when it was ended by a signal, 1 where there is nothing to show or the port is taken."""
    parser = argparse.ArgumentParser(
        prog="rlx tensorboard", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's directory, or a directory of runs")
    parser.add_argument("--port", type=int, default=6006, help="0 = any free one (6006)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 = every interface (127.0.0.1)")
    arguments = parser.parse_args(argv)
    serve(arguments.run, arguments.port, arguments.host)
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("tensorboard", sys.argv[1:]))
