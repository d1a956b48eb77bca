# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The argument parser that an unpacked SGLang builds itself; run by the engine's Python:  runtime.py ROOT [STUB ...]

Prints one line of JSON that describes the parser, then answers each line of JSON on its standard input: `argv` is
parsed; with `config` (the text of a --config file) SGLang's own merger puts that file's words in front first; with
`resolve` SGLang also resolves and checks what it parsed, as far as that needs no GPU.

STUB names packages that the engine lacks and that SGLang imports on the way to its parser, without them having a part
in it (xgrammar): they become empty modules. Everything of SGLang is its own.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import tempfile
import types
import typing as t

MARK = "@@oracle "


class _Stub(types.ModuleType):
    """A module in which every name is a class that anything may derive from."""

    __path__: t.ClassVar[list[str]] = []  # type: ignore[misc]  # makes it a package

    def __getattr__(self, name: str) -> t.Any:
        if name.startswith("__"):
            raise AttributeError(name)
        import pydantic

        return type(name, (pydantic.BaseModel,), {})


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: t.Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(self, name: str, path: t.Any, target: t.Any = None) -> t.Optional[importlib.machinery.ModuleSpec]:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def plain(value: t.Any) -> t.Any:
    """As JSON has it; a collection is a list, what JSON doesn't know is its repr."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    return repr(value)


def described(parser: argparse.ArgumentParser, merger: t.Any) -> dict[str, t.Any]:
    """Every argument, and what the --config file refuses."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "refused": sorted(merger.unsupported_actions),
        "bare": sorted(merger.store_true_actions),
        "actions": [
            {
                "names": list(action.option_strings),
                "dest": action.dest,
                "nargs": action.nargs,
                "type": None if action.type is None else getattr(action.type, "__name__", repr(action.type)),
                "choices": None if action.choices is None else plain(list(action.choices)),
                "required": action.required,
                "action": type(action).__name__,
                "default": plain(action.default),
            }
            for action in parser._actions
        ],
    }


def resolve(record: t.Any) -> None:
    """SGLang's own checks after parsing: when the record is made (until 0.5.18), else in `resolve_once`."""
    for name in ("resolve_once", "check_server_args"):
        getattr(record, name, lambda: None)()


def answer(
    parser: argparse.ArgumentParser, merger: t.Any, asked: dict[str, t.Any], folder: str, record: t.Any
) -> dict[str, t.Any]:
    """Whether SGLang would get past its command line, and why not."""
    out = io.StringIO()
    words: t.Optional[list[str]] = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            words = list(asked["argv"])
            if "config" in asked:
                path = os.path.join(folder, "config.yaml")
                with open(path, "w", encoding="utf-8") as stream:
                    stream.write(asked["config"])
                words = merger.merge_config_with_args(["--config", path, *words])
            parsed = parser.parse_args(words)
            if asked.get("resolve"):
                resolve(record.from_cli_args(parsed))
        except SystemExit as end:
            lines = [line for line in out.getvalue().splitlines() if ": error: " in line]
            return {"ok": False, "words": words, "why": lines[-1] if lines else f"exit {end.code}"}
        except Exception as error:
            return {"ok": False, "words": words, "why": repr(error)}
    return {"ok": True, "words": words, "why": ""}


def main() -> int:
    root, stubs = os.path.realpath(sys.argv[1]), sys.argv[2:]
    sys.path.insert(0, root)
    sys.meta_path.append(_Stubs(stubs))
    import sglang

    if not os.path.realpath(str(sglang.__file__)).startswith(root + os.sep):
        print(f"sglang was imported from {sglang.__file__}", file=sys.stderr)
        return 1
    from sglang.srt.server_args import ServerArgs

    for name in ("sglang.srt.server_args_config_parser", "sglang.srt.utils.server_args_config_parser"):
        with contextlib.suppress(ModuleNotFoundError):
            merger_class = importlib.import_module(name).ConfigArgumentMerger
            break
    else:
        print("SGLang's merger of --config files was not found", file=sys.stderr)
        return 1
    parser = argparse.ArgumentParser(prog="sglang serve")
    ServerArgs.add_cli_args(parser)
    merger = merger_class(parser)
    print(MARK + json.dumps(described(parser, merger)), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            print(MARK + json.dumps(answer(parser, merger, json.loads(line), folder, ServerArgs)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
