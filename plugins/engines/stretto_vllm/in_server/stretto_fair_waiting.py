"""A vLLM plugin for every process of a server: a server on CPU does not block other programs.

vLLM's processes wait for one another in a loop of `sched_yield`. On Linux 6.18 two such loops block other
programs of the same cores for up to 5 s, among them the worker that reads the server's streams. A loop that
calls the kernel without yielding is scheduled fairly, and responds as quickly.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from vllm.distributed import utils
from vllm.platforms import current_platform


def install() -> None:
    """Make vLLM's loops call `time.sleep(0)` on CPU. GPU servers have separate cores."""
    if current_platform.is_cpu():
        utils.USE_SCHED_YIELD = False
