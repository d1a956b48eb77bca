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
    r"(?:[a-z0-9]+[_-]){0,16}(?:(?:api|access|secret|private|account|encryption|signing|shared|master)[_-]?key"
    r"|(?:auth|access|hf|hub|github|gitlab|bearer|refresh|session|security|api)[_-]?token"
    r"|password|passwd|passphrase|credentials?|secret(?:[_-][a-z]+){0,8})"
)  # counted: with any number of parts a text of secret_secret_... is read again from each of them
_MODEL_WORDS = ("per", "first", "next", "last", "new", "bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "end")
_OF_MODELS = "".join(rf"(?<!{word})" for word in _MODEL_WORDS)  # bucket_time_to_first_token, pad_token
_SECRET_KEY = (
    rf"(?:{_SECRET_FIELD}|token|[\w.-]{{1,64}}{_OF_MODELS}[_.-](?:token|key|pwd)"
    r"|[\w.-]{0,64}(?:access|secret|private|api)key)"
)
"""Keys of JSON whose text is a secret: a name says more there than in a log's line (`token: 5`, `#new-token: 128`)."""
_QUOTE = r"\\{0,7}[\"']"  # JSON within JSON within JSON has \\\" there; bounded, so that a text is read once
_GAP = r"(?:\s|\\\r?\n)+"  # a shell's, or a unit's, line goes on behind a backslash
# Patterns up to the value; what follows is `_VALUE`, or what is left to the end of a quotation that is open before it.
_JSON_FIELD = re.compile(rf"(?i)(?P<q>{_QUOTE})(?P<name>{_SECRET_KEY})(?P=q)\s*:\s*(?={_QUOTE})")
_FIELD = re.compile(rf"(?i)(?<![\w-])(?P<name>{_SECRET_FIELD})(?:{_QUOTE})?\s*[=:]\s*")
_OPTION = re.compile(rf"(?P<open>{_QUOTE})?(?<![\w-])--(?P<name>[A-Za-z][\w-]*)(?P<gap>{_GAP}|=)")
_QUOTED_OPTION = re.compile(  # 'a list', 'of words': ['--api-key', 'x']
    rf"(?P<q>{_QUOTE})--(?P<name>[A-Za-z][\w-]*)(?P=q)(?:\s*,\s*|{_GAP})"
)
_ENVIRONMENT = re.compile(rf"(?P<open>{_QUOTE})?\b(?P<name>[A-Z][A-Z0-9_]*)(?P<gap>=)")
_BARE = r"(?:[^\s\"']|[\"'](?=\w))*[^\s\"',;)}\]\\]"  # to the next white space, but for what ends a list or a sentence
_VALUE = re.compile(
    r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
    rf"|(?P<q>{_QUOTE})(?:(?!(?<!\\)(?P=q)).)*(?P=q)?"  # escaped, or cut off before its end
    rf"|(?i:none|null|true|false)(?=[\s\"',;)}}\]\\]|$)|{_BARE}"
)
_BEARER = re.compile(
    rf"(?i)(?P<head>\bauthorization(?:{_QUOTE})?\s*[=:]\s*(?:{_QUOTE})?(?:bearer|basic)\s+|\bbearer\s+){_BARE}"
)
_USERINFO = re.compile(r"(?P<head>:\\?/\\?/)[^\s/\"'<>]+@")
_SHAPE = re.compile(  # keys that tell themselves what they are
    r"(?<![\w-])(?:hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{16,}|sk-(?=[\w-]*[A-Z0-9])[\w-]{16,}|gh[opsu]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|nvapi-[\w-]{16,}|xox[abprs]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16})(?!\w)"
)
_UNSET = ("none", "null", "", "true", "false")
_SEGMENT = re.compile(r"^(?:.*KEY|KEYS|.*TOKEN|PASS|PASSPHRASE|CREDENTIALS?|.*SECRETS?.*|.*PASSWORD.*|.*PASSWD.*)$")
_DEEPEST = 100


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
    parts = name.upper().split("_")
    return any(_SEGMENT.match(part) for part in parts) or parts[-1] == "PWD" and len(parts) > 1


def is_secret_name(name: str) -> bool:
    """Whether a key of a mapping (JSON of SGLang, an inventory) holds a secret."""
    return (
        is_secret_flag(name)
        or re.fullmatch(_SECRET_FIELD, name.lower()) is not None
        or (name.isupper() and is_secret_variable(name))
    )


def _is_secret_option(name: str) -> bool:
    """Of any program: SGLang's own, and names such as --hf-token."""
    return is_secret_flag(name) or re.fullmatch(_SECRET_FIELD, name.lstrip("-").lower()) is not None


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
        """A log line, a command line as one string, JSON as text. Each pattern goes over it once."""
        for pattern in self._known:
            text = pattern.sub(MASK, text)
        text = _mask_behind(text, _JSON_FIELD)
        text = _mask_behind(text, _FIELD)
        if "--" in text:
            text = _mask_behind(text, _QUOTED_OPTION, _is_secret_option)
            text = _mask_behind(text, _OPTION, _is_secret_option)
        text = _BEARER.sub(lambda m: m.group("head") + MASK, text)
        if "=" in text:
            text = _mask_behind(text, _ENVIRONMENT, is_secret_variable)
        if "@" in text:
            text = _USERINFO.sub(lambda m: m.group("head") + MASK + "@", text)
        return _SHAPE.sub(MASK, text)

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
                if _is_secret_option(name):
                    result.append(name + equals + (MASK if equals else ""))
                    mask_next = not equals
                    continue
            variable, equals, value = word.partition("=")
            if value and variable.isidentifier() and variable.isupper() and is_secret_variable(variable):
                result.append(f"{variable}={MASK}")
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
        """Plain data (dicts, lists, scalars), e.g. parsed JSON: secret keys with all below them, and every string as by
        `text`."""
        return self._data(value, name, 0)

    def _data(self, value: t.Any, name: str, depth: int) -> t.Any:
        if depth > _DEEPEST:
            return MASK  # of foreign JSON; recursion has an end
        if isinstance(value, t.Mapping):
            above = name if is_secret_name(name) else ""
            return {
                key: self._data(item, above if above and not is_secret_name(str(key)) else str(key), depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(item, str) for item in value) and any(item.startswith("--") for item in value):
                return self.argv(value)
            return [self._data(item, name, depth + 1) for item in value]
        if name and is_secret_name(name) and value not in (None, "", True, False):
            return MASK
        if not isinstance(value, str):
            return value
        return MASK if value and _is_secret_key(name) and not _is_special(value) else self.text(value)


_KEY_NAME = re.compile(rf"(?i){_SECRET_KEY}")


def _is_secret_key(name: str) -> bool:
    return bool(name) and _KEY_NAME.fullmatch(name) is not None


def _is_special(value: str) -> bool:
    """A token of a model, such as `<|im_end|>`, which stands under names like eos_token."""
    return value.startswith("<")


def _value_pattern(secret: str) -> t.Pattern[str]:
    """Where a known secret stands. A very short one only as a whole word, lest it tears every text apart."""
    escaped = re.escape(secret)
    return re.compile(escaped if len(secret) >= _SHORT_SECRET else rf"(?<!\w){escaped}(?!\w)")


def _mask_behind(text: str, pattern: t.Pattern[str], is_secret: t.Optional[t.Callable[[str], bool]] = None) -> str:
    """Masks the value behind each match whose name is a secret. What is none is not passed over with its value: a
    secret may stand within."""
    parts: list[str] = []
    done = 0
    for match in pattern.finditer(text):
        if match.start() < done or (is_secret is not None and not is_secret(match.group("name"))):
            continue
        end, masked = _value_behind(text, match)
        if end > match.end():
            parts += [text[done : match.end()], masked]
            done = end
    return "".join([*parts, text[done:]]) if parts else text


def _value_behind(text: str, match: t.Match[str]) -> tuple[int, str]:
    """(where the value ends, what stands for it)."""
    groups = match.groupdict()
    start = match.end()
    if groups.get("open") and groups.get("gap") == "=" and text[start : start + 1] not in ("", '"', "'", "\\"):
        end = _closing(text, start, groups["open"])  # "HF_TOKEN=with spaces"
        return end, text[start:end] if text[start:end].lower() in _UNSET else MASK
    value = _VALUE.match(text, start)
    return (start, "") if value is None else (value.end(), _masked(value.group()))


def _closing(text: str, start: int, quote: str) -> int:
    """Where the quotation ends, or the line."""
    line = text.find("\n", start)
    line = len(text) if line < 0 else line
    end = text.find(quote, start, line)
    while end > 0 and text[end - 1] == "\\":
        end = text.find(quote, end + 1, line)
    return line if end < 0 else end


_OPENING = re.compile(_QUOTE)


def _masked(value: str) -> str:
    opening = _OPENING.match(value)
    if opening is None:
        return value if value.lower() in _UNSET else MASK
    quote = opening.group()
    inner = value[len(quote) :]
    inner = inner[: -len(quote)] if inner.endswith(quote) else inner
    return value if not inner or _is_special(inner) and inner.endswith(">") else quote + MASK + quote
