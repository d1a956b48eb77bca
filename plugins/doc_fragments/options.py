# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Option groups that several modules share. A module's argument_spec must say the same types and defaults."""

from __future__ import annotations


class ModuleDocFragment:
    # argument_spec: devices list of str, default []; expected_gpus int; nvml_deadline_s float, default 10;
    # device_major int, default 195; proc_root path, default /proc
    DEVICES = r"""
options:
  devices:
    description:
      - The GPUs to look at, each by its index (V(0)), its UUID (V(GPU-...)) or its PCI bus id (V(00000000:01:00.0)).
      - An empty list stands for all GPUs of the host.
      - A GPU that the host does not show is an error, and nothing else is done.
    type: list
    elements: str
    default: []
  expected_gpus:
    description:
      - How many GPUs the host must show. Another number is a problem, since a GPU that fell off the bus is simply not
        counted.
      - With V(0) the host is one without GPUs, and no GPU is asked for.
      - If not specified, the number is not judged.
    type: int
  nvml_deadline_s:
    description:
      - How long, in seconds, one look at the GPUs may take. A driver that hangs is then reported as unknown.
    type: float
    default: 10
  device_major:
    description:
      - The major device number of the GPU nodes (C(/dev/nvidia0) and so on). It is fixed in the driver; other values
        serve tests.
    type: int
    default: 195
  proc_root:
    description:
      - Where the C(proc) file system is found. Other values serve recorded trees.
    type: path
    default: /proc
"""

    # argument_spec: name str; state_dir path, default /var/lib/cleanslate; unit str; port int
    SERVER = r"""
options:
  name:
    description:
      - The name of the server, as in the inventory. Its record is looked up by this name in O(state_dir).
    type: str
  state_dir:
    description:
      - Where launches are recorded on the host, one folder for each server.
    type: path
    default: /var/lib/cleanslate
  unit:
    description:
      - The systemd unit that runs the server, for example V(sglang-main.service). If not specified, the record of the
        launch names it.
    type: str
  port:
    description:
      - The TCP port of the server's HTTP endpoint. If not specified, the record of the launch names it.
    type: int
"""

    # argument_spec: container str; pve_dir path, default /etc/pve
    CONTAINER = r"""
options:
  container:
    description:
      - The number (vmid) of an LXC container to look at from its Proxmox node, where the task then has to run. Its
        processes are those of its cgroup, also those that can't be seen from inside. Nothing is run in it to look.
      - Only processes of this container are ever selected. Those of the node and of other containers are left alone.
      - Ports, shared memory, users and the launch record are then the container's own.
      - GPUs are named by UUID or bus id. An index is taken only if the container has the device nodes of all GPUs of
        the node. Without any name those are meant of which it has a node.
      - If not specified, the task looks at its own surroundings.
    type: str
    version_added: 0.2.0
  pve_dir:
    description:
      - Where Proxmox keeps its configuration.
    type: path
    default: /etc/pve
    version_added: 0.2.0
"""
