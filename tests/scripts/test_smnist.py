"""Sequential MNIST: data, corruptions, classifier, training, report."""

from __future__ import annotations

import gzip
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from efla_data.errors import DataError
from efla_data.tasks.smnist import LEVELS, Corruptions, as_pixels, load_digits, pool, synthetic_digits

from scripts.smnist.__main__ import main
from scripts.smnist.report import compared_rates, gather, half_point, write_report
from scripts.smnist.training import (
    Classifier,
    Member,
    Preparation,
    TrainingPlan,
    accuracy,
    chosen,
    train,
)
from scripts.stacked.modules import initialise
from scripts.stacked.rules import RECURRENT_MIXERS


def test_npz_and_idx_give_the_same_digits(tmp_path: Path) -> None:
    train_set, test_set = synthetic_digits(20, seed=0), synthetic_digits(10, seed=1)
    named = dict(zip(("train_images", "train_labels", "test_images", "test_labels"), (*train_set, *test_set)))
    np.savez(tmp_path / "digits.npz", **named)
    folder = tmp_path / "idx"
    folder.mkdir()
    stems = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte.gz",
        "t10k-labels.idx1-ubyte",
    )
    for stem, array in zip(stems, named.values()):
        data = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        data += array.astype(np.uint8).tobytes()
        (folder / stem).write_bytes(gzip.compress(data) if stem.endswith(".gz") else data)
    one, two = load_digits(str(tmp_path / "digits.npz")), load_digits(str(folder))
    for name in named:
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    (folder / stems[1]).write_bytes(b"\0\0\x0d\1")
    with pytest.raises(DataError, match="unsigned bytes"):
        load_digits(str(folder))
    np.savez(tmp_path / "bad.npz", images=named["train_images"])
    with pytest.raises(DataError, match="expected arrays train_images"):
        load_digits(str(tmp_path / "bad.npz"))
    with pytest.raises(DataError, match="no such file"):
        load_digits(str(tmp_path / "nothing.npz"))


def test_pooling_is_the_mean_of_blocks() -> None:
    images = np.arange(32, dtype=np.uint8).reshape(2, 4, 4)
    assert pool(images, 2)[0].tolist() == [[2, 4], [10, 12]]  # of 2.5, 4.5, 10.5, 12.5, halves to even
    assert as_pixels(pool(images, 1)).shape == (2, 16)
    with pytest.raises(DataError, match="divisor"):
        pool(images, 3)


def test_corruptions() -> None:
    pixels = np.full((50, 400), 0.5, np.float32)
    corruptions = Corruptions(pixels, seed=0)

    def apply(kind: str, level: float) -> np.ndarray:
        return corruptions.apply(kind, level).numpy()

    for kind, neutral in (("dropout", 0.0), ("intensity", 1.0), ("noise", 0.0)):
        np.testing.assert_array_equal(apply(kind, neutral), pixels)
    assert (apply("dropout", 1.0) == 0).all()
    some, more = (apply("dropout", p) for p in (0.3, 0.6))
    assert (some == 0).mean() == pytest.approx(0.3, abs=0.02)
    assert (more[some == 0] == 0).all()  # a superset is dropped
    np.testing.assert_allclose(apply("intensity", 10.0), 5.0)  # not clipped
    noisy = apply("noise", 0.8)
    assert noisy.std() == pytest.approx(0.8, rel=0.02) and noisy.min() < 0
    np.testing.assert_allclose(noisy - 0.5, 2 * (apply("noise", 0.4) - 0.5), atol=1e-6)
    np.testing.assert_array_equal(Corruptions(pixels, seed=0).apply("noise", 0.8).numpy(), noisy)
    assert {kind: (levels[0], levels[-1]) for kind, levels in LEVELS.items()} == {
        "dropout": (0.0, 1.0), "intensity": (1.0, 10.0), "noise": (0.0, 1.0),
    }  # fmt: skip
    with pytest.raises(ValueError, match="within its range"):
        apply("dropout", 1.1)


def test_corrupted_images_are_bit_for_bit_those_of_numpy() -> None:
    """As results measured with the corruptions in numpy had them."""
    pixels = as_pixels(synthetic_digits(20, seed=0)[0])
    generator = np.random.default_rng(7)
    uniform = generator.random(pixels.shape, dtype=np.float32)
    normal = generator.standard_normal(pixels.shape, dtype=np.float32)
    forms = {
        "dropout": lambda level: np.where(uniform < level, np.float32(0), pixels),
        "intensity": lambda level: pixels * np.float32(level),
        "noise": lambda level: pixels + np.float32(level) * normal,
    }
    corruptions = Corruptions(pixels, seed=7)
    for kind, levels in LEVELS.items():
        for level in levels:
            np.testing.assert_array_equal(corruptions.apply(kind, level).numpy(), forms[kind](level))


def test_preparation_clips_then_normalises() -> None:
    pixels = torch.tensor([-1.0, 0.1307, 3.0])
    assert torch.equal(Preparation()(pixels), pixels)
    assert Preparation(clip=True)(pixels).tolist() == pytest.approx([0.0, 0.1307, 1.0])
    assert Preparation(normalise=True)(pixels)[1].item() == pytest.approx(0.0)


@pytest.mark.parametrize("mixer", ["efla", "deltanet"])
def test_classifier_is_the_papers(mixer: str) -> None:
    """Against the recurrence of paper section 4 written out for one image."""
    model = Classifier(mixer, 2, 9)
    initialise(model, [0, 1])
    pixels = torch.rand(1, 3, 9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(pixels)[1, 2]
        m, S = 1, torch.zeros(64, 64)
        for t in range(9):
            x = F.gelu(pixels[0, 2, t] * model.pixel[m] + model.position[m, t])
            q, k, v = (x @ projection.weight[m] for projection in (model.q_proj, model.k_proj, model.v_proj))
            beta = torch.sigmoid(x @ model.gates.beta.weight[m] + model.gates.beta.bias[m, 0])
            if mixer == "deltanet":
                k, a = F.normalize(k, dim=0), beta
            else:
                lam = k @ k
                a = -torch.expm1(-beta * lam) / lam
            S = S - a * torch.outer(k, k @ S) + a * torch.outer(k, v)
        o = S.T @ F.normalize(q, dim=0)
        o = F.layer_norm(o, (64,), model.norm.weight[m], model.norm.bias[m])
        expected = o @ model.head.weight[m] + model.head.bias[m, 0]
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)


def test_mamba2_reads_what_the_whole_sequence_gives() -> None:
    model = Classifier("mamba2", 2, 70)
    initialise(model, [0, 1])
    x, B, C = torch.randn(3, 2, 3, 70, 1, 64, generator=torch.Generator().manual_seed(0))
    dt = torch.randn(2, 3, 70, 1, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model.ssd(x, dt, B, C, "torch")[:, :, -1]
        last = model.ssd.read_last(x, dt, B, C[:, :, -1], "torch")
    torch.testing.assert_close(last, whole, rtol=1e-4, atol=1e-5)


def test_starting_values_are_the_scripts() -> None:
    model = Classifier("efla", 1, 784)
    initialise(model, [0])
    assert (model.gates.beta.bias == -2).all()
    assert model.position.std().item() == pytest.approx(0.02, rel=0.02)
    bound = (6 / 128) ** 0.5
    for projection in (model.q_proj, model.k_proj, model.v_proj):
        assert projection.bias is None and 0.99 * bound < projection.weight.abs().max() <= bound
    assert sum(p.numel() for p in model.parameters()) == 64 + 784 * 64 + 3 * 64 * 64 + 65 + 128 + 650


@pytest.mark.parametrize("mixer", RECURRENT_MIXERS)
def test_every_mixer_trains_and_members_are_independent(mixer: str) -> None:
    images, labels = synthetic_digits(256, seed=0, side=14)
    pixels, target = torch.from_numpy(as_pixels(pool(images, 2))), torch.from_numpy(labels)
    plan = TrainingPlan(batch=32, epochs=2, steps=12)
    members = [Member(0, 3e-3), Member(1, 1e-5)]
    stack, alone = Classifier(mixer, 2, 49), Classifier(mixer, 1, 49)
    curves = train(stack, members, pixels, target, plan, Preparation())
    single = train(alone, members[:1], pixels, target, plan, Preparation())
    assert curves[0]["loss"] == pytest.approx(single[0]["loss"], rel=1e-3)
    assert curves[0]["step"][-1] == 12
    assert curves[0]["loss"][-1] < curves[1]["loss"][-1]
    both = accuracy(stack, pixels, target, Preparation())
    assert accuracy(chosen(stack, [1]), pixels, target, Preparation()) == [both[1]]


def test_half_point() -> None:
    assert half_point([0, 1, 2], [0.8, 0.6, 0.2]) == pytest.approx(1.5)
    assert half_point([1, 2], [0.8, 0.5]) is None


def run(mixer: str, rate: float, seed: int, validation: float) -> dict:
    return {"mixer": mixer, "rate": rate, "seed": seed, "validation_accuracy": validation}


def test_strict_takes_the_best_validated_rate_and_files_must_agree() -> None:
    runs = [run("efla", 1e-3, 0, 0.9), run("efla", 1e-3, 1, 0.5), run("efla", 3e-3, 0, 0.8), run("efla", 3e-3, 1, 0.8)]
    assert compared_rates("strict", runs) == {"efla": 3e-3}
    assert compared_rates("paper", runs) == {"efla": 3e-3}
    assert compared_rates("paper", [run("deltanet", 1e-2, 0, 1.0)]) == {"deltanet": 1e-3}
    one = {"setting": "strict", "images": 1, "plan": 1, "runs": runs[:2]}
    assert gather([one, one | {"runs": runs[1:]}])[1] == sorted(runs, key=lambda r: (r["rate"], r["seed"]))
    with pytest.raises(ValueError, match="differ in plan"):
        gather([one, one | {"plan": 2}])


def test_table_counts_pairs_and_shows_no_spread_of_one_value(tmp_path: Path) -> None:
    def met(mixer: str, seed: int, clean: float, curve: list[float]) -> dict:
        corruptions = {kind: {"level": [1, 2, 3], "accuracy": curve} for kind in LEVELS}
        return run(mixer, 1e-3, seed, 0.5) | {"test_accuracy": clean, "corruptions": corruptions}

    runs = [met("efla", 0, 0.9, [0.9, 0.6, 0.3]), met("efla", 1, 0.8, [0.8, 0.8, 0.8]),
            met("deltanet", 0, 0.7, [0.7, 0.7, 0.7]), met("deltanet", 1, 0.6, [0.6, 0.6, 0.6]),
            met("deltanet", 2, 0.1, [0.1, 0.1, 0.1])]  # fmt: skip
    content = {"setting": "strict", "images": {"tokens": 784, "train": 1, "source": "x"},
               "plan": {"steps": 1, "batch": 1}, "runs": runs}  # fmt: skip
    text = write_report([content], tmp_path, figures=False)
    assert "| 2.50 (1 of 2 never) |" in text and "never (to 3)" in text
    assert "| EFLA above DeltaNet | clean | 2 of 2 | +20.00 ± 0.00 |" in text
    assert "| EFLA above DeltaNet | noise | 1 of 2 | +5.00 ± 21.21 |" in text


@pytest.mark.parametrize("setting", ["paper", "strict"])
def test_committed_tables_follow_from_the_committed_results(setting: str, tmp_path: Path) -> None:
    committed = Path(__file__).parents[2] / "docs" / "results" / "smnist"
    assert main.run([f"replot=[{committed / f'{setting}.json'}]", f"out={tmp_path}", "figures=false"]) == 0
    for ending in ("md", "csv", "json"):
        name = f"{setting}.{ending}"
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes()


@pytest.mark.timeout(280)
@pytest.mark.parametrize("setting", ["paper", "strict"])
def test_command_and_replot(setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = os.environ.get("EFLA_SHARED_DATA")
    source = f"{shared}/mnist/mnist.npz" if shared else "synthetic"
    small = ["grid=pooled", f"setting={setting}", "steps=4", "batch=16", "images.validation=64", "images.test=32",
             "images.corrupted=16", "mixers=[efla,deltanet]", "images.pool=4",
             f"script_rates_only={setting == 'paper'}", "device=cpu",
             f"images.source={source}"]  # fmt: skip
    assert main.run([*small, f"out={tmp_path / 'a'}", "figures=false"]) == 0
    content = json.loads((tmp_path / "a" / f"{setting}.json").read_text())
    assert content["images"]["tokens"] == 49 and len(content["runs"]) == 2
    for result in content["runs"]:
        assert set(result["corruptions"]) == set(LEVELS)
        assert (result["validation_accuracy"] is not None) == (setting == "strict")
        assert result["rate"] == (1e-3 if (setting, result["mixer"]) == ("paper", "deltanet") else 3e-3)
    assert "| EFLA | 0.003 | 1 |" in capsys.readouterr().out
    assert main.run([f"replot=[{tmp_path / 'a' / f'{setting}.json'}]", f"out={tmp_path / 'b'}"]) == 0
    assert (tmp_path / "a" / f"{setting}.md").read_text() == (tmp_path / "b" / f"{setting}.md").read_text()
    assert (tmp_path / "a" / f"{setting}.csv").read_text() == (tmp_path / "b" / f"{setting}.csv").read_text()
    again = json.loads((tmp_path / "b" / f"{setting}.json").read_text())
    assert again == content | {"runs": sorted(content["runs"], key=lambda result: result["mixer"])}
    assert (tmp_path / "b" / f"{setting}-figure1.png").stat().st_size > 1000
    assert (tmp_path / "b" / f"{setting}-figure2.pdf").stat().st_size > 1000
    assert main.run(["mixers=[elfa]"]) == 1


@pytest.mark.timeout(280)
def test_synthetic_digits_are_learnt() -> None:
    """Images pooled to 7 x 7, 49 tokens: a sequence model that reads them gets far beyond chance in 120 steps."""
    images, labels = synthetic_digits(2000, seed=0, side=14)
    pixels, target = torch.from_numpy(as_pixels(pool(images, 2))), torch.from_numpy(labels)
    fresh, fresh_labels = synthetic_digits(300, seed=9, side=14)
    for mixer in ("efla", "deltanet"):
        model = Classifier(mixer, 1, 49)
        train(model, [Member(0, 1e-2)], pixels, target, TrainingPlan(batch=64, epochs=4, steps=120), Preparation())
        held = torch.from_numpy(as_pixels(pool(fresh, 2)))
        assert accuracy(model, held, torch.from_numpy(fresh_labels), Preparation())[0] > 0.7
