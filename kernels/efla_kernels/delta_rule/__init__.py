"""The delta rule: EFLA, Gated EFLA, DeltaNet and Gated DeltaNet, from one family of kernels; README.md derives it.

coefficients.py       erase and write coefficients of every rule, their limits and gradients
reference.py          token-by-token recurrence, the definition
chunked.py            the same in chunks of C tokens, in PyTorch: the backend "torch"
ops.py                public ops: check inputs, compute coefficients, call a backend
triton_op.py          the kernels as one op of torch.library: the backend "triton"
buffers.py            the op's inputs, outputs and gradients, and their allocation
launch.py             grids and arguments of the kernels, the two passes over a split sequence
choices.py            what follows from the shapes: block shapes, the split
gates.py              coefficients and their gradients for tiles of registers
solve.py              kernel 1, chunks in parallel: T, P and the gates' table
scan.py               kernel 2, chunks in order: states and outputs
scan_backward.py      kernel 3, chunks in reverse: gradients of states and v
gradient_q.py         kernel 4, chunks in parallel: dq
gradient_k.py         kernel 5, chunks in parallel: dk and the gates' gradients
gradient.py           kernels 4 and 5 in one, without a decay
gradient_gated.py     kernels 4 and 5 in one, for Gated EFLA
split.py              cuts one long sequence into segments that run side by side
decode.py             one token of a whole mixer; decode_kernel.py is its kernel
last_token.py         the output of the last token alone; last_token_kernel.py is its kernel
"""
