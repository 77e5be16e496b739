"""The browser that tests of pages need."""

import os

import pytest

from rlx.envs.web.browser import BrowserMissing, find_browser


def require() -> None:
    """Where there is no browser its tests are skipped, but not in CI: `make system-deps` installs one there."""
    try:
        find_browser()
    except BrowserMissing as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
