# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Any result as JSON of a bounded size: what is too much is left out, and the document says so itself. Pure."""

from __future__ import annotations

import json
import math
import typing as t

DOCUMENT_LIMIT = 256 * 1024
CUT = "_cut"
"""The key of a document's own note that something was left out."""

_DEPTH = 40
# Each round is harsher; what the third leaves too large is left out by top-level keys, the largest first.
_ROUNDS = ((20000, 2000), (2000, 200), (300, 30))


def document_text(data: t.Mapping[str, t.Any], limit: int = DOCUMENT_LIMIT) -> str:
    """JSON with a newline at its end, at most ``limit`` bytes."""
    whole = {str(key): _plain(value) for key, value in data.items()}
    text = _text(whole)
    size = len(text.encode())
    if size <= limit:
        return text
    note = f"the document had {size} bytes, of which at most {limit} are kept: long texts and lists are shortened"
    shorter = whole
    for longest, most in _ROUNDS:
        shorter = {key: _shortened(value, longest, most) for key, value in whole.items()}
        text = _text({**shorter, CUT: note})
        if len(text.encode()) <= limit:
            return text
    return _without_the_largest(shorter, note, limit)


def _without_the_largest(data: t.Mapping[str, t.Any], note: str, limit: int) -> str:
    sizes = {key: len(_text({key: value}).encode()) for key, value in data.items()}
    left = dict(data)
    gone: list[str] = []
    for key in sorted(sizes, key=lambda one: (-sizes[one], one)):
        del left[key]
        gone.append(key[:60])
        names = ", ".join(gone[:20]) + (" ..." if len(gone) > 20 else "")
        text = _text({**left, CUT: f"{note}; left out: {names}"})
        if len(text.encode()) <= limit:
            return text
    return _text({CUT: note[:limit]})


def _text(data: t.Mapping[str, t.Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n"


def _plain(value: t.Any, depth: int = 0) -> t.Any:
    """What JSON can hold: numbers without an end become null, unknown things their text, depths an ellipsis."""
    if depth > _DEPTH:
        return "..."
    if isinstance(value, t.Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _shortened(value: t.Any, longest: int, most: int) -> t.Any:
    if isinstance(value, str) and len(value) > longest:
        half = longest // 2
        return f"{value[:half]} [... {len(value) - 2 * half} characters left out ...] {value[-half:]}"
    if isinstance(value, dict):
        return {key: _shortened(item, longest, most) for key, item in value.items()}
    if isinstance(value, list):
        items = [_shortened(item, longest, most) for item in value]
        if len(items) <= most:
            return items
        half = most // 2
        return [*items[:half], f"[... {len(items) - 2 * half} items left out ...]", *items[-half:]]
    return value
