"""The programs that reproduce the paper's evidence: what they work out, against values by hand, and
each from end to end on a little data."""

import dataclasses
import json
import math

import appendix_convergence as appendix
import fig2_sequential_emulation as fig2
import fig6_lenet as fig6
import keras
import lenet
import local_steps_study
import numpy as np
import pytest
import report
import results_page
import runs
import search
import simulation
import wire_accuracy

from tf_adasum import core, reference


def peak(at):
    return lambda rate: 0.9 - 0.1 * abs(math.log2(rate / at))


@pytest.mark.parametrize("at", [0.1, 0.05, 0.8, 0.1 * 2**-2.5])
def test_search_finds_a_peak(at):
    assert search.best_rate(peak(at), 0.1, budget=20) == pytest.approx(at)


def test_search_keeps_to_its_budget_and_away_from_what_fails():
    tried = []

    def evaluate(rate):
        tried.append(rate)
        return 0.1 if rate > 0.02 else peak(0.0125)(rate)

    assert search.best_rate(evaluate, 0.1, budget=6) == pytest.approx(0.0125)
    assert tried == pytest.approx([0.1, 0.05, 0.025, 0.0125, 0.00625, 0.0125 / 2**0.5])
    # Of equal budgets, that of one which never fails is not larger.
    tried.clear()
    search.best_rate(lambda rate: tried.append(rate) or 0.5, 0.1, budget=6)
    assert len(tried) <= 6


@dataclasses.dataclass(frozen=True)
class One:
    number: int


def test_runs_go_on_where_they_were_stopped(tmp_path):
    made = []

    def make(number):
        if number == 2 and len(made) == 2:
            raise KeyboardInterrupt
        made.append(number)
        return {"square": number**2}

    def all_runs(**options):
        done = runs.Runs("some", tmp_path, **options)
        return [done.get(One(n), lambda n=n: make(n))["square"] for n in range(4)]

    with pytest.raises(KeyboardInterrupt):
        all_runs()
    assert [run["run"] for run in json.loads((tmp_path / "some.json").read_text())["runs"]] == [
        {"number": 0},
        {"number": 1},
    ]
    made.append("stopped")
    assert all_runs() == [0, 1, 4, 9]
    assert made == [0, 1, "stopped", 2, 3]
    assert all_runs(fresh=True) == [0, 1, 4, 9]
    assert made[5:] == [0, 1, 2, 3]


@dataclasses.dataclass(frozen=True)
class OneMore:
    number: int
    factor: int = 1


def test_a_run_without_a_field_had_its_default(tmp_path):
    runs.Runs("some", tmp_path).get(One(2), lambda: {"times": 2})
    done = runs.Runs("some", tmp_path)
    assert done.get(OneMore(2), lambda: {"times": 0})["times"] == 2
    assert done.get(OneMore(2, factor=3), lambda: {"times": 6})["times"] == 6
    assert not done.has(OneMore(3)) and not done.has(OneMore(3, factor=3))
    # A field without a default has to be there.
    assert not runs.Runs("some", tmp_path).has(
        dataclasses.make_dataclass("Two", ["number", "x"])(2, 1)
    )


def test_spreads():
    spread = runs.Spread.of([0.5, 0.75, 1.0])
    assert spread == runs.Spread(0.75, 0.5, 1.0)
    assert spread.percent() == "75.0 (50.0-100.0)"
    assert runs.Spread.of([0.5]).percent(2) == "50.00"
    # Where 0.1 three times is more than 0.3, a bar from the mean to the most would be negative.
    assert runs.Spread.of([0.1, 0.1, 0.1]) == runs.Spread(0.1, 0.1, 0.1)


def test_data_is_dealt_out():
    # 3 workers x batch 4 x 2 steps use 24 of 29 examples; 3 epochs are 6 steps, in windows of 4.
    first, second = simulation.windows(29, 3, 4, epochs=3, local_steps=4, seed=1)
    assert simulation.steps(29, 3, 4, 3) == 6
    assert first.shape == (3, 4, 4) and second.shape == (3, 2, 4)
    order = np.concatenate([first, second], axis=1)
    for epoch in range(3):
        dealt = order[:, 2 * epoch : 2 * epoch + 2].ravel()
        assert len(set(dealt)) == 24 and set(dealt) <= set(range(29))
    assert not np.array_equal(order[:, :2], order[:, 2:4])
    (again, _), (other, _) = (simulation.windows(29, 3, 4, 3, 4, seed) for seed in (1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_schedule_goes_up_and_down():
    schedule = lenet.WarmupAndDecay(steps=99, warmup=0.2)
    schedule.peak.assign(0.5)
    rates = np.array([float(schedule(step)) for step in range(99)])
    assert rates[19] == pytest.approx(0.5) and rates.argmax() == 19
    assert rates[9] == pytest.approx(0.25) and rates[59] == pytest.approx(0.25)
    assert rates.min() > 0


def little_data(seed=0):
    """28 x 28 images of 10 classes that can be told apart."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, 384).astype(np.int32)
    images = rng.normal(size=(10, 28, 28, 1))[labels] + rng.normal(size=(384, 28, 28, 1))
    return (images[:256].astype(np.float32), labels[:256]), (
        images[256:].astype(np.float32),
        labels[256:],
    )


@pytest.fixture
def no_download(monkeypatch):
    monkeypatch.setattr(lenet, "load", lambda name: little_data())


def test_momentum_is_local_averaged_or_reset():
    model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten()])
    model.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    simulated = simulation.Simulation(model, optimizer, loss, little_data()[0], workers=2)
    start = [v.numpy() for v in model.trainable_variables]
    (window,) = simulation.windows(16, 2, 8, epochs=1, local_steps=1, seed=0)
    momenta = {}
    for inner_state in simulation.INNER_STATES:
        simulated.start(start, inner_state=inner_state)
        simulated.window(window)
        iterations, learning_rate, kernel, _ = simulated.states()
        assert iterations.tolist() == [1, 1]
        assert learning_rate == pytest.approx(0.01)
        momenta[inner_state] = kernel
    local = momenta["local"]
    assert np.abs(local[0] - local[1]).max() > 0.1 * np.abs(local).max() > 0
    np.testing.assert_allclose(momenta["averaged"], [local.mean(0)] * 2, atol=1e-8)
    assert not momenta["reset"].any()
    # With momenta of zero at first the changes are those momenta.
    want = start[0] + core.simulate([[local[0]], [local[1]]])[0][0]
    simulated.start(start)
    simulated.window(window)
    np.testing.assert_allclose(simulated.weights[0], want, atol=1e-7)
    with pytest.raises(ValueError, match="`inner_state` must be one of"):
        simulated.start(start, inner_state="kept")


def test_training_that_diverges_is_told(no_download):
    trainer = lenet.Trainer(lenet.load(""))
    run = lenet.Run(2, "sum", rate=1e30, epochs=6, train_images=256)
    result = trainer.train(run)
    # Three windows in a row whose changes are not finite end it, after the first.
    assert 1 <= result["stopped_at"] < run.steps
    assert 0 <= result["accuracy"] <= 1
    # And what has diverged is not left in the next one.
    fine = trainer.train(dataclasses.replace(run, rate=0.01))
    assert fine["stopped_at"] is None and fine["loss"] < 10


def test_wire_accuracy_from_end_to_end(no_download, tmp_path, capsys):
    given = ["--workers", "2", "--train-images", "256", "--seeds", "2", "--output", str(tmp_path)]
    assert wire_accuracy.main(given) == 0
    figures = json.loads((tmp_path / "wire_accuracy.json").read_text())
    assert len(figures["runs"]) == 2 * len(wire_accuracy.WIRES)
    rows = {(row["wire_dtype"], row["error_feedback"]): row for row in figures["summary"]}
    whole = rows[None, False]["bytes_a_worker_and_sync"]
    for wire in wire_accuracy.WIRES[1:]:
        assert rows[wire]["bytes_a_worker_and_sync"] == pytest.approx(whole / 2, rel=0.02)
        # The same data and start: nearly the same training, but not the same numbers.
        np.testing.assert_allclose(rows[wire]["loss"], rows[None, False]["loss"], rtol=0.1)
        assert rows[wire]["loss"] != rows[None, False]["loss"]
    assert "bfloat16, feedback" in capsys.readouterr().out
    assert (tmp_path / "wire_accuracy.png").stat().st_size > 10_000


def test_differences_are_those_of_the_same_seed():
    def result(seed, accuracy, wire_dtype=None, error_feedback=False):
        run = lenet.Run(4, seed=seed, wire_dtype=wire_dtype, error_feedback=error_feedback)
        return {"run": dataclasses.asdict(run), "accuracy": accuracy, "loss": 1, "sent_bytes": 8}

    results = [result(0, 0.5), result(1, 0.7)]
    for wire in wire_accuracy.WIRES[1:]:
        results += [result(1, 0.75, *wire), result(0, 0.51, *wire)]
    rows = wire_accuracy.summary(results)
    assert rows[1]["difference"] == pytest.approx([0.01, 0.05])
    assert rows[1]["bytes_a_worker_and_sync"] == 2
    assert wire_accuracy.cells(rows)[1][3] == "+3.00 ± 2.00"


def test_figure_6_from_end_to_end(no_download, tmp_path, capsys, monkeypatch):
    given = ["--quick", "--workers", "2", "--train-images", "256", "--output", str(tmp_path)]
    given += ["--search-seeds", "2"]
    assert fig6.main(given) == 0
    first = capsys.readouterr().out
    assert "Adasum, the paper's" in first
    # What is there is not trained again.
    monkeypatch.setattr(lenet.Trainer, "train", None)
    assert fig6.main(given) == 0
    assert capsys.readouterr().out.splitlines()[2:] == first.splitlines()[2:]
    figures = json.loads((tmp_path / "fig6_lenet_quick.json").read_text())
    assert {(p["op"], p["workers"], p["is_tuned"]) for p in figures["points"]} == {
        ("sum", 1, False),
        *((op, 2, is_tuned) for op in fig6.OPS for is_tuned in (False, True)),
    }
    searched = [r["run"]["rate"] for r in figures["runs"] if r["run"]["seed"] >= 1000]
    # Each rate on both seeds.
    assert len(searched) == 2 * 2 * len(fig6.OPS) and all(
        searched.count(r) % 2 == 0 for r in searched
    )
    assert (tmp_path / "fig6_lenet_quick.png").stat().st_size > 10_000


def test_what_figure_6_finds():
    accuracies = {("sum", False): 0.1, ("adasum", False): 0.8, ("sum", True): 0.85}
    points = [
        fig6.Point(workers, op, is_tuned, 0.01, [accuracies.get((op, is_tuned), 0.7)], 0)
        for workers in (16, 32)
        for op in fig6.OPS
        for is_tuned in (False, True)
    ]
    said = fig6.findings(points)
    assert [line.split(":")[0] for line in said] == ["yes", "yes", "yes", "yes", "NO", "NO"]
    assert said[4] == "NO: untuned Adasum beats tuned Sum at 32 (80.0% and 85.0%)"


def test_local_steps_study_from_end_to_end(no_download, tmp_path, capsys):
    given = ["--quick", "--train-images", "256", "--budget", "1", "--local-steps", "16"]
    assert local_steps_study.main([*given, "--output", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert "4 x 16" in table and "average, reset" in table and "*" in table
    cells = json.loads((tmp_path / "local_steps_study_quick.json").read_text())["cells"]
    methods = [*local_steps_study.GRID, *local_steps_study.COMBINATIONS]
    assert [local_steps_study.Cell(**cell).method for cell in cells] == methods
    # The second table has the combinations beside averaging.
    assert table.count("average, averaged ") == 2
    assert table.count("outer momentum by adasum") == 1


def test_where_combinations_are_measured():
    options = local_steps_study.parse(["--workers", "16,32", "--local-steps", "1,4"])
    measured = local_steps_study.configurations(options)
    grid, combinations = local_steps_study.GRID, local_steps_study.COMBINATIONS
    assert len(measured) == len(set(measured)) == 2 * 2 * len(grid) + len(combinations)
    assert {(w, steps) for w, steps, method in measured if method in combinations} == {(16, 4)}


def test_outer_momentum_of_a_simulation():
    # The gradient is constant, so the second combined change is the first one again.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False)])
    data = np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32)
    optimizer = keras.optimizers.SGD(0.25)

    def loss(targets, outputs):
        return keras.ops.mean(outputs @ np.float32([[1], [2]]))

    simulated = simulation.Simulation(model, optimizer, loss, data, workers=2)
    window = np.int32([[[0]], [[1]]])
    for joined_by, second in ("sum", [0.375, 0.75]), ("adasum", [0.1875, 0.375]):
        simulated.start([np.zeros((1, 2), np.float32)], outer_momentum=0.5, joined_by=joined_by)
        simulated.window(window)
        first = np.array([[0.25, 0.5]])
        np.testing.assert_allclose(simulated.weights[0], -first)
        simulated.window(window)
        np.testing.assert_allclose(simulated.weights[0], -first - np.array([second]))
    with pytest.raises(ValueError, match="`joined_by` must be one of"):
        simulated.start([np.zeros((1, 2))], joined_by="mean")


@pytest.mark.parametrize("shape", [(5,), (9, 4), (3, 5, 2, 7)])
def test_adasum_of_units(shape):
    a, b = np.random.default_rng(0).normal(size=(2, *shape))
    b[..., 0] = 0
    want = reference.adasum(a, b)
    if len(shape) > 1:
        units = [reference.adasum(a[..., i], b[..., i]) for i in range(shape[-1])]
        want = np.stack(units, axis=-1)
    np.testing.assert_allclose(simulation.adasum_of_units(a, b), want, rtol=1e-12)


def test_bounds_of_the_appendix():
    equal = np.full(2, 0.5)
    parallel = appendix.turned(np.array([[1.0, 0], [3, 0]]), equal)
    assert (parallel.cosine, parallel.stretch) == pytest.approx((1, 1))
    # E[X] = (1, 1) / 2 and E[a a^T / |a|^2] = I / 2.
    orthogonal = appendix.turned(np.eye(2), equal)
    assert (orthogonal.cosine, orthogonal.stretch) == pytest.approx((1, 1.5))
    # Nearly always a, and rarely what brings the mean to cos^2 = 2/3 with it: the bound is reached.
    a, rare = np.array([1.0, 0]), 1e-6
    mean = np.array([1, math.sqrt(0.5)])
    other = (mean - (1 - rare) * a) / rare
    worst = appendix.turned(np.array([a, other]), np.array([1 - rare, rare]))
    assert worst.cosine == pytest.approx(appendix.SMALLEST_COSINE, abs=1e-5)


def test_the_appendix_is_about_the_core():
    vectors, _ = appendix.random_distribution(np.random.default_rng(0))
    formula = appendix.turned(vectors, np.full(len(vectors), 1 / len(vectors)))
    by_core = appendix.turned_by_core(vectors)
    assert dataclasses.astuple(formula) == pytest.approx(dataclasses.astuple(by_core), abs=1e-9)


def test_rates_of_convergence():
    (row,) = appendix.rates([4], 0.05)
    # A step of a fourth of the gradients against four, and one of all against all.
    assert row["parallel"] == pytest.approx(4, rel=0.1)
    assert row["orthogonal"] == pytest.approx(1, abs=0.01)


def test_appendix_from_end_to_end(tmp_path, capsys):
    given = ["--quick", "--distributions", "50", "--steps", "20", "--levels", "1,2"]
    assert appendix.main([*given, "--workers", "2", "--output", str(tmp_path)]) == 0
    assert "the paper's bound" in capsys.readouterr().out
    figures = json.loads((tmp_path / "appendix_convergence_quick.json").read_text())
    assert figures["random"]["cosine"] >= figures["worst"]["cosine"] - 0.05
    assert appendix.SMALLEST_COSINE <= figures["worst"]["cosine"] < 1


def test_emulation_of_a_quadratic_is_exact():
    # The gradient of a linear model's squared error is linear, so nothing is left out.
    rng = np.random.default_rng(0)
    data = rng.normal(size=(12, 3)).astype(np.float32), rng.normal(size=(12, 1)).astype(np.float32)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    emulation = fig2.Emulation(model, keras.losses.MeanSquaredError(), data)
    batches, rate = np.arange(12, dtype=np.int32).reshape(4, 3), 0.1
    start = [v.numpy() for v in model.trainable_variables]
    update = emulation.update(batches, rate)
    want = [np.zeros_like(w) for w in start]
    for batch in batches:
        emulation.load([w - rate * total for w, total in zip(start, want, strict=True)])
        for total, g in zip(want, emulation.gradient(batch), strict=True):
            total += g.numpy()
    for got, total in zip(update, want, strict=True):
        np.testing.assert_allclose(got, total, rtol=1e-5)


def test_errors_against_the_emulation():
    # Orthogonal: Adasum is the sum; the update is twice that.
    gradients = [[np.array([1.0, 0])], [np.array([0, 1.0])]]
    errors = fig2.errors([np.array([2.0, 2])], gradients)
    assert errors["adasum"] == errors["sum"] == pytest.approx(0.5)
    assert errors["average"] == pytest.approx(0.75)
    assert errors["adasum_scaled"] == pytest.approx(0, abs=1e-12)


def test_figure_2_from_end_to_end(no_download, tmp_path, capsys):
    given = ["--quick", "--every", "3", "--workers", "2", "--train-images", "256"]
    given += ["--output", str(tmp_path)]
    assert fig2.main(given) == 0
    assert "Adasum is nearer than the sum at" in capsys.readouterr().out
    figures = json.loads((tmp_path / "fig2_sequential_emulation_quick.json").read_text())
    assert [point["step"] for point in figures["points"]] == [0, 3, 6]
    # One gradient of two is as it is, so the sum cannot be far off at these rates.
    assert all(point["sum"] < 1 for point in figures["points"])


def test_page_is_made_of_what_is_there(tmp_path):
    assert "##" not in results_page.page(tmp_path, tmp_path)
    provenance = {
        "command": "python benchmarks/x.py",
        "date": "2026-01-02",
        "machine": {"processor": "P", "cores": 2},
        "software": {"tensorflow": "2", "commit": "abc"},
    }
    rows = [
        {
            "workers": 4,
            "wire_dtype": wire_dtype,
            "error_feedback": error_feedback,
            "accuracy": [0.5, 0.6] if error_feedback else [0.5, 0.5],
            "difference": [0, 0],
            "loss": [1, 1],
            "bytes_a_worker_and_sync": 1000,
        }
        for wire_dtype, error_feedback in wire_accuracy.WIRES
    ]
    for name, figures in {
        "wire_accuracy": {"summary": rows},
        "fig6_lenet": {"runs": []},  # not come to its end
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**provenance, **figures}))
    page = results_page.page(tmp_path, tmp_path)
    assert page.count("## ") == 1 and "Figure 6" not in page
    assert "## What deltas in half the bytes cost in accuracy" in page
    assert "`python benchmarks/x.py`, 2026-01-02, P, 2 cores, TensorFlow 2, commit abc." in page
    assert "Takes some" not in page
    # 0, 10, 0, 10 points.
    assert "Error feedback adds +5.00 ± 2.89 points of accuracy (mean of 4 pairs" in page


def test_page_of_this_checkout_is_up_to_date():
    docs = report.ROOT / "docs"
    assert (docs / "results.md").read_text() == results_page.page(docs / "results", docs)
