"""Train a byte-level language model on Python's own library, with both faces in one world.

    bireme run -n 4 examples/train_lm.py

Two pipeline stages times two data-parallel replicas. Activations and their gradients ride one-sided
puts with signals between the stages; parameter gradients ride all_reduce between the replicas.
At the end rank 0 repeats the same steps alone and compares the loss of every step.
"""

import argparse
import json
import pathlib
import sysconfig
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

import bireme as bm
from bireme.observe.record import flow_table

DIM, LAYERS, HEADS, CONTEXT, BATCH, MICRO = 128, 6, 4, 64, 16, 2  # BATCH is of the whole world


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.byte, self.place = nn.Embedding(256, DIM), nn.Embedding(CONTEXT, DIM)

    def forward(self, tokens):
        return self.byte(tokens) + self.place(torch.arange(tokens.shape[1]))


class Block(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(DIM, HEADS, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


def build_model(dtype):
    torch.manual_seed(0)
    blocks = [Block() for _ in range(LAYERS)]
    return nn.Sequential(Embed(), *blocks, nn.LayerNorm(DIM), nn.Linear(DIM, 256)).to(dtype)


def load_text():
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(f.read_bytes() for f in files)[: 4 << 20]), dtype=torch.uint8)


def batch_of(text, step, replica, replicas):
    """The inputs and targets of one replica in one step, in MICRO micro-batches."""
    seed = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=seed)
    rows = torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()
    rows = rows.chunk(replicas)[replica]
    return rows[:, :-1].chunk(MICRO), rows[:, 1:].chunk(MICRO)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / MICRO


class Stage:
    """This rank's half of the layers and its links to the rest of the world."""

    def __init__(self, world, dtype):
        self.world = world
        self.stage, self.replica = divmod(world.rank, 2)
        self.peer = (1 - self.stage) * 2 + self.replica  # same replica, other stage
        layers, half = build_model(dtype), LAYERS // 2 + 1
        self.model = layers[:half] if self.stage == 0 else layers[half:]
        parameters = list(self.model.parameters())
        size = sum(p.numel() for p in parameters)

        # Between the stages: one slot and one signal for each micro-batch and direction.
        slot = (MICRO, BATCH // 2 // MICRO, CONTEXT, DIM)
        self.acts = world.symmetric.empty(slot, dtype)
        self.grads = world.symmetric.empty(slot, dtype)
        self.forth, self.back = world.symmetric.signals(MICRO), world.symmetric.signals(MICRO)

        # Between the replicas: all gradients in one symmetric buffer, reduced where they lie.
        # The two stages need different amounts, so each has its own part of the heap.
        self.replicas = world.split(color=self.stage, heap_bytes=8 << 20)
        self.flat = self.replicas.symmetric.zeros(size, dtype)
        parts = self.flat.local.split([p.numel() for p in parameters])
        for p, g in zip(parameters, parts, strict=True):
            p.grad = g.view_as(p)  # backward adds into the symmetric buffer
        self.optimizer = torch.optim.AdamW(parameters, lr=2e-3)

    def send(self, slot, data, signal, number):
        slot.put(data, self.peer, signal=signal, signal_value=number)

    def step(self, number, inputs, targets):
        """Forward and backward of all micro-batches, then the update; returns the mean loss."""
        self.flat.local.zero_()
        losses = torch.zeros(1, dtype=self.flat.local.dtype)
        if self.stage == 0:
            sent = [self.model(x) for x in inputs[:1]]
            with self.world.flow("activations"):
                for m in range(MICRO):
                    self.send(self.acts[m], sent[m].detach(), self.forth[m], number)
                    if m + 1 < MICRO:  # compute the next while the other stage works on this one
                        sent.append(self.model(inputs[m + 1]))
                for m in range(MICRO):
                    self.back[m].wait(number)
                    sent[m].backward(self.grads[m].local)
        else:
            with self.world.flow("activations"):
                for m in range(MICRO):
                    self.forth[m].wait(number)
                    received = self.acts[m].local.requires_grad_()
                    loss = loss_of(self.model(received), targets[m])
                    loss.backward()
                    self.send(self.grads[m], received.grad, self.back[m], number)
                    losses += loss.detach()
        with self.world.flow("gradients"):
            self.replicas.all_reduce(self.flat, op="avg")
        self.optimizer.step()
        return self.replicas.all_reduce(losses, op="avg").item()


def train(world, text, steps, dtype):
    stage, losses, start = Stage(world, dtype), [], time.perf_counter()
    for number in range(1, steps + 1):
        begin, waited = time.perf_counter(), world.record.wait_s
        losses.append(stage.step(number, *batch_of(text, number, stage.replica, 2)))
        took, waited = time.perf_counter() - begin, world.record.wait_s - waited
        if world.rank == 2 and (number == 1 or number % 10 == 0):
            speed = f"{BATCH * CONTEXT / took:6.0f} tokens/s  {waited / took:4.0%} waiting"
            print(f"step {number:4d}  loss {losses[-1]:.4f}  {speed}")
    rate = steps * BATCH * CONTEXT / (time.perf_counter() - start)
    history = world.broadcast(torch.tensor(losses, dtype=torch.float64), root=2)
    return history.tolist(), rate


def train_alone(text, steps, dtype):
    """The same steps in one process, in plain PyTorch: the reference."""
    torch.set_num_threads(torch.get_num_threads() * 2)
    model, losses = build_model(dtype), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        parts = [loss_of(model(x), y) for x, y in zip(*batch_of(text, number, 0, 1), strict=True)]
        sum(parts).backward()
        optimizer.step()
        losses.append(sum(parts).item())
    return losses


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--tolerance", type=float, default=0.01, help="relative, to the reference")
    parser.add_argument("--target", type=float, default=0.6, help="last loss over first loss")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/demo"))
    args = parser.parse_args()
    dtype, text = getattr(torch, args.dtype), load_text()
    with bm.init() as world:
        losses, rate = train(world, text, args.steps, dtype)
        flows = [f for f in world.record.flows_of_all(world) if f.flow]
        if world.rank == 0:
            report(args, losses, rate, flows, train_alone(text, args.steps, dtype))


def report(args, losses, rate, flows, reference):
    worst = max(abs(a - b) / b for a, b in zip(losses, reference, strict=True))
    summary = {
        "loss_first": losses[0], "loss_last": losses[-1], "loss_reference": reference[-1],
        "steps": args.steps, "tokens_per_s": rate, "worst_difference": worst,
        "losses": losses, "losses_reference": reference, "flows": [f.as_dict() for f in flows],
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1))
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; one process: {reference[-1]:.4f};", end=" ")
    print(f"largest difference of a step: {worst:.1e}; summary in {args.out}/summary.json")
    Console(width=110).print(flow_table(flows))
    if worst > args.tolerance or losses[-1] > args.target * losses[0]:
        raise SystemExit("the losses differ from the reference, or did not fall far enough")


if __name__ == "__main__":
    main()
