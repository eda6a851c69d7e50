"""Under torchrun: the ranks find each other from its environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from programs import Ran, clean_environment, told, write

torch = pytest.importorskip("torch", reason="torch is not installed, and so is not torchrun")
pytest.importorskip("torch.distributed.run", reason="this torch has no torchrun")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def torchrun(folder: Path, size: int, text: str, **environment: str) -> Ran:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    done = subprocess.run(
        [*command, str(write(folder, text))],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=clean_environment({"BIREME_RUN_DIR": str(folder), **environment}),
    )
    return Ran(done.returncode, done.stdout, done.stderr, told(folder, size))


def test_collectives_and_one_sided(tmp_path: Path) -> None:
    ran = torchrun(
        tmp_path,
        2,
        """
        import torch
        with bm.init(timeout_s=30) as world:
            assert (world.rank, world.size) == (RANK, 2)
            assert (world.local_rank, world.local_size) == (RANK, 2)
            total = world.all_reduce(torch.full((3,), world.rank + 1.0))
            x, ready = world.symmetric.zeros(3), world.symmetric.signal()
            x.put(np.full(3, world.rank, np.float32), 1 - world.rank, signal=ready)
            ready.wait(1)
            tell([total.tolist(), x.local.tolist()])
        with bm.init(timeout_s=30) as world:
            tell(world.all_reduce(ones(1)).tolist())
        """,
    )
    assert ran.code == 0, ran.stderr
    assert ran.told == [[[[3.0] * 3, [1.0 - rank] * 3], [2.0]] for rank in range(2)], ran
    left = sorted(name for name in os.listdir(tmp_path) if not name.endswith((".told", ".py")))
    assert left == [], "the folder of the meeting is gone"


def test_a_killed_rank(tmp_path: Path) -> None:
    ran = torchrun(
        tmp_path,
        2,
        """
        world = bm.init(timeout_s=30)
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        caught(world.barrier)
        """,
    )
    kind, text = ran.told[0][0]
    assert kind == "PeerLost", ran
    assert "rank 1 (pid " in text, text
    assert ran.code != 0
