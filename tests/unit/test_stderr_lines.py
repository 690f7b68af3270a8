"""Lines that C++ writes to standard error, left out by what they say."""

import os
import subprocess

import pytest

from lockstep.processes.stderr_lines import without_lines


def write(text):
    os.write(2, text)


def test_lines_with_the_words_are_left_out_and_all_others_stay(capfd):
    write(b"the name before\n")
    with without_lines(b"the name"):
        write(b"[W] the name is unknown\nanother warning\nW: the na")
        write(b"me, in two writes\n")
        subprocess.run(["sh", "-c", "echo of a child >&2"], check=True)
        write(b"no end of line")
    write(b"\nthe name after\n")
    kept = ["the name before", "another warning", "of a child", "no end of line", "the name after"]
    assert capfd.readouterr().err.splitlines() == kept


def test_an_error_inside_leaves_standard_error_as_it_was(capfd):
    with pytest.raises(KeyError), without_lines(b"the name"):
        raise KeyError
    write(b"the name after\n")
    assert capfd.readouterr().err == "the name after\n"


def test_a_process_without_standard_error_goes_on():
    kept = os.dup(2)
    os.close(2)
    try:
        with without_lines(b"the name"):
            pass
    finally:
        os.dup2(kept, 2)
        os.close(kept)
