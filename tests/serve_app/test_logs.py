"""What Ray logs in processes that wait for slots."""

import logging
import subprocess
import sys

SCRIPT = """
import asyncio, logging
from serve_app.handles import EncoderHandle

class Handle:
    def options(self, **_):
        raise RuntimeError("no Ray here")

async def lease():
    async with EncoderHandle(Handle()).lease():
        pass

logging.basicConfig(format="%(message)s")
ray = logging.getLogger("ray.serve")
ray.warning("Failed to route request after 50 attempts over 1.01s. Retrying.")
try:
    asyncio.run(lease())
except RuntimeError:
    pass
ray.warning("Failed to route request after 100 attempts over 2.01s. Retrying.")
ray.warning("Failed to get queue length from a replica.")
"""


def test_waiting_for_a_slot_is_no_warning_and_all_else_still_is() -> None:
    # In a process of its own: the filter stays for its life.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )

    assert "after 50 attempts" in done.stderr, "else it was never said, and this shows nothing"
    assert "after 100 attempts" not in done.stderr
    assert "Failed to get queue length" in done.stderr


def test_rays_router_still_says_it_in_these_words() -> None:
    from inspect import getsource

    from ray.serve._private.request_router import request_router

    from serve_app.logs import LEASE_WARNING

    assert request_router.logger is logging.getLogger("ray.serve")
    assert f'"{LEASE_WARNING} "' in getsource(request_router)
