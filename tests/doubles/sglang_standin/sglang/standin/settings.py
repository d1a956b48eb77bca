# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in's switches: environment variables SGLANG_STANDIN_*, documented in README.md."""

from __future__ import annotations

import dataclasses
import os

PREFIX = "SGLANG_STANDIN_"
# Read elsewhere: the first by sglang.version, the second by the tests.
OTHER_NAMES = ("VERSION",)


@dataclasses.dataclass(frozen=True)
class Settings:
    """One field per variable; seconds end in _s, sizes in _mib or _gb. The field's type says how the text is read."""

    spawn_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    token_s: float = 0.002
    poll_s: float = 0.2
    shutdown_wait_s: float = 15.0
    death_delay_s: float = 0.3
    health_sleep_s: float = 0.05
    health_timeout_s: float = 20.0
    ignore_term: bool = False
    hang: str = ""
    crash: str = ""
    hang_after: int = -1
    busy_after_s: float = -1.0
    fail_every: int = 0
    thinks: bool = True
    calls_tools: bool = True
    dead_dp_rank: int = -1
    available_gpu_mem_gb: float = 6.5
    total_gpu_mem_gb: float = 94.97
    max_total_num_tokens: int = 231120
    pinned_mib: int = 0
    devices: str = ""
    orphan: bool = False
    unreaped: bool = False
    listeners: bool = True
    meets: bool = False
    more_info: str = ""

    @property
    def device_paths(self) -> tuple[str, ...]:
        """The paths in ``devices``, which are separated by commas."""
        return tuple(path for path in self.devices.split(",") if path)


def read_settings(environ: dict[str, str] | None = None) -> Settings:
    """Settings from the environment. An unknown SGLANG_STANDIN_* name or an unreadable value raises ValueError."""
    source = dict(os.environ) if environ is None else environ
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    values: dict[str, object] = {}
    for name, text in source.items():
        if not name.startswith(PREFIX) or name[len(PREFIX) :] in OTHER_NAMES:
            continue
        field = fields.get(name[len(PREFIX) :].lower())
        if field is None:
            raise ValueError(f"{name}: the stand-in has no such switch")
        values[field.name] = _convert(name, text, type(field.default))
    return Settings(**values)  # type: ignore[arg-type]


def _convert(name: str, text: str, wanted: type) -> object:
    if wanted is bool:
        if text not in ("", "0", "1"):
            raise ValueError(f"{name}: 0 or 1 expected, got {text!r}")
        return text == "1"
    try:
        return wanted(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
