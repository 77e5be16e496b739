"""An OpenAI-compatible endpoint in front of a recipe's engines; every session's exact tokens are written down.

    rlx serve --config=configs/quickstart.py --port=8000 --to=sessions
    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any-name your-agent

A session is an API key, or a path: http://HOST:PORT/sessions/NAME/v1. Its record, SESSIONS/NAME.json, has the ids of
every request, which of them the policy wrote, their log-probs and the versions that wrote them; GET /sessions/NAME
shows it. A client that rewrites history begins a new segment in it. --checkpoint serves the run's newest checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags
from aiohttp import web

from rlx import assemble, cli
from rlx.agents.chat_format import ChatFormat
from rlx.agents.conversation import Format
from rlx.agents.endpoint import Endpoint
from rlx.agents.openai import ChatRequest, Reply, RequestInvalid, Sampling
from rlx.agents.recorder import Limits, Recorder
from rlx.config.flags import config_or_exit
from rlx.config.schema import Config
from rlx.export import newest
from rlx.interrupt import Preempted, Preemption
from rlx.metrics.jsonl import write_bytes
from rlx.metrics.ledger import Ledger
from rlx.parallel import runtime
from rlx.rollout.engine import Engine
from rlx.serving import Place, open_serving, started_servers

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class Written:
    """A recorded session whose record is on disk when its answer leaves."""

    def __init__(self, recorder: Recorder, file: Path):
        self.recorder, self._file = recorder, file

    async def answer(self, request: ChatRequest) -> Reply:
        reply = await self.recorder.answer(request)
        await asyncio.to_thread(
            self._write
        )  # one request of a session is answered at a time: nothing changes meanwhile
        return reply

    def _write(self) -> None:
        write_bytes(self._file, json.dumps(self.recorder.to_dict()).encode())


class Sessions:
    """The sessions of an endpoint, by name."""

    def __init__(self, engine: Engine, form: Format, limits: Limits, directory: Path):
        self._engine, self._form, self._limits, self._directory = engine, form, limits, directory
        self._known: dict[str, Written] = {}

    def begin(self, name: str) -> Written:
        """Raises RequestInvalid for a name that is no file's, or that an earlier server's session has."""
        if not NAME.fullmatch(name):
            raise RequestInvalid(
                f"{name!r} cannot name a session: letters, digits, '.', '_', '-'", "invalid_api_key", 401
            )
        file = self._directory / f"{name}.json"
        if file.exists():
            raise RequestInvalid(f"{file} is there already: an earlier session had this name; take another", "", 409)
        recorder = Recorder(name, len(self._known), self._engine, self._form, self._limits)
        self._known[name] = Written(recorder, file)
        return self._known[name]

    async def show(self, request: web.Request) -> web.Response:
        """GET /sessions/NAME"""
        name = request.match_info["session"]
        if name not in self._known:
            raise web.HTTPNotFound(text=f"there is no session {name!r}")
        return web.json_response(self._known[name].recorder.to_dict())


def limits_of(config: Config) -> Limits:
    """Of one response what a rollout has, and its temperature."""
    rollout = config.rollout
    return Limits(config.engine.context, rollout.max_new_tokens, rollout.temperature, config.run.seed)


async def serve_sessions(sessions: Sessions, model: str, host: str, port: int) -> None:
    """Until it is cancelled."""
    endpoint = Endpoint(model, Sampling.CLIENT, sessions.begin, host, port)
    endpoint.router.add_get("/sessions/{session}", sessions.show)
    async with endpoint:
        print(f"OPENAI_BASE_URL={endpoint.url}/v1", flush=True)
        await asyncio.Event().wait()


def serve(config: Config, directory: Path, host: str, port: int, *, checkpoint: bool) -> None:
    """Until a signal comes. Raises what `rlx.serving.open_serving` raises."""
    runtime.use_compilation_cache(config.run.compilation_cache)
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(started_servers(config, directory))
        model = assemble.load_model(config)
        restored = newest(config, model) if checkpoint else None
        if checkpoint and restored is None:
            raise ValueError(f"{config.run.path} has no checkpoint; train first, or leave out --checkpoint")
        state = assemble.fresh_state(config, model) if restored is None else restored.state
        preemption = stack.enter_context(Preemption())
        place = Place(directory, group, preemption)
        opened = open_serving(config, model, state.trainable, int(state.version), Ledger(), place)
        engine = stack.enter_context(opened).engine
        sessions = Sessions(engine, ChatFormat(model.tokenizer), limits_of(config), directory)
        with contextlib.suppress(Preempted):
            preemption.run(serve_sessions(sessions, Path(config.model.path).name, host, port))


def own_flags() -> flags.FlagValues:
    own = flags.FlagValues()
    flags.DEFINE_string("host", "127.0.0.1", "address to listen on; there is no authentication", flag_values=own)
    flags.DEFINE_integer("port", 8000, "port; 0 = a free one", flag_values=own)
    flags.DEFINE_string("to", "sessions", "directory of the records", flag_values=own)
    flags.DEFINE_boolean("checkpoint", False, "serve the run's newest checkpoint", flag_values=own)
    return own


def main(argv: Sequence[str] | None = None) -> int:
    """`rlx serve`: prints OPENAI_BASE_URL when it is ready; Ctrl-C ends it."""
    own = own_flags()
    config = config_or_exit(list(sys.argv if argv is None else argv), own, __doc__ or "")
    value = own.flag_values_dict()
    serve(config, Path(value["to"]), value["host"], value["port"], checkpoint=value["checkpoint"])
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("serve", sys.argv[1:]))
