"""Speed and memory of training beside flash-linear-attention."""
