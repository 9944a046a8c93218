"""Decoding without transformers' layer code: a model read as tensors, its step as a straight line, the loop."""
