# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import json

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.redact import (
    MASK,
    Redactor,
    is_secret_flag,
    is_secret_variable,
)

KEY = "sk-Very/Secret+1"


@pytest.mark.parametrize(
    "text",
    [
        f"server_args=ServerArgs(model_path='m', api_key='{KEY}', admin_api_key=None, port=1)",
        f"server_args={{'api_key': '{KEY}', 'port': 1}}",
        f'{{"api_key": "{KEY}", "port": 1}}',
        json.dumps(json.dumps({"api_key": KEY, "port": 1})),
        f"launch_command: --port 1 --api-key {KEY} --tp-size 2",
        f"--api-key={KEY} --port 1",
        f"--admin-api {KEY} --port 1",
        f"['--port', '1', '--api-key', '{KEY}', '--host', 'h']",
        f'["--api_key", "{KEY}", "--port", "1"]',
        f"ssl_keyfile_password='{KEY}' port=1",
        f"Authorization: Bearer {KEY}\r\nport 1",
        f"HF_TOKEN={KEY} PORT=1",
        f"api_key: {KEY}\nport: 1",
        f'admin_api_key: "{KEY}" port',
    ],
)
def test_text_loses_the_secret_by_its_name_and_keeps_the_rest(text: str) -> None:
    redacted = Redactor().text(text)
    assert KEY not in redacted
    assert "Secret" not in redacted
    assert MASK in redacted
    assert "port" in redacted.lower()


def test_unset_keys_stay_visible() -> None:
    text = "ServerArgs(api_key=None, admin_api_key='', ssl_keyfile='/etc/k.pem')"
    assert Redactor().text(text) == text


def test_plain_text_is_left_alone() -> None:
    text = (
        "max_total_num_tokens=231120, chunked_prefill_size=8192, available_gpu_mem=0.82 GB --tokenizer-path t "
        "--ssl-keyfile /k tokenizer_path='t' TOKENIZERS_PARALLELISM=false"
    )
    assert Redactor().text(text) == text


@pytest.mark.parametrize(
    "where",
    ["x{}y", "'{}'", '{{"a": "{}"}}', "url?k={}&b=1", "[{}, {}]"],
)
def test_a_known_secret_goes_wherever_it_stands(where: str) -> None:
    assert KEY not in Redactor([KEY]).text(where.format(KEY, KEY))


def test_a_known_secret_with_quotes_goes_in_its_escaped_forms() -> None:
    secret = "a\"b'c\\d"
    redactor = Redactor([secret])
    for text in (json.dumps({"x": secret}), repr({"x": secret}), secret):
        redacted = redactor.text(text)
        assert "b'c" not in redacted
        assert "c\\\\d" not in redacted


def test_a_short_secret_does_not_tear_words_apart() -> None:
    assert Redactor(["ab"]).text("about ab tab") == f"about {MASK} tab"


def test_argv() -> None:
    argv = [
        "python3",
        "-m",
        "sglang.launch_server",
        "--api-key",
        KEY,
        "--admin=" + KEY,
        "--port",
        "1",
        "--api-key",
        "--tp",
        "2",
    ]
    assert Redactor().argv(argv) == [
        "python3",
        "-m",
        "sglang.launch_server",
        "--api-key",
        MASK,
        "--admin=" + MASK,
        "--port",
        "1",
        "--api-key",
        "--tp",
        "2",
    ]


def test_data() -> None:
    data = {
        "api_key": KEY,
        "admin_api_key": None,
        "launch_command": f"--port 1 --api-key {KEY}",
        "internal_states": [{"api_key": KEY, "port": 1}],
        "argv": ["--api-key", KEY],
        "HF_TOKEN": KEY,
        "max_total_tokens": 5,
    }
    redacted = Redactor().data(data)
    assert KEY not in json.dumps(redacted)
    assert redacted["admin_api_key"] is None
    assert redacted["max_total_tokens"] == 5
    assert redacted["internal_states"][0]["port"] == 1


def test_environment() -> None:
    environment = {"NCCL_DEBUG": "INFO", "HF_TOKEN": KEY, "MY_APIKEY": "x", "DB_PASSWORD": "", "X": f"--api-key {KEY}"}
    redacted = Redactor().environment(environment)
    assert redacted == {
        "NCCL_DEBUG": "INFO",
        "HF_TOKEN": MASK,
        "MY_APIKEY": MASK,
        "DB_PASSWORD": "",
        "X": f"--api-key {MASK}",
    }


@pytest.mark.parametrize(
    "name", ["--api-key", "api_key", "--api", "--admin", "ADMIN_API_KEY", "ssl-keyfile-password", "--ssl-keyfile-p"]
)
def test_secret_flags(name: str) -> None:
    assert is_secret_flag(name)


@pytest.mark.parametrize(
    "name", ["--ssl-keyfile", "ssl-certfile", "--port", "--a", "api-keys", "--tokenizer-path", "ssl"]
)
def test_flags_that_are_no_secret(name: str) -> None:
    assert not is_secret_flag(name)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD_FILE", "APIKEY", "KEY_1"]
)
def test_secret_variables(name: str) -> None:
    assert is_secret_variable(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "SGLANG_MAX_TOKENS", "PATH", "NCCL_DEBUG", "KEYMAP"])
def test_variables_that_are_no_secret(name: str) -> None:
    assert not is_secret_variable(name)


@pytest.mark.parametrize("name", ["api_k", "admin-api", "ssl_keyfile_pass"])
def test_abbreviated_secrets_in_data_are_masked(name: str) -> None:
    assert Redactor().data({"flags": {name: "sk-1", "ssl_keyfile": "/k"}}) == {
        "flags": {name: MASK, "ssl_keyfile": "/k"},
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://bob:PW1@proxy:3128/x?a=b@c", f"http://{MASK}@proxy:3128/x?a=b@c"),
        ("HTTPS_PROXY=http://PW1@h:1 http:\\/\\/bob:PW1@h", f"HTTPS_PROXY=http://{MASK}@h:1 http:\\/\\/{MASK}@h"),
        ('{"access_key":"PW1","token":"PW1 x"}', f'{{"access_key":"{MASK}","token":"{MASK}"}}'),
        ("{'credentials': 'PW1', 'my_key': 'PW1'}", f"{{'credentials': '{MASK}', 'my_key': '{MASK}'}}"),
        ('{"secretAccessKey":"PW1"}', f'{{"secretAccessKey":"{MASK}"}}'),
        ('{"a": "{\\"token\\": \\"PW1 x\\", \\"b\\": 1}"}', f'{{"a": "{{\\"token\\": \\"{MASK}\\", \\"b\\": 1}}"}}'),
        ("--api-key sk-a,PW1;PW1 --tp 2", f"--api-key {MASK} --tp 2"),
        ("--hf-token PW1 --api-key \\\n  PW1 --tp 2", f"--hf-token {MASK} --api-key \\\n  {MASK} --tp 2"),
        ('"--api-key" "a PW1" \'--api-key=a PW1\'', f"\"--api-key\" \"{MASK}\" '--api-key={MASK}'"),
        ("--say 'x --api-key PW1'", f"--say 'x --api-key {MASK}'"),
        ("HF_TOKEN=abc;PW1 X=1", f"HF_TOKEN={MASK} X=1"),
        ('Environment="MYSQL_PWD=a PW1" "X=1"', f'Environment="MYSQL_PWD={MASK}" "X=1"'),
        ('A="HF_TOKEN=PW1"', f'A="HF_TOKEN={MASK}"'),
        ('api_key="PW1 that is cut off', f'api_key="{MASK}"'),
        ("curl -H X:hf_AbCdEfGhIjKlMnOpQr,", f"curl -H X:{MASK},"),
        ("with sk-1234567890abcdef.", f"with {MASK}."),
        ("AKIAIOSFODNN7EXAMPLE", MASK),
    ],
)
def test_secrets_within_values(text: str, shown: str) -> None:
    assert Redactor().text(text) == shown
    assert Redactor().text(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "Prefill batch, #new-token: 128, #cached-token: 0, token usage: 0.00, gen throughput (token/s): 100.1",
        '{"kt_max_deferred_experts_per_token": "a", "bucket-time-to-first-token": ["b"], "pad_token": "PAD"}',
        '{"im_token": "<|im_end|>", "max_key": 3, "token": "", "key": "flag:tp"}',
        "sglang.srt.utils.hf_transformers_utils sk-learn-contrib-packages task-sk-1234567890abcdef PWD=/root",
        "http://h:80/a@b user@host:/x api_key=None,port=1",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    assert Redactor().text(text) == text


@pytest.mark.parametrize("unit", ["secret_", 'password="', 'password=\\\\\\"', "api_key='\"\"X=\\\\\"", '"a_key": ', "://a"])
def test_a_text_made_to_be_slow_comes_to_an_end(unit: str) -> None:
    """Not timed: with a pattern that begins again at each part, 16000 of the first need minutes."""
    assert Redactor().text(unit * 16_000)


def test_data_below_a_secret_name_and_keys_of_any_kind() -> None:
    data = {
        "credentials": {"user": "u", "more": ["x", {"id": 5}]},
        "routing_key": "x",
        "im_token": "<s>",
        "bucket_time_to_first_token": ["a"],
        "argv": ["--hf-token", "x", "DB_PASSWORD=a b", "--tp", "2"],
        "heads_per_key": 3,
    }
    assert Redactor().data(data) == {
        "credentials": {"user": MASK, "more": [MASK, {"id": MASK}]},
        "routing_key": MASK,
        "im_token": "<s>",
        "bucket_time_to_first_token": ["a"],
        "argv": ["--hf-token", MASK, f"DB_PASSWORD={MASK}", "--tp", "2"],
        "heads_per_key": 3,
    }


def test_data_too_deep_has_an_end() -> None:
    deep: object = KEY
    for _level in range(50_000):
        deep = [deep]
    assert MASK in json.dumps(Redactor().data({"x": deep}))
