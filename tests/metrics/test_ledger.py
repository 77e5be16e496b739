import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from rlx.metrics.ledger import BINS, OPEN_BINS, Count, Ledger, LedgerError, failed
from rlx.metrics.names import check_names

FINAL = [name for name in BINS if name not in (*OPEN_BINS, "failed", "evaluated")] + [
    failed("grader"),
    failed("engine"),
]


class Books(RuleBasedStateMachine):
    """Random moves beside a plain dictionary that says what they must come to."""

    @initialize()
    def start(self):
        self.ledger = Ledger()
        self.expected = {}

    def enter(self, name, tokens):
        self.expected[name] = self.expected.get(name, 0) + tokens

    @rule(tokens=st.integers(0, 100), into=st.sampled_from(["in_flight", "evaluated"]))
    def generate(self, tokens, into):
        self.ledger.generated(tokens, 1, into=into)
        self.enter(into, tokens)

    @rule(source=st.sampled_from(OPEN_BINS), to=st.sampled_from(["buffered", *FINAL]), share=st.floats(0, 1))
    def move(self, source, to, share):
        tokens = int(self.ledger[source].tokens * share)
        if to == source or (source, to) == ("in_flight", "trained"):
            with pytest.raises(LedgerError, match="no move leads"):
                self.ledger.move(source, to, tokens)
            return
        self.ledger.move(source, to, tokens)
        self.enter(source, -tokens)
        self.enter(to, tokens)

    @rule(source=st.sampled_from(OPEN_BINS), over=st.integers(1, 9))
    def move_too_much(self, source, over):
        with pytest.raises(LedgerError, match="too little to move"):
            self.ledger.move(source, "aborted", self.ledger[source].tokens + over)

    @rule(source=st.sampled_from([*FINAL, "evaluated"]))
    def move_from_a_final_bin(self, source):
        with pytest.raises(LedgerError, match="is final"):
            self.ledger.move(source, "buffered", 0)

    @rule()
    def save_and_restore(self):
        restored = Ledger()
        restored.set_state(json.loads(json.dumps(self.ledger.get_state())))
        self.ledger = restored

    @invariant()
    def balances(self):
        self.ledger.check({name: self.ledger[name]._replace(tokens=held) for name, held in self.expected.items()})
        assert self.ledger.total.tokens == sum(self.expected.values())


def test_random_moves_balance():
    run_state_machine_as_test(Books)


def trained_and_more() -> Ledger:
    ledger = Ledger()
    ledger.generated(100, samples=10, groups=2)
    ledger.move("in_flight", failed("grader_timeout"), 10, samples=1)
    ledger.move("in_flight", "buffered", 90, samples=9, groups=2)
    ledger.move("buffered", "trained", 60, samples=6, groups=1)
    ledger.generated(50, samples=5, into="evaluated")
    return ledger


def test_scalars_are_metrics_and_hold_the_counts():
    values = trained_and_more().scalars()
    check_names(values)
    assert values["ledger/tokens_generated"] == 150
    assert values["ledger/samples_failed"] == values["ledger/samples_failed_grader_timeout"] == 1
    assert values["ledger/groups_buffered"] == 1
    assert values["ledger/trained_share"] == pytest.approx(60 / 70)
    assert sum(values[f"ledger/tokens_{name}"] for name in BINS) == 150


def test_nothing_ended_has_no_trained_share():
    ledger = Ledger()
    ledger.generated(5)
    assert "ledger/trained_share" not in ledger.scalars()


def test_table_names_every_bin_and_adds_up():
    table = trained_and_more().table().splitlines()
    rows = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for cells in (line.split("|") for line in table[2:])}
    assert set(BINS) - {"failed"} < set(rows)
    assert rows["failed/grader_timeout"] == ["10", "6.7%", "1", "0"]
    assert rows["sum of the bins"] == rows["generated"] == ["150", "100.0%", "15", "2"]


def test_check_compares_with_what_the_owner_counts():
    ledger = trained_and_more()
    ledger.check({"buffered": Count(30, 3, 1), "in_flight": Count()})
    with pytest.raises(LedgerError, match=r"(?s)'buffered' is booked as .*tokens=30.* but holds .*tokens=29.*\| bin"):
        ledger.check({"buffered": Count(29, 3, 1)})


def test_books_that_do_not_balance_are_refused_and_change_nothing():
    state = trained_and_more().get_state()
    state["bins"]["trained"][0] -= 1
    ledger = Ledger()
    with pytest.raises(LedgerError, match="the bins hold"):
        ledger.set_state(state)
    assert ledger.total == Count()


def test_an_unknown_bin_names_the_nearest():
    with pytest.raises(LedgerError, match="no bin 'stalled'; the nearest is 'stale'"):
        Ledger().move("in_flight", "stalled", 0)


@pytest.mark.parametrize("target", ["failed", "failed/"])
def test_a_failure_needs_a_reason(target):
    with pytest.raises(LedgerError):
        Ledger().move("in_flight", target, 0)


@pytest.mark.parametrize("reason", ["", "a/b"])
def test_a_reason_is_a_short_name(reason):
    with pytest.raises(LedgerError, match="short name"):
        failed(reason)


@pytest.mark.parametrize("tokens", [-1, 1.5])
def test_counts_are_whole_and_not_negative(tokens):
    with pytest.raises(LedgerError, match="whole numbers"):
        Ledger().generated(tokens)


def test_tokens_enter_by_two_doors_only():
    with pytest.raises(LedgerError, match="enter 'in_flight' or 'evaluated'"):
        Ledger().generated(1, into="trained")


@given(st.integers(0, 50))
def test_what_a_dead_process_sampled_after_its_checkpoint_is_lost(beyond):
    dead, resumed = trained_and_more(), Ledger()
    resumed.set_state(dead.get_state())
    dead.generated(beyond, samples=1)
    assert resumed.book_lost(dead.total) == Count(beyond, 1, 0)
    resumed.check()
    assert resumed["lost"].tokens == beyond
    assert resumed.total == dead.total


def test_a_ledger_on_disk_older_than_the_checkpoint_is_refused():
    with pytest.raises(LedgerError, match="older than the checkpoint"):
        trained_and_more().book_lost(Count())


# ------------------------------------------------------------------------------------------------- by age and by length


def profiled() -> Ledger:
    ledger = Ledger()
    ledger.generated(1000, samples=4, groups=2)
    ledger.move("in_flight", failed("engine_dead"), 5, samples=1, ages={0: 3, 2: 2}, lengths=[5])
    ledger.move("in_flight", failed("grader_error"), 1, ages={2: 1})
    ledger.move("in_flight", "buffered", 900, samples=3, groups=2)
    ledger.move("buffered", "stale", 300, samples=1, groups=1, ages={5: 100, 17: 200}, lengths=[300])
    ledger.move("buffered", "trained", 500, samples=2, groups=1, ages={0: 64, 1: 436}, lengths=[63, 437])
    return ledger


def test_what_ends_is_counted_by_age_and_by_length():
    values = profiled().scalars()
    check_names(values)
    by_age = {n.partition("tokens_")[2]: v for n, v in values.items() if "_age_" in n}
    assert by_age == {
        "trained_age_0": 64, "trained_age_1": 436, "stale_age_4-7": 100, "stale_age_16+": 200, "failed_age_0": 3,
        "failed_age_2": 3,
    }  # fmt: skip
    by_length = {n.partition("samples_")[2]: v for n, v in values.items() if "_length_" in n}
    assert by_length == {
        "trained_length_0-63": 1, "trained_length_256-1023": 1, "stale_length_256-1023": 1, "failed_length_0-63": 1
    }  # fmt: skip


def test_the_profile_is_a_table_by_reason():
    lines = profiled().profile().splitlines()
    assert "| failed/engine_dead | 3 | 0 | 2 | 0 | 0 | 0 | 0 |" in lines
    assert "| stale | 0 | 0 | 0 | 0 | 100 | 0 | 200 |" in lines
    assert "| trained | 1 | 0 | 1 | 0 | 0 | 0 |" in lines
    assert trained_and_more().profile() == ""


def test_ages_and_lengths_are_kept():
    ledger = Ledger()
    ledger.set_state(json.loads(json.dumps(profiled().get_state())))
    assert ledger.scalars() == profiled().scalars()
    assert ledger.profile() == profiled().profile()


def test_a_ledger_from_before_they_were_counted_is_read():
    state = {name: part for name, part in profiled().get_state().items() if name in ("generated", "bins")}
    ledger = Ledger()
    ledger.set_state(state)
    assert ledger["trained"] == Count(500, 2, 1)
    assert ledger.profile() == ""


@pytest.mark.parametrize("wrong", [{"ages": {0: 4}}, {"lengths": [5, 5]}, {"ages": {0: 5}, "lengths": []}])
def test_ages_and_lengths_must_be_those_of_what_moves(wrong):
    ledger = Ledger()
    ledger.generated(5, samples=1)
    with pytest.raises(LedgerError, match="are not those of"):
        ledger.move("in_flight", "aborted", 5, samples=1, **wrong)
    assert ledger["in_flight"].tokens == 5


def test_the_newest_of_what_is_known_says_what_is_lost():
    """The ledger on disk is written update by update, the journal group by group."""
    ledger = Ledger()
    ledger.set_state(trained_and_more().get_state())
    total = ledger.total
    lost = ledger.book_lost(Count(total.tokens + 5, total.samples, 0), Count(total.tokens, total.samples + 2, 9))
    assert lost == Count(5, 2, 9 - total.groups)
