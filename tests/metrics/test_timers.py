import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.metrics.names import check_names
from rlx.metrics.timers import Timers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def tick(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_inner_timer_takes_its_seconds_from_the_outer_one(clock):
    timers = Timers(clock=clock)
    with timers("update"):
        clock.tick(1)
        with timers("publish"):
            clock.tick(2)
        clock.tick(4)
    clock.tick(8)
    times = timers.end_update({})
    assert times.seconds == {"update": 5, "publish": 2}
    assert times.total == 15
    assert times.share("update", "publish") == pytest.approx(7 / 15)
    assert times.share("wait") == 0


def test_seconds_reset_with_each_update_and_totals_do_not(clock):
    timers = Timers(clock=clock)
    for seconds in (1, 2):
        for _ in range(2):
            with timers("update"):
                clock.tick(seconds)
        assert timers.end_update({}).seconds == {"update": 2 * seconds}
    assert timers.totals == {"update": 6}


def test_an_error_still_stops_the_timer(clock):
    timers = Timers(clock=clock)

    def fail():
        with timers("update"):
            clock.tick(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.tick(1)
    assert timers.end_update({}).seconds == {"update": 1}


def test_rates_leave_out_first_updates_compilations_evaluation_and_saving(clock):
    timers = Timers(skip_updates=1, apart=("eval", "save"), clock=clock)
    clock.tick(1000)
    assert timers.end_update({"tokens": 7}).rates == {}
    clock.tick(500)
    assert timers.end_update({"tokens": 7}, compiled=True).rates == {}
    with timers("update"):
        clock.tick(2)
    with timers("eval"):
        clock.tick(50)
    assert timers.end_update({"tokens": 10}).rates == {"tokens": 5}
    clock.tick(3)
    assert timers.end_update({"tokens": 20}).rates == {"tokens": 6}


def test_an_update_cannot_end_inside_a_timer(clock):
    timers = Timers(clock=clock)
    with timers("update"), pytest.raises(RuntimeError, match="'update' runs"):
        timers.end_update({})


def test_scalars_are_metrics(clock):
    timers = Timers(clock=clock)
    for name in ("rollout", "pack", "update", "publish", "log", "save", "eval", "sft"):
        with timers(name):
            clock.tick(1)
    scalars = timers.end_update({}).scalars()
    check_names(scalars)
    assert scalars["time/total_seconds"] == 8
    assert scalars["time/save_seconds"] == 1


def run(timers, clock, tree):
    for name, before, children in tree:
        with timers(name):
            clock.tick(before)
            run(timers, clock, children)
        clock.tick(1)


def children(inner):
    return st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), inner), max_size=3)


trees: st.SearchStrategy = st.recursive(st.just([]), children, max_leaves=6)


@given(trees)
def test_phases_never_add_up_to_more_than_the_wall_time(tree):
    def own(tree):
        # A second passes after each child while its parent runs; the top level has none.
        return sum(before + len(children) + own(children) for _, before, children in tree)

    clock = Clock()
    timers = Timers(clock=clock)
    run(timers, clock, tree)
    times = timers.end_update({})
    assert sum(times.seconds.values()) == own(tree) == times.total - len(tree)
