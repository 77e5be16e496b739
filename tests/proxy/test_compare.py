"""What is said of runs: trends, intervals, peaks, matched costs; and of rankings of runs."""

import dataclasses
import json
import math

import pytest
import scipy.stats

from rlx import agree, compare
from rlx.metrics.names import find_metric
from rlx.proxy.charts import comparison
from rlx.proxy.compare import decided, difference, matched_pairs, peak_of, read, trend
from rlx.proxy.panels import PANELS, points_of
from rlx.proxy.ranking import common, read_study
from rlx.proxy.runs import Point, evaluation_of, model_name, read_rlx
from tests.proxy import made_runs


def at(update, value, attempts=100.0):
    return evaluation_of(Point(update, 2.0 * update, 100.0 * update, value), attempts, 20.0)


def test_a_run_is_read_with_its_three_axes(tmp_path):
    run = read_rlx(made_runs.write(tmp_path, "one"))
    assert (run.model, run.seed, run.updates, run.state, run.tokens) == ("small", 0, 20, "complete", 20_000)
    last = run.curves["reward/mean"][-1]
    assert (last.updates, last.tokens, last.seconds) == (20, 20_000, 2.0 * 19), "the first update compiles"
    assert [(e.point.updates, e.attempts) for e in run.evaluations] == [(0, 80), (10, 80), (20, 80)]


def test_what_a_run_evaluated_itself_counts_before_what_was_watched(tmp_path):
    """After a cold start the baseline is the evaluation after it, also where the base model was tested beside it."""
    path = made_runs.write(tmp_path, "one")
    records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    first = [made_runs.evaluation(0, rate) | {"label": label} for label, rate in (("base", 0.1), ("before", 0.3))]
    made_runs.write_jsonl(path / "metrics.jsonl", [*first, *records[1:]])
    before = read_rlx(path).evaluations
    assert (before[0].point.updates, before[0].point.value) == (0, 0.3)
    (path / "watch").mkdir()
    watched = [made_runs.evaluation(update, 0.05, attempts=160) for update in (0, 15, 20)]
    watched[0]["label"] = "base"
    made_runs.write_jsonl(path / "watch" / "evaluations.jsonl", watched)
    after = read_rlx(path).evaluations
    assert [e.point.updates for e in after] == [0, 10, 15, 20]
    assert tuple(e for e in after if e.point.updates != 15) == before


def test_the_interval_of_a_difference_is_newcombe_s():
    """His table II, example (a): 56 of 70 against 48 of 80, method 10 gives 0.0524 to 0.3339."""
    change = difference(at(1, 56 / 70, 70), at(0, 48 / 80, 80))
    assert change == (pytest.approx(0.2), pytest.approx(0.0524, abs=5e-5), pytest.approx(0.3339, abs=5e-5))
    assert (decided(change), decided((0.1, -0.1, 0.3)), decided((-0.2, -0.3, -0.1))) == (1, 0, -1)


@pytest.mark.parametrize(
    "values, direction",
    [
        ([1, 2, 3, 4, 5, 6], "rises"),
        ([6, 5, 4, 3, 2, 1], "falls"),
        ([1, 2, 1, 2, 1, 2], "no trend"),
        ([1] * 6, "no trend"),
        ([1, 2, 3], "too few points"),
        ([], "too few points"),
    ],
)
def test_trends(values, direction):
    points = [Point(i, math.nan, math.nan, float(v)) for i, v in enumerate(values)]
    assert trend(points).direction == direction
    if direction == "rises":
        assert scipy.stats.kendalltau(range(6), values).pvalue < 0.05


def test_the_peak_is_above_the_last_one_only_where_that_is_decided():
    assert peak_of([at(0, 0.2), at(10, 0.5), at(20, 0.9)]) == (20, "is the last")
    assert peak_of([at(0, 0.2), at(10, 0.9), at(20, 0.5)]) == (10, "yes")
    assert peak_of([at(0, 0.2), at(10, 0.52), at(20, 0.5)]) == (10, "not decided")
    assert peak_of([]) == (None, "not decided")


def test_what_a_run_shows(tmp_path):
    rising, flat = (read_rlx(made_runs.write(tmp_path, n, rise=r)) for n, r in (("rising", 0.5), ("flat", 0.0)))
    assert read(rising).reproduces_learning == "yes"
    assert read(rising).growing == {"offpolicy/kl_k3": "no trend", "offpolicy/age_mean": "no trend"}
    found = read(flat)
    assert (found.reward.direction, found.validation, found.reproduces_learning) == (
        "no trend",
        "not decided",
        "not decided",
    )


def test_better_is_said_at_matched_cost_within_a_model_only(tmp_path):
    good, bad = (read_rlx(made_runs.write(tmp_path, n, rise=r)) for n, r in (("good", 0.6), ("bad", 0.0)))
    verdicts = {m.axis: m for m in matched_pairs([good, bad])}
    assert {m.verdict for m in verdicts.values()} == {"good is better"}
    assert (verdicts["tokens"].cost, verdicts["seconds"].cost) == (20_000, 38.0)
    assert matched_pairs([good, dataclasses.replace(bad, model="large")]) == []
    cheap = [
        dataclasses.replace(e, point=dataclasses.replace(e.point, tokens=1.0, seconds=1.0)) for e in bad.evaluations
    ]
    assert matched_pairs([good, dataclasses.replace(bad, evaluations=tuple(cheap))]) == []
    fewer = [dataclasses.replace(e, tasks=10.0) for e in bad.evaluations]
    assert matched_pairs([good, dataclasses.replace(bad, evaluations=tuple(fewer))]) == []


def test_models_are_told_apart_by_their_directories(tmp_path):
    names = {"models/small": "small", "runs/a/sft": "a/sft", "/x/b/model": "b/model", "": ""}
    assert {path: model_name(path) for path in names} == names


def test_an_evaluation_of_unknown_size_has_no_interval_and_decides_nothing():
    unknown = [evaluation_of(Point(u, 1.0, 1.0, v), math.nan, math.nan) for u, v in ((0, 0.2), (10, 0.9))]
    assert math.isnan(unknown[0].low)
    assert peak_of([*unknown, at(20, 0.1)]) == (10, "not decided")


def test_every_panel_is_of_metrics_that_exist(tmp_path):
    assert [key for panel in PANELS for key in panel.sums or (panel.key,) if find_metric(key) is None] == []
    run = read_rlx(made_runs.write(tmp_path, "one"))
    dropped = next(panel for panel in PANELS if panel.sums)
    assert points_of(run, dropped)[-1].value == 20 // 5 + 20 // 2


@pytest.mark.slow
def test_sixty_runs_with_other_metrics_and_lengths_make_one_page(tmp_path):
    paths = [
        made_runs.write(
            tmp_path / "runs",
            f"run{i}",
            updates=5 + i % 7,
            missing=("offpolicy/kl_k3", "ledger/tokens_generated") if i % 2 else (),
            model__path=f"models/{'ab'[i % 2]}",
        )
        for i in range(60)
    ]
    assert compare.main([str(tmp_path / "runs"), f"--to={tmp_path / 'out'}", "--x=tokens"]) == 0
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        f"compare.{e}" for e in ("html", "json", "md", "png")
    ]
    record = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert len(record["runs"]) == 60
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    made_runs.write(tmp_path / "runs", "one_more")
    with pytest.raises(ValueError, match=r"61 runs: a comparison shows at most 60"):
        compare.main([str(tmp_path / "runs"), f"--to={tmp_path / 'out'}"])
    assert len(paths) == 60


def test_one_run_is_a_report_too(tmp_path):
    report = comparison([read_rlx(made_runs.write(tmp_path, "one"))])
    assert report.lines[0].startswith("one (small) learns; training reward rises (")
    assert "[+0." in report.lines[0], "a change of a sampled rate has its interval"


def test_agree_reads_two_sweeps(tmp_path, capsys):
    """The proxy ranks the two best the other way round; the worst two are the same."""
    rates = (1e-5, 1e-4, 1e-3, 1e-2)
    target = made_runs.sweep(tmp_path / "target", "large", dict(zip(rates, (0.0, 0.2, 0.4, 0.6))))
    proxy = made_runs.sweep(tmp_path / "proxy", "small", dict(zip(rates, (0.1, 0.3, 0.6, 0.5))))
    assert agree.main([str(target), str(proxy), "--json", f"--to={tmp_path / 'out'}"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out" / "agree.json").read_text())
    assert record["kendall_tau"] == pytest.approx(4 / 6)
    assert record["kendall_interval"][0] <= record["kendall_tau"] <= record["kendall_interval"][1]
    assert (record["top1_agreement"], record["pairwise_agreement"]) == (0.0, pytest.approx(5 / 6))
    assert set(record["configurations"]) == {f"learning_rate={r}" for r in ("1e-05", "0.0001", "0.001", "0.01")}
    assert (record["cost"]["proxy"]["runs"], record["cost"]["proxy"]["seconds"]) == (12, 300.0)
    text = (tmp_path / "out" / "agree.md").read_text()
    assert (
        "| learning_rate=0.01 | learning_rate=0.001 |" in text or "| learning_rate=0.001 | learning_rate=0.01 |" in text
    )


def test_agree_over_tasks_reads_the_samples(tmp_path, capsys):
    """The two configurations differ in one of ten tasks: other seeds would decide it, other tasks might not."""
    for name, rise in (("target", 0.4), ("proxy", 0.2)):
        made_runs.sweep(tmp_path / name, name, {1e-4: 0.0, 1e-3: rise})
        for run in (tmp_path / name).iterdir():
            fails = {0} if "lr0.001" not in run.name else set()
            rows = [
                {"update": 10, "phase": "eval", "label": "after", "task": f"t/{i}", "reward": float(i not in fails)}
                for i in range(10)
            ]
            made_runs.write_jsonl(run / "samples.jsonl", rows)
    sweeps = [str(tmp_path / name) for name in ("target", "proxy")]
    assert agree.main([*sweeps, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undecided_pairs"] == []
    assert agree.main([*sweeps, "--json", "--over-tasks"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["undecided_pairs"]) == 1
    assert sorted(record["target_means"]) == [0.9, 1.0]


def test_agree_reads_tables(tmp_path, capsys):
    for name, sign in (("target", 1), ("proxy", -1)):
        rows = [
            {"configuration": c, "seed": s, "score": sign * i + 0.01 * s} for i, c in enumerate("abc") for s in range(3)
        ]
        made_runs.write_csv(tmp_path / f"{name}.csv", rows)
    assert agree.main([str(tmp_path / "target.csv"), str(tmp_path / "proxy.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kendall_tau"] == pytest.approx(-1)
    assert agree.main([str(tmp_path / "target.csv"), str(tmp_path / "proxy.csv")]) == 0
    assert "against the target's" in capsys.readouterr().out


def test_studies_share_configurations(tmp_path):
    for name, names in (("one", "ab"), ("two", "bc"), ("three", "abd")):
        rows = [{"configuration": c, "seed": 0, "score": i} for i, c in enumerate(names)]
        made_runs.write_csv(tmp_path / f"{name}.csv", rows)
    one, two, three = (read_study(tmp_path / f"{n}.csv", None, "") for n in ("one", "two", "three"))
    assert common(one, three)[2] == ["d"]
    with pytest.raises(ValueError, match=r"share 1 configurations.*the target has a, b; the proxy has b, c"):
        common(one, two)
    made_runs.write_csv(tmp_path / "bad.csv", [{"configuration": "a", "score": 1}])
    with pytest.raises(ValueError, match=r"'seed' is missing"):
        read_study(tmp_path / "bad.csv", None, "")


def test_two_runs_of_one_seed_are_no_two_seeds(tmp_path):
    for name in ("a", "b"):
        made_runs.write(tmp_path, name)
    with pytest.raises(ValueError, match=r"two runs of .* with seed 0"):
        read_study(tmp_path, None, "eval/pass_rate")


def test_a_metric_that_a_run_lacks_is_said(tmp_path):
    made_runs.write(tmp_path, "a")
    with pytest.raises(ValueError, match=r"has no reward/median; it has .*offpolicy/ess"):
        read_study(tmp_path, None, "reward/median")
