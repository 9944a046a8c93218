"""How the ops are computed on a GPU. Triton only; a file here has the same stem as its op in `ops/`."""
