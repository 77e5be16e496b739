import pytest
import reasoning_gym

from rlx.envs.grading import Outcome, grade, score_answer
from rlx.types import Task


def task(grader, answer="7", metadata=None):
    return Task("s/0", "s", "question", answer, grader, metadata or {})


def from_dataset(name, **options):
    entry = reasoning_gym.create_dataset(name, size=1, seed=3, **options)[0]
    return task("reasoning_gym", entry["answer"], {"dataset": name, "options": options, "entry": entry})


def reward(task, text, mode="all"):
    got = grade(task, text, mode=mode, score=score_answer)
    assert got.outcome == Outcome.GRADED, got.detail
    return got.reward


@pytest.mark.parametrize("text, expected", [("Paris.", 1), (' "paris" ', 1), ("Paris, France", 0), ("", 0)])
def test_exact(text, expected):
    assert reward(task("exact", "Paris"), text) == expected


@pytest.mark.parametrize(
    "gold, text, expected",
    [
        ("7", "3 + 4 = 7.00", 1),
        ("7", "7 or 8", 0),
        ("1,000", "$1000.", 1),
        ("0.5", "1/2", 1),
        ("4", "\\frac{3}{4}", 0),
        ("-7", "7", 0),
        ("7", "seven", 0),
    ],
)
def test_number(gold, text, expected):
    assert reward(task("number", gold), text) == expected


@pytest.mark.parametrize(
    "gold, text, mode, expected",
    [
        ("\\frac{1}{2}", "<answer>0.5</answer>", "tagged", 1),
        ("2x+3", "<answer>3+2x</answer>", "tagged", 1),
        ("2x+3", "<answer>2</answer>", "tagged", 0),
        ("sqrt(2)", "so it is $\\sqrt{2}$.", "all", 1),
        ("7", "3 + 4 = 7", "last_number", 1),
        ("7", "( ( {", "all", 0),
    ],
)
def test_math_verify(gold, text, mode, expected):
    assert reward(task("math_verify", gold), text, mode) == expected


def test_reasoning_gym_rewards_full_scores_only():
    spelled = from_dataset("spell_backward")
    assert reward(spelled, spelled.answer) == 1
    # 0.125 from the dataset for a wrong word
    assert reward(spelled, "nonsense") == 0
    summed = from_dataset("chain_sum", min_terms=2, max_terms=2)
    assert reward(summed, f"The sum is {summed.answer}.", "last_number") == 1
    assert reward(summed, f"{summed.answer} and more") == 0


def test_text_that_the_dataset_cannot_parse_is_a_wrong_answer():
    got = grade(from_dataset("prime_factorization"), "two and three", mode="all", score=score_answer)
    assert (got.reward, got.outcome) == (0.0, Outcome.GRADED)
    assert got.detail.startswith("malformed (ValueError")


def test_a_grader_that_fails_on_its_own_gold_answer_is_an_error():
    broken = from_dataset("prime_factorization")
    broken.metadata["entry"]["metadata"] = {}
    broken.metadata["entry"]["answer"] = "not a factorization"
    got = grade(broken, "2", mode="all", score=score_answer)
    assert (got.reward, got.outcome) == (0.0, Outcome.ERROR)
    assert got.detail.startswith(("KeyError", "ValueError"))


@pytest.mark.parametrize(
    "task, named",
    [
        (task("number", "seven"), "'seven' is not a number"),
        (task("exact", None), "no gold answer"),
        (task("math_verify", ""), "cannot read the gold answer"),
        (task("nubmer"), "unknown grader 'nubmer'"),
    ],
)
def test_tasks_that_cannot_be_graded_are_errors(task, named):
    got = grade(task, "7", mode="all", score=score_answer)
    assert (got.reward, got.outcome) == (0.0, Outcome.ERROR)
    assert named in got.detail


def test_nothing_to_grade_is_a_wrong_answer_that_says_so():
    got = grade(task("number"), "I do not know", mode="last_number", score=score_answer)
    assert (got.reward, got.extracted, got.outcome, got.detail) == (0.0, "", Outcome.GRADED, "no answer (last_number)")
