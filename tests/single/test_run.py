"""`python -m tf_adasum run`: the line that it makes of its options, for each MPI."""

import os
import sys

import pytest

from tf_adasum import launch, run

OPEN_MPI_4, OPEN_MPI_5 = "Open MPI v4.1.4, package: Debian OpenMPI", "Open MPI v5.0.11, package: x"
MPICH, INTEL = "MPICH Version:      5.0.2", "Intel(R) MPI Library 2021.18.1 for Linux* OS"
TWO, UNEQUAL = [("a", 2), ("b", 2)], [("a", 2), ("b", 1)]


def flags(running, np=4, hosts=(), elastic=False, oversubscribe=True, environ=None):
    return launch._flags(running, np, hosts, elastic, oversubscribe, environ or {})


@pytest.mark.parametrize(
    "running, options, line",
    [
        (OPEN_MPI_4, {}, "--oversubscribe --bind-to none -np 4"),
        (OPEN_MPI_5, {}, "--oversubscribe --bind-to none -np 4"),
        (OPEN_MPI_5, {"oversubscribe": False}, "--bind-to none -np 4"),
        (
            OPEN_MPI_5,
            {"elastic": True},
            "--with-ft ulfm --oversubscribe --bind-to none -np 4",
        ),
        (
            OPEN_MPI_4,
            {"hosts": UNEQUAL, "oversubscribe": False, "environ": {"TF_X": "1", "HOME": "/"}},
            "--bind-to none --host a:2,b:1 -x TF_X -np 4",
        ),
        (MPICH, {}, "-n 4"),
        (MPICH, {"hosts": UNEQUAL}, "-hosts a:2,b:1 -n 4"),
        (INTEL, {}, "-genv I_MPI_PIN 0 -n 4"),
        (INTEL, {"hosts": TWO}, "-genv I_MPI_PIN 0 -hosts a,b -ppn 2 -n 4"),
    ],
)
def test_flags(running, options, line):
    assert " ".join(flags(running, **options)) == line


@pytest.mark.parametrize("running", [OPEN_MPI_4, MPICH, INTEL])
def test_only_open_mpi_5_is_elastic(running):
    with pytest.raises(ValueError, match=r"only Open MPI 5 .* This is "):
        flags(running, elastic=True)


def test_intel_mpi_with_unequal_hosts():
    with pytest.raises(ValueError, match=r"-machinefile\. Received: a:2,b:1"):
        flags(INTEL, hosts=UNEQUAL)


def _no_execve(*arguments):
    raise AssertionError(f"pytest was to become {arguments[1]}")


@pytest.fixture
def alone(monkeypatch, tmp_path):
    """A folder with a script, and an environment that no launcher and no batch job has left."""
    for name in [*launch._LAUNCHERS, *run._BATCH_JOBS, "PYTHONPATH"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "allow_root", dict)
    monkeypatch.setattr(os, "execve", _no_execve)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def line_of(capsys, *arguments):
    assert run.main([*arguments[:-1], "--dry-run", *arguments[-1].split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    launcher, _, rest = out.rstrip("\n").partition(" ")
    assert os.access(launcher, os.X_OK)
    return rest.replace(sys.executable, "python")


def test_a_script_gets_what_follows_it(alone, capsys):
    line = line_of(capsys, "-np", "2", "train.py --epochs 3 -np 7 -m x")
    assert line.endswith("-np 2 python train.py --epochs 3 -np 7 -m x") or line.endswith(
        "-n 2 python train.py --epochs 3 -np 7 -m x"
    )


def test_a_module(alone, capsys):
    line = line_of(capsys, "-n", "2", "-m package.train --hosts x -m y")
    assert line.endswith(" 2 python -m package.train --hosts x -m y")


def test_dashes_end_the_options(alone, capsys):
    assert line_of(capsys, "-np", "2", "-- train.py").endswith(" 2 python train.py")


def test_hosts_say_how_many(alone, capsys):
    line = line_of(capsys, "-H", "a:2,b", "train_on_a_shared_disk.py")
    assert "a:2,b:1" in line and line.endswith(" 3 python train_on_a_shared_disk.py")
    assert "--oversubscribe" not in line
    assert line_of(capsys, "-np", "2", "-H", "a:2,b", "x.py").endswith(" 2 python x.py")


def test_a_batch_job_says_where(alone, capsys):
    assert "--oversubscribe" in line_of(capsys, "-np", "2", "train.py")
    alone.setenv("SLURM_JOB_ID", "7")
    alone.setenv("SLURM_STEP_NUM_TASKS", "1")  # an interactive job's shell
    assert "--oversubscribe" not in line_of(capsys, "-np", "2", "train.py")


def test_flags_for_mpirun(alone, capsys):
    line = line_of(capsys, "-np", "2", "--mpi-args", "--mca pml 'o b'", "train.py")
    assert line.endswith(" 2 --mca pml 'o b' python train.py")


def test_ranks_find_a_package_that_lies_in_the_working_folder(alone, capsys):
    folder = os.path.dirname(os.path.dirname(run.__file__))
    alone.chdir(folder)
    alone.setattr(sys, "path", [folder, *(path for path in sys.path if path != folder)])
    run.main(["-np", "2", "-H", "a:2", "--dry-run", "x.py"])
    line = capsys.readouterr().out
    assert line.startswith(f"PYTHONPATH={folder} ")
    assert "-x PYTHONPATH" in line
    alone.setenv("PYTHONPATH", "/other")
    run.main(["-np", "2", "--dry-run", "-m", "x"])
    assert capsys.readouterr().out.startswith(f"PYTHONPATH={folder}:/other ")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("-np 2", "what is to be run?"),
        ("-np 2 -m", "argument -m: expected a module"),
        ("train.py", "how many ranks? Give -np or -H"),
        ("-np 0 train.py", "must be a number of at least 1. Received: 0"),
        ("-np two train.py", "must be a number of at least 1. Received: two"),
        ("-np 2 absent.py", "there is no file absent.py"),
        ("-np 2 --verbose train.py", "unrecognized arguments: --verbose"),
        ("-np 2 -- --verbose", "unknown option --verbose"),
        ("-H a:,b train.py", "must be HOST:RANKS, separated by commas. Received: a:,b"),
        ("-H a:0 train.py", "must be HOST:RANKS"),
        ("-H a:x train.py", "must be HOST:RANKS"),
        ("-H ,a train.py", "must be HOST:RANKS"),
        ("-np 4 -H a:2,b train.py", "argument -np: -H has room for 3 ranks. Received: 4"),
    ],
)
def test_wrong_command_lines(alone, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        run.main(arguments.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_SIZE": "4"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"},
    ],
)
def test_not_within_a_launcher(alone, capsys, environ):
    for name, value in environ.items():
        alone.setenv(name, value)
    with pytest.raises(SystemExit):
        run.main(["-np", "2", "train.py"])
    assert (
        "has started this process, and mpirun does not start within it" in capsys.readouterr().err
    )


def test_an_mpi_that_is_not_elastic(alone, capsys):
    alone.setattr(launch, "_running", lambda: OPEN_MPI_4)
    with pytest.raises(SystemExit):
        run.main(["-np", "2", "--elastic", "train.py"])
    assert "only Open MPI 5 and later" in capsys.readouterr().err


def test_what_keeps_it_from_starting_is_one_sentence(alone, capsys):
    def gone():
        raise ImportError("tf_adasum's core cannot be loaded")

    alone.setattr(launch, "_running", gone)
    with pytest.raises(SystemExit) as exit_:
        run.main(["-np", "2", "train.py"])
    assert exit_.value.code == 2
    assert "error: tf_adasum's core cannot be loaded" in capsys.readouterr().err
