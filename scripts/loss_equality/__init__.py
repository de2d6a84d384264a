"""The same training computed in different ways."""
