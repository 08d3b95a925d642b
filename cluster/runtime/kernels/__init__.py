"""CPU kernels: explicit 16-lane float32 arithmetic, compiled by numba, run by a team of native threads.

Read in this order: compiling (how a kernel is built), simd (the vector type), team (parallel loops), tiles (the inner
products), then one file per kernel. Every kernel keeps one rule: the numbers of a row depend on that row's own inputs
only, never on its neighbours, the number of rows, how work was cut into tasks, or which thread ran it. There is no
fast-math anywhere; each sum has one written order.
"""
