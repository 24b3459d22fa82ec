"""Optimizers on a small GPT that reads Python's own source code: fixed network, data, batches and numbers of steps.

It is a replica in small of the track of the NanoGPT speedruns on which optimizers alone compete: rotary embeddings, RMS
norm with gains, normalized queries and keys, squared ReLU, capped logits, an untied head that begins at zero, the loss
inside of the model and a sum over tokens. Each optimizer takes the same steps, with a rate that falls linearly over the
last 70 % of its own run; the validation loss is taken at fixed steps. AdamW, schedule-free AdamW, Muon and SOAP have
the best of four rates, chosen with one seed and reported with other ones; curvopt's optimizers have their defaults, and
`KFACAdamW` also its settings for language models. Finished runs are kept by their settings, so a call goes on where
another one has ended.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.timing import RESULTS, kept, machine, save
from curvopt.optim import EKFACSGD, KFACSGD, KFACAdamW

try:
    import pytorch_optimizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "SOAP and schedule-free AdamW come with pytorch_optimizer: pip install '.[bench]'."
    ) from error

Result = dict[str, Any]
#: Bytes are the tokens.
VOCABULARY = 256
#: Logits are between plus and minus this.
CAP = 15.0

# --------------------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True)
class Size:
    """A network, its batches, and how long it is trained."""

    dim: int
    depth: int
    heads: int
    length: int
    batch: int
    steps: int
    every: int  # steps between validations
    validated: int  # sequences of the validation set


SIZES = {
    "tiny": Size(dim=16, depth=1, heads=2, length=16, batch=4, steps=4, every=2, validated=4),
    "cpu": Size(dim=128, depth=4, heads=4, length=128, batch=16, steps=300, every=20, validated=64),
    "gpu": Size(dim=768, depth=8, heads=6, length=1024, batch=64, steps=3000, every=100, validated=256),
}


class Attention(nn.Module):
    """Causal attention with rotary embeddings (Su et al. 2021) of normalized queries and keys."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        q, k = (_rotated(F.rms_norm(z, z.shape[-1:]), *rotation) for z in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat([one * cosine - two * sine, one * sine + two * cosine], -1)


class Block(nn.Module):
    """Attention and two layers with a squared ReLU, each behind an RMS norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2))
        self.attention = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.norms[0](x), rotation)
        return x + self.down(F.relu(self.up(self.norms[1](x))).square())


class GPT(nn.Module):
    """Tokens and next tokens, both ``[N, T]``, to the cross-entropy, summed over all tokens."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.dim)
        self.blocks = nn.ModuleList(Block(size.dim, size.heads) for _ in range(size.depth))
        self.norm, self.head = nn.RMSNorm(size.dim), nn.Linear(size.dim, VOCABULARY, bias=False)
        for block in self.blocks:
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)
        half = size.dim // size.heads // 2
        angles = torch.arange(size.length)[:, None] * 1e-4 ** (torch.arange(half) / half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.rms_norm(self.embedding(x), (self.embedding.embedding_dim,))
        for block in self.blocks:
            h = block(h, (self.cosine, self.sine))
        logits = CAP * torch.tanh(self.head(self.norm(h)).float() / CAP)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum")


# ------------------------------------------------------------------------------------------------------------ the text


@dataclass(frozen=True)
class Text:
    """Source code of Python's standard library as bytes; every tenth file is held out."""

    train: Tensor
    held_out: Tensor

    @classmethod
    def load(cls) -> Text:
        """The text of the Python that runs, the same each time."""
        library = Path(sysconfig.get_paths()["stdlib"])
        files = [f.relative_to(library) for f in library.rglob("*.py")]
        files = [f for f in files if not {"site-packages", "dist-packages"} & set(f.parts)]
        files.sort(key=lambda f: hashlib.sha256(f.as_posix().encode()).digest())  # no folder is held out as a whole
        held_out, train = bytearray(), bytearray()
        for i, f in enumerate(files):
            (train if i % 10 else held_out).extend((library / f).read_bytes())
        return cls(*(torch.frombuffer(part, dtype=torch.uint8) for part in (train, held_out)))

    def batches(self, size: Size, seed: int, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Sequences from anywhere, without end; the same for all optimizers."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - size.length, (size.batch,), generator=generator)
            yield _sequences(self.train, starts, size.length, device)

    def validation(self, size: Size, device: str) -> list[tuple[Tensor, Tensor]]:
        """Sequences at equal distances."""
        starts = torch.linspace(0, len(self.held_out) - size.length - 1, size.validated).long()
        return [_sequences(self.held_out, few, size.length, device) for few in starts.split(size.batch)]


def _sequences(text: Tensor, starts: Tensor, length: int, device: str) -> tuple[Tensor, Tensor]:
    both = text[starts[:, None] + torch.arange(length + 1)].long().to(device)
    return both[:, :-1], both[:, 1:]


# ------------------------------------------------------------------------------------------------------- the optimizers


def adamw(model: GPT, lr: float) -> list[torch.optim.Optimizer]:
    """As for language models."""
    return [torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.0)]


def divided(model: GPT) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and all else."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    return matrices, [p for p in model.parameters() if all(p is not m for m in matrices)]


def muon(model: GPT, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, with 12 iterations; AdamW for embedding, head and gains."""
    matrices, rest = divided(model)
    return [
        torch.optim.Muon(matrices, lr, weight_decay=0.0, ns_steps=12, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def soap(model: GPT, lr: float) -> list[torch.optim.Optimizer]:
    """Adam in the eigenbases of Shampoo."""
    return [pytorch_optimizer.SOAP(model.parameters(), lr, weight_decay=0.0)]


def schedule_free(model: GPT, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW that averages weights in place of a schedule."""
    return [pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr)]


def orthogonalized(model: GPT) -> KFACAdamW:
    """KFACAdamW with its settings for language models: steps of the matrices that Muon takes are orthogonalized."""
    groups = [{"params": each, "orthogonalize": on} for each, on in zip(divided(model), (True, False), strict=True)]
    optimizer = KFACAdamW(groups, lr=0.02, betas=(0.9, 0.95))
    optimizer.attach(model)
    return optimizer


#: Rivals, and the rates from which the best is taken.
TUNED = {
    "AdamW": (adamw, (0.002, 0.004, 0.008, 0.016)),
    "schedule-free AdamW": (schedule_free, (0.005, 0.01, 0.02, 0.04)),
    "Muon": (muon, (0.005, 0.01, 0.02, 0.04)),
    "SOAP": (soap, (0.002, 0.004, 0.008, 0.016)),
}
#: Optimizers that are not tuned, and how long they are trained.
NOT_TUNED = {
    "KFACAdamW": (KFACAdamW, 1.0),
    "KFACAdamW, 0.85 of the steps": (KFACAdamW, 0.85),
    "KFACAdamW, betas=(0.9, 0.95)": (partial(KFACAdamW, betas=(0.9, 0.95)), 1.0),
    "KFACAdamW, orthogonalized inside": (orthogonalized, 1.0),
    "KFACAdamW, orthogonalized inside, 0.85 of the steps": (orthogonalized, 0.85),
    "KFACSGD": (KFACSGD, 1.0),
    "EKFACSGD": (EKFACSGD, 1.0),
}

# ------------------------------------------------------------------------------------------------------------- one run


def train(size: Size, name: str, lr: float | None, seed: int, text: Text, device: str, bar: Any = None) -> list[Result]:
    """Trains; validation loss (nats a byte) and seconds at every few steps, until the run diverges."""
    torch.manual_seed(seed)
    model = GPT(size).to(device)
    fast = device != "cpu"
    if fast:
        for block in model.blocks:
            block.compile()
    if lr is not None:
        optimizers = TUNED[name][0](model, lr)
        steps = size.steps
    else:
        kind, part = NOT_TUNED[name]
        optimizers, steps = [kind(model)], round(part * size.steps)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (steps - step) / (0.7 * steps)))
        for o in optimizers
        if name != "schedule-free AdamW"
    ]
    averaging: list[Any] = [o for o in optimizers if hasattr(o, "eval")]
    batches, validation = text.batches(size, seed, device), text.validation(size, device)
    rows, spent = [], 0.0
    for step in range(1, steps + 1):
        x, y = next(batches)
        start = _clock(device)
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=fast):
            loss = model(x, y)
        try:
            loss.backward()
            for each in (*optimizers, *schedules):
                each.step()
        except RuntimeError as error:  # a gradient that is not finite
            tqdm.write(f"{name} stopped at step {step}: {error}")
            return rows
        spent += _clock(device) - start
        if bar is not None:
            rate = "" if lr is None else f" {lr:g}"
            bar.set_postfix_str(f"{name}{rate}, seed {seed}, step {step} of {steps}", refresh=step % 10 == 0)
        if step % size.every and step < steps:
            continue
        for optimizer in averaging:
            optimizer.eval()
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=fast):
            total = sum(model(*pair).item() for pair in validation)
        for optimizer in averaging:
            optimizer.train()
        tokens = size.validated * size.length
        rows.append(
            {"step": step, "loss": total / tokens, "seconds": spent, "unit": _gradient(size, validation[0], device)}
        )
        spent = 0.0
        if not math.isfinite(total):
            break
    return rows


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(torch.device(device))
    return time.perf_counter()


def _gradient(size: Size, batch: tuple[Tensor, Tensor], device: str) -> float:
    """Seconds of a plain gradient, at this moment."""
    with torch.random.fork_rng():
        model = GPT(size).to(device)
    times = []
    for _ in range(3):
        model.zero_grad()
        start = _clock(device)
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = model(*batch)
        loss.backward()
        times.append(_clock(device) - start)
    return statistics.median(times)


# ------------------------------------------------------------------------------------------------------------- all runs


@dataclass(frozen=True)
class Settings:
    """What is compared, and how."""

    size: Literal["tiny", "cpu", "gpu"] = "cpu"
    """cpu: 0.85 million parameters, 300 steps of 2,048 bytes, one to two minutes a run. gpu: 57 million, 3,000 steps of
    65,536 bytes, in bfloat16 and compiled. tiny: four steps, to see whether everything works."""
    seeds: int = 3
    """Runs that are reported; rates are chosen with another seed."""
    cache: Path = Path("runs/benchmark-language-model")
    """Finished runs; remove it to measure again."""
    out: Path = RESULTS
    """Folder for the results and the figure."""


def rows_of(settings: Settings, name: str, lr: float | None, seed: int, text: Text, bar: Any) -> list[Result]:
    """Rows of a run, which is made unless there is one."""
    size, device = SIZES[settings.size], "cuda" if settings.size == "gpu" else "cpu"
    key = {"size": asdict(size), "name": name, "lr": lr, "seed": seed, "bytes": len(text.train)}
    rows = kept(settings.cache, settings.size, key, lambda: train(size, name, lr, seed, text, device, bar))
    bar.update()
    return rows


def compared(settings: Settings) -> Result:
    """All runs."""
    text, found = Text.load(), {}
    total = sum(len(rates) for _, rates in TUNED.values()) + settings.seeds * (len(TUNED) + len(NOT_TUNED))
    with tqdm(total=total, unit=" runs") as bar:
        best: dict[str, float | None] = dict.fromkeys(NOT_TUNED)
        for name, (_, rates) in TUNED.items():
            scores = {lr: _end(rows_of(settings, name, lr, 0, text, bar)) for lr in rates}
            best[name] = min(scores, key=scores.__getitem__)
            found[name] = {"tried": [[lr, score] for lr, score in scores.items()]}
        for seed in range(1, settings.seeds + 1):  # optimizers in turns, under the same conditions
            for name, lr in best.items():
                runs = found.setdefault(name, {}).setdefault("runs", [])
                runs.append(rows_of(settings, name, lr, seed, text, bar))
                found[name]["lr"] = lr
    return {"size": settings.size, "bytes": len(text.train), "methods": found, "machine": machine()}


def costs(rows: list[Result]) -> list[float]:
    """Cost at each evaluation, in plain gradients."""
    return list(itertools.accumulate(row["seconds"] / row["unit"] for row in rows))


def _end(rows: list[Result]) -> float:
    return rows[-1]["loss"] if rows and math.isfinite(rows[-1]["loss"]) else math.inf


def markdown(result: Result) -> str:
    """A line for each optimizer."""
    methods = result["methods"]
    budget = statistics.fmean(costs(run)[-1] for run in methods["AdamW"]["runs"])
    lines = [
        "| optimizer | rate | validation loss | of each seed | steps | time, of AdamW's |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in sorted(methods.items(), key=lambda item: statistics.fmean(map(_end, item[1]["runs"]))):
        ends = [_end(run) for run in found["runs"]]
        cells = [
            name,
            "not tuned" if found["lr"] is None else f"{found['lr']:g}, best of {len(found['tried'])}",
            f"{statistics.fmean(ends):.3f}",
            ", ".join(f"{loss:.3f}" for loss in ends),
            str(found["runs"][0][-1]["step"]),
            f"{statistics.fmean(costs(run)[-1] for run in found['runs'] if run) / budget:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: Result, path: Path) -> None:
    """Validation loss over steps and over time, of the first seed that is reported."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    methods = result["methods"]
    budget = costs(methods["AdamW"]["runs"][0])[-1]
    figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.2), sharey=True, layout="constrained")
    colours = {"AdamW": "0.2", "schedule-free AdamW": "0.6", "Muon": "tab:brown", "SOAP": "tab:blue"}
    colours |= {"KFACSGD": "tab:orange", "KFACAdamW": "tab:red", "KFACAdamW, orthogonalized inside": "tab:purple"}
    for name, colour in colours.items():
        run = methods[name]["runs"][0]
        losses = [row["loss"] for row in run]
        axes[0].plot([row["step"] for row in run], losses, color=colour, label=name)
        axes[1].plot([cost / budget for cost in costs(run)], losses, color=colour)
    last = min(_end(methods[name]["runs"][0]) for name in colours)
    axes[0].set(xlabel="steps", ylabel="validation loss, nats a byte", ylim=(0.97 * last, 1.8 * last))
    axes[1].set(xlabel="time, of AdamW's run")
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    settings = tyro.cli(Settings, prog="python -m benchmarks.language_model", description=__doc__, args=arguments)
    torch.set_num_threads(1)
    result = compared(settings)
    name = f"language-model-{settings.size}"
    save(settings.out / f"{name}.json", result)
    draw(result, settings.out / f"{name}.png")
    print(f"\n{markdown(result)}\n\nresults: {settings.out}/{name}.json and .png")


if __name__ == "__main__":
    main()
