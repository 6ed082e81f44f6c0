"""Train language models from feedback."""
