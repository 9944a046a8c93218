"""Batched generation in process. Nothing of this is loaded by `import deepseek_accel`."""
