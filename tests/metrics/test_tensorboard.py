import re
import subprocess
import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.util import tensor_util

from rlx.metrics.names import METRICS
from rlx.metrics.tensorboard import OUTCOMES, TensorBoard, flatten, samples_table
from rlx.types import Sample, StopReason, Task

CONFIG = {"learner": {"learning_rate": 1e-4, "updates": 3}, "lora": {"targets": ("q_proj",)}, "on": True}


def read(directory) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"tensors": 0, "scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def read_as_the_server_does(directory) -> plugin_event_accumulator.EventAccumulator:
    accumulator = plugin_event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def scalars(accumulator, tag):
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def tensors(accumulator, tag):
    return [(e.step, tensor_util.make_ndarray(e.tensor_proto)) for e in accumulator.Tensors(tag)]


def hparams_content(accumulator, tag):
    return hparams_metadata._parse_plugin_data_as(accumulator.PluginTagToContent("hparams")[tag], tag_field(tag))


def tag_field(tag):
    return {
        hparams_metadata.SESSION_START_INFO_TAG: "session_start_info",
        hparams_metadata.SESSION_END_INFO_TAG: "session_end_info",
    }[tag]


def test_scalars_come_back_with_their_meaning(tmp_path):
    with TensorBoard(tmp_path, -1, CONFIG) as board:
        for step in (1, 2):
            board.scalars({"reward/mean": 0.5 * step, "policy/loss": float("nan")}, step)
    back = read(tmp_path)
    assert scalars(back, "reward/mean") == [(1, 0.5), (2, 1.0)]
    assert np.isnan(scalars(back, "policy/loss")[0][1])
    metadata = read_as_the_server_does(tmp_path).SummaryMetadata("reward/mean")
    assert metadata.plugin_data.plugin_name == "scalars"
    assert metadata.summary_description == "mean over samples [reward]"


def test_a_histogram_counts_every_value(tmp_path):
    with TensorBoard(tmp_path, -1, CONFIG) as board:
        board.histogram("offpolicy/age", np.array([[0, 0], [1, 4]]), step=3, buckets=4)
    [event] = read(tmp_path).Histograms("offpolicy/age")
    histogram = event.histogram_value
    assert (event.step, histogram.min, histogram.max, histogram.num) == (3, 0, 4, 4)
    assert (histogram.sum, histogram.sum_squares) == (5, 17)
    assert (histogram.bucket_limit, histogram.bucket) == ([1, 2, 3, 4], [2, 1, 0, 1])
    [(_, buckets)] = tensors(read_as_the_server_does(tmp_path), "offpolicy/age")
    np.testing.assert_allclose(buckets, [[0, 1, 2], [1, 2, 1], [2, 3, 0], [3, 4, 1]])


def test_a_histogram_of_one_value_has_a_bucket(tmp_path):
    with TensorBoard(tmp_path, -1, CONFIG) as board:
        board.histogram("offpolicy/age", np.full(5, 2.0), step=0)
    [(_, buckets)] = tensors(read_as_the_server_does(tmp_path), "offpolicy/age")
    assert buckets.tolist() == [[2, 2, 5]]


@pytest.mark.parametrize("given, message", [([0.0, np.inf], ": 1 of 2 values are not finite"), ([], " has no values")])
def test_a_histogram_refuses_values_without_a_bucket(tmp_path, given, message):
    with (
        TensorBoard(tmp_path, -1, CONFIG) as board,
        pytest.raises(ValueError, match=f"'offpolicy/age'{message}"),
    ):
        board.histogram("offpolicy/age", np.array(given), step=0)


def test_the_dashboard_is_written_at_the_start(tmp_path):
    TensorBoard(tmp_path, -1, CONFIG).close()
    [(step, content)] = tensors(read(tmp_path), "custom_scalars__config__")
    titles = [category.title for category in layout_pb2.Layout.FromString(content.item()).category]
    assert (step, titles[0]) == (0, "Is it learning?")


def test_runs_are_compared_by_their_settings_and_a_few_outcomes(tmp_path):
    TensorBoard(tmp_path, -1, CONFIG).close()
    tags = read(tmp_path).PluginTagToContent("hparams")
    content = tags[hparams_metadata.EXPERIMENT_TAG]
    experiment = hparams_metadata.parse_experiment_plugin_data(content)
    kinds = {info.name: info.type for info in experiment.hparam_infos}
    assert kinds == {
        "learner.learning_rate": api_pb2.DATA_TYPE_FLOAT64,
        "learner.updates": api_pb2.DATA_TYPE_FLOAT64,
        "lora.targets": api_pb2.DATA_TYPE_STRING,
    }, "not the switches of other sections"
    assert [info.name.tag for info in experiment.metric_infos] == list(OUTCOMES)


def test_a_pattern_of_the_dashboard_matches_its_tags_only():
    pattern = next(m.pattern for m in METRICS if m.name == "eval/pass_at_{k}")
    assert re.match(pattern, "eval/pass_at_16")
    assert not re.match(pattern, "eval/pass_rate")


def test_the_configuration_and_the_end_are_hyperparameters(tmp_path):
    TensorBoard(tmp_path, -1, CONFIG).close()
    back = read(tmp_path)
    start = hparams_content(back, hparams_metadata.SESSION_START_INFO_TAG)
    assert start.hparams["learner.learning_rate"].number_value == 1e-4
    assert start.hparams["lora.targets"].string_value == "('q_proj',)"
    assert start.hparams["on"].bool_value is True
    assert hparams_content(back, hparams_metadata.SESSION_END_INFO_TAG).status == api_pb2.STATUS_SUCCESS


def test_an_error_ends_the_session_as_a_failure(tmp_path):
    with pytest.raises(KeyError), TensorBoard(tmp_path, -1, CONFIG):
        raise KeyError
    assert hparams_content(read(tmp_path), hparams_metadata.SESSION_END_INFO_TAG).status == api_pb2.STATUS_FAILURE


@pytest.mark.parametrize("restored, kept", [(2, [0, 1, 2]), (-1, [])])
def test_a_resumed_run_drops_what_was_written_beyond_its_checkpoint(tmp_path, restored, kept):
    with TensorBoard(tmp_path, -1, CONFIG) as board:
        for step in range(5):
            board.scalars({"reward/mean": 0.0}, step)
            board.histogram("offpolicy/age", np.zeros(2), step)
            board.text("response/samples", "old", step)
    with TensorBoard(tmp_path, restored, CONFIG) as board:
        board.scalars({"reward/mean": 1.0}, restored + 1)
    back, server = read(tmp_path), read_as_the_server_does(tmp_path)
    assert scalars(back, "reward/mean") == [*((step, 0.0) for step in kept), (restored + 1, 1.0)]
    assert tensors(server, "reward/mean") == scalars(back, "reward/mean")
    assert [event.step for event in back.Histograms("offpolicy/age")] == kept
    assert [step for step, _ in tensors(server, "offpolicy/age")] == kept
    assert [step for step, _ in tensors(server, "response/samples")] == kept


def test_files_of_one_second_are_read_in_the_order_they_were_written(tmp_path):
    for _ in range(3):
        TensorBoard(tmp_path, -1, CONFIG).close()
    written = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(written) == 3
    assert written == sorted(tmp_path.iterdir())


def sample(text: str, reward: float, answer: str | None = "4") -> Sample:
    task = Task("sums/1", "sums", "2 + 2 | now", answer, "number")
    empty = np.zeros(0)
    return Sample(task, 0, 0, empty, empty, empty, None, (), StopReason.STOP, text, reward)


def test_a_table_of_samples_is_shown_as_text(tmp_path):
    table = samples_table([sample("a|b\n<c> & d", 1.0), sample("x" * 50, 0.25, None)], characters=20)
    with TensorBoard(tmp_path, -1, CONFIG) as board:
        board.text("response/samples", table, step=4)
    back = read(tmp_path)
    [(step, content)] = tensors(back, "response/samples")
    assert (step, content.item().decode()) == (4, table)
    assert back.SummaryMetadata("response/samples").plugin_data.plugin_name == "text"
    _, _, first, second = table.splitlines()
    assert first == "| sums/1 | 2 + 2 &#124; now | a&#124;b<br>&lt;c> &amp; d | 1 | 4 | stop |"
    assert f"{'x' * 20} … (30 more) | 0.25 |  | stop |" in second


def test_flatten_joins_keys_with_dots():
    assert flatten({"a": {"b": {"c": 1}}, "d": None}) == {"a.b.c": 1, "d": "None"}


WITHOUT = """
import sys
from pathlib import Path
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in ("tensorflow", "torch", "jax"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import rlx.metrics.statistics, rlx.metrics.rundir, rlx.metrics.progress, rlx.metrics.timers
from rlx.metrics.tensorboard import TensorBoard
with TensorBoard(Path(sys.argv[1]), -1, {"a": 1}) as board:
    board.scalars({"reward/mean": 0.5}, 1)
    board.histogram("offpolicy/age", [1.0], 1)
    board.text("response/samples", "none", 1)
"""


def test_neither_tensorflow_nor_torch_nor_jax_is_needed(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path)], check=True)
    assert scalars(read(tmp_path), "reward/mean") == [(1, 0.5)]
