"""What a policy does to its workspace or writes as a call ends in a verdict, in real sandboxes."""

import asyncio
import json

from configs import base
from rlx.config.parse import parse
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.graders import GraderPool
from rlx.rollout.collect import Sampling, collect
from rlx.sessions.environments import Environments
from rlx.types import Task
from tests.agents.speaking import Speaking
from tests.tiny_tokenizer import build

TASK = Task("sums/0", "sums", "What is 2 + 3?", "5", "number")
DIRECTORY = "import os\nos.remove('program.py')\nos.mkdir('program.py')"
LINK = "import os\nos.remove('program.py')\nos.symlink('/etc/passwd', 'program.py')"
FULL = "open('big', 'wb').write(bytes(3 * 2**20))"
DEEP = "import os\nfor _ in range(60):\n    os.mkdir('d')\n    os.chdir('d')"
BAD_NAME = "open(b'\\xff', 'w')\nimport os\nprint(os.listdir())"
BAD = (DIRECTORY, LINK, FULL, DEEP, BAD_NAME, "print('\0')", "print('\ud800')")


def call(code):
    return f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call>"


def test_it_is_told_what_is_wrong_and_graded(tmp_path):
    c = base.get_config()
    c.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool")
    c.producer.session_token_limit = 160
    c.sandbox.limits.disk_bytes = 2**20
    config = parse(c)
    chat = load_chat_tokenizer(build(tmp_path), "", "")
    texts = [text for first in zip(*([call(bad), call("print(2 + 3)"), "5"] for bad in BAD)) for text in first]
    engine = Speaking(chat, texts)

    async def main():
        with GraderPool(config.grader, ("number",)) as graders:
            async with Environments(config, chat, graders) as environments:
                tasks = [(i, TASK) for i in range(len(BAD))]  # which go on in rounds
                return await collect(engine, environments, tasks, Sampling(1, 1000, 1.0, False, 0))

    for group, bad in zip(asyncio.run(main()), BAD, strict=True):
        [sample] = group.samples
        assert bad in sample.text or json.dumps(bad)[1:-1] in sample.text
        assert (sample.grade["outcome"], sample.reward) == ("graded", 1.0), sample.grade["detail"]
        assert "[2] " in sample.text
