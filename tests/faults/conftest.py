"""One cluster of cheap engines and one operator for all fault tests. Each test leaves cluster and operator healthy."""

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.faulty_record import VARIABLE
from support.faulty_world import FaultyWorld


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def whole_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FaultyWorld]:
    """Yield a cluster with two services: `steady` has two engines under load; tests change the replica count of `dial`.

    Measurements go to pytest's folder for the session, unless KVPILOT_FAULTS_RECORD names another file.
    """
    os.environ.setdefault(VARIABLE, str(tmp_path_factory.mktemp("measured") / "faults.jsonl"))
    async with FaultyWorld.up(tmp_path_factory.mktemp("faults")) as world:
        await world.create("steady", 2)
        await world.create("dial", 0)
        await world.until_ready("steady", 2)
        await world.acted("dial", 0)
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(whole_world: FaultyWorld) -> AsyncIterator[FaultyWorld]:
    """Yield the cluster of `whole_world`. Its API server is free of faults at the start and end of each test."""
    yield whole_world
    whole_world.api.storm = None
    try:
        whole_world.check()
    except AssertionError:
        # Restart the operator, so that the next test does not fail for the same reason.
        await whole_world.start_operator()
        raise
