"""Initial weights depend on seed and name alone: any device, any order, any number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from efla_lm import EflaForCausalLM, initialise
from tests.models.tiny import MODELS, tiny_config

ROOT = Path(__file__).parents[2]


def fresh(mixer: str, seed: int = 0, **changes: object) -> EflaForCausalLM:
    model = EflaForCausalLM(tiny_config(mixer, **changes))
    initialise(model, seed)
    return model


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_meta_device_gives_the_same_weights(mixer: str, tied: bool) -> None:
    expected = fresh(mixer, tie_word_embeddings=tied).state_dict()
    with torch.device("meta"):
        model = EflaForCausalLM(tiny_config(mixer, tie_word_embeddings=tied))
    model.to_empty(device="cpu")
    torch.manual_seed(123)  # the global generator plays no part
    initialise(model, 0)
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("mixer", MODELS)
def test_seed_and_name_decide(mixer: str) -> None:
    first, same, other = fresh(mixer, 0).state_dict(), fresh(mixer, 0).state_dict(), fresh(mixer, 1).state_dict()
    deeper = fresh(mixer, 0, num_hidden_layers=3).state_dict()
    fixed = ("norm.weight", ".bias", ".D")
    for name, value in first.items():
        assert torch.equal(value, same[name])
        if not name.endswith(fixed):
            assert not torch.equal(value, other[name]), name
        if not name.endswith("out_proj.weight"):  # scaled by the number of blocks
            assert torch.equal(value, deeper[name]), name
    first_block, second_block = (fresh(mixer).model.layers[i].mixer.state_dict() for i in (0, 1))
    assert not any(torch.equal(first_block[k], second_block[k]) for k in first_block if k.endswith("proj.weight"))


def test_checkpoint_wrappers_do_not_change_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = fresh("efla").model.layers[0].mixer.qkv_proj.weight
    model = EflaForCausalLM(tiny_config("efla"))
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    initialise(model, 0)
    assert torch.equal(dict(model.named_parameters())[
        "model.layers.0._checkpoint_wrapped_module.mixer.qkv_proj.weight"], expected)  # fmt: skip


@pytest.mark.parametrize("mixer", MODELS)
@pytest.mark.parametrize("through_transformers", [False, True])
def test_distributions(mixer: str, through_transformers: bool) -> None:
    changes: dict[str, object] = {"hidden_size": 256, "num_heads": 64, "initializer_range": 0.02, "mamba_head_dim": 8}
    torch.manual_seed(0)
    model = EflaForCausalLM(tiny_config(mixer, **changes)) if through_transformers else fresh(mixer, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") or name.endswith(".D"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith(".bias"):
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
        elif name.endswith("A_log"):
            low = 1.0 if mixer == "mamba2" else 0.0
            assert parameter.exp().min() > low - 1e-6 and parameter.exp().max() <= 16.0001
            assert parameter.exp().max() > 12
        elif name.endswith("dt_bias"):
            dt = F.softplus(parameter)
            assert dt.min() >= 0.99e-3 and dt.max() <= 0.101
            assert dt.log().std() > 1.0  # log-uniform over two decades: 1.33
        elif name.endswith("conv.weight") and mixer == "mamba2":
            assert parameter.abs().max() <= 0.5 and parameter.detach().std().item() == pytest.approx(
                0.5 / 3**0.5, rel=0.1
            )
        else:
            scale = 2**-0.5 if name.endswith("out_proj.weight") else 1.0
            assert parameter.detach().std().item() == pytest.approx(0.02 * scale, rel=0.1), name


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from efla_lm import EflaForCausalLM, initialise
from tests.models.tiny import MODELS, tiny_config, tokens

dist.init_process_group("gloo")
full = lambda t: t.full_tensor() if isinstance(t, DTensor) else t
for shape in ((2,), (2, 1), (1, 2)):
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for mixer in MODELS:
        for tied in (False, True):
            config = tiny_config(mixer, tie_word_embeddings=tied, vocab_size=101)  # an odd number of rows
            reference = EflaForCausalLM(config); initialise(reference, 7)
            with torch.device("meta"):
                model = EflaForCausalLM(config)
            for block in model.model.layers:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            model.to_empty(device="cpu")
            initialise(model, 7)
            assert (model.lm_head.weight is model.model.embeddings.weight) == tied
            for (name, value), (other, expected) in zip(model.named_parameters(), reference.named_parameters()):
                assert name == other and isinstance(value, DTensor)
                assert torch.equal(full(value), expected), (shape, mixer, tied, name)
            ids = tokens(2, 9)
            loss = model(ids, targets=ids.roll(-1, 1)).loss
            expected = reference(ids, targets=ids.roll(-1, 1)).loss
            loss.backward(); expected.backward()
            torch.testing.assert_close(loss, expected)
            for (name, value), (_, reference_value) in zip(model.named_parameters(), reference.named_parameters()):
                scale = float(reference_value.grad.abs().max())
                torch.testing.assert_close(full(value.grad), reference_value.grad, rtol=0, atol=1e-5 * scale + 1e-7)

# weights loaded in bf16 have one dtype per model, which is what FSDP2 asks for
for mixer in ("mamba2", "gated_efla", "gated_deltanet"):
    model = EflaForCausalLM(tiny_config(mixer)); initialise(model, 7); model.to(torch.bfloat16)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    ids = tokens(2, 9)
    loss = model(ids, targets=ids.roll(-1, 1)).loss
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite()
dist.barrier()
if dist.get_rank() == 0:
    print("all equal")
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_sharded_models_start_equal_and_learn_equal(tmp_path: Path) -> None:
    """Two gloo processes; sharded, replicated and mixed meshes; tied and untied; bf16 weights."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    paths = [str(ROOT), *filter(None, sys.path)]  # whatever way the packages are found here
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, capture_output=True, text=True, timeout=170, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all equal" in done.stdout
