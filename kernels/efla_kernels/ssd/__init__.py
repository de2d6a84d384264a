"""State-space duality, the core of Mamba-2.

ops.py                public ops: `ssd`, `mamba2`, `mamba2_step`
reference.py          token-by-token recurrence, the definition
chunked.py            the same in chunks, in PyTorch: the backend "torch"
triton_op.py          the kernels as torch.library ops: the backend "triton"
launch.py, choices.py buffers, grids and block shapes
gates.py              first and last kernel: steps and decays, and their gradients
scan.py               states before each chunk, their gradients after it, and the merge of segments
tiles.py              which rows and heads a program over chunks has
output.py             outputs
gradient_x.py         dx, and what pairs of tokens give to the other gradients
gradient_bc.py        dB and dC
decode_kernel.py      one token, the state in place
"""
