"""Pickles with instructions that an attacker inserted."""

import pickletools
import random
from typing import Any

from tests.faults.fuzz.values import Stale

MARKER = "fired"
"""The file that code in a checkpoint would create in the working directory."""
CALLS = [
    f"cposix\nsystem\n(S'touch {MARKER}'\ntR".encode(),
    f'cbuiltins\neval\n(S\'open("{MARKER}", "w")\'\ntR'.encode(),
    f"cos\nsystem\n\x8c\x0btouch {MARKER}\x85R".encode("latin-1"),
    b"\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch " + MARKER.encode() + b"\x85R",
    f"(S'touch {MARKER}'\niposix\nsystem\n".encode(),
    b"ctests.faults.fuzz.pickles\nfire\n)R",
    b"cpathlib\nPosixPath\nN}\x8c\x0bis_absoluteK\x00s\x86b",
    b"ctorch\nSize\nN}\x8c\x04evilK\x01s\x86b",
    b"ccollections\nOrderedDict\nN}\x8c\x04evilK\x01s\x86b",
    b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\nN}\x8c\x06__eq__K\x00s\x86b",
    b"ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}\x8c\x09__class__K\x01sb",
    b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00)K\x01\x88NtR",
    b"ctorch._utils\n_rebuild_parameter\n(NNNtR",
    b"ctorch.storage\nUntypedStorage\nK\x7f\x85R",
    b"ctorch.serialization\n_get_layout\n\x8c\x0dtorch.strided\x85R",
    b"ctorch\nfloat32\n",
]
INSTRUCTIONS = [
    *(bytes([code]) for code in b"0123(.])}lted\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98aubosRQN"),
    *(
        b"h\x00",
        b"h\xff",
        b"q\x00",
        b"r\xf0\xff\xff\xff",
        b"r\x00\x00\x10\x00",
        b"j\xff\xff\xff\x7f",
        b"p99999999999\n",
    ),
    *(b"\x80\x05", b"\x80\xff", b"\x95" + bytes(8), b"\x82\x01", b"P0\n", b"I99999999999999999999\n", b"L7L\n"),
    *(code + b"\xff" * 7 + b"\x7f" for code in (b"\x95", b"\x8e", b"\x8d", b"\x96", b"\x8a\x08")),
    *(code + b"\xff\xff\xff\x7f" for code in (b"B", b"X", b"\x8b")),
    *(
        b"T\xff\xff\xff\xff",
        b"F1e999\n",
        b"Gx" + bytes(7),
        b"\x8c\x04\x1b[2J",
        b"S'\\x00'\n",
        b"K\x01",
        b"K\x01K\x02\x86",
    ),
    b")" + b"".join(b"\x94h" + bytes([level]) + b"\x86" for level in range(120)),
    *(b"]" + b"2a" * 3, b"}" + b"2" * 200, b"(" * 3000, b"]" * 3000, b"}2K\x00s", b"]2a", b"K\x00" * 3000),
]
NUMBERS = (-1, 0, 1, 2**31 - 1, 2**31, 2**45, 2**63 - 1, 2**63, 2**200)
TEXTS = ("", "many", "..", "../outside/secret", "/dev/zero", "\x1b[2J", "a" * 5000, "state", "params", "cuda:0")
TEXTS += ("FloatStorage",)


def fire() -> None:
    """Must never be called by a reader."""
    with open(MARKER, "w"):
        pass


def _instructions(content: bytes) -> list[tuple[pickletools.OpcodeInfo, Any, int, int]]:
    """Return the first pickle in ``content``: each instruction, its argument, its first byte and its end."""
    found = [(code, argument, int(at or 0)) for code, argument, at in pickletools.genops(content)]
    ends = [at for _, _, at in found[1:]] + [found[-1][2] + 1]
    return [(code, argument, at, end) for (code, argument, at), end in zip(found, ends, strict=True)]


def draw_pickle_change(random: random.Random, content: bytes) -> dict[str, Any]:
    """Return a random change at a random instruction of a pickle."""
    found = _instructions(content)
    at = random.randrange(len(found))
    do = random.choice(("call", "insert", "insert", "delete", "double", "swap", "argument", "argument", "argument"))
    if do == "call":
        return {"do": "insert", "at": at, "code": random.choice(CALLS).hex()}
    if do == "insert":
        return {"do": "insert", "at": at, "code": random.choice(INSTRUCTIONS).hex()}
    if do == "argument":
        places = [place for place, each in enumerate(found) if isinstance(each[1], int | str)]
        at = random.choice(places)
        number = isinstance(found[at][1], int)
        return {"do": "argument", "at": at, "value": random.choice(NUMBERS if number else TEXTS)}
    return {"do": do, "at": at, "to": random.randrange(len(found))}


def change_pickle(content: bytes, change: dict[str, Any]) -> bytes:
    """Return ``content`` with the first pickle in it changed.

    Raises:
        Stale: it has fewer instructions.
    """
    found = _instructions(content)
    place = change["at"]
    if max(place, change.get("to", 0)) >= len(found):
        raise Stale(f"instruction {place} of {len(found)}")
    code, _, at, end = found[place]
    do = change["do"]
    if do == "insert":
        return content[:at] + bytes.fromhex(change["code"]) + content[at:]
    if do == "delete":
        return content[:at] + content[end:]
    if do == "double":
        return content[:end] + content[at:end] + content[end:]
    if do == "swap":
        (_, _, a, b), (_, _, c, d) = sorted((found[place], found[change["to"]]), key=lambda each: each[2])
        return content[:a] + (content[c:d] + content[b:c] + content[a:b] if a != c else content[a:b]) + content[d:]
    value = change["value"]
    if isinstance(value, str):
        text = value.encode()
        if code.name in ("GLOBAL", "PUT", "GET", "INT", "LONG", "STRING", "UNICODE", "PERSID", "FLOAT", "INST"):
            return content[: at + 1] + text.replace(b"\n", b"") + b"\n" + content[end:]
        return content[:at] + b"X" + len(text).to_bytes(4, "little") + text + content[end:]
    width = end - at - 1
    if code.name in ("BINGET", "BINPUT", "LONG_BINGET", "LONG_BINPUT", "FRAME", "PROTO"):
        low = value % 256**width
        return content[: at + 1] + low.to_bytes(width, "little") + content[end:]
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return content[:at] + b"\x8a" + bytes([len(data)]) + data + content[end:]
