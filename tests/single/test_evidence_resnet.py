"""The programs that train a small ResNet: Figure 5 and Table 2."""

import dataclasses
import functools
import json
import sys

import fig5_resnet_large_batch as fig5
import lenet
import namespaces
import numpy as np
import pytest
import resnet
import runs
import table2_local_steps as table2
import table2_local_steps_training as training
import two_hosts
import two_hosts_training

TINY = functools.partial(resnet.model, width=4, blocks=(1,))


def little_data():
    """28 x 28 images of 10 classes that can be told apart."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 384).astype(np.int32)
    images = rng.normal(size=(10, 28, 28, 1))[labels] + rng.normal(size=(384, 28, 28, 1))
    images = images.astype(np.float32)
    return (images[:256], labels[:256]), (images[256:], labels[256:])


@pytest.fixture(autouse=True)
def little(monkeypatch):
    monkeypatch.setattr(lenet, "load", lambda name: little_data())
    monkeypatch.setattr(resnet, "model", TINY)


def test_epochs_until_a_target():
    accuracy = [0.5, 0.8, 0.7, 0.9]
    assert runs.first_epoch(accuracy, 0.8) == 2
    assert runs.first_epoch(accuracy, 0.85) == 4
    assert runs.first_epoch(accuracy, 0.95) is None
    assert runs.epochs_text([2, None, 10]) == "2, never, 10"


def test_a_rate_is_better_the_sooner_it_reaches_the_target():
    # Halfway from 0.6 to 0.8 after one epoch and a half.
    assert resnet.score([0.6, 0.8], 0.7) == pytest.approx(1 + 1 / 1.5)
    assert resnet.score([0.8], 0.4) == pytest.approx(1 + 1 / 0.5)
    assert resnet.score([0.6, 0.65, 0.6], 0.7) == 0.65
    assert resnet.score([], 0.7) == 0


def test_schedule_of_mlperf():
    # 18 epochs are a fifth of 90: a warm-up in 1, tenths from 6, 12 and 16 on.
    schedule = resnet.schedule(steps_per_epoch=10, epochs=18)
    schedule.rate.assign(0.5)
    rates = [float(schedule(step)) for step in (0, 5, 10, 59, 60, 119, 120, 160)]
    assert rates == pytest.approx([0, 0.25, 0.5, 0.5, 0.05, 0.05, 0.005, 0.0005])


def test_a_resnet_is_tested_after_each_epoch():
    trainer = resnet.Trainer(lenet.load(""))
    run = resnet.Run(2, 16, "adasum", 0.05, seed=0, local_steps=3, epochs=6, train_images=256)
    accuracy = trainer.train(run)["accuracy"]
    assert len(accuracy) == 6 and accuracy[-1] > 0.3
    # In an epoch of 8 steps a sync comes after 3, 6 and 8 of them.
    sizes = []
    simulated, _ = next(iter(trainer._simulations.values()))
    window = simulated.window
    simulated.window = lambda examples: sizes.append(examples.shape[1]) or window(examples)
    assert trainer.train(run)["accuracy"] == accuracy
    assert sizes == [3, 3, 2] * 6
    # What diverges ends early, and nothing of it is left in the next one.
    assert len(trainer.train(dataclasses.replace(run, rate=1e30))["accuracy"]) < 6
    assert trainer.train(run)["accuracy"] == accuracy


LITTLE = ["--quick", "--workers", "2", "--train-images", "256", "--epochs", "2", "--budget", "1"]


def test_figure_5_from_end_to_end(tmp_path, capsys, monkeypatch):
    given = [*LITTLE, "--batches", "16,32", "--target", "0.15", "--output", str(tmp_path)]
    assert fig5.main(given) == 0
    first = capsys.readouterr().out
    assert "0.1000, scaled" in first
    # What is there is not trained again.
    monkeypatch.setattr(resnet.Trainer, "train", None)
    assert fig5.main(given) == 0
    assert capsys.readouterr().out.splitlines()[2:] == first.splitlines()[2:]
    figures = json.loads((tmp_path / "fig5_resnet_large_batch_quick.json").read_text())
    assert [(p["op"], p["batch"], p["is_searched"]) for p in figures["points"]] == [
        (op, batch, is_searched)
        for op in fig5.OPS
        for batch, is_searched in ((16, True), (32, False), (32, True))
    ]
    assert all(len(of_seed) == 2 for p in figures["points"] for of_seed in p["accuracy"])
    assert "Adasum" in fig5.section(figures)
    assert (tmp_path / "fig5_resnet_large_batch_quick.png").stat().st_size > 10_000


def test_trainings_of_both_programs_are_made_once(tmp_path, monkeypatch):
    made = []

    def train(_self, run):
        made.append(run)
        return {"accuracy": [0.5, 0.9]}

    monkeypatch.setattr(resnet.Trainer, "train", train)
    monkeypatch.setattr(table2, "measure_time", timed({0: 1, 1: 1, 16: 1}))
    given = [*LITTLE, "--target", "0.8", "--output", str(tmp_path)]
    assert fig5.main([*given, "--batches", "16,32"]) == 0
    assert sum(run.op == "adasum" and run.batch == 16 for run in made) == 2
    made.clear()
    assert table2.main([*given, "--batch", "16"]) == 0
    assert {run.local_steps for run in made} == {16}
    stored = json.loads((tmp_path / "table2_local_steps_quick.json").read_text())["runs"]
    assert sum(each["run"].get("local_steps") == 1 for each in stored) == 2
    made.clear()
    assert table2.main([*given, "--batch", "16", "--fresh"]) == 0
    assert {run.local_steps for run in made} == {1, 16}


def test_what_figure_5_finds():
    early, late, never = [0.5, 0.9, 0.9], [0.5, 0.6, 0.9], [0.5, 0.6, 0.7]
    accuracy = {
        ("sum", 32, True): [late, late],
        ("sum", 256, False): [never, []],
        ("sum", 256, True): [never, late],
        ("adasum", 32, True): [early, late],
        ("adasum", 256, False): [late, late],
        ("adasum", 256, True): [late, never],
    }
    points = [fig5.Point(*key, 0.1, of) for key, of in accuracy.items()]
    assert fig5.findings(points, 0.8) == [
        "yes: Sum never gets there at the large batch, rate scaled (never, never)",
        "yes: Adasum does, rate scaled (3, 3)",
        "NO: Sum never gets there at the large batch, rate searched (never, 3)",
        "NO: Adasum does, rate searched (3, never)",
        "yes: at the small batch Adasum needs as many epochs as Sum, or fewer (2, 3 and 3, 3)",
    ]
    row = fig5.table(points, workers=4, target=0.8).splitlines()[2]
    assert row.split()[:2] == ["Sum", "1024"] and "35.0 (0.0-70.0)" in row and row[-5:] == "never"


def timed(of):
    """`measure_time` of a machine on which an epoch takes so long."""

    def measure_time(timing, _time_limit):
        factor = {"400mbit": 1, "100mbit": 2}[timing.link]
        lines = [
            {"ranks": timing.workers, "local_steps": local_steps, "parameters": 9, "steps": 8}
            | {"epoch": epoch, "seconds": factor * seconds * (1 + 9 * (epoch == 1)), "accuracy": 1}
            for epoch in range(3)
            for local_steps, seconds in of.items()
        ]
        return {"trainings": two_hosts.trainings_of(lines)}

    return measure_time


def test_table_2_from_end_to_end(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(table2, "measure_time", timed({0: 1.5, 1: 2.6, 16: 2.0}))
    given = [*LITTLE, "--target", "0.15", "--links", "400mbit,100mbit", "--output", str(tmp_path)]
    assert table2.main([*given, "--only", "timing"]) == 0
    monkeypatch.setattr(table2, "measure_time", None)
    capsys.readouterr()
    assert table2.main(given) == 0
    out = capsys.readouterr().out
    assert "1.30 times, the paper's 1.30" in out and "100mbit" in out and "no communication" in out
    figures = json.loads((tmp_path / "table2_local_steps_quick.json").read_text())
    assert [column["local_steps"] for column in figures["columns"]] == [1, 16]
    assert table2.seconds_of(figures["timings"])["100mbit"] == {0: 3.0, 1: 5.2, 16: 4.0}
    assert "175" in table2.section(figures)
    assert (tmp_path / "table2_local_steps_quick.png").stat().st_size > 10_000


def test_table_2_without_hosts_has_epochs(tmp_path, capsys, monkeypatch):
    def unavailable(*_):
        raise namespaces.UnavailableError("network namespaces need root")

    monkeypatch.setattr(table2, "measure_time", unavailable)
    monkeypatch.setattr(resnet.Trainer, "train", lambda self, run: {"accuracy": [0.5, 0.9]})
    given = [*LITTLE, "--target", "0.8", "--links", "400mbit", "--output", str(tmp_path)]
    assert table2.main(given) == 0
    told = capsys.readouterr()
    assert "need root" in told.err and "2, 2" not in told.out and "Epochs until 80.0%" in told.out


def test_what_table_2_finds():
    early, late, never = [0.5, 0.9, 0.9], [0.5, 0.6, 0.9], [0.5, 0.6, 0.7]
    columns = [table2.Column(1, 0.1, [early] * 3), table2.Column(16, 0.1, [late, early, late])]
    # 2 epochs of 3 s, and 3 of 1.9 or of 2.4 s.
    seconds = {"fast": {0: 1, 1: 3, 16: 2.4}, "slow": {0: 1, 1: 3, 16: 1.9}}
    said = table2.findings(columns, 0.8, seconds)
    assert [line.split(":")[0] for line in said] == ["yes", "yes", "NO", "yes", "yes"]
    assert "(5.70 and 6.00 s, the paper's" in said[4]
    columns[1].accuracy[1] = never
    said = table2.findings(columns, 0.8, seconds)
    assert said[0] == (
        "NO: with 16 local steps the target is reached (3, never, 3, and with 1 2, 2, 2)"
    )
    assert "(5.70 and 6.00 s, the paper's" in said[4]
    columns[1].accuracy[2] = never
    said = table2.findings(columns, 0.8, seconds)
    assert said[4].startswith("NO") and "(- and 6.00 s" in said[4]
    assert table2.table_epochs(columns, 128, 0.8).splitlines()[2].split()[:2] == ["16", "2048"]


def test_the_part_that_is_timed(capsys, monkeypatch):
    # The threads of this process are set already.
    monkeypatch.setattr(two_hosts_training, "start", lambda: None)
    given = ["--local-steps", "0,2", "--epochs", "2", "--train-images", "64", "--batch", "16"]
    monkeypatch.setattr(sys, "argv", ["training", *given])
    training.main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["epoch"], line["local_steps"]) for line in lines] == [
        (0, 0),
        (0, 2),
        (1, 0),
        (1, 2),
    ]
    assert all(line["steps"] == 4 and line["seconds"] > 0 for line in lines)
