"""The command line of every program that reads a recipe.

    --config=configs/quickstart.py[:variant] --config.learner.learning_rate=1e-4 --config.tasks.sources.NAME.weight=2

The recipe decides which keys there are; the command line changes their values and adds none.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from rlx.config import recipe
from rlx.config.checks import check
from rlx.config.errors import ConfigError, unknown_key
from rlx.config.parse import annotation, describe, parse, plain
from rlx.config.schema import Config

HELP = frozenset({"--help", "-help", "-h"})
OVERRIDE = re.compile(r"--?(?:no)?(config\.[^=]+)(?:=(.*))?", re.DOTALL)
REJECTED = re.compile(r"flag --(config\.[^=]+)=(.*?): (.*)", re.DOTALL)


def config_from_argv(argv: Sequence[str], own: flags.FlagValues, *, simulated: bool = False) -> Config:
    """The checked configuration that a command line asks for.

    Args:
      argv: the program's name, then its arguments.
      own: the program's further flags, defined by the caller, who reads their values from it afterwards.
      simulated: nothing runs for real; see `rlx.config.checks.check`.

    Raises:
      ConfigError: whatever is wrong with the command line, the recipe, a key or a value.
    """
    config = parse(tree_from_argv(argv, own))
    check(config, simulated=simulated)
    return config


def config_or_exit(argv: Sequence[str], own: flags.FlagValues, usage: str, *, simulated: bool = False) -> Config:
    """`config_from_argv` for main programs: a wrong configuration is printed without a traceback, exit status 2.

    `--help` prints `usage` and the program's own flags, exit status 0.
    """
    if HELP & set(argv[1:]):
        print(f"{usage.strip()}\n\n  --config=FILE[:variant]  a recipe\n  --config.KEY=VALUE  changes a key of it")
        print("".join(f"  --{name}  {own[name].help}\n" for name in own), end="")
        raise SystemExit(0)
    try:
        return config_from_argv(argv, own, simulated=simulated)
    except ConfigError as error:
        print(f"{argv[0]}: the configuration is wrong:", file=sys.stderr)
        print("\n".join(f"  {problem}" for problem in error.problems), file=sys.stderr)
        raise SystemExit(2) from None


def tree_from_argv(argv: Sequence[str], own: flags.FlagValues) -> ConfigDict:
    """The recipe that argv names with argv's changes, neither parsed nor checked. Raises ConfigError."""
    name, rest = _recipe_name(argv)
    tree = recipe.load(name)
    if not isinstance(tree, ConfigDict):
        raise ConfigError(f"--config={name}: get_config() must return a ConfigDict, not {type(tree).__name__}")
    _refuse_unknown(tree, rest)
    try:
        holder = config_flags.DEFINE_config_dict("config", tree, flag_values=own, sys_argv=rest)
        left_over = own(rest)[1:]
    except (flags.Error, TypeError, ValueError) as error:  # what absl and ml_collections raise for a value they refuse
        raise ConfigError(_rejected(str(error))) from error
    if left_over:
        raise ConfigError(*(f"{word!r}: unexpected; options are written --name=value" for word in left_over))
    return holder.value


def _recipe_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """(the value of --config, argv without it)."""
    outer = flags.FlagValues()
    outer.set_gnu_getopt()
    holder = flags.DEFINE_string("config", "", "a recipe", flag_values=outer)
    try:
        rest = outer(list(argv), known_only=True)
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    if not holder.value:
        raise ConfigError("--config is missing: name a recipe, for instance --config=configs/quickstart.py")
    return holder.value, rest


def _refuse_unknown(tree: ConfigDict, argv: Sequence[str]) -> None:
    known = list(_keys(plain(tree), "config"))
    matches = [m for m in map(OVERRIDE.fullmatch, argv) if m]
    problems = [unknown_key(m[1], m[2] or "", known) + _way_out(m[1]) for m in matches if m[1] not in known]
    if problems:
        raise ConfigError(*problems)


def _way_out(key: str) -> str:
    """What to do about an option of a task source that the recipe does not name."""
    section, found, name = key.partition(".options.")
    return f"; the options as a whole can be given: --{section}.options=\"{{'{name}': ...}}\"" if found else ""


def _keys(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in tree.items():
        yield f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}.{name}")


def _rejected(message: str) -> str:
    """absl's words for a value that does not fit its flag, with the type that the schema asks for."""
    match = REJECTED.fullmatch(message)
    if match is None:
        return message
    key, value, reason = match.groups()
    expected = annotation(key)
    return f"{key} = {value!r}: {reason if expected is None else f'must be {describe(expected)}'}"
