"""What importing costs, and what is said when the libraries do not fit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tf_adasum
from tf_adasum import launch, native


def test_the_core_imports_no_tensorflow():
    code = "import sys; from tf_adasum import core, reference; core.simulate([[]]); "
    code += "assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_every_public_name_is_there():
    for name in dir(tf_adasum):
        assert getattr(tf_adasum, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        tf_adasum.missing  # noqa: B018


def test_built_for_another_tensorflow():
    with pytest.raises(ImportError, match=r"built for TensorFlow .*this is TensorFlow 1\.2\.3"):
        native.check_tensorflow("1.2.3")


def test_an_old_keras():
    with pytest.raises(ImportError, match=r"needs Keras 3\.5 or later, but this is Keras 3\.4\.1"):
        native.check_keras("3.4.1")
    native.check_keras("3.5.0")
    native.check_keras("3.15.1.dev2")


def test_running_another_mpi():
    with pytest.raises(ImportError, match=r"built for Open MPI, but .* 'MPICH Version: 5.0.2'"):
        native.check_mpi("Open MPI", "MPICH Version: 5.0.2")
    with pytest.raises(ImportError, match=r"built for MPICH, but .* 'Open MPI v5.0.11'"):
        native.check_mpi("MPICH", "Open MPI v5.0.11")
    native.check_mpi("MPICH", "Intel(R) MPI Library 2021.13")  # one binary interface
    native.check_mpi("Open MPI", "Open MPI v4.1.4")


@pytest.fixture
def copy(tmp_path):
    """A copy of the package, whose libraries may be damaged."""
    package = Path(tf_adasum.__file__).parent
    shutil.copytree(package, tmp_path / "tf_adasum", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def _import_error(folder: Path, module: str) -> str:
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); {module}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


def test_libraries_are_missing(copy):
    shutil.rmtree(copy / "tf_adasum" / "_lib")
    last = _import_error(copy, "from tf_adasum import core; core.rank()")
    assert last.startswith("ImportError: tf_adasum's compiled libraries are missing")


def test_mpi_is_gone(copy):
    core = copy / "tf_adasum" / "_lib" / "libadasum_core.so"
    # The name of the MPI library in the file becomes one that no machine has.
    core.write_bytes(core.read_bytes().replace(b"\0libmpi.so.", b"\0libnpi.so."))
    last = _import_error(copy, "from tf_adasum import core; core.rank()")
    assert last.startswith("ImportError: tf_adasum's core cannot be loaded") and "libnpi" in last


def test_tensorflow_was_replaced(copy):
    info = copy / "tf_adasum" / "_lib" / "build_info.json"
    import tensorflow as tf

    info.write_text(info.read_text().replace(tf.__version__, "2.9.1"))
    last = _import_error(copy, "import tf_adasum; tf_adasum.barrier()")
    assert last.startswith("ImportError: tf_adasum's ops were built for TensorFlow 2.9.1, but")


@pytest.mark.parametrize(
    "environ, message",
    [
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "Open MPI's mpirun started 4 .* with the mpirun of the"),
        ({"PMI_SIZE": "2"}, "MPICH's mpiexec started 2 processes"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "1"}, "srun started 8 .*--mpi=pmix"),
        ({"SLURM_STEP_NUM_TASKS": "8", "PMI_SIZE": "8"}, "srun started 8 .*--mpi=pmix"),
        ({"HOROVOD_SIZE": "2", "HOROVOD_CONTROLLER": "gloo"}, "horovodrun started 2 .*--mpi"),
    ],
    ids=["mpirun", "mpiexec", "srun", "srun as mpiexec", "horovodrun"],
)
def test_launched_as_several_processes_that_mpi_does_not_see(environ, message):
    with pytest.raises(RuntimeError, match=message):
        launch.check_not_alone(1, environ)
    launch.check_not_alone(4, environ)
    # In a batch script's own process.
    launch.check_not_alone(1, {"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "1"})
