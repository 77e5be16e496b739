"""The `rlx` command: one word, then what that program takes."""

from __future__ import annotations

import difflib
import importlib
import os
import select
import signal
import sys
import threading
from types import ModuleType

from absl.flags import FlagValues

from rlx.config.errors import ConfigError
from rlx.config.flags import HELP, config_or_exit

# Imported when they are asked for: `rlx --help` needs no jax.
COMMANDS = {
    "train": ("rlx.train", "train a policy by RL"),
    "sft": ("rlx.sft", "supervised fine-tuning on JSONL"),
    "evaluate": ("rlx.evaluate", "pass rate of a run's newest checkpoint on held-out tasks"),
    "export": ("rlx.export", "a run's newest checkpoint as a Hugging Face directory"),
    "show": ("rlx.show", "a run in the terminal; --html writes a page of its samples"),
    "tensorboard": ("rlx.board", "TensorBoard on a run or a directory of runs"),
    "chat": ("rlx.chat", "talk to a checkpoint"),
    "serve": ("rlx.serve", "an OpenAI-compatible endpoint that records sessions of outside agents"),
    "engines": ("rlx.engines", "SGLang servers of this machine: up, status, down"),
    "edge": ("rlx.edge", "tasks that the policy sometimes passes, and a split of them"),
    "cuts": ("rlx.cuts", "record, verify and list where steps of a task begin: sessions can start there"),
    "diff": ("rlx.diff", "two configurations: what must change, be searched again, or stay"),
    "sweep": ("rlx.sweep", "runs over the values of some settings, with seeds"),
    "compare": ("rlx.compare", "runs beside one another, also of other stacks: a page, tables, PNGs"),
    "agree": ("rlx.agree", "does a proxy rank configurations as the target does?"),
    "signal": ("rlx.signal", "what an expert learned over its base: create, list, show, verify, calibrate"),
    "plan": ("rlx.plan", "parameters of a model, trainable ones and their share, before hardware is asked for"),
    "simulate": ("rlx.simulate", "what a cluster would do: waiting, ages, occupancy"),
    "audit": ("rlx.audit", "what engines serve; why sampler and trainer disagree"),
    "verify-layout": ("rlx.verify_layout", "check a layout of devices against one device, on virtual devices"),
    "verify-model": ("rlx.verify", "check a checkpoint against stored logits and gradient norms"),
}
# These take words of their own, the others a recipe.
WITHOUT_RECIPE = (
    *("audit", "signal", "engines", "cuts", "diff", "compare", "agree", "show", "tensorboard", "chat", "verify-model"),
)
# And these nothing but a recipe: what is wrong with it is said at once, before jax and the rest are imported.
RECIPE_ONLY = ("train", "sft", "evaluate")
SIGPIPE_STATUS = 128 + 13  # what a shell says of a program whose reader left


def usage() -> str:
    lines = [f"  rlx {name:<14} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "usage: rlx COMMAND ...\n\n" + "\n".join(lines) + "\n\n`rlx COMMAND --help` says what a command takes."


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "-h", "--help", "help"):
        return say_usage(0 if name else 2)
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; the nearest is {close[0]!r}" if close else ""
        print(f"rlx: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(name, sys.argv[2:])


def say_usage(status: int) -> int:
    try:
        print(usage(), flush=True)
    except OSError as error:
        return say_error("rlx", error)
    return status


def imported(module: str) -> ModuleType:
    """Meanwhile Ctrl-C ends the process at once, with nothing to tidy up: a KeyboardInterrupt may come while jax's
    callback of Python's collector runs, where it is lost."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, handler)


def watches(arguments: list[str]) -> bool:
    """`rlx evaluate --watch=RUN` takes the run's own configuration."""
    return any(word.partition("=")[0] == "--watch" for word in arguments)


def run(name: str, arguments: list[str]) -> int:
    """The program `name` with its arguments: its exit status, and 1 or 2 with a message where it raises one."""
    if name in RECIPE_ONLY and not HELP & set(arguments) and not watches(arguments):
        config_or_exit([f"rlx {name}", *arguments], FlagValues(), "")
    program = imported(COMMANDS[name][0])
    try:
        status = program.main(arguments if name in WITHOUT_RECIPE else [f"rlx {name}", *arguments])
        if sys.stdout is not None:  # closed
            sys.stdout.flush()  # a reader that has left shows here, and not at the interpreter's exit
        return status
    except ConfigError as error:
        print("\n".join(f"rlx {name}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        return say_error(f"rlx {name}", error)


def say_error(command: str, error: Exception) -> int:
    """The exit status. Called where the error is handled, which RLX_TRACEBACK=1 has raised again."""
    if isinstance(error, BrokenPipeError) and reader_left():
        return SIGPIPE_STATUS
    # What a user can mend says so itself; a traceback would bury it.
    if os.environ.get("RLX_TRACEBACK"):
        raise error
    print(f"{command}: {error}", file=sys.stderr)
    return 1


def reader_left() -> bool:
    """Whether nobody reads stdout any more, as in `rlx plan ... | head`; if so, what is left to say goes nowhere."""
    stdout, poll = sys.stdout.fileno(), select.poll()
    poll.register(stdout, 0)  # the error of a pipe without a reader is told unasked
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), stdout)
    return True


if __name__ == "__main__":
    sys.exit(main())
