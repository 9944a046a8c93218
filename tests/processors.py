"""Logits processors that requests of the engine's tests bring along."""

import threading

from transformers import LogitsProcessor, LogitsProcessorList


class Slow(LogitsProcessor):
    """Lets others go first: waits for an event once."""

    def __init__(self):
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, input_ids, scores):
        self.reached.set()
        assert self.go.wait(30)
        return scores


class Broken(LogitsProcessor):
    """Fails after so many tokens."""

    def __init__(self, after):
        self.left = after

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("injected")
        return scores


def processing(processor):
    """The options of a request that runs this processor."""
    return {"logits_processor": LogitsProcessorList([processor])}
