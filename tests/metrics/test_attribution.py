"""Which cause is named, by what each probe leaves of the gap."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.metrics.attribution import Probe, agrees, attribute

RNG = np.random.default_rng(0)
TRAINER = -RNG.exponential(2.0, 500).astype(np.float32)
STALE = TRAINER + RNG.normal(0, 0.3, 500).astype(np.float32)
ROUNDED = TRAINER + RNG.normal(0, 0.01, 500).astype(np.float32)


def test_rounding_is_clean_and_a_tail_is_not():
    noise = RNG.normal(0, 3e-4, 500).astype(np.float32)
    assert attribute(TRAINER + noise, TRAINER, [], "float32").ok
    noise[:10] += 0.5
    assert attribute(TRAINER + noise, TRAINER, [], "float32").cause == "unknown"


def test_bfloat16_is_given_more_room():
    assert attribute(ROUNDED, TRAINER, [], "bfloat16").ok
    assert not attribute(ROUNDED, TRAINER, [], "float32").ok


def test_the_probe_that_leaves_least_is_the_cause():
    half = Probe("head", "half way", (TRAINER + STALE) / 2)
    whole = Probe("stale version", "against version 0", STALE)
    found = attribute(STALE, TRAINER, [half, whole], "float32")
    assert found.cause == "stale version"
    assert "against version 0" in found.evidence
    assert [o.explains for o in found.outcomes] == [True, True]


def test_rounding_that_another_program_repeats_in_part_is_named():
    partly = Probe("dtype", "computed in bfloat16", ROUNDED + RNG.normal(0, 0.005, 500).astype(np.float32))
    assert attribute(ROUNDED, TRAINER, [partly], "float32").cause == "dtype"
    other = Probe("temperature", "at 0.9", partly.predicted)
    assert attribute(ROUNDED, TRAINER, [other], "float32").cause == "unknown"


def test_a_probe_that_speaks_of_few_tokens_is_no_evidence():
    predicted = np.full(500, np.nan, np.float32)
    predicted[:20] = STALE[:20]
    assert (
        attribute(STALE, TRAINER, [Probe("template", "with another prompt", predicted)], "float32").cause == "unknown"
    )


def test_a_clean_run_is_clean_whatever_the_probes_leave():
    probes = [Probe("temperature", "at 1.001", TRAINER), Probe("stale version", "against itself", TRAINER)]
    assert attribute(TRAINER, TRAINER, probes, "float32").cause == "clean"


def test_nothing_to_compare_is_an_error():
    with pytest.raises(ValueError, match="no written token"):
        attribute(np.empty(0), np.empty(0), [], "float32")
    assert not agrees(np.empty(0), 1.0)
