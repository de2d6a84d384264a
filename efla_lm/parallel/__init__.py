"""Processes, devices and memory: sharding, gradient sums, CUDA graphs, activation checkpointing, signals."""
