"""Compiling for a GPU that is described, not there: the environment this needs, and what can be
read from what the compilers write.

Nothing here imports JAX at the top, because XLA and Mosaic read their settings from the environment
once: `Toolchain.prepare` comes first, then JAX, then a `Compiler`. Three things tell what a program
became: its optimised HLO; XLA's list of launches with their shared memory; and what ptxas says of
each kernel, which Mosaic writes down itself and which is asked here for all other kernels.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self
from unittest import mock

from scripts.gpu.listings import read_dynamic_shared, read_launches, read_products, read_ptxas
from scripts.gpu.targets import HOPPER, Target

PACKAGES = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
CUDA = (13, 0)
"""The CUDA that these packages are built for; an older ptxas does not read what they write."""
SHORT_GRAPHS = {"xla_gpu_graph_min_graph_size": "1"}
"""The option with which XLA makes graphs of fewer than five launches, too."""
CUDA_FOLDER = Path("/usr/local/cuda")
INSTALL = "pip install '.[gpu-compile]', or run `make gpu-compile`"


class MissingError(RuntimeError):
    """Something that compiling takes is not installed; the message is one sentence and says what
    would do."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The requirements of compiling besides JAX: packages by name with their versions, ptxas and
    its CUDA release."""

    packages: Mapping[str, str]
    ptxas: Path
    release: str

    @classmethod
    def find(cls) -> Self:
        """Looks for the packages and for ptxas.

        Raises:
          MissingError: one is not there, or of a version that does not fit.
        """
        jax = importlib.metadata.version("jax")
        found = {}
        for name in PACKAGES:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                raise MissingError(
                    f"{name} is not installed, which compiles for an NVIDIA GPU where none is: "
                    f"{INSTALL}"
                ) from None
            if found[name] != jax:
                raise MissingError(
                    f"{name} is {found[name]} and jax {jax}, but they must be of one version: pip "
                    f"install {name}=={jax}"
                )
        return cls(found, *find_ptxas())

    def prepare(self, folder: Path, *, reports: bool = True) -> None:
        """Sets the environment: kernels, lists of launches and Mosaic's own reports go to `folder`,
        unless there are to be none. Before JAX is imported."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Every search for ptxas must find the one that makes the report: XLA writes PTX for
        # the one that it finds. JAX would rather name NVIDIA's Python package to XLA, if it is
        # installed, than the folder that XLA_FLAGS names.
        os.environ["PATH"] = os.pathsep.join([str(self.ptxas.parent), os.environ.get("PATH", "")])
        os.environ["CUDA_ROOT"] = str(self.ptxas.parent.parent)
        # Tiles are to be the built-in ones, whatever was measured on this machine.
        os.environ["JAXSHARE_CACHE"] = str(folder / "none")
        if reports:
            os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
        os.environ["XLA_FLAGS"] = " ".join(
            [
                os.environ.get("XLA_FLAGS", ""),
                "--xla_gpu_autotune_level=0",  # there is nothing to measure on
                f"--xla_gpu_cuda_data_dir={self.ptxas.parent.parent}",
                *([f"--xla_dump_to={folder}", "--xla_dump_emitter_re=ptx"] if reports else []),
            ]
        )


def find_ptxas() -> tuple[Path, str]:
    """(ptxas, its CUDA release): the first that is new enough of PATH, $CUDA_HOME, /usr/local/cuda
    and NVIDIA's Python packages.

    Raises:
      MissingError: there is none.
    """
    old = []
    for program in _programs("ptxas"):
        said = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False
        ).stdout
        release = re.search(r"release (\d+)\.(\d+)", said)
        if release and (int(release[1]), int(release[2])) >= CUDA:
            return program, f"{release[1]}.{release[2]}"
        old.append(
            f"{program} is of CUDA {release[1]}.{release[2]}"
            if release
            else f"{program} does not say its version"
        )
    reason = f"; {', '.join(old)}" if old else ""
    raise MissingError(
        f"there is no ptxas of CUDA {CUDA[0]}.{CUDA[1]} or newer{reason}: put one on PATH, set "
        f"CUDA_HOME, or pip install 'nvidia-cuda-nvcc>={CUDA[0]}'"
    )


def find_nvdisasm() -> Path:
    """NVIDIA's disassembler: the first of the places where ptxas is looked for.

    Raises:
      MissingError: there is none.
    """
    for program in _programs("nvdisasm"):
        return program
    raise MissingError(f"there is no nvdisasm: pip install nvidia-cuda-nvdisasm, or {INSTALL}")


def _programs(name: str) -> Iterator[Path]:
    """The programs of a name that can be run."""
    on_path = shutil.which(name)
    folders = [
        Path(on_path).parent if on_path else None,
        Path(os.environ["CUDA_HOME"]) / "bin" if os.environ.get("CUDA_HOME") else None,
        CUDA_FOLDER / "bin",
        *_wheel_folders(),
    ]
    for folder in filter(None, folders):
        if os.access(folder / name, os.X_OK):
            yield folder / name


def _wheel_folders() -> Iterator[Path]:
    """The program folders of NVIDIA's Python packages, which share one, if nvidia-cuda-nvcc is
    installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvcc") or []
    except importlib.metadata.PackageNotFoundError:
        return
    yield from (Path(str(file.locate())).parent for file in files if file.name == "ptxas")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled kernel of a backend's own; what XLA makes is not looked at.

    Bytes of shared memory are those of one block; dynamic ones are asked for at the launch.

    Attributes:
      name: as in its PTX.
      maker: "mosaic" or "triton".
      registers: of a thread.
      spill_bytes: of a thread, stored and loaded again because registers ran out.
      serialized: 1 where ptxas lets each wgmma wait for the one before.
      wgmma, mma, tcgen05: matrix instructions in its PTX: those of Hopper's warpgroups, of any GPU's
        warps, and of Blackwell.
    """

    name: str
    maker: str
    registers: int
    spill_bytes: int
    serialized: int
    static_shared_bytes: int
    dynamic_shared_bytes: int
    wgmma: int
    mma: int
    tcgen05: int

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its optimised HLO, its kernels, and its memory in bytes.

    `launches` is what its host works through, as `scripts.gpu.thunks` reads it; `ptx` has the code
    of kernels that were compiled for it, ours and XLA's.
    """

    text: str
    kernels: tuple[Kernel, ...]
    temp_bytes: int
    alias_bytes: int
    argument_bytes: int = 0
    output_bytes: int = 0
    launches: str = ""
    ptx: tuple[str, ...] = ()


_STRING = r'"((?:[^"\\]|\\.)*)"'


class Compiler:
    """Compiles jitted functions for a GPU that is described. `folder` is the one that
    `Toolchain.prepare` was given."""

    def __init__(self, toolchain: Toolchain, folder: Path, target: Target = HOPPER):
        import jax
        import numpy as np

        self.target = target
        self._mesh = jax.sharding.Mesh(np.array(self.devices(1)), ("device",))
        self.device: str = self._mesh.devices[0].device_kind
        self.ptxas, self._folder = toolchain.ptxas, folder
        self._mosaic: dict[str, Kernel] = {}

    def devices(self, number: int) -> list[Any]:
        """The given number of such GPUs, in one machine."""
        from jax.experimental import topologies

        return topologies.get_topology_desc(
            self.target.kind,
            "cuda",
            topology=f"1x1x{number}",
            target_config=self.target.description,
        ).devices

    def compile(
        self,
        function: Any,
        *arguments: Any,
        mesh: Any = None,
        is_part: bool = False,
        **options: Any,
    ) -> Program:
        """Compiles `function` for arguments that are pytrees of arrays or shapes; options are those
        of `jax.jit`. What `is_part` of a dispatch is a graph even where it is a few launches, since
        it is in the graph of them all there.

        With a `mesh` of described devices it is compiled for them all. Shapes that say how they are
        cut over it lie so, and all else is whole on every device. Bytes of the program are then
        those of one device.

        Raises whatever tracing, lowering and compiling do: a kernel that needs more shared memory
        than there is, is an error here.
        """
        try:
            with self.inside(mesh):
                traced = self.trace(function, *arguments, mesh=mesh, **options)
                lowered = traced.lower(lowering_platforms=("cuda",))
                compiled = self.finish(lowered, SHORT_GRAPHS if is_part else {})
            text = compiled.as_text() or ""
            memory = compiled.memory_analysis()
            return Program(
                text,
                (*self._mosaic_kernels(text), *self._triton_kernels(text)),
                memory.temp_size_in_bytes,
                memory.alias_size_in_bytes,
                memory.argument_size_in_bytes,
                memory.output_size_in_bytes,
                self._launches(),
                tuple(p.read_text(encoding="utf-8") for p in sorted(self._folder.glob("*.ptx"))),
            )
        finally:
            self._clear()

    @contextlib.contextmanager
    def inside(self, mesh: Any = None) -> Iterator[None]:
        """A context for all steps of compiling, in which compilers are silent."""
        import jax

        mesh = self._mesh if mesh is None else mesh
        from jax.experimental.mosaic.gpu import utils

        # Mosaic takes each GPU that is not there for a Hopper.
        with (
            _silence(),
            mock.patch.object(utils, "_infer_arch", lambda: self.target.capability),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        ):
            yield

    def trace(self, function: Any, *arguments: Any, mesh: Any = None, **options: Any) -> Any:
        """Traces `function` as `compile` does."""
        import jax

        mesh = self._mesh if mesh is None else mesh
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def placed(a: Any) -> jax.ShapeDtypeStruct:
            cut = a.sharding if isinstance(a, jax.ShapeDtypeStruct) else None
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cut or whole)

        shapes = jax.tree.map(placed, arguments)
        return jax.jit(function, **options).trace(*shapes)

    @staticmethod
    def finish(lowered: Any, more: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """Compiles what is lowered, with these options of XLA."""
        return lowered.compile(compiler_options={**more} or None)

    def _launches(self) -> str:
        """XLA's list of launches, with graphs where it has made any."""
        for name in ("thunk_sequence_after_thunk_passes", "thunk_sequence"):
            if found := sorted(self._folder.glob(f"*.{name}.txt")):
                return found[-1].read_text(encoding="utf-8")
        raise ValueError("XLA has written no list of launches: look for it anew in this JAX")

    def _mosaic_kernels(self, text: str) -> list[Kernel]:
        """The kernels that are in the program.

        Mosaic compiles, and reports, a kernel that it has met before no second time.
        """
        fresh = {}
        for report in sorted(
            self._folder.glob("*.ptxas"), key=lambda path: int(path.stem.rpartition("_")[2])
        ):
            dynamic = read_dynamic_shared(
                report.with_name(f"{report.stem}.mlir-passes.log").read_text(
                    encoding="utf-8", errors="replace"
                )
            )
            products = read_products(report.with_suffix(".ptx").read_text(encoding="utf-8"))
            for name, numbers in read_ptxas(report.read_text(encoding="utf-8")).items():
                fresh[report.stem] = Kernel(
                    name, "mosaic", dynamic_shared_bytes=dynamic, **products[name], **numbers
                )
        used = [
            re.search(r'op_name="([^"]*)".*?kernel_hash = ' + _STRING, line)
            for line in text.splitlines()
            if '"mosaic_gpu_v2"' in line
        ]
        for call in filter(None, used):
            if call[2] not in self._mosaic:
                if not fresh:
                    raise ValueError(
                        f"the program has a Mosaic kernel, {call[1]}, that there is no report on"
                    )
                named = [stem for stem in fresh if stem.rpartition("_")[0] in call[1].split("/")]
                self._mosaic[call[2]] = fresh.pop(named[0] if named else next(iter(fresh)))
        return list({call[2]: self._mosaic[call[2]] for call in filter(None, used)}.values())

    def _triton_kernels(self, text: str) -> list[Kernel]:
        """XLA compiles these with its own and says how much shared memory they are launched with;
        ptxas is asked here for the rest."""
        used = set(
            re.findall(
                rf'"__gpu\$xla\.gpu\.triton".*?backend_config=\{{.*?\bname = {_STRING}', text
            )
        )
        if not used:
            return []
        launches, numbers = {}, {}
        for sequence in self._folder.glob("*.thunk_sequence.txt"):
            launches |= read_launches(sequence.read_text(encoding="utf-8"))
        for ptx in self._folder.glob("module_*.ptx"):
            entries = read_products(ptx.read_text(encoding="utf-8"))
            # Of kernels of one name all but the first get a number.
            if any(re.sub(r"_+\d+$", "", name) in used or name in used for name in entries):
                done = subprocess.run(
                    [self.ptxas, "-v", f"-arch={self.target.architecture}", ptx, "-o", os.devnull],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                if done.returncode:
                    raise ValueError(
                        f"{self.ptxas} cannot read what XLA wrote: {done.stderr.strip()[:300]}"
                    )
                numbers |= {
                    name: {**found, **entries[name]}
                    for name, found in read_ptxas(done.stderr).items()
                }
        if len(numbers) < len(used) or numbers.keys() - launches.keys():
            raise ValueError(
                f"the program has the Triton kernels {sorted(used)}, but there are reports on "
                f"{sorted(numbers)} and launches of {sorted(launches)}"
            )
        return [
            Kernel(
                name,
                "triton",
                dynamic_shared_bytes=launches[name] - found["static_shared_bytes"],
                **found,
            )
            for name, found in numbers.items()
        ]

    def _clear(self) -> None:
        for file in self._folder.iterdir():
            if file.is_file():
                file.unlink()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hides all that a compiler writes on stderr: Mosaic tries to disassemble its dumps, and
    complains where it cannot."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# What the HLO says.
