"""`rlx train` on functions with hidden tests: programs run in sandboxes, the share of assertions is the reward."""

import json

import pytest

from rlx import train
from rlx.metrics.ledger import Ledger
from tests import tiny_run, tiny_tools

# Right where there are too few numbers for a window, which the hidden tests ask for now and then.
PROGRAM = "```run_python\ndef solve(numbers):\n    return None\n```"
SOURCE = """
    options = {{"kinds": ("windows",), "tests": 12}}
    c.tasks.sources = {{
        "code": base.source(dataset="functions", environment="code", size=12, partial_credit=True, options=options)
    }}
    c.engine.context = 1024
    c.engine.prefill_buckets = (768,)
    c.producer.session_token_limit = 900
    c.learner.row_tokens = 1024
    c.rollout.filter_no_signal = False
    return c
"""


@pytest.mark.slow
def test_programs_are_graded_by_hidden_tests_while_training(tmp_path):
    model = tiny_tools.build_model(tmp_path / "model", PROGRAM)
    described = tmp_path / "model" / "config.json"
    description = {**json.loads(described.read_text()), "max_position_embeddings": 1024}
    described.write_text(json.dumps(description), encoding="utf-8")
    recipe = tmp_path / "recipe.py"
    text = tiny_tools.RECIPE.rpartition("    return c")[0] + SOURCE.lstrip("\n")
    recipe.write_text(text.format(runs=str(tmp_path / "runs"), model=model, tasks=""), encoding="utf-8")
    changes = {"learner__updates": 1, "metrics__tensorboard": False, "run__name": "code"}
    assert train.main(["rlx train", *tiny_run.arguments(recipe, **changes)]) == 0

    run = tmp_path / "runs" / "code"
    samples = tiny_run.samples(run)
    programs = [
        s for s in samples if s["grade"]["extracted"] == PROGRAM.removeprefix("```run_python\n").removesuffix("\n```")
    ]
    assert any(0 < s["reward"] < 1 for s in programs)
    assert all("of 12 assertions hold" in s["grade"]["detail"] for s in programs)
    assert all(s["reward"] == 0 and s["grade"]["detail"] for s in samples if s not in programs)
    books = Ledger()
    books.set_state(json.loads((run / "ledger.json").read_text()))
    books.check()
    assert (books["trained"].samples, books["failed"].samples) == (16, 0)
