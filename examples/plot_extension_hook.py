"""Saving memory: use quantities as they come
==========================================

Individual gradients of a batch of N take N times the memory of the parameters. If you want a statistic of them alone,
you need not hold all layers at once: ``extension_hook`` is called with each module as soon as its fields are complete,
and may condense and delete them while the backward pass goes on to the next layer.
"""

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from curvopt import backpack, extend
from curvopt.extensions import BatchGrad
from curvopt.utils.examples import load_one_batch_mnist

torch.manual_seed(0)
images, y = load_one_batch_mnist(256)
x = nn.functional.avg_pool2d(images, 2).flatten(1)  # 14 x 14
widths = [196, 128, 128, 128, 128, 128, 128, 10]
layers = [
    layer
    for i, o in zip(widths, widths[1:], strict=False)
    for layer in (nn.Linear(i, o), nn.ReLU())
]
model, lossfunc = extend(nn.Sequential(*layers[:-1])), nn.CrossEntropyLoss()


class Meter:
    """Condenses individual gradients to their median norm, and notes how much memory they take."""

    def __init__(self, delete: bool):
        self.delete, self.megabytes, self.norms = delete, [], {}

    def __call__(self, module: nn.Module) -> None:
        alive = [p.grad_batch for p in model.parameters() if hasattr(p, "grad_batch")]
        self.megabytes.append(sum(g.numel() * g.element_size() for g in alive) / 1e6)
        squares = sum(p.grad_batch.flatten(1).square().sum(1) for p in module.parameters())
        self.norms[module] = squares.sqrt().median().item()
        if self.delete:
            for p in module.parameters():
                del p.grad_batch


def measure(delete: bool) -> Meter:
    meter = Meter(delete)
    with backpack(BatchGrad(), extension_hook=meter):
        lossfunc(model(x), y).backward()
    for p in model.parameters():
        if not delete:
            del p.grad_batch
    return meter


# %%
# The hook sees the layers in the order of the backward pass, the last first. With deletion the peak is the largest
# single layer; without, it is the sum.
kept, deleted = measure(delete=False), measure(delete=True)
assert kept.norms == deleted.norms
print(f"peak: {max(kept.megabytes):.0f} MB if kept, {max(deleted.megabytes):.0f} MB if deleted")

figure, ax = plt.subplots()
names = [f"layer {i}" for i in range(len(widths) - 1, 0, -1)]
ax.plot(names, kept.megabytes, "o-", label="kept until the end")
ax.plot(names, deleted.megabytes, "o-", label="condensed and deleted by the hook")
ax.set(xlabel="backward pass", ylabel="individual gradients in MB")
ax.legend()
plt.show()
