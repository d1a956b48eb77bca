# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make the context of our execution environment, and prove that what it will install is ours and can be had.

    execution_environment.py make     the archive and the context, in build/ee (`make ee`)
    execution_environment.py check    the same in a copy, and that its lists hold

The context's files must be our lists, the collection of the archive must tell its own to ansible-builder, bindep must
read them, and pip must find a set of packages for all of them together (this asks the package index).
No image is built: that needs podman or docker, and a registry. Runs with the commands of the Python that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from bindep.depends import Depends

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.sglang.scripts.bootstrap import proxmox_collections  # noqa: E402

ARCHIVE = "cleanslate-sglang.tar.gz"
# What the definition reads of a checkout.
READ = ("ee", "requirements")
COMMANDS = Path(sys.executable).parent
PIP_DEADLINE_S = 170
# Without these the playbooks, the drift check or the way through pct are not there.
NEEDED = ("ansible-core", "ansible-runner", "paramiko", "jinja2", "requests")


class Wrong(Exception):
    """What is not as it has to be, in one sentence."""


def run(argv: Sequence[str], cwd: Path, deadline_s: float = 120, **more: str) -> str:
    """The output of a command of our venv; it has to succeed."""
    print("$", *argv, flush=True)
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    env = {**clean, "PATH": os.pathsep.join([str(COMMANDS), os.environ.get("PATH", os.defpath)]), **more}
    done = subprocess.run(
        [str(COMMANDS / argv[0]), *argv[1:]],
        cwd=cwd, env=env, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=deadline_s,
    )  # fmt: skip
    if done.returncode:
        raise Wrong(f"{argv[0]}: exit status {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def make(checkout: Path) -> Path:
    """The archive of this collection and the context around it, below ``checkout``/build/ee; returns the context."""
    built = checkout / "build" / "ee"
    built.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built) as scratch:
        run(["ansible-galaxy", "collection", "build", "--output-path", scratch, str(ROOT)], Path(scratch))
        next(Path(scratch).glob("cleanslate-sglang-*.tar.gz")).replace(built / ARCHIVE)
    context = built / "context"
    shutil.rmtree(context, ignore_errors=True)
    definition = str(checkout / "ee" / "execution-environment.yml")
    words = ["-f", definition, "-c", str(context), "--output-filename", "Containerfile"]
    run(["ansible-builder", "create", *words], built)
    return context


def requirement_lines(path: Path) -> list[str]:
    """The lines of a requirements file that say something, with those of the files that it names."""
    found: list[str] = []
    for line in path.read_text().splitlines():
        words = line.split("#", 1)[0].split()
        if words[:1] == ["-r"]:
            found += requirement_lines(path.parent / words[1])
        elif words:
            found.append(" ".join(words))
    return found


def check_context(context: Path) -> None:
    """The context's files are our lists, and its recipe installs from them."""
    files = context / "_build"
    for name in ("core-2.21.txt", "drift.txt"):
        if (files / "requirements" / name).read_text() != (ROOT / "requirements" / name).read_text():
            raise Wrong(f"the context's {name} is not that of requirements/")
    wanted = yaml.safe_load((ROOT / "requirements" / "collections.yml").read_text())
    if yaml.safe_load((files / "requirements.yml").read_text()) != wanted:
        raise Wrong("the context's requirements.yml is not requirements/collections.yml")
    recipe = (context / "Containerfile").read_text().splitlines()
    for line in (
        'ARG EE_BASE_IMAGE="quay.io/centos/centos:stream9"',
        "FROM $EE_BASE_IMAGE AS base",
        'ARG ANSIBLE_INSTALL_REFS="-r /output/requirements/core-2.21.txt -r /output/requirements/drift.txt"',
        "COPY _build/requirements/ /output/requirements/",
        "COPY _build /build",
    ):
        if line not in recipe:
            raise Wrong(f"the Containerfile has no line {line!r}")
    if recipe.index("COPY _build/requirements/ /output/requirements/") > next(
        number for number, line in enumerate(recipe) if "pip install" in line
    ):
        raise Wrong("the Containerfile installs ansible-core before its list is there")


def install(context: Path, scratch: Path) -> Path:
    """Our collection as the image would have it, by the context's own list; only the archive of it needs no Galaxy."""
    files = context / "_build"
    listed = yaml.safe_load((files / "requirements.yml").read_text())["collections"]
    ours = [each for each in listed if each.get("type") == "file"]
    if [each["name"] for each in ours] != [f"archives/{ARCHIVE}"]:
        raise Wrong(f"the list of collections names the archives {[each['name'] for each in ours]}, not ours alone")
    (scratch / "ours.yml").write_text(yaml.safe_dump({"collections": ours}))
    target = scratch / "installed"
    words = ["--offline", "-r", str(scratch / "ours.yml"), "--collections-path", str(target)]
    run(["ansible-galaxy", "collection", "install", *words], files)
    others = proxmox_collections() / "ansible_collections" / "community"
    if others.is_dir():
        (target / "ansible_collections" / "community").symlink_to(others)
    return target


def introspect(installed: Path) -> dict[str, list[str]]:
    """What ansible-builder reads of the collections (python, system): lines with their origin behind a #."""
    text = run(["ansible-builder", "introspect", str(installed)], installed)
    found = yaml.safe_load(text[text.index("---") :])
    return {kind: list(found.get(kind) or []) for kind in ("python", "system")}


def check_lists(found: Mapping[str, Sequence[str]]) -> None:
    for kind, name in (("python", "controller.txt"), ("system", "bindep.txt")):
        wanted = requirement_lines(ROOT / "requirements" / name)
        told = [line.split("#", 1)[0].strip() for line in found[kind] if line.endswith("collection cleanslate.sglang")]
        if told != wanted or not wanted:
            raise Wrong(f"ansible-builder reads {told} of the collection, and requirements/{name} says {wanted}")


def check_bindep(found: Mapping[str, Sequence[str]]) -> None:
    """bindep reads the list, and finds the way to the hosts in it for both kinds of systems."""
    depends = Depends("\n".join([*found["system"], ""]))
    for platform, package in (("platform:rpm", "openssh-clients"), ("platform:dpkg", "openssh-client")):
        names = [rule[0] for rule in depends.active_rules([platform])]
        if package not in names:
            raise Wrong(f"bindep finds no {package} for {platform}, only {names}")


def resolve(scratch: Path, found: Mapping[str, Sequence[str]], core: str) -> None:
    """Ask pip what it would install: the collections' lists and this ansible-core, all in one environment."""
    together = scratch / "together.txt"
    together.write_text("\n".join([f"-r {ROOT / 'requirements' / core}", *found["python"], ""]))
    report = scratch / "report.json"
    words = ["--dry-run", "--ignore-installed", "--no-input", "--disable-pip-version-check", "--report", str(report)]
    run(["pip", "install", "--quiet", *words, "-r", str(together)], scratch, PIP_DEADLINE_S)
    installed = [each["metadata"] for each in json.loads(report.read_text())["install"]]
    chosen = {each["name"].lower(): each["version"] for each in installed}
    missing = set(NEEDED) - set(chosen)
    if missing:
        raise Wrong(f"with {core} nothing installs {', '.join(sorted(missing))}")
    print(f"{core}: {len(chosen)} packages, {', '.join(f'{name} {chosen[name]}' for name in NEEDED)}")


def check() -> None:
    with tempfile.TemporaryDirectory(prefix="cleanslate-ee-") as name:
        scratch = Path(name)
        for part in READ:
            shutil.copytree(ROOT / part, scratch / part)
        context = make(scratch)
        check_context(context)
        found = introspect(install(context, scratch))
        check_lists(found)
        check_bindep(found)
        # The image has a Python for the newest ansible-core; so has this one, where it can.
        resolve(scratch, found, "core-2.21.txt" if sys.version_info >= (3, 12) else "core-2.19.txt")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=["make", "check"])
    try:
        if parser.parse_args().what == "check":
            check()
        else:
            print(f"made: {make(ROOT)}")
    except Wrong as error:
        print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
