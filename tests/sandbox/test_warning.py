"""A run that does not isolate programs says so at its start."""

import pytest

from configs import base
from rlx.config.parse import parse
from rlx.envs.chat import load_chat_tokenizer
from rlx.interrupt import Preemption
from rlx.sessions.environments import Environments, entered
from tests.tiny_tokenizer import build


@pytest.mark.parametrize("kind", ["subprocess", "bubblewrap"])
def test_what_is_not_protected_is_named(tmp_path, capsys, kind):
    tree = base.get_config()
    tree.tasks.sources.sums = base.source(dataset="arithmetic", environment="python_tool")
    tree.tools.format = "plain"
    tree.sandbox.kind = kind
    tokenizer = load_chat_tokenizer(build(tmp_path), "", "")
    with Preemption() as preemption, entered(Environments(parse(tree), tokenizer, None), preemption):
        said = capsys.readouterr().err
    unprotected = "not protected: files, network, other processes, system calls (docs/sandboxes.md)"
    assert (unprotected in said) == (kind == "subprocess"), said
