"""The layers around a mixer: short convolution, norms, linear layers, SwiGLU, cross-entropy."""
