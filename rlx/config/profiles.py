"""Settings of engines that belong together: `inference.profile` is applied whole."""

from __future__ import annotations

import dataclasses

from rlx.config.schema import Config


@dataclasses.dataclass(frozen=True)
class Profile:
    """What belongs together for one kind of machine."""

    admission: int  # requests that an engine runs at once
    http_admission: int  # sent to it and not yet answered
    radix_cache: bool


PROFILES = {
    "generic": Profile(64, 128, radix_cache=False),
    "colocated": Profile(64, 128, radix_cache=False),
    "olmo_h100": Profile(512, 512, radix_cache=False),
    "olmo35_b300": Profile(512, 512, radix_cache=True),
}


def profile(config: Config) -> Profile:
    """What the engines of `config` really get: its profile, with the keys of `generic` that were changed."""
    producer, inference = config.producer, config.inference
    given = PROFILES[inference.profile]
    admission = producer.engine_admission or given.admission
    http = producer.http_admission or (given.http_admission if admission == given.admission else 2 * admission)
    radix = given.radix_cache if inference.radix_cache == "auto" else inference.radix_cache == "on"
    return Profile(admission, http, radix)


def admission(config: Config) -> int:
    """Requests that one engine of the run works on at once."""
    return profile(config).admission if config.engine.kind == "sglang" else config.engine.slots
