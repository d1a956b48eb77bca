# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang import options
from ansible_collections.cleanslate.sglang.plugins.module_utils.sglang.files import open_regular


def test_a_regular_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    with os.fdopen(open_regular(str(tmp_path / "file")), "rb") as stream:
        assert stream.read() == b"text"


def test_a_fifo_with_a_writer_is_not_even_opened(tmp_path: Path) -> None:
    """Whoever opens a FIFO for reading wakes the process that waits to write into it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(OSError, match="is no regular file"):
        open_regular(str(fifo))
    with pytest.raises(OSError):  # ENXIO: there is no reader
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("path", ["/dev/null", "/"])
def test_devices_and_folders_are_refused(path: str) -> None:
    with pytest.raises(OSError, match="is no regular file"):
        open_regular(path)


def test_a_link_is_followed_only_where_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError):
        open_regular(str(tmp_path / "link"))
    os.close(open_regular(str(tmp_path / "link"), follow=True))


def test_an_sglang_whose_source_is_a_fifo_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "srt").mkdir()
    os.mkfifo(tmp_path / "srt" / "server_args.py")
    assert options.read_options(str(tmp_path)) is None
