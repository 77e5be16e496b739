"""What no engine should be sent is refused with the reason."""

import dataclasses

import numpy as np
import pytest

from rlx.rollout.engine import EngineError, Request, check_request

GOOD = Request("7:sums/3", np.arange(5, dtype=np.int32), seeds=(0, 2**32 - 1), max_new_tokens=1, temperature=0.0)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_good_requests_pass(dtype):
    assert check_request(dataclasses.replace(GOOD, prompt=GOOD.prompt.astype(dtype)), 5, 6) is None


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt": np.zeros(0, np.int32)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros((1, 2), np.int32)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros(2)}, "non-empty 1-D integer array"),
        ({"prompt": np.zeros(6, np.int32)}, "a prompt of 6 tokens leaves no room in a context of 6. Raise engine"),
        ({"prompt": np.array([5], np.int32)}, r"token ids must be in \[0, 5\), got up to 5"),
        ({"prompt": np.array([-1], np.int32)}, r"token ids must be in \[0, 5\)"),
        ({"max_new_tokens": 0}, "at least one sample of at least one token"),
        ({"seeds": ()}, "at least one sample of at least one token"),
        ({"seeds": (1, 2**32)}, r"seeds must be in \[0, 2\*\*32\), got \(1, 4294967296\)"),
        ({"seeds": (-1,)}, r"seeds must be in \[0, 2\*\*32\)"),
        ({"temperature": -0.5}, "temperature -0.5 is not >= 0"),
        ({"temperature": float("nan")}, "temperature nan is not >= 0"),
    ],
)
def test_others_are_refused(change, said):
    with pytest.raises(EngineError, match=f"request 7:sums/3: .*{said}"):
        check_request(dataclasses.replace(GOOD, **change), vocab_size=5, context=6)
