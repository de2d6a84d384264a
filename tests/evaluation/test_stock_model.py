"""lm-eval's stock `hf` model is the yardstick: the same numbers from the same exported model and the same documents."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from efla_data.corpus.prepare import prepare
from efla_data.corpus.recipe import Recipe
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM

from efla_lm.errors import UserError
from efla_lm.evaluation import checkpoints
from efla_lm.evaluation.harness import HarnessLM
from efla_lm.evaluation.runner import load_tasks, run_tasks
from efla_lm.evaluation.scoring import Scorer
from efla_lm.evaluation.tasks import manager_for
from efla_lm.evaluation.tokens import TokenPolicy
from tests.evaluation.material import (
    CONTEXT,
    PAPER,
    SPLITS,
    local_file,
    make_tokenizer,
    save_export,
    write_task_files,
)

PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


def load_harness(export: Path, batch_size: int | str = "auto") -> HarnessLM:
    model, tokenizer = checkpoints.load(checkpoints.find(str(export)))
    context = checkpoints.context_length(model, tokenizer)
    return HarnessLM(Scorer(model, context, batch_size), TokenPolicy(tokenizer))


def ours(export: Path, data: Path, batch_size: int | str = "auto", **options: Any) -> dict[str, Any]:
    harness = load_harness(export, batch_size)
    task_sets, missing = load_tasks(PAPER, harness.tokenizer, data)
    assert not missing
    return run_tasks(harness, task_sets, bootstrap=0, **options)


def stock(
    export: Path, data: Path, cache: Path, names: list[str] = PAPER, limit: int | None = None, **arguments: Any
) -> dict[str, Any]:
    """The stock tasks by lm-eval's own recipe for local files: overrides inside a group, read by its json builder."""
    group = []
    for name in names:
        splits = {f"{split}_split": None for split in ("training", "validation", "test", "fewshot")}
        files = {"data_files": {SPLITS[name]: str(local_file(data, name))}, "cache_dir": str(cache)}
        source = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": files}
        group.append({"task": name, **source, **splits, f"{SPLITS[name]}_split": SPLITS[name]})
    result = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(export), "dtype": "float32", **arguments},
        tasks=[{"group": "local", "task": group}],
        task_manager=manager_for(names),
        device="cpu",
        batch_size=4,
        limit=limit,
        bootstrap_iters=0,
        log_samples=False,
    )
    assert result is not None
    return result


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any], names: list[str] = PAPER) -> None:
    for name in names:
        for key, value in expected["results"][name].items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr"):
                continue
            ours = found["results"][name][key]
            if metric in PERPLEXITIES:
                assert ours == pytest.approx(value, rel=1e-4), (name, key)
            else:
                assert ours == value, (name, key)
        assert found["n-samples"][name] == expected["n-samples"][name]
        assert found["versions"][name] == expected["versions"][name]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task_files(tmp_path_factory.mktemp("data"), documents=12)


@pytest.mark.parametrize("kind", ["efla", "llama"])
def test_all_ten_tasks_equal_the_stock_model(kind: str, data: Path, tmp_path: Path) -> None:
    export = save_export(tmp_path / "export", kind, bos=False)
    assert_same_numbers(ours(export, data), stock(export, data, tmp_path / "cache"))


def test_with_a_tokenizer_that_adds_bos_only_the_doubled_start_of_rolling_text_differs(
    data: Path, tmp_path: Path
) -> None:
    """The stock model puts BOS before rolling text that its tokenizer has already put BOS before; told not to add it,
    it sends one, as we do."""
    export = save_export(tmp_path / "export", "efla", bos=True)
    found = ours(export, data)
    others = [name for name in PAPER if name != "wikitext"]
    assert_same_numbers(found, stock(export, data, tmp_path / "cache", others), others)
    plain = stock(export, data, tmp_path / "cache", ["wikitext"], add_bos_token=False)
    assert_same_numbers(found, plain, ["wikitext"])


def test_an_export_of_training_without_bos_equals_the_stock_model_in_rolling_text_too(
    data: Path, tmp_path: Path
) -> None:
    """Prepared with a tokenizer that adds BOS by itself and data.bos=false: nobody sends a BOS that training never saw,
    and the token before a text is EOS for the stock model, for ours, and in the token file."""
    make_tokenizer(True).save_pretrained(tmp_path / "source")
    (tmp_path / "text.txt").write_text("stone light under winter")
    recipe = Recipe([str(tmp_path / "text.txt")], tokenizer=str(tmp_path / "source"))
    prepare(recipe, tmp_path / "tokens", processes=1)
    export = save_export(tmp_path / "export", "efla")
    shutil.copytree(tmp_path / "tokens" / "tokenizer", export, dirs_exist_ok=True)
    names = ["wikitext", "lambada_openai", "piqa", "boolq"]
    found = ours(export, data)
    assert_same_numbers(found, stock(export, data, tmp_path / "cache", names), names)
    policy = load_harness(export).policy
    assert not policy.prepend_bos and policy.prefix_id == policy.eos_id == 1


@pytest.mark.parametrize("bos", [False, True])
def test_ids_sent_to_the_model_hold_one_start_token(bos: bool, data: Path, tmp_path: Path) -> None:
    harness = load_harness(save_export(tmp_path / "export", "efla", bos=bos))
    sent: list[list[int]] = []

    def spy(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        sent.extend(kwargs["input_ids"].tolist())

    harness.scorer.model.register_forward_pre_hook(spy, with_kwargs=True)
    harness.scorer.batch_size = 1  # no padding, whose id is that of BOS here
    for name in ("wikitext", "piqa"):
        sent.clear()
        # a context that is cut from the left loses its BOS, as in the stock model: give piqa's prompts room
        harness.scorer.max_length = CONTEXT if name == "wikitext" else 512
        (task_set,), _ = load_tasks([name], harness.tokenizer, data)
        run_tasks(harness, [task_set], bootstrap=0)
        counts = [ids.count(0) for ids in sent]
        assert all(ids.index(0) == 0 for ids in sent if 0 in ids)
        if name == "wikitext":  # windows after a document's first one hold none
            assert sorted(set(counts)) == [0, 1]
            assert counts.count(1) == 12
        else:
            assert set(counts) == {1 if bos else 0}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_numbers_do_not_depend_on_the_batch_size(batch_size: int, data: Path, tmp_path: Path) -> None:
    export = save_export(tmp_path / "export", "gated_efla")
    assert_same_numbers(ours(export, data, batch_size), ours(export, data, "auto"))


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
@pytest.mark.parametrize("kind", ["efla", "llama"])
def test_generation_equals_the_stock_model(kind: str, batch_size: int | str, tmp_path: Path) -> None:
    from lm_eval.api.instance import Instance

    export = save_export(tmp_path / "export", kind)
    greedy = {"until": ["q"], "max_gen_toks": 10, "do_sample": False}
    requests = [
        Instance("generate_until", {}, (prompt, options), n)
        for n, (prompt, options) in enumerate(
            [
                ("river", greedy),
                ("stone light under winter", greedy),
                ("the quiet paper " * 30, greedy),
                ("market garden", {"until": "\n", "max_gen_toks": 6}),
            ]
        )
    ]
    expected = HFLM(pretrained=str(export), device="cpu", dtype="float32", batch_size=1).generate_until(requests)
    assert load_harness(export, batch_size).generate_until(requests) == expected
    assert any(expected)


@pytest.mark.parametrize("kind", ["efla", "llama"])
def test_generation_in_halves_until_it_fits(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.api.instance import Instance

    export, options = save_export(tmp_path / "export", kind), {"until": ["q"], "max_gen_toks": 6, "do_sample": False}
    prompts = ["river", "the quiet paper " * 30, "market garden", "stone light under winter", "salt"]
    requests = [Instance("generate_until", {}, (prompt, options), n) for n, prompt in enumerate(prompts)]
    expected = load_harness(export, 1).generate_until(requests)
    generate, limit, sizes = HarnessLM._generate, 2, list[int]()

    def small_memory(self: HarnessLM, prompts: list[list[int]], options: Any) -> list[str]:
        sizes.append(len(prompts))
        if len(prompts) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, prompts, options)

    monkeypatch.setattr(HarnessLM, "_generate", small_memory)
    assert load_harness(export, "auto").generate_until(requests) == expected
    assert sizes[0] > limit and max(sizes[1:]) > 1
    with pytest.raises(UserError, match=r"batch_size=3 of .* tokens exceeds the memory of cpu; use auto"):
        load_harness(export, 3).generate_until(requests)
    limit = 0
    with pytest.raises(UserError, match="one row of"):
        load_harness(export, "auto").generate_until(requests)
