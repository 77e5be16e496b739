import collections
import json

import pytest

from rlx.data.pipeline import TaskStream
from rlx.types import Task

WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
SIZES = {"a": 40, "b": 17, "c": 5}
TASKS = [Task(f"{name}/{i}", name, f"{name} {i}?", str(i), "number") for name in "abc" for i in range(SIZES[name])]


def stream(tasks=TASKS, weights=WEIGHTS, seed=0):
    return TaskStream(tasks, weights, seed)


@pytest.fixture(scope="module")
def instances():
    return stream().next_tasks(200)


def test_the_stream_is_a_function_of_the_seed(instances):
    assert stream().next_tasks(60) == instances[:60]
    assert stream(seed=1).next_tasks(60) != instances[:60]


@pytest.mark.parametrize("before", [0, 1, 39, 40, 41, 150])
def test_a_restored_stream_continues_exactly(instances, before):
    original = stream()
    original.next_tasks(before)
    state = json.loads(json.dumps(original.get_state()))
    original.next_tasks(7)  # what is drawn after saving is not in the state
    restored = stream()
    restored.next_tasks(3)
    restored.set_state(state)
    assert restored.next_tasks(25) == instances[before : before + 25]
    assert original.next_tasks(5) == instances[before + 7 : before + 12]


def test_sources_have_their_share_at_every_point(instances):
    counts = collections.Counter()
    for n, instance in enumerate(instances, start=1):
        counts[instance.task.source] += 1
        assert all(abs(counts[name] - n * weight) < 2 for name, weight in WEIGHTS.items())


def test_weights_are_relative(instances):
    tens = {name: 10 * weight for name, weight in WEIGHTS.items()} | {"unused": 1.0}
    assert [i.task.id for i in stream(weights=tens).next_tasks(50)] == [i.task.id for i in instances[:50]]


def test_an_epoch_has_every_task_of_its_source_once_in_an_order_of_its_own(instances):
    for name in ("b", "c"):
        orders = collections.defaultdict(list)
        for instance in instances:
            if instance.task.source == name:
                orders[instance.epoch].append(instance.task.id)
        complete = [order for order in orders.values() if len(order) == SIZES[name]]
        assert len(complete) >= 3
        assert all(len(set(order)) == SIZES[name] for order in complete)
        assert len(set(map(tuple, complete))) > 1


def test_groups_are_unique_positions(instances):
    assert [i.group for i in instances] == list(range(200))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"seed": 1}, "other seed (0) than this run (1)"),
        ({"weights": WEIGHTS | {"a": 1.0}}, "other weights"),
        ({"tasks": TASKS[1:]}, "other tasks"),
    ],
)
def test_a_state_of_another_stream_is_refused(changes, named):
    state = stream().get_state()
    with pytest.raises(ValueError, match="saved task stream has") as raised:
        stream(**changes).set_state(state)
    assert named in str(raised.value)


def test_nothing_to_train_on_is_refused():
    with pytest.raises(ValueError, match="no tasks to train on"):
        stream(tasks=[])


@pytest.mark.parametrize("weights", [{}, {"a": 1.0, "b": 1.0, "c": 0.0}])
def test_a_source_without_a_weight_is_refused(weights):
    with pytest.raises(ValueError, match=r"every source needs a weight above 0, found .*'c'"):
        stream(weights=weights)
