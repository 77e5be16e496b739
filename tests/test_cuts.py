"""Cuts of web projects from the command line to tasks, `collect` and `rlx edge`'s prompts."""

import dataclasses
import json

import numpy as np
import pytest

from rlx import assemble, cuts, edge
from rlx.config.schema import TaskSourceConfig
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.graders import GraderPool
from rlx.envs.grading import Outcome
from rlx.envs.sources import check_source
from rlx.envs.tasks import build_tasks
from rlx.envs.tool_calls import write_call
from rlx.envs.web.project import read_projects, reference
from rlx.envs.web.tasks import WebTasks
from rlx.interrupt import Preemption
from rlx.proxy.edge import EdgeOptions
from rlx.proxy.split import SplitOptions
from rlx.rollout.collect import Sampling, collect
from rlx.rollout.cuts import CutRefused, CutStore
from rlx.sessions.environments import Environments, entered, openings
from rlx.types import StopReason
from tests import browser, tiny_run
from tests.agents.speaking import Speaking

SOURCE = """
def get_config():
    c = digits()
    c.tasks.sources = {{"web": base.source(dataset="web_projects", environment="web_project", options={options!r})}}
    c.tasks.held_out = 1
    c.engine.context = 8192
    c.producer.session_token_limit = 8000
    c.rollout.max_new_tokens = 100
    c.learner.row_targets = 0
    c.learner.row_tokens = 8192
    c.sandbox.limits.wall_s = 60.0
    return c
"""
PROJECTS = {project.name: project for project in read_projects()}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Writes a recipe whose tasks are of web projects with the given options."""
    browser.require()
    directory = tmp_path_factory.mktemp("cuts")
    tiny = tiny_run.write(directory)
    config = directory / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 16384}))

    def write(name, **options):
        lines = SOURCE.format(options=options)
        text = tiny.read_text().replace("def get_config", "def digits")
        (directory / f"{name}.py").write_text(text + lines)
        return directory / f"{name}.py"

    return write


@pytest.fixture(scope="module")
def recorded(recipe, tmp_path_factory):
    """A directory with the cuts of two projects' own solutions."""
    to = tmp_path_factory.mktemp("recorded") / "cuts"
    path = recipe("record", projects=["converter", "counter"])
    assert cuts.main(["record", *tiny_run.arguments(path), f"--cuts={to}"]) == 0
    return to


def texts_of(project, form, first, end):
    return [
        said if isinstance(said, str) else "\n".join(write_call(form, call) for call in said)
        for said in reference(PROJECTS[project], first, end)
    ]


@pytest.mark.slow
def test_solutions_are_recorded_and_play_again(recipe, recorded, capsys):
    path = recipe("verify", projects=["converter", "counter"])
    assert cuts.main(["verify", *tiny_run.arguments(path), f"--cuts={recorded}"]) == 0
    assert "all 3 cuts play again" in capsys.readouterr().out
    assert cuts.main(["list", f"--cuts={recorded}"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[1:4] for line in listed] == [
        ["web/converter,", "step", "2"],
        ["web/counter,", "step", "2"],
        ["web/counter,", "step", "3"],
    ]


@pytest.mark.slow
def test_a_cut_that_differs_is_refused_by_name(recipe, recorded, tmp_path, capsys):
    store, changed = CutStore(recorded), CutStore(tmp_path)
    cut = next(cut for _, cut in store if cut.name == "web/counter, step 3")
    changed.put(dataclasses.replace(cut, snapshot=next(c for _, c in store if c.step == 1).snapshot))
    path = recipe("differs", projects=["converter", "counter"])
    assert cuts.main(["verify", *tiny_run.arguments(path), f"--cuts={tmp_path}"]) == 1
    assert "web/counter, step 3: the workspace is another one" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, texts, reward, detail",
    [
        ("web/counter/3-3", texts_of("counter", "hermes", 2, 3), 1.0, ""),
        ("web/counter/2-3", ["Done.", "Done."], 0.0, "it survives a reload"),
        ("web/converter/2-2", ["<tool_call>nonsense", "Done."], 0.0, "no number"),
    ],
)
def test_a_session_starts_at_a_cut_and_is_graded_on_the_steps_after_it(recipe, recorded, task, texts, reward, detail):
    path = recipe("train", projects=["converter", "counter"], cuts=str(recorded))
    config = tiny_run.config(path)
    chat = load_chat_tokenizer(config.model.path, "", "", config.chat)
    [asked] = [t for part in build_tasks(config.tasks) for t in part if t.id == task]
    engine = Speaking(chat, texts, context=8192)
    sampling = Sampling(1, 4000, 1.0, False, 0, 8000, 300.0)

    with (
        GraderPool(config.grader, ()) as graders,
        Preemption() as loop,  # as a run has it: in a thread
        entered(Environments(config, chat, graders), loop) as environments,
    ):
        [group] = loop.run(collect(engine, environments, [(0, asked)], sampling))
    [sample] = group.samples
    assert (sample.reward, sample.stop_reason, sample.grade["outcome"]) == (reward, StopReason.STOP, Outcome.GRADED)
    assert detail in sample.grade["detail"]
    prompt = openings(config, chat)(asked)
    np.testing.assert_array_equal(engine.requests[0].prompt, prompt)
    np.testing.assert_array_equal(sample.tokens[: len(prompt)], prompt)
    assert not sample.mask[: len(prompt)].any()
    written = chat.written_out(sample.tokens[sample.mask])
    assert written == "".join(f"{text}<|im_end|>" for text in texts)


@pytest.mark.slow
def test_cuts_are_tasks_beside_the_whole_projects(recorded):
    def ids(**options):
        given = WebTasks.read({"projects": ["converter", "counter"], "cuts": str(recorded)} | options)
        return [task.id for task in given.tasks("web")]

    after = ["web/converter/2-2", "web/counter/2-3", "web/counter/3-3"]
    assert ids() == ["web/converter", "web/counter", *after]
    assert ids(cuts_alone=True) == after
    assert ids(cuts_alone=True, until="step") == ["web/converter/2-2", "web/counter/2-2", "web/counter/3-3"]


@pytest.mark.slow
def test_a_cut_of_another_conversation_is_refused_before_a_run_begins(recipe, recorded):
    path = recipe("other", projects=["converter", "counter"], cuts=str(recorded))
    config = tiny_run.config(path, tools__format="plain")
    chat = load_chat_tokenizer(config.model.path, "", "", config.chat)
    tasks = [t for part in build_tasks(config.tasks) for t in part]
    with pytest.raises(CutRefused, match=r"tools\.format: record it again"):
        [openings(config, chat)(task) for task in tasks]


@pytest.mark.parametrize(
    "options, said",
    [
        ({"projects": ["gretings"]}, "no 'gretings'"),
        ({"cuts": "nowhere"}, "no cuts in nowhere"),
        ({"until": "later"}, "until = 'later'"),
        ({"cuts_alone": True}, "needs cuts"),
        ({"directory": "nowhere"}, "no web projects"),
        ({"size": 3}, "not an option"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, said):
    source = TaskSourceConfig("web_projects", "", options, 1, 1.0, "", "web_project")
    with pytest.raises(ValueError, match=said):
        check_source("web", source)


def speak(monkeypatch, say):
    """The engine of a run says the texts of `say(prompt, how many)`."""
    made = []

    class Engine(Speaking):
        async def generate(self, request):
            self.texts += say(self.tokenizer.written_out(request.prompt), len(request.seeds))
            return await super().generate(request)

    def make_engine(config, model, params, version):
        made.append(Engine(model.tokenizer, [], context=8192))
        return made[-1]

    monkeypatch.setattr(assemble, "make_engine", make_engine)
    return made


@pytest.mark.slow
def test_a_policys_own_passes_are_recorded(monkeypatch, recipe, tmp_path, capsys):
    right = texts_of("converter", "hermes", 0, 2)
    # In rounds: both attempts' first responses, their second ones, and so on; the second attempt does nothing.
    texts = iter([right[0], "No.", right[1], "No.", right[2], right[3]])
    speak(monkeypatch, lambda prompt, count: [next(texts) for _ in range(count)])
    path = recipe("policy", projects=["converter"])
    words = tiny_run.arguments(path, rollout__max_new_tokens=1900, producer__session_token_limit=6200)
    assert cuts.main(["record", *words, f"--cuts={tmp_path}", "--from=policy", "--attempts=2"]) == 0
    assert "1 cuts of 1 tasks" in capsys.readouterr().out
    [(_, cut)] = CutStore(tmp_path)
    assert (cut.name, len(cut.responses)) == ("web/converter, step 2", 2)


@pytest.mark.slow
def test_edge_attempts_cuts_as_any_task(monkeypatch, recipe, recorded):
    """One of two attempts at the third step passes, none at the second."""
    work, done = texts_of("counter", "hermes", 2, 3)

    def say(prompt, count):
        begins = "Step 3" in prompt.rpartition("<|im_start|>user")[2]
        return [work, done][:count] if begins else [done] * count

    made = speak(monkeypatch, say)
    options = {"projects": ["counter"], "cuts": str(recorded), "cuts_alone": True, "until": "step"}
    config = tiny_run.config(
        recipe("edge", **options), rollout__max_new_tokens=1900, producer__session_token_limit=6200
    )
    edges = EdgeOptions(0.1, 0.9, 0.4, first_attempts=2, most_attempts=2, at_once=2)
    found = edge.find(config, edges, SplitOptions())
    passes = {row["task"]: row["passes"] for row in found.report.record["evidence"]}
    assert passes == {"web/counter/2-2": 0, "web/counter/3-3": 1}
    assert found.report.record["train"][0] == "web/counter/3-3", "it has most signal"
    assert made[0].requests
