"""Any decoder-only language model that transformers knows, with this project's paged attention behind it.

transformers builds the network from its own code and calls one attention function per layer (its attention interface).
Ours writes the step's keys and values into the paged cache and attends there. What each layer needs (heads, window,
scale, soft cap) is learned by running a few tokens once (probe.py), which also shows whether the network can be served
at all. It is slower than the decoder in cluster.runtime.model, which the Llama family uses.
"""
