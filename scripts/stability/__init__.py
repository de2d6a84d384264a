"""The discretisation error of a trained model."""
