"""The `rlx` command begins again with huge pages where the kernel gives them to those who ask."""

import gc
import json
import os
import signal
import subprocess
import sys

import pytest

from rlx import launch

BEGIN = """
import json, os, sys
from rlx import launch

started = os.environ.get("GLIBC_TUNABLES")  # what this start's C library has read
launch.can_be_asked_for = lambda: True
launch.with_huge_pages()
print(json.dumps([started, os.environ.get("GLIBC_TUNABLES"), sys.argv]))
"""


@pytest.mark.parametrize(
    "kernel, libc, expected",
    [
        ("always [madvise] never\n", "glibc 2.36", True),
        ("always [madvise] never\n", "glibc 2.35", True),
        ("always [madvise] never\n", "glibc 2.31", False),
        ("always [madvise] never\n", "musl 1.2.5", False),
        ("always [madvise] never\n", None, False),
        ("[always] madvise never\n", "glibc 2.36", False),
        ("always madvise [never]\n", "glibc 2.36", False),
        (None, "glibc 2.36", False),
    ],
)
def test_who_can_ask(tmp_path, monkeypatch, kernel, libc, expected):
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    said = tmp_path / "enabled"
    if kernel is not None:
        said.write_text(kernel)
    assert launch.can_be_asked_for(said) is expected


def begin(*python, given=None):
    """(tunables of the last start, those that its children get, its arguments)"""
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    ran = subprocess.run(
        [sys.executable, *python, "-c", BEGIN, "a b", "--c"],
        env=clean if given is None else clean | {"GLIBC_TUNABLES": given},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    started, children, arguments = json.loads(ran.stdout)
    assert arguments == ["-c", "a b", "--c"]
    return started, children


@pytest.mark.parametrize(
    "given, started, children",
    [
        (None, "glibc.malloc.hugetlb=1", None),
        ("", "glibc.malloc.hugetlb=1", None),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1", "glibc.malloc.check=0"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_process_begins_again_once_with_its_own_arguments(given, started, children):
    assert begin("-X", "utf8", given=given) == (started, children)


def test_there_is_no_third_start_where_the_variable_is_lost(tmp_path):
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nunset GLIBC_TUNABLES\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    code = BEGIN.replace("launch.with_huge_pages()", f"sys.executable = {str(wrapper)!r}; launch.with_huge_pages()")
    ran = subprocess.run([wrapper, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ran.stdout) == [None, None, ["-c"]]


def test_a_program_from_the_standard_input_is_not_lost():
    ran = subprocess.run([sys.executable, "-"], input=BEGIN, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(ran.stdout)[2] == ["-"]


@pytest.mark.parametrize("executable", ["", "/nowhere/python"])
def test_a_process_that_cannot_begin_again_goes_on(monkeypatch, executable):
    monkeypatch.setattr(launch, "can_be_asked_for", lambda: True)
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rlx.launch"])
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    launch.with_huge_pages()
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.check=0"


@pytest.mark.parametrize(
    "words, status, said", [(["nonsense"], 2, "there is no command 'nonsense'"), (["train"], 2, "--config is missing")]
)
def test_the_command_keeps_its_exit_status(words, status, said):
    ran = subprocess.run([sys.executable, "-m", "rlx.launch", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == status
    assert said in ran.stderr


def test_what_is_set_for_a_command(monkeypatch):
    before = gc.get_threshold()
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    try:
        launch.prepare()
        assert gc.get_threshold() == (launch.COLLECTED_AFTER, *before[1:])
    finally:
        gc.set_threshold(*before)
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "4"
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "26")
    launch.prepare()
    gc.set_threshold(*before)
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == "26"


@pytest.mark.parametrize("shown", [False, True])
def test_ctrl_c_outside_a_program_ends_a_command_by_the_signal(shown):
    """As a loop of a shell around it expects that is to end, too."""
    code = "from rlx import cli, launch\ndef interrupted():\n    raise KeyboardInterrupt\n"
    code += "cli.main = interrupted\nimport sys\nsys.exit(launch.main())"
    environment = os.environ | {"RLX_TRACEBACK": "1" if shown else ""}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGINT
    assert ("Traceback" in ran.stderr) == bool(ran.stderr) == shown


def test_a_run_without_servers_imports_no_http_library():
    code = "import sys, rlx.train; print(*sorted({'aiohttp', 'transformers', 'grain'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


@pytest.mark.parametrize("handler, status", [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_a_program_is_imported_ends_the_command(tmp_path, handler, status):
    """Wherever it comes: here where an exception is lost, as in jax's callback of the collector. A shell that starts a
    command in the background may have it ignore the signal, and it does."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
        "def main(words):\n    return 0\n"
    )
    code = f"import signal, sys; signal.signal(signal.SIGINT, signal.{handler}); from rlx import cli"
    code += "; cli.COMMANDS['show'] = ('slow', ''); sys.exit(cli.run('show', []))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (status, "")
