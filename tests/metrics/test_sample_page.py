"""The page of samples: what is on it, that it is one file, and that nothing in a sample can break it."""

import itertools
import json
import re

import pytest

from rlx.envs.chat import load_chat_tokenizer
from rlx.metrics import sample_page
from rlx.metrics.sample_page import choose, write_page
from tests import run_directory, tiny_run, tiny_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return load_chat_tokenizer(tiny_tokenizer.build(tmp_path / "tokenizer"), "", "")


def data(page):
    text = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)[1]
    return json.loads(text)


@pytest.fixture
def page(tmp_path, tokenizer):
    run = run_directory.write(tiny_run.write(tmp_path))
    assert write_page(run, tokenizer, tmp_path / "page.html") == 20
    return tmp_path / "page.html"


def test_it_says_what_the_run_is(page):
    run = data(page)["run"]
    assert (run["name"], run["state"], run["updates"], run["planned"]) == ("tiny", "complete", 4, 4)
    assert run["pass_rate"] == [[1, 0.25], [2, 0.5], [3, 0.75], [4, 1.0]]
    assert [(e["label"], e["pass_rate"]) for e in run["evaluations"]] == [("base", 0.0), ("after", 0.75)]


def test_a_scored_sample_has_both_log_probs_at_every_token(page):
    samples = data(page)["samples"]
    [scored, _] = [s for s in samples if s.get("tokens") and s["tokens"][0][3] is not None]
    assert (scored["update"], scored["source"], scored["reward"], scored["stop"]) == (2, "sums", 0.5, "stop")
    assert [token[1:] for token in scored["tokens"]] == [[26, -0.5, gap, 0] for gap in (0.0, 0.1, -0.2, -2.5)]
    assert scored["prompt"] == scored["tokens"][0][0] * 8
    assert (scored["length"], scored["prompt_length"], scored["extracted"]) == (4, 8, "7")
    others = [s for s in samples if s["update"] != 2]
    assert {token[3] for s in others for token in s["tokens"]} == {None}


def test_nothing_is_loaded_from_elsewhere(page):
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert [url for url in re.findall(r"https?://[^\s\"']+", text) if url != "http://www.w3.org/2000/svg"] == []
    assert "@import" not in text


def test_no_text_of_a_sample_ends_the_data(tmp_path, tokenizer):
    wicked = "</script><script>document.title = 'broken'</script><!-- {{DATA}}"
    run = run_directory.write(tiny_run.write(tmp_path), text=wicked)
    write_page(run, tokenizer, tmp_path / "page.html")
    assert data(tmp_path / "page.html")["samples"][0]["response"] == wicked
    assert (tmp_path / "page.html").read_text().count("</script>") == 2


def test_without_the_tokenizer_there_are_no_tokens(tmp_path):
    write_page(run_directory.write(tiny_run.write(tmp_path)), None, tmp_path / "page.html")
    sample = data(tmp_path / "page.html")["samples"][0]
    assert sample["response"] == "7"
    assert "tokens" not in sample


def test_a_run_that_has_just_begun_has_a_page(tmp_path, tokenizer):
    run = run_directory.write(tiny_run.write(tmp_path), updates=0, end=False)
    (run / "samples.jsonl").write_text("")
    assert write_page(run, tokenizer, tmp_path / "page.html") == 0
    assert data(tmp_path / "page.html")["run"]["updates"] == 0


def test_the_middle_of_a_long_sample_is_left_out(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(sample_page, "MOST_TOKENS", 2)
    write_page(run_directory.write(tiny_run.write(tmp_path)), tokenizer, tmp_path / "page.html")
    tokens = data(tmp_path / "page.html")["samples"][0]["tokens"]
    assert [len(token) for token in tokens] == [5, 1, 5]
    assert tokens[1] == [2]
    assert "… 6 tokens left out …" in data(tmp_path / "page.html")["samples"][0]["prompt"]


def test_what_the_policy_did_not_write_has_no_log_prob(tokenizer):
    record = {
        "prompt_tokens": 1,
        "tokens": [30, 31, 32, 33],
        "logprobs": [-1.0, -2.0],
        "versions": [[3, 1, 2], [4, 3, 4]],
    }
    shown = list(sample_page._tokens(record, sample_page.written_out(tokenizer)))
    assert [token[2:] for token in shown] == [[-1.0, None, 3], [None, None, None], [-2.0, None, 4]]


def record(update, reward, label="", tokens=10, **more):
    return {"update": update, "reward": reward, "label": label, "tokens": [1] * tokens, **more}


def test_every_update_is_there_with_its_best_its_worst_and_what_was_scored():
    records = [
        record(update, i / 100, trainer_logprobs=[]) if i == 50 else record(update, i / 100)
        for update in (1, 2)
        for i in range(100)
    ]
    chosen = choose(iter(records))
    of_one = [r["reward"] for r in chosen if r["update"] == 1]
    each = sample_page.EACH
    assert of_one == [*(i / 100 for i in range(each)), 0.5, *(i / 100 for i in range(100 - each, 100))]
    assert len(chosen) == 2 * len(of_one)


def test_too_many_updates_are_thinned_evenly_and_the_ends_stay():
    records = [record(update, float(i)) for update in range(1, 301) for i in range(4)]
    updates = sorted({r["update"] for r in choose(records)})
    assert updates[0] == 1
    assert updates[-1] == 300
    assert len(updates) * 4 <= sample_page.MOST_SAMPLES + 8
    assert {b - a for a, b in itertools.pairwise(updates)} <= {1, 2, 3}


def test_long_samples_thin_updates_sooner(monkeypatch):
    monkeypatch.setattr(sample_page, "MOST_SHOWN", 1000)
    records = [record(update, float(i), tokens=100) for update in range(1, 9) for i in range(4)]
    assert sorted({r["update"] for r in choose(records)}) == [1, 5, 8]


def test_an_evaluation_is_told_from_the_update_it_was_made_at():
    records = [record(4, 0.0), record(4, 1.0, label="after")]
    assert choose(records) == records
    assert choose([]) == []
