"""Whole or not there; and what a disk, a folder or a permission refuses is one sentence."""

import errno
import os
import re
import subprocess
import sys

import pytest
from safetensors import SafetensorError

from specter_lab import paths
from specter_lab.cli import main
from specter_lab.experiments import compare
from specter_lab.files import disk_problem, whole_file, whole_folder, write_whole


def test_a_file_is_the_old_one_until_the_new_one_is_whole(tmp_path):
    file = tmp_path / "deep" / "f"
    write_whole(file, b"old")
    with pytest.raises(KeyboardInterrupt), whole_file(file) as half:
        half.write_bytes(b"ne")
        raise KeyboardInterrupt
    assert file.read_bytes() == b"old" and os.listdir(file.parent) == ["f"]


def test_a_folder_replaces_a_damaged_one(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "damaged").touch()
    with whole_folder(tmp_path / "folder") as half:
        (half / "whole").touch()
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["whole"]


@pytest.mark.parametrize(
    "error, sentence",
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full: free some space"),
        (OSError(errno.EDQUOT, "x", "rows.json"), r"the disk is full \(writing rows.json\)"),
        (OSError(errno.ENOSPC, "x", "from.json", None, "to.json"), r"the disk is full \(writing to.json\)"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "the disk is full: .* TMPDIR"),
        (OSError(errno.EROFS, "x", "out"), "out: Read-only file system: .* SPECTER_LAB_OUT .* you may write to"),
        (PermissionError(errno.EACCES, "x", "out"), "out: Permission denied: give yourself access"),
        (NotADirectoryError(errno.ENOTDIR, "x", "out"), "out: Not a directory: rename what stands there"),
        (FileNotFoundError(errno.ENOENT, "x", "row"), "row: No such file or directory: if something removed it"),
        (OSError(errno.EIO, "x", "row"), "row: Input/output error: put that right"),
    ],
)
def test_what_a_disk_refuses_is_one_sentence(error, sentence, monkeypatch, capsys):
    def fail(readme=None):
        raise error

    monkeypatch.setattr(compare, "update_readme", fail)
    assert main(["table", "--readme"]) == 2
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 1
    assert re.match(f"specter-lab: {sentence}", stderr), stderr


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("no errno"), OSError(errno.EBADF, "no file")])
def test_other_errors_are_not_put_down_to_the_disk(error):
    assert disk_problem(error) is None


def test_the_output_folder_is_absolute_whatever_was_given(tmp_path):
    """Children run elsewhere; an empty variable is none; a shell does not always expand the tilde."""
    code = "from specter_lab import paths; print(paths.OUT)"
    for given, expected in {
        "": paths.ROOT / "artifacts",
        "o ü": tmp_path / "o ü",
        "~/o": tmp_path / "home" / "o",
    }.items():
        environment = os.environ | {
            "SPECTER_LAB_OUT": given,
            "HOME": str(tmp_path / "home"),
            "PYTHONPATH": str(paths.ROOT),
        }
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == str(expected), done.stderr


def test_a_closed_pipe_is_no_stack_trace():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "specter_lab.cli", "list"]
    done = subprocess.run(command, cwd=paths.ROOT, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_full_disk_behind_the_output_is_one_sentence():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "specter_lab.cli", "list"], cwd=paths.ROOT, stdout=full,
                              stderr=subprocess.PIPE, text=True)  # fmt: skip
    assert done.returncode != 0
    assert "the disk is full" in done.stderr and "Traceback" not in done.stderr


def test_a_readme_is_not_lost_to_a_full_disk(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"{compare.BEGIN}\n{compare.END}\n")

    def fill(path, content):
        path.touch()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("pathlib.Path.write_bytes", fill)
    with pytest.raises(OSError):
        compare.update_readme(readme)
    assert readme.read_text() == f"{compare.BEGIN}\n{compare.END}\n"
