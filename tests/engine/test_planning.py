"""What cannot be planned is refused before any weight is loaded."""

from __future__ import annotations

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.planning import plan_tiers

CONFIGS = {
    "host_cache_bytes": EngineConfig(host_cache_bytes=99),
    "disk_cache_bytes": EngineConfig(disk_cache_bytes=99, disk_cache_path="not made"),
}


@pytest.mark.parametrize(("name", "config"), CONFIGS.items(), ids=CONFIGS)
def test_a_tier_that_cannot_hold_a_page_is_refused(name, config):
    with pytest.raises(ValueError, match=f"{name}=99 is less than one page of 100 bytes; raise EngineConfig.{name}"):
        plan_tiers(config, 100)


def test_tiers_are_those_that_are_configured_the_host_first(tmp_path):
    both = plan_tiers(EngineConfig(host_cache_bytes=9, disk_cache_bytes=9, disk_cache_path=str(tmp_path)), 9)

    assert plan_tiers(EngineConfig(), 9) is None
    assert both is not None
    assert [tier.name for tier in both.metrics()] == ["host", "disk"]
