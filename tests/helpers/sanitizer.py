"""Where compute-sanitizer is."""

import glob
import os
import shutil

import pytest

_FOLDERS = ("/usr/local/cuda*/bin", "/usr/local/cuda*/compute-sanitizer", "/opt/nvidia/*/*")


def sanitizer(check: str) -> list[str]:
    """Returns the start of the command that runs a program under a check of compute-sanitizer."""
    folders = [folder for pattern in _FOLDERS for folder in glob.glob(pattern)]
    search = os.pathsep.join([os.environ.get("PATH", ""), *folders])
    tool = shutil.which("compute-sanitizer", path=search)
    if tool is None:
        pytest.skip("compute-sanitizer is neither on the PATH nor under /usr/local or /opt/nvidia")
    # JAX asks the driver for entry points it may lack: errors of API calls say nothing here.
    quiet = ["--report-api-errors", "no", "--show-backtrace", "no"]
    return [tool, "--error-exitcode", "9", *quiet, "--tool", check]
