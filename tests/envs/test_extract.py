from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.envs.extract import as_number, extract, last_boxed, last_number, normalise_text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("5 - 3 equals 2.", "2"),
        ("The result is 1,234", "1234"),
        ("1,234,567.50 dollars", "1234567.50"),
        ("so x = -7", "-7"),
        ("It costs $12", "12"),
        ("It costs -$12.", "-12"),
        ("a loss of $-12$", "-12"),
        ("\\$3.50", "3.50"),
        ("about .5", ".5"),
        ("that is +5!", "5"),
        ("\N{MINUS SIGN}4 degrees", "-4"),
        ("**42**", "42"),
        ("(3)", "3"),
        ("1, 2, 3", "3"),
        ("12,34", "34"),
        ("7-5", "5"),
        ("7 -5", "5"),
        ("(7) - 5", "5"),
        ("- 7 apples", "7"),
        ("1 + 2\n-7", "-7"),
        ("\\frac{x}{y}-2", "2"),
        ("= -7", "-7"),
        ("100km", "100"),
        ("x2 is 9 in v1.2.3", "9"),
        ("7...", "7"),
        ("so...7", "7"),
        ("3/4", "3/4"),
        ("-\\frac{3}{4}", "-3/4"),
        ("1.5e-3", "1.5e-3"),
        ("\\boxed{42}, found in 3 steps", "42"),
        ("first \\boxed{1}, then \\boxed{\\text{is } -2}", "-2"),
        ("\\boxed{x} and 6", "6"),
        ("\\boxed{5", "5"),
        ("1{,}000 or 2\\,000", "2000"),
        ("1{,}000", "1000"),
        ("no digits", ""),
        ("", ""),
    ],
)
def test_last_number(text, expected):
    assert last_number(text) == expected


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "It is {}.", "2 + 3 = {}", "\\boxed{{{}}} (4)", "{:,}"]))
def test_any_integer_is_read_back(number, sentence):
    assert Fraction(last_number(sentence.format(number))) == number


@given(st.text(alphabet="0123456789,.-+/eE$\\{} \nboxedfrac\N{MINUS SIGN}", max_size=40))
def test_what_is_extracted_is_a_number_or_nothing(text):
    number = last_number(text)
    assert number == "" or as_number(number) is not None or "/" in number
    assert last_number(number) == number


def test_tagged_takes_the_last_complete_answer():
    text = "<answer>1</answer> no, <answer>\n two </answer> <answer>3"
    assert extract(text, "tagged") == "two"
    assert extract("2 <answer> 3", "tagged") == ""


def test_all_keeps_the_whole_response():
    assert extract(" a\nb ", "all") == "a\nb"


def test_boxed_braces_are_balanced():
    assert last_boxed("\\boxed{\\frac{1}{2}} and \\boxed{a{b}c} then }") == "a{b}c"
    assert last_boxed("\\boxed{1} and \\boxed{2") == "1"


@pytest.mark.parametrize(
    "text, value", [("7.", 7), ("$1,000$", 1000), ("\\boxed{-\\frac{1}{2}}", Fraction(-1, 2)), ("2.50", Fraction(5, 2))]
)
def test_as_number_reads_one_number(text, value):
    assert as_number(text) == value


@pytest.mark.parametrize("text", ["", "7 apples", "1 2", "x", "1/0", "9" * 5000, "nan", "two"])
def test_as_number_refuses_anything_else(text):
    assert as_number(text) is None


def test_normalised_texts_differ_only_by_case_space_and_unicode_form():
    assert normalise_text("  What\n IS \ufb01ve? ") == normalise_text("what is five?")
    assert normalise_text("2 + 3") != normalise_text("2 - 3")
