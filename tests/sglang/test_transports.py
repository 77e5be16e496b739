"""Every transport delivers what the trainer has, to two real servers; whatever else is sent is caught."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from rlx.rollout.engine import EngineError
from rlx.sync.bridge import Bridge
from rlx.sync.disk import Disk
from rlx.sync.distributed import Distributed, GroupOptions
from rlx.sync.manifest import StagingError
from rlx.sync.staging import Staging
from rlx.sync.tensor import Tensor
from tests import tiny_model
from tests.sglang import faults
from tests.sglang.conftest import PYTHON
from tests.sglang.trainer import ARCH, differences, with_servers

pytestmark = pytest.mark.sglang

TOLERANCE = 1e-4
BUCKET = 40_000  # bytes: three files of the tiny model
TRANSPORTS = {
    "disk": Disk,
    "tensor": Tensor,
    "distributed": lambda: Distributed(GroupOptions(PYTHON)),
}


class Planted:
    """A transport that sends something else, once, and says that all went well."""

    def __init__(self, inner):
        self.inner, self.instead = inner, None

    async def connect(self, http):
        await self.inner.connect(http)

    async def deliver(self, http, staged, files):
        if self.instead is not None:
            staged, self.instead = self.instead, None
            files = list(staged.manifest.files)
        await self.inner.deliver(http, staged, files)

    async def forget(self):
        await self.inner.forget()


def bridge_to(directory, transport, **options):
    return Bridge(Staging(directory, ARCH, "float32", bucket_bytes=BUCKET), lambda: Planted(transport()), **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_servers_get_what_the_trainer_has(two_servers, tmp_path, transport):
    async def main(*https):
        bridge = bridge_to(tmp_path / "staged", TRANSPORTS[transport])
        links = [bridge.link() for _ in https]
        found = []
        for version in (1, 2):
            params = tiny_model.params(version)
            await asyncio.gather(*(link(http, params, version) for link, http in zip(links, https, strict=True)))
            found += [await differences(http, params) for http in https]
        await bridge.close()
        return found, links[0].served.manifest.files

    found, files = with_servers(two_servers, main)
    assert max(found) < TOLERANCE
    assert len(files) > 1  # one bucket alone would prove little


@pytest.mark.parametrize("broken", [False, True])
def test_a_server_that_stays_keeps_no_group_of_a_run_that_ended(server, tmp_path, broken):
    """broken: the trainer's rank is killed before, as where a delivery fails in the middle."""

    async def main(http):
        bridge = Bridge(Staging(tmp_path / "staged", ARCH, "float32"), TRANSPORTS["distributed"])
        link = bridge.link()
        await link(http, tiny_model.params(1), 1)
        group = link.transport._group
        if broken:
            link.transport._sender.process.kill()
            with pytest.raises(EngineError, match="has ended"):
                await link(http, tiny_model.params(2), 2)
        await bridge.close()
        with pytest.raises(EngineError, match="does not exist"):
            await http.command("/destroy_weights_update_group", {"group_name": group})
        again = Bridge(Staging(tmp_path / "again", ARCH, "float32"), Tensor)
        await again.link()(http, tiny_model.params(2), 2)
        await again.close()
        return await differences(http, tiny_model.params(2))

    assert with_servers([server], main) < TOLERANCE


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_what_changed_is_sent(server, tmp_path, transport):
    """Of the third version the files with the layers' matrices are written and sent, the others known by identity."""

    async def main(http):
        bridge = bridge_to(tmp_path / "staged", TRANSPORTS[transport])
        link, sent = bridge.link(), []
        deliver = link.transport.deliver

        async def counting(http, staged, files):
            sent.append(sum(staged.manifest.files[file] for file in files))
            await deliver(http, staged, files)

        link.transport.deliver = counting
        params = tiny_model.params(1)
        for version in (1, 2, 3):
            params = {**params, "layers": tiny_model.params(10 + version)["layers"]}
            await link(http, params, version)
        difference = await differences(http, params)
        await bridge.close()
        return difference, sent, bridge.staging.written_bytes, link.served.manifest

    difference, sent, written, manifest = with_servers([server], main)
    assert difference < TOLERANCE
    assert sent[2] == written < sent[0]
    embedding = manifest.tensors["model.embed_tokens.weight"].file
    assert sent[2] == manifest.nbytes - manifest.files[embedding]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_fault_is_caught(server, tmp_path, transport):
    """The table: each fault, and what caught it. In the end a whole load makes the server good again."""

    async def main(http):
        bridge = bridge_to(tmp_path / "staged", TRANSPORTS[transport])
        link = bridge.link()
        before, now = [await bridge.prepare(tiny_model.params(i), i) for i in (1, 2)]
        table = {}
        for name, plant in faults.WEIGHTS.items():
            with pytest.raises(StagingError):
                await bridge.prepare(plant(tiny_model.params(3)), 3)
            table[name] = "before"
        for name, plant in faults.STAGED.items():
            copy = faults.altered(now, faults.tensors_of(now), tmp_path / "copy")
            plant(copy.path / next(iter(copy.manifest.files)))
            table[name] = await caught(link, http, copy)
        tensors, old = faults.tensors_of(now), faults.tensors_of(before)
        for name, alter in faults.TRANSIT.items():
            await link(http, before, 1)  # so that what is not sent is stale
            link.transport.instead = faults.altered(now, alter(tensors, old), tmp_path / "sent")
            table[name] = await caught(link, http, now)
        await link(http, now, 2)
        difference = await differences(http, tiny_model.params(2))
        await bridge.close()
        return table, difference

    table, difference = with_servers([server], main)
    wanted = dict.fromkeys([*faults.WEIGHTS, *faults.STAGED], "before") | dict.fromkeys(faults.TRANSIT, "audit")
    assert {n: how for n, how in table.items() if how != wanted[n]} == {}
    assert len(table) >= 20
    assert difference < TOLERANCE


async def caught(link, http, staged):
    """ "before" anything was sent, by the "audit" behind it, or as whatever else the load failed of."""
    try:
        await link(http, staged, staged.version)
    except EngineError as error:
        return {"staging": "before", "checksum": "audit"}.get(error.reason, f"{error.reason}: {error}")
    return "not caught"


def test_an_engine_that_failed_in_the_middle_serves_nothing_until_a_whole_load_succeeded(server, tmp_path):
    async def main(http):
        bridge = bridge_to(tmp_path / "staged", Tensor)
        link = bridge.link()
        await link(http, tiny_model.params(1), 1)
        staged = await bridge.prepare(tiny_model.params(2), 2)
        half = faults.altered(staged, dict(list(faults.tensors_of(staged).items())[:5]), tmp_path / "half")
        link.transport.instead = half
        assert await caught(link, http, staged) == "audit"
        asked = asyncio.create_task(differences(http, tiny_model.params(2)))
        await asyncio.sleep(1.0)
        answered_meanwhile, known = asked.done(), link.served
        await link(http, staged, 2)
        difference = await asked  # waited for in the server, answered by the whole new version
        await bridge.close()
        return answered_meanwhile, known, difference

    answered_meanwhile, known, difference = with_servers([server], main)
    assert not answered_meanwhile
    assert known is None
    assert difference < TOLERANCE


def test_a_server_that_took_other_weights_meanwhile_gets_all_of_them(server, tmp_path):
    """Its label tells: a server that restarted, or that somebody else loaded, has none of what it was sent before."""

    async def main(http):
        bridge = bridge_to(tmp_path / "staged", Tensor)
        link = bridge.link()
        params = tiny_model.params(1)
        await link(http, params, 1)
        body = {"model_path": server.model_path, "weight_version": "0", "flush_cache": True}
        await http.command("/update_weights_from_disk", body)
        await link(http, {**params, "final_norm": tiny_model.params(2)["final_norm"]}, 2)
        served = link.served
        await bridge.close()
        return served

    assert with_servers([server], main).version == 2


def test_versions_are_pruned_when_no_engine_has_them(two_servers, tmp_path):
    async def main(first, second):
        bridge = bridge_to(tmp_path / "staged", Disk, keep=1)
        near, far = bridge.link(), bridge.link()
        left = []
        for version in (1, 2, 3):
            params = tiny_model.params(version)
            await near(first, params, version)
            if version != 2:
                await far(second, params, version)
            left.append(sorted(path.name for path in (tmp_path / "staged").iterdir()))
        await bridge.close()
        return left

    left = with_servers(two_servers, main)
    # Version 1 stays while the second server has it, version 2 goes with it: the newest one is always there.
    assert left == [["v00000001"], ["v00000001", "v00000002"], ["v00000003"]]
    shutil.rmtree(tmp_path / "staged")
