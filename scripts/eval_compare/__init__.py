"""Our evaluation beside lm-eval's stock model."""
