"""Wrong configurations and inputs, each with what its refusal must say. `test_wrong_inputs` tries them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rlx.envs.tasks import build_tasks
from tests import tiny_model, tiny_run, tiny_tokenizer

RECIPE, CONFIGS = "--config=recipe.py", tiny_run.ROOT / "configs"


class Wrong(NamedTuple):
    name: str
    words: str | list[str]  # of the command line, after `rlx train`
    said: list[str]  # all of it must be in the message
    prepare: Callable[[], object] = lambda: None  # what is done in the folder of recipe.py, model/ and tasks.jsonl


def option(**changes: object) -> list[str]:
    return tiny_run.arguments(Path("recipe.py"), **changes)


def tasks(*lines: str) -> Callable[[], object]:
    return lambda: Path("tasks.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def many(answer: str, question: str = "Digit {}?") -> Callable[[], object]:
    return tasks(*(json.dumps({"question": question.format(i), "answer": answer}) for i in range(20)))


def answer_held_out_questions_with(answer: str) -> None:
    _, held_out = build_tasks(tiny_run.config(Path("recipe.py")).tasks)
    questions = {task.question for task in held_out}
    path = Path("tasks.jsonl")
    records = tiny_run.records(path)
    tiny_run.write_jsonl(path, [r | {"answer": answer} if r["question"] in questions else r for r in records])


def examples(*lines: str) -> Callable[[], object]:
    return lambda: Path("sft.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def model(**changes: object) -> Callable[[], object]:
    """Changes keys of the model's config.json."""

    def change() -> None:
        file = Path("model/config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def recipe(text: str) -> Callable[[], object]:
    return lambda: Path("wrong.py").write_text(text)


def tokenizer(**changes: object) -> Callable[[], object]:
    return lambda: tiny_tokenizer.build("model", **changes)


def cut_weights() -> None:
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-100])


def larger_vocabulary() -> None:
    """The embedding of another model: fewer rows than the tokenizer has ids."""
    shutil.rmtree("model")
    tiny_model.build("model", arch=tiny_model.sized(vocab_size=200))


def dataset(name: str, **options: object) -> Callable[[], object]:
    """Tasks of a reasoning-gym dataset instead of the file's."""
    lines = ["", "of_files = get_config", "def get_config():", "    from ml_collections import ConfigDict"]
    lines += ["    c = of_files()", f"    x = base.source(dataset={name!r}, options=ConfigDict({options!r}))"]
    lines += ["    c.tasks.sources = {'x': x}", "    return c", ""]
    return lambda: Path("wrong.py").write_text(Path("recipe.py").read_text() + "\n".join(lines))


NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + tiny_tokenizer.CHATML
)
SFT = option(sft__steps=2, sft__path="sft.jsonl")

COMMAND_LINES = [
    Wrong("no recipe", [], ["--config is missing", "--config=configs/quickstart.py"]),
    Wrong(
        "no such recipe", [f"--config={CONFIGS}/quikstart.py"], ["quikstart.py: no such file", "configs/quickstart.py"]
    ),
    Wrong("no such variant", [f"--config={CONFIGS}/quickstart.py:smok"], ["no variant 'smok'", "the nearest is smoke"]),
    Wrong("a variant of a recipe without", ["--config=recipe.py:big"], ["takes no variant; leave out :big"]),
    Wrong(
        "a recipe that fails",
        ["--config=wrong.py"],
        ["wrong.py:3", "ZeroDivisionError"],
        recipe("def get_config():\n    x = 1\n    return x / 0\n"),
    ),
    Wrong(
        "a recipe of something else",
        ["--config=wrong.py"],
        ["must return a ConfigDict, not dict"],
        recipe("def get_config():\n    return {}\n"),
    ),
    Wrong("a word without dashes", [RECIPE, "fast"], ["'fast': unexpected; options are written --name=value"]),
    Wrong(
        "an unknown key",
        option(learner__learning_rat=1),
        ["config.learner.learning_rat = '1'", "the nearest is config.learner.learning_rate"],
    ),
    Wrong(
        "a key of another section",
        option(learner__temperature=1),
        ["config.learner.temperature = '1': no such key; the nearest is config."],
    ),
    Wrong("a wrong type", option(rollout__group_size="eight"), ["config.rollout.group_size = 'eight'", "must be int"]),
    Wrong(
        "no such choice",
        option(objective__loss="cispoo"),
        ["config.objective.loss = 'cispoo'", "the nearest is 'cispo'"],
    ),
    Wrong(
        "out of range", option(learner__learning_rate=-1.0), ["config.learner.learning_rate = -1.0: must be above 0"]
    ),
    Wrong(
        "no such layer",
        option(lora__targets="('q_porj',)"),
        ["config.lora.targets[0] = 'q_porj'", "the nearest is 'q_proj'"],
    ),
    Wrong("a group of one", option(rollout__group_size=1), ["config.rollout.group_size = 1", "set at least 2"]),
    Wrong(
        "no room for a response",
        option(rollout__max_new_tokens=160),
        ["config.rollout.max_new_tokens = 160", "config.engine.context = 160"],
    ),
    Wrong("rows too short", option(learner__row_tokens=100), ["config.learner.row_tokens = 100", "set at least 160"]),
    Wrong("what the engine cannot", option(rollout__top_p=0.9), ["config.rollout.top_p = 0.9", "set it to 1.0"]),
    Wrong(
        "pass@k of too few attempts",
        option(eval__k="(1, 8)"),
        ["config.eval.k = (1, 8)", "config.eval.attempts_per_task = 2"],
    ),
    Wrong("a critic", option(objective__advantage="gae"), ["config.objective.advantage = 'gae'", "use 'group_mean'"]),
    Wrong(
        "a signal for nothing",
        option(frozen__signals="('nowhere',)"),
        ["config.frozen.signals = ('nowhere',)", "config.objective.distill.form = 'off'", "'sampled'"],
    ),
    Wrong("nothing held out", option(tasks__held_out=0), ["config.tasks.held_out = 0", "set at least 1"]),
    Wrong(
        "no such model",
        option(model__path="models/nobody"),
        ["config.model.path = 'models/nobody': no such directory", "make model"],
    ),
    Wrong("a directory that is no model", option(model__path="."), ["config.model.path = '.'", "no config.json"]),
    Wrong(
        "no such tasks",
        option(tasks__sources__digits__path="no.jsonl"),
        ["config.tasks.sources.digits.path = 'no.jsonl': no such file"],
    ),
    Wrong(
        "no such examples",
        option(sft__steps=2, sft__path="no.jsonl"),
        ["config.sft.path = 'no.jsonl'", "config.sft.steps = 2 needs a JSONL file"],
    ),
]

MODELS = [
    Wrong(
        "an unsupported model",
        [RECIPE],
        ["model/config.json", "model_type 'gpt2' is not supported", "qwen2, qwen3"],
        model(model_type="gpt2"),
    ),
    Wrong(
        "an unsupported feature", [RECIPE], ["use_sliding_window True is not supported"], model(use_sliding_window=True)
    ),
    Wrong(
        "a damaged config.json",
        [RECIPE],
        ["model/config.json is not JSON"],
        lambda: Path("model/config.json").write_text("{"),
    ),
    Wrong(
        "weights of another shape",
        [RECIPE],
        ["gate_proj.weight has shape (48, 32); config.json makes it (64, 32)"],
        model(intermediate_size=64),
    ),
    Wrong("half a file of weights", [RECIPE], ["model.safetensors is not a whole safetensors file"], cut_weights),
    Wrong(
        "no weights",
        [RECIPE],
        ["has neither model.safetensors nor model.safetensors.index.json"],
        lambda: Path("model/model.safetensors").unlink(),
    ),
    Wrong(
        "more layers than weights",
        [RECIPE],
        ["does not fit its config.json", "lacks 11 tensors", "model.layers.2."],
        model(num_hidden_layers=3),
    ),
    Wrong(
        "no tokenizer",
        [RECIPE],
        ["there is no tokenizer in", "tokenizer.json is needed"],
        lambda: [p.unlink() for p in Path("model").glob("tokenizer*")],
    ),
    Wrong("no chat template", [RECIPE], ["has no chat template", "chat_template.jinja"], tokenizer(template=None)),
    Wrong(
        "a system prompt that is refused",
        option(tasks__system_prompt="Be brief."),
        ["refuses a system message (no system)", "tasks.suffix"],
        tokenizer(template=NO_SYSTEM),
    ),
    Wrong(
        "a tokenizer of another model",
        [RECIPE],
        ["the tokenizer has 260 ids, the model's embedding 200"],
        larger_vocabulary,
    ),
    Wrong(
        "a context beyond the model's",
        option(engine__context=1024, learner__row_tokens=1024),
        ["config.engine.context = 1024", "set at most 512"],
    ),
]

DATA = [
    Wrong(
        "a line that is not JSON",
        [RECIPE],
        ["tasks.jsonl, line 2: not JSON"],
        tasks('{"question": "a", "answer": "1"}', '{"question"'),
    ),
    Wrong(
        "a line without an answer", [RECIPE], ["tasks.jsonl, line 1: 'answer' is missing"], tasks('{"question": "a"}')
    ),
    Wrong(
        "an unknown key in a line",
        [RECIPE],
        ["tasks.jsonl, line 1: unknown key 'anwser'", "'answer'"],
        tasks('{"question": "a", "anwser": "1"}'),
    ),
    Wrong(
        "an unknown grader in a line",
        [RECIPE],
        ["grader 'nuber' cannot grade", "'number'"],
        tasks('{"question": "a", "answer": "1", "grader": "nuber"}'),
    ),
    Wrong(
        "two answers to one question",
        [RECIPE],
        ["ask the same question with different answers, '1' and '2'"],
        tasks('{"question": "a", "answer": "1"}', '{"question": "a", "answer": "2"}'),
    ),
    Wrong("an empty file", [RECIPE], ["tasks.sources.digits.path = ", "tasks.jsonl' holds no tasks"], tasks()),
    Wrong("more held out than there is", option(tasks__held_out=40), ["tasks.held_out = 40", "hold out at most 39"]),
    Wrong(
        "prompts longer than the context",
        [RECIPE],
        ["config.engine.context = 160", "the longest prompt, digits/", "has 322"],
        many("3", "{} " + "x" * 300),
    ),
    Wrong(
        "answers that cannot be extracted",
        [RECIPE],
        ["its own answer 'three' gets reward 0", "tasks.sources.digits.grader or grader.extract"],
        many("three"),
    ),
    Wrong(
        "a grader that is none",
        option(tasks__sources__digits__grader="exactly"),
        ["tasks.sources.digits.grader = 'exactly'", "'exact'"],
    ),
    Wrong(
        "no such dataset",
        ["--config=wrong.py"],
        ["tasks.sources.x.dataset = 'chain_sums'", "'chain_sum'"],
        dataset("chain_sums"),
    ),
    Wrong(
        "a dataset that any text passes",
        ["--config=wrong.py"],
        ["'game_of_life_halting' is refused", "any text at all scores 1.0"],
        dataset("game_of_life_halting"),
    ),
    Wrong(
        "an option the dataset has not",
        ["--config=wrong.py"],
        ["tasks.sources.x.options.max_term is not an option of chain_sum", "'max_terms'"],
        dataset("chain_sum", max_term=3),
    ),
    Wrong(
        "an option the dataset refuses",
        ["--config=wrong.py"],
        ["chain_sum does not work with options {'max_terms': 3, 'min_terms': 9}"],
        dataset("chain_sum", min_terms=9, max_terms=3),
    ),
    Wrong("an example that is not JSON", SFT, ["sft.jsonl, line 1: not JSON"], examples("{")),
    Wrong(
        "an example without a response",
        SFT,
        ["sft.jsonl, line 1: must be", '"response": TEXT'],
        examples('{"question": "a", "answer": "1"}'),
    ),
    Wrong(
        "an example that is a list",
        SFT,
        ["sft.jsonl, line 2: must be"],
        examples('{"question": "a", "response": "b"}', "[]"),
    ),
    Wrong(
        "an example too long for a row",
        SFT,
        ["sft.jsonl, line 1: 2", "learner.row_tokens holds 160"],
        examples('{"question": "a", "response": "' + "b" * 200 + '"}'),
    ),
    Wrong("no examples", SFT, ["sft.jsonl: no examples in it"], examples()),
]

RUNS = [
    Wrong(
        "a used directory",
        option(run__resume="never"),
        ["run.resume = 'never' but", "runs/tiny is in use", "choose another run.name"],
    ),
    Wrong(
        "a run that is not there",
        option(run__resume="must", run__name="nobody"),
        ["run.resume = 'must' but", "nobody/checkpoints has no checkpoint", "check run.directory"],
    ),
    Wrong(
        "a checkpoint of another shape",
        option(lora__rank=8),
        ["config.lora.rank = 8: ", "was made with 4", "another config.run.name"],
    ),
    Wrong(
        "a checkpoint of another optimizer", option(learner__max_grad_norm=0.0), ["does not fit this run", "optimizer"]
    ),
    Wrong("other tasks than before", option(tasks__seed=1), ["config.tasks.seed = 1: ", "was made with 0"]),
    Wrong(
        "a damaged record",
        [RECIPE],
        ["metrics.jsonl:1: not a JSON object", "the file is damaged"],
        lambda: Path("runs/tiny/metrics.jsonl").write_text("{\n{}\n"),
    ),
    Wrong(
        "a damaged checkpoint",
        option(learner__updates=2),
        ["checkpoints/1 cannot be read", "remove that directory to continue from the checkpoint before it"],
        lambda: shutil.rmtree("runs/tiny/checkpoints/1/host"),
    ),
    Wrong(
        "checkpoints that are gone",
        [RECIPE],
        ["runs/tiny holds the records of a run without its checkpoints"],
        lambda: shutil.rmtree("runs/tiny/checkpoints"),
    ),
    Wrong(
        "other answers to the held-out questions",
        option(learner__updates=2),
        ["config.tasks.sources: the held-out tasks are not those of", "runs/tiny"],
        lambda: answer_held_out_questions_with("5"),
    ),
    Wrong(
        "records that were cut",
        [RECIPE],
        ["samples.jsonl has 0 records, it had"],
        lambda: Path("runs/tiny/samples.jsonl").write_text(""),
    ),
]
