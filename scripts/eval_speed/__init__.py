"""How long evaluation takes."""
