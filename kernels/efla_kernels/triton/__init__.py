"""The delta rule and state-space duality on Triton, the backend "triton", and what stands around them in a model.

The delta rule:

gates.py            coefficients and their gradients, for tiles of registers
tiles.py            where a program's chunk lies; loads and stores of tiles
solve.py            kernel 1, chunks in parallel: T, P and the gates' table
scan.py             kernel 2, chunks in order: states and outputs
scan_backward.py    kernel 3, chunks in reverse: gradients of states and v
gradient_q.py       kernel 4, chunks in parallel: dq
gradient_k.py       kernel 5, chunks in parallel: dk and the gates' gradients
gradient.py         kernels 4 and 5 in one, without a decay
gradient_gated.py   kernels 4 and 5 in one, for Gated EFLA
split.py            cuts one long sequence into segments that run side by side
choices.py          shapes and options of a problem, block shapes, the split
launch.py           buffers, grids, passes over a split sequence
ops.py              torch.library ops with fake tensors and autograd
decode.py           one token of a whole mixer in one kernel
last.py             the last token's read-out alone, forward and backward

For all of them:

arguments.py        rows, offsets of packed segments and tensor descriptors, as the kernels want them
dispatch.py         launches without the binder of Triton
eager.py            ops called past torch.library where nobody watches
interpreter.py      16-bit inputs in Triton's interpreter: computed in fp32

Around the mixers, kernels, launches and ops:

convolution.py          launches and ops of the short convolution with SiLU
convolution_kernels.py  its kernels, for up to three outputs in one launch
cross_entropy.py        linear layer and cross-entropy together, in blocks of rows
norms.py                RMS norms with the sum before them and the narrow products behind them
swiglu.py               silu(gate) * up with the product behind it

State-space duality, of which ssd_choices.py, ssd_launch.py and ssd_ops.py are what their namesakes above are:

ssd_gates.py        first and last kernel: steps and decays, and their gradients
ssd_scan.py         states before each chunk, their gradients after it, and the merge of segments
ssd_tiles.py        which rows and heads a program over chunks has
ssd_output.py       outputs
ssd_gradient_x.py   dx, and what pairs of tokens give to the other gradients
ssd_gradient_bc.py  dB and dC
ssd_step.py         one token, the state in place
"""
