import math

import pytest

from rlx.config.checks import check
from rlx.config.errors import ConfigError
from rlx.config.parse import parse
from rlx.config.schema import Config


def problems(config: Config) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check(config)
    return caught.value.problems


def test_a_right_configuration_passes(tree):
    check(parse(tree))
    check(changed(tree, SHAPED))


SHAPED = {"learner.row_samples": 2, "learner.row_prefix": 96, "learner.row_tokens": 416}

# Every row: the keys to set, the key that must be named, a part of the way out.
WRONG = [
    ({"rollout.group_size": 0}, "rollout.group_size", "must be at least 1"),
    ({"rollout.group_size": 1}, "rollout.group_size", "at least 2"),
    ({"rollout.group_size": 1, "objective.advantage": "none"}, "rollout.filter_no_signal", "set it to False"),
    ({"rollout.temperature": 0.0}, "rollout.temperature", "above 0"),
    ({"rollout.temperature": math.nan}, "rollout.temperature", "above 0"),
    ({"rollout.max_new_tokens": 256}, "rollout.max_new_tokens", "config.engine.context = 256"),
    ({"rollout.top_p": 0.9}, "rollout.top_p", "set it to 1.0"),
    ({"rollout.top_k": 40}, "rollout.top_k", "set it to 0"),
    ({"rollout.min_p": 0.05}, "rollout.min_p", "set it to 0.0"),
    ({"rollout.head_size": 0}, "rollout.head_size", "config.objective.centering = 'tis'"),
    ({"rollout.no_signal_limit": 0}, "rollout.no_signal_limit", "at least 1"),
    ({"producer.sessions_in_flight": 0}, "producer.sessions_in_flight", "at least 1"),
    ({"producer.max_policy_lag": -1}, "producer.max_policy_lag", "0 or more"),
    ({"producer.backoff_s": 0.0}, "producer.backoff_s", "above 0"),
    ({"producer.engine_admission": 32}, "producer.engine_admission", "config.engine.slots = 64"),
    ({"producer.http_admission": 63}, "producer.http_admission", "set at least that, or 0"),
    ({"producer.max_concurrent_samples": 95}, "producer.max_concurrent_samples", "sessions_in_flight = 96"),
    ({"producer.environment_timeout_s": 9.0}, "producer.environment_timeout_s", "config.grader.timeout_s = 10.0"),
    ({"producer.train_token_limit": 257}, "producer.train_token_limit", "config.learner.row_tokens = 256"),
    ({"producer.session_token_limit": 193}, "producer.session_token_limit", "set at most 192"),
    (
        {"producer.session_token_limit": 150, "producer.train_token_limit": 149},
        "producer.session_token_limit",
        "config.producer.train_token_limit = 149",
    ),
    ({"engine.prefill_buckets": (64, 32)}, "engine.prefill_buckets", "ascending"),
    ({"engine.prefill_buckets": ()}, "engine.prefill_buckets", "ascending"),
    ({"engine.prefill_buckets": (32, 512)}, "engine.prefill_buckets", "config.engine.context = 256"),
    ({"engine.prefill_rows": 65}, "engine.prefill_rows", "config.engine.slots = 64"),
    ({"engine.lanes": 0}, "engine.lanes", "at least 1"),
    ({"engine.lanes": 3}, "engine.lanes", "must divide config.engine.slots = 64"),
    ({"engine.lanes": 16}, "engine.prefill_rows", "config.engine.slots / lanes = 4"),
    ({"engine.kind": "sglang", "engine.lanes": 2}, "engine.lanes", "the sglang engine has no lanes"),
    ({"learner.row_tokens": 128}, "learner.row_tokens", "set at least 256"),
    ({"plan.sequence_tokens": 257}, "plan.sequence_tokens", "config.learner.row_tokens = 256"),
    ({"plan.efficiency": 1e-300}, "plan.efficiency", "[0.001, 1]"),
    ({"learner.row_targets": 512}, "learner.row_targets", "config.learner.row_tokens = 256"),
    ({"learner.row_targets": 32}, "learner.row_targets", "set at least 64"),
    ({"learner.learning_rate": -1e-4}, "learner.learning_rate", "above 0"),
    ({"learner.learning_rate": math.inf}, "learner.learning_rate", "finite"),
    ({"objective.kl_coefficient": math.nan}, "objective.kl_coefficient", "finite"),
    ({"learner.b2": 1.0}, "learner.b2", "[0, 1)"),
    ({"learner.warmup_updates": 101}, "learner.warmup_updates", "config.learner.updates = 100"),
    ({"learner.final_learning_rate_fraction": 0.1}, "learner.final_learning_rate_fraction", "'cosine'"),
    ({"learner.final_learning_rate_fraction": 2.0}, "learner.final_learning_rate_fraction", "[0, 1]"),
    (
        {"learner.logprob_implementation": "reference", "learner.head_precision": "bfloat16_3x"},
        "learner.head_precision",
        "set one of auto, bfloat16, float32",
    ),
    (
        {"model.dtype": "bfloat16", "learner.head_precision": "float32"},
        "learner.head_precision",
        "set the model's dtype to 'float32'",
    ),
    ({"lora.rank": -1}, "lora.rank", "0 or more"),
    ({"lora.alpha": 0.0}, "lora.alpha", "above 0"),
    ({"lora.targets": ("q_porj",)}, "lora.targets[0]", "the nearest is 'q_proj'"),
    ({"lora.targets": ("q_proj", "q_proj")}, "lora.targets", "q_proj twice"),
    ({"lora.targets": ()}, "lora.targets", "config.lora.rank = 0"),
    ({"model.path": ""}, "model.path", "make model"),
    ({"model.path": "/nowhere/at/all"}, "model.path", "no such directory"),
    ({"model.path": "."}, "model.path", "no config.json"),
    ({"tasks.sources": {}}, "tasks.sources", "source(...)"),
    ({"tasks.held_out": 2000}, "tasks.held_out", "none of the 2000 tasks"),
    ({"tasks.sources.chain.weight": 0.0}, "tasks.sources.chain.weight", "above 0"),
    ({"tasks.sources.chain.size": 0}, "tasks.sources.chain.size", "at least 1"),
    ({"tasks.sources.chain.path": "/nowhere.jsonl"}, "tasks.sources.chain", "exactly one"),
    ({"tasks.sources.chain.dataset": ""}, "tasks.sources.chain", "exactly one"),
    ({"sft.steps": 10}, "sft.path", "config.sft.steps = 10"),
    ({"grader.timeout_s": 1e7}, "grader.timeout_s", "at most 86400"),
    ({"engine.steps_per_dispatch": 2**40}, "engine.steps_per_dispatch", "at most 1024"),
    ({"learner.row_prefix": 8}, "learner.row_prefix", "set config.learner.row_prefix = 0"),
    ({"learner.row_samples": 2, "learner.row_prefix": 96}, "learner.row_tokens", "at least 160; set 416, or more by"),
    ({"learner.row_samples": 2, "learner.row_prefix": 200}, "learner.row_tokens", "at least 200; set 600"),
    ({"learner.row_samples": 2}, "learner.row_prefix", "set at least 1"),
    ({**SHAPED, "rollout.group_size": 1, "rollout.filter_no_signal": False}, "learner.row_samples", "group_size = 1"),
    ({**SHAPED, "cluster.context_parallel": "ring"}, "cluster.context_parallel", "set this to 'gather', or that to 0"),
    ({"learner.row_samples": -1}, "learner.row_samples", "0 or more"),
    ({**SHAPED, "learner.row_tokens": 10**4 + 1}, "learner.row_tokens", "by a multiple of 2"),
    ({**SHAPED, "learner.prefix_sharing": False}, "learner.row_samples", "config.learner.prefix_sharing to True"),
    ({**SHAPED, "model.attention_block": 64}, "model.attention_block", "set config.model.attention_block = 0"),
    ({"learner.micro_batch_rows": 10**12}, "learner.micro_batch_rows", "at most 64"),
    ({"rollout.temperature": 1e-30}, "rollout.temperature", "at least 0.001"),
    ({"eval.temperature": 0.0}, "eval.temperature", "config.eval.attempts_per_task to 1"),
    ({"run.name": ".."}, "run.name", "one folder name"),
    ({"sft.path": "examples.jsonl"}, "sft.steps", "is not read"),
    ({"objective.advantage": "batch_whitened"}, "rollout.filter_no_signal", "set False"),
    ({"eval.k": (1, 4)}, "eval.k", "config.eval.attempts_per_task = 2"),
    ({"eval.k": (0,)}, "eval.k", "at least 1"),
    ({"eval.k": (1, 1)}, "eval.k", "distinct"),
    ({"eval.confidence": 95.0}, "eval.confidence", "e.g. 0.95"),
    ({"eval.every": 5, "tasks.held_out": 0}, "eval.every", "config.tasks.held_out"),
    ({"checkpoint.every": 0}, "checkpoint.every", "at least 1"),
    ({"run.name": "a/b"}, "run.name", "config.run.directory"),
    ({"run.directory": ""}, "run.directory", "'runs'"),
    ({"run.seed": 2**32}, "run.seed", "below 2**32"),
    ({"objective.tis_cap": 0.0}, "objective.tis_cap", "at least 1"),
    ({"objective.loss": "reinforce"}, "objective.loss", "'none' goes with reinforce"),
    (
        {"objective.distill.weights": (math.nan,), "objective.distill.form": "sampled"},
        "objective.distill.weights",
        "above 0",
    ),
]


def changed(tree, changes) -> Config:
    values = tree.to_dict()
    for path, value in changes.items():
        *sections, key = path.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[key] = value
    return parse(values)


@pytest.mark.parametrize("changes, key, way_out", WRONG, ids=[str(row[0]) for row in WRONG])
def test_a_wrong_configuration_is_named_with_its_value_and_the_way_out(tree, changes, key, way_out):
    lines = problems(changed(tree, changes))
    named = [line for line in lines if line.startswith((f"config.{key} = ", f"config.{key} has "))]
    assert any(way_out in line for line in named), lines


def test_a_source_name_with_a_slash_is_refused(tree):
    values = tree.to_dict()
    values["tasks"]["sources"]["a/b"] = values["tasks"]["sources"]["chain"]
    assert any(line.startswith("config.tasks.sources.a/b: ") for line in problems(parse(values)))


def test_a_task_file_that_does_not_exist_is_named(tree):
    changes = {"tasks.sources.chain.dataset": "", "tasks.sources.chain.path": "/nowhere.jsonl"}
    assert "config.tasks.sources.chain.path = '/nowhere.jsonl': no such file" in problems(changed(tree, changes))


def test_every_contradiction_comes_at_once(tree):
    changes = {"checkpoint.keep": 0, "model.path": "", "eval.k": ()}
    keys = [line.split(" = ")[0] for line in problems(changed(tree, changes))]
    assert keys == ["config.checkpoint.keep", "config.model.path", "config.eval.k"]


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.rank": 0, "lora.targets": ()},
        {"rollout.group_size": 1, "rollout.filter_no_signal": False, "objective.advantage": "none"},
        {"rollout.head_size": 0, "objective.centering": "off"},
        {"learner.schedule": "cosine", "learner.final_learning_rate_fraction": 0.1},
        {"learner.warmup_updates": 100},
        {"learner.row_targets": 64},
        {"eval.temperature": 0.0, "eval.attempts_per_task": 1, "eval.k": (1,)},
    ],
    ids=str,
)
def test_the_way_out_is_accepted(tree, changes):
    check(changed(tree, changes))


def test_sessions_may_be_longer_than_what_is_trained_if_that_is_meant(tree):
    tree.producer.session_token_limit, tree.producer.train_token_limit = 150, 100
    assert len(problems(parse(tree))) == 1
    tree.producer.sessions_beyond_training = True
    check(parse(tree))
