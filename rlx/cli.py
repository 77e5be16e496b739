"""The `rlx` command: one word, then what that program takes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from rlx.config.errors import ConfigError

# Imported when they are asked for: `rlx --help` needs no jax.
COMMANDS = {
    "train": ("rlx.train", "train a policy by RL"),
    "sft": ("rlx.sft", "supervised fine-tuning on JSONL"),
    "evaluate": ("rlx.evaluate", "pass rate of a run's newest checkpoint on held-out tasks"),
    "export": ("rlx.export", "a run's newest checkpoint as a Hugging Face directory"),
    "show": ("rlx.show", "a run in the terminal; --html writes a page of its samples"),
    "tensorboard": ("rlx.board", "TensorBoard on a run or a directory of runs"),
    "chat": ("rlx.chat", "talk to a checkpoint"),
    "simulate": ("rlx.simulate", "what a cluster would do: waiting, ages, occupancy"),
    "verify-model": ("rlx.verify", "check a checkpoint against stored logits and gradient norms"),
}
# These take words of their own, the others a recipe.
WITHOUT_RECIPE = ("show", "tensorboard", "chat", "verify-model")


def usage() -> str:
    lines = [f"  rlx {name:<14} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "usage: rlx COMMAND ...\n\n" + "\n".join(lines) + "\n\n`rlx COMMAND --help` says what a command takes."


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "-h", "--help", "help"):
        print(usage())
        return 0 if name else 2
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; the nearest is {close[0]!r}" if close else ""
        print(f"rlx: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(name, sys.argv[2:])


def run(name: str, arguments: list[str]) -> int:
    """The program `name` with its arguments: its exit status, and 1 or 2 with a message where it raises one."""
    program = importlib.import_module(COMMANDS[name][0])
    try:
        return program.main(arguments if name in WITHOUT_RECIPE else [f"rlx {name}", *arguments])
    except ConfigError as error:
        print("\n".join(f"rlx {name}: {problem}" for problem in error.problems), file=sys.stderr)
        return 2
    except (ValueError, OSError, RuntimeError) as error:
        # What a user can mend says so itself; a traceback would bury it. RLX_TRACEBACK=1 shows it all the same.
        if os.environ.get("RLX_TRACEBACK"):
            raise
        print(f"rlx {name}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
