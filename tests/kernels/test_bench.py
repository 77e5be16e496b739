"""The benchmark at tiny shapes: every family gives rows, and one that does not fit is a row too."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from rlx_kernels import bench

TINY = {
    "logprob": "16,8,64",
    "attention": "32,2,1,8",
    "grouped_matmul": "32,8,8,2",
    "delta_rule": "32,2,4,4",
    "delta_rule_channels": "32,2,4,4",
}


def run(tmp_path, family, *options):
    path = tmp_path / "rows.json"
    given = ["--families", family, "--shapes", TINY[family], "--rounds", "1", "--rate-size", "64", "--candidates", "2"]
    bench.main([*given, "--json", str(path), *options])
    return json.loads(path.read_text())["rows"]


@pytest.mark.parametrize("family", TINY)
def test_every_family_gives_rows(family, tmp_path, capsys):
    rows = run(tmp_path, family)
    assert len(rows) >= 2
    assert all(row["seconds"] > 0 and row["temporary_bytes"] >= 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(f"| {row['case']} |" in printed for row in rows)


def product_flop(case):
    """XLA's count of a dense case, whose products it neither skips nor repeats."""
    return jax.jit(case.function).lower(*case.arguments).compile().cost_analysis()["flops"]


def test_the_unavoidable_products_of_attention():
    """Dense scores are 8 times those that packing and causality leave; the width hides the softmax."""
    counted = []
    for passes in ("forward", "frozen", "backward"):
        settings = bench.Settings(jnp.dtype("float32"), 0, passes)
        dense = bench.attention_cases((64, 1, 1, 256), settings)[1]
        counted.append(product_flop(dense) / (8 * dense.flop))
    assert all(0.95 < ratio < 1.1 for ratio in counted), counted


def exhausted(x):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def broken(x):
    raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def with_cases(monkeypatch, *functions):
    cases = [bench.Case(f.__name__, f, (jnp.ones(4),), 1e3) for f in functions]
    monkeypatch.setitem(bench.FAMILIES, "logprob", (lambda shape, settings: cases, [(4,)]))


@pytest.mark.parametrize("compiled", [False, True], ids=["compiling", "running"])
def test_a_case_that_does_not_fit_is_a_row(compiled, monkeypatch, tmp_path, capsys):
    with_cases(monkeypatch, exhausted, jnp.sin)
    if compiled:
        monkeypatch.setattr(bench, "_compile", lambda case: Program(case.function))
    first, second = run(tmp_path, "logprob")
    assert first["seconds"] is None
    assert second["seconds"] > 0
    assert "| exhausted | did not fit |" in capsys.readouterr().out


class Program:
    """Compiled by a backend that says nothing of memory."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def memory_analysis(self):
        return None


def test_rows_before_a_failure_are_kept(monkeypatch, tmp_path):
    with_cases(monkeypatch, broken)
    path = tmp_path / "rows.json"
    monkeypatch.setitem(bench.FAMILIES, "attention", (bench.attention_cases, [(32, 2, 1, 8)]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        bench.main(["--families", "attention", "logprob", "--rounds", "1", "--rate-size", "64", "--json", str(path)])
    assert [row["case"] for row in json.loads(path.read_text())["rows"]] == ["attention", "dense mask"]
