# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Guardrails: rules as data that a wanted launch must pass.

A rule says when it speaks (decide/conditions.py), how severe that is, why and what to do. A ``deny`` whose condition
can't be answered is neither a deny nor silence: it is a finding ``unknown`` that names what is not known. The shipped
rules are roles/plan/files/guardrails.yml; reading files and merging is plugin_utils/guardrails.py.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t
from dataclasses import dataclass

from ..plan_model import GB, GIB, MIB, Budget, Finding, HostFacts, ModelFacts, Topology
from ..sglang.install import version_tuple
from ..sglang.redact import MASK, Redactor, is_secret_name, is_secret_variable
from .budget import budget as memory_budget
from .conditions import All, Compare, Condition, Facts, Known, Reader, Wrong, is_secret_path, named, nearest, shown

SEVERITIES = ("deny", "note", "warn")
FIELDS = (
    "id",
    "reason",
    "remedy",
    "severity",
    "since",
    "source",
    "title",
    "until",
    "waivable",
    "when",
)
_NEEDED = ("id", "when", "severity", "reason", "remedy", "source")
MAX_RULES = 500
_MAX_WORDS = 2000
_ID = re.compile(r"[a-z][a-z0-9_]{2,63}\Z")
_QUOTE = re.compile(r"\{([^{}\s]*)\}")
NOT_JUDGED = "guardrails_not_judged"

GPU_FACTS = (
    "all_same_model",
    "compute_capability",
    "count",
    "max_total_mib",
    "min_free_mib",
    "min_total_mib",
    "names",
)
SERVER_FACTS = ("device", "has_admin_api_key", "has_api_key", "host", "port", "restart", "unit")
_NO_CONDITION = ("gpus", "ports", "extra")  # values that nothing can be compared with as a whole


def _fields(kind: t.Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.name not in _NO_CONDITION]


KNOWN: Known = {
    "flags": None,
    "environment": None,
    "model": frozenset([*_fields(ModelFacts), "experts", "extra.*"]),
    "gpu": frozenset(GPU_FACTS),
    "host": frozenset(_fields(HostFacts)),
    "topology": frozenset(_fields(Topology)),
    "budget": frozenset(
        memory_budget({}, ModelFacts("", "unreadable"), Topology(None, None, None, False, None, None, None)).facts()
    ),
    "server": frozenset(SERVER_FACTS),
    "sglang": frozenset(["version"]),
}
"""Every fact that a condition may name."""


@dataclass(frozen=True)
class Rule:
    """One guardrail. ``since``: the first SGLang that it is about; ``until``: the first one that it is not."""

    id: str
    when: Condition
    severity: str
    reason: str
    remedy: str
    source: str
    title: str = ""
    waivable: bool = False
    since: t.Optional[str] = None
    until: t.Optional[str] = None

    @property
    def condition(self) -> Condition:
        """``when`` with the versions, which come first: for another SGLang nothing else needs to be known."""
        limits = [("version_at_least", self.since), ("version_below", self.until)]
        versions = [Compare("sglang.version", name, value) for name, value in limits if value is not None]
        return All((*versions, self.when)) if versions else self.when


def facts_tree(
    flags: t.Mapping[str, t.Any],
    *,
    model: t.Optional[ModelFacts] = None,
    topology: t.Optional[Topology] = None,
    host: t.Optional[HostFacts] = None,
    budget: t.Optional[Budget] = None,
    version: t.Optional[str] = None,
    environment: t.Optional[t.Mapping[str, t.Any]] = None,
    server: t.Optional[t.Mapping[str, t.Any]] = None,
) -> Facts:
    """All that conditions may ask about. ``flags``: canonical, as they were set. ``environment``: of the server, secret
    ones with any value; None: not known. ``server``: of `SERVER_FACTS` what is known. Secrets do not get in."""
    return Facts(
        {
            "flags": {_dest(name): _hidden(value, is_secret_name(_dest(name))) for name, value in flags.items()},
            "environment": environment
            if environment is None
            else {name: _hidden(value, is_secret_variable(name)) for name, value in environment.items()},
            "model": _model(model),
            "gpu": _gpus(topology),
            "host": _values(host),
            "topology": _values(topology),
            "budget": None if budget is None else budget.facts(),
            "server": {name: value for name, value in (server or {}).items() if name in SERVER_FACTS},
            "sglang": {"version": version},
        }
    )


def _dest(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _hidden(value: t.Any, secret: bool) -> t.Any:
    return MASK if secret and value is not None else value


def _values(facts: t.Any) -> t.Optional[dict[str, t.Any]]:
    if facts is None:
        return None
    return {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}


def _model(model: t.Optional[ModelFacts]) -> t.Optional[dict[str, t.Any]]:
    """The model; where its config.json was understood, what is missing there is known to be none."""
    values = _values(model)
    if model is None or values is None:
        return None
    read = model.source == "local" and model.architectures is not None
    if read and model.quantization is None:
        values["quantization"] = "none"
    counts = [model.extra.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts")]
    values["experts"] = next((count for count in counts if count is not None), 0 if read else None)
    return values


def _gpus(topology: t.Optional[Topology]) -> t.Optional[dict[str, t.Any]]:
    """The GPUs together. One whose figure is not known leaves the lowest, or the highest, of all not known."""
    if topology is None or not topology.gpus:
        return None
    gpus = topology.gpus

    def over(values: t.Sequence[t.Any], choose: t.Callable[[t.Sequence[t.Any]], t.Any]) -> t.Any:
        return None if any(value is None for value in values) else choose(values)

    names = [gpu.name for gpu in gpus]
    capabilities = [version_tuple(gpu.compute_capability) for gpu in gpus]
    return {
        "count": len(gpus),
        "names": over(names, lambda values: tuple(dict.fromkeys(values))),
        "all_same_model": over(names, lambda values: len(set(values)) == 1),
        "min_total_mib": over([gpu.total_mib for gpu in gpus], min),
        "max_total_mib": over([gpu.total_mib for gpu in gpus], max),
        "min_free_mib": over([gpu.free_mib for gpu in gpus], min),
        "compute_capability": over(capabilities, lambda values: ".".join(map(str, min(values)))),
    }


# Reading rules


def parse_rules(raw: t.Any, where: str = "guardrails") -> tuple[list[Rule], list[str]]:
    """Rules from plain data, and one sentence for each mistake. A rule with a mistake is not among the rules."""
    if not isinstance(raw, (list, tuple)):
        return [], [f"{where}: is {shown(raw)}; allowed is a list of rules"]
    if len(raw) > MAX_RULES:
        return [], [f"{where}: holds {len(raw)} rules; allowed are {MAX_RULES}"]
    rules: list[Rule] = []
    problems: list[str] = []
    for position, each in enumerate(raw):
        rule, wrong = _parse(each, f"{where}: {_label(each, position)}")
        problems += wrong
        if rule is not None and any(rule.id == other.id for other in rules):
            problems.append(f"{where}: rule '{rule.id}' is there twice; give one of them another id")
        elif rule is not None:
            rules.append(rule)
    return rules, problems


def _label(raw: t.Any, position: int) -> str:
    name = raw.get("id") if isinstance(raw, t.Mapping) else None
    return f"rule '{name[:64]}'" if isinstance(name, str) and name else f"rule number {position + 1}"


def _parse(raw: t.Any, where: str) -> tuple[t.Optional[Rule], list[str]]:
    if not isinstance(raw, t.Mapping):
        return None, [f"{where}: is {shown(raw)}; allowed is a mapping with {', '.join(_NEEDED)}"]
    problems = [
        f"{where}: unknown field '{named(key)}'{nearest(named(key), FIELDS)}" for key in raw if key not in FIELDS
    ]
    problems += [f"{where}: '{field}' is missing" for field in _NEEDED if raw.get(field) is None]
    given = [field for field in FIELDS if raw.get(field) is not None]
    problems += [f"{where}: {problem}" for field in given for problem in _field(field, raw[field])]
    condition: t.Optional[Condition] = None
    if raw.get("when") is not None:
        try:
            condition = Reader(KNOWN).read(raw["when"])
        except Wrong as wrong:
            problems.append(f"{where}: {wrong}")
    if problems or condition is None:
        return None, problems
    texts = {field: str(raw[field]).strip() for field in _TEXTS if raw.get(field) is not None}
    versions = {field: str(raw[field]) for field in ("since", "until") if raw.get(field) is not None}
    rule = Rule(
        id=str(raw["id"]),
        when=condition,
        severity=str(raw["severity"]),
        waivable=bool(raw.get("waivable")),
        **{**texts, **versions},
    )
    return rule, []


_TEXTS = ("title", "reason", "remedy", "source")


def _field(field: str, value: t.Any) -> t.Iterator[str]:
    if field == "id" and not (isinstance(value, str) and _ID.match(value)):
        yield f"id is {shown(value)}; allowed are 3 to 64 small letters, digits and '_', a letter first"
    if field == "severity" and value not in SEVERITIES:
        hint = nearest(value, SEVERITIES) if isinstance(value, str) else f"; allowed are {', '.join(SEVERITIES)}"
        yield f"severity is {shown(value)}{hint}"
    if field == "waivable" and not isinstance(value, bool):
        yield f"waivable is {shown(value)}; allowed are true and false"
    if field in ("since", "until") and not (isinstance(value, str) and len(value) <= 40 and version_tuple(value)):
        yield f"{field} is {shown(value)}; allowed is a version in quotes, like '0.5.15'"
    if field in _TEXTS:
        if not isinstance(value, str) or not value.strip() or len(value) > _MAX_WORDS:
            yield f"{field} is {shown(value)}; allowed is a text of up to {_MAX_WORDS} characters"
        elif field in ("reason", "remedy"):
            yield from (f"{field}: {problem}" for problem in _quote_problems(value))


def _quote_problems(text: str) -> t.Iterator[str]:
    for quote in _QUOTE.findall(text):
        path, _colon, unit = quote.partition(":")
        try:
            Reader(KNOWN).path(path, f"{{{quote[:60]}}}")
        except Wrong as wrong:
            yield str(wrong)
            continue
        if is_secret_path(path):
            yield f"{{{quote}}}: '{path}' is a secret, which no text may quote"
        elif unit and (unit not in _UNITS or _unit_of(path) is None):
            yield f"{{{quote}}}: '{unit}' is no unit for '{path}'; allowed are gb and gib behind sizes"


# Judging


def judge(rules: t.Iterable[Rule], facts: Facts, waivers: t.Optional[t.Mapping[str, str]] = None) -> list[Finding]:
    """What the rules say about these facts. ``waivers``: the written reason by the rule's id.

    A waiver of a rule that is not waivable does nothing here: the controller has refused it before.
    """
    redact = Redactor().text
    findings: list[Finding] = []
    open_questions: list[str] = []
    for rule in rules:
        answer = rule.condition.ask(facts)
        if answer.truth is False:
            continue
        waived = (waivers or {}).get(rule.id) if rule.waivable else None
        if answer.truth is None:
            missing = ", ".join(answer.missing)
            if rule.severity == "warn" and waived is None:
                open_questions.append(f"{rule.id} ({missing})")
            if rule.severity == "deny":
                findings.append(_unknown(rule, missing, waived))
            continue
        reason, remedy = (redact(filled(text, facts)) for text in (rule.reason, rule.remedy))
        severity = rule.severity
        if waived is not None:
            severity = "warn" if severity == "deny" else "note"
            reason = f"{reason} Waived: {redact(waived)}"
        findings.append(Finding(rule.id, severity, _subject(rule), reason, remedy, rule.source, rule.waivable, waived))
    if open_questions:
        text = f"Not judged, because facts are not known: {'; '.join(open_questions)}"
        findings.append(Finding(NOT_JUDGED, "note", "guardrails", text, source="guardrails"))
    return findings


def _unknown(rule: Rule, missing: str, waived: t.Optional[str]) -> Finding:
    text = f"Whether this holds is not known, because {missing} is not known: {rule.title or rule.reason}"
    # Facts are quoted as names here: half of them are missing.
    remedy = f"Make it known, or change what decides it: {', '.join(rule.when.paths())}"
    severity = "unknown"
    if waived is not None:
        severity, text = "warn", f"{text} Waived: {Redactor().text(waived)}"
    return Finding(rule.id, severity, _subject(rule), text, remedy, rule.source, rule.waivable, waived)


def _subject(rule: Rule) -> str:
    """The flags that the rule is about; its id where it is about none."""
    names = [path.partition(".")[2] for path in rule.when.paths() if path.startswith("flags.")]
    return ", ".join(name.replace("_", "-") for name in names[:3]) or rule.id


_UNITS = {"gb": (GB, "GB"), "gib": (GIB, "GiB")}
_SIZES = {"_bytes": 1, "_mib": MIB, "_gib": GIB, "_gb": GB}


def _unit_of(path: str) -> t.Optional[int]:
    return next((size for ending, size in _SIZES.items() if path.endswith(ending)), None)


def filled(text: str, facts: Facts) -> str:
    """A rule's text with the facts that it quotes: ``{flags.tp_size}``, ``{host.mem_available_mib:gb}``."""

    def quoted(match: t.Match[str]) -> str:
        path, _colon, unit = match.group(1).partition(":")
        if is_secret_path(path):
            return MASK
        fact = facts.get(path)
        if not fact.known:
            return f"({path} not known)"
        if fact.value is None:
            return "not set"
        size = _unit_of(path)
        if unit in _UNITS and size is not None and isinstance(fact.value, (int, float)):
            divisor, name = _UNITS[unit]
            return f"{fact.value * size / divisor:,.1f} {name}"
        return _plain(fact.value)

    return _QUOTE.sub(quoted, text)


def _plain(value: t.Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:,.2f}".rstrip("0").rstrip(".") if abs(value) < 10**15 else f"{value:.3e}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**20 else shown(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(each) for each in value[:8] if not isinstance(each, (list, tuple, dict)))
    return str(value)[:200] if isinstance(value, str) else shown(value)
