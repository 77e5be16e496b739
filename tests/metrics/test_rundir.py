import signal
import subprocess
import sys

import pytest

from rlx.metrics.jsonl import read_jsonl
from rlx.metrics.rundir import Records, Rewound, RunDirectoryError, open_run


def used_run(path, checkpoints=()):
    with open_run(path, "auto") as run:
        for update in range(4):
            run.metrics.append({"update": update})
        run.samples.append({"update": 3, "text": "a"})
        for name in checkpoints:
            (run.checkpoints / name).mkdir()


def test_a_fresh_directory_is_made(tmp_path):
    with open_run(tmp_path / "runs" / "a", "never") as run:
        assert run.latest_checkpoint is None
        assert run.checkpoints.is_dir()
        assert run.config.parent == run.path


def test_never_refuses_a_used_directory(tmp_path):
    used_run(tmp_path)
    with pytest.raises(RunDirectoryError, match=r"'never' but .* is in use \(it has metrics"):
        open_run(tmp_path, "never")
    open_run(tmp_path, "auto").close()


def test_never_takes_an_empty_directory_twice_locked(tmp_path):
    with pytest.raises(RunDirectoryError, match="'must'"):
        open_run(tmp_path, "must")
    open_run(tmp_path, "never").close()


def test_never_takes_a_directory_in_which_nothing_was_written(tmp_path):
    open_run(tmp_path, "never").close()
    assert {entry.name for entry in tmp_path.iterdir()} > {"checkpoints", "metrics.jsonl"}
    open_run(tmp_path, "never").close()
    (tmp_path / "checkpoints" / "0").mkdir()
    with pytest.raises(RunDirectoryError, match=r"it has checkpoints"):
        open_run(tmp_path, "never")


def test_must_needs_a_complete_checkpoint(tmp_path):
    used_run(tmp_path, ["2.orbax-checkpoint-tmp-1"])
    with pytest.raises(RunDirectoryError, match=r"'must' but .*checkpoints has no checkpoint"):
        open_run(tmp_path, "must")
    (tmp_path / "checkpoints" / "2").mkdir()
    (tmp_path / "checkpoints" / "10").mkdir()
    with open_run(tmp_path, "must") as run:
        assert run.latest_checkpoint == 10


def test_rewind_drops_later_records_and_counts_torn_lines(tmp_path):
    used_run(tmp_path, ["2"])
    with (tmp_path / "samples.jsonl").open("ab") as file:
        file.write(b'{"update": 3, "te')
    with open_run(tmp_path, "auto") as run:
        assert run.records == Records(metrics=4, samples=1)
        assert run.rewind(Records(3, 0)) == Rewound(metrics=1, samples=1, torn=1)
        run.metrics.append({"update": 3})
        run.sync()
    assert [r["update"] for r in read_jsonl(tmp_path / "metrics.jsonl")[0]] == [0, 1, 2, 3]
    assert read_jsonl(tmp_path / "samples.jsonl") == ([], 0)


def test_rewind_drops_nothing_where_records_are_missing(tmp_path):
    used_run(tmp_path)
    with open_run(tmp_path, "auto") as run:
        with pytest.raises(ValueError, match=r"samples\.jsonl has 1 records, it had 2: something else cut it"):
            run.rewind(Records(0, 2))
        assert run.records == Records(4, 1)


def test_a_damaged_directory_gives_the_lock_up(tmp_path):
    used_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(b"{\n{}\n")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:1"):
            open_run(tmp_path, "auto")


WRITER = """
import sys, time
from pathlib import Path
from rlx.metrics.rundir import open_run
run = open_run(Path(sys.argv[1]), "auto")
run.metrics.append({"update": 0})
run.metrics._file.write(b'{"update": 1')
run.metrics._file.flush()
print("ready", flush=True)
time.sleep(60)
"""


def test_two_processes_cannot_write_one_run_and_a_killed_one_frees_it(tmp_path):
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            with pytest.raises(RunDirectoryError, match=f"is being written by process {other.pid} on "):
                open_run(tmp_path, "auto")
        finally:
            other.send_signal(signal.SIGKILL)
    with open_run(tmp_path, "auto") as run:
        assert run.metrics.torn == 1
        with pytest.raises(RunDirectoryError, match="is being written"):
            open_run(tmp_path, "auto")
    assert read_jsonl(tmp_path / "metrics.jsonl") == ([{"update": 0}], 0)
