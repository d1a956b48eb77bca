# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks that no linter knows: licence headers, and which layer of the core may import which.

Layers: ``decide`` gets snapshots and returns values, so it imports neither ``observe`` nor ``act``; nothing in
module_utils imports Ansible, so that the core can be driven by plain tests; one module only spawns processes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SPDX = "SPDX-License-Identifier: GPL-3.0-or-later"
HEADER_LINES = 8
CORE = Path("plugins/module_utils")
# Below a directory of the core: packages of the core that it must not import.
FORBIDDEN = {"decide": {"observe", "act"}, "observe": {"act"}}
SPAWNER = CORE / "spawn.py"


def tracked_files(root: Path) -> list[Path]:
    """Files that git knows or would add, relative to ``root``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    names = listed.stdout.decode().split("\0")
    return [Path(name) for name in names if name and (root / name).is_file()]


def imported_modules(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name (from the checkout's root) of what a file imports."""
    package = path.parent.parts
    prefix = "ansible_collections.cleanslate.sglang."
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            module = module[len(prefix) :] if module.startswith(prefix) else module
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def check_header(path: Path, text: str) -> Iterator[str]:
    if text.strip() and SPDX not in "\n".join(text.splitlines()[:HEADER_LINES]):
        yield f"{path}:1: no line '{SPDX}' in the first {HEADER_LINES} lines"


def check_layers(path: Path, text: str) -> Iterator[str]:
    if CORE not in path.parents:
        return
    layer = path.relative_to(CORE).parts[0]
    core = ".".join(CORE.parts)
    for line, name in imported_modules(path, ast.parse(text, str(path))):
        if name.split(".")[0] in ("ansible", "ansible_collections"):
            yield f"{path}:{line}: the core imports {name}; only modules may import Ansible"
        for other in FORBIDDEN.get(layer, ()):
            if name.startswith(f"{core}.{other}"):
                yield f"{path}:{line}: {layer} imports {other}"
        if name.split(".")[0] == "subprocess" and path != SPAWNER:
            yield f"{path}:{line}: imports subprocess; {SPAWNER} is the one place that spawns"


def findings(root: Path) -> list[str]:
    """Every broken rule below ``root`` as ``file:line: what``."""
    found: list[str] = []
    for path in tracked_files(root):
        if path.suffix == ".py":
            text = (root / path).read_text(encoding="utf-8")
            found += [*check_header(path, text), *check_layers(path, text)]
    return sorted(set(found))


def main() -> int:
    found = findings(ROOT)
    print("\n".join(found) or "house rules: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
