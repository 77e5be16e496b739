"""The `rlx` command begins again with huge pages where the kernel gives them to those who ask."""

import json
import os
import subprocess
import sys

import pytest

from rlx import launch

BEGIN = """
import json, os, sys
from rlx import launch

launch.with_huge_pages()
print(json.dumps([os.environ["GLIBC_TUNABLES"], sys.argv]))
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


@pytest.mark.parametrize(
    "given, wanted",
    [
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.check=0", "glibc.malloc.check=0:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
)
def test_a_process_begins_again_once_with_its_own_arguments(given, wanted):
    ran = subprocess.run(
        [sys.executable, "-c", BEGIN, "a b", "--c"],
        env=os.environ | {"GLIBC_TUNABLES": given},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [wanted if launch.can_be_asked_for() else given, ["-c", "a b", "--c"]]


def test_the_command_keeps_its_exit_status():
    ran = subprocess.run([sys.executable, "-m", "rlx.launch", "nonsense"], capture_output=True, text=True)
    assert ran.returncode == 2
    assert "there is no command 'nonsense'" in ran.stderr
