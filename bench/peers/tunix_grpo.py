"""tunix's GRPO on the work of `work.py`, step by step on command: `python bench/peers/tunix_grpo.py MODEL`.

What runs is `GRPOLearner.train` over an `RLCluster` with the vanilla rollout, everything on one device; the iterator
over its data waits for the command, so a step is exactly what the learner does between two batches. Choices made for
it: one micro-batch for rollout and update (64 sequences), a key/value cache of the length needed, no
rematerialisation, no reference model (beta 0), no checkpoints. Its tokenizer is the one below, whose ends lie behind
the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import work
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rl_cluster import ClusterConfig, RLCluster, RLTrainingConfig, Role
from tunix.rl.rollout.base_rollout import RolloutConfig


class IdTokenizer:
    """Token ids written as numbers."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none

    def eos_id(self) -> int:
        return work.END

    def pad_id(self) -> int:
        return work.PAD


def load_model(path: str, mesh: jax.sharding.Mesh) -> nnx.Module:
    config = qwen3.ModelConfig(
        num_layers=work.LAYERS,
        vocab_size=work.VOCABULARY,
        embed_dim=work.WIDTH,
        hidden_dim=work.FFN,
        num_heads=work.HEADS,
        head_dim=work.HEAD_DIM,
        num_kv_heads=work.KV_HEADS,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        use_tied_embedding=True,
    )
    return create_model_from_safe_tensors(path, config, mesh, dtype=jnp.float32)


def make_cluster(model: nnx.Module, mesh: jax.sharding.Mesh) -> RLCluster:
    beta1, beta2 = work.BETAS
    adam = optax.adam(work.LEARNING_RATE, b1=beta1, b2=beta2, eps=work.EPSILON)
    training = RLTrainingConfig(
        actor_optimizer=optax.chain(optax.clip_by_global_norm(work.CLIP_NORM), adam),
        eval_every_n_steps=10**9,
        max_steps=10**9,
        mini_batch_size=work.PROMPTS,
        train_micro_batch_size=work.PROMPTS,
    )
    rollout = RolloutConfig(
        max_tokens_to_generate=work.NEW_TOKENS,
        max_prompt_length=work.PROMPT_TOKENS,
        kv_cache_size=work.PROMPT_TOKENS + work.NEW_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
    )
    roles = dict.fromkeys((Role.ACTOR, Role.REFERENCE, Role.ROLLOUT), mesh)
    config = ClusterConfig(role_to_mesh=roles, training_config=training, rollout_config=rollout)
    return RLCluster(actor=model, tokenizer=IdTokenizer(), cluster_config=config)


class Counter:
    """What the update is given, noted on its way."""

    def __init__(self, cluster: RLCluster) -> None:
        self._update = cluster.update_actor
        self.examples: list = []
        cluster.update_actor = self

    def __call__(self, examples: list, *arguments: object) -> None:
        self.examples = examples
        self._update(examples, *arguments)

    def counts(self) -> dict[str, float]:
        (example,) = self.examples
        return {
            "generated": int(example.completion_ids.size),
            "trained": int(example.completion_mask.sum()),
            "advantage": float(jnp.abs(example.advantages).mean()),
        }


def rewards(prompts: list[str], completions: list[str], **_: object) -> list[float]:
    return [work.share_of_even(text) for text in completions]


def batches(channel: work.Channel, model: nnx.Module, counter: Counter) -> Iterator[dict[str, np.ndarray]]:
    at = 0
    while channel.step_is_wanted():
        yield {"prompts": np.array([work.question(at + i) for i in range(work.PROMPTS)])}
        at += work.PROMPTS
        jax.block_until_ready(nnx.state(model))
        channel.say(**counter.counts())


def matrix_product():
    square = jnp.ones((work.MATRIX, work.MATRIX), jnp.float32)
    product = jax.jit(jnp.matmul)
    return lambda: product(square, square).block_until_ready()


def main() -> None:
    channel = work.Channel(matrix_product)
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    model = load_model(sys.argv[1], mesh)
    cluster = make_cluster(model, mesh)
    counter = Counter(cluster)
    config = GRPOConfig(num_generations=work.SAMPLES, num_iterations=1, beta=0.0)
    learner = GRPOLearner(cluster, config, rewards)
    trained = nnx.state(cluster.actor_trainer.model, nnx.Param)
    leaves = jax.tree.leaves(trained)
    channel.say(parameters=sum(x.size for x in leaves), dtypes=sorted({str(x.dtype) for x in leaves}))
    learner.train(batches(channel, cluster.actor_trainer.model, counter))


if __name__ == "__main__":
    main()
