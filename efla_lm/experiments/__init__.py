"""The paper's small experiments: sequential MNIST, the MAD suite, and the discretisation error of a trained model."""
