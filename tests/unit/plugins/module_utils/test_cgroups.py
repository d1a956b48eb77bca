# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.cgroups import (
    container_of,
    guest_of,
    unit_of,
    unit_path_of,
    user_unit_of,
)
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


# --- a container, seen from its node ---


@pytest.mark.parametrize(
    ("paths", "vmid"),
    [
        (("/lxc/129/ns/system.slice/x.service",), "129"),
        (("/lxc/129",), "129"),
        (("/lxc.payload/129/init.scope",), "129"),
        (("/lxc.payload.129/init.scope",), "129"),
        (("/lxc/129/ns/lxc/130/ns",), "129"),  # a nested one is the outer one's
        (("/lxc/129/ns/lxc.payload.130/x",), "129"),
        ((f"/lxc/129/ns/docker/{DOCKER}",), "129"),
        ((f"/lxc/129/ns/system.slice/docker-{DOCKER}.scope",), "129"),
        (("/lxc/1299/ns",), "1299"),
        (("/lxc/129/ns", "/lxc/129", "/"), "129"),  # v1: some hierarchies know it by another depth, or not at all
        (("/lxc/129/ns", "/lxc/130/ns"), None),
        ((), None),
        (("/",), None),
        (("/lxc",), None),
        (("/lxc.monitor/129",), None),  # lxc-start, a process of the node
        (("/lxc.monitor.129",), None),
        (("/user.slice/lxc/129/x",), None),
        (("/system.slice/lxc.service",), None),
        (("/system.slice/x.service/lxc/129",), None),
        ((f"/docker/{DOCKER}/lxc/129",), None),
        (("/../../lxc/129/ns",), None),
        (("/LXC/129",), None),
    ],
)
def test_whose_container_a_process_is_in(paths: tuple[str, ...], vmid: str | None) -> None:
    assert guest_of(process(5, cgroups=paths)) == vmid


@pytest.mark.parametrize(
    ("paths", "cgroup"),
    [
        (("/lxc/129/ns/system.slice/x.service/ranks/0",), "/lxc/129/ns/system.slice/x.service"),
        (("/lxc/129/ns/system.slice/x.service",), "/lxc/129/ns/system.slice/x.service"),
        (("/", "/lxc/129/ns/system.slice/x.service"), "/lxc/129/ns/system.slice/x.service"),
        (("/a.slice/x.service/b/y.scope/c",), "/a.slice/x.service/b/y.scope"),
        (("/user.slice/user@0.service/app.slice/x.service",), None),
        (("/lxc/129/ns/system.slice/x.service.d",), None),
        (("/lxc/129/ns",), None),
        ((), None),
    ],
)
def test_the_cgroup_of_the_innermost_unit(paths: tuple[str, ...], cgroup: str | None) -> None:
    one = process(5, cgroups=paths)
    assert unit_path_of(one) == cgroup
    assert cgroup is None or cgroup.endswith("/" + (unit_of(one) or ""))
