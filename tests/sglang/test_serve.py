"""`rlx serve` in front of real servers: a session's record is what they saw and say of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.sglang.test_training import CHANGES, given, recipe  # noqa: F401  fixtures
from tests.sglang.trainer import served_logprobs, with_servers
from tests.test_serve import ask, served

pytestmark = pytest.mark.sglang


def test_a_session_on_servers_is_recorded_as_they_saw_it(two_servers, given, recipe, tmp_path):  # noqa: F811
    with served(recipe, tmp_path, **CHANGES, **given) as url:
        ask(url, "one", "Digit 1?", "Digit 2?")
        [segment] = json.loads((tmp_path / "one.json").read_text())["segments"]
        tokens, mask = np.array(segment["tokens"], np.int32), np.array(segment["mask"])
        said = with_servers(two_servers[:1], lambda http: served_logprobs(http, tokens))
    assert mask.sum() > 1
    np.testing.assert_allclose(np.array(segment["logprobs"])[mask], said[mask[1:]], atol=1e-3)
    assert {version for version, _, _ in segment["version_spans"]} == {0}
