"""What `python -m jax_mla` says of the machine, and its exit status."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jax_mla import __main__ as report
from jax_mla.runtime import device


def _pci_device(root: Path, vendor: str, kind: str) -> None:
    folder = root / "sys/bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


@pytest.mark.parametrize(
    ("vendor", "kind", "present"),
    [
        ("0x10de", "0x030200", True),
        ("0x10de", "0x030000", True),
        ("0x10de", "0x040300", False),  # the sound device of a graphics card
        ("0x1002", "0x030000", False),
    ],
)
def test_a_gpu_is_found_without_its_driver(
    tmp_path: Path, vendor: str, kind: str, present: bool
) -> None:
    assert not device.gpu_present(tmp_path)
    _pci_device(tmp_path, vendor, kind)
    assert device.gpu_present(tmp_path) == present


def test_a_gpu_is_found_by_its_device_file(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    assert device.gpu_present(tmp_path)


@pytest.fixture
def without_cuda_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device.bindings.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.bindings", None)
        yield
    device.bindings.cache_clear()


@pytest.mark.usefixtures("without_cuda_python")
def test_without_a_gpu_nothing_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "gpu_present", lambda: False)
    assert report.main() == 0
    printed = capsys.readouterr().out
    assert printed.endswith("no NVIDIA GPU: the jax.numpy reference serves every call\n")
    assert "NOT USABLE" not in printed


@pytest.mark.usefixtures("without_cuda_python")
def test_with_a_gpu_what_is_missing_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "gpu_present", lambda: True)
    assert report.main() == 1
    assert "NOT USABLE: cuda-python is needed" in capsys.readouterr().out
