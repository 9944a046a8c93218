"""Llama architecture: DeepSeek-LLM, DeepSeek-Coder, DeepSeek-R1-Distill-Llama."""

from .base import Family

FAMILY = Family("llama", attention="gqa")
