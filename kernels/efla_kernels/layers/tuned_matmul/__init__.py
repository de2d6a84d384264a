"""Matrix products by a cuBLASLt algorithm of our choice."""
