"""Sequential MNIST under corruption, the paper's Figures 1 and 2."""
