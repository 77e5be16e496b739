import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from rlx.config.errors import ConfigError
from rlx.config.flags import config_from_argv, config_or_exit
from rlx.config.schema import Config

ROOT = Path(__file__).parents[2]


def read(recipe_file, *arguments, variant: str = "") -> Config:
    suffix = f":{variant}" if variant else ""
    return config_from_argv(["rlx train", f"--config={recipe_file}{suffix}", *arguments], flags.FlagValues())


def problems(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        config_from_argv(["rlx train", *arguments], flags.FlagValues())
    return caught.value.problems


def test_a_recipe_is_read(recipe_file):
    assert read(recipe_file).learner.updates == 2


def test_a_variant_is_read(recipe_file):
    assert read(recipe_file, variant="long").learner.updates == 50


@pytest.mark.parametrize(
    "arguments",
    [
        [
            "--config.learner.learning_rate=1e-3",
            "--config.metrics.tensorboard=false",
            "--config.lora.targets=('q_proj',)",
        ],
        ["--config.learner.learning_rate", "1e-3", "--noconfig.metrics.tensorboard", "--config.lora.targets=q_proj"],
        ["-config.learner.learning_rate=1e-3", "-noconfig.metrics.tensorboard", "--config.lora.targets", "q_proj"],
    ],
)
def test_keys_are_changed_on_the_command_line(recipe_file, arguments):
    config = read(recipe_file, *arguments)
    assert config.learner.learning_rate == 1e-3
    assert config.metrics.tensorboard is False
    assert config.lora.targets == ("q_proj",)


def test_task_sources_are_changed_by_their_names(recipe_file):
    key = "--config.tasks.sources.chain"
    chain = read(recipe_file, f"{key}.weight=2", f"{key}.options={{'max_terms': 3}}").tasks.sources["chain"]
    assert (chain.weight, chain.options) == (2.0, {"max_terms": 3})


def test_changes_may_stand_before_the_recipe(recipe_file):
    config = config_from_argv(["p", "--config.run.seed=4", "--config", str(recipe_file)], flags.FlagValues())
    assert config.run.seed == 4


def test_the_last_of_two_values_counts(recipe_file):
    assert read(recipe_file, "--config.run.seed=1", "--config.run.seed=2").run.seed == 2


def test_a_program_has_flags_of_its_own(recipe_file):
    own = flags.FlagValues()
    step = flags.DEFINE_integer("step", 0, "which checkpoint", flag_values=own)
    config = config_from_argv(["p", "--step", "7", f"--config={recipe_file}", "--config.run.seed=1"], own)
    assert (step.value, config.run.seed) == (7, 1)


def test_two_command_lines_do_not_share_state(recipe_file):
    assert read(recipe_file, "--config.run.seed=5").run.seed == 5
    assert read(recipe_file).run.seed == 0


# Every row: arguments after a right --config, then what the one problem line begins with and what it holds.
WRONG = [
    (
        "--config.learner.lerning_rate=1",
        "config.learner.lerning_rate = '1'",
        "config.learner.learning_rate",
    ),
    ("--config.lerner.updates=1", "config.lerner.updates = '1': no such key", "config.learner.updates"),
    ("--noconfig.metrics.tensorbord", "config.metrics.tensorbord", "config.metrics.tensorboard"),
    ("--config.tasks.sources.chian.weight=2", "config.tasks.sources.chian.weight", "config.tasks.sources.chain.weight"),
    ("--config.tasks.sources.chain.options.n=2", "config.tasks.sources.chain.options.n", "options=\"{'n': ...}\""),
    ("--config.learner.updates=1.5", "config.learner.updates = '1.5'", "must be int"),
    ("--config.learner.learning_rate=fast", "config.learner.learning_rate = 'fast'", "must be float"),
    ("--config.metrics.tensorboard=maybe", "config.metrics.tensorboard = 'maybe'", "must be bool"),
    ("--config.tasks.sources.chain.weight=much", "config.tasks.sources.chain.weight = 'much'", "must be float"),
    ("--config.learner=3", "config.learner = '3'", "must be dict"),
    ("--config.run.resume=allways", "config.run.resume = 'allways'", "'auto', 'never', 'must'"),
    ("--config.eval.k=one", "config.eval.k[0] = 'one'", "must be int"),
    ("--config.lora.targets=q_proj,v_proj", "config.lora.targets[0]", "q_proj"),
    ("--config.model.path=", "config.model.path = ''", "make model"),
    ("--config.run.seed", "Missing value for flag --config.run.seed", ""),
    ("--noconfig.run.seed", "", "noconfig.run.seed"),
    ("--confg=3", "Unknown command line flag 'confg'", "config"),
    ("quickstart", "'quickstart': unexpected", "--name=value"),
]


@pytest.mark.parametrize("argument, start, part", WRONG, ids=[row[0] for row in WRONG])
def test_a_wrong_argument_is_one_line_that_names_it(recipe_file, argument, start, part):
    (line,) = problems(f"--config={recipe_file}", argument)
    assert line.startswith(start)
    assert part in line
    assert "\n" not in line


def test_all_unknown_keys_of_a_command_line_come_at_once(recipe_file):
    lines = problems(f"--config={recipe_file}", "--config.run.sed=1", "--config.eval.evry=2")
    assert [line.split(" = ")[0] for line in lines] == ["config.run.sed", "config.eval.evry"]


def test_a_missing_recipe_option_is_explained():
    assert problems() == ("--config is missing: name a recipe, for instance --config=configs/quickstart.py",)


@pytest.fixture
def run(recipe_file, tmp_path):
    def run(*arguments: str) -> subprocess.CompletedProcess:
        code = "import sys; from absl import flags; from rlx.config.flags import config_or_exit as read\n"
        code += "print(read(['rlx train', *sys.argv[1:]], flags.FlagValues(), 'Trains.').run.seed)"
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    return run


def test_a_wrong_configuration_ends_the_program_with_status_2_and_no_traceback(run, recipe_file):
    done = run(f"--config={recipe_file}", "--config.run.seed=-1", "--config.checkpoint.every=0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "rlx train: the configuration is wrong:",
        "  config.checkpoint.every = 0: must be at least 1",
        "  config.run.seed = -1: must be 0 or more",
    ]


def test_a_right_configuration_lets_the_program_go_on(run, recipe_file):
    done = run(f"--config={recipe_file}", "--config.run.seed=3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_help_shows_the_usage_and_the_programs_own_flags(capsys):
    own = flags.FlagValues()
    flags.DEFINE_integer("step", 0, "which checkpoint", flag_values=own)
    with pytest.raises(SystemExit) as caught:
        config_or_exit(["rlx evaluate", "--help"], own, "Evaluates a checkpoint.")
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert shown.startswith("Evaluates a checkpoint.")
    assert "--config=FILE" in shown
    assert "which checkpoint" in shown
