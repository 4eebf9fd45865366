"""What a command does with the Ray cluster that it starts; `tests/faults/test_ray_own_cluster.py` starts one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from prep.errors import UsageError
from prep.workers.ray import connected


@pytest.mark.parametrize("address", ["10.0.0.5", "::"])
def test_a_cluster_that_others_can_reach_is_ended_at_once(address):
    done = []
    ray = SimpleNamespace(
        is_initialized=lambda: False, init=lambda **_: done.append("init"), shutdown=lambda: done.append("shutdown"),
        job_config=SimpleNamespace(JobConfig=SimpleNamespace), exceptions=SimpleNamespace(RayError=KeyError),
        nodes=lambda: [{"NodeManagerAddress": "127.0.0.1"}, {"NodeManagerAddress": address}])
    with pytest.raises(UsageError) as caught, connected(ray, ""):
        pytest.fail("nothing runs on it")
    assert caught.value.message == (f"the Ray cluster that was started listens on 127.0.0.1, {address}, expected only "
                                    "127.0.0.1: Ray was imported before prep could configure it")
    assert done == ["init", "shutdown"]
