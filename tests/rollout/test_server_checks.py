"""Servers that are given, compared with the run's configuration by what they say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.config.errors import ConfigError
from rlx.rollout.server_checks import check_server, options
from rlx.rollout.sglang import Served
from tests.rollout.test_server_options import make

HYBRID = ["linear_attention", "full_attention"]


def served(model_type: Any = None, **settings) -> Served:
    """By a server on a CPU, with its radix cache on; config.json of these tests names no type of model."""
    said = {"tp_size": 1, "device": "cpu", "disable_radix_cache": False} | settings
    return Served("7", "/models/m", model_type, 4096, "0", said)


def problems(config, found: Served, *, given: bool = True) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_server(config, "http://a:1", found, given=given)
    return list(caught.value.problems)


def test_a_server_of_the_recipe_fits(tmp_path):
    check_server(make(tmp_path), "http://a:1", served(), given=True)
    asked = make(tmp_path, memory_fraction=0.4, fp32_head=True, arguments=("--ep-size=2", "--page-size", "16"))
    command = "--model-path=m --mem-fraction-static=0.4 --page-size 16"
    said = {"mem_fraction_static": 0.34, "enable_fp32_lm_head": True, "ep_size": 2, "launch_command": command}
    check_server(asked, "http://a:1", served(**said), given=True)


# Changes of the recipe, what the server says, and what is named.
WRONG = [
    ({}, {"tp_size": 2}, "config.inference.tensor_parallel = 1", "--tp-size=1"),
    ({}, {"device": "cuda"}, "config.inference.device = 'cpu'", "--device=cpu"),
    ({"memory_fraction": 0.4}, {"mem_fraction_static": 0.9}, "config.inference.memory_fraction = 0.4", "0.9"),
    ({"attention_backend": "fa3"}, {"attention_backend": "triton"}, "config.inference.attention_backend", "'triton'"),
    ({"fp32_head": True}, {"enable_fp32_lm_head": False}, "config.inference.fp32_head", "--enable-fp32-lm-head"),
    ({"radix_cache": "off"}, {}, "config.inference.radix_cache", "is on"),
    ({"profile": "olmo_h100"}, {}, "config.inference.radix_cache", "'olmo_h100'"),
    ({"arguments": ("--ep-size=2",)}, {"ep_size": 1}, "config.inference.arguments", "--ep-size=2"),
    ({"arguments": ("--ep-size=2",)}, {"launch_command": "--ep-size=2 --ep-size=1"}, "config.inference.arguments", "2"),
    ({"layers": HYBRID}, {"mamba_ssm_dtype": "bfloat16"}, "config.inference.state_dtype", "--mamba-ssm-dtype=float32"),
    (
        {"layers": HYBRID, "state_dtype": "bfloat16"},
        {"disable_radix_cache": True},
        "config.inference.state_dtype = 'bfloat16'",
        "as float32",
    ),
]


@pytest.mark.parametrize("changes, said, key, part", WRONG, ids=[f"{row[2]}-{i}" for i, row in enumerate(WRONG)])
def test_what_a_given_server_was_not_started_with_is_refused(tmp_path, changes, said, key, part):
    (problem,) = problems(make(tmp_path, **changes), served(**said))
    assert problem.startswith(key)
    assert part in problem
    check_server(make(tmp_path, **changes), "http://a:1", served(**said), given=False)  # started as the key says


def test_another_model_and_a_shorter_context_are_refused_of_all_servers(tmp_path):
    first, second = problems(make(tmp_path, engine__context=8192), served("llama"), given=False)
    assert "longer --context-length" in first
    assert "'llama' (/models/m)" in second


def test_options_of_a_command_line():
    assert options(["serve", "--a=1", "--b", "2", "3", "--c", "--a=4"]) == {"--a": "4", "--b": "2 3", "--c": ""}
