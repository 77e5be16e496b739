"""The `rlx` command: which program is called with what, and how errors are shown."""

import os
import subprocess
import sys

import pytest

from rlx import cli
from tests import tiny_run


def rlx(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rlx", *words])
    return cli.main()


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_names_every_command(monkeypatch, capsys, word):
    assert rlx(monkeypatch, word) == 0
    printed = capsys.readouterr().out
    assert "usage: rlx COMMAND" in printed
    for name, (_, meaning) in cli.COMMANDS.items():
        assert f"  rlx {name} " in printed
        assert meaning in printed


def test_no_command_is_not_success(monkeypatch, capsys):
    assert rlx(monkeypatch) == 2
    assert "usage: rlx COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_what_there_is(monkeypatch, capsys):
    assert rlx(monkeypatch, "trian", "--config=x.py") == 2
    captured = capsys.readouterr()
    assert "rlx: there is no command 'trian'" in captured.err
    assert "the nearest is 'train'" in captured.err
    assert "rlx export" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in cli.WITHOUT_RECIPE])
def test_every_command_with_a_recipe_says_what_it_takes(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as left:
        rlx(monkeypatch, name, "--help")
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert f"rlx {name} --config=configs/" in printed, "an example"
    assert "--config.KEY=VALUE" in printed


@pytest.mark.parametrize("name", cli.WITHOUT_RECIPE)
def test_every_other_command_says_what_it_takes(monkeypatch, capsys, name):
    with pytest.raises(SystemExit) as left:
        rlx(monkeypatch, name, "--help")
    assert left.value.code == 0
    assert f"usage: rlx {name} " in capsys.readouterr().out


@pytest.mark.parametrize("name", cli.RECIPE_ONLY)
def test_a_wrong_recipe_is_refused_before_jax_is_imported(name):
    words = ["rlx", name, "--config=configs/base.py", "--config.learner.learning_rat=1"]
    code = f"import sys; sys.argv = {words}; from rlx import cli\ntry: cli.main()\nfinally: print('jax' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "False\n")
    assert "the nearest is config.learner.learning_rate" in ended.stderr


def test_help_needs_no_jax():
    code = "import sys; sys.argv = ['rlx', '--help']; from rlx import cli; cli.main(); sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["show", "tensorboard"])
def test_looking_at_a_run_needs_no_jax(name):
    """They start at once, also where a device is taken by the run."""
    module = cli.COMMANDS[name][0]
    code = f"import sys, {module}; sys.exit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tiny_run.ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_command_needs_no_stdout():
    code = "import sys, types; from rlx import cli; m = types.ModuleType('quiet'); sys.modules['quiet'] = m"
    code += "; m.main = lambda words: 0; cli.COMMANDS['show'] = ('quiet', ''); sys.exit(cli.run('show', []))"
    words = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(words, cwd=tiny_run.ROOT, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def without_reader(*words):
    """(exit status, standard error) of Python with these words, its output in a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=tiny_run.ROOT, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("size", [10, 200000])
def test_a_reader_that_leaves_is_no_error(size):
    """As `rlx ... | head` does; the shell's status of a program that SIGPIPE ended."""
    code = "import sys, types; from rlx import cli; m = types.ModuleType('long'); sys.modules['long'] = m"
    code += f"; m.main = lambda words: print('x' * {size}); cli.COMMANDS['show'] = ('long', '')"
    code += "; sys.exit(cli.run('show', []))"
    assert without_reader("-c", code) == (cli.SIGPIPE_STATUS, b"")


def test_a_reader_of_the_help_that_leaves_is_no_error():
    assert without_reader("-m", "rlx.launch", "--help") == (cli.SIGPIPE_STATUS, b"")


def test_the_command_is_installed():
    scripts = (tiny_run.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'rlx = "rlx.launch:main"' in scripts


def test_what_a_user_can_mend_is_said_without_a_traceback(monkeypatch, capsys, tmp_path):
    recipe = tiny_run.write(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("{\n")
    words = ("train", f"--config={recipe}")
    assert rlx(monkeypatch, *words) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"rlx train: {tmp_path / 'tasks.jsonl'}, line 1: not JSON")
    assert "Traceback" not in error
    monkeypatch.setenv("RLX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        rlx(monkeypatch, *words)


def test_a_wrong_configuration_is_said_with_every_problem(monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        rlx(monkeypatch, "train", "--config=configs/base.py", "--config.run.name=a/b")
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("rlx train: the configuration is wrong:\n")
    assert "config.run.name = 'a/b'" in error
    assert "config.model.path" in error


def test_verify_model_takes_words(monkeypatch, capsys, tmp_path):
    assert rlx(monkeypatch, "verify-model", str(tmp_path)) == 2
    assert f"{tmp_path}/reference.npz" in capsys.readouterr().err


def test_the_module_is_the_command():
    with tiny_run.start("rlx.cli", "nonsense") as process:
        _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "there is no command 'nonsense'" in error
