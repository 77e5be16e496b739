"""Many sessions at once with real sandboxes: none is lost, each reads its own program's output, the books balance."""

import asyncio

from bench.tool_sessions import configuration, run
from tests.tiny_tokenizer import build


def test_concurrent_sessions_with_sandboxes_of_their_own(tmp_path):
    config = configuration(build(tmp_path), "bubblewrap")
    seen = asyncio.run(run(config, sessions=24, collections=1, seconds=0.5))
    assert (seen.sessions, seen.passed, seen.failures) == (24, 24, 0)
    assert 2 < seen.most_sandboxes <= 2 * 24
