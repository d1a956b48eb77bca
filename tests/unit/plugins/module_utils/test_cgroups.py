# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.cgroups import container_of, unit_of, user_unit_of
from ansible_collections.cleanslate.sglang.tests.unit.builders import process

DOCKER = "3f4e" * 16


@pytest.mark.parametrize(
    ("path", "unit", "user_unit", "container"),
    [
        ("/", None, None, None),
        ("/system.slice/sglang-main.service", "sglang-main.service", None, None),
        ("/system.slice/sglang-main.service/ranks", "sglang-main.service", None, None),
        ("/user.slice/user-0.slice/session-3.scope", "session-3.scope", None, None),
        ("/user.slice/user-0.slice/user@0.service/app.slice/x.service", None, "x.service", None),
        ("/user.slice/user-0.slice/user@0.service/init.scope", None, "init.scope", None),
        (f"/system.slice/docker-{DOCKER}.scope", f"docker-{DOCKER}.scope", None, f"docker:{DOCKER}"),
        (f"/docker/{DOCKER}", None, None, f"docker:{DOCKER}"),
        (f"/machine.slice/libpod-{DOCKER}.scope", f"libpod-{DOCKER}.scope", None, f"docker:{DOCKER}"),
        ("/lxc/129/ns/system.slice/sglang.service", "sglang.service", None, "lxc:129"),
        ("/lxc.payload.129/system.slice/x.service", "x.service", None, "lxc:129"),
        ("/lxc.payload/129/init.scope", "init.scope", None, "lxc:129"),
        ("/system.slice/not-a-unit.service.d/x", None, None, None),
    ],
)
def test_who_owns_a_process(path: str, unit: str | None, user_unit: str | None, container: str | None) -> None:
    one = process(5, cgroups=(path,))
    assert (unit_of(one), user_unit_of(one), container_of(one)) == (unit, user_unit, container)


def test_no_cgroup_no_owner() -> None:
    assert (unit_of(process(5)), user_unit_of(process(5)), container_of(process(5))) == (None, None, None)
