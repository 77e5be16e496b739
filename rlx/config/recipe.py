"""A recipe is a Python file with `get_config()`, or `get_config(variant)` and `VARIANTS`, that returns a ConfigDict.

It is named as `configs/quickstart.py` or `configs/quickstart.py:variant`.
"""

from __future__ import annotations

import importlib.util
import inspect
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from rlx.config.errors import ConfigError, nearest


def load(recipe: str) -> Any:
    """What `get_config` of a recipe returns.

    Raises:
      ConfigError: no such file or variant, or an error inside the recipe, with its line.
    """
    path, _, variant = recipe.partition(":")
    module = load_module(Path(path))
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={recipe}: {path} has no function get_config()")
    arguments = (variant,) if variant else ()
    _check_variant(recipe, module, variant)
    try:
        return module.get_config(*arguments)
    except Exception as error:
        raise ConfigError(_inside(Path(path), error)) from error


def variants(module: ModuleType) -> tuple[str, ...]:
    """The named variants of a recipe; () where it takes none. "" in VARIANTS stands for no name."""
    return tuple(name for name in module.VARIANTS if name) if hasattr(module, "VARIANTS") else ()


def load_module(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(_no_such_file(path))
    spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path.absolute())
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: a recipe is a Python file, its name ends in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(_inside(path, error)) from error
    return module


def _no_such_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path("configs")
    files = sorted(folder.glob("*.py")) if folder.is_dir() else []
    close = nearest(path.stem, [f.stem for f in files])
    if close:
        return f"--config={path}: no such file; the nearest is {folder / close}.py"
    there = f"; {folder}/ has {', '.join(f.name for f in files)}" if files else ""
    return f"--config={path}: no such file{there}"


def _check_variant(recipe: str, module: ModuleType, variant: str) -> None:
    known = variants(module)
    if variant and not known:
        raise ConfigError(f"--config={recipe}: the recipe takes no variant; leave out :{variant}")
    if variant and variant not in known:
        close = nearest(variant, known)
        hint = f"; the nearest is {close}" if close else ""
        raise ConfigError(f"--config={recipe}: no variant {variant!r}, there are {', '.join(known)}{hint}")
    required = [p for p in inspect.signature(module.get_config).parameters.values() if p.default is p.empty]
    if required and not variant:
        raise ConfigError(f"--config={recipe}: say which variant, e.g. {recipe}:{known[0] if known else 'NAME'}")


def _inside(path: Path, error: Exception) -> str:
    """The problem line for an error raised by the recipe's own code."""
    file = str(path.absolute())  # what importlib calls it
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename == file:
        lines = [error.lineno]
    where = f"{path}:{lines[-1]}" if lines else f"{path}"
    return f"{where}: {type(error).__name__}: {error}"
