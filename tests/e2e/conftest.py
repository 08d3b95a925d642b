from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI

from protos.paceline.v1 import inference_pb2_grpc
from tests.e2e.cluster import MODEL, Cluster, serving


def demo_config() -> dict[str, Any]:
    """The demo in float32, where tokens must not differ by one, and every round waiting for its block."""
    pool = {"dtype": "float32", "kv_blocks": 600, "max_model_len": 2048, "max_num_seqs": 8, "max_queued": 8}
    return {
        "models": [
            {
                "name": MODEL,
                "target": {"path": "smollm2-135m", **pool},
                "draft": {"path": "smollm2-135m-draft", **pool},
            }
        ],
        "speculation": {"max_draft_tokens": 4, "draft_length": "fixed", "hold": "deadline", "max_hold_ms": 200},
        "router": {"max_queued_per_tenant": 16},
    }


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[Cluster]:
    with serving(demo_config(), tmp_path_factory.mktemp("serve")) as running:
        yield running


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as openai:
        yield openai


@pytest.fixture
async def stub(cluster: Cluster) -> Any:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)
