import io

import pytest

from rlx.metrics.progress import Progress, Shown

SHOWN = Shown(reward=0.41, pass_rate=0.375, tokens_per_second=12300.0, lag=1.25)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_log_gets_a_line_every_so_often_and_at_the_end(clock):
    stream = io.StringIO()
    with Progress(total=7, done=1, every_seconds=30, stream=stream, clock=clock) as progress:
        for _ in range(6):
            clock.now += 12
            progress.update(SHOWN)
    lines = stream.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["update 2/7", "update 5/7", "update 7/7"]
    assert "reward 0.410, pass 37.5%, 12.3k tok/s, lag 1.2" in lines[0]


def test_the_time_left_ignores_the_first_updates(clock):
    stream = io.StringIO()
    progress = Progress(total=10, skip_updates=2, every_seconds=0, stream=stream, clock=clock)
    for seconds in (1000, 1000, 4, 6):
        clock.now += seconds
        progress.update(SHOWN)
    left = [line.rpartition("left ")[2] for line in stream.getvalue().splitlines()]
    assert left == ["?", "?", "00:28", "00:30"]


def test_an_unknown_rate_is_shown_as_such(clock):
    stream = io.StringIO()
    Progress(total=1, stream=stream, clock=clock).update(SHOWN._replace(tokens_per_second=None))
    assert "- tok/s" in stream.getvalue()


def test_a_terminal_gets_a_bar_with_the_same_words(clock):
    stream = Terminal()
    with Progress(total=4, done=1, stream=stream, clock=clock) as progress:
        progress.update(SHOWN)
        progress.message("saved")
    shown = stream.getvalue()
    assert "2/4" in shown
    assert "reward 0.410, pass 37.5%" in shown
    assert "saved\n" in shown


def test_a_message_is_a_line_of_the_log(clock):
    stream = io.StringIO()
    Progress(total=4, stream=stream, clock=clock).message("saved")
    assert stream.getvalue() == "saved\n"
