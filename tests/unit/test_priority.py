"""A process that yields to pools does so with every thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import os, threading
from deployments.priority import yield_to_pools

found, ready, go = [], threading.Event(), threading.Event()

def note():
    ready.set()
    go.wait()
    found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

before = threading.Thread(target=note)
before.start()
ready.wait()
yield_to_pools()
yield_to_pools()
after = threading.Thread(target=note)
after.start()
go.set()
before.join()
after.join()
print(found, os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux each thread has a niceness of its own")
def test_threads_that_run_and_those_that_come_later_yield() -> None:
    told = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[15, 15] 15"
