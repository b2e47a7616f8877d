"""What docs/launchers.md says: its command lines are those of `run`, and its MPIJob is one. What
docs/from_horovod.md names is there.
"""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest
from ranks import run

import tf_adasum
from tf_adasum import launch

ROOT = Path(__file__).resolve().parents[2]
PAGE, FROM_HOROVOD = ROOT / "docs" / "launchers.md", ROOT / "docs" / "from_horovod.md"
MPIS = {
    "Open MPI 4, 5": "Open MPI v5.0.11",
    "MPICH": "MPICH Version:      5.0.2",
    "Intel MPI": "Intel(R) MPI Library 2021.18.1 for Linux* OS",
}


def rows() -> dict[str, list[str]]:
    """The first table: what stands in the first column, and the command lines after it."""
    table = PAGE.read_text().split("\n\n")[2]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return {first: [re.match("`(.*?)`", cell)[1] for cell in rest] for first, *rest in cells}


@pytest.mark.parametrize("mpi", MPIS)
def test_command_lines(mpi):
    for line, np, hosts in zip(
        rows()[mpi], (4, 16), ([], [("node1", 8), ("node2", 8)]), strict=True
    ):
        _, *flags, python, script = line.split()
        assert (python, script) == ("python", "train.py")
        assert flags == launch._flags(MPIS[mpi], np, hosts, False, False, {})


@pytest.fixture(scope="module")
def job() -> dict:
    yaml = pytest.importorskip("yaml", reason="PyYAML reads the MPIJob: pip install pyyaml")
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return yaml.safe_load(block)


def test_the_mpi_job_has_the_fields_of_its_schema(job):
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", job["metadata"]["name"])
    spec = job["spec"]
    known = {"slotsPerWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath"}
    assert set(spec) <= known | {"launcherCreationPolicy", "mpiImplementation"}
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    assert spec["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert isinstance(spec["runPolicy"]["backoffLimit"], int)
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"} and replicas["Launcher"]["replicas"] == 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "template"}
        (container,) = replica["template"]["spec"]["containers"]
        assert {"name", "image", "command", "args"} <= set(container)
        # Kubernetes takes text alone for these.
        texts = [*container["command"], *container["args"]]
        texts += [value for variable in container.get("env", []) for value in variable.values()]
        texts += container["resources"]["limits"].values()
        assert all(isinstance(text, str) for text in texts), texts
    assert len({r["template"]["spec"]["containers"][0]["image"] for r in replicas.values()}) == 1


def test_the_mpi_job_has_as_many_ranks_as_slots(job):
    spec = job["spec"]
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    slots = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    flags = launch._flags(MPIS["Open MPI 4, 5"], slots, (), False, False, {})
    assert launcher["args"][:-2] == flags


@pytest.mark.skipif(not launch.is_open_mpi(), reason="the variables are for Open MPI 5")
def test_open_mpi_reads_the_host_file_that_the_mpi_job_names(job, tmp_path):
    launcher = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable["value"] for variable in launcher["env"]}
    (name,) = [name for name, value in variables.items() if value == "/etc/mpi/hostfile"]
    hosts = tmp_path / "hostfile"
    mpirun = launch.mpirun_command(3, oversubscribe=False)
    # As the operator writes it. Cores do not count then, slots do.
    for slots, starts in ((3, True), (2, False)):
        hosts.write_text(f"localhost slots={slots}\n")
        command = [*mpirun, sys.executable, "-c", "print('started')"]
        ended = run(command, timeout=60, **{**variables, name: str(hosts)})
        assert (ended.code == 0) == starts, ended.output
        assert ended.output.count("started") == (3 if starts else 0), ended.output


def test_what_is_named_of_ours_is_there():
    text = FROM_HOROVOD.read_text()
    names = set(re.findall(r"\badasum\.(\w+)", text))
    assert names and names <= {*tf_adasum.__all__, "callbacks"}
    source = ast.parse((ROOT / "tf_adasum" / "callbacks" / "__init__.py").read_text())
    (public,) = [
        ast.literal_eval(statement.value)
        for statement in source.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "__all__"
    ]
    assert set(re.findall(r"adasum\.callbacks\.(\w+)", text)) <= set(public)
    sources = [*ROOT.glob("tf_adasum/**/*.py"), *ROOT.glob("ops/core/*.cc")]
    code = "".join(path.read_text() for path in sources)
    for variable in re.findall(r"TF_ADASUM_\w+", text):
        assert f'"{variable}"' in code
    honoured = re.findall(r"^\| `(HOROVOD_\w+)`.* \| (?:honoured|looked at)", text, re.MULTILINE)
    assert set(honoured) == set(re.findall(r'"(HOROVOD_\w+)"', code)) - {"HOROVOD_"}


def test_what_is_named_of_horovods_is_there():
    spec = importlib.util.find_spec("horovod")
    if spec is None:
        pytest.skip("no Horovod here: make horovod")
    (folder,) = map(Path, spec.submodule_search_locations)
    code = "".join(path.read_text() for path in folder.glob("**/*.py"))
    text = FROM_HOROVOD.read_text()
    names = set(re.findall(r"\bhvd\.(?:elastic\.|callbacks\.)?(\w+)", text))
    missing = [
        name for name in names if not re.search(rf"\b(def|class) {name}\b|\b{name} = ", code)
    ]
    assert names and sorted(missing) == []
    flags = set(re.findall(r"--[a-z-]+(?<!-)", text))
    ours = {"--elastic", "--mpi-args", "--with-ft", "--mca", "--prtemca"}
    launcher = (folder / "runner" / "launch.py").read_text()
    assert [f for f in sorted(flags - ours) if f"'{f}" not in launcher] == []
