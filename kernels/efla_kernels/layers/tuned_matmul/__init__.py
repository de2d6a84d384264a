"""Matmuls by a cuBLASLt algorithm of our choice."""
