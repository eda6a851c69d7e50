"""The lessons run as the README says, and the demo's numbers are those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def bireme_run(ranks: int, *args: str, timeout_s: float = 120) -> str:
    """Run a command as the user would and return its output; fail on a bad exit code."""
    command = [sys.executable, "-m", "bireme.cli", "run", "-n", str(ranks), *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_put():
    lines = bireme_run(2, "examples/01_put.py").splitlines()
    assert "[1] rank 1 received [0. 1. 2. 3.]" in lines
    assert {f"[{r}] rank {r} has the sum [0. 1. 2. 3.]" for r in (0, 1)} < set(lines)


def test_readme_shows_the_first_lesson():
    lesson = (ROOT / "examples/01_put.py").read_text().split('"""', 2)[2].strip()
    assert lesson in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nvshmem_hello(ranks):
    out = bireme_run(ranks, "examples/02_nvshmem_hello.py")
    assert ("[1] rank 1: dest[0] = 1.0, put by rank 0" in out) == (ranks > 1)


def demo(out: Path, *args: str) -> tuple[str, dict]:
    pytest.importorskip("torch", reason="torch is not installed: the demo trains with it")
    text = bireme_run(4, "examples/train_lm.py", "--out", str(out), *args, timeout_s=400)
    return text, json.loads((out / "summary.json").read_text())


def test_demo_in_float64_equals_one_process(tmp_path):
    args = ("--steps", "10", "--dtype", "float64", "--tolerance", "1e-9", "--target", "1")
    _, summary = demo(tmp_path, *args)
    losses, alone = np.array(summary["losses"]), np.array(summary["losses_reference"])
    assert losses.shape == alone.shape == (10,)
    assert np.all(np.abs(losses - alone) <= 1e-9 * alone)
    assert losses[-1] < losses[0]


def test_demo_learns_and_shows_its_flows(tmp_path):
    text, summary = demo(tmp_path)
    assert summary["steps"] >= 100
    assert summary["loss_last"] < 0.6 * summary["loss_first"]
    pairs = zip(summary["losses"], summary["losses_reference"], strict=True)
    assert all(abs(a - b) <= 0.01 * b for a, b in pairs)
    flows = {f["flow"]: f for f in summary["flows"]}
    assert flows["activations"]["face"] == "one-sided"
    assert flows["gradients"]["face"] == "collective"
    # Each rank puts 2 micro-batches of 4 x 64 x 128 floats a step, and reduces all its gradients.
    assert flows["activations"]["calls"] == 4 * 2 * summary["steps"]
    assert flows["activations"]["bytes"] == 4 * 2 * summary["steps"] * 4 * 64 * 128 * 4
    assert flows["gradients"]["bytes"] > 4 * 4 * 500_000 * summary["steps"]
    assert "waiting" in text
    assert "GB/s" in text


def test_demo_fails_when_the_losses_differ(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed: the demo trains with it")
    command = [sys.executable, "-m", "bireme.cli", "run", "-n", "4", "examples/train_lm.py"]
    command += ["--steps", "2", "--target", "0.1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "did not fall far enough" in done.stderr


def test_the_demo_is_short_and_the_model_large_enough():
    pytest.importorskip("torch", reason="torch is not installed: the demo trains with it")
    source = (ROOT / "examples/train_lm.py").read_text()
    code = [line for line in source.splitlines() if line.strip() and line.strip()[0] != "#"]
    assert len(code) < 150
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import torch
        import train_lm

        model = train_lm.build_model(torch.float32)
    finally:
        sys.path.pop(0)
    assert sum(p.numel() for p in model.parameters()) >= 1_000_000
