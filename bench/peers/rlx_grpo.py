"""rlx's GRPO on the work of `work.py`, step by step on command: `python -m bench.peers.start_rlx MODEL CACHE LANES`.

What runs is a training run as `rlx train` opens it, and the phases of its loop (`rollout`, `select`, `learn`, `report`)
with everything that they do in one: the embedded engine, grading in worker processes, packing, the update, publishing,
and records of every sample, metric and the ledger on disk and for TensorBoard. Left out are the evaluations and
checkpoints around the loop, which the other sides do not make either. Two things differ from a run of a recipe: the
scoring function, and that the engine is given no stop tokens.

CACHE is a directory for XLA's persistent cache, "" = everything is compiled anew; LANES is `engine.lanes`.
`python -m bench.peers.start_rlx --write MODEL` writes the model and tokenizer that all sides read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import rlx.run
from bench.peers import work
from bench.peers.scoring import score
from configs import base
from rlx.config.parse import parse
from rlx.config.schema import Config
from rlx.envs.graders import GraderPool
from rlx.feed import Feed
from rlx.models.hf import save_params
from rlx.models.presets import dense
from rlx.models.spec import init_params
from rlx.processes import ALONE
from rlx.scoring import score_shown
from rlx.serving import embedded
from rlx.train import learn, report, rollout, select, whole_moment

ARCH = dense(
    "qwen3",
    vocab_size=work.VOCABULARY,
    hidden_size=work.WIDTH,
    intermediate_size=work.FFN,
    num_layers=work.LAYERS,
    num_heads=work.HEADS,
    num_kv_heads=work.KV_HEADS,
    head_dim=work.HEAD_DIM,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    tied=True,
    max_positions=2048,
)
TASKS = 512
TEMPLATE = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"


def write_model(directory: Path) -> None:
    """Random weights, and a tokenizer whose tokens are the ids themselves."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    save_params(directory, ARCH, init_params(ARCH, jax.random.key(0)), "float32")
    vocabulary = {str(i) if i else work.WORD_0: i for i in range(work.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=work.WORD_0))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": work.WORD_0, "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def make_config(model: str, runs: Path, cache: str, lanes: int) -> Config:
    tasks = runs / "tasks.jsonl"
    lines = [json.dumps({"question": work.question(i), "answer": "2", "grader": "exact"}) for i in range(TASKS)]
    tasks.write_text("\n".join(lines), encoding="utf-8")
    c = base.get_config()
    c.run.name, c.run.directory, c.run.compilation_cache = "grpo", str(runs), cache
    c.model.path = model
    c.lora.rank = 0
    c.tasks.sources.ids = base.source(path=str(tasks))
    c.tasks.held_out = 1
    c.grader.extract = "all"
    c.rollout.tasks_per_update, c.rollout.group_size = work.PROMPTS, work.SAMPLES
    c.rollout.max_new_tokens, c.rollout.head_size = work.NEW_TOKENS, 0
    c.engine.slots, c.engine.context = work.SEQUENCES, work.PROMPT_TOKENS + work.NEW_TOKENS
    c.engine.prefill_buckets, c.engine.prefill_rows = (work.PROMPT_TOKENS,), work.PROMPTS
    c.engine.steps_per_dispatch, c.engine.lanes = work.NEW_TOKENS, lanes
    c.learner.updates = 10**6
    c.learner.learning_rate, (c.learner.b1, c.learner.b2) = work.LEARNING_RATE, work.BETAS
    c.learner.eps, c.learner.max_grad_norm = work.EPSILON, work.CLIP_NORM
    # A group in a row: its prompt is computed once. Micro-batches of 1,056 tokens are as fast as all rows at once on a
    # CPU, with a quarter of the activations.
    samples = work.SAMPLES
    c.learner.row_prefix, c.learner.row_samples = work.PROMPT_TOKENS, samples
    c.learner.row_tokens = work.PROMPT_TOKENS + samples * work.NEW_TOKENS
    c.learner.row_targets, c.learner.micro_batch_rows = samples * work.NEW_TOKENS, 16 // samples
    c.objective.advantage, c.objective.loss, c.objective.centering = "group_std", "ppo_clip", "off"
    return parse(c)


def step(run: rlx.run.Run, feed: Feed) -> dict[str, float]:
    """One turn of the loop in `rlx.train.train`."""
    run.preemption.check()
    compiled = run.compilations.count
    batch, version = rollout(run, feed), run.version
    packed = select(run, batch)
    scores = score_shown(run, batch.groups)
    learned = learn(run, feed, batch, packed)
    run.progress.update += 1
    run.publish(feed, version)
    report(run, feed, batch, packed, learned, scores, compiled=run.compilations.count > compiled)
    whole_moment(run, feed)
    jax.block_until_ready(run.state)
    return {
        "generated": sum(s.num_written for g in batch.groups for s in g.samples),
        "trained": int(packed.mask.sum()),
        "advantage": float(np.abs(packed.advantages[packed.mask]).mean()),
    }


def matrix_product() -> Callable[[], object]:
    square = jnp.ones((work.MATRIX, work.MATRIX), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: product(square, square).block_until_ready()


@contextlib.contextmanager
def opened(config: Config) -> Iterator[tuple[rlx.run.Run, Feed]]:
    """A run whose engine stops at no token."""
    with rlx.run.open_training(config, ALONE) as run:
        never = dataclasses.replace(run.model.tokenizer, stop_token_ids=())
        run.model = dataclasses.replace(run.model, tokenizer=never)
        run.serving = embedded(run.config, run.model, run.policy(), run.version, run.ledger)
        with run.open_feed() as feed:
            yield run, feed


def main() -> None:
    if sys.argv[1] == "--write":
        write_model(Path(sys.argv[2]))
        return
    channel = work.Channel(matrix_product)
    # A recipe chooses among rlx's graders; this is the one place that a scoring function of one's own goes through.
    rlx.run.GraderPool = functools.partial(GraderPool, score=score)  # type: ignore[assignment]
    with contextlib.ExitStack() as stack:
        runs = stack.enter_context(tempfile.TemporaryDirectory())
        model, cache, lanes = sys.argv[1:]
        run, feed = stack.enter_context(opened(make_config(model, Path(runs), cache, int(lanes))))
        leaves = jax.tree.leaves(run.state.trainable)
        channel.say(parameters=sum(x.size for x in leaves), dtypes=sorted({str(x.dtype) for x in leaves}))
        while channel.step_is_wanted():
            channel.say(**step(run, feed))
        channel.say(seconds=run.timers.totals)
