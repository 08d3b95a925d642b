"""Paceline beside other engines: the same requests, weights, cores and threads, in turn. See docs/benchmarks.md."""
