"""One cluster with an operator and engines of a tiny model, shared by all files that do not test cluster startup."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvpilot_demo.world import World
from kvpilot_smallmodels.models import tiny_llama
from support import forked_serve


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def whole_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """Yield the cluster. Each test deletes its services, or keeps them in the namespace of its file."""
    tiny_llama()
    folder = tmp_path_factory.mktemp("engines")
    async with World.up(folder, lambda label, fraction: None, forked_serve.images(folder)) as running:
        yield running
