"""Under which address an engine is told to find the trainer's rank."""

import socket

import pytest

from rlx.rollout.engine import EngineError
from rlx.sync.distributed import own_address


def test_the_address_is_that_of_the_way_to_the_engine(monkeypatch):
    class Way:
        """A machine whose name is its loopback's, with two networks."""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def connect(self, to):
            self.own = {"10.1.0.7": "10.1.0.2", "192.168.3.7": "192.168.3.2"}[to[0]]

        def getsockname(self):
            return self.own, 40_000

    monkeypatch.setattr(socket, "socket", lambda *_: Way())
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert own_address("http://10.1.0.7:30000") == "10.1.0.2"
    assert own_address("http://192.168.3.7:30001") == "192.168.3.2"


def test_an_engine_on_this_machine_finds_it_there():
    assert own_address("http://127.0.0.1:30000") == "127.0.0.1"
    assert own_address("http://localhost:30000") == "127.0.0.1"


def test_no_way_to_an_engine_is_the_engine_s_failure():
    with pytest.raises(EngineError, match=r"no way from here to nowhere\.invalid"):
        own_address("http://nowhere.invalid:30000")
