"""Sessions of several turns through the SGLang client: every turn's request has all ids before it, as they were."""

import asyncio

import numpy as np

from rlx.rollout.collect import Sampling, collect
from rlx.types import Task
from tests.rollout.scripted import Conversation
from tests.rollout.sglang_server import Server, engine

SAMPLING = Sampling(group_size=2, max_new_tokens=5, temperature=1.0, zero_reward_truncated=False, seed=0)


def test_a_session_grows_by_what_was_said_and_told():
    async def scenario():
        async with Server() as server:
            client = engine(server.url)
            asked = [(7, Task("t/0", "t", "\x01\x02\x03", "", "exact"))]
            try:
                groups = await collect(client, lambda task: Conversation(task, turns=3, words=2), asked, SAMPLING)
            finally:
                await client.close()
            return groups, [body["input_ids"] for path, _, body in server.seen if path == "/generate"]

    (group,), prompts = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert len(prompts) == 2 * 3
    for sample in group.samples:
        starts = np.flatnonzero(sample.mask & ~np.roll(sample.mask, 1))
        assert len(starts) == 3
        assert all(sample.tokens[:start].tolist() in prompts for start in starts)
        assert np.isfinite(sample.logprobs).all()
        assert len(sample.head.ids) == sample.num_written
