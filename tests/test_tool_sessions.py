"""Many sessions at once with real sandboxes: none is lost, each reads its own program's output, the books balance."""

import asyncio

import pytest

from bench.tool_sessions import configuration, run
from tests.tiny_tokenizer import build


@pytest.mark.parametrize("sessions", [24, pytest.param(256, marks=pytest.mark.slow)])
def test_concurrent_sessions_with_sandboxes_of_their_own(tmp_path, sessions):
    config = configuration(build(tmp_path), "bubblewrap")
    seen = asyncio.run(run(config, sessions=sessions, collections=1, seconds=0.5))
    assert (seen.sessions, seen.passed, seen.failures) == (sessions, sessions, 0)
    assert 2 < seen.most_sandboxes <= 2 * sessions
