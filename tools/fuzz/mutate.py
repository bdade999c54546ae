"""Valid files made invalid: bytes changed at random, and trees changed where their meaning is.

Everything follows from the `random.Random` that is passed in, so an input is repeated by its seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

# Texts that would do something if anybody executed, opened, printed or rendered them.
MARK = "fuzz<img src=x onerror=alert(1)>"
TEXTS = (
    "",
    " ",
    "\0",
    "\n",
    "x" * 300,
    "x" * 5000,
    "ä" * 200,
    "\u202e",
    "\U0001f600",
    "../../etc/passwd",
    "/dev/zero",
    "{0.__class__}",
    "%s%n",
    "__import__('os').system('true')",
    "!!python/object/apply:os.system ['true']",
    "nan",
    "inf",
    "-1",
    "True",
    MARK,
    f"\"'>{MARK}",
    "q",
    "sdpa",
    "triton",
    "reference",
    "fp32",
    "bf16",
    "pass",
    "schema",
    "sm_90",
    "cpu",
)
NUMBERS: tuple[Any, ...] = (
    0,
    1,
    -1,
    2,
    3,
    7,
    8,
    15,
    16,
    17,
    127,
    128,
    255,
    256,
    1000,
    65_535,
    65_536,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**62,
    2**63 - 1,
    -(2**31),
    -(2**63),
    2**63,
    2**64 - 1,
    0.0,
    -0.0,
    0.5,
    1e-300,
    1e300,
    math.nan,
    math.inf,
    -math.inf,
    True,
    False,
)
# Beginnings of values that declare more than there is, of types nobody writes, and of what other formats begin with.
HEADERS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xde\xff\xff",
    b"\xc7\x08\xff",
    b"\xd6\xff\0\0\0\0",
    b"\xc1",
    b"\x80\x04\x95",
    b"\xcb\x7f\xf0\0\0\0\0\0\0",
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"\xa5\xff\xfe\xfd\xfc\xfb",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b'"\\ud800"',
    b"1e999",
    b"-1e999",
    b"NaN",
    b"Infinity",
    b"9" * 40,
    b"9" * 5000,
    b"1e-9999",
    b'"\\u0000"',
    b"\\",
    b'"',
    b"{",
    b"[",
    b"}",
    b"]",
    b",",
    b":",
    b"null",
)


def junk(r: Random, depth: int = 0) -> Any:
    """A value that nobody asked for."""
    kind = r.randrange(11)
    if kind < 4:
        return r.choice(NUMBERS)
    if kind < 7:
        return r.choice(TEXTS)
    if kind == 7:
        return r.randbytes(r.choice((0, 1, 3, 40)))
    if kind == 8 or depth > 2:
        return r.choice((None, [], {}, [[]], {"": None}))
    if kind == 9:
        return [junk(r, depth + 1) for _ in range(r.choice((1, 2, 4, 9, 40)))]
    return {str(r.choice(TEXTS))[:40]: junk(r, depth + 1) for _ in range(r.randrange(1, 5))}


def nested(r: Random) -> Any:
    """Deep, in one line or with branches."""
    value: Any = r.choice(NUMBERS)
    wrap: Callable[[Any], Any] = r.choice((lambda v: [v], lambda v: {"x": v}, lambda v: [v, v]))
    for _ in range(r.choice((3, 6, 9, 12)) if wrap(0) == [0, 0] else r.choice((5, 12, 30, 100, 400))):
        value = wrap(value)
    return value


# ---- trees -------------------------------------------------------------------------------------------------------

Place = tuple[Any, Any]  # a container, and the key or index of one of its members


def places(tree: Any, most: int = 4000) -> list[Place]:
    """Every member of every container, outermost first."""
    found: list[Place] = []
    waiting = [tree]
    for node in waiting:  # grows while it is walked
        members = (
            list(node.items())
            if isinstance(node, dict)
            else list(enumerate(node))
            if isinstance(node, list)
            else []
        )
        for key, value in members:
            found.append((node, key))
            waiting.append(value)
        if len(found) > most:
            break
    return found


def copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: copied(v) for k, v in tree.items()}
    return [copied(v) for v in tree] if isinstance(tree, list) else tree


def _replace(r: Random, node: Any, key: Any, donor: Any) -> None:
    node[key] = junk(r)


def _bury(r: Random, node: Any, key: Any, donor: Any) -> None:
    node[key] = nested(r)


def _delete(r: Random, node: Any, key: Any, donor: Any) -> None:
    del node[key]


def _rename(r: Random, node: Any, key: Any, donor: Any) -> None:
    if isinstance(node, dict):
        node[r.choice((*TEXTS[:24], *map(str, node), b"bytes"))] = node.pop(key)
    else:
        node.insert(r.randrange(len(node) + 1), node.pop(key))


def _add(r: Random, node: Any, key: Any, donor: Any) -> None:
    if isinstance(node, dict):
        node[str(r.choice(TEXTS))[:40]] = junk(r)
    else:
        node.insert(r.randrange(len(node) + 1), junk(r))


def _repeat(r: Random, node: Any, key: Any, donor: Any) -> None:
    if isinstance(node, list):
        node[key:key] = [copied(node[key]) for _ in range(r.choice((1, 2, 9, 70)))]
    else:
        node[key] = [copied(node[key]) for _ in range(r.choice((0, 1, 2, 9)))]


def _graft(r: Random, node: Any, key: Any, donor: Any) -> None:
    spots = places(donor)
    if spots:
        other, at = r.choice(spots)
        node[key] = copied(other[at])


def _nudge(r: Random, node: Any, key: Any, donor: Any) -> None:
    value = node[key]
    if isinstance(value, bool):
        node[key] = not value
    elif isinstance(value, (int, float)):
        node[key] = r.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 2,
                value // 2 if value == value and abs(value) != math.inf else 0,
                float(value),
                str(value),
                value * 2**31,
            )
        )
    elif isinstance(value, str):
        at = r.randrange(len(value) + 1)
        node[key] = r.choice(
            (value[:at], value[at:], value + r.choice(TEXTS), value.upper(), value * 2, value.encode())
        )
    elif isinstance(value, (list, dict)):
        node[key] = r.choice((type(value)(), None, [value], {"x": value}))
    else:
        node[key] = junk(r)


def _kind(value: Any) -> Any:
    return (type(value), tuple(sorted(map(str, value)))) if isinstance(value, dict) else type(value)


def _alike(r: Random, node: Any, key: Any, donor: Any) -> None:
    """A value of the same type from elsewhere: what passes every check of types, and means something else."""
    kind = _kind(node[key])
    if kind in (int, float) and r.randrange(3) == 0:
        node[key] = r.choice([n for n in NUMBERS if type(n) is kind])
        return
    found = [(at, other[at]) for other, at in places(donor) if _kind(other[at]) == kind]
    named = [pair for pair in found if pair[0] == key] if isinstance(key, str) and r.randrange(4) else []
    if found:
        node[key] = copied(r.choice(named or found)[1])
    elif isinstance(node[key], bool):
        node[key] = not node[key]


def _swap(r: Random, node: Any, key: Any, donor: Any) -> None:
    """Two members of one container change places."""
    other = r.choice(list(node) if isinstance(node, dict) else range(len(node)))
    node[key], node[other] = node[other], node[key]


Change = Callable[[Random, Any, Any, Any], None]
_TREE: tuple[Change, ...] = (
    _replace,
    _replace,
    _nudge,
    _nudge,
    _nudge,
    _bury,
    _delete,
    _rename,
    _add,
    _repeat,
    _graft,
    _graft,
)
_GENTLE: tuple[Change, ...] = (_alike, _alike, _alike, _alike, _alike, _nudge, _repeat, _swap)


def spoil_tree(r: Random, tree: Any, donor: Any) -> Any:
    """One to four changes to a copy; in half of the cases such that keep every type. `donor`: a valid tree, this one or
    another, whose parts may turn up in it."""
    root = [copied(tree)]
    changes = r.choice((_GENTLE, _TREE))
    for _ in range(r.choice((1, 1, 1, 2, 2, 3, 4))):
        spots = places(root)
        # Outer members decide more: a third of the changes are among the first sixty.
        node, key = (
            spots[r.randrange(len(spots) if r.randrange(3) else min(len(spots), 60))] if spots else (root, 0)
        )
        if node is root:  # the whole, which is not worth it twice
            node, key = r.choice(spots)
        r.choice(changes)(r, node, key, donor)
        if not root:
            root = [None]
    return root[0]


# ---- bytes -------------------------------------------------------------------------------------------------------


def _flip(r: Random, data: bytearray, donor: bytes) -> None:
    for _ in range(r.choice((1, 1, 2, 8))):
        if data:
            data[r.randrange(len(data))] ^= 1 << r.randrange(8)


def _set(r: Random, data: bytearray, donor: bytes) -> None:
    if data:
        data[r.randrange(len(data))] = r.choice((0, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xFF, r.randrange(256)))


def _cut(r: Random, data: bytearray, donor: bytes) -> None:
    del data[r.randrange(len(data) + 1) :]


def _drop(r: Random, data: bytearray, donor: bytes) -> None:
    at = r.randrange(len(data) + 1)
    del data[at : at + r.choice((1, 2, 5, 50))]


def _double(r: Random, data: bytearray, donor: bytes) -> None:
    at = r.randrange(len(data) + 1)
    data[at:at] = data[at : at + r.choice((1, 4, 30, 300))] * r.choice((1, 2, 20))


def _header(r: Random, data: bytearray, donor: bytes) -> None:
    at, header = r.randrange(len(data) + 1), r.choice(HEADERS)
    data[at : at + (len(header) if r.randrange(2) else 0)] = header


def _splice(r: Random, data: bytearray, donor: bytes) -> None:
    at, start = r.randrange(len(data) + 1), r.randrange(len(donor) + 1)
    if r.randrange(2):
        data[at:] = donor[start:]
    else:
        data[at:at] = donor[start : start + r.choice((1, 10, 100))]


def _noise(r: Random, data: bytearray, donor: bytes) -> None:
    at = r.randrange(len(data) + 1)
    data[at : at + r.choice((0, 4))] = r.randbytes(r.choice((1, 4, 16, 100)))


def _dig(r: Random, data: bytearray, donor: bytes) -> None:
    """Containers in containers, of both formats, closed or not."""
    n, at = r.choice((20, 200, 2000, 50_000)), r.randrange(len(data) + 1)
    data[at:at] = r.choice(
        (
            b"\x91" * n,
            b"\x81\xa1x" * n,
            b"[" * n,
            b'{"x":' * n,
            b"[" * n + b"]" * n,
            b"\x92" * n,
            b"\xdd\0\0\x40\0" * n,
        )
    )


def _swell(r: Random, data: bytearray, donor: bytes) -> None:
    """A few bytes that stand for many values."""
    n = r.choice((1000, 30_000, 300_000))
    data[r.randrange(len(data) + 1) :] = r.choice(
        (
            b"\xdd" + n.to_bytes(4, "big") + b"\x90" * n,
            b"[" + b"[]," * n + b"0]",
            b"[" + b"0," * n + b"0]",
            b'{"' + b"a" * n + b'":1}',
            b"\xdf" + n.to_bytes(4, "big") + b"\xa0\xc0" * n,
            b'["' + b'\\"' * n + b'"]',
            b"1" * n,
        )
    )


_BYTES: tuple[Callable[[Random, bytearray, bytes], None], ...] = (
    _flip,
    _flip,
    _flip,
    _set,
    _set,
    _cut,
    _drop,
    _double,
    _header,
    _header,
    _splice,
    _noise,
    _dig,
)


def spoil_bytes(r: Random, data: bytes, donor: bytes) -> bytes:
    """One to three changes. `donor`: another valid file."""
    out = bytearray(data)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        r.choice(_BYTES)(r, out, donor)
    if r.randrange(150) == 0:
        _swell(r, out, donor)
    return bytes(out)


def pick(r: Random, corpus: Sequence[Any]) -> tuple[Any, Any]:
    """One to spoil, and one to take parts of: often the same."""
    chosen = r.choice(corpus)
    return chosen, r.choice((chosen, r.choice(corpus)))
