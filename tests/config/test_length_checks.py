"""What must fit, where a session may be longer than a response and its prompt."""

from configs import base
from rlx.config.length_checks import length_problems
from rlx.config.parse import parse


def test_sessions_of_several_turns_have_no_place_in_a_row():
    c = base.get_config()
    c.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool")
    c.learner.row_samples, c.learner.row_prefix, c.learner.row_tokens = 2, 96, 416
    (problem,) = length_problems(parse(c))
    assert problem.startswith("config.learner.row_samples = 2: a session of config.tasks.sources.sums may be longer")
    c.tasks.sources.sums.environment = ""
    assert length_problems(parse(c)) == []
