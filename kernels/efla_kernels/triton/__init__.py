"""The delta rule on Triton: the backend "triton".

gates.py            coefficients and their gradients, for tiles of registers
tiles.py            where a program's chunk lies; loads and stores of tiles
solve.py            kernel 1, chunks in parallel: T, P and the gates' table
scan.py             kernel 2, chunks in order: states and outputs
scan_backward.py    kernel 3, chunks in reverse: gradients of states and v
gradient_q.py       kernel 4, chunks in parallel: dq
gradient_k.py       kernel 5, chunks in parallel: dk and the gates' gradients
split.py            cuts one long sequence into segments that run side by side
choices.py          shapes and options of a problem, block shapes, the split
launch.py           buffers, grids, passes over a split sequence
dispatch.py         launches without the binder of Triton
eager.py            ops called past torch.library where nobody watches
ops.py              torch.library ops with fake tensors and autograd
"""
