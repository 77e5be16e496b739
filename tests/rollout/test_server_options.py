"""Servers and their clients from a configuration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from configs import base, quickstart_sglang
from rlx.config.errors import ConfigError
from rlx.config.inference_checks import ONLY_SERVERS, inference_problems
from rlx.config.parse import parse
from rlx.config.profiles import PROFILES, admission, profile
from rlx.models.hf import read_architecture
from rlx.models.kinds import recurrent
from rlx.rollout import server_options

ARCHITECTURES = Path(__file__).parents[2] / "configs" / "architectures"


def make(tmp_path, *, layers: list[str] | None = None, **changes):
    """The recipe with changes of `inference`, and a model that has these layers."""
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": layers} if layers else {}))
    c = quickstart_sglang.get_config()
    c.model.path = str(tmp_path)
    c.producer.engine_admission, c.inference.radix_cache = 0, "auto"  # the profile's
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        c[section or "inference"][name] = value
    return parse(c)


def arguments(tmp_path, **changes) -> str:
    return " ".join(server_options.server_arguments(make(tmp_path, **changes), 0))


def test_a_server_is_told_what_the_run_needs_of_it(tmp_path):
    said = arguments(tmp_path)
    for part in ("--device=cpu", "--dtype=float32", "--max-running-requests=64", "--disable-radix-cache"):
        assert part in said
    assert f"--max-total-tokens={64 * (96 + server_options.SPARE_POSITIONS)}" in said
    assert f"--weight-version={server_options.UNPUBLISHED}" in said


@pytest.mark.parametrize("name, whole", PROFILES.items())
def test_a_profile_is_applied_whole(tmp_path, name, whole):
    config = make(tmp_path, profile=name, device="cuda", memory_fraction=0.4)
    assert profile(config) == whole
    assert admission(config) == whole.admission
    said = " ".join(server_options.server_arguments(config, 0))
    assert f"--max-running-requests={whole.admission}" in said
    assert ("--disable-radix-cache" in said) != whole.radix_cache
    assert server_options.server_fleet_options(config).http_admission == whole.http_admission
    options = server_options.engine_options(config, 512, 8, (1,))
    assert (options.admission, options.in_flight) == (whole.admission, whole.http_admission)


def test_each_server_takes_gpus_and_a_port_of_its_own(tmp_path):
    config = make(tmp_path, device="cuda", count=2, tensor_parallel=4, first_gpu=1, first_port=30000)
    first, second = server_options.server_specs(config, tmp_path)
    assert "--base-gpu-id=1" in first.arguments
    assert "--base-gpu-id=5" in second.arguments
    assert [first.port, second.port] == [30000, 30001]


def test_given_arguments_come_last(tmp_path):
    assert arguments(tmp_path, arguments=("--max-running-requests=2",)).endswith("--max-running-requests=2")


def test_adapters_have_room(tmp_path):
    said = arguments(tmp_path, weights="adapter")
    assert "--enable-lora --max-lora-rank=64 --max-loras-per-batch=2 --lora-target-modules q_proj" in said


def test_a_hybrid_model_behind_a_cache_keeps_a_state_that_is_not_rounded(tmp_path):
    layers = ["linear_attention", "full_attention"]
    assert "--mamba-ssm-dtype=float32" in arguments(tmp_path, layers=layers, radix_cache="on")
    config = make(tmp_path, layers=layers, radix_cache="on", state_dtype="bfloat16")
    with pytest.raises(ConfigError, match="state_dtype"):
        server_options.check_state(config)
    server_options.check_state(make(tmp_path, layers=layers, radix_cache="off", state_dtype="bfloat16"))


def test_keys_come_from_the_environment(tmp_path, monkeypatch):
    config = make(tmp_path, api_key_variable="A_KEY", admin_key_variable="ADMIN_KEY")
    assert len(inference_problems(config)) == 2
    monkeypatch.setenv("A_KEY", "one")
    monkeypatch.setenv("ADMIN_KEY", "two")
    assert inference_problems(config) == []
    (spec,) = server_options.server_specs(config, tmp_path)
    assert {"RLX_API_KEY": "one", "RLX_ADMIN_API_KEY": "two"}.items() <= spec.environment.items()
    assert "two" not in " ".join(spec.arguments)
    server = server_options.client(config, "http://a:1")
    assert (server.api_key, server.admin_key) == ("one", "two")


# Changes, then the key that the one problem names and a word of it.
WRONG = [
    ({"count": 0}, "inference.addresses", "inference.count"),
    ({"addresses": ("http://a:1",)}, "inference.addresses", "would start others"),
    ({"count": 0, "addresses": ("a:1",)}, "inference.addresses", "http://HOST:PORT"),
    ({"count": 0, "addresses": ("http://a:1", "http://a:1")}, "inference.addresses", "twice"),
    ({"router": "http://r:1"}, "inference.router", "name them all"),
    ({"first_port": 80}, "inference.first_port", "1024"),
    ({"memory_fraction": 1.0}, "inference.memory_fraction", "(0, 1)"),
    ({"profile": "colocated"}, "inference.memory_fraction", "0.4"),
    ({"profile": "olmo_h100", "radix_cache": "on"}, "inference.radix_cache", "generic"),
    ({"profile": "olmo_h100", "producer__engine_admission": 8}, "producer.engine_admission", "generic"),
    ({"tensor_parallel": 2}, "inference.tensor_parallel", "CPU"),
    ({"weights": "adapter", "lora__rank": 0}, "inference.weights", "'full'"),
    ({"weights": "adapter", "max_lora_rank": 4}, "inference.max_lora_rank", "16"),
    ({"weights": "adapter", "max_loras": 1}, "inference.max_loras", "at least 2"),
    ({"weights": "adapter", "transport": "distributed"}, "inference.transport", "'tensor'"),
    ({"transport": "distributed", "distributed_backend": "nccl"}, "inference.distributed_backend", "gloo"),
    ({"fp32_head": True, "learner__head_precision": "bfloat16"}, "inference.fp32_head", "head_precision"),
    ({"model__replay_routes": True}, "model.replay_routes", "set False"),
    ({"count": 0, "addresses": ("http://a:1",), "first_gpu": 1}, "inference.first_gpu", "set 0"),
    ({"engine__kind": "local", "transport": "tensor"}, "inference.transport", "'disk'"),
    ({"engine__kind": "local", "fp32_head": True}, "inference.fp32_head", "False"),
    ({"engine__kind": "local", "profile": "olmo_h100"}, "inference.profile", "'generic'"),
    ({"bucket_mib": 0}, "inference.bucket_mib", "above 0"),
    ({"audit__every": -1}, "audit.every", "0 (never)"),
    ({"engine__kind": "local"}, "inference.count", "'sglang'"),
]


@pytest.mark.parametrize("changes, key, part", WRONG, ids=[f"{row[1]}-{i}" for i, row in enumerate(WRONG)])
def test_what_cannot_be_had_is_refused(tmp_path, changes, key, part):
    problems = inference_problems(make(tmp_path, **changes))
    assert any(p.startswith(f"config.{key} =") and part in p for p in problems), problems


def test_what_says_nothing_of_servers_is_the_default():
    defaults = base.get_config().inference
    assert {key: defaults[key] for key in ONLY_SERVERS} == ONLY_SERVERS


@pytest.mark.parametrize("path", sorted(ARCHITECTURES.iterdir()), ids=lambda path: path.name)
def test_hybrids_are_known_by_their_own_config_json(path):
    c = quickstart_sglang.get_config()
    c.model.path = str(path)
    assert server_options.is_hybrid(parse(c)) == any(recurrent(x.mixer) for x in read_architecture(path).layers)


def test_a_hybrid_may_leave_its_layers_to_the_default_interval(tmp_path):
    config = make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"linear_num_value_heads": 4}))
    assert server_options.is_hybrid(config)


def test_the_recipe_and_its_variants_are_right(tmp_path):
    for variant in quickstart_sglang.VARIANTS:
        c = quickstart_sglang.get_config(variant)
        c.model.path = str(tmp_path)
        config = parse(c)
        assert inference_problems(config) == []
        assert dataclasses.replace(config.inference, count=0) != config.inference
