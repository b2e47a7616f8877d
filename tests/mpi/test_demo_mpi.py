"""The demo: its pieces in this process, and all of it as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tf_adasum import demo, launch

TIMEOUT_SECONDS = 120

ROWS = [
    demo.Row(
        run,
        test_accuracy=[0.5, 0.9 + 0.01 * i],
        test_loss=[1.0, 0.1],
        steps=10 * i,
        syncs=i,
        seconds=1.5,
        weights=["0123456789abcdef"] * run.workers,
    )
    for i, run in enumerate(demo.runs(4))
]


def test_runs():
    labels = [run.label for run in demo.runs(4)]
    assert labels == [
        "1 worker",
        "4 workers, Sum",
        "4 workers, Adasum, local_steps=1",
        "4 workers, Adasum, local_steps=4",
    ]


def test_every_worker_of_up_to_four_has_whole_batches():
    settings = demo.Settings()
    for workers in (1, 2, 4):
        assert settings.train_images % (workers * settings.batch_size) == 0


def test_data_is_split_in_the_same_way_each_time():
    data, test = demo.load_data(demo.Settings())
    again, _ = demo.load_data(demo.Settings())
    assert [len(part) for part in (*data, *test)] == [1408, 1408, 389, 389]
    assert data[0].shape[1:] == (8, 8, 1)
    assert data[0].min() == 0 and data[0].max() == 1
    np.testing.assert_array_equal(data[0], again[0])
    assert set(data[1]) == set(test[1]) == set(range(10))


def test_model_size():
    assert demo.build_model().count_params() == 13706


def test_schedule_climbs_and_falls_linearly():
    settings = demo.Settings(learning_rate=2.0, warmup=0.25)
    rates = [float(demo.schedule(settings, steps=7)(step)) for step in range(7)]
    np.testing.assert_allclose(rates, [1, 2, 5 / 3, 4 / 3, 1, 2 / 3, 1 / 3], rtol=1e-6)


def test_table():
    assert demo.format_table(ROWS[:1] + ROWS[3:]).splitlines() == [
        "                                  test accuracy  steps per worker  syncs  seconds"
        "  weights equal on all ranks",
        "1 worker                                  90.0%                 0      0     1.50"
        "  yes (01234567)",
        "4 workers, Adasum, local_steps=4          93.0%                30      3     1.50"
        "  yes (01234567)",
    ]


def test_table_shows_unequal_weights():
    row = demo.Row(demo.Run(3, "Sum"), [0.1], [2.0], 1, 1, 0.1, ["a" * 64, "b" * 64, "a" * 64])
    assert not row.weights_equal
    assert demo.format_table([row]).endswith("  NO (aaaaaaaa bbbbbbbb)")


def test_json():
    content = json.loads(demo.as_json(ROWS, demo.Settings(epochs=2)))
    assert content["settings"]["epochs"] == 2
    assert content["rows"][3] == {
        "label": "4 workers, Adasum, local_steps=4",
        "workers": 4,
        "op": "Adasum",
        "local_steps": 4,
        "test_accuracy": pytest.approx(0.93),
        "steps_per_worker": 30,
        "syncs": 3,
        "wall_time_seconds": 1.5,
        "weights_equal": True,
        "weights_sha256": ["0123456789abcdef"] * 4,
    }


def assert_shows_curves(path: Path) -> None:
    from matplotlib import image

    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(path)
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    colors = np.unique(pixels[..., :3].reshape(-1, 3), axis=0)
    for color in ("D55E00", "0072B2", "009E73"):
        rgb = np.frombuffer(bytes.fromhex(color), np.uint8) / 255
        assert np.abs(colors - rgb).max(axis=1).min() < 0.01


def test_plot(tmp_path):
    demo.plot(ROWS, tmp_path / "curves")
    assert_shows_curves(tmp_path / "curves")


def test_plot_of_a_run_that_diverged(tmp_path):
    nan = float("nan")
    diverged = demo.Row(demo.Run(4, "Sum"), [0.1, 0.1], [nan, nan], 1, 1, 0.1, ["a"] * 4)
    demo.plot([ROWS[0], diverged, *ROWS[2:]], tmp_path / "curves")
    assert_shows_curves(tmp_path / "curves")


@pytest.mark.parametrize(
    "arguments",
    [["--np", "0"], ["--epochs", "-1"], ["--output", "no/such/folder/x.png"], ["--json", "."]],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        demo.main(arguments)
    assert exit_.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_missing_package(package, monkeypatch, capsys):
    monkeypatch.setattr(
        demo.importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    assert demo.main([]) == 2
    assert capsys.readouterr().err == f"The demo needs {package}: pip install tf-adasum[demo]\n"


def test_a_lone_process_becomes_mpirun(monkeypatch):
    started = []
    monkeypatch.setattr(launch, "launched_by", lambda: (None, 1))
    monkeypatch.setattr(launch, "mpirun_command", lambda np: ["/mpi/mpirun", "-np", str(np)])
    monkeypatch.setattr(launch, "environment", lambda: {"FOR": "mpirun"})
    monkeypatch.setattr(os, "execve", lambda *arguments: started.append(arguments))
    demo.main(["--np", "3", "--epochs", "1"])
    demo_command = [sys.executable, "-m", "tf_adasum", "demo", "--np", "3", "--epochs", "1"]
    command = ["/mpi/mpirun", "-np", "3", *demo_command]
    assert started == [("/mpi/mpirun", command, {"FOR": "mpirun"})]


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process group of its own, which does not outlive the timeout."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=launch.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # lets mpirun end its ranks
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


not_under_mpi = pytest.mark.skipif(
    launch.launched_by()[0] is not None, reason="mpirun does not start from within its own job"
)


@not_under_mpi
def test_whole_demo(tmp_path):
    command = [sys.executable, "-m", "tf_adasum", "demo"]
    options = ["--np", "2", "--epochs", "1", "--json", "table.json"]
    result = run(command + options, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert str(tmp_path / "adasum_demo.png") in result.stdout
    assert_shows_curves(tmp_path / "adasum_demo.png")

    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["label"] for row in rows] == [run.label for run in demo.runs(2)]
    for row in rows:
        assert row["label"] in result.stdout
        assert row["weights_equal"] and len(row["weights_sha256"]) == row["workers"]
        assert 0 < row["test_accuracy"] < 1
        assert row["wall_time_seconds"] > 0
    # 44 batches in all, 22 for each of two workers; with four local steps the last window is cut.
    assert [row["steps_per_worker"] for row in rows] == [44, 22, 22, 22]
    assert [row["syncs"] for row in rows] == [0, 22, 22, 6]


@not_under_mpi
def test_exit_status_tells_of_unequal_weights(tmp_path):
    program = (
        "import sys; from pathlib import Path; from tf_adasum import demo\n"
        "demo.hash_weights = lambda model, together: ['a' * 64, 'b' * 64]\n"
        "demo.runs = lambda size, all_of=demo.runs: all_of(size)[-1:]\n"
        "sys.exit(demo.compare(demo.Settings(epochs=1), Path('curves.png'), None))"
    )
    result = run([sys.executable, "-c", program], tmp_path)
    assert result.returncode == 1, result.stderr
    assert "NO (aaaaaaaa bbbbbbbb)" in result.stdout
