# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A server's settings in two parts: what a module's arguments may show, and what must travel unseen. Pure.

Ansible logs a module's arguments on the host. Secrets stand not only under the names of secrets: a token may be in
`environment`, in the JSON of a flag, in a proxy's URL, in a line of `unit_overrides`.
"""

from __future__ import annotations

import typing as t

from .redact import Redactor, is_secret_name, is_secret_variable

Settings = t.Mapping[str, t.Any]
_BY_KEY = ("environment", "flags")  # mappings that are taken apart; any other setting goes as a whole


def apart(settings: Settings, secrets: t.Iterable[t.Optional[str]] = ()) -> tuple[dict[str, t.Any], dict[str, t.Any]]:
    """(what may be shown, what may not). ``secrets``: values that are known to be secret."""
    redactor = Redactor(secrets)
    shown: dict[str, t.Any] = {}
    hidden: dict[str, t.Any] = {}
    for name, value in settings.items():
        if name in _BY_KEY and isinstance(value, t.Mapping):
            unseen = {key for key, each in value.items() if _is_secret(redactor, name, str(key), each)}
            shown[name] = {key: each for key, each in value.items() if key not in unseen}
            if unseen:
                hidden[name] = {key: each for key, each in value.items() if key in unseen}
        elif _is_secret(redactor, "", name, value):
            hidden[name] = value
        else:
            shown[name] = value
    return shown, hidden


def joined(shown: Settings, hidden: Settings) -> dict[str, t.Any]:
    """The settings as they were."""
    result = {**shown, **hidden}
    for name in _BY_KEY:
        parts = [part[name] for part in (shown, hidden) if isinstance(part.get(name), t.Mapping)]
        if len(parts) > 1:
            result[name] = {key: value for part in parts for key, value in part.items()}
    return result


def names_of(hidden: Settings) -> list[str]:
    """Which they are, for people: `environment: HF_TOKEN`."""
    return [
        f"{name}: {', '.join(map(str, value))}" if name in _BY_KEY and isinstance(value, t.Mapping) else name
        for name, value in hidden.items()
    ]


def _is_secret(redactor: Redactor, name: str, key: str, value: t.Any) -> bool:
    if name == "environment" and value not in (None, "") and is_secret_variable(key):
        return True
    plain = list(value) if isinstance(value, tuple) else value
    return bool(redactor.data(plain, key if is_secret_name(key) else "") != plain)
