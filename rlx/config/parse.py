"""An ml_collections ConfigDict to the frozen dataclasses of `rlx.config.schema`, and back to plain text.

Types come from the dataclasses' annotations alone: nested dataclasses, dict[str, ...], tuple[X, ...], Literal, bool,
int, float and str. Nothing has a default here: a missing key is as wrong as an unknown one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict, config_dict

from rlx.config.errors import ConfigError, nearest, unknown_key
from rlx.config.schema import Config

SCALARS = (bool, int, float, str)

EVERY_KEY = "configs/base.py has every key: start a recipe from its get_config()"


def parse(tree: ConfigDict | Mapping[str, Any]) -> Config:
    """The configuration of `tree`, a ConfigDict or what `to_dict` or a config.json holds.

    Raises:
      ConfigError: unknown and missing keys, values of a wrong type or outside a choice; all of them, one a line.
    """
    problems: list[str] = []
    config = _record(Config, plain(tree), "config", problems)
    if problems:
        raise ConfigError(*problems)
    return config


def parse_recorded(tree: Mapping[str, Any], path: Path) -> Config:
    """What a run wrote to `path`. Raises ConfigError, which names the file: it may lack newer keys."""
    try:
        return parse(tree)
    except ConfigError as error:
        older = "the run is of an older rlx; add the key to that file, with its value in configs/base.py"
        raise ConfigError(*(f"{path}: {problem.replace(EVERY_KEY, older)}" for problem in error.problems)) from error


def plain(tree: ConfigDict | Mapping[str, Any]) -> Mapping[str, Any]:
    """`tree` as nested dicts, references resolved; a required value that was never given is None."""
    return _resolved(tree) if isinstance(tree, ConfigDict) else tree


def _resolved(value: Any) -> Any:
    if isinstance(value, ConfigDict):
        return {name: _resolved(v) for name, v in value.iteritems(preserve_field_references=True)}
    if isinstance(value, config_dict.FieldReference):
        try:
            return _resolved(value.get())
        except config_dict.RequiredValueError:
            return None
    return value


def to_dict(config: Config) -> dict[str, Any]:
    """Nested dicts of JSON-able values; `parse` reads them back."""
    return dataclasses.asdict(config)


def dump(config: Config) -> str:
    """The whole configuration as JSON text, keys in the schema's order: the content of config.json and golden files."""
    return json.dumps(to_dict(config), indent=2, ensure_ascii=False) + "\n"


def schema_keys(record: type = Config, prefix: str = "config") -> Iterator[tuple[str, Any]]:
    """Every key with its annotation, depth first; the entries of a dict of records are called NAME."""
    for name, hint in hints(record).items():
        key = f"{prefix}.{name}"
        yield key, hint
        if dataclasses.is_dataclass(hint):
            yield from schema_keys(hint, key)  # type: ignore[arg-type]
        elif (entry := _entry_record(hint)) is not None:
            yield from schema_keys(entry, f"{key}.NAME")


def annotation(key: str) -> Any | None:
    """The annotation of a key such as `config.tasks.sources.chain.weight`, None where the schema ends above it."""
    hint: Any = Config
    for name in key.split(".")[1:]:
        if typing.get_origin(hint) is dict:
            hint = typing.get_args(hint)[1]
        elif dataclasses.is_dataclass(hint) and name in hints(hint):  # type: ignore[arg-type]
            hint = hints(hint)[name]  # type: ignore[arg-type]
        else:
            return None
    return None if hint is Any else hint


@functools.cache
def hints(record: type) -> dict[str, Any]:
    """Field name to resolved annotation, in the order of the fields."""
    resolved = typing.get_type_hints(record)
    return {field.name: resolved[field.name] for field in dataclasses.fields(record)}


def describe(hint: Any) -> str:
    """An annotation in words: `int`, `tuple of str`, `'a', 'b'`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return ", ".join(repr(choice) for choice in arguments)
    if origin is tuple:
        return f"tuple of {describe(arguments[0])}"
    return "dict" if origin is dict or dataclasses.is_dataclass(hint) else hint.__name__


def _entry_record(hint: Any) -> type | None:
    """The dataclass D of a dict[str, D]."""
    arguments = typing.get_args(hint)
    is_map = typing.get_origin(hint) is dict and dataclasses.is_dataclass(arguments[1])
    return arguments[1] if is_map else None


def _record(record: type, value: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return _wrong_type(dict, value, key, problems)
    fields = hints(record)
    known = [f"{key}.{name}" for name in fields] + [k for k, _ in schema_keys()]
    problems += [unknown_key(f"{key}.{name}", value[name], known) for name in value if name not in fields]
    missing = {name: hint for name, hint in fields.items() if name not in value}
    problems += [f"{key}.{name}: missing, must be {describe(hint)}; {EVERY_KEY}" for name, hint in missing.items()]
    present = {n: _value(h, value[n], f"{key}.{n}", problems) for n, h in fields.items() if n in value}
    return record(**present) if len(present) == len(fields) else None


def _value(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, key, problems)  # type: ignore[arg-type]
    if origin is dict:
        return _map(arguments[1], value, key, problems)
    if origin is tuple:
        return _tuple(hint, value, key, problems)
    if origin is Literal:
        return _choice(arguments, value, key, problems)
    if hint in SCALARS:
        return _scalar(hint, value, key, problems)
    raise TypeError(f"{key}: the schema's annotation {hint} is of no kind that `parse` reads")


def _scalar(hint: type, value: Any, key: str, problems: list[str]) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    return value if type(value) is hint else _wrong_type(hint, value, key, problems)


def _choice(choices: tuple[Any, ...], value: Any, key: str, problems: list[str]) -> Any:
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return choice
    close = nearest(str(value), map(str, choices))
    hint = f"; the nearest is {close!r}" if close else ""
    problems.append(f"{key} = {value!r}: must be one of {', '.join(map(repr, choices))}{hint}")
    return None


def _tuple(hint: Any, value: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value, tuple | list):
        return _wrong_type(hint, value, key, problems)
    element = typing.get_args(hint)[0]
    return tuple(_value(element, v, f"{key}[{i}]", problems) for i, v in enumerate(value))


def _map(entry: Any, value: Any, key: str, problems: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return _wrong_type(dict, value, key, problems)
    read = _free if entry is Any else functools.partial(_value, entry)
    return {name: read(v, f"{key}.{name}", problems) for name, v in value.items()}


def _free(value: Any, key: str, problems: list[str]) -> Any:
    """A value that only a later reader judges: anything JSON can hold. Lists become tuples, so that dumps read back."""
    if isinstance(value, Mapping):
        return {name: _free(v, f"{key}.{name}", problems) for name, v in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_free(v, f"{key}[{i}]", problems) for i, v in enumerate(value))
    if value is None or type(value) in SCALARS:
        return value
    problems.append(f"{key} = {value!r}: must be what JSON can hold, not {type(value).__name__}")
    return None


def _wrong_type(hint: Any, value: Any, key: str, problems: list[str]) -> None:
    problems.append(f"{key} = {value!r}: must be {describe(hint)}, not {type(value).__name__}")
