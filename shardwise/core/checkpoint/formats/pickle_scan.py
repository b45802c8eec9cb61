"""Looks at a pickle's instructions before anything carries them out.

Which objects a pickle may build is for its reader. Here it is about what plain ones may cost: a few bytes can describe
tuples that share their parts, whose hash as a key of a dictionary takes exponential time, or ask for a memo of 2^32
places. The instructions are followed on a stack that holds nothing but how many values each object stands for.
"""

from __future__ import annotations

import pickletools
from typing import Any, BinaryIO

from shardwise.core.checkpoint.source import CheckpointDamage

__all__ = ["check_pickle"]

SPARE = 1 << 20
WIDE = 1 << 12
"""What an integer of more than 64 bits counts for: those that are the same modulo 2^61 - 1 have one hash, and as keys
of a dictionary each would be compared with all others."""
MARK = -1
_TUPLES = {"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "INST", "OBJ", "BINPERSID"}
_PUTS, _GETS = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


def check_pickle(file: BinaryIO, nbytes: int, where: object, kind: str) -> None:
    """Read the pickle that starts at the position of ``file``, up to its end.

    Args:
        file: has ``nbytes`` bytes in all.
        nbytes: what time and memory are measured by.
        where: its name, for messages.
        kind: what it should be, for messages.

    Raises:
        CheckpointDamage: it is no pickle, or would take time or memory out of proportion to its bytes.
    """
    scan = _Scan(8 * nbytes + SPARE)
    try:
        for opcode, argument, _ in pickletools.genops(file):
            scan.follow(opcode, argument, nbytes)
    except (ValueError, IndexError, KeyError, MemoryError, OverflowError) as error:
        raise CheckpointDamage(f"{where} is not a whole {kind} ({error!s:.200}); load another copy") from error


class _Scan:
    def __init__(self, most: int) -> None:
        self._left = self._most = most
        self._stack: list[int] = []
        self._memo: dict[int, int] = {}

    def follow(self, opcode: pickletools.OpcodeInfo, argument: Any, nbytes: int) -> None:
        name, stack = opcode.name, self._stack
        if name == "MARK":
            stack.append(MARK)
        elif name in _PUTS:
            if int(argument) > nbytes:
                raise ValueError(f"a memo of {int(argument)} places in {nbytes} bytes")
            self._memo[int(argument)] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in _GETS:
            stack.append(self._memo[int(argument)])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            popped = self._pop(opcode)
            if name in ("SETITEM", "SETITEMS", "DICT"):
                self._spend(sum(popped[1 if name != "DICT" else 0 :: 2]))  # keys are hashed
            elif name in ("FROZENSET", "ADDITEMS"):
                self._spend(sum(popped))
            made = 1 + sum(popped) if name in _TUPLES else 1
            if type(argument) is int and argument.bit_length() > 64:
                made = WIDE
            # A tuple of tuples of ... is told once wherever it stands; the sum of its parts cannot be more than this.
            stack.extend([min(made, self._most + 1)] * len(opcode.stack_after))

    def _pop(self, opcode: pickletools.OpcodeInfo) -> list[int]:
        before = opcode.stack_before
        if pickletools.markobject in before:
            place = len(self._stack) - 1 - self._stack[::-1].index(MARK)
            place -= before.index(pickletools.markobject)
        else:
            place = len(self._stack) - len(before)
        if place < 0:
            raise ValueError(f"{opcode.name} of an empty stack")
        popped = [weight for weight in self._stack[place:] if weight != MARK]
        del self._stack[place:]
        return popped

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise ValueError(f"its keys stand for more than {self._most} values")
