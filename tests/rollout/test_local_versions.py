"""Weights swapped while requests run: who wrote which token, and the cache computed anew."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.types import VersionSpan
from tests import tiny_model
from tests.rollout.serving import ask, assert_same, make_engine, serve, trainer_gap
from tests.tiny_model import ARCH

# Seven samples on three slots: some see every version, the last wait in the queue until the newest.
REQUESTS = [ask(0, 5, 2), ask(1, 12, 1), ask(2, 20, 3), ask(3, 7, 1)]


async def swapping(engine, requests, swaps):
    """Serve the requests; at each (new tokens of the engine, parameters, version) of `swaps` load those."""
    start = engine.stats.new_tokens
    running = [asyncio.create_task(engine.generate(r)) for r in requests]
    for new_tokens, params, version in swaps:
        while engine.stats.new_tokens - start < new_tokens:
            await asyncio.sleep(0)
        await engine.load(params, version)
    return await asyncio.gather(*running)


@pytest.fixture(scope="module")
def versions():
    return {version: tiny_model.params(seed=version) for version in (0, 1, 2)}


@pytest.fixture(scope="module")
def written(versions):
    """[(request, completion)] across two swaps."""
    engine = make_engine(ARCH, versions[0])
    swaps = [(1, versions[1], 1), (17, versions[2], 2)]
    found = asyncio.run(swapping(engine, REQUESTS, swaps))
    assert engine.version == 2
    return [(r, c) for r, completions in zip(REQUESTS, found, strict=True) for c in completions]


def version_of_each_token(completion):
    version = np.full(len(completion.tokens), -1)
    for span in completion.version_spans:
        version[span.start : span.end] = span.version
    return version


def test_spans_cover_every_token_once_in_order(written):
    for _, completion in written:
        spans = completion.version_spans
        assert [s.start for s in spans] == [0, *(s.end for s in spans[:-1])]
        assert all(s.start < s.end for s in spans)
        assert spans[-1].end == len(completion.tokens) == 10
        assert [s.version for s in spans] == sorted({s.version for s in spans})
    seen = [tuple(s.version for s in c.version_spans) for _, c in written]
    assert (0, 1) in {versions[:2] for versions in seen}
    assert seen[-1] == (2,)
    assert {v for versions in seen for v in versions} == {0, 1, 2}


@pytest.mark.parametrize("version", [0, 1, 2])
def test_log_probs_are_of_the_recorded_version(written, versions, version):
    """The learner with that version's weights finds them, over tokens that earlier versions wrote."""
    masks = [version_of_each_token(c) == version for _, c in written]
    assert trainer_gap(ARCH, versions[version], written, masks) < 1e-4


def test_a_mislabelled_token_is_found(written, versions):
    """One token too many in a span is more than the tolerance away."""
    mixed = [i for i, (_, c) in enumerate(written) if len(c.version_spans) > 1]
    assert mixed
    for i in mixed:
        first, second = written[i][1].version_spans[:2]
        masks = [np.zeros(10, bool) for _ in written]
        masks[i][second.start] = True
        assert trainer_gap(ARCH, versions[second.version], written, masks) < 1e-4
        assert trainer_gap(ARCH, versions[first.version], written, masks) > 1e-3


def test_what_was_written_before_a_swap_stays(written, versions):
    plain = serve(make_engine(ARCH, versions[0]), REQUESTS)
    wanted = [c for completions in plain for c in completions]
    for (_, got), whole in zip(written, wanted, strict=True):
        old = int((version_of_each_token(got) == 0).sum())
        np.testing.assert_array_equal(got.tokens[:old], whole.tokens[:old])
        np.testing.assert_array_equal(got.logprobs[:old], whole.logprobs[:old])
    assert any(not np.array_equal(got.tokens, whole.tokens) for (_, got), whole in zip(written, wanted, strict=True))


def test_loading_the_same_weights_changes_nothing(versions):
    """The cache computed anew is the cache; the next token is drawn with the same randomness. Only spans tell."""
    engine = make_engine(ARCH, versions[0])
    wanted = serve(engine, REQUESTS)
    found = asyncio.run(swapping(engine, REQUESTS, [(n, versions[0], n) for n in (1, 12, 40)]))
    for got, same in zip(found, wanted, strict=True):
        for x, y in zip(got, same, strict=True):
            assert_same(dataclasses.replace(x, version_spans=y.version_spans), y)
    assert max(len(c.version_spans) for completions in found for c in completions) > 1


def test_loading_between_requests(versions):
    engine = make_engine(ARCH, versions[0])
    before = serve(engine, REQUESTS[:1])[0][0]
    asyncio.run(engine.load(versions[1], 7))
    after = serve(engine, REQUESTS[:1])[0][0]
    assert before.version_spans == (VersionSpan(0, 0, 10),)
    assert after.version_spans == (VersionSpan(7, 0, 10),)
    assert_same(
        after,
        dataclasses.replace(
            serve(make_engine(ARCH, versions[1]), REQUESTS[:1])[0][0], version_spans=after.version_spans
        ),
    )
