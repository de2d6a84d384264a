"""The MAD suite, the paper's Figure 3."""
