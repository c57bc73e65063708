"""Plain loops over several processes, and the examples."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from dist_integrations.common import launch, run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
FSDP2 = pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 needs torch 2.7 on CPUs")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both ranks of one run found."""
    return launch("plain_run.py", tmp_path_factory.mktemp("plain"))


@pytest.mark.dist
@pytest.mark.parametrize(
    "loop", ["no_sync", "sync", *(pytest.param(name, marks=FSDP2) for name in ("fsdp2 deferred", "fsdp2"))]
)
def test_weighted_gradient_is_that_of_one_process(ranks: list[dict], loop: str):
    assert max(rank[loop] for rank in ranks) < 1e-12


@pytest.mark.dist
def test_without_weights_the_gradient_is_another(ranks: list[dict]):
    assert min(rank["unweighted"] for rank in ranks) > 1e-2


@pytest.mark.dist
def test_l14_every_sample_once_an_epoch_and_three_orders(ranks: list[dict]):
    # 48 = 3 * 15 + 3, and the last 3 are filled up to 2 * 3 micro-batches
    for epoch in range(3):
        counts = Counter(row for rank in ranks for rows in rank["epochs"][epoch] for row in rows)
        assert set(counts) == set(range(48))
        assert sum(counts.values()) == 51
        assert [len(rank["epochs"][epoch]) for rank in ranks] == [12, 12]
    steps = [{frozenset(rows) for rows in epoch} for epoch in ranks[0]["epochs"]]
    assert steps[0] != steps[1] != steps[2] != steps[0]


@pytest.mark.dist
def test_l43_l44_a_stateful_loader_of_each_process(ranks: list[dict]):
    for epoch in range(3):
        rows = [row for rank in ranks for rows in rank["stateful"]["epochs"][epoch] for row in rows]
        assert sorted(rows) == list(range(48))
    for rank in ranks:
        epochs = rank["stateful"]["epochs"]
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert (rank["stateful"]["epoch"], rank["stateful"]["rest"]) == (1, epochs[1][3:])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ddp_no_sync", "epoch 2 from micro-batch 4: loss "),
        pytest.param("fsdp2", "epoch 2: loss ", marks=FSDP2),
        ("trainer", "Partition(dp_size=1, grad_accum=2"),
        ("accelerate_loop", "epoch 1 from micro-batch 4: loss "),
        ("lightning_fit", "trained 8 steps"),
        ("torchdata_loader", "epoch 1 from micro-batch 4: weights of 2.000 in 2 steps"),
    ],
)
def test_example(name: str, says: str):
    launcher = ["-m", "torch.distributed.run", "--standalone"] if name in ("ddp_no_sync", "fsdp2") else []
    said = run_script([sys.executable, *launcher, str(EXAMPLES / f"{name}.py")])
    assert says in said
    if "from micro-batch" in says and "loss" in says:
        whole, resumed = (line.split(": loss ")[1] for line in said.splitlines() if line.startswith(says[:7]))
        assert whole == resumed


def test_no_framework_is_imported_by_the_package():
    code = """
import sys
for name in ("accelerate", "transformers", "lightning", "torchdata", "deepspeed"):
    sys.modules[name] = None
import gpusampler, gpusampler.integrations, gpusampler.integrations.deepspeed, gpusampler.integrations.lightning
for name in ("accelerate", "transformers", "torchdata"):
    try:
        __import__("gpusampler.integrations." + name)
    except ModuleNotFoundError as error:
        print(error.name.partition(".")[0])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == ["accelerate", "transformers", "torchdata"]
