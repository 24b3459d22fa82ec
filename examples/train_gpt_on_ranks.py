"""Trains a GPT that is divided among ranks, with KFACAdamW, as large models are trained.

The model is sharded layer by layer (``fully_shard``), computes in bfloat16, and recomputes its activations in the
backward pass; gradients of several small batches are added up and clipped; checkpoints may be resumed by any number of
ranks. It reads the source code of Python's standard library, byte by byte. On two CPU cores:

    torchrun --nproc-per-node 2 examples/train_gpt_on_ranks.py --steps 60 --folder runs/gpt

and, for 60 more steps, by one rank:

    torchrun --nproc-per-node 1 examples/train_gpt_on_ranks.py --steps 120 --folder runs/gpt
"""

from __future__ import annotations

import argparse
import sysconfig
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from curvopt.optim import KFACAdamW, state_to_load

# ----------------------------------------------------------------------------------------------------------- the model


class Block(nn.Module):
    """Causal attention and two linear layers, each behind a norm; ``[N, T, D] -> [N, T, D]``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes ``[N, T]`` to logits of the next ones ``[N T, 256]``."""

    def __init__(self, dim: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        # every sample looks up the positions itself, so that it has a share of their gradient
        h = self.embedding(x) + self.positions(
            torch.arange(x.shape[1], device=x.device).expand(x.shape)
        )
        for block in self.blocks:
            h = checkpoint(
                block, h, use_reentrant=False
            )  # keeps h, and computes the block once more
        return self.head(self.norm(h).flatten(0, 1))


def sharded(model: GPT, mesh: DeviceMesh, dtype: torch.dtype, compiled: bool) -> GPT:
    """The model, of whose parameters each rank keeps a part; a block has all of them while it computes."""
    inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=inside)
    return fully_shard(model, mesh=mesh, mp_policy=replace(inside, output_dtype=torch.float32))


# ------------------------------------------------------------------------------------------------------------ the data


def source_code() -> Tensor:
    """Python's standard library as bytes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = (
        f
        for f in sorted(library.rglob("*.py"))
        if not {"site-packages", "dist-packages", "test"} & set(f.parts)
    )
    return torch.frombuffer(
        bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8
    )


def batch(text: Tensor, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences and their next bytes, of all ranks: the same ones for any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (size, 1), generator=generator)
    both = text[starts + torch.arange(length + 1)].long()
    return both[:, :-1], both[:, 1:]


# ---------------------------------------------------------------------------------------------------------- checkpoints


def save(folder: Path, step: int, model: nn.Module, optimizer: KFACAdamW) -> None:
    """Each rank writes its part, and rank 0 says at last which step is complete."""
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder / f"step{step}")
    if dist.get_rank() == 0:
        (folder / "latest.part").write_text(str(step))
        (folder / "latest.part").replace(folder / "latest")
    dist.barrier()


def resume(folder: Path, model: nn.Module, optimizer: KFACAdamW) -> int:
    """The step from which training goes on, with the state that ranks have saved then."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    path = folder / f"step{step}"
    # the sizes of curvature follow from the data, so the checkpoint says them
    state = {"model": model.state_dict(), "optimizer": state_to_load(optimizer, path)}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(
            strict=False
        ),  # a rank has the state of the parameters that it owns
    )
    return step


# -------------------------------------------------------------------------------------------------------------- the run


def train(settings: argparse.Namespace) -> None:
    """Trains to the given step; prints the loss over all ranks."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(settings.dim, settings.depth, settings.heads, settings.length).to(device)
    model = sharded(model, mesh, getattr(torch, settings.dtype), settings.compile)
    kept = None if settings.state_dtype is None else getattr(torch, settings.state_dtype)
    optimizer = KFACAdamW(model, lr=settings.lr, state_dtype=kept)
    step, text = resume(settings.folder, model, optimizer), source_code()
    with tqdm(total=settings.steps, initial=step, unit=" steps", disable=rank > 0) as bar:
        while step < settings.steps:
            x, y = (z.to(device) for z in batch(text, step, settings.batch, settings.length))
            mean = torch.zeros((), device=device)
            optimizer.zero_grad()
            for part in range(settings.parts):
                mine = slice(part * ranks + rank, None, settings.parts * ranks)
                loss = F.cross_entropy(model(x[mine]), y[mine].flatten()) / settings.parts
                loss.backward()
                mean += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            optimizer.step()
            step += 1
            dist.all_reduce(mean)
            bar.update()
            if rank == 0 and (step % settings.log_every == 0 or step == settings.steps):
                bar.write(f"step {step}: loss {mean.item() / ranks:.4f}")
            if step % settings.save_every == 0 or step == settings.steps:
                save(settings.folder, step, model, optimizer)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="checkpoints; a run that was begun there goes on",
    )
    parser.add_argument("--steps", type=int, default=60, help="the step at which training ends")
    parser.add_argument(
        "--batch", type=int, default=32, help="sequences of a step, on all ranks together"
    )
    parser.add_argument(
        "--parts",
        type=int,
        default=2,
        help="small batches whose gradients are added up in a step",
    )
    parser.add_argument("--length", type=int, default=128, help="bytes of a sequence")
    parser.add_argument("--dim", type=int, default=128, help="width")
    parser.add_argument("--depth", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention")
    parser.add_argument("--lr", type=float, default=0.015, help="rate of KFACAdamW")
    parser.add_argument("--clip", type=float, default=10.0, help="largest norm of the gradient")
    parser.add_argument(
        "--dtype", default="bfloat16", help="in which layers compute: bfloat16 or float32"
    )
    parser.add_argument(
        "--state-dtype", help="bfloat16 keeps the state of the optimizer in half as many bytes"
    )
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--save-every", type=int, default=30, help="steps between checkpoints")
    parser.add_argument(
        "--log-every", type=int, default=10, help="steps between losses that are printed"
    )
    settings = parser.parse_args(arguments)
    if settings.batch % settings.parts:
        parser.error(
            f"--batch {settings.batch} has to be a multiple of --parts {settings.parts}"
        )
    settings.folder.mkdir(parents=True, exist_ok=True)
    dist.init_process_group()
    try:
        train(settings)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
