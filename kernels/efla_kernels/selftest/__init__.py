"""Every kernel against float64 on this machine: `python -m efla_kernels.selftest`."""
