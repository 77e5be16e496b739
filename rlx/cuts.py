"""Cut points of tasks of several steps: sessions that start where a step begins, with what was said and made before.

    rlx cuts record --config=RECIPE --from=reference --cuts=DIR    the projects' own solutions as the pass
    rlx cuts record --config=RECIPE --from=policy --attempts=8     what the model itself passes
    rlx cuts verify --config=RECIPE                                plays every cut again; status 1 where one differs
    rlx cuts list

Cuts become tasks where a source names their directory, options={"cuts": "cuts"}; `rlx edge` attempts them as any task.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags
from tqdm import tqdm

from rlx import assemble, cli
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.envs.chat import load_chat_tokenizer
from rlx.envs.conversation import Conversation, open_conversation
from rlx.envs.tool_calls import write_call
from rlx.envs.web.project import TOOLS, WebProject, reference
from rlx.envs.web.tasks import ENVIRONMENT
from rlx.parallel import runtime
from rlx.rollout import cuts
from rlx.rollout.collect import collect
from rlx.rollout.cuts import PASSED, CutRefused, CutStore, RecordedSession
from rlx.rollout.tool_session import ToolSession
from rlx.sandbox.pool import Sandboxes
from rlx.sessions.web import WebSessions, fingerprint, whole_tasks
from rlx.types import Task

SOURCES = ("reference", "policy")
WORDS = ("record", "verify", "list")


@dataclasses.dataclass(frozen=True)
class Recording:
    """What cuts are recorded and verified with: an asynchronous context manager's worth of parts."""

    config: Config
    sessions: WebSessions
    conversation: Conversation

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.conversation)

    def recorded(self, task: Task) -> RecordedSession:
        """A session of a whole task that remembers its cuts."""
        env = self.sessions.env(task)
        return RecordedSession(self.around(env), env, task, self.fingerprint)

    def around(self, env: WebProject) -> ToolSession:
        return ToolSession(env, self.conversation, self.config.tools)

    def reference(self, task: Task) -> list[np.ndarray]:
        """The responses of a project's own solution."""
        project = self.sessions.project(task)
        chat, form = self.conversation.chat, self.conversation.form
        texts = [
            said if isinstance(said, str) else "\n".join(write_call(form, call) for call in said)
            for said in reference(project, 0, len(project.steps))
        ]
        return [np.append(chat.encode(text), chat.end_of_turn_id).astype(np.int32) for text in texts]


async def record_reference(recording: Recording, tasks: Sequence[Task], store: CutStore) -> list[str]:
    """Digests of the cuts of every task's own solution. Raises CutRefused where one does not pass."""
    digests: list[str] = []
    for task in tqdm(tasks, desc="passes", unit="", file=sys.stderr):
        digests += map(store.put, await cuts.record(recording.recorded(task), recording.reference(task)))
    return digests


async def record_policy(
    recording: Recording, model: assemble.Model, tasks: Sequence[Task], store: CutStore, attempts: int
) -> list[str]:
    """Digests of the cuts of the first attempt at each task that the policy passes."""
    config = recording.config
    state = assemble.fresh_state(config, model)
    engine = assemble.make_engine(config, model, assemble.policy_params(config, model, state.trainable), 0)
    # Without retries the n-th session that is made is the n-th sample's.
    sampling = dataclasses.replace(assemble.sampling(config), group_size=attempts, retries=0)
    digests: list[str] = []
    for number, task in enumerate(tqdm(tasks, desc="tasks", unit="", file=sys.stderr)):
        made: list[RecordedSession] = []

        def session(task: Task, made: list[RecordedSession] = made) -> RecordedSession:
            made.append(recording.recorded(task))
            return made[-1]

        [group] = await collect(engine, session, [(number, task)], sampling)
        passes = [made[sample.index] for sample in group.samples if sample.reward >= PASSED]
        digests += map(store.put, passes[0].cuts if passes else [])
    return digests


async def verify(recording: Recording, store: CutStore) -> list[str]:
    """What is wrong with the cuts that are refused, a line each."""
    found, problems = store.readable()
    for digest, cut in tqdm(found, desc="cuts", unit="", file=sys.stderr):
        env = recording.sessions.env(cut.task)
        try:
            await cuts.verify(cut, recording.around(env), env, recording.fingerprint)
        except CutRefused as refused:
            problems.append(f"{digest}: {refused}")
    return problems


def endless(config: Config) -> Config:
    """A pass that is given is played to its end, whatever the turns of a session that is trained on."""
    tools = dataclasses.replace(config.tools, max_turns=sys.maxsize, session_seconds=float("inf"))
    return dataclasses.replace(config, tools=tools)


async def _run(given: argparse.Namespace, config: Config, tasks: Sequence[Task]) -> int:
    asked = config.tasks
    tokenizer = load_chat_tokenizer(config.model.path, asked.system_prompt, asked.suffix, config.chat)
    conversation = open_conversation(tokenizer, config.tools.format, TOOLS)
    by_policy = given.word == "record" and given.source == "policy"
    config = config if by_policy else endless(config)
    store = CutStore(given.cuts)
    async with Sandboxes(config.sandbox) as sandboxes, WebSessions(config, sandboxes, conversation) as sessions:
        recording = Recording(config, sessions, conversation)
        if given.word == "verify":
            problems = await verify(recording, store)
            print("\n".join(problems) or f"all {len(list(store))} cuts play again as they were recorded")
            return int(bool(problems))
        if by_policy:
            digests = await record_policy(recording, assemble.load_model(config), tasks, store, given.attempts)
        else:
            digests = await record_reference(recording, tasks, store)
    print(f"{len(set(digests))} cuts of {len(tasks)} tasks in {store.directory}")
    return 0


def _list(store: CutStore) -> int:
    found, problems = store.readable()
    for digest, cut in found:
        print(f"{digest[:12]}  {cut.name}  {len(cut.tokens)} tokens, workspace {cut.workspace[:12]}")
    print("".join(f"rlx cuts list: {problem}\n" for problem in problems), end="", file=sys.stderr)
    return int(bool(problems))


def main(argv: Sequence[str] | None = None) -> int:
    """`rlx cuts`: 0; 1 where `verify` refuses a cut or `list` cannot read one."""
    given, recipe = _parser().parse_known_args(argv)
    if given.word != "record" and not given.cuts.is_dir():
        raise ValueError(f"there is no directory {given.cuts} (--cuts); `rlx cuts record` makes one")
    if given.word == "list":
        return _list(CutStore(given.cuts))
    config = config_or_exit([f"rlx cuts {given.word}", *recipe], flags.FlagValues(), __doc__ or "")
    tasks = whole_tasks(config)
    if not tasks:
        raise ValueError(f"no source of the recipe has the environment {ENVIRONMENT!r}: there is nothing to cut")
    runtime.use_compilation_cache(config.run.compilation_cache)
    return asyncio.run(_run(given, config, tasks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlx cuts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", choices=WORDS)
    parser.add_argument("--cuts", type=Path, default=Path("cuts"), help="the directory of the cuts (cuts)")
    parser.add_argument("--from", dest="source", choices=SOURCES, default="reference", help="whose pass (reference)")
    parser.add_argument("--attempts", type=int, default=8, help="of the policy at a task (8)")
    return parser


if __name__ == "__main__":
    sys.exit(cli.run("cuts", sys.argv[1:]))
