"""The carry on real processes: equal forwards on every rank, and stagger ranks from meshes and process groups.

Run by torchrun, this file is also the program of the processes; each writes what it saw to a file of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gpusampler.carry import CarryLoop, carry_rank_world, sde_renoise, stagger_rank_and_groups
from gpusampler.errors import ParameterError

GRID = [1.0, 0.75, 0.5, 0.25]
SLOTS, INTERVAL, ROUNDS = 2, 4, 9


def launch(program: str, processes: int, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command += [__file__, program, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.mark.dist
@pytest.mark.timeout(150)
@pytest.mark.skipif(torch.__version__ < "2.7", reason="FSDP2 needs torch 2.7 on CPUs")
def test_forwards_are_equal_on_all_ranks_and_every_rung_is_updated(tmp_path: Path) -> None:
    seen = launch("walk", 2, tmp_path)
    assert [run["stagger"] for run in seen] == [[0, 2], [1, 2]]
    # one forward a call after the two first ones, each of which walks the grid of 4 before its own forward
    assert [run["forwards"] for run in seen] == [[4, 4] + [1] * 16] * 2
    # every forward of the sharded model is counted by the model itself, too
    assert [run["model_forwards"] for run in seen] == [24, 24]
    # stream (rank, slot) starts on rung rank * 2 + slot and is one rung further each round
    for rank, run in enumerate(seen):
        assert run["rungs"] == [(rank * SLOTS + slot + now) % 4 for now in range(ROUNDS) for slot in range(SLOTS)]
        assert run["slots"] == [0, 1] * ROUNDS
        assert len(set(run["sizes"])) > 1
    # gcd(4, 4) = 4: each stream is updated on a single rung, and the four streams share out all four
    assert sorted({rung for run in seen for rung in run["updated"]}) == [0, 1, 2, 3]
    assert [sorted(set(run["updated"])) for run in seen] == [[0, 1], [2, 3]]
    assert seen[0]["weights"] == seen[1]["weights"]


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_stagger_ranks_from_meshes_and_groups(tmp_path: Path) -> None:
    seen = launch("groups", 4, tmp_path)
    inner, outer = [[0, 2], [0, 2], [1, 2], [1, 2]], [[0, 2], [1, 2], [0, 2], [1, 2]]
    expected = {
        "world": [[rank, 4] for rank in range(4)],
        "world, sp_size=2": inner,
        "mesh dp x sp": inner,
        "mesh sp x dp": outer,
        "mesh dp_replicate x dp_shard": [[rank, 4] for rank in range(4)],
        "mesh of one dimension": [[rank, 4] for rank in range(4)],
        "mesh a x b, peers b": inner,
        "mesh a x b, peers none": [[rank, 4] for rank in range(4)],
        "mesh dp x sp, exact shape": [[0, 1]] * 4,
        "consecutive sp_group": inner,
        "strided sp_group": outer,
        "dp_group of inner peers": inner,
        "dp_group of outer peers": outer,
        "sp_group of one": [[rank, 4] for rank in range(4)],
    }
    for name, ranks in expected.items():
        assert [run[name] for run in seen] == ranks, name
    for run in seen:
        assert "has no clear role" in run["error of mesh a x b"]
        assert "'dp_shard_cp' has no clear role" in run["error of mesh dp_shard_cp x sp"]
        assert "needs mesh_dim_names" in run["error of unnamed mesh"]
        assert "'c', which is no dimension" in run["error of peers c"]
        assert "described once" in run["error of mesh and rank"]
        assert "do not tile a world of 4" in run["error of uneven sp_group"]
    assert ["sp_group does not hold this rank" in run["error of another's group"] for run in seen] == [False] * 2 + [
        True
    ] * 2


@pytest.mark.dist
@pytest.mark.timeout(150)
def test_the_example_of_a_real_loop() -> None:
    script = Path(__file__).parent.parent / "examples" / "carry.py"
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 2", "epoch 2"]
    assert "micro-batches of 2 to 8 clips" in lines[0]
    # 16 micro-batches and 2 walks of 3 more; 5; 6 and the walk of the slot that missed its turn; 10 and 2 walks
    assert [line.rpartition("ranks ")[2] for line in lines] == ["[22, 22]", "[27, 27]", "[36, 36]", "[16, 16]"]
    losses = [float(line.partition("loss ")[2].partition(",")[0]) for line in lines]
    assert losses[-1] < losses[0] / 4


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.SiLU(), nn.Linear(16, 4))
        self.count = 0

    def forward(self, x: torch.Tensor, timestep: float) -> torch.Tensor:
        self.count += 1
        return self.layers(torch.cat([x, torch.full((len(x), 1), timestep)], dim=1))  # type: ignore[no-any-return]


def run_walk() -> dict[str, Any]:
    """A sharded student: each forward gathers its weights, so an extra one on a single rank would never return."""
    stagger_rank, groups = stagger_rank_and_groups()
    torch.manual_seed(0)
    student = Denoiser()
    fully_shard(student, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(10 + stagger_rank)
    loop = CarryLoop(
        lambda state, timestep, batch: student(state, timestep),
        GRID,
        start=lambda batch: torch.randn(batch["x"].shape, generator=generator),
        renoise=sde_renoise(generator=generator),
        num_slots=SLOTS,
        stagger_rank=stagger_rank,
        stagger_groups=groups,
        interval=INTERVAL,
    )
    steps, updated = [], []
    for now in range(ROUNDS):
        is_update = now % INTERVAL == 0
        for slot in range(SLOTS):
            size = 1 + (stagger_rank + slot + now) % 3  # uneven over ranks, slots and steps
            with torch.set_grad_enabled(is_update):
                step = loop.step({"x": torch.zeros(size, 4)}, slot=slot, sample_ids=range(size))
            assert len(step.pred) == len(step.sample_ids or ()) == len(step.raw_batch["x"])
            steps.append(step)
            if is_update:
                (step.pred - step.raw_batch["x"]).square().mean().backward()
                updated.append(step.rung)
        if is_update:
            optimizer.step()
            optimizer.zero_grad()
    weights = [p.full_tensor().sum().item() for p in student.parameters()]  # type: ignore[attr-defined]
    return {
        "stagger": [stagger_rank, groups],
        "forwards": [step.forwards for step in steps],
        "model_forwards": student.count,
        "rungs": [step.rung for step in steps],
        "slots": [step.slot for step in steps],
        "sizes": [len(step.sample_ids or ()) for step in steps],
        "updated": updated,
        "weights": weights,
    }


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ParameterError as error:
        return str(error)
    return "none"


def own(lists: list[list[int]]) -> Any:
    """Create a group for each list of ranks, and return the one that holds this rank."""
    groups = [dist.new_group(ranks) for ranks in lists]
    return next(group for ranks, group in zip(lists, groups, strict=True) if dist.get_rank() in ranks)


def run_groups() -> dict[str, Any]:
    def mesh(*names: str) -> Any:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)

    consecutive, strided, uneven = own([[0, 1], [2, 3]]), own([[0, 2], [1, 3]]), own([[0, 3], [1, 2]])
    first = dist.new_group([0, 1])
    return {
        "world": carry_rank_world(),
        "world, sp_size=2": carry_rank_world(sp_size=2),
        "mesh dp x sp": carry_rank_world(mesh=mesh("dp", "sp")),
        "mesh sp x dp": carry_rank_world(mesh=mesh("sp", "dp")),
        "mesh dp_replicate x dp_shard": carry_rank_world(mesh=mesh("dp_replicate", "dp_shard")),
        "mesh of one dimension": carry_rank_world(mesh=init_device_mesh("cpu", (4,))),
        "mesh a x b, peers b": carry_rank_world(mesh=mesh("a", "b"), peer_dims=["b"]),
        "mesh a x b, peers none": carry_rank_world(mesh=mesh("a", "b"), peer_dims=()),
        "mesh dp x sp, exact shape": stagger_rank_and_groups(mesh=mesh("dp", "sp"), exact_shape=True),
        "consecutive sp_group": carry_rank_world(sp_group=consecutive),
        "strided sp_group": carry_rank_world(sp_group=strided),
        "dp_group of inner peers": carry_rank_world(dp_group=strided),
        "dp_group of outer peers": carry_rank_world(dp_group=consecutive),
        "sp_group of one": carry_rank_world(sp_group=own([[0], [1], [2], [3]])),
        "error of mesh a x b": error_of(lambda: carry_rank_world(mesh=mesh("a", "b"))),
        "error of mesh dp_shard_cp x sp": error_of(lambda: carry_rank_world(mesh=mesh("dp_shard_cp", "sp"))),
        "error of unnamed mesh": error_of(lambda: carry_rank_world(mesh=init_device_mesh("cpu", (2, 2)))),
        "error of peers c": error_of(lambda: carry_rank_world(mesh=mesh("a", "b"), peer_dims=["c"])),
        "error of mesh and rank": error_of(lambda: carry_rank_world(0, 4, mesh=mesh("dp", "sp"))),
        "error of uneven sp_group": error_of(lambda: carry_rank_world(sp_group=uneven)),
        "error of another's group": error_of(lambda: carry_rank_world(sp_group=first)),
    }


def main() -> None:
    program, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen = {"walk": run_walk, "groups": run_groups}[program]()
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
