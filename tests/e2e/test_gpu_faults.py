"""The benchmark gpu_faults, with cheap engines and imaginary GPUs: services recover, and each fault is counted."""

import sys
from pathlib import Path

import pytest
import yaml

from kvpilot_demo import gpus
from kvpilot_demo.load import Talk
from kvpilot_localcluster.gpus import RESOURCE
from support import story_engine

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.operator import gpu_faults
from benchmarks.operator.gpu_service import Users, manifest

pytestmark = pytest.mark.timeout(1800)
IMAGE = "kvpilot/story-engine:dev"
USERS = Users(8, 200, 100, Talk(asked=20, turns=2, thought=0.1))


async def test_a_service_recovers_from_injected_faults_and_each_fault_is_counted(tmp_path):
    table = tmp_path / "table.yaml"
    table.write_text(yaml.safe_dump({"images": [story_engine.image(tmp_path / "engine", IMAGE)]}))
    example = manifest(gpus.manifest(imagined=True))
    example["spec"]["engine"] |= {"image": IMAGE, "env": [], "extraArgs": []}
    example["spec"]["model"]["maxModelLen"] = story_engine.faulty.CONTEXT
    # The latencies of these engines hardly vary, so no confidence interval of a percentile can be computed.
    example["spec"]["canary"]["steps"] = []
    rows = []
    room = {RESOURCE: str(gpu_faults.DEVICES), "cpu": "32"}
    await gpu_faults.run(["kill", "dtype"], tmp_path, example, USERS, rows.append, table=table, resources=room)
    killed, odd = rows
    print(gpu_faults.table(rows))
    # Until the node agent has seen that the engine is dead, a request may still be sent to it.
    assert killed.failed == killed.failed_sent["before"] + killed.failed_sent["until_unready"]
    assert killed.lost == killed.failed_sent["until_unready"]
    assert (odd.failed, odd.lost) == (0, 0)
    assert "DtypeMismatch" in odd.until
    assert odd.dtype == "auto"
    assert any("1 restarts" in line for line in killed.seen)
    assert [row.error for row in rows] == ["", ""]
    assert killed.unready < killed.seconds
