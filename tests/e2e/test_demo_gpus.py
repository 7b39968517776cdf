"""The demo's story for GPUs, with cheap engines and imaginary GPUs: every step happens and is measured."""

import json

import pytest
import yaml

from kvpilot_demo import gpus
from kvpilot_demo.load import Talk
from kvpilot_demo.screen import Screen
from kvpilot_demo.story import BAD, GOOD, Size, Story
from kvpilot_demo.world import World
from kvpilot_localcluster.gpus import RESOURCE
from support import story_engine

pytestmark = pytest.mark.timeout(3600)
SIZE = Size(32, 400, 40, Talk(asked=20, turns=4, thought=0.1), grown=120)
IMAGE = "kvpilot/story-engine:dev"
ILL = {"name": "FAULTY_ENGINE", "value": json.dumps({"completions": "random", "only_dtype": BAD})}


async def test_the_demos_story_for_gpus_runs_to_its_end_and_is_measured(tmp_path):
    table = tmp_path / "images.yaml"
    table.write_text(yaml.safe_dump({"images": [story_engine.image(tmp_path / "engine", IMAGE)]}))
    example = gpus.manifest(imagined=True)
    example["spec"]["engine"] |= {"image": IMAGE, "env": [ILL], "extraArgs": []}
    example["spec"]["model"]["maxModelLen"] = story_engine.faulty.CONTEXT
    saved = []
    room = {RESOURCE: "3", "cpu": "32"}
    quiet = {"newer": False, "example": example, "resources": room}
    async with World.up(tmp_path / "world", lambda label, fraction: None, table, **quiet) as world:
        story = Story(world, Screen(plain=True), SIZE, lambda record: saved.append(record.as_json()))
        story.beside = lambda: gpus.compiled(world, lambda text: None)
        record = await story.run()
        last = await world.observe()
    assert record.failed_requests == 0, record.failures
    assert len(last.pods) == 1
    assert [title.split(";")[0] for title in record.seconds][-3:] == [
        "the same users on two replicas",
        f"you ask for {BAD} without its recent window",
        "the users leave",
    ]
    assert {f"{dtype} Probing" for dtype in (GOOD, BAD)} | {f"{GOOD} Shifting"} <= set(record.stages)
    assert record.trial_seconds[GOOD] > 0
    assert record.capacity_ratio == 3.6
    assert record.final_dtype == GOOD
    assert record.bad_canary["verdict"] == "Failed"
    assert not record.canary_had_traffic
    for users in record.users.values():
        assert users["ttftMs"]["p50"] <= users["ttftMs"]["p95"] <= users["ttftMs"]["p99"]
    assert len(record.users) == 7
    assert [len(one["seconds"]) for one in saved[:3]] == [1, 2, 3]
