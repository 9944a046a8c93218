"""The only place that writes to a live model. Each write is recorded, so it can be taken back exactly."""

import types
from typing import Any, Protocol

from .errors import RestoreError

# accelerate's hooks put their own `forward` on the instance and keep the one they found here. A hook added or removed
# after `optimize` moves our value from one slot to the other; `undo` follows it.
HOOKED = "_old_forward"


class _ABSENT:
    """The attribute did not exist. A class, because a class keeps its identity under deepcopy and pickle."""


class _DROPPED:
    """The old value is gone. A class, as above."""


def forward_slot(module: Any) -> str:
    """The attribute of `module` that holds the forward its class would run: below accelerate's hook if there is one."""
    return HOOKED if HOOKED in vars(module) else "forward"


def _read(owner: Any, name: str) -> Any:
    """The value stored on `owner` itself (never on its class), or `_ABSENT`."""
    for table in ("_parameters", "_buffers", "_modules"):
        if name in getattr(owner, table, ()):
            return getattr(owner, table)[name]
    return vars(owner).get(name, _ABSENT)


def _write(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT and name == HOOKED:
        # what the hook would have found had the model never been optimized
        setattr(owner, name, types.MethodType(type(owner).forward, owner))
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


class Original(Protocol):
    """How a replaced value is kept that would take too much where it was."""

    @property
    def drops(self) -> bool:
        """Whether it is given up once everything is written: then there is no undo."""

    def bring_back(self, value: Any) -> None:
        """Make the old value what it was, before it is put back."""


class Journal:
    """Writes attributes and remembers what was there."""

    def __init__(self) -> None:
        self._writes: list[tuple[Any, str, Any, Any, Original | None]] = []

    def __len__(self) -> int:
        return len(self._writes)

    def set(self, owner: Any, name: str, value: Any, original: Original | None = None) -> None:
        """Write `value` to `owner.name`."""
        self._writes.append((owner, name, _read(owner, name), value, original))
        setattr(owner, name, value)

    def settle(self) -> None:
        """Everything is written: let go of the old values that are to be dropped."""
        for i, (owner, name, _, value, original) in enumerate(self._writes):
            if original is not None and original.drops:
                self._writes[i] = (owner, name, _DROPPED, value, None)

    def undo(self) -> None:
        """Put every value back, the same objects.

        Raises RestoreError, having changed nothing, if someone else wrote to one of the slots since, or if an old value
        was dropped.
        """
        if any(old is _DROPPED for _, _, old, _, _ in self._writes):
            raise RestoreError(
                'the 16-bit weights were dropped (originals="drop"): load the model again with `from_pretrained`, or '
                'keep them with originals="host".'
            )
        slots: dict[tuple[int, str], str] = {}
        newest = {(id(owner), name): (owner, name, value) for owner, name, _, value, _ in self._writes}
        for owner, name, value in newest.values():
            slot = next((s for s in _possible_slots(name) if _read(owner, s) is value), None)
            if slot is None:
                raise RestoreError(
                    f"`{type(owner).__name__}.{name}` was replaced after `optimize()`. "
                    "Undo that change first, then call `restore()` again."
                )
            slots[id(owner), name] = slot
        while self._writes:
            owner, name, old, _, original = self._writes[-1]
            if original is not None:
                original.bring_back(old)
            self._writes.pop()
            _write(owner, slots[id(owner), name], old)


def _possible_slots(name: str) -> tuple[str, ...]:
    return (name, HOOKED if name == "forward" else "forward") if name in ("forward", HOOKED) else (name,)
