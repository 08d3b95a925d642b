"""The SQLite store under what happens to files and processes."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.control.control_store import ControlStore
from cluster.control.sqlite_store import SCHEMA_VERSION, SQLiteBackend
from cluster.control.store import Change, Kind, StoreError, UnavailableError

pytestmark = pytest.mark.integration

# Appends versions for ever, or `count` of them, and says each one that is durable.
WRITER = """
import asyncio, sys
from pathlib import Path
from cluster.control.control_store import ControlStore
from cluster.control.sqlite_store import SQLiteBackend
from cluster.control.store import Change, ConflictError, Kind

async def main(path, name, count):
    store = ControlStore(await SQLiteBackend.open(Path(path)))
    while count:
        current = await store.current(Kind.POLICY)
        version = current.version if current else 0
        try:
            written = await store.put(Kind.POLICY, Change(f"{name} {version + 1}", name, ""), version, 1.0)
        except ConflictError:
            continue
        print(written.version, flush=True)
        count -= 1
    await store.close()

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


async def start_writer(path: Path, name: str, count: int) -> asyncio.subprocess.Process:
    arguments = (sys.executable, "-c", WRITER, str(path), name, str(count))
    return await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sqlite"


async def versions_in(path: Path) -> list[str]:
    """The texts of all versions, oldest first."""
    store = ControlStore(await SQLiteBackend.open(path))
    current = await store.current(Kind.POLICY)
    texts = [(await store.get(Kind.POLICY, version + 1)).text for version in range(current.version if current else 0)]
    await store.close()
    return texts


async def test_kill_9_in_the_middle_of_writes_loses_no_version(path: Path) -> None:
    durable = 0
    for name in ("first", "second"):
        writer = await start_writer(path, name, -1)
        assert writer.stdout is not None
        for _ in range(15):
            durable = int(await writer.stdout.readline())
        writer.kill()
        durable = max([durable, *map(int, (await writer.stdout.read()).split())])
        await writer.wait()
        texts = await versions_in(path)
        assert len(texts) in (durable, durable + 1), "at most the write that was under way is there as well"
        assert all(text.endswith(f" {number}") for number, text in enumerate(texts, 1))
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


async def test_processes_that_create_and_write_one_file_together_lose_nothing(path: Path) -> None:
    writers = [await start_writer(path, name, 10) for name in ("left", "right")]
    outputs = [(await writer.communicate())[0] for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    assert sorted(int(version) for output in outputs for version in output.split()) == list(range(1, 21))
    assert sorted(text.split()[0] for text in await versions_in(path)) == ["left"] * 10 + ["right"] * 10


async def test_a_write_that_cannot_get_the_lock_fails_clearly_and_can_be_repeated(path: Path) -> None:
    store = ControlStore(await SQLiteBackend.open(path, busy_timeout_s=0.05))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(UnavailableError, match="locked"):
        await store.put(Kind.POLICY, Change("a", "ann", ""), 0, 1.0)
    assert await store.current(Kind.POLICY) is None, "reads go on"
    other.execute("ROLLBACK")
    other.close()
    assert (await store.put(Kind.POLICY, Change("a", "ann", ""), 0, 1.0)).version == 1
    await store.close()


async def test_a_store_of_a_newer_version_is_refused_and_left_alone(path: Path) -> None:
    await (await SQLiteBackend.open(path)).close()
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    other.close()
    with pytest.raises(StoreError, match=f"has schema {SCHEMA_VERSION + 1}, .* reads up to {SCHEMA_VERSION}"):
        await SQLiteBackend.open(path)


def make_text_file(path: Path) -> None:
    path.write_text("models: []\n" * 100)


def make_recipes(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()


@pytest.mark.parametrize(("make", "why"), [(make_text_file, "not a database"), (make_recipes, "another application")])
def test_a_file_that_is_no_store_is_refused_and_left_alone(path: Path, make: Callable[[Path], None], why: str) -> None:
    make(path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=why):
        asyncio.run(SQLiteBackend.open(path))
    assert path.read_bytes() == before


async def test_a_folder_that_is_not_there_is_said(path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot open the store .*No such file"):
        await SQLiteBackend.open(path / "control.sqlite")


async def test_only_its_owner_may_read_the_store_and_its_log(path: Path) -> None:
    store = ControlStore(await SQLiteBackend.open(path))
    await store.put(Kind.POLICY, Change("a", "ann", ""), 0, 1.0)
    files = [one for one in os.scandir(path.parent) if one.name.startswith(path.name)]
    assert len(files) == 3
    assert all(one.stat().st_mode & 0o077 == 0 for one in files)
    await store.close()
