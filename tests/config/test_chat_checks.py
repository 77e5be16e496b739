"""What must not be said of conversations, tools and sessions of several turns."""

import pytest

from configs import base
from rlx.config.chat_checks import chat_problems, several_turns
from rlx.config.parse import parse


def config(**changes):
    c = base.get_config()
    c.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool")
    c.tasks.sources.asked = base.source(dataset="chain_sum")
    c.producer.session_token_limit = 160
    c.update_from_flattened_dict(changes)
    return parse(c)


def test_sessions_of_several_turns_pass_with_a_limit():
    assert chat_problems(config()) == []
    assert several_turns(config()) == ["sums"]


@pytest.mark.parametrize(
    "changes, key, way_out",
    [
        ({"tools.max_turns": 0}, "tools.max_turns = 0", "above 0"),
        ({"tools.output_bytes": -1}, "tools.output_bytes = -1", "above 0"),
        ({"tools.session_seconds": 5.0}, "tools.call_seconds = 10.0", "session_seconds = 5.0 ends the session before"),
        ({"sandbox.limits.wall_s": 5.0}, "tools.call_seconds = 10.0", "limits.wall_s = 5.0 ends a call before"),
        ({"producer.session_token_limit": 0}, "producer.session_token_limit = 0", "set at most 192"),
        ({"learner.row_targets": 64}, "learner.row_targets = 64", "set 0, or at least 224"),
        ({"producer.environment_timeout_s": 12.0}, "producer.environment_timeout_s = 12.0", "set at least 15.0"),
        ({"sandbox.max_open": 8}, "sandbox.max_open = 8", "set at least 16"),
        (
            {"producer.max_policy_lag": 2, "producer.max_concurrent_samples": 300},
            "sandbox.max_open = 256",
            "300 sessions are under way (config.producer.max_concurrent_samples), with a sandbox each",
        ),
    ],
)
def test_what_contradicts_is_named_with_the_way_out(changes, key, way_out):
    (problem,) = chat_problems(config(**changes))
    assert problem.startswith(f"config.{key}: ")
    assert way_out in problem
