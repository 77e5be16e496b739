"""The ledger's file, which is written beside the loop: in order, whole by the next `sync`, never lost in silence."""

import pytest

from rlx.metrics.jsonl import read_json
from rlx.metrics.rundir import Records, open_run
from rlx.recorder import Recorder
from tests import tiny_run


@pytest.fixture
def config(tmp_path):
    return tiny_run.config(tiny_run.write(tmp_path))


def test_the_newest_ledger_is_on_the_disk_after_a_sync_and_at_the_end(config):
    with open_run(config.run.path, "auto") as run, Recorder(config, run, -1, Records(0, 0)) as recorder:
        for update in range(20):
            recorder.ledger({"update": update})
        recorder.sync()
        assert read_json(run.ledger) == {"update": 19}
        recorder.ledger({"update": 20})
    assert read_json(run.ledger) == {"update": 20}


def fail(config, then):
    with open_run(config.run.path, "auto") as run, Recorder(config, run, -1, Records(0, 0)) as recorder:
        run.ledger.mkdir()
        recorder.ledger({})
        if then == "another":
            recorder.ledger({})
        if then == "sync":
            recorder.sync()


@pytest.mark.parametrize("then", ["another", "sync", "the end"])
def test_a_ledger_that_cannot_be_written_ends_the_run(config, then):
    with pytest.raises(OSError, match=r"ledger\.json"):
        fail(config, then)
