"""rlx's side of bench/vs_peers.py does the work of a step in every step."""

import functools

import pytest

import rlx.run
from bench.peers import rlx_grpo, work
from bench.peers.scoring import score
from rlx.envs.graders import GraderPool


@pytest.mark.slow
def test_every_step_trains_what_it_generated(tmp_path, monkeypatch):
    monkeypatch.setattr(rlx.run, "GraderPool", functools.partial(GraderPool, score=score))
    rlx_grpo.write_model(tmp_path / "model")
    config = rlx_grpo.make_config(str(tmp_path / "model"), tmp_path, "", lanes=2)
    with rlx_grpo.opened(config) as (run, feed):
        for step in range(3):
            did = rlx_grpo.step(run, feed)
            assert (did["generated"], did["trained"]) == (work.TOKENS, work.TOKENS)
            assert run.version == step + 1
