"""What the runtime registers without a GPU, and what it says when something is missing."""

import ctypes
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jax_mla
from jax_mla import config, runtime, variants
from jax_mla.errors import SetupError, UnsupportedError
from jax_mla.runtime import device, files, library, loader, manifest, registration


def _entry(**changes: Any) -> dict[str, Any]:
    cubin = b"not really a cubin"
    entry = {
        "key": "small_c8_t1",
        "arch": "sm_90a",
        "file": "sm_90a/small_c8_t1.cubin",
        "sha256": hashlib.sha256(cubin).hexdigest(),
        "symbol": "q_absorb",
        "block": 256,
        "cluster": 8,
        "tokens": 1,
        "form": "plain",
        "shared_memory": 1024,
        "carveout": 100,
        "registers": 40,
        "params": [],
    }
    return entry | changes


def _write_manifest(folder: Path, *entries: dict[str, Any], abi: int = variants.ABI) -> Path:
    """Writes a manifest and, beside it, the cubin that `_entry` describes."""
    path = folder / "manifest.json"
    compiler = {"nvidia-cutlass-dsl": "4.8.1", "cuda": "13.4"}
    path.write_text(json.dumps({"abi": abi, "compiler": compiler, "kernels": entries}))
    (folder / "sm_90a").mkdir()
    (folder / "sm_90a" / "small_c8_t1.cubin").write_bytes(b"not really a cubin")
    return path


def test_every_variant_is_shipped_for_every_arch() -> None:
    shipped = manifest.shipped()
    found = {(kernel.key, kernel.arch) for kernel in shipped.kernels}
    assert found == {(v.key, arch) for arch in variants.ARCHS for v in variants.SHIPPED[arch]}
    for kernel in shipped.kernels:
        assert shipped.read(kernel)[:4] == b"\x7fELF"


def test_archs_come_oldest_first(tmp_path: Path) -> None:
    archs = ("sm_103a", "sm_90a", "sm_100a")
    path = _write_manifest(tmp_path, *(_entry(arch=arch) for arch in archs))
    assert manifest.parse(path).archs == ("sm_90a", "sm_100a", "sm_103a")
    assert [manifest.capability_of(arch) for arch in archs] == [(10, 3), (9, 0), (10, 0)]


def test_a_missing_cubin_is_named(tmp_path: Path) -> None:
    parsed = manifest.parse(_write_manifest(tmp_path, _entry(file="sm_90a/lost.cubin")))
    with pytest.raises(SetupError, match=r"(?s)small_c8_t1.*lost\.cubin.*Reinstall"):
        parsed.read(parsed.kernels[0])


def test_a_corrupt_cubin_is_named(tmp_path: Path) -> None:
    parsed = manifest.parse(_write_manifest(tmp_path, _entry()))
    assert parsed.read(parsed.kernels[0]) == b"not really a cubin"
    (tmp_path / "sm_90a" / "small_c8_t1.cubin").write_bytes(b"not really")
    with pytest.raises(SetupError, match=r"small_c8_t1.*10 bytes.*SHA-256.*manifest.*Reinstall"):
        parsed.read(parsed.kernels[0])


def test_an_unknown_kernel_lists_what_is_shipped(tmp_path: Path) -> None:
    parsed = manifest.parse(_write_manifest(tmp_path, _entry()))
    with pytest.raises(SetupError, match=r"no kernel 'tiled' for sm_90a, only small_c8_t1.*export"):
        parsed.find("tiled", "sm_90a")
    with pytest.raises(SetupError, match="for sm_100a, only none"):
        parsed.find("tiled", "sm_100a")


def test_a_kernel_for_other_targets_only_is_named(tmp_path: Path) -> None:
    parsed = manifest.parse(_write_manifest(tmp_path, _entry()))
    with pytest.raises(UnsupportedError, match="'small_c8_t1' is shipped for sm_90a, not for sm_1"):
        parsed.find("small_c8_t1", "sm_100a")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"abi": 1, "compiler": {}, "kernels": [{}]}']
)
def test_a_corrupt_manifest_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(SetupError, match=r"manifest\.json cannot be used: .*Reinstall"):
        manifest.parse(path)


def test_a_manifest_of_another_interface_is_refused(tmp_path: Path) -> None:
    path = _write_manifest(tmp_path, _entry(), abi=variants.ABI + 1)
    with pytest.raises(SetupError, match=f"interface {variants.ABI + 1}.*{variants.ABI}"):
        manifest.parse(path)


def test_a_missing_build_product_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_mla, "__path__", [str(tmp_path)])
    with pytest.raises(SetupError, match=rf"no lib/libjax_mla\.so in {tmp_path}.*pip install"):
        files.locate("lib/libjax_mla.so")


def test_a_corrupt_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corrupt = tmp_path / "lib" / "libjax_mla.so"
    corrupt.parent.mkdir()
    corrupt.write_bytes(b"\x7fELF")
    monkeypatch.setattr(jax_mla, "__path__", [str(tmp_path)])
    with pytest.raises(SetupError, match=r"libjax_mla\.so cannot be used: .*Reinstall"):
        library.library.__wrapped__()


def test_a_library_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "ABI", variants.ABI + 1)
    with pytest.raises(SetupError, match=rf"interface {variants.ABI - 1}, the Python code"):
        library.library.__wrapped__()


def test_the_library_exports_nothing_else() -> None:
    """Symbols of ours or of libstdc++ must not meet those of another library in the process."""
    path = files.locate("lib/libjax_mla.so")
    if (nm := shutil.which("nm")) is None:
        pytest.skip("no nm")
    listing = subprocess.run(
        [nm, "-D", "--defined-only", path], capture_output=True, text=True, check=True
    ).stdout
    assert {line.split()[-1].split("@")[0] for line in listing.splitlines()} == {
        "JaxMlaQAbsorb",
        "JaxMlaQAbsorbInitialize",
        "JaxMlaExchange",
        "JaxMlaExchangeInitialize",
        "jax_mla_abi",
        "jax_mla_add_kernel",
        "jax_mla_add_mailbox",
        "jax_mla_remove_mailbox",
        "jax_mla_set_loader",
    }


def test_the_cuda_backend_gets_both_stages() -> None:
    """JAX holds the target back until the CUDA backend starts; this stands in for that start."""
    program = """
from jax._src.lib import xla_client
import jax_mla.runtime
targets = {}
def backend(name, stages, platform, api_version, *traits):
    targets[name] = sorted(stages), platform, api_version
xla_client.register_custom_call_handler("CUDA", backend)
print(targets[jax_mla.runtime.TARGET])
print(targets[jax_mla.runtime.EXCHANGE_TARGET])
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    stages = "(['execute', 'initialize'], 'CUDA', 1)"
    assert run.stdout.splitlines() == [stages, stages], run.stderr


def _missing_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False


needs_no_driver = pytest.mark.skipif(not _missing_driver(), reason="this machine has a driver")


@needs_no_driver
def test_a_missing_driver_is_named() -> None:
    with pytest.raises(SetupError, match=r"device 0: .*driver is missing.*cuInit.*Install driver"):
        runtime.unsupported_reason(0)
    with pytest.raises(SetupError, match="Install driver"):
        runtime.load("small_c8_t1", 0)


@needs_no_driver
def test_a_failed_load_reaches_the_library_as_text() -> None:
    message = ctypes.create_string_buffer(b"?" * 64, 64)
    registration._CALLBACK(0, b"small_c8_t1", ctypes.addressof(message), 64)
    assert message.value.startswith(b"device 0: the NVIDIA driver is missing")
    assert len(message.value) == 63  # cut to what fits


def test_an_old_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "driver_version", lambda: (12, 8))
    with pytest.raises(SetupError, match=r"supports CUDA 12\.8, the kernels need .*Install driver"):
        loader.check_driver()


_OLD_GPU = device.Device(ordinal=1, handle=None, name="A100", capability=(8, 0))


def test_a_gpu_without_kernels_is_named_with_what_is_shipped() -> None:
    assert _OLD_GPU.arch is None
    assert _OLD_GPU.refusal == (
        "A100 (device 1, compute capability 8.0): kernels are shipped for compute capability"
        " 9.0 (sm_90a), 10.0 (sm_100a), 10.3 (sm_103a)."
        ' Use such a GPU, or implementation="reference".'
    )


def test_a_cluster_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver answers as it does on a GPU that is split among several users."""
    monkeypatch.setattr(loader, "call", lambda *_, **__: 0)
    kernel = manifest.shipped().find("small_c16_t1", "sm_90a")
    with pytest.raises(UnsupportedError, match=r"needs 16 SMs side by side.*Use a whole GPU"):
        loader._check_cluster(kernel, 0, _OLD_GPU)


def test_missing_cuda_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(
        SetupError, match=r"cuda-python is needed.*pip install 'cuda-python>=13,<14'"
    ):
        device.bindings.__wrapped__()


def test_a_failed_driver_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver answers here with its own error, as it does for a damaged cubin."""
    real = device.bindings()

    class Driver:
        CUresult = real.CUresult

        @staticmethod
        def cuLibraryLoadData(*_: object) -> tuple[object, None]:
            return real.CUresult.CUDA_ERROR_INVALID_IMAGE, None

    monkeypatch.setattr(device, "bindings", lambda: Driver)
    with pytest.raises(SetupError, match="loading: cuLibraryLoadData returned CUDA_ERROR_"):
        device.call("cuLibraryLoadData", b"", task="loading")


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_options_are_read_from_the_environment(value: str | None, expected: bool) -> None:
    environment = {} if value is None else {"JAX_MLA_CHECK_SLOTS": value}
    assert config.parse(environment).check_slots is expected


def test_an_option_with_a_meaningless_value_is_refused() -> None:
    with pytest.raises(ValueError, match="JAX_MLA_CHECK_SLOTS must be 0 or 1, got 'yes'"):
        config.parse({"JAX_MLA_CHECK_SLOTS": "yes"})
