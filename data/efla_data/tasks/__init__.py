"""Small data sets that are made or read whole: the synthetic tasks of MAD, and sequential MNIST."""
