"""Terrace for Python programs. `import terrace.torch` brings it to a PyTorch program."""
