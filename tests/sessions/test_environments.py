"""Each task gets the environment that its source names; what cannot begin is refused at the start."""

import asyncio

import pytest

from configs import base
from rlx.config.errors import ConfigError
from rlx.config.parse import parse
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import HistoryRewritten
from rlx.prompt_checks import check_prompts
from rlx.rollout.session import TaskEnvironment
from rlx.rollout.tool_session import ToolSession
from rlx.sessions.environments import Environments, conversations, openings
from rlx.types import Task
from tests.tiny_tokenizer import CHATML, build

TASKS = [Task(f"{name}/0", name, "What is 2 + 3?", "5", "number") for name in ("sums", "asked")]


def config(**changes):
    c = base.get_config()
    c.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool")
    c.tasks.sources.asked = base.source(dataset="chain_sum")
    c.tools.format = "plain"
    c.producer.session_token_limit = 160
    c.update_from_flattened_dict(changes)
    return parse(c)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_chat_tokenizer(build(tmp_path_factory.mktemp("tokenizer")), "", "")


def test_a_source_decides_what_its_sessions_act_in(tokenizer):
    async def main():
        environments = Environments(config(), tokenizer, None)  # nothing is graded here
        return [type(environments(task)) for task in TASKS]

    assert asyncio.run(main()) == [ToolSession, TaskEnvironment]
    assert list(conversations(config(), tokenizer)) == ["python_tool"]


def test_prompts_are_those_that_sessions_begin_with(tokenizer):
    opening = openings(config(), tokenizer)
    tool, question = (tokenizer.written_out(opening(task)) for task in TASKS)
    assert tool.startswith("<|im_start|>system\nRuns a Python program")
    assert question == tokenizer.render_prompt(TASKS[1].question)


def test_a_session_that_would_end_before_it_begins_is_refused(tokenizer):
    longest = max(len(openings(config(), tokenizer)(task)) for task in TASKS)
    check_prompts(config(**{"producer.session_token_limit": longest + 1}), tokenizer, TASKS)
    with pytest.raises(ConfigError, match=f"sums/0, has {longest} tokens.*set at least {longest + 1}"):
        check_prompts(config(**{"producer.session_token_limit": longest}), tokenizer, TASKS)


def test_a_template_that_rewrites_history_is_refused_where_sessions_have_turns(tmp_path):
    template = CHATML.replace("message['content']", "message['content'][-10:]")
    shortens = load_chat_tokenizer(build(tmp_path, template=template), "", "")
    with pytest.raises(HistoryRewritten):
        check_prompts(config(), shortens, TASKS)
    check_prompts(config(**{"tasks.sources.sums.environment": ""}), shortens, TASKS)
