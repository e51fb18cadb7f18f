"""The manifest: which cubins are shipped and how each is launched."""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

from jax_mla import variants
from jax_mla.errors import SetupError, UnsupportedError
from jax_mla.runtime.files import REINSTALL, locate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One cubin.

    Attributes:
        key: stable name of the variant, the same for every arch.
        arch: target such as "sm_90a".
        file: path relative to the manifest.
        sha256: hex digest of the file.
        symbol: name of the kernel in the cubin.
        block: threads a CTA.
        cluster: CTAs a cluster.
        tokens: tokens a cluster handles.
        form: of its variant, "plain", "fp8" or "bf16".
        shared_memory: dynamic bytes a CTA.
        carveout: percentage of L1 preferred as shared memory.
    """

    key: str
    arch: str
    file: str
    sha256: str
    symbol: str
    block: int
    cluster: int
    tokens: int
    form: str
    shared_memory: int
    carveout: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What the build compiled.

    Attributes:
        path: the manifest file; cubins lie beside it.
        compiler: version of "nvidia-cutlass-dsl" and of "cuda", its compiler.
        kernels: every cubin.
    """

    path: Path
    compiler: dict[str, str]
    kernels: tuple[Kernel, ...]

    @property
    def archs(self) -> tuple[str, ...]:
        """Targets with cubins, oldest first."""
        return tuple(sorted({kernel.arch for kernel in self.kernels}, key=capability_of))

    def find(self, key: str, arch: str) -> Kernel:
        """Returns the cubin of a variant for a target.

        Raises:
            UnsupportedError: there is one, for other targets.
            SetupError: there is none.
        """
        by_arch = {kernel.arch: kernel for kernel in self.kernels if kernel.key == key}
        if arch in by_arch:
            return by_arch[arch]
        if by_arch:
            raise UnsupportedError(
                f"kernel '{key}' is shipped for {', '.join(by_arch)}, not for {arch}."
                ' Use implementation="reference".'
            )
        keys = ", ".join(kernel.key for kernel in self.kernels if kernel.arch == arch)
        raise SetupError(
            f"{self.path} has no kernel '{key}' for {arch}, only {keys or 'none'}."
            " If the program was exported by another version of jax_mla, export it again."
        )

    def read(self, kernel: Kernel) -> bytes:
        """Returns the bytes of a cubin.

        Raises:
            SetupError: the file is missing or is not the one that was built.
        """
        file = self.path.parent / kernel.file
        try:
            cubin = file.read_bytes()
        except OSError as error:
            raise SetupError(f"cubin of kernel '{kernel.key}': {error}. {REINSTALL}") from error
        digest = hashlib.sha256(cubin).hexdigest()
        if digest != kernel.sha256:
            raise SetupError(
                f"cubin of kernel '{kernel.key}': {file} ({len(cubin)} bytes) has SHA-256"
                f" {digest[:12]}, the manifest says {kernel.sha256[:12]}. {REINSTALL}"
            )
        return cubin


def capability_of(arch: str) -> tuple[int, int]:
    """Returns the compute capability that runs a target: (9, 0) for "sm_90a"."""
    digits = arch.removeprefix("sm_").rstrip("af")
    return int(digits[:-1]), int(digits[-1])


def parse(path: Path) -> Manifest:
    """Reads a manifest file.

    Raises:
        SetupError: it is missing, damaged, or of another version.
    """
    try:
        content = json.loads(path.read_text())
        abi = content["abi"]
        fields = [field.name for field in dataclasses.fields(Kernel)]
        kernels = tuple(
            Kernel(**{field: entry[field] for field in fields}) for entry in content["kernels"]
        )
        compiler = dict(content["compiler"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SetupError(f"{path} cannot be used: {error!r}. {REINSTALL}") from error
    if abi != variants.ABI:
        raise SetupError(
            f"{path} has kernel interface {abi}, the Python code {variants.ABI}. {REINSTALL}"
        )
    return Manifest(path=path, compiler=compiler, kernels=kernels)


@functools.cache
def shipped() -> Manifest:
    """Returns the manifest of the installed package; raises SetupError as `parse` does."""
    return parse(locate("cubins/manifest.json"))
