# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A drift check's document as JUnit XML, for CI systems. Pure.

A host is a suite; the host itself and each of its servers is a case. Drift is a failure, what could not be seen is an
error, and what is accepted is told in the case's output.
"""

from __future__ import annotations

import json
import typing as t
from xml.etree import ElementTree as Xml

SUITE = "Drift"
_WORD = 20


def render(document: t.Mapping[str, t.Any]) -> str:
    """The whole text."""
    root = Xml.Element("testsuites", {"name": SUITE})
    if document["run"]["problems"]:
        suite = Xml.Element("testsuite", {"name": "run", "timestamp": document["generated_at"][:-1], "time": "0"})
        case = _case(suite, "run", "run")
        problems = document["run"]["problems"]
        Xml.SubElement(case, "error", {"message": problems[0], "type": "unknown"}).text = "\n".join(problems)
        root.append(_counted(suite))
    for host in document["hosts"]:
        root.append(_counted(_suite(host)))
    for name in ("tests", "failures", "errors"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    root.set("time", f"{document['run']['seconds']:.1f}")
    Xml.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _suite(host: t.Mapping[str, t.Any]) -> Xml.Element:
    attributes = {"name": host["name"], "timestamp": host["checked_at"][:-1], "time": f"{host['seconds'] or 0:.1f}"}
    suite = Xml.Element("testsuite", attributes)
    case = _case(suite, host["name"], "host")
    if host["host"] is None:
        why = f"{host['state']}: {host['problem']}"
        Xml.SubElement(case, "error", {"message": why, "type": host["state"]}).text = why
    else:
        _judge(case, host["host"])
    for server in host["servers"]:
        case = _case(suite, host["name"], server["name"])
        if host["host"] is None:
            why = f"the host was not seen: {host['problem']}"
            Xml.SubElement(case, "error", {"message": why, "type": host["state"]}).text = why
        else:
            _judge(case, server)
    return suite


def _counted(suite: Xml.Element) -> Xml.Element:
    suite.set("tests", str(len(suite.findall("testcase"))))
    suite.set("failures", str(len(suite.findall("testcase/failure"))))
    suite.set("errors", str(len(suite.findall("testcase/error"))))
    suite.set("skipped", "0")
    return suite


def _case(suite: Xml.Element, host: str, name: str) -> Xml.Element:
    return Xml.SubElement(suite, "testcase", {"classname": f"drift.{host}", "name": name, "time": "0"})


def _judge(case: Xml.Element, block: t.Mapping[str, t.Any]) -> None:
    """A case holds at most one of failure and error, as most readers want it."""
    rows = [row for row in block["drift"] if row["severity"] != "note"]
    drifted = [row for row in rows if row["state"] != "unknown"]
    if block["verdict"] == "drifted":
        _add(case, "failure", "drift", drifted, rows)
    elif block["verdict"] == "unknown":
        _add(case, "error", "unknown", rows, rows)
    told = [f"note: {sentence(row)}" for row in block["drift"] if row["severity"] == "note"]
    told += [f"accepted: {sentence(row)}" for row in block["accepted"]]
    if told:
        Xml.SubElement(case, "system-out").text = "\n".join(told)


def _add(
    case: Xml.Element, tag: str, kind: str, leading: t.Sequence[t.Mapping[str, t.Any]], rows: t.Sequence[t.Any]
) -> None:
    message = ", ".join(row["item"] for row in leading) or f"the verdict is {kind}, without a row that says why"
    Xml.SubElement(case, tag, {"message": message, "type": kind}).text = "\n".join(map(sentence, rows))


def sentence(row: t.Mapping[str, t.Any]) -> str:
    """A row in a line."""
    places = " and ".join((row["where"], *row["also"]))
    if row["state"] == "unknown":
        words = f"{row['item']}: unknown: {shown(row['found'])}"
    else:
        values = f"wanted {shown(row['wanted'])}, found {shown(row['found'])}"
        words = f"{row['item']} [{row['severity']}, {places}]: {values}"
    reason = f" (accepted: {row['reason']})" if row["reason"] else ""
    return " ".join(f"{words}{reason}".split()) + (f"; {row['remedy']}" if row["remedy"] else "")


def shown(value: t.Any) -> str:
    """A wanted or found value as people read it."""
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value if value.strip() else json.dumps(value)
    if isinstance(value, list) and value and all(isinstance(each, str) and each.strip() for each in value):
        return ("\n" if any(" " in each or len(each) > _WORD for each in value) else ", ").join(value)
    return json.dumps(value, ensure_ascii=False)
