"""Captures CUDA graphs. The only code that nothing but a device can run."""

from __future__ import annotations

import torch

from cluster.runtime.graphed_model import Run


class CudaCapture:
    """Captures what a function has the device do; the graphs share one pool of memory and run one at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """See Capture."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # thread_local: other threads of the process may use the device meanwhile
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own stream behind when a capture fails
        return graph.replay
