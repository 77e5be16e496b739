"""Golden values, in both precisions, and again with everything poisoned that a mask says not to look at."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.oracle_adapter import evaluate

CASES = json.loads((Path(__file__).parents[1] / "oracles" / "public.json").read_text())["cases"]
TOLERANCE = {np.float64: {"rtol": 1e-9, "atol": 1e-12}, np.float32: {"rtol": 2e-5, "atol": 1e-6}}
POISON = (np.nan, np.inf, -np.inf)
UNMASKED = ("mask", "segment_ids")  # what says where the mask is


def name(case):
    return "-".join([case["what"].replace("/", "-"), str(case["inputs"].get("weight", ""))])


def arrays(inputs, dtype):
    read = {key: np.asarray(value) if isinstance(value, list) else value for key, value in inputs.items()}
    return {k: v.astype(dtype) if getattr(v, "dtype", None) == np.float64 else v for k, v in read.items()}


def check(case, inputs, dtype):
    got = evaluate(case["what"], inputs)
    assert got.keys() == case["expected"].keys()
    for key, expected in case["expected"].items():
        np.testing.assert_allclose(got[key], expected, **TOLERANCE[dtype], err_msg=key)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_golden_values(case, dtype):
    check(case, arrays(case["inputs"], dtype), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", [c for c in CASES if "mask" in c["inputs"]], ids=name)
def test_poison_behind_the_mask_changes_nothing(case, dtype):
    inputs = arrays(case["inputs"], dtype)
    masked = inputs["mask"] == 0
    rng = np.random.default_rng(0)
    for key, value in inputs.items():
        if key in UNMASKED or not isinstance(value, np.ndarray) or value.shape[: masked.ndim] != masked.shape:
            continue
        inputs[key] = value.copy()
        size = value[masked].shape
        inputs[key][masked] = rng.choice(POISON, size) if value.dtype.kind == "f" else rng.integers(-99, 99, size)
    check(case, inputs, dtype)


def test_the_poison_would_be_seen():
    case = next(c for c in CASES if c["what"] == "loss/tis")
    inputs = arrays(case["inputs"], np.float64)
    inputs["advantages"] = np.where(inputs["mask"] == 1, np.nan, inputs["advantages"])
    assert not np.isfinite(evaluate(case["what"], inputs)["loss"])
