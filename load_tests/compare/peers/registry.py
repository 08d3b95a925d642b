"""Every engine by its name."""

from __future__ import annotations

from collections.abc import Mapping

from load_tests.compare.peers.base import Peer, PeerName
from load_tests.compare.peers.llama_cpp import LlamaCpp
from load_tests.compare.peers.paceline import Paceline
from load_tests.compare.peers.transformers import Transformers
from load_tests.compare.peers.vllm import Vllm

PEERS: Mapping[PeerName, Peer] = {
    PeerName.PACELINE: Paceline(),
    PeerName.VLLM: Vllm(),
    PeerName.LLAMA_CPP: LlamaCpp(),
    PeerName.TRANSFORMERS: Transformers(),
}
