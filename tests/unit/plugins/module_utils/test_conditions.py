# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conditions have three answers, learning never turns one around, and no data breaks their reader."""

from __future__ import annotations

import itertools
import typing as t

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.sglang.plugins.module_utils.decide import conditions
from ansible_collections.cleanslate.sglang.plugins.module_utils.decide.conditions import Answer, Facts, Reader, Wrong

KNOWN: conditions.Known = {
    "flags": None,
    "environment": None,
    "model": frozenset(["a", "b", "c", "names", "extra.*"]),
    "sglang": frozenset(["version"]),
}
TRUTHS = (True, False, None)


def ask(raw: t.Any, **tree: t.Any) -> Answer:
    return Reader(KNOWN).read(raw).ask(Facts(tree))


def part(name: str) -> dict[str, t.Any]:
    return {"fact": f"model.{name}", "is": True}


@pytest.mark.parametrize("values", list(itertools.product(TRUTHS, repeat=3)))
def test_kleene(values: tuple[t.Optional[bool], ...]) -> None:
    facts = dict(zip("abc", values))
    parts = [part(name) for name in "abc"]
    unknown = tuple(f"model.{name}" for name in "abc" if facts[name] is None)
    every = False if False in values else None if None in values else True
    some = True if True in values else None if None in values else False
    assert ask({"all": parts}, model=facts) == Answer(every, unknown if every is None else ())
    assert ask({"any": parts}, model=facts) == Answer(some, unknown if some is None else ())
    first = values[0]
    assert ask({"not": part("a")}, model=facts).truth == (None if first is None else not first)


@pytest.mark.parametrize(
    ("operator", "operand", "value", "truth"),
    [
        ("is", "x", "x", True),
        ("is", "x", "X", False),
        ("is", 5, "5", True),
        ("is", 5, 5.0, True),
        ("is", "0.93", 0.93, True),
        ("is", True, True, True),
        ("is", True, "true", True),
        ("is", True, 1, False),
        ("is", False, False, True),
        ("is", 1, True, False),
        ("is", "x", ["a", "x"], True),
        ("is", "x", [], False),
        ("not", "x", "y", True),
        ("not", "x", ["a", "x"], False),
        ("in", ["x", 5], "5", True),
        ("in", ["x"], "y", False),
        ("in", ["x"], ["y", "x"], True),
        ("not_in", ["x"], "y", True),
        ("not_in", ["x"], ["y", "x"], False),
        ("at_least", 5, 5, True),
        ("at_least", 5, "4.9", False),
        ("at_most", 5, 5, True),
        ("at_most", 5, 5.1, False),
        ("above", 5, 5, False),
        ("above", 5, "1e3", True),
        ("below", 5, 5, False),
        ("below", 5, -1, True),
        ("at_least", 5, "many", None),
        ("at_least", 5, True, None),
        ("at_least", 5, {"a": 1}, None),
        ("at_least", 5, 10**400, None),
        ("at_least", 5, [1, 6], True),
        ("at_least", 5, [1, "?"], None),
        ("matches", "*Kimi-K2*", "/models/kimi-k2.5", True),
        ("matches", ["a*", "*b"], "xb", True),
        ("matches", "a?c", "abc", True),
        ("matches", "a?c", "ac", False),
        ("matches", "kimi", "kimi-k2", False),
        ("matches", "", "x", False),
        ("matches", "**", "x", True),
        ("version_at_least", "0.5.15", "0.5.15", True),
        ("version_at_least", "0.5.15", "0.5.15.post1", True),
        ("version_at_least", "0.5.15", "0.5.9", False),
        ("version_at_least", "0.5.15", "0.5.23+cu130", True),
        ("version_below", "13", "12.0", True),
        ("version_below", "12.0", "12", False),
        ("version_below", "10.0", "9.0", True),
        ("version_below", "10.0", "unknown", None),
        ("version_below", "10.0", 9.0, None),
        ("set", True, 0, True),
        ("unset", True, 0, False),
    ],
)
def test_operators(operator: str, operand: t.Any, value: t.Any, truth: t.Optional[bool]) -> None:
    for root in ("model", "flags"):
        answer = ask({"fact": f"{root}.a", operator: operand}, **{root: {"a": value}})
        assert answer == Answer(truth, () if truth is not None else (f"{root}.a",))


@pytest.mark.parametrize("operator", conditions.OPERATORS)
def test_every_operator_with_a_fact_that_is_not_there(operator: str) -> None:
    """Not set is an answer, not known is none; only the opposites are true of what is not set."""
    operands = {"matches": ["*"], "in": ["x"], "not_in": ["x"], "is": "x", "not": "x", "set": True, "unset": True}
    operand = operands.get(operator, "1.0" if operator.startswith("version") else 1)
    unknown = Answer(None, ("model.a",))
    assert ask({"fact": "model.a", operator: operand}, model={"a": None}) == unknown
    assert ask({"fact": "model.a", operator: operand}, model={}) == unknown
    assert ask({"fact": "model.a", operator: operand}, model=None) == unknown
    assert ask({"fact": "model.a", operator: operand}) == unknown
    assert ask({"fact": "flags.a", operator: operand}, flags=None) == Answer(None, ("flags.a",))
    for flags in ({}, {"a": None}):
        answer = ask({"fact": "flags.a", operator: operand}, flags=flags)
        assert answer == Answer(operator in ("unset", "not", "not_in"))


def test_a_fact_can_be_the_limit() -> None:
    raw = {"fact": "model.a", "below": {"fact": "model.b", "times": 0.5}}
    assert ask(raw, model={"a": 4, "b": 10}).truth is True
    assert ask(raw, model={"a": 5, "b": 10}).truth is False
    assert ask(raw, model={"a": 4}) == Answer(None, ("model.b",))
    assert ask(raw, model={"b": 4}) == Answer(None, ("model.a",))
    assert Reader(KNOWN).read(raw).paths() == ("model.a", "model.b")


def test_several_operators_must_all_hold() -> None:
    raw = {"fact": "model.a", "at_least": 2, "below": 5}
    assert [ask(raw, model={"a": value}).truth for value in (1, 2, 4, 5, None)] == [False, True, True, False, None]


def test_patterns_end_in_time() -> None:
    """The worst case of a backtracking matcher is over in a moment."""
    assert not conditions.fits("a" * 1000, "*a" * 100 + "b")


@given(st.text("ab", max_size=12), st.text("ab*?", max_size=8))
def test_patterns_are_those_of_a_shell(text: str, pattern: str) -> None:
    import fnmatch

    assert conditions.fits(text, pattern) == fnmatch.fnmatchcase(text, pattern)


# Learning a fact


_VALUES: st.SearchStrategy[t.Any] = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from(["x", "1", "0.5.15"]), st.lists(st.integers(0, 3))
)
_PATHS = st.sampled_from(["model.a", "model.b", "model.c", "flags.a", "flags.b"])


def _leaf(path: str, operator: str, number: int) -> dict[str, t.Any]:
    operands: dict[str, t.Any] = {"set": True, "unset": True, "matches": ["*x*", "1"]}
    operands.update({"version_at_least": "0.5", "version_below": "0.6", "in": [number, "x"], "not_in": [number]})
    return {"fact": path, operator: operands.get(operator, number)}


_LEAVES = st.builds(_leaf, _PATHS, st.sampled_from(conditions.OPERATORS), st.integers(-2, 2)) | st.builds(
    lambda path, other: {"fact": path, "above": {"fact": other, "times": 2}}, _PATHS, _PATHS
)
_CONDITIONS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda parts: {"all": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"any": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda one: {"not": one}, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(_CONDITIONS, st.fixed_dictionaries({name: _VALUES for name in "abc"}), st.sets(st.sampled_from("abc")))
def test_learning_never_turns_an_answer_around(raw: t.Any, model: dict[str, t.Any], hidden: set[str]) -> None:
    """So a deny never becomes silence by knowing more, unless its condition is then false."""
    flags = {"a": 1}
    less = ask(raw, model={name: None if name in hidden else value for name, value in model.items()}, flags=flags)
    more = ask(raw, model=model, flags=flags)
    if less.truth is not None:
        assert more.truth is less.truth
    assert (less.truth is None) == bool(less.missing)
    assert set(less.missing) <= set(Reader(KNOWN).read(raw).paths())


@settings(max_examples=200, deadline=None)
@given(_CONDITIONS, st.fixed_dictionaries({name: _VALUES for name in "abc"}))
def test_not_is_the_opposite(raw: t.Any, model: dict[str, t.Any]) -> None:
    plain, opposite = (ask(each, model=model, flags={}) for each in (raw, {"not": raw}))
    assert opposite.truth == (None if plain.truth is None else not plain.truth)
    assert opposite.missing == plain.missing


# Mistakes


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "when: is null; allowed are mappings"),
        ([], "when: is a list"),
        ({}, "when: is a mapping"),
        ("flags.tp_size > 2", "when: is 'flags.tp_size > 2'"),
        ({"alll": []}, "when: has alll; allowed is one of 'all'"),
        ({"all": []}, "when.all: is a list; allowed is a list of at least one"),
        ({"all": {"fact": "model.a", "is": 1}}, "when.all: is a mapping; allowed is a list"),
        ({"any": [{"fact": "model.a", "is": 1}, 5]}, "when.any[1]: is 5"),
        ({"at_least": 5}, "'at_least' has no fact beside it"),
        ({"fact": "model.a"}, "fact 'model.a' has no operator"),
        ({"fact": "model.a", "atleast": 1}, "unknown operator 'atleast'; did you mean 'at_least'?"),
        ({"fact": "model.A b", "is": 1}, "is no name of a fact"),
        ({"fact": ["x"], "is": 1}, "fact a list is no name"),
        ({"fact": "modell.a", "is": 1}, "unknown fact 'modell.a'; did you mean 'model'?"),
        ({"fact": "model.nmes", "is": 1}, "unknown fact 'model.nmes'; did you mean 'model.names'?"),
        ({"fact": "flags.a.b", "is": 1}, "allowed is one name behind 'flags.'"),
        ({"fact": "model.a", "at_least": "5"}, "when.at_least: is '5'; allowed is a number"),
        ({"fact": "model.a", "at_least": True}, "when.at_least: is true"),
        ({"fact": "model.a", "at_least": float("nan")}, "when.at_least: is nan"),
        ({"fact": "model.a", "at_least": {"fact": "model.b", "plus": 1}}, "allowed are 'fact' and 'times'"),
        ({"fact": "model.a", "at_least": {"fact": "model.b", "times": "2"}}, "times: is '2'"),
        ({"fact": "model.a", "at_least": {"fact": "model.zz"}}, "unknown fact 'model.zz'"),
        ({"fact": "model.a", "is": None}, "when.is: is null; allowed is a text"),
        ({"fact": "model.a", "is": [1]}, "when.is: is a list"),
        ({"fact": "model.a", "in": "x"}, "when.in: is 'x'; allowed is a list"),
        ({"fact": "model.a", "in": []}, "when.in: is a list; allowed is a list of 1"),
        ({"fact": "model.a", "in": [["x"]]}, "when.in[0]: is a list"),
        ({"fact": "model.a", "matches": [5]}, "has a value that is no text"),
        ({"fact": "model.a", "set": False}, "when.set: is false; allowed is only true"),
        ({"fact": "sglang.version", "version_at_least": 0.5}, "is 0.5; allowed is a version in quotes"),
        ({"fact": "sglang.version", "version_below": "new"}, "is 'new'; allowed is a version in quotes"),
        ({"fact": "flags.api_key", "is": "x"}, "is a secret; allowed are only 'set' and 'unset'"),
        ({"fact": "environment.HF_TOKEN", "matches": "x*"}, "is a secret"),
        ({"fact": "model.a", "is": 10**5000}, "when.is: is a number out of all bounds"),
        ({10**5000: 1}, "has a number out of all bounds"),
        ({("a", 1): 1}, "has a list"),
        ({"fact": "model.a", "is": "x" * 5000}, "allowed is a text of up to"),
    ],
)
def test_each_mistake_is_a_sentence(raw: t.Any, words: str) -> None:
    with pytest.raises(Wrong) as caught:
        Reader(KNOWN).read(raw)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_the_state_of_a_secret_may_be_asked() -> None:
    assert ask({"fact": "environment.HF_TOKEN", "set": True}, environment={"HF_TOKEN": "x"}).truth is True
    assert ask({"fact": "flags.ssl_keyfile", "is": "/k"}, flags={"ssl_keyfile": "/k"}).truth is True


def test_data_without_end() -> None:
    loop: dict[str, t.Any] = {}
    loop["not"] = loop
    wide: list[t.Any] = [{"fact": "model.a", "in": ["x"] * 200}] * 200
    ring: list[t.Any] = []
    ring.append({"all": ring})
    # As an alias of YAML makes it: ten levels of ten references each.
    laughs: t.Any = {"fact": "model.a", "is": 1}
    for _level in range(10):
        laughs = {"any": [laughs] * 10}
    for raw in (loop, {"all": wide}, {"any": ring}, laughs):
        with pytest.raises(Wrong, match="write several rules"):
            Reader(KNOWN).read(raw)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.sampled_from(["all", "any", "not", "fact", "is", "at_least", "in", "set", "matches", "times"])
            | st.integers()
            | st.text(max_size=5),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(_JUNK)
def test_junk_is_read_or_refused(raw: t.Any) -> None:
    try:
        condition = Reader(KNOWN).read(raw)
    except Wrong:
        return
    condition.ask(Facts({"model": {"a": 1}, "flags": {}}))


# --- mistakes are named by their place, and bounds are where they are said to be ---

FACT = {"fact": "model.a", "is": 1}


def wrong(raw: t.Any) -> str:
    with pytest.raises(Wrong) as caught:
        Reader(KNOWN).read(raw)
    return str(caught.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (5, "when: is 5; "),
        ({"all": 5}, "when.all: is 5; "),
        ({"all": [FACT, {"any": [FACT, {}]}]}, "when.all[1].any[1]: is a mapping; "),
        ({"not": {"not": "x"}}, "when.not.not: is 'x'; "),
        ({"all": [{"at_least": 5}]}, "when.all[0]: 'at_least' has no fact beside it; "),
        ({"not": FACT, "any": [FACT]}, "when: has not, any; "),
        ({"all": [{"both": 1, "not": 2}]}, "when.all[0]: has both, not; "),
        ({"all": [{"fact": "model.a"}]}, "when.all[0]: fact 'model.a' has no operator; "),
        ({"not": {"fact": "model.a", "isnt": 1}}, "when.not: unknown operator 'isnt'"),
        ({"not": {"fact": "flags.api_key", "is": "x"}}, "when.not: 'flags.api_key' is a secret; "),
        ({"not": {"fact": 5, "is": 1}}, "when.not: fact 5 is no name of a fact; "),
        ({"not": {"fact": "modl.a", "is": 1}}, "when.not: unknown fact 'modl.a'; did you mean 'model'?"),
        ({"not": {"fact": "model.z", "is": 1}}, "when.not: unknown fact 'model.z'"),
        ({"not": {"fact": "flags.a.b", "is": 1}}, "when.not: unknown fact 'flags.a.b'; allowed is one name"),
        ({"not": {"fact": "model.a", "set": False}}, "when.not.set: is false; "),
        ({"not": {"fact": "model.a", "version_below": 5}}, "when.not.version_below: is 5; "),
        ({"not": {"fact": "model.a", "matches": ["a", 5]}}, "when.not.matches: has a value that is no text; "),
        ({"not": {"fact": "model.a", "in": ["a", {}]}}, "when.not.in[1]: is a mapping; "),
        ({"not": {"fact": "model.a", "above": {"fact": "model.b", "and": 1}}}, "when.not.above: has other keys; "),
        ({"not": {"fact": "model.a", "above": {"fact": "model.z"}}}, "when.not.above: unknown fact 'model.z'"),
        ({"not": {"fact": "model.a", "above": {"fact": "model.b", "times": "2"}}}, "when.not.above.times: is '2'; "),
    ],
)
def test_a_mistake_is_named_by_its_place(raw: t.Any, message: str) -> None:
    assert wrong(raw).startswith(message)


@pytest.mark.parametrize("group", ["not", "all"])
def test_as_many_levels_as_are_allowed(group: str) -> None:
    def nested(depth: int) -> t.Any:
        raw: t.Any = FACT
        for _level in range(depth):
            raw = {group: raw if group == "not" else [raw]}
        return raw

    assert Reader(KNOWN).read(nested(conditions.MAX_DEPTH))
    assert "levels" in wrong(nested(conditions.MAX_DEPTH + 1))


def test_as_many_parts_as_are_allowed() -> None:
    most = conditions.MAX_PARTS - 1  # the group is one
    assert Reader(KNOWN).read({"all": [FACT] * most})
    assert wrong({"all": [FACT] * (most + 1)}).startswith(f"when.all[{most}]: more than")
    assert Reader(KNOWN).read({"fact": "model.a", "in": ["x"] * conditions.MAX_PARTS})
    assert "1 to 300 values" in wrong({"fact": "model.a", "in": ["x"] * (conditions.MAX_PARTS + 1)})


def test_as_long_texts_as_are_allowed() -> None:
    assert Reader(KNOWN).read({"fact": "model.a", "is": "x" * conditions.MAX_TEXT})
    assert "a text of up to 200" in wrong({"fact": "model.a", "is": "x" * (conditions.MAX_TEXT + 1)})
    version = "1." + "0" * 38
    assert Reader(KNOWN).read({"fact": "sglang.version", "version_below": version})
    assert "a version in quotes" in wrong({"fact": "sglang.version", "version_below": version + "0"})


def test_a_number_of_forty_characters_is_one_and_a_longer_is_not() -> None:
    at_least = {"fact": "model.a", "at_least": 1}
    assert ask(at_least, model={"a": "0" * 39 + "1"}).truth is True
    assert ask(at_least, model={"a": "0" * 40 + "1"}).truth is None


def test_a_secret_may_be_asked_whether_it_is_set_or_not() -> None:
    both = {"fact": "flags.api_key", "set": True, "unset": True}
    assert ask(both, flags={"api_key": "x"}).truth is False
    for operator, value in (("set", "x"), ("unset", None)):
        assert ask({"fact": "flags.api_key", operator: True}, flags={"api_key": value}).truth is True


def test_another_fact_is_taken_once_where_nothing_is_said() -> None:
    raw = {"fact": "model.a", "at_least": {"fact": "model.b"}}
    assert ask(raw, model={"a": 5, "b": 5}).truth is True
    assert ask(raw, model={"a": 5, "b": 6}).truth is False
    assert ask({"fact": "model.a", "at_least": {"fact": "model.b", "times": 2}}, model={"a": 9, "b": 5}).truth is False
    assert ask(raw, model={"a": 5}) == Answer(None, ("model.b",))


def test_not_says_what_is_missing_too() -> None:
    assert ask({"not": FACT}, model={}) == Answer(None, ("model.a",))


def test_the_facts_of_a_condition_each_once_and_in_order() -> None:
    raw = {"any": [{"fact": "model.b", "is": 1}, {"all": [FACT, {"not": {"fact": "model.b", "is": 2}}]}]}
    assert Reader(KNOWN).read(raw).paths() == ("model.b", "model.a")
    assert Reader(KNOWN).read({"all": [FACT, FACT]}).paths() == ("model.a",)


def test_facts_below_facts() -> None:
    assert ask({"fact": "model.extra.x", "is": 1}, model={"extra": {"x": 1}}).truth is True
    assert ask({"fact": "model.extra.x.y", "is": 1}, model={"extra": {"x": {"y": 1}}}).truth is True
    assert ask({"fact": "model.extra.x.y", "is": 1}, model={"extra": {"x": "y"}}).truth is None
    assert "unknown fact" in wrong({"fact": "model.extras", "is": 1})


def test_a_word_unlike_all_names_those_that_are_allowed() -> None:
    assert conditions.nearest("zzz", ["b", "a"]) == "; allowed are a, b"
    assert conditions.nearest("aab", ["aaa", "bbb"]) == "; did you mean 'aaa'?"


def test_a_wrong_value_is_shown_short() -> None:
    assert conditions.shown("x" * 58) == repr("x" * 58)
    assert conditions.shown("x" * 59) == "'" + "x" * 56 + "..."
    assert conditions.shown(10**20 - 1) == "99999999999999999999"
    assert conditions.shown(10**20) == "a number out of all bounds"
    assert conditions.named("x" * 70) == "x" * 60
