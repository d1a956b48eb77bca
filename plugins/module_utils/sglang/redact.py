# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Secrets out of everything that SGLang echoes.

SGLang itself prints `api_key`, `admin_api_key` and `ssl_keyfile_password` in clear: in /server_info, in the log line
`server_args=ServerArgs(...)` and in `launch_command`. Nothing of that may reach a result, a record or a report.
Rather too
much is masked than too little; a value that is not set (None, null, '') stays visible, since that is a finding.
"""

from __future__ import annotations

import json
import re
import typing as t

MASK = "********"

SECRET_FLAGS = ("api-key", "admin-api-key", "ssl-keyfile-password")
"""SGLang's options whose value is a secret, in their normal form."""

_NOT_SECRET = ("ssl-keyfile",)  # real options that are a prefix of a secret one
_SHORTEST_ABBREVIATION = 2
_SHORT_SECRET = 4

_SECRET_FIELD = (
    r"(?:[a-z0-9]+[_-])*(?:api[_-]?key|(?:auth|access|hf|bearer)[_-]token|password|passwd|secret(?:[_-][a-z]+)*)"
)
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_ESCAPED_QUOTED = r"\\\"(?:(?!\\\").)*\\\""
_FIELD = re.compile(
    rf"(?i)(?P<name>(?<![\w-]){_SECRET_FIELD}(?:\\?[\"'])?\s*[=:]\s*)(?P<value>{_ESCAPED_QUOTED}|{_QUOTED}|[^\s,;)}}\]\"']+)"
)
_OPTION = re.compile(rf"(?P<option>(?<![\w-])--(?P<name>[A-Za-z][\w-]*))(?P<gap>\s+|=)(?P<value>{_QUOTED}|[^\s\"',]+)")
_QUOTED_OPTION = re.compile(  # 'a list', 'of words': ['--api-key', 'x']
    r"(?P<option>(?P<q>[\"'])--(?P<name>[A-Za-z][\w-]*)(?P=q))(?P<gap>\s*,\s*)(?P<value>\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*')"
)
_BEARER = re.compile(
    r"(?i)(?P<head>\bauthorization(?:\\?[\"'])?\s*[=:]\s*(?:\\?[\"'])?(?:bearer|basic)\s+|\bbearer\s+)[^\s\"'\\,;]+"
)
_ENVIRONMENT = re.compile(rf"(?P<name>\b[A-Z][A-Z0-9_]*)(?P<gap>=)(?P<value>{_QUOTED}|[^\s\"',;]+)")
_UNSET = ("none", "null", "", "''", '""', "true", "false")
_SEGMENT = re.compile(r"^(?:.*KEY|KEYS|.*TOKEN|PASS|PASSPHRASE|CREDENTIALS?|.*SECRETS?.*|.*PASSWORD.*|.*PASSWD.*)$")


def is_secret_flag(name: str) -> bool:
    """Whether this option, or what argparse would complete it to, holds a secret. Dashes or underscores, with or
    without `--`."""
    plain = name.lstrip("-").replace("_", "-").lower()
    if plain in SECRET_FLAGS:
        return True
    if plain in _NOT_SECRET or len(plain) < _SHORTEST_ABBREVIATION:
        return False
    if plain.startswith("ssl-keyfile"):
        return "ssl-keyfile-password".startswith(plain)
    return any(flag.startswith(plain) for flag in SECRET_FLAGS if not flag.startswith("ssl"))


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable of this name holds a secret: a part of it is KEY, TOKEN, SECRET, PASSWORD or
    alike.

    Parts count, not substrings: TOKENIZERS_PARALLELISM and SGLANG_MAX_TOKENS are no secrets.
    """
    return any(_SEGMENT.match(part) for part in name.upper().split("_"))


def is_secret_name(name: str) -> bool:
    """Whether a key of a mapping (JSON of SGLang, an inventory) holds a secret."""
    return (
        is_secret_flag(name)
        or re.fullmatch(_SECRET_FIELD, name.lower()) is not None
        or (name.isupper() and is_secret_variable(name))
    )


class Redactor:
    """Masks secrets by name and by value. ``secrets`` are values known to be secret: they are masked wherever they
    stand."""

    def __init__(self, secrets: t.Iterable[t.Optional[str]] = ()) -> None:
        known: set[str] = set()
        for secret in secrets:
            if secret:
                known.update({secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]})
        # The longest first: a secret may be part of another.
        self._known = [_value_pattern(secret) for secret in sorted(known, key=len, reverse=True)]

    def text(self, text: str) -> str:
        """A log line, a command line as one string, JSON as text."""
        for pattern in self._known:
            text = pattern.sub(MASK, text)
        text = _FIELD.sub(lambda m: m.group("name") + _masked(m.group("value")), text)
        for pattern in (_QUOTED_OPTION, _OPTION):
            text = pattern.sub(
                lambda m: (
                    m.group("option") + m.group("gap") + _masked(m.group("value"))
                    if is_secret_flag(m.group("name"))
                    else m.group(0)
                ),
                text,
            )
        text = _BEARER.sub(lambda m: m.group("head") + MASK, text)
        return _ENVIRONMENT.sub(
            lambda m: (
                m.group("name") + "=" + _masked(m.group("value")) if is_secret_variable(m.group("name")) else m.group(0)
            ),
            text,
        )

    def argv(self, argv: t.Iterable[str]) -> list[str]:
        """A command line in words."""
        result: list[str] = []
        mask_next = False
        for word in argv:
            if mask_next and not word.startswith("--"):
                result.append(MASK)
                mask_next = False
                continue
            mask_next = False
            if word.startswith("--"):
                name, equals, _value = word.partition("=")
                if is_secret_flag(name):
                    result.append(name + equals + (MASK if equals else ""))
                    mask_next = not equals
                    continue
            result.append(self.text(word))
        return result

    def environment(self, environment: t.Mapping[str, str]) -> dict[str, str]:
        """Environment variables: secret by their name, or known by value."""
        return {
            name: MASK if value and is_secret_variable(name) else self.text(value)
            for name, value in environment.items()
        }

    def data(self, value: t.Any, name: str = "") -> t.Any:
        """Plain data (dicts, lists, scalars), e.g. parsed JSON: secret keys, and every string as by `text`."""
        if isinstance(value, t.Mapping):
            return {key: self.data(item, str(key)) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(item, str) for item in value) and any(item.startswith("--") for item in value):
                return self.argv(value)
            return [self.data(item, name) for item in value]
        if name and is_secret_name(name) and value not in (None, "", True, False):
            return MASK
        return self.text(value) if isinstance(value, str) else value


def _value_pattern(secret: str) -> t.Pattern[str]:
    """Where a known secret stands. A very short one only as a whole word, lest it tears every text apart."""
    escaped = re.escape(secret)
    return re.compile(escaped if len(secret) >= _SHORT_SECRET else rf"(?<!\w){escaped}(?!\w)")


def _masked(value: str) -> str:
    if value.lower() in _UNSET:
        return value
    if value.startswith('\\"'):
        return f'\\"{MASK}\\"'
    if value[0] in "\"'":
        return value[0] + MASK + value[0]
    return MASK
